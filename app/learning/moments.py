"""The inner optimizers' state as it travels to another process or to a disk: one safetensors file, nothing that runs.

A learner that comes back without it steps blindly for as long as moments take to form; those of another learner, whose
weights come from the same global model, are nearly its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

COUNT = "step"
"""Of AdamW: steps that the moments have seen."""
ADAMW, MUON = {"exp_avg", "exp_avg_sq", COUNT}, {"momentum_buffer"}
"""What each keeps of a parameter; all but the count have its shape."""
States = list[dict[str, Any]]


class Unusable(ValueError):
    """This is no state of these optimizers."""


def copied(states: States) -> States:
    """The optimizers' `state_dict`s with tensors of their own, where they are: what a step boundary costs."""
    return [{**state, "state": {k: _cloned(entry) for k, entry in state["state"].items()}} for state in states]


def _cloned(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in entry.items()}


def packed(states: States) -> bytes:
    """The moments as a safetensors file of `flat` tensors."""
    return save(flat(states))


def flat(states: States) -> dict[str, Tensor]:
    """The moments as fp32 tensors on the CPU, by name; parameters by their place in the optimizers."""
    tensors = {}
    for i, state in enumerate(states):
        for k, entry in state["state"].items():
            for name in sorted(entry.keys() & (ADAMW | MUON)):
                value = torch.as_tensor(entry[name]).detach()
                tensors[f"{i}/{k}/{name}"] = value.to("cpu", torch.float32).contiguous()
    return tensors


def unpacked(data: bytes, optimizers: Sequence[torch.optim.Optimizer]) -> States:
    """What `packed` made, as the `state_dict`s of these optimizers; settings such as the learning rate stay theirs.

    Raises Unusable: it is damaged, of another model or optimizer, or not finite.
    """
    try:
        tensors = load(data)
    except Exception as error:  # safetensors has its own kinds, and more may come of garbage
        raise Unusable(f"no safetensors file: {error}") from error
    return rebuilt(tensors, optimizers)


def rebuilt(tensors: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> States:
    """What `flat` made, as `unpacked` does."""
    states: States = [{**optimizer.state_dict(), "state": {}} for optimizer in optimizers]
    shapes = [[p.shape for group in o.param_groups for p in group["params"]] for o in optimizers]
    for key, value in tensors.items():
        try:
            i, k, name = key.split("/")
            shape = shapes[int(i)][int(k)]
            entry = states[int(i)]["state"].setdefault(int(k), {})
        except (ValueError, IndexError) as error:
            raise Unusable(f"no parameter is meant by {key}") from error
        if value.shape != (torch.Size() if name == COUNT else shape):
            raise Unusable(f"{key} has the shape {tuple(value.shape)}, its parameter {tuple(shape)}")
        if not bool(torch.isfinite(value).all()):
            raise Unusable(f"{key} is not finite")
        entry[name] = value
    if not tensors or any(len(state["state"]) != len(of) for state, of in zip(states, shapes, strict=True)):
        raise Unusable("some parameters have no moments")
    if any(set(entry) not in (ADAMW, MUON) for state in states for entry in state["state"].values()):
        raise Unusable("what it has of a parameter is neither AdamW's nor Muon's")
    return states
