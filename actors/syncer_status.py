"""What others see of the syncer."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import ray

from app.diloco.protocol import Protocol


@dataclass
class Traffic:
    """Bytes of fragments that crossed the network, as they were and as they would be in fp32."""

    up: int = 0
    down: int = 0
    up_fp32: int = 0
    down_fp32: int = 0


@dataclass(frozen=True)
class SyncerStatus:
    """What others see of the syncer."""

    epoch: int
    pid: int
    node_id: str
    clock: int
    tokens: int
    merges: int
    versions: tuple[int, ...]
    live: int
    contributors: int
    paused: bool
    finishing: str | None
    ended: str | None
    balance: dict[str, Any]
    work_exact: bool
    refusals: dict[str, int]
    traffic: dict[str, int]
    cpu_s: float
    merge_s: float
    members: dict[str, dict[str, Any]]
    totals: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Learner → (steps, tokens) over all its incarnations."""


def status_of(protocol: Protocol, traffic: Traffic, merge_s: float, ended: str | None) -> SyncerStatus:
    """Where the run stands, as this process has it."""
    now = time.monotonic()
    balance = protocol.books.balance()
    live = {member.learner for member in protocol.members.live(now, protocol.settings)}
    return SyncerStatus(
        epoch=protocol.epoch,
        pid=os.getpid(),
        node_id=ray.get_runtime_context().get_node_id(),
        clock=protocol.clock.t,
        tokens=protocol.books.tokens,
        merges=protocol.merges,
        versions=tuple(fragment.version for fragment in protocol.fragments),
        live=len(live),
        contributors=protocol.last_contributors,
        paused=protocol.paused,
        finishing=protocol.finishing.reason if protocol.finishing else None,
        ended=ended,
        balance=asdict(balance),
        work_exact=balance.exact,
        refusals={refusal.value: count for refusal, count in protocol.refusals.items()},
        traffic=asdict(traffic),
        cpu_s=time.process_time(),
        merge_s=merge_s,
        members={
            member.learner: {
                "incarnation": member.incarnation,
                "pool": member.pool,
                "live": member.learner in live,
                "merged_s_ago": None if member.last_merged_at is None else now - member.last_merged_at,
            }
            for member in protocol.members.values()
        },
        totals={learner: protocol.books.learner_totals(learner) for learner in protocol.incarnations},
    )
