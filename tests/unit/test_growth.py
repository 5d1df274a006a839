"""Pools grow one learner at a time where there is room, shrink when told to, and keep off nodes that come and go."""

import pytest

from app.config import ElasticConfig
from app.run.growth import Add, Growth, Place, Send, Wish, Withdraw

CONFIG = ElasticConfig(request_s=100.0, rest_s=30.0, steady_s=60.0, backoff_s=5.0, backoff_most_s=40.0)
WAITING, PLACED, MOVING = Place.WAITING, Place.PLACED, Place.MOVING


class Scene:
    """Pools a (two learners at first) and b (one), and a cluster of which the test says who has a place."""

    def __init__(self, most_a: int = 2, most_b: int = 1) -> None:
        self.now = 1000.0
        most = {"a": most_a, "b": most_b}
        self.growth = Growth(("learner-0", "learner-1", "learner-2"), most, {"a": 2, "b": 1}, CONFIG)
        self.there: dict[str, Place] = {}
        self.leaving: set[str] = set()

    def look(self, seconds: float = 1.0) -> list[Wish]:
        """One look; what is asked for waits, what is withdrawn is gone, who is sent leaves."""
        self.now += seconds
        wishes = self.growth.look(self.there, self.leaving, self.now)
        for wish in wishes:
            match wish:
                case Add(learner):
                    self.there[learner] = WAITING
                case Withdraw(learner):
                    del self.there[learner]
                case Send(learner):
                    self.leaving.add(learner)
        return wishes

    def place(self, *learners: str) -> None:
        self.there |= dict.fromkeys(learners, PLACED)

    def gone(self, learner: str) -> None:
        del self.there[learner]
        self.leaving.discard(learner)


def grown(most_a: int, most_b: int = 1) -> Scene:
    """All first learners have places."""
    scene = Scene(most_a, most_b)
    scene.look()
    scene.place("learner-0", "learner-1", "learner-2")
    scene.look()
    return scene


def test_the_first_learners_are_wanted_at_once_and_always() -> None:
    scene = Scene()
    assert scene.look() == [Add("learner-0"), Add("learner-1"), Add("learner-2")]
    assert scene.look() == []
    scene.there["learner-1"] = MOVING
    assert scene.look(10_000.0) == []  # Ray moves it
    scene.gone("learner-2")
    assert scene.look() == [Add("learner-2")]


def test_further_ones_are_asked_for_when_the_first_have_places() -> None:
    scene = Scene(3, 2)
    scene.look()
    scene.place("learner-0", "learner-2")
    assert scene.look() == [Add("b-0")]
    scene.place("learner-1")
    assert scene.look() == [Add("a-0")]


def test_a_pool_has_one_request_until_it_is_full_and_pools_do_not_wait_for_each_other() -> None:
    scene = grown(4, 2)
    assert set(scene.there) == {"learner-0", "learner-1", "learner-2", "a-0", "b-0"}
    assert scene.look() == []
    scene.place("a-0")
    assert scene.look() == [Add("a-1")]
    scene.place("a-1")
    assert scene.look() == []
    scene.place("b-0")
    assert scene.look() == []


def test_a_request_that_waits_too_long_rests() -> None:
    scene = grown(3)
    assert scene.there["a-0"] is WAITING
    assert scene.look(CONFIG.request_s - 2) == []
    assert scene.look(2.0) == [Withdraw("a-0")]
    assert scene.look(CONFIG.rest_s - 1) == []
    assert scene.look(1.0) == [Add("a-0")]
    assert scene.look(CONFIG.request_s - 1) == []
    scene.place("a-0")
    assert scene.look(1000.0) == []


def test_who_loses_its_node_is_given_up_and_another_is_asked_for() -> None:
    scene = grown(3)
    scene.place("a-0")
    scene.look()
    scene.look(CONFIG.steady_s)
    scene.there["a-0"] = MOVING
    assert scene.look() == [Withdraw("a-0")]
    assert scene.look() == [Add("a-0")]  # it had been there for long


def test_nodes_that_come_and_go_make_a_pool_wait_longer_and_longer() -> None:
    scene, waits = grown(3), []
    for _ in range(5):
        scene.place("a-0")
        scene.look()
        scene.there["a-0"] = MOVING
        assert scene.look(1.0) == [Withdraw("a-0")]
        since = scene.now
        while scene.look(1.0) != [Add("a-0")]:
            continue
        waits.append(scene.now - since)
    assert waits == [5.0, 10.0, 20.0, 40.0, 40.0]
    scene.place("a-0")
    scene.look()
    scene.look(CONFIG.steady_s)  # one that lasts
    scene.there["a-0"] = MOVING
    scene.look()
    assert scene.look() == [Add("a-0")]


def test_a_node_that_says_that_it_goes_counts_as_well() -> None:
    scene = grown(3)
    scene.place("a-0")
    scene.look()
    scene.growth.lost("a-0", scene.now)
    scene.leaving.add("a-0")
    scene.gone("a-0")
    assert scene.look(CONFIG.backoff_s - 1) == []
    assert scene.look(1.0) == [Add("a-0")]


def test_a_pool_that_shrinks_gives_up_its_request_first_then_its_last_learners() -> None:
    scene = grown(6)
    for name in ("a-0", "a-1", "a-2"):
        scene.place(name)
        scene.look()
    assert scene.there["a-3"] is WAITING
    scene.growth.scale("a", 4)
    assert scene.look() == [Send("a-2", "the pool has shrunk"), Withdraw("a-3")]
    assert scene.look() == []
    scene.gone("a-2")
    assert scene.look() == []
    scene.growth.scale("a", 1)
    assert scene.look() == [Send(x, "the pool has shrunk") for x in ("a-0", "a-1", "learner-1")]
    for name in ("a-0", "a-1", "learner-1"):
        scene.gone(name)
    assert scene.look() == []
    assert scene.there == {"learner-0": PLACED, "learner-2": PLACED}
    scene.growth.scale("a", 3)
    assert scene.look() == [Add("learner-1")]
    assert scene.look() == []
    scene.place("learner-1")
    assert scene.look() == [Add("a-0")]


def test_growing_again_while_one_still_leaves_takes_another_name() -> None:
    scene = grown(3)
    scene.place("a-0")
    scene.look()
    scene.growth.scale("a", 2)
    assert scene.look() == [Send("a-0", "the pool has shrunk")]
    scene.growth.scale("a", 3)
    assert scene.look() == [Add("a-1")]


@pytest.mark.parametrize(("pool", "most", "why"), [("c", 1, "the pools are a, b"), ("a", -1, "0 or more are allowed")])
def test_what_can_t_be_scaled_is_refused(pool: str, most: int, why: str) -> None:
    scene = grown(2)
    with pytest.raises(ValueError, match=why):
        scene.growth.scale(pool, most)
    assert scene.growth.limits == {"a": 2, "b": 1}
