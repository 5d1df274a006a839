"""Starting a run: version 0, the supervisor, and attaching to one that lives already. Needs a Ray connection."""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.exceptions import ActorDiedError, RayError

from actors.spec import SUPERVISOR, RunSpec, namespace_of
from actors.supervisor import Supervisor
from actors.supervisor_status import SupervisorStatus
from app.config import Config, ConfigError
from app.config.pools import MARKET_LABEL, PoolConfig
from app.diloco.durable import first_state
from app.diloco.fragments import Layout
from app.run.cuts import LEDGER, SYNCER, Cuts, Part
from app.run.folder import PAYLOADS, RunFolder
from app.run.journal import Journal, JournalDamaged
from app.run.payloads import PayloadStore
from app.run.record import Record
from app.run.storage import open_store

_log = logging.getLogger(__name__)

ANSWER_S = 30.0
LEAVE_S = 60.0
POLL_S = 0.2
INLINE_BYTES = 2 * 1024 * 1024
"""Fragments up to this size travel inside their messages: for a small one a visit to the object store costs more."""


def write_version_0(folder: RunFolder, layout: Layout, parameters: Mapping[str, torch.Tensor], config: Config) -> None:
    """Journal Θ⁰, unless the run has a state already. Raises JournalDamaged."""
    if folder.checkpoints.names("snapshot-"):
        return
    state = first_state(folder.run_id, layout, parameters)
    if config.tape.payloads:
        PayloadStore(open_store(folder / PAYLOADS)).keep_first(state.meta, state.tensors)
    journal = Journal(folder.checkpoints, config.checkpoint.keep)
    journal.claim_epoch()
    if _check_whole(journal) is not None:
        raise JournalDamaged("a snapshot is there that was not there a moment ago")
    journal.snapshot(state.meta, state.tensors)


def went_back(spec: RunSpec, folder: RunFolder) -> RunSpec:
    """With `run.resume=cut`: make the newest consistent cut the state that the run goes on from.

    The ledger's part comes first: killed in between, the same command does it again. Raises ConfigError when there is
    no cut, JournalDamaged when it is another model's, and OSError.
    """
    if spec.config.run.resume != "cut":
        return spec
    if spec.cut is None:
        allowed = "auto: there is no consistent cut in it (checkpoint.full makes them)"
        raise ConfigError("run.resume", "cut", allowed)
    cuts = Cuts(folder.checkpoints)
    state = cuts.part(spec.cut, SYNCER)
    _check_own(state, folder.run_id, spec.layout)
    folder.checkpoints.write(LEDGER, cuts.ledger(spec.cut))
    journal = Journal(folder.checkpoints, spec.config.checkpoint.keep)
    journal.claim_epoch()
    journal.snapshot(state.meta, state.tensors)
    print(f"went back to cut {spec.cut}", flush=True)
    return replace(spec, rolled_back=True)


def check_checkpoint(folder: RunFolder, layout: Layout, config: Config) -> None:
    """Refuse what the syncer could not go on from. Nobody may be writing there.

    A run that goes back to a cut goes on from that alone: `went_back` looks at it.

    Raises:
        ConfigError: the journal is damaged, or another run's, or another model's.
    """
    if config.run.resume == "cut":
        return
    try:
        journal = Journal(folder.checkpoints, config.checkpoint.keep)
        state = _check_whole(journal)
        if state is not None:
            _check_own(state, folder.run_id, layout)
    except (JournalDamaged, OSError, MemoryError) as error:
        raise ConfigError("run.dir", folder.location, f"its checkpoint can't be used: {error}") from error


def _check_whole(journal: Journal) -> Record | None:
    """The snapshot of a journal; None where it never had one. Raises JournalDamaged: it had, and none can be used."""
    state, later = journal.load()
    if state is None and (later or journal.dropped):
        why = f": {', '.join(journal.dropped)} can't be read" if journal.dropped else ""
        raise JournalDamaged(f"no usable snapshot is there{why}")
    return state


def _check_own(state: Record | Part, run_id: str, layout: Layout) -> None:
    if (state.meta.get("run_id"), state.meta.get("layout")) != (run_id, layout.hash):
        raise JournalDamaged("it belongs to another run or another model")


def start_local_ray(config: Config, namespace: str) -> None:
    """Start a Ray of this machine's own, with room for the run's actors whatever the number of cores."""
    learners = sum(amount * config.pools[name].cpus_per_worker for name, amount in _most_workers(config).items())
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(learners + config.syncer.all_cpus)),
        include_dashboard=False,
        namespace=namespace,
        log_to_driver=False,
        logging_level="warning",
        _system_config={"max_direct_call_object_size": INLINE_BYTES},
    )


def check_room(config: Config) -> None:
    """Refuse learners that this machine's own Ray could never place: no other node will ever come.

    Raises:
        ConfigError: it has too few GPUs or other resources, or not the labels that are asked for.
    """
    (node,) = ray.nodes()
    there = node["Resources"]
    wanted: defaultdict[str, float] = defaultdict(float)
    for name, number in config.pool_sizes.items():
        pool = config.pools[name]
        for resource, amount in pool.resources.items():
            wanted[resource] += number * pool.workers_per_learner * amount
            if resource != "CPU" and wanted[resource] > (has := there.get(resource, 0.0)):
                key = {"GPU": "gpus_per_worker"}.get(resource, f"resources_per_worker.{resource}")
                raise ConfigError(f"pools.{name}.{key}", amount, f"{number} learners; this machine has {has:g}")
        for label, value in pool.labels.items():
            expression = not value.isidentifier()  # of Ray: !a, in(a, b)
            if number and not expression and node["Labels"].get(label) != value:
                raise ConfigError(_key_of(name, pool, label), value, f"this machine has the labels {node['Labels']}")


def _most_workers(config: Config) -> dict[str, int]:
    """Workers of each pool when it has grown as far as it may."""
    sizes, pools = config.pool_sizes, config.pools
    return {n: max(sizes[n], pools[n].max_learners or 0) * pools[n].workers_per_learner for n in sizes}


def _key_of(name: str, pool: PoolConfig, label: str) -> str:
    """The setting that asks for a label."""
    if label in pool.label_selector:
        return f"pools.{name}.label_selector.{label}"
    return f"pools.{name}.{'spot' if label == MARKET_LABEL else 'accelerator'}"


def find_supervisor(run_id: str) -> Any | None:
    """A fresh handle of the run's living supervisor, if there is one."""
    try:
        return ray.get_actor(SUPERVISOR, namespace=namespace_of(run_id))
    except (ValueError, RayError):
        return None


def status_of(supervisor: Any, timeout_s: float) -> SupervisorStatus | None:
    """The supervisor's status; None when it does not answer, as while it is being restarted.

    Raises ActorDiedError when it has left the cluster.
    """
    try:
        status: SupervisorStatus = ray.get(supervisor.status.remote(), timeout=timeout_s)
        return status
    except ActorDiedError:
        raise
    except (RayError, TimeoutError) as error:
        _log.info("supervisor away: %s", error)
        return None


def attach(run_id: str) -> Any | None:
    """The run's living supervisor, None when there is none. One that has ended its run is waited out."""
    deadline = time.monotonic() + LEAVE_S
    while (found := find_supervisor(run_id)) is not None:
        try:
            status = status_of(found, ANSWER_S)
        except ActorDiedError:
            status = None
        if status is not None and status.phase != "done":
            return found
        if status is not None:
            dismiss(found)
        if time.monotonic() > deadline:
            ray.kill(found, no_restart=True)
        time.sleep(POLL_S)
    return None


def start_supervisor(spec: RunSpec) -> Any:
    """A new supervisor, which starts everybody else. Raises ValueError when there is one."""
    options = {"name": SUPERVISOR, "namespace": spec.namespace, "lifetime": "detached", "max_restarts": -1}
    options |= spec.process | {"label_selector": spec.config.syncer.labels}
    actor = ray.remote(Supervisor).options(num_cpus=0, max_concurrency=4, **options)
    return actor.remote(spec, uuid.uuid4().hex[:8])


def dismiss(supervisor: Any) -> None:
    """Tell the supervisor of an ended run that its result was fetched: it leaves the cluster."""
    try:
        ray.get(supervisor.fetched.remote(), timeout=ANSWER_S)
    except (RayError, TimeoutError) as error:
        _log.info("the supervisor has left: %s", error)


def wait_until_left(run_id: str) -> None:
    """Wait until nothing of the run is left in the cluster but its files."""
    deadline = time.monotonic() + LEAVE_S
    while find_supervisor(run_id) is not None and time.monotonic() < deadline:
        time.sleep(POLL_S)
