"""The command of each fleet, and the pools that it names, fit the worker groups of the same fleet.

Ray's own code reads the manifests here, as in the autoscaler's container, and its own scheduler says which pods it
would start for what a run asks for: the placement group of each learner and the actors of the services.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterable

import pytest
import yaml
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingReply, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest
from ray.core.generated.common_pb2 import LabelSelectorOperator

from app.config import Config, PoolConfig, load
from app.train import main
from tests.manifests import (
    FLEETS,
    HEAD,
    KUBERAY,
    ROOT,
    autoscaling_config,
    cluster_spec,
    container,
    entrypoint,
    find,
    pod,
    render,
    satisfies,
    selector_of,
)

PLAIN = re.compile(r"[A-Za-z0-9_./:=,+-]+")
"""Words that mean the same to every shell that they pass on their way to the head."""
COMMAND = ["python", "-m", "app.train"]
SERVICES, STABLE, SPOT = "services", "stable", "spot"

fleets = pytest.mark.parametrize("fleet", FLEETS)


def config_of(fleet: str) -> Config:
    words = shlex.split(entrypoint(fleet))
    assert words[: len(COMMAND)] == COMMAND
    return load(words[len(COMMAND) :])


def node_types(fleet: str) -> dict[str, dict]:
    """Labels, resources and number of pods of each group, as the autoscaler sees them."""
    return autoscaling_config(cluster_spec(render(f"{fleet}/cluster")))["available_node_types"]


def learners_in(resources: dict[str, float], pool: PoolConfig) -> int:
    """How many learners of a pool have room in one pod."""
    wanted = {resource: amount * pool.workers_per_learner for resource, amount in pool.resources.items()}
    return int(min(resources.get(resource, 0) // amount for resource, amount in wanted.items()))


@fleets
def test_the_command_is_of_plain_words_and_composes(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(entrypoint(fleet))
    assert all(PLAIN.fullmatch(word) for word in words), words
    assert f"pools={fleet}" in words
    assert main([*words[len(COMMAND) :], "--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["run"]["resume"] == "auto"


@fleets
def test_the_run_folder_is_seen_by_all_pods_and_outlives_them(fleet: str) -> None:
    config, manifests = config_of(fleet), render(f"{fleet}/job")
    scheme, _, _ = config.run.path.rpartition("://")
    assert scheme == {"kind": "", "gke": "gs", "eks": "s3"}[fleet]
    spec = cluster_spec(manifests)
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        (mount,) = container(group)["volumeMounts"]
        (volume,) = pod(group)["volumes"]
        if scheme:
            assert config.run.cache_dir is not None
            assert config.run.cache_dir.startswith(mount["mountPath"] + "/")
        else:
            assert config.run.shared_dir
            assert config.run.path.startswith(mount["mountPath"] + "/")
            assert (
                volume["persistentVolumeClaim"]["claimName"]
                == find(manifests, "PersistentVolumeClaim")["metadata"]["name"]
            )


@fleets
def test_each_pool_has_the_worker_group_of_its_name(fleet: str) -> None:
    config, types = config_of(fleet), node_types(fleet)
    assert set(config.pools) == {STABLE, SPOT}
    for name, pool in config.pools.items():
        assert {group for group, node in types.items() if satisfies(node["labels"], pool.labels)} == {name}
        each = learners_in(types[name]["resources"], pool)
        assert pool.one_node
        assert each >= 1, f"no pod of {name} has room for a learner"
        size, most = config.pool_sizes[name], pool.max_learners
        assert most is not None
        assert size <= each * types[name]["min_workers"], "the run would start with pods that may never come"
        assert most == each * types[name]["max_workers"]
        assert pool.spot == (name == SPOT)


@fleets
def test_syncer_and_ledger_have_the_group_of_services(fleet: str) -> None:
    syncer, types = config_of(fleet).syncer, node_types(fleet)
    assert {group for group, node in types.items() if satisfies(node["labels"], syncer.labels)} == {SERVICES}
    services = types[SERVICES]
    assert services["labels"]["ray.io/market-type"] != "spot"
    assert services["resources"]["CPU"] >= syncer.cpus
    assert services["min_workers"] == (2 if syncer.standby else 1)
    assert types[HEAD]["resources"]["CPU"] == 0


def asks_for(resources: dict[str, float], labels: dict[str, str]) -> object:
    operators = {True: LabelSelectorOperator.LABEL_OPERATOR_IN, False: LabelSelectorOperator.LABEL_OPERATOR_NOT_IN}
    constraints = []
    for label, expression in labels.items():
        wanted, values = selector_of(expression)
        constraints.append((label, operators[wanted], sorted(values)))
    return ResourceRequestUtil.make(resources, label_selectors=[constraints])


def learner_of(pool: PoolConfig) -> GangResourceRequest:
    """What a learner's placement group asks for: all of its workers on one node."""
    whole = {resource: amount * pool.workers_per_learner for resource, amount in pool.resources.items()}
    return GangResourceRequest(requests=[asks_for(whole, pool.labels)])


def scheduled(fleet: str, learners: Iterable[PoolConfig], services: bool = True) -> SchedulingReply:
    config = AutoscalingConfig(autoscaling_config(cluster_spec(render(f"{fleet}/job"))), skip_content_hash=True)
    syncer = config_of(fleet).syncer
    syncers = [asks_for({"CPU": syncer.cpus}, syncer.labels)] * (2 if syncer.standby else 1) if services else []
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=config.get_node_type_configs(),
        max_num_nodes=config.get_max_num_nodes(),
        gang_resource_requests=[learner_of(pool) for pool in learners],
        resource_requests=ResourceRequestUtil.group_by_count(syncers),
    )
    return ResourceDemandScheduler().schedule(request)


def pods(reply: SchedulingReply) -> dict[str, int]:
    """Pods of each worker group that are to be started."""
    found = Counter({launch.instance_type: launch.count for launch in reply.to_launch})
    del found[HEAD]
    return dict(found)


def all_learners(config: Config) -> list[PoolConfig]:
    """Every pool as often as it may have learners."""
    return [pool for pool in config.pools.values() for _ in range(pool.max_learners or 0)]


@fleets
def test_the_autoscaler_starts_all_pods_that_a_run_may_grow_to(fleet: str) -> None:
    config, types = config_of(fleet), node_types(fleet)
    reply = scheduled(fleet, all_learners(config))
    assert not reply.infeasible_gang_resource_requests
    assert not reply.infeasible_resource_requests
    assert pods(reply) == {group: types[group]["max_workers"] for group in (SERVICES, STABLE, SPOT)}


@fleets
def test_the_autoscaler_starts_no_pod_beyond(fleet: str) -> None:
    config, types = config_of(fleet), node_types(fleet)
    reply = scheduled(fleet, [*all_learners(config), *config.pools.values()])
    assert len(reply.infeasible_gang_resource_requests) == 2
    assert pods(reply) == {group: types[group]["max_workers"] for group in (SERVICES, STABLE, SPOT)}


@fleets
def test_without_learners_only_the_least_is_there(fleet: str) -> None:
    types = node_types(fleet)
    least = {group: types[group]["min_workers"] for group in (SERVICES, STABLE, SPOT)}
    assert pods(scheduled(fleet, [])) == {group: number for group, number in least.items() if number}


@fleets
def test_who_may_run_on_both_goes_to_spot_pods_first(fleet: str) -> None:
    """Such a pool is not among ours; it is written without `spot` and without a market in its labels."""
    config, types = config_of(fleet), node_types(fleet)
    spot = config.pools[SPOT]
    anywhere = PoolConfig(
        accelerator=spot.accelerator,
        label_selector=dict(spot.label_selector),
        workers_per_learner=spot.workers_per_learner,
        cpus_per_worker=spot.cpus_per_worker,
        gpus_per_worker=spot.gpus_per_worker,
    )
    there = types[STABLE]["min_workers"]
    reply = scheduled(fleet, [anywhere] * (there + 1))  # those of the stable group's least are there anyhow
    assert pods(reply) == {SERVICES: types[SERVICES]["min_workers"], STABLE: there, SPOT: 1}


def test_every_file_of_pools_that_names_a_fleet_is_used() -> None:
    named = {path.stem for path in (ROOT / "conf" / "pools").glob("*.yaml") if "docker/kuberay/" in path.read_text()}
    assert named == set(FLEETS)
    assert {path.name for path in KUBERAY.iterdir() if path.is_dir()} == {*FLEETS, "base", "cloud", "job"}
