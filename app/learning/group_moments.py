"""The optimizers' state of a whole group: gathered to rank 0, and given out from there. All ranks call at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.learning.moments import COUNT, States
from app.learning.ranks import Ranks
from app.learning.shards import as_fragment, collect, like


def gather_moments(states: States, ranks: Ranks) -> States:
    """The states with whole tensors on the CPU, on rank 0; elsewhere they are not whole. Raises GroupBroken."""
    gathered = []
    for state in states:
        entries = {}
        for k in sorted(state["state"]):
            entry = state["state"][k]
            entries[k] = {name: _gathered(entry[name], ranks) for name in sorted(entry)}
        gathered.append({**state, "state": entries})
    return gathered


def _gathered(value: Any, ranks: Ranks) -> Any:
    if isinstance(value, DTensor):
        return collect(as_fragment("", value), {"": value}, ranks).view(value.shape)
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def described(states: States) -> bytes:
    """What rank 0 has to give out: optimizer, parameter, name and shape of each tensor."""
    rows = [
        (i, k, name, tuple(value.shape))
        for i, state in enumerate(states)
        for k, entry in state["state"].items()
        for name, value in entry.items()
    ]
    return json.dumps(rows).encode()


def spread_moments(
    description: bytes, states: States | None, optimizers: Sequence[torch.optim.Optimizer], ranks: Ranks
) -> States:
    """This rank's part of the states that rank 0 has, `state_dict`s of its optimizers. Raises GroupBroken."""
    parts: States = [{**optimizer.state_dict(), "state": {}} for optimizer in optimizers]
    parameters = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
    for i, k, name, shape in json.loads(description):
        value = torch.empty(shape) if states is None else states[i]["state"][k][name].to("cpu", torch.float32)
        value = value.contiguous()
        ranks.broadcast(value)
        entry = parts[i]["state"].setdefault(k, {})
        entry[name] = value if name == COUNT else like(parameters[i][k], value)
    return parts
