"""What must survive the syncer, and how the machine is built from it again.

Values go in and out as JSON-able metadata beside named fp32 tensors; where they are kept is not decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from app.diloco.accounts import Books
from app.diloco.average import average_weight, averaged
from app.diloco.codec import digest
from app.diloco.fragments import Layout, gather
from app.diloco.guard import NormGuard
from app.diloco.job import MergeResult
from app.diloco.messages import Contained
from app.diloco.protocol import Protocol
from app.diloco.settings import DilocoSettings
from app.diloco.state import GlobalFragment

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
            {"version": 0, "clock": 0, "last_merged": {}, "contained": {}, "guard": NormGuard(0.0).state()}
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


def restore(
    run_id: str,
    epoch: int,
    layout: Layout,
    settings: DilocoSettings,
    budget: int,
    state: Durable,
    later: Sequence[Durable],
    most_step_tokens: int | None = None,
) -> Protocol:
    """The machine as it was after the last durable record, under a new epoch.

    Raises ValueError when the state belongs to another run or another layout.
    """
    meta = state.meta
    if meta["run_id"] != run_id or meta["layout"] != layout.hash:
        raise ValueError(f"the checkpoint is of run {meta['run_id']} with layout {meta['layout'][:12]}")
    fragments = [
        GlobalFragment.restored(p, entry["version"], entry["clock"], _four(state.tensors, f"{p}."), settings)
        for p, entry in enumerate(meta["fragments"])
    ]
    for fragment, entry in zip(fragments, meta["fragments"], strict=True):
        fragment.last_merged = dict(entry["last_merged"])
        fragment.contained = {
            learner: [Contained(**e) for e in entries] for learner, entries in entry["contained"].items()
        }
    numels = [fragment.numel for fragment in layout.fragments]
    guards = [entry["guard"] for entry in meta["fragments"]]
    incarnations: dict[str, int] = dict(meta["incarnations"])
    books, clock = Books.from_state(numels, meta["books"]), meta["clock"]
    for record in later:
        if record.meta["kind"] == "join":
            learner = record.meta["learner"]
            incarnations[learner] = record.meta["incarnation"]
            books.open(learner, record.meta["incarnation"], record.meta["pool"], record.meta["token"])
            for fragment in fragments:
                fragment.forget(learner)
        else:
            books = _replay(fragments, settings, numels, record)
            clock = max(clock, record.meta["clock"])
            guards[record.meta["fragment"]] = record.meta["guard"]
    protocol = Protocol(
        run_id=run_id,
        epoch=epoch,
        layout=layout,
        settings=settings,
        budget=budget,
        most_step_tokens=most_step_tokens,
        fragments=fragments,
        clock=clock,
        books=books,
        incarnations=incarnations,
    )
    for guard, remembered in zip(protocol.guards, guards, strict=True):
        guard.take(remembered)
    return protocol


def _replay(fragments: list[GlobalFragment], settings: DilocoSettings, numels: list[int], record: Durable) -> Books:
    """Take over a recorded version. Θ̄ is not in a record: it follows from those before, with the same bits."""
    meta = record.meta
    contains = tuple(Contained(**entry) for entry in meta["contains"])
    theta, theta_hat, momentum, _ = _four(record.tensors, "")
    fragment = fragments[meta["fragment"]]
    version = meta["version"]
    if version != fragment.version + 1:
        raise ValueError(f"fragment {fragment.index}: version {version} follows {fragment.version} in the journal")
    fragment.ring.push(version, theta_hat, None)
    weight = average_weight(settings, fragment.clock, meta["clock"], meta["share"] is not None)
    average = averaged(fragment.average, theta, weight)
    fragment.take(version, meta["clock"], (theta, theta_hat, momentum, average), digest(theta_hat))
    books = Books.from_state(numels, meta["books"], [(fragment.index, contained) for contained in contains])
    for contained in contains:
        if books.account(contained.learner, contained.incarnation) is not None:
            fragment.note_contained(contained)
    return books


def _four(tensors: Tensors, prefix: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    theta = tensors[f"{prefix}theta"]
    theta_hat, average = tensors.get(f"{prefix}theta_hat", theta), tensors.get(f"{prefix}average", theta)
    return theta, theta_hat, tensors[f"{prefix}momentum"], average
