"""A learner's side of the protocol as values, for a consistent cut (`cut.py`), and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from app.diloco.feedback import feedback_for
from app.diloco.fragments import Layout
from app.diloco.held import Capture, Held
from app.diloco.messages import Welcome
from app.diloco.replica import Replica
from app.diloco.settings import DilocoSettings
from app.diloco.weights import Weights, weights_of

Tensors = Mapping[str, torch.Tensor]
COUNTERS = ("clock", "steps", "tokens", "samples", "seq")
OF_HELD = ("version", "clock", "c_steps", "c_tokens")
OF_CAPTURE = ("epoch", "round", "version", "c_steps", "c_tokens")


@dataclass(frozen=True)
class ReplicaState:
    """JSON-able metadata and fp32 tensors, copies all."""

    meta: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def state_of(replica: Replica) -> ReplicaState:
    """Copy a replica's state at a step boundary; what has arrived by then is adopted first."""
    with replica.lock:
        replica.adopt()
        meta: dict[str, Any] = {name: getattr(replica, name) for name in COUNTERS}
        meta["fragments"] = [_meta(held) for held in replica.fragments]
        tensors: dict[str, torch.Tensor] = {}
        for p, held in enumerate(replica.fragments):
            tensors |= {f"{p}/theta": replica.theta(p), **_tensors(p, held)}
    return ReplicaState(meta, tensors)


def _meta(held: Held) -> dict[str, Any]:
    lists = [held.captures, *held.in_flight]
    captures = [[{name: getattr(capture, name) for name in OF_CAPTURE} for capture in some] for some in lists]
    counters = {name: getattr(held, name) for name in OF_HELD}
    return {**counters, "discarded": dict(held.discarded), "captures": captures}


def _tensors(p: int, held: Held) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor | None] = {f"{p}/base": held.base}
    if held.feedback is not None:
        tensors[f"{p}/error"] = held.feedback.error
    for i, captures in enumerate([held.captures, *held.in_flight]):
        for k, capture in enumerate(captures):
            tensors |= {f"{p}/{i}/{k}/delta": capture.delta, f"{p}/{i}/{k}/residue": capture.residue}
    return {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}


def restored(
    layout: Layout, settings: DilocoSettings, parameters: Weights | Tensors, welcome: Welcome, state: ReplicaState
) -> Replica:
    """The replica whose state that was, going on under the welcome that its incarnation gets once more.

    Writes θ into `parameters`. Raises KeyError, TypeError or ValueError when the state is of something else.
    """
    meta, tensors = state.meta, state.tensors
    replica = Replica(layout, settings, parameters, welcome)
    weights = weights_of(parameters)
    for p, fragment in enumerate(layout.fragments):
        weights.scatter(fragment, tensors[f"{p}/theta"])
    for name in COUNTERS:
        setattr(replica, name, meta[name])
    replica.fragments = [_held(p, entry, tensors, settings) for p, entry in enumerate(meta["fragments"])]
    return replica  # newer versions come with the next poll: the welcome's do not say what they hold of this work


def _held(p: int, entry: dict[str, Any], tensors: Tensors, settings: DilocoSettings) -> Held:
    lists = [
        [
            Capture(**c, delta=tensors.get(f"{p}/{i}/{k}/delta"), residue=tensors.get(f"{p}/{i}/{k}/residue"))
            for k, c in enumerate(captures)
        ]
        for i, captures in enumerate(entry["captures"])
    ]
    feedback = feedback_for(settings)
    if feedback is not None:
        feedback.error = tensors.get(f"{p}/error")
    counters = {name: entry[name] for name in OF_HELD}
    held = Held(base=tensors[f"{p}/base"], discarded=dict(entry["discarded"]), feedback=feedback, **counters)
    held.captures, *held.in_flight = lists
    return held
