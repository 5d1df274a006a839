"""Groups of real processes that talk over Gloo; a server that has imported everything forks them."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch
from torch import distributed

from app.config import ModelConfig, TrainConfig
from app.diloco.fragments import build_layout, specs_of
from app.learning.follow import Follower
from app.learning.lead import GroupWeights, LeadLoop
from app.learning.model import build_model
from app.learning.ranks import Place, Ranks

HOST = "127.0.0.1"
DEADLINE_S = 120.0
PATIENCE_S = 60.0
MODEL = ModelConfig(hidden=36, layers=2, heads=2, intermediate=50)
"""Odd sizes: rows that two or three ranks can't share evenly."""
VOCAB, SEQ_LEN, FRAGMENTS = 61, 16, 3
FORKS = mp.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.unit.gang", "transformers.models.llama.modeling_llama", "accelerate"])


class Lead:
    """What a test does with rank 0."""

    def __init__(self, config: TrainConfig, ranks: Ranks):
        model = build_model(MODEL, VOCAB, SEQ_LEN, seed=1)
        self.layout = build_layout(specs_of(model), FRAGMENTS)
        self.ranks = ranks
        self.loop = LeadLoop(model, config, ranks, lambda: ranks.patience_s)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = GroupWeights(self.loop, self.parameters, ranks)


def gang(world: int, sharded: bool, config: TrainConfig, do: Callable[..., Any], *args: Any) -> Any:
    """What `do(lead, *args)` returns in rank 0 of a new group; the others follow it to the end."""
    return together(world, sharded, _lead_or_follow, config, do, args)[0]


def _lead_or_follow(ranks: Ranks, config: TrainConfig, do: Any, args: Any) -> Any:
    if ranks.rank == 0:
        lead = Lead(config, ranks)
        result = do(lead, *args)
        lead.loop.end()
        return result
    follower_of(ranks, config).follow()
    return None


def follower_of(ranks: Ranks, config: TrainConfig) -> Follower:
    model = build_model(MODEL, VOCAB, SEQ_LEN, seed=1)
    return Follower(model, config, build_layout(specs_of(model), FRAGMENTS), ranks)


def together(world: int, sharded: bool, do: Callable[..., Any], *args: Any) -> list[Any]:
    """What `do(ranks, *args)` returns in each rank of a new group."""
    patience = timedelta(seconds=PATIENCE_S)
    store = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=patience)
    places = [Place(rank, world, HOST, HOST, store.port) for rank in range(world)]
    return _answers([(_with_ranks, (place, sharded, do, args)) for place in places])


def alone(do: Callable[..., Any], *args: Any) -> Any:
    """What `do(*args)` returns in a process of its own."""
    return _answers([(do, args)])[0]


def stop() -> None:
    """End the server of the forks, which else lives as long as the tests."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def _answers(tasks: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """What these return, each in a fork; the traceback of one that fails is this process' failure."""
    news = FORKS.Queue()
    processes = [FORKS.Process(target=_answer, args=(i, do, args, news)) for i, (do, args) in enumerate(tasks)]
    for process in processes:
        process.start()
    try:
        answers = sorted(news.get(timeout=DEADLINE_S) for _ in processes)
    except queue.Empty:
        raise AssertionError("somebody hangs") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
    errors = [error for _, error, _ in answers if error]
    assert not errors, "\n".join(errors)
    return [result for _, _, result in answers]


def _answer(number: int, do: Callable[..., Any], args: tuple[Any, ...], news: Any) -> None:
    torch.set_num_threads(1)
    try:
        news.put((number, "", do(*args)))
    except BaseException:
        news.put((number, traceback.format_exc(), None))
    news.close()
    news.join_thread()
    os._exit(0)  # a group's threads may still wait for peers


def _with_ranks(place: Place, sharded: bool, do: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return do(Ranks(place, sharded, cuda=False, timeout_s=PATIENCE_S), *args)
