"""The inner optimizers' state as it travels to another process or to a disk: one safetensors file, nothing that runs.

A learner that comes back without it steps blindly for as long as moments take to form; those of another learner, whose
weights come from the same global model, are nearly its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

COUNT = "step"
"""Of AdamW: steps that the moments have seen."""
ADAMW, MUON = {"exp_avg", "exp_avg_sq", COUNT}, {"momentum_buffer"}
"""What each keeps of a parameter; all but the count have its shape."""
NEVER_NEGATIVE = {"exp_avg_sq", COUNT}
"""A root is taken of the one, the other is a count: what is below 0 would become NaN in the weights."""
_KEY = re.compile(r"(0|[1-9]\d{0,8})/(0|[1-9]\d{0,8})/(\w+)")
"""Optimizer, parameter, name; every number is written in one way."""
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
        match = _KEY.fullmatch(key)
        if match is None or not (int(match[1]) < len(shapes) and int(match[2]) < len(shapes[int(match[1])])):
            raise Unusable(f"no parameter is meant by {key}")
        i, k, name = int(match[1]), int(match[2]), match[3]
        shape = shapes[i][k]
        entry = states[i]["state"].setdefault(k, {})
        if value.dtype != torch.float32 or value.shape != (torch.Size() if name == COUNT else shape):
            raise Unusable(f"{key} is {value.dtype} {tuple(value.shape)}, its parameter has {tuple(shape)}")
        if not bool(torch.isfinite(value).all()):
            raise Unusable(f"{key} is not finite")
        if name in NEVER_NEGATIVE and bool((value < 0).any()):
            raise Unusable(f"{key} has negative values")
        entry[name] = value
    if not tensors or any(len(state["state"]) != len(of) for state, of in zip(states, shapes, strict=True)):
        raise Unusable("some parameters have no moments")
    if any(set(entry) not in (ADAMW, MUON) for state in states for entry in state["state"].values()):
        raise Unusable("what it has of a parameter is neither AdamW's nor Muon's")
    return states
