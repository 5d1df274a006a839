"""Replays a run's merges from what it recorded: `python -m app.replay RUN_DIR`.

Every global version is computed again from the contributions that it holds (kept with `tape.payloads=true`) and its
digest compared with the one on the tape. Exit code 0: all are equal; 1: the first that differs is named; 2: the run
does not have what a replay needs.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from app.config import Config, ConfigError, from_yaml
from app.diloco.codec import get_codec
from app.diloco.fragments import Layout, build_layout, specs_of
from app.diloco.job import Answer, MergeJob
from app.diloco.messages import NO_PAYLOAD, Contained, Contribution, Report, Sender
from app.diloco.settings import DilocoSettings
from app.diloco.state import GlobalFragment
from app.learning.data import MANIFEST
from app.learning.model import build_model
from app.run import tape
from app.run.folder import CONFIG, DATA, PAYLOADS, TAPE
from app.run.payloads import PayloadStore
from app.run.record import RecordDamaged
from app.run.storage import Store, open_store

EXIT_DIFFERS, EXIT_UNUSABLE = 1, 2
MERGES = ("merge", "merge_recovered")


class Unusable(Exception):
    """The run does not have what a replay needs."""


@dataclass(frozen=True)
class Difference:
    """The first version that is not what the tape says."""

    event: dict[str, Any]
    digest: str


class Replay:
    """The fragments of one run, from version 0 on."""

    def __init__(self, location: str):
        """`location`: the run folder's path or URL. Raises Unusable."""
        try:
            store = open_store(location)
            config = from_yaml(store.read(CONFIG).decode())
            self._payloads = PayloadStore(open_store(f"{location}/{PAYLOADS}"))
            first = self._payloads.first()
            self._layout = _layout(config, store)
            self._events = tape.read(f"{location}/{TAPE}")[0]
        except FileNotFoundError as error:
            raise Unusable(f"{error.filename or error} is missing: was it run with tape.payloads=true?") from error
        except (ConfigError, RecordDamaged, ValueError, KeyError, OSError, ImportError) as error:
            raise Unusable(str(error)) from error
        if first.meta.get("layout") != self._layout.hash:
            raise Unusable("the layout of the configuration's model is not that of the run")
        self._settings = config.diloco
        self.fragments = [
            GlobalFragment.restored(p, 0, 0, _start(first.tensors, p), config.diloco)
            for p in range(len(self._layout.fragments))
        ]
        self.versions = 0
        """Versions computed so far."""

    def run(self) -> Difference | None:
        """Compute one version after the other. Raises Unusable: something is missing or damaged."""
        try:
            return self._run()
        except (KeyError, TypeError, IndexError) as error:
            raise Unusable(f"{TAPE} is damaged after {self.versions} versions: {error!r}") from error

    def _run(self) -> Difference | None:
        for event in self._merges():
            fragment = self.fragments[event["fragment"]]
            if event["version"] <= fragment.version:
                continue  # told twice
            if event["version"] != fragment.version + 1:
                raise Unusable(f"{_named(event)}: the tape has no version {fragment.version + 1} of this fragment")
            result = self._job(event, fragment).run()
            if result.digest != event["digest"]:
                return Difference(event, result.digest)
            fragment.apply(result)
            self.versions += 1
        return None

    def digest(self) -> str:
        """Of everything that was computed: Θ, Θ̂, momentum and Θ̄ of all fragments."""
        total = hashlib.sha256()
        for f in self.fragments:
            for value in (f.theta, f.theta_hat, f.momentum, f.average):
                total.update(value.numpy().data)
        return total.hexdigest()

    def _merges(self) -> Iterator[dict[str, Any]]:
        """Merges in the order of the tape; the settings are those of the syncer that made them."""
        for event in self._events:
            if event["kind"] == "rolled_back":
                raise Unusable(f"the run went back to cut {event['cut']}: a replay follows it no further")
            if event["kind"] == "syncer_started":
                self._settings = DilocoSettings(**event["settings"])
            elif event["kind"] in MERGES:
                yield event

    def _job(self, event: dict[str, Any], fragment: GlobalFragment) -> MergeJob:
        answers = tuple(self._answer(event, Contained(**entry)) for entry in event["contains"])
        return MergeJob(
            fragment=self._layout.fragments[fragment.index],
            layout=self._layout,
            settings=self._settings,
            epoch=0,
            round=event["round"],
            version=event["version"],
            clock=event["clock"],
            clock_before=fragment.clock,
            theta=fragment.theta,
            theta_hat=fragment.theta_hat,
            momentum=fragment.momentum,
            average=fragment.average,
            answers=answers,
            share=event["share"],
        )

    def _answer(self, event: dict[str, Any], held: Contained) -> Answer:
        settings, numel = self._settings, self._layout.fragments[event["fragment"]].numel
        sender = Sender("", held.epoch, held.learner, held.incarnation)
        try:
            data = self._payloads.payload(held.epoch, held.round, held.learner, held.incarnation)
            codec = get_codec(settings.codec_up, settings.codec_block)
            delta = codec.decode(np.frombuffer(data, np.uint8), numel)
        except (FileNotFoundError, ValueError) as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else f"can't be used: {error}"
            raise Unusable(f"{_named(event)}: what {held.learner}#{held.incarnation} gave {why}") from error
        report = Report(sender, 0, 0, 0, 0, 0, 0.0, 0.0, (), (), ())
        counters = (held.base, held.c_steps, held.c_tokens)
        given = Contribution(sender, event["fragment"], held.round, *counters, codec.name, NO_PAYLOAD, "", report)
        return Answer(given, delta, 0.0)


def _start(tensors: dict[str, torch.Tensor], p: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    theta = tensors[f"{p}.theta"]
    return theta, theta, tensors[f"{p}.momentum"], theta


def _layout(config: Config, store: Store) -> Layout:
    vocab = json.loads(store.read(f"{DATA}/{MANIFEST}"))["vocab"]
    model = build_model(config.model, vocab, config.data.seq_len, config.run.seed)
    return build_layout(specs_of(model), config.diloco.fragments)


def _named(event: dict[str, Any]) -> str:
    return f"round {event['round']}, fragment {event['fragment']}, version {event['version']}"


def main(arguments: list[str]) -> int:
    """Replay, and say what came of it."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stdout if arguments in (["-h"], ["--help"]) else sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else EXIT_UNUSABLE
    torch.set_num_threads(1)
    try:
        replay = Replay(arguments[0].rstrip("/"))
        difference = replay.run()
    except Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    if difference is not None:
        told = difference.event["digest"]
        print(f"{_named(difference.event)}: the tape says {told}, the replay {difference.digest}")
        print(f"{replay.versions} versions before it are equal")
        return EXIT_DIFFERS
    print(f"{replay.versions} versions of {len(replay.fragments)} fragments are equal; all together {replay.digest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
