"""Watching learners: what the supervisor sees of them, and what it decides. Pure: times are passed in.

A learner dies (its process is gone), hangs (no step within a deadline of its own step times) or fails (its process
reports an error). A death is mended by Ray's restart; the other two by ending the process, so that Ray restarts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.config import SupervisorConfig
from app.diloco.clock import Estimate, fleet_stretch, hang_deadline
from app.diloco.settings import DilocoSettings


@dataclass(frozen=True)
class Sight:
    """What one look at a learner showed. `answered` False: its process did not answer in time, or never yet."""

    answered: bool
    gone: bool = False
    """Ray says that the process is not there."""
    placed: bool = True
    """It has a place in the cluster; without one it can do nothing."""
    incarnation: int = 0
    steps: int = 0
    step_time: float = 0.0
    resting: bool = False
    """It was told to stop stepping, or has no data to step on: not its fault."""
    error: str | None = None
    """Why it failed; of one that is gone: why it could not start."""


@dataclass(frozen=True)
class Lost:
    """Tell the syncer that this incarnation is gone; Ray restarts the learner by itself."""

    learner: str
    incarnation: int
    reason: str


@dataclass(frozen=True)
class Replace:
    """End the learner's process, so that Ray starts it anew."""

    learner: str
    incarnation: int
    reason: str


@dataclass(frozen=True)
class GiveUp:
    """No learner gets to step, however often it is started: the run has failed."""

    reason: str


Action = Lost | Replace | GiveUp


@dataclass
class _Track:
    incarnation: int = 0
    steps: int = -1
    """Steps of this incarnation; below 1 it is still starting."""
    changed_at: float = 0.0
    """When it last made a step, joined, or was started again."""
    usual: Estimate = field(default_factory=lambda: Estimate(window=256))
    recent: float = 0.0
    lost: int = 0
    """Newest incarnation that was given up."""
    replaced_at: float | None = None
    """When it was replaced for hanging; None again once it steps."""
    failures: int = 0
    """Starts in a row that ended without a step."""
    error: str = ""


class Watch:
    """Remembers when each learner last made a step."""

    def __init__(self, diloco: DilocoSettings, config: SupervisorConfig, now: float):
        self._diloco, self._config = diloco, config
        self._tracks: dict[str, _Track] = {}
        self._looked_at = now

    def look(self, sights: Mapping[str, Sight], now: float) -> list[Action]:
        """Take one look at all learners and decide."""
        self._forgive(now)
        self._tracks = {learner: self._tracks.get(learner) or _Track(changed_at=now) for learner in sights}
        actions: list[Action] = []
        for learner, sight in sights.items():
            actions += self._see(learner, self._tracks[learner], sight, now)
        actions += [self._replace(learner, "hang", now) for learner in self._hanging(sights, now)]
        most = self._config.most_failed_starts
        if self._tracks and all(track.failures >= most for track in self._tracks.values()):
            error = next((track.error.strip() for track in self._tracks.values() if track.error), "they hang")
            actions.append(GiveUp(f"no learner gets to step after {most} starts: {error}"))
        return actions

    def _forgive(self, now: float) -> None:
        """Nobody is silent while nobody looks: one look after a long pause of the supervisor replaces no one."""
        unseen = now - self._looked_at - self._diloco.hang_min_s / 2
        self._looked_at = now
        if unseen > 0:
            for track in self._tracks.values():
                track.changed_at += unseen

    def _see(self, learner: str, track: _Track, sight: Sight, now: float) -> list[Action]:
        if sight.gone:
            if sight.error is not None and track.steps < 1:  # its process never got as far as to join
                track.failures, track.error, track.changed_at = track.failures + 1, sight.error, now
            return self._died(learner, track, now)
        if not sight.placed:
            track.changed_at = now
        if not sight.answered or 0 < sight.incarnation <= track.lost:
            return []  # silent, or given up already: either it ends now, or it is fenced and will never step again
        actions: list[Action] = []
        if sight.incarnation != track.incarnation:  # another process: 0 before it joins, then a higher number
            actions += self._died(learner, track, now)
        if sight.incarnation > track.incarnation:
            track.incarnation, track.steps, track.changed_at = sight.incarnation, -1, now
        if sight.incarnation == track.incarnation and sight.steps > track.steps:
            track.steps, track.changed_at = sight.steps, now
        if sight.error is not None:
            track.error = sight.error
            return [*actions, self._replace(learner, "failed", now)]
        if sight.steps > 0:
            track.failures, track.replaced_at = 0, None
        if sight.resting:
            track.changed_at = now
        if sight.step_time > 0:
            track.recent = sight.step_time
            track.usual.add(sight.step_time)
        return actions

    def _died(self, learner: str, track: _Track, now: float) -> list[Action]:
        if track.incarnation <= track.lost:
            return []
        self._give_up(track, now)
        return [Lost(learner, track.incarnation, "died")]

    def _hanging(self, sights: Mapping[str, Sight], now: float) -> list[str]:
        """Those to replace: every start that hangs, but of those that were stepping only one at a time.

        What stops several at once is rarely their own fault. The next one waits until the one before steps again, or
        should have.
        """
        late = [learner for learner, sight in sights.items() if self._hangs(learner, sight, now)]
        starting = [learner for learner in late if self._tracks[learner].steps < 1]
        stepping = [learner for learner in late if learner not in starting]
        replaced = [track.replaced_at for track in self._tracks.values() if track.replaced_at is not None]
        busy = any(now - at <= self._config.start_deadline_s for at in replaced)
        longest = [] if busy else sorted(stepping, key=lambda learner: self._tracks[learner].changed_at)[:1]
        return starting + longest

    def _hangs(self, learner: str, sight: Sight, now: float) -> bool:
        silence = now - self._tracks[learner].changed_at
        if sight.answered and 0 < sight.incarnation <= self._tracks[learner].lost:
            return silence > self._diloco.hang_min_s
        return not sight.resting and silence > self.deadline(learner)

    def deadline(self, learner: str) -> float:
        """Seconds without a step after which this learner hangs; longer while it starts and when all are slow."""
        track = self._tracks[learner]
        if track.steps < 1:
            return self._config.start_deadline_s
        stretch = fleet_stretch(
            [other.recent for other in self._tracks.values()], [other.usual.value for other in self._tracks.values()]
        )
        return hang_deadline(track.usual.value, self._diloco.hang_min_s, self._diloco.hang_steps, stretch)

    def _replace(self, learner: str, reason: str, now: float) -> Replace:
        track = self._tracks[learner]
        if reason == "hang" and track.steps >= 1:
            track.replaced_at = now
        self._give_up(track, now)
        return Replace(learner, track.incarnation, reason)

    def _give_up(self, track: _Track, now: float) -> None:
        """Its process is gone or will be: from now on its next start is awaited."""
        if track.steps < 1:
            track.failures += 1
        track.lost, track.steps, track.changed_at = track.incarnation, -1, now
