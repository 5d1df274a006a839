"""What the watch decides from a series of looks."""

from dataclasses import replace

from app.config import SupervisorConfig
from app.diloco.settings import DilocoSettings
from app.run.watch import Action, GiveUp, Lost, Replace, Sight, Watch

POLL_S = 0.5
DILOCO = DilocoSettings(hang_min_s=15.0, hang_steps=20.0)
CONFIG = SupervisorConfig(start_deadline_s=120.0, most_failed_starts=3)
SILENT = Sight(answered=False)
GONE = Sight(answered=False, gone=True)


def stepping(steps: int, step_time: float = 0.1, incarnation: int = 1) -> Sight:
    return Sight(answered=True, incarnation=incarnation, steps=steps, step_time=step_time)


def starting(incarnation: int = 0) -> Sight:
    return Sight(answered=True, incarnation=incarnation)


class Scene:
    """A watch that looks every half second. `do` names what each learner does; the others stand as they are."""

    def __init__(self, learners: int = 1, diloco: DilocoSettings = DILOCO):
        self.now = 0.0
        self.names = tuple(f"learner-{i}" for i in range(learners))
        self.watch = Watch(diloco, CONFIG, self.now)
        self.sights = dict.fromkeys(self.names, SILENT)

    def look(self, **sights: Sight) -> list[Action]:
        """One look, half a second after the one before; `l0` stands for learner-0."""
        self.now += POLL_S
        self.sights |= {f"learner-{name[1:]}": sight for name, sight in sights.items()}
        return self.watch.look(self.sights, self.now)

    def until(self, seconds: float) -> list[tuple[float, Action]]:
        """Look on for so long, nothing changing. Returns what was decided, and when from now."""
        start, found = self.now, []
        while self.now - start < seconds:
            found += [(self.now - start, action) for action in self.look()]
        return found

    def train(self, seconds: float, step_time: float = 0.1) -> list[Action]:
        """All that answer go on for so long."""
        found, start = [], self.now
        while self.now - start < seconds:
            for name, sight in self.sights.items():
                if sight.answered:
                    self.sights[name] = replace(sight, steps=sight.steps + 1, step_time=step_time)
            found += self.look()
        return found


def joined(learners: int = 1, step_time: float = 0.1, diloco: DilocoSettings = DILOCO) -> Scene:
    scene = Scene(learners, diloco)
    assert scene.look(**{f"l{i}": stepping(1, step_time) for i in range(learners)}) == []
    return scene


def test_whoever_steps_is_left_alone() -> None:
    assert joined(3).train(300.0) == []


def test_a_silent_learner_hangs_after_the_least_deadline() -> None:
    ((at, action),) = joined().until(30.0)
    assert action == Replace("learner-0", 1, "hang")
    assert 15.0 < at <= 15.0 + 2 * POLL_S


def test_answers_without_steps_are_no_sign_of_life() -> None:
    scene = joined()
    scene.look(l0=SILENT)
    scene.look(l0=stepping(1))
    ((at, _),) = scene.until(20.0)
    assert at <= 15.0


def test_the_deadline_follows_its_own_step_times() -> None:
    slow = joined(step_time=3.0)
    assert slow.watch.deadline("learner-0") == 60.0
    ((at, _),) = slow.until(70.0)
    assert 60.0 < at <= 60.0 + 2 * POLL_S


def test_every_learner_has_its_own_deadline() -> None:
    scene = Scene(2)
    scene.look(l0=stepping(1, 0.1), l1=stepping(1, 3.0))
    assert [scene.watch.deadline(name) for name in scene.names] == [15.0, 60.0]


def test_a_slow_fleet_stretches_the_deadline() -> None:
    scene = joined(3)
    scene.train(60.0)
    assert scene.watch.deadline("learner-0") == 15.0
    scene.train(5.0, step_time=0.4)  # all of them are four times slower than usual
    assert scene.watch.deadline("learner-0") == 60.0


def test_one_slow_learner_stretches_nothing() -> None:
    scene = joined(3)
    scene.train(60.0)
    scene.look(l2=stepping(500, 0.4))
    assert scene.watch.deadline("learner-0") == 15.0


def test_a_start_may_take_longer() -> None:
    scene = Scene()
    scene.look(l0=starting(1))
    assert scene.watch.deadline("learner-0") == 120.0
    ((at, action),) = scene.until(130.0)
    assert action == Replace("learner-0", 1, "hang")
    assert at > 119.0


def test_a_death_is_reported_once() -> None:
    scene = joined()
    assert scene.look(l0=GONE) == [Lost("learner-0", 1, "died")]
    assert scene.until(60.0) == []


def test_the_restart_after_a_death_has_the_deadline_of_a_start() -> None:
    scene = joined()
    scene.look(l0=GONE)
    scene.look(l0=SILENT)
    assert scene.until(60.0) == []
    assert scene.look(l0=stepping(1, incarnation=2)) == []
    assert scene.look(l0=GONE) == [Lost("learner-0", 2, "died")]


def test_a_death_that_nobody_saw() -> None:
    scene = joined()
    assert scene.look(l0=stepping(1, incarnation=2)) == [Lost("learner-0", 1, "died")]
    assert scene.look(l0=stepping(2, incarnation=2)) == []


def test_a_new_process_that_has_not_joined_tells_of_the_old_ones_death() -> None:
    scene = joined()
    assert scene.look(l0=starting()) == [Lost("learner-0", 1, "died")]
    assert scene.watch.deadline("learner-0") == 120.0
    assert scene.until(60.0) == []


def test_a_new_incarnation_starts_at_no_steps() -> None:
    scene = joined()
    scene.train(120.0)
    scene.look(l0=GONE)
    scene.look(l0=stepping(1, incarnation=2))
    assert scene.train(60.0) == []


def test_a_failure_is_replaced_at_once() -> None:
    scene = joined()
    assert scene.look(l0=replace(stepping(2), error="boom")) == [Replace("learner-0", 1, "failed")]
    assert scene.look(l0=SILENT) == []


def test_a_failed_process_that_answers_once_more_is_not_replaced_twice() -> None:
    scene = joined()
    broken = replace(stepping(2), error="boom")
    assert scene.look(l0=broken) == [Replace("learner-0", 1, "failed")]
    assert scene.look(l0=broken) == []
    assert scene.watch.deadline("learner-0") == 120.0


def test_a_new_process_that_fails_at_once() -> None:
    scene = joined()
    broken = Sight(answered=True, incarnation=2, error="boom")
    assert scene.look(l0=broken) == [Lost("learner-0", 1, "died"), Replace("learner-0", 2, "failed")]


def test_a_fenced_process_that_lives_on_is_replaced() -> None:
    scene = joined()
    scene.look(l0=GONE)  # cut off, not dead: it answers again under an incarnation that was given up
    scene.look(l0=stepping(1))
    ((at, action),) = scene.until(20.0)
    assert action == Replace("learner-0", 1, "hang")
    assert at > 13.0


def test_resting_is_no_hang() -> None:
    scene = joined()
    scene.look(l0=replace(stepping(1), resting=True))
    assert scene.until(300.0) == []
    scene.look(l0=stepping(1))
    ((at, _),) = scene.until(20.0)  # from here on it should step
    assert at > 13.0


def test_hanging_learners_are_replaced_one_at_a_time() -> None:
    scene = joined(3)
    scene.train(30.0)
    scene.look(**dict.fromkeys(("l0", "l1", "l2"), SILENT))
    ((_, first),) = scene.until(60.0)
    assert first == Replace("learner-0", 1, "hang")
    scene.look(l0=starting(2))
    assert scene.until(30.0) == []
    assert scene.look(l0=stepping(1, incarnation=2)) == [Replace("learner-1", 1, "hang")]


def test_a_replacement_that_does_not_come_back_holds_up_the_others_for_a_while_only() -> None:
    scene = joined(2)
    scene.look(l0=SILENT, l1=SILENT)
    found = scene.until(200.0)
    first = next(at for at, action in found if action == Replace("learner-0", 1, "hang"))
    second = next(at for at, action in found if action == Replace("learner-1", 1, "hang"))
    assert 119.0 < second - first < 122.0


def test_starts_that_hang_wait_for_nobody() -> None:
    scene = Scene(3)
    found = scene.until(130.0)
    assert [action for _, action in found] == [Replace(name, 0, "hang") for name in scene.names]
    assert len({at for at, _ in found}) == 1


def test_nobody_is_silent_while_nobody_looks() -> None:
    scene = joined(2)
    scene.train(30.0)
    scene.now += 100.0  # the supervisor itself stood still
    assert scene.look(l0=SILENT) == []
    assert scene.look(l0=stepping(900)) == []
    assert scene.train(30.0) == []


def test_giving_up_needs_every_learner() -> None:
    scene = Scene(2)
    scene.look(l1=stepping(1))
    for incarnation in range(1, 9):
        broken = Sight(answered=True, incarnation=incarnation, error="no such model")
        assert not any(isinstance(action, GiveUp) for action in scene.look(l0=broken))


def test_giving_up_says_why() -> None:
    scene = Scene(2)
    found: list[Action] = []
    for incarnation in range(1, 4):
        assert not any(isinstance(action, GiveUp) for action in found)
        found = scene.look(l1=Sight(answered=True, incarnation=incarnation, error="no such model\n"))
    assert not any(isinstance(action, GiveUp) for action in found)  # learner-0 has not failed yet
    (*_, (at, last)) = scene.until(3 * 121.0)
    assert last == GiveUp("no learner gets to step after 3 starts: no such model")
    assert at > 350.0


def test_a_process_that_dies_at_its_first_step_counts_as_a_failed_start() -> None:
    scene = Scene()
    found: list[Action] = []
    for incarnation in range(1, 4):
        scene.look(l0=starting(incarnation))
        found = scene.look(l0=GONE)
        assert found[0] == Lost("learner-0", incarnation, "died")
    assert isinstance(found[-1], GiveUp)


def test_a_step_makes_up_for_failed_starts() -> None:
    scene = Scene()
    for incarnation in range(1, 12):
        scene.look(l0=stepping(1, incarnation=incarnation) if incarnation % 3 == 0 else starting(incarnation))
        assert scene.look(l0=GONE) == [Lost("learner-0", incarnation, "died")]


def test_a_learner_that_can_not_be_made_is_a_failed_start_each_time() -> None:
    scene = Scene()
    broken = Sight(answered=False, gone=True, error="ModuleNotFoundError: no module named torch")
    for _ in range(CONFIG.most_failed_starts - 1):
        assert scene.look(l0=broken) == []
        assert scene.look(l0=SILENT) == []
    (given_up,) = scene.look(l0=broken)
    assert isinstance(given_up, GiveUp)
    assert "no module named torch" in given_up.reason


def test_a_death_after_steps_is_no_failed_start() -> None:
    scene = joined()
    for incarnation in range(1, CONFIG.most_failed_starts + 2):
        died = Sight(answered=False, gone=True, error="killed")
        assert scene.look(l0=died) == [Lost("learner-0", incarnation, "died")]
        assert scene.look(l0=stepping(1, incarnation=incarnation + 1)) == []


def test_who_has_no_place_hangs_not_and_gets_all_the_time_once_it_has_one() -> None:
    scene = Scene()
    scene.look(l0=Sight(answered=False, placed=False))
    assert scene.until(20 * CONFIG.start_deadline_s) == []
    scene.look(l0=SILENT)
    ((at, action),) = scene.until(1.5 * CONFIG.start_deadline_s)
    assert at >= CONFIG.start_deadline_s - 1.0
    assert isinstance(action, Replace)


def test_who_is_not_looked_at_is_forgotten() -> None:
    scene = joined(2)
    del scene.sights["learner-1"]
    assert scene.train(2 * scene.watch.deadline("learner-0")) == []
    scene.sights["learner-1"] = starting()  # another one of the name
    assert scene.look() == []
