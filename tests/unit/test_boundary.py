"""What other threads have the training thread do between two steps."""

import threading
import time

import pytest

from actors.boundary import Boundary

DEADLINE_S = 30.0


class Training:
    """A thread that serves when it is told to."""

    def __init__(self):
        self.turn, self.over, self.beats = threading.Event(), threading.Event(), 0
        self.thread = threading.Thread(target=self._run)
        self.boundary = Boundary(self.thread.is_alive)
        self.boundary.beat = self._beat
        self.thread.start()

    def _beat(self):
        self.beats += 1

    def _run(self):
        while not self.over.is_set():
            if self.turn.wait(0.01):
                self.boundary.serve()

    def end(self):
        self.over.set()
        self.thread.join(DEADLINE_S)


@pytest.fixture
def training():
    training = Training()
    yield training
    training.end()


def test_it_is_done_in_the_training_thread_and_only_when_that_serves(training):
    found = []
    asking = threading.Thread(target=lambda: found.append(training.boundary.run(threading.current_thread)))
    asking.start()
    assert not found
    training.turn.set()
    asking.join(DEADLINE_S)
    assert found == [training.thread]


def test_whoever_waits_is_let_go_when_the_training_thread_ends(training):
    asking = threading.Thread(target=training.boundary.run, args=(lambda: None,))
    asking.start()
    training.end()
    asking.join(DEADLINE_S)
    assert not asking.is_alive()


def test_what_nobody_waits_for_any_more_is_not_done(training):
    done = []
    assert training.boundary.run(lambda: done.append(1), timeout_s=0.0) is None
    training.turn.set()
    assert training.boundary.run(lambda: 5) == 5
    assert not done


def test_a_pause_serves_beats_and_ends_when_told_to(training):
    training.end()
    stop, found = threading.Event(), []
    boundary = Boundary(lambda: True)
    boundary.beat = training._beat

    def ask():
        found.append(boundary.run(lambda: 1))
        stop.set()

    threading.Thread(target=ask).start()
    began = time.monotonic()
    boundary.pause(DEADLINE_S, stop)
    assert time.monotonic() - began < DEADLINE_S / 2
    assert found == [1]
    assert training.beats > 0
