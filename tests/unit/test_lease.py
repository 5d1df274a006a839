"""One driver at a time in a store without locks."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from app.run.lease import Lease
from app.run.storage import open_store
from tests.s3 import S3Server

TERM_S = 2.0
RENEW_S = 0.2
DEADLINE_S = 30.0


def lease(location: str, tell: Callable[[str], None] = lambda _: None) -> Lease:
    return Lease(open_store(location), RENEW_S, TERM_S, tell)


def wait_for(look: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not look():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_one_that_lives_is_not_replaced_and_one_that_was_given_back_is_at_once(location: str) -> None:
    told: list[str] = []
    first = lease(location)
    with pytest.raises(BlockingIOError):
        lease(location, told.append)
    assert len(told) == 1
    first.release()
    first.release()
    second = lease(location, told.append)
    assert len(told) == 1
    second.release()
    assert len(open_store(location).names("lease/")) == 1


HOLDER = """
import sys
from app.run.lease import Lease
from app.run.storage import open_store
lease = Lease(open_store(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_kill_frees_it_after_its_term(s3_location: str, s3: S3Server) -> None:
    root = Path(__file__).parents[2]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, s3_location, str(RENEW_S), str(TERM_S)],
        env={**s3.env, "PYTHONPATH": str(root), "PATH": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError):
        lease(s3_location)
    holder.kill()
    holder.communicate()
    killed = time.monotonic()
    lease(s3_location).release()
    assert time.monotonic() - killed >= TERM_S - RENEW_S


def test_of_many_that_start_at_once_one_goes_on(busy_location: str) -> None:
    abandoned = lease(busy_location)
    abandoned._stop.set()  # as if its process were gone
    abandoned._thread.join()
    held: list[Lease] = []
    start = threading.Barrier(6)

    def take() -> None:
        start.wait()
        with suppress(BlockingIOError):
            held.append(lease(busy_location))

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1
    held[0].release()


def test_an_owner_that_was_cut_off_for_too_long_learns_that_it_was_replaced(location: str) -> None:
    old = lease(location)
    old._stop.set()  # it stands still
    old._thread.join()
    new = lease(location)
    old._stop.clear()
    thread = threading.Thread(target=old._renew, daemon=True)  # it goes on
    thread.start()
    wait_for(lambda: old.lost)
    thread.join()
    old.release()
    assert not new.lost
    with pytest.raises(BlockingIOError):
        lease(location)
    new.release()


def test_an_outage_takes_the_lease_from_nobody(s3_location: str, s3: S3Server) -> None:
    held = lease(s3_location)
    with s3.away(), pytest.raises(OSError):
        lease(s3_location)
    with pytest.raises(BlockingIOError):
        lease(s3_location)
    assert not held.lost
    held.release()


def test_a_lease_that_no_one_understands_is_waited_out(location: str) -> None:
    open_store(location).write("lease/000000007.json", b"{")
    held = lease(location)
    assert open_store(location).names("lease/") == ["lease/000000008.json"]
    held.release()
