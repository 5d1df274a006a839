"""Members of a data-parallel group as real processes that a test starts, feeds and kills."""

import contextlib
import multiprocessing
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed
from transformers.models.llama import LlamaForCausalLM  # noqa: F401 the fork server imports it once, for all

from app.config import ModelConfig, TrainConfig
from app.learning.gathering import Formation
from app.learning.gradients import Group, GroupBroken, Part, Signs, flat_buffer, mean_gradients
from app.learning.inner import InnerLoop, StepResult
from app.learning.model import build_model

SMALL = ModelConfig(hidden=32, layers=1, heads=2, intermediate=48)
CONFIG = TrainConfig(lr=1e-2, warmup_tokens=0, precision="fp32")
TIMEOUT_S = 20.0


def small_loop(seed: int) -> InnerLoop:
    return InnerLoop(build_model(SMALL, vocab=64, seq_len=16, seed=seed), CONFIG)


def rows(seed: int, size: int) -> torch.Tensor:
    return torch.randint(0, 64, (size, 16), generator=torch.Generator().manual_seed(seed))


class Inside:
    """What runs in a member's process."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self.loop = small_loop(seed)
        self.store = distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S)
        )
        self.buffer = flat_buffer(self.loop.parameters)
        self.leaving = False

    def port(self) -> int:
        return self.store.port

    def form(self, formation: Formation) -> None:
        """Join, and take over the source's state."""
        self.group = Group(formation, "127.0.0.1", self.loop.device, TIMEOUT_S)
        self.loop.load_state(self.group.spread(self.loop.state(), TIMEOUT_S), contextlib.nullcontext())

    def step(self, batches: Sequence[torch.Tensor], lr: float, leaving: bool) -> tuple[StepResult, bool] | str:
        """A step, and whether somebody leaves; "broken" when a member is gone."""

        def share(parameters: Sequence[torch.Tensor], own: Part) -> Part:
            whole, signs = mean_gradients(parameters, own, Signs(leaving), self.buffer, add_up)
            self.leaving = signs.leaving
            return whole

        def add_up(tensor: torch.Tensor) -> None:
            self.group.add_up(tensor, TIMEOUT_S)

        try:
            return self.loop.step(batches, lr, contextlib.nullcontext(), share), self.leaving
        except GroupBroken:
            self.group.close()
            return "broken"

    def poison(self) -> None:
        """The next gradient of one parameter is infinite."""
        hook = self.loop.parameters[0].register_hook(lambda grad: (hook.remove(), torch.full_like(grad, torch.inf))[1])

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.loop.parameters]


def _serve(pipe: Connection, seed: int) -> None:
    inside = Inside(seed)
    with contextlib.suppress(EOFError):
        while True:
            method, *args = pipe.recv()
            pipe.send(getattr(inside, method)(*args))


class Member:
    """A handle of such a process."""

    def __init__(self, seed: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, seed), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, method: str, *args: Any) -> None:
        self._pipe.send((method, *args))

    def answer(self) -> Any:
        assert self._pipe.poll(TIMEOUT_S), "no answer"
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def stop_server() -> None:
    """End what multiprocessing has started for itself."""
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


def all_do(members: Sequence[Member], method: str, *args: Sequence[Any]) -> list[Any]:
    """Every member does this at the same time, each with its own arguments."""
    for member, own in zip(members, zip(*args, strict=True) if args else [()] * len(members), strict=True):
        member.tell(method, *own)
    return [member.answer() for member in members]
