"""What must survive the syncer. How the machine is built from it again: `shadow.py`.

Values go in and out as JSON-able metadata beside named fp32 tensors; where they are kept is not decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from app.diloco.accounts import Books
from app.diloco.fragments import Layout, gather
from app.diloco.guard import NOTHING_SEEN
from app.diloco.job import MergeResult
from app.diloco.protocol import Protocol

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Durable:
    """One durable record: what changed (or everything), as metadata and tensors."""

    meta: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def first_state(run_id: str, layout: Layout, parameters: Tensors) -> Durable:
    """Version 0: Θ⁰ = Θ̂⁰ of every fragment from a model's parameters, momentum zero."""
    tensors: dict[str, torch.Tensor] = {}
    for fragment in layout.fragments:
        theta = gather(fragment, parameters)
        tensors[f"{fragment.index}.theta"] = theta
        tensors[f"{fragment.index}.momentum"] = torch.zeros_like(theta)
    meta = {
        "kind": "state",
        "run_id": run_id,
        "layout": layout.hash,
        "clock": 0,
        "incarnations": {},
        "books": Books([f.numel for f in layout.fragments]).state(),
        "fragments": [
            {"version": 0, "clock": 0, "last_merged": {}, "contained": {}, "guard": dict(NOTHING_SEEN)}
            for _ in layout.fragments
        ],
    }
    return Durable(meta, tensors)


def whole_state(protocol: Protocol) -> Durable:
    """Everything a restart needs, as one record."""
    tensors: dict[str, torch.Tensor] = {}
    for f in protocol.fragments:
        tensors |= _tensors(f"{f.index}.", f.theta, f.theta_hat, f.momentum)
        if f.average is not f.theta:
            tensors[f"{f.index}.average"] = f.average
    meta = {
        "kind": "state",
        "run_id": protocol.run_id,
        "layout": protocol.layout.hash,
        "clock": protocol.clock.t,
        "incarnations": dict(protocol.incarnations),
        "books": protocol.books.state(),
        "fragments": [
            {
                "version": f.version,
                "clock": f.clock,
                "last_merged": dict(f.last_merged),
                "contained": {learner: [asdict(e) for e in entries] for learner, entries in f.contained.items()},
                "guard": protocol.guards[f.index].state(),
            }
            for f in protocol.fragments
        ],
    }
    return Durable(meta, tensors)


def merge_record(protocol: Protocol, result: MergeResult) -> Durable:
    """One merge: fragment, version, clock, what it contains, books and guard as they were just before it."""
    meta = {
        "kind": "merge",
        "fragment": result.fragment,
        "round": result.round,
        "version": result.version,
        "clock": result.clock,
        "share": result.share,
        "contains": [asdict(contained) for contained in result.contains],
        "books": protocol.books.state(),
        "guard": protocol.guards[result.fragment].state(),
    }
    return Durable(meta, _tensors("", result.theta, result.theta_hat, result.momentum))


def _tensors(
    prefix: str, theta: torch.Tensor, theta_hat: torch.Tensor, momentum: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Θ̂ is written only where it differs from Θ: with an fp32 down codec they are one value."""
    tensors = {f"{prefix}theta": theta, f"{prefix}momentum": momentum}
    if theta_hat is not theta:
        tensors[f"{prefix}theta_hat"] = theta_hat
    return tensors
