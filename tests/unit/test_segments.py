"""The tape in a store that can't append gives the same events as the file, through kills, takeovers and outages."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.run import segments as module
from app.run import tape
from app.run.segments import Segments, SegmentTape, cut
from app.run.storage import open_store
from tests.s3 import S3Server

DEADLINE_S = 60.0


def wait_for(look: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not look():
        assert time.monotonic() < end
        time.sleep(0.05)


def numbers(url: str) -> list[int]:
    events, torn = tape.read(url)
    assert torn == 0
    return [event["i"] for event in events]


@pytest.fixture
def url(far_location: str) -> str:
    """Where the one file of a tape is to be; what a path does, `test_tape.py` tells."""
    return f"{far_location}/events.jsonl"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of some 40 events."""
    monkeypatch.setattr(module, "SEGMENT_BYTES", 2000)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers look whenever they are asked."""
    monkeypatch.setattr(module, "FOLLOW_S", 0.0)


def write(opened: tape.Tape | SegmentTape, *values: int) -> None:
    for i in values:
        opened.write("x", i=i)


def test_paths_and_urls_give_the_same_events(location: str, tmp_path: Path, small: None) -> None:
    where = f"{location}/events.jsonl"
    assert tape.read(where) == ([], 0)
    first = tape.open_tape(where, 1, tmp_path)
    write(first, *range(100))
    assert first.written(DEADLINE_S)
    first.close()
    second = tape.open_tape(where, 2, tmp_path)
    write(second, *range(100, 150))
    second.close()
    tape.assemble(where)
    events, torn = tape.read(where)
    assert torn == 0
    assert [event["i"] for event in events] == list(range(150))
    assert [event["t"] for event in events] == pytest.approx([event["at"] - events[0]["at"] for event in events])
    assert len(open_store(location).read("events.jsonl").splitlines()) == 150


def test_events_are_in_the_store_soon_without_being_asked_for(url: str, tmp_path: Path) -> None:
    opened = tape.open_tape(url, 1, tmp_path)
    write(opened, 1)
    wait_for(lambda: tape.read(url)[0])
    write(opened, 2)
    wait_for(lambda: len(tape.read(url)[0]) == 2)
    opened.close()


def test_a_segment_grows_to_its_bound_and_the_next_begins(url: str, tmp_path: Path, small: None) -> None:
    opened = tape.open_tape(url, 7, tmp_path)
    for i in range(200):
        write(opened, i)
        if i % 20 == 0:
            assert opened.written(DEADLINE_S)
    opened.close()
    sizes = Segments(url).sizes()
    assert list(sizes) == [f"events/000000007-{n:09d}.jsonl" for n in range(1, len(sizes) + 1)]
    assert len(sizes) > 3
    assert all(2000 <= size < 2100 for size in list(sizes.values())[:-1])
    assert numbers(url) == list(range(200))


def test_cutting_keeps_every_byte_and_every_line_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 10)
    for lines in (b"", b"a\n", b"123456789\n", b"1234567890\n1\n", b"1\n" * 33, b"x" * 50 + b"\n"):
        parts = cut(lines)
        assert b"".join(parts) == lines
        assert all(part.endswith(b"\n") for part in parts)
        assert all(len(part) >= 10 for part in parts[:-1])


def test_a_tape_without_segments_is_read_from_its_file(url: str, tmp_path: Path) -> None:
    store = open_store(url.rpartition("/")[0])
    store.write("events.jsonl", b'{"kind": "x", "at": 1, "i": 5}\n')
    assert numbers(url) == [5]


def test_a_takeover_overwrites_nothing_of_the_one_before(url: str, tmp_path: Path) -> None:
    """Both write at once, on machines of their own."""
    old = tape.open_tape(url, 1, tmp_path / "a")
    write(old, 1, 2)
    assert old.written(DEADLINE_S)
    new = tape.open_tape(url, 2, tmp_path / "b")
    write(new, 4)
    assert new.written(DEADLINE_S)
    write(old, 3)
    old.close()
    new.close()
    assert numbers(url) == [1, 2, 3, 4]


def test_an_outage_keeps_events_here_and_they_arrive_in_order(s3_location: str, s3: S3Server, tmp_path: Path) -> None:
    url = f"{s3_location}/events.jsonl"
    opened = tape.open_tape(url, 1, tmp_path)
    write(opened, 1)
    assert opened.written(DEADLINE_S)
    with s3.away():
        write(opened, 2, 3)
        assert not opened.written(0.2)  # nobody is held up by the store
    write(opened, 4)
    wait_for(lambda: len(tape.read(url)[0]) == 4)
    assert numbers(url) == [1, 2, 3, 4]
    opened.close()


WRITER = """
import sys
from pathlib import Path
from app.run import tape
where, epoch, spool = sys.argv[1:4]
opened = tape.open_tape(where, int(epoch), Path(spool))
for i in range(10**9):
    opened.write("x", i=i, text="y" * 300)
    print(i, flush=True)
"""


def killed_writer(url: str, epoch: int, spool: Path, s3: S3Server, least: int) -> int:
    """Let a process write events, kill it; the last that it knows it has written."""
    env = {**s3.env, "PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""}
    command = [sys.executable, "-c", WRITER, url, str(epoch), str(spool)]
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    while int(child.stdout.readline()) < least:
        pass
    child.send_signal(signal.SIGKILL)
    last = max(map(int, child.stdout.read().split()), default=least)
    child.wait()
    return last


@pytest.mark.parametrize("away", [False, True])
def test_a_kill_loses_nothing_that_was_written(away: bool, s3_location: str, s3: S3Server, tmp_path: Path) -> None:
    """Also of what the store never had: the next syncer on the machine sends it."""
    url = f"{s3_location}/events.jsonl"
    if away:
        s3.failing = lambda method, path: method == "PUT" and "/events/" in path
    last = killed_writer(url, 1, tmp_path, s3, 3000)
    if away:
        assert tape.read(url)[0] == []
    s3.well()
    tape.recover(url, tmp_path)
    tape.recover(url, tmp_path)
    assert list(tmp_path.iterdir()) == []
    events, torn = tape.read(url)
    found = [event["i"] for event in events]
    assert found == list(range(len(found)))
    assert found[-1] >= last
    assert torn <= 1
    after = tape.open_tape(url, 2, tmp_path)
    after.write("after")
    after.close()
    assert tape.read(url)[0][-1]["kind"] == "after"


def test_the_loss_of_the_machine_costs_what_was_not_sent_alone(s3_location: str, s3: S3Server, tmp_path: Path) -> None:
    url = f"{s3_location}/events.jsonl"
    killed_writer(url, 1, tmp_path / "gone", s3, 3000)
    tape.recover(url, tmp_path / "other")
    events, torn = tape.read(url)
    assert torn == 0
    assert [event["i"] for event in events] == list(range(len(events)))


def test_what_a_living_syncer_has_not_sent_is_left_to_it(url: str, tmp_path: Path) -> None:
    opened = tape.open_tape(url, 1, tmp_path)
    write(opened, 1)
    tape.recover(url, tmp_path)
    write(opened, 2)
    opened.close()
    assert numbers(url) == [1, 2]
    tape.recover(url, tmp_path)
    assert numbers(url) == [1, 2]


def test_a_recovery_that_breaks_off_is_made_again(s3_location: str, s3: S3Server, tmp_path: Path) -> None:
    url = f"{s3_location}/events.jsonl"
    spool = tmp_path / "000000003.spool"
    line = b'{"kind": "x", "at": 1, "i": %d}\n'
    spool.write_bytes(line % 1 + line % 2 + b'{"kind": "x", ')
    Segments(url).write(3, 1, line % 1)
    s3.losing = lambda method, _path: method == "PUT"
    with pytest.raises(OSError):
        module.send_left_behind(Segments(url), tmp_path)
    s3.well()
    assert spool.exists()
    tape.recover(url, tmp_path)
    assert not spool.exists()
    events, torn = tape.read(url)
    assert ([event["i"] for event in events], torn) == ([1, 2], 1)


def test_a_follower_reads_each_event_once(url: str, tmp_path: Path, small: None, quick: None) -> None:
    early = tape.Follower(url)
    assert early.fresh() == []
    opened = tape.open_tape(url, 1, tmp_path)
    write(opened, 0)
    assert opened.written(DEADLINE_S)
    late = tape.Follower(url)
    found: list[int] = []
    for i in range(1, 150):
        write(opened, i)
        if i % 10 == 0:
            assert opened.written(DEADLINE_S)
            found += [event["i"] for event in early.fresh()]
    opened.close()
    found += [event["i"] for event in early.fresh()]
    assert found == list(range(150))
    assert [event["i"] for event in late.fresh()] == list(range(1, 150))
    assert early.fresh() == []


def test_a_follower_goes_on_after_an_outage(s3_location: str, s3: S3Server, tmp_path: Path, quick: None) -> None:
    url = f"{s3_location}/events.jsonl"
    opened = tape.open_tape(url, 1, tmp_path)
    follower = tape.Follower(url)
    with s3.away():
        assert follower.fresh() == []
        write(opened, 1)
    opened.close()
    assert [event["i"] for event in follower.fresh()] == [1]
