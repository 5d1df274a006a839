"""The driver: everything that `python -m app.train` does after the configuration is known to be right."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import ActorDiedError

from actors.progress import TAPE_S, Progress, ending_of
from actors.spec import RunSpec, namespace_of
from actors.start import (
    ANSWER_S,
    attach,
    check_checkpoint,
    check_room,
    dismiss,
    start_local_ray,
    start_supervisor,
    status_of,
    wait_until_left,
    went_back,
    write_version_0,
)
from actors.supervisor_status import SupervisorStatus
from actors.waiting import Waits, unplaced
from app.config import Config, ConfigError, check_fragments
from app.diloco.fragments import build_layout, specs_of, table
from app.learning.corpus import place_of
from app.learning.data import has_changed, prepare
from app.learning.model import build_model
from app.learning.trainable import check_trainable
from app.run.cuts import Cuts
from app.run.display import Display
from app.run.final_report import final_report
from app.run.folder import DATA, RunFolder, open_folder
from app.run.journal import JournalDamaged
from app.run.mirror import download, upload
from app.run.remote import patiently
from app.run.storage import remove_partials
from app.run.summary import SummaryDamaged, read_summary
from app.run.tracking import check_tracking

_log = logging.getLogger(__name__)

PLAIN_EVERY_S = 5.0
SHOW_EVERY_S = 0.5
SHUTDOWN_S = 10.0
LISTEN_S = 5.0
"""Seconds in which a cluster's address must accept a connection."""


class Driver:
    """One start of one run."""

    def __init__(self, config: Config):
        self._config = config
        self._signal: int | None = None

    def run(self) -> int:
        """Start or attach, show, and return the exit code. Raises ConfigError before Ray starts."""
        check_tracking(self._config)
        folder = open_folder(self._config, lambda line: print(line, flush=True))
        try:
            if _is_complete(folder, self._config):
                print(f"this run is completed already: {folder.location}/model", flush=True)
                return 0
            address = os.environ.get("RAY_ADDRESS")
            if address:
                self._connect(folder, address)
                spec = prepare_run(self._config, folder)
            else:
                spec = prepare_run(self._config, folder, self._start_ray)
            if (supervisor := attach(spec.run_id)) is not None:
                print(f"attached to the living run {spec.run_id}: it keeps its configuration", flush=True)
                spec = dataclasses.replace(spec, config=folder.kept())
                return self._follow(folder, Progress(spec, attached=True), spec, supervisor)
            with _writing(folder):
                if folder.is_local:
                    remove_partials(folder.work_dir)  # nobody of the run is alive
                if folder.resumed and address:
                    check_checkpoint(folder, spec.layout, self._config)
                if folder.resumed:
                    folder.keep(self._config)  # before there is a run that has it
                    spec = went_back(spec, folder)
            return self._follow(folder, Progress(spec, attached=False), spec, start_supervisor(spec))
        finally:
            ray.shutdown()
            folder.lock.release()

    # ---- Ray

    def _start_ray(self, namespace: str) -> None:
        print("starting Ray on this machine ...", flush=True)
        start_local_ray(self._config, namespace)
        self._watch_signals()
        check_room(self._config)

    def _connect(self, folder: RunFolder, address: str) -> None:
        """To a cluster that was started apart."""
        _check_listens(address)
        try:
            ray.init(namespace=namespace_of(folder.run_id), log_to_driver=False, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            why = str(error).splitlines()[0]
            allowed = f"no cluster can be used there ({why}); one with a token needs it in RAY_AUTH_TOKEN or ~/.ray"
            raise ConfigError("RAY_ADDRESS", address, allowed) from error
        self._watch_signals()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len(nodes) > 1 and folder.is_local and not self._config.run.shared_dir:
            raise ConfigError(
                "run.dir",
                folder.location,
                f"the cluster has {len(nodes)} nodes: a folder that all of them see is needed, and run.shared_dir=true",
            )

    def _watch_signals(self) -> None:
        """After `ray.init`, which installs handlers of its own."""

        def stop(number: int, _frame: FrameType | None) -> None:
            if self._signal is not None:
                _leave_now(128 + number)
            self._signal = number

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)

    def _follow(self, folder: RunFolder, progress: Progress, spec: RunSpec, supervisor: Any) -> int:
        waits = Waits(lambda: unplaced(spec))
        limits = spec.config.supervisor
        starting_s = max(limits.silent_s, limits.start_deadline_s)
        heard, patience_s, told = time.monotonic(), starting_s, False
        status: SupervisorStatus | None = None
        with Display(sys.stdout, PLAIN_EVERY_S) as display:
            while status is None or status.phase != "done":
                if self._signal is not None:
                    if not told:
                        told = True
                        display.say(f"{signal.Signals(self._signal).name}: last round and checkpoint ...")
                    supervisor.stop.remote(signal.Signals(self._signal).name)  # again: it may have been restarted
                try:
                    answer = status_of(supervisor, min(ANSWER_S, limits.silent_s))
                except ActorDiedError as error:
                    return self._after(folder, spec.config, error)
                if answer is not None:
                    status, heard, patience_s = answer, time.monotonic(), limits.silent_s
                    for line in progress.news(status):
                        display.say(line)
                    for line in waits.news(heard) if status.phase in ("starting", "running") else ():
                        display.say(line)
                    display.show(progress.view(status))
                elif time.monotonic() - heard > patience_s:
                    heard, patience_s = time.monotonic(), starting_s
                    display.say("the supervisor does not answer: another one takes over")
                    ray.kill(supervisor, no_restart=False)  # Ray starts it anew, and it goes on where it was
                if folder.lock.lost:
                    print("another driver has taken over this run: this one leaves", file=sys.stderr)
                    return 1
                time.sleep(SHOW_EVERY_S)
        dismiss(supervisor)
        wait_until_left(spec.run_id)
        return self._conclude(folder, spec, status, waits.open)

    def _after(self, folder: RunFolder, config: Config, error: ActorDiedError) -> int:
        """The supervisor left while nobody looked: the run's files tell how it ended."""
        if _is_complete(folder, config):
            print(f"the run has completed: {folder.location}/model", flush=True)
            return 0
        print(f"the supervisor has ended: {error}", file=sys.stderr)
        return 1

    def _conclude(self, folder: RunFolder, spec: RunSpec, status: SupervisorStatus, waits: list[str]) -> int:
        if status.error is not None:
            print(status.error, *(f"it was waiting for {wait}" for wait in waits), sep="\n", file=sys.stderr)
        if status.summary is None:
            return 1
        print(final_report(ending_of(spec, status)), flush=True)
        if self._signal is not None:
            return 128 + self._signal
        done = status.summary["status"] == "completed" and _has_model(folder)
        return 0 if done else 1


def _leave_now(code: int) -> None:
    """Asked twice: the journal is whole. Ray's own processes get a moment to end, they would outlive this one."""
    ending = threading.Thread(target=ray.shutdown, daemon=True)
    ending.start()
    ending.join(SHUTDOWN_S)
    os._exit(code)


def _is_complete(folder: RunFolder, config: Config) -> bool:
    """Whether there is nothing left to do: the budget was reached and the model is written."""
    with _writing(folder):
        if not folder.has_model():
            return False
        try:
            summary = read_summary(folder.store)
        except (FileNotFoundError, SummaryDamaged):
            return False  # the run's end writes it anew
    return bool(summary["status"] == "completed" and summary["tokens_processed"] >= config.train.tokens)


def _has_model(folder: RunFolder) -> bool:
    with _writing(folder):
        return patiently(folder.has_model, TAPE_S)


def _check_listens(address: str) -> None:
    """Ray itself would try an address at which nobody listens for minutes. Raises ConfigError."""
    url = urlsplit(address if "://" in address else f"//{address}")
    if url.hostname is None or url.port is None:
        return  # `auto` and the like
    try:
        socket.create_connection((url.hostname, url.port), timeout=LISTEN_S).close()
    except OSError as error:
        raise ConfigError("RAY_ADDRESS", address, f"no cluster can be used there: {error}") from error


@contextmanager
def _writing(folder: RunFolder) -> Iterator[None]:
    """What can't be read is refused under its own key; any other error of a disk is one of the run folder."""
    try:
        yield
    except (OSError, JournalDamaged) as error:
        raise ConfigError("run.dir", folder.location, f"it can't be used: {error}") from error


def prepare_run(config: Config, folder: RunFolder, ready: Callable[[str], None] | None = None) -> RunSpec:
    """Data, layout and version 0. Raises ConfigError for what shows only now.

    `ready` is called with the run's namespace when only writing is left: what it refuses leaves no checkpoint behind.
    """
    print(f"run folder {folder.location}", flush=True)
    data_dir, digest = folder.work_dir / DATA, ""
    if folder.resumed and not folder.is_local:
        with _writing(folder), suppress(FileNotFoundError):
            download(folder.store, DATA, data_dir)
    if folder.resumed and has_changed(config.data, data_dir):
        why = "the text has changed since this run started: its tokens would mean something else"
        raise ConfigError(*place_of(config.data), why)
    with _writing(folder):
        data = prepare(config.data, data_dir)
        model = build_model(config.model, data.manifest.vocab, config.data.seq_len, config.run.seed)
    check_trainable(model, config.train)
    specs = specs_of(model)
    check_fragments(len(specs), config)
    layout = build_layout(specs, config.diloco.fragments)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if ready is not None:
        if folder.resumed:  # nobody of the run is alive: its cluster was its driver's
            check_checkpoint(folder, layout, config)
        ready(namespace_of(folder.run_id))
    with _writing(folder):
        if not folder.resumed:
            folder.keep(config)
        if not folder.is_local:
            digest = upload(data_dir, folder.store, DATA)
        write_version_0(folder, layout, parameters, config)
        cut = Cuts(folder.checkpoints).newest() if folder.resumed else None
    samples = "a stream of samples" if config.data.streaming else f"{len(data.train):,} training samples"
    print(
        f"data: {samples} of {config.data.seq_len} tokens, "
        f"{len(data.heldout):,} held out; model: {layout.numel:,} parameters",
        table(layout, config.diloco.merge),
        sep="\n",
        flush=True,
    )
    return RunSpec(folder.run_id, config, folder.location, layout, len(data.train), digest, cut)
