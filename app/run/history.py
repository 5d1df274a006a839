"""A run's facts, read from its event tape: what the summary is made of. Pure.

Events used (all with `at`, unix time): run_started, run_ended, placed, removed, learner (a sample of its counters),
join, first_merge, leave, merge, fault, back, syncer_started, syncer (a sample), finish, final, samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from app.run.attempts import Event, attempts
from app.run.facts import FaultFacts, LearnerFacts, MergeFacts, SyncerFacts
from app.run.final_report import Recovery

BUSY_SHARE = 0.5
"""A learner that was in its steps for this share of the time between two samples was stepping all the time."""

SAMPLES = ("issued", "used", "leased", "returned", "reissued")
"""What the data ledger counts: issued = used + leased + returned; reissued were trained on and returned unmerged."""


@dataclass(frozen=True)
class History:
    """The tape's events, oldest first."""

    events: Sequence[Event]

    def of(self, kind: str) -> list[Event]:
        """Events of one kind."""
        return [event for event in self.events if event["kind"] == kind]

    @property
    def started_at(self) -> float:
        """Start of the run's first attempt; 0 when nothing happened."""
        return float(self.events[0]["at"]) if self.events else 0.0

    @property
    def ended_at(self) -> float:
        """Time of the last event; 0 when nothing happened."""
        return float(self.events[-1]["at"]) if self.events else 0.0

    @property
    def wall_s(self) -> float:
        """Seconds that the run was alive, over all its attempts."""
        return sum(attempt[-1]["at"] - attempt[0]["at"] for attempt in attempts(self.events))

    def merges(self) -> tuple[MergeFacts, ...]:
        """All merges."""
        return tuple(MergeFacts(m["at"], len(m["contains"]), m["live"]) for m in self.of("merge"))

    def samples(self) -> dict[str, int] | None:
        """The data ledger's account of all samples, as of the last end of the run."""
        told = self.of("samples")
        return {name: told[-1][name] for name in SAMPLES} if told else None

    def first_step_at(self) -> float | None:
        """When the first learner made its first step, as far as the samples tell."""
        stepping = [interval for learner in self.learners() for interval in self._stepping(learner)]
        return min((start for start, _ in stepping), default=None)

    def budget_at(self) -> float | None:
        """When the budget was reached; in the last attempt, where a resumed run has a larger one.

        A syncer that is restarted in the last round finds it reached once more.
        """
        for attempt in reversed(attempts(self.events)):
            reached = _first(attempt, 0.0, kind="finish", reason="budget")
            if reached is not None:
                return float(reached["at"])
        return None

    def learners(self) -> list[str]:
        """Every learner that joined or was placed."""
        return sorted({e["learner"] for e in (*self.of("placed"), *self.of("join"))})

    def learner(self, name: str, totals: tuple[int, int]) -> LearnerFacts:
        """One learner; `totals` are its (steps, tokens) over all incarnations as the syncer counted them."""
        joins = [event for event in self.of("join") if event["learner"] == name]
        samples = self._samples(name)
        return LearnerFacts(
            pool=joins[-1]["pool"] if joins else "",
            incarnations=len(joins),
            steps=totals[0],
            tokens=totals[1],
            step_s=sum(
                (new["steps"] - old["steps"]) * new["step_time"] for run in samples for old, new in pairwise(run)
            ),
            allocated_s=self._allocated(name),
            stepping=tuple(self._stepping(name)),
            recoveries_s=tuple(r.total_s for r in self.recoveries() if r.target == name and r.total_s is not None),
        )

    def syncer(self) -> SyncerFacts:
        """The syncer, over all its incarnations."""
        by_epoch = {event["epoch"]: event for event in self.of("syncer")}
        return SyncerFacts(
            incarnations=len(self.of("syncer_started")),
            cpu_s=sum(event["cpu_s"] for event in by_epoch.values()),
            merge_s=sum(event["merge_s"] for event in by_epoch.values()),
            recoveries_s=tuple(r.total_s for r in self.recoveries() if r.target == "syncer" and r.total_s is not None),
        )

    def traffic(self, what: str) -> int:
        """Bytes `up`, `down`, `up_fp32` or `down_fp32`, over all the syncer's incarnations."""
        by_epoch = {event["epoch"]: event for event in self.of("syncer")}
        return sum(event["traffic"][what] for event in by_epoch.values())

    def faults(self) -> tuple[FaultFacts, ...]:
        """Every fault with its recovery."""
        return tuple(
            FaultFacts(
                fault["fault"],
                fault["target"],
                fault["struck_at"] - self.started_at,
                self._recovery(fault).total_s,
            )
            for fault in self._faults()
        )

    def _faults(self) -> list[Event]:
        """Faults, each once: an event that the syncer may not have taken is sent again.

        A syncer that was taken over from has had one, also where nobody lived to tell: its node had the supervisor too.
        """
        told = list({(fault["target"], fault["struck_at"]): fault for fault in self.of("fault")}.values())
        known = {(fault["target"], fault["incarnation"]) for fault in told}
        return told + [
            {"fault": "died", "target": "syncer", "incarnation": new["epoch"] - 1, "struck_at": new["silent_since"]}
            for new in self.of("syncer_started")
            if "silent_since" in new and ("syncer", new["epoch"] - 1) not in known
        ]

    def recoveries(self) -> tuple[Recovery, ...]:
        """Every fault with the phases of its recovery."""
        return tuple(self._recovery(fault) for fault in self._faults())

    def _recovery(self, fault: Event) -> Recovery:
        kind, target = fault["fault"], fault["target"]
        if target == "syncer":
            return self._syncer_recovery(fault)
        if target in ("ledger", "supervisor", "disk"):
            merged = _first(self.of("merge"), fault["ends_at"]) if target == "disk" else None
            well = merged or _first(self.of("back"), fault["struck_at"], target=target)
            return Recovery(kind, target, {}, None if well is None else well["at"] - fault["struck_at"])
        struck = float(fault["struck_at"])
        incarnation = fault["incarnation"]
        joins = (e for e in self.of("join") if e["learner"] == target and e["incarnation"] > incarnation)
        join = next(joins, None)
        thawed = float(fault.get("ends_at", struck))
        if thawed > struck:  # frozen: the same process may go on
            back = _first_merge_of(self.of("merge"), thawed, target, incarnation)
            if back is not None and (join is None or back < join["at"]):
                return Recovery(kind, target, {}, back - struck)
        if join is None:
            return Recovery(kind, target, {}, None)
        struck = min(struck, join["timeline"]["actor"])  # a death that was noticed after the new process had started
        merged = _first(self.of("first_merge"), join["at"], learner=target)
        phases = self._phases(fault, struck, join)
        if merged is not None:
            phases["first merge"] = merged["at"] - join["at"]
        return Recovery(kind, target, phases, None if merged is None else merged["at"] - struck)

    def _phases(self, fault: Event, struck: float, join: Event) -> dict[str, float]:
        """From the fault to the join, by the start-up times that the new process told."""
        timeline = join["timeline"]
        seen = _first(self.of("leave"), struck, learner=fault["target"], incarnation=fault["incarnation"])
        detected = min(seen["at"] if seen else join["at"], timeline["actor"])
        return {
            "detect": detected - struck,
            "start": timeline["actor"] - detected,
            "import": timeline["imported"] - timeline["actor"],
            "build": timeline["built"] - timeline["imported"],
            "join": join["at"] - timeline["built"],
        }

    def _syncer_recovery(self, fault: Event) -> Recovery:
        struck = float(fault["struck_at"])
        back = _first(self.of("syncer_started"), struck)
        thawed = float(fault.get("ends_at", struck))
        if thawed > struck:  # frozen: the same process may go on
            merged = _first(self.of("merge"), thawed)
            if merged is not None and (back is None or merged["at"] < back["at"]):
                return Recovery(fault["fault"], "syncer", {}, merged["at"] - struck)
        merged = None if back is None else _first(self.of("merge"), back["at"])
        phases = {} if back is None else {"start": back["at"] - struck}
        if back is not None and merged is not None:
            phases["first merge"] = merged["at"] - back["at"]
        return Recovery(fault["fault"], "syncer", phases, None if merged is None else merged["at"] - struck)

    def _samples(self, name: str) -> list[list[Event]]:
        """The learner's samples, a list for each incarnation, each from a start at 0 steps."""
        runs: dict[int, list[Event]] = {}
        for event in self.of("learner"):
            if event["learner"] == name:
                run = runs.setdefault(event["incarnation"], [])
                if not run:
                    begun = event["at"] - event["steps"] * event["step_time"]
                    run.append({"at": begun, "steps": 0, "step_time": event["step_time"]})
                run.append(event)
        return list(runs.values())

    def _stepping(self, name: str) -> list[tuple[float, float]]:
        """When it made steps, as far as the samples tell: between two of them all the time, if it made enough steps
        for that, else (it was frozen, or starved) only as long as its steps take, up to the second one.
        """
        intervals = []
        for old, new in (pair for run in self._samples(name) for pair in pairwise(run)):
            seconds = (new["steps"] - old["steps"]) * new["step_time"]
            if seconds > 0:
                all_the_time = seconds >= BUSY_SHARE * (new["at"] - old["at"])
                intervals.append((old["at"] if all_the_time else new["at"] - seconds, new["at"]))
        return intervals

    def _allocated(self, name: str) -> float:
        """While it has a place: from each placement until that is given back, at the latest when the attempt's last
        round ends, as the learners are ended then.
        """
        total = 0.0
        for attempt in attempts(self.events):
            end = (_first(attempt, 0.0, kind="ended") or attempt[-1])["at"]
            since: float | None = None
            for event in attempt:
                if event["kind"] not in ("placed", "removed") or event["learner"] != name:
                    continue
                if since is not None:
                    total += max(0.0, min(event["at"], end) - since)
                since = event["at"] if event["kind"] == "placed" else None
            total += 0.0 if since is None else max(0.0, end - since)
        return total


def _first(events: Sequence[Event], after: float, **fields: Any) -> Event | None:
    """The first of these events after a time whose fields are as given."""
    matching = (e for e in events if e["at"] >= after and all(e.get(key) == value for key, value in fields.items()))
    return next(matching, None)


def _first_merge_of(merges: Sequence[Event], after: float, learner: str, incarnation: int) -> float | None:
    for merge in merges:
        if merge["at"] >= after and any(
            c["learner"] == learner and c["incarnation"] == incarnation for c in merge["contains"]
        ):
            return float(merge["at"])
    return None
