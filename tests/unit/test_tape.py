"""The event tape: whole lines, also after a kill."""

import json
import math
import multiprocessing
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from app.run.tape import Follower, Tape, read


def test_events_carry_time_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    before = time.time()
    tape = Tape(path)
    tape.write("join", learner="learner-1", incarnation=2)
    tape.write("merge", weights={"learner-1": 0.5}, waits=(0.1, 0.2))
    events, torn = read(path)
    assert torn == 0
    assert events[0]["kind"] == "join"
    assert events[0]["incarnation"] == 2
    assert events[0]["t"] == 0.0
    assert before <= events[0]["at"] <= time.time()
    assert events[1]["t"] == pytest.approx(events[1]["at"] - events[0]["at"])
    assert events[1]["waits"] == [0.1, 0.2]


def test_time_goes_on_across_a_reopening(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"kind": "start", "at": time.time() - 100, "t": 0}) + "\n")
    Tape(path).write("again")
    assert read(path)[0][1]["t"] == pytest.approx(100, abs=5)


def test_values_that_json_lacks_become_null(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    Tape(path).write("step", loss=math.nan, all=[math.inf, {"x": -math.inf}, 1.0])
    line = path.read_text()
    assert "NaN" not in line
    assert read(path)[0][0]["loss"] is None
    assert read(path)[0][0]["all"] == [None, {"x": None}, 1.0]


def test_a_field_that_is_not_json_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    tape = Tape(tmp_path / "events.jsonl")
    with pytest.raises(TypeError):
        tape.write("bad", what=object())
    tape.write("good")
    events, torn = read(tmp_path / "events.jsonl")
    assert ([e["kind"] for e in events], torn) == (["good"], 0)


def test_a_torn_last_line_is_closed_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    Tape(path).write("one")
    with open(path, "a") as file:
        file.write('{"kind": "tw')
    tape = Tape(path)
    tape.write("three")
    tape.write("four")
    events, torn = read(path)
    assert [event["kind"] for event in events] == ["one", "three", "four"]
    assert torn == 1


def test_a_tape_that_starts_torn_can_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\xff\xfe{")
    Tape(path).write("one")
    assert [event["kind"] for event in read(path)[0]] == ["one"]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    tape = Tape(tmp_path / "events.jsonl")
    threads = [
        threading.Thread(target=lambda i=i: [tape.write("x", i=i, text="y" * 5000) for _ in range(50)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events, torn = read(tmp_path / "events.jsonl")
    assert (len(events), torn) == (200, 0)


def test_a_full_disk_loses_no_event(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_write_under_a_limit, args=(tmp_path / "events.jsonl",))
    child.start()
    child.join()
    assert child.exitcode == 0
    events, torn = read(tmp_path / "events.jsonl")
    assert [event["kind"] for event in events] == ["before", "big", "big", "after"]
    assert torn == 1


def _write_under_a_limit(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    tape = Tape(path)
    tape.write("before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))
    for _ in range(2):
        with pytest.raises(OSError):
            tape.write("big", text="y" * 5000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    tape.write("after")


WRITER = """
import sys
from pathlib import Path
from app.run.tape import Tape
tape = Tape(Path(sys.argv[1]))
for i in range(10**9):
    tape.write("x", i=i, text="y" * 3000)
    print(i, flush=True)
"""


def test_a_kill_loses_nothing_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    while int(child.stdout.readline()) < 100:
        pass
    child.kill()
    last = max(map(int, child.stdout.read().split()), default=100)
    child.wait()
    Tape(path).write("after")
    events, torn = read(path)
    numbers = [event["i"] for event in events[:-1]]
    assert numbers == list(range(len(numbers)))
    assert numbers[-1] >= last
    assert torn <= 1
    assert events[-1]["kind"] == "after"


def test_a_follower_reads_each_event_once_and_never_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = Follower(path)
    assert follower.fresh() == []
    tape = Tape(path)
    tape.write("join", learner="learner-0")
    assert [event["kind"] for event in follower.fresh()] == ["join"]
    assert follower.fresh() == []
    with path.open("ab") as file:
        file.write(b'{"kind": "mer')
    assert follower.fresh() == []
    with path.open("ab") as file:
        file.write(b'ge", "at": 1.0}\n')
    assert [event["kind"] for event in follower.fresh()] == ["merge"]
    assert Follower(path).fresh() == []  # starts at the present end
