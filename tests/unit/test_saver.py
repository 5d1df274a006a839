"""Whoever leaves its state with a saver never waits for a store that is away, and loses nothing by it."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from actors.ledger import STATE, Ledger
from app.run.saver import WAIT_S, Saver
from app.run.storage import open_store
from tests.s3 import S3Server

DEADLINE_S = 60.0


def wait_for(look: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not look():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_was_saved_is_there_on_return(location: str) -> None:
    saver = Saver(open_store(location), "state")
    assert saver.load() is None
    for i in range(20):
        wait_for(lambda i=i: saver.save(b"%d" % i))
        assert open_store(location).read("state") == b"%d" % i
    assert Saver(open_store(location), "state").load() == b"19"


def test_an_outage_holds_nobody_up_and_the_newest_arrives(s3_location: str, s3: S3Server) -> None:
    saver = Saver(open_store(s3_location), "state")
    saver.save(b"first")
    with s3.away():
        started = time.monotonic()
        assert not any(saver.save(b"%d" % i) for i in range(1000))
        assert time.monotonic() - started < 5 * WAIT_S
    wait_for(lambda: open_store(s3_location).read("state") == b"999")
    wait_for(lambda: saver.save(b"last"))
    assert open_store(s3_location).read("state") == b"last"


def test_the_ledger_leases_on_through_an_outage_and_a_restart_knows_everything(s3_location: str, s3: S3Server) -> None:
    ledger = Ledger(s3_location, 1, 1000, 10)
    blocks = [ledger.lease("learner-0", 1, 0)]
    with s3.away():
        blocks += [ledger.lease("learner-0", 1, request) for request in range(1, 50)]
    blocks.append(ledger.lease("learner-0", 1, 50))
    assert len({block.block for block in blocks if block}) == 51
    wait_for(lambda: json.loads(open_store(s3_location).read(STATE))["book"]["next_id"] == 51)
    again = Ledger(s3_location, 1, 1000, 10)
    assert again._book.state() == ledger._book.state()


def test_a_disk_that_refuses_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"")  # a file where the folder should be
    saver = Saver(open_store(str(tmp_path / "run")), "state")
    assert not saver.save(b"1")
    (tmp_path / "run").unlink()
    wait_for(lambda: (tmp_path / "run" / "state").exists())
    assert (tmp_path / "run" / "state").read_bytes() == b"1"
