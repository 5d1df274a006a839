"""What the manifests of docker/kuberay say goes together: with each other, with the images and with Ray."""

import re

import pytest
import ray.util.accelerators as accelerators

from tests.manifests import (
    FLEETS,
    FOLDERS,
    HEAD,
    KUBERAY,
    ROOT,
    Manifest,
    cluster_spec,
    container,
    env,
    find,
    groups,
    pod,
    render,
)

DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
AFTER_DRAIN_S = 20
"""Seconds that a pod has at least once its node is drained: actors get SIGTERM, and Ray's processes end."""
GKE_SPOT_S = 15
"""Seconds that GKE gives pods of a spot node that it takes back."""
SPOT_NODES = {
    "gke": {"nodeSelector": {"cloud.google.com/gke-spot": "true"}, "taint": ("cloud.google.com/gke-spot", "true")},
    "eks": {"nodeSelector": {"eks.amazonaws.com/capacityType": "SPOT"}, "taint": ("spot", "true")},
}
MARKET = "ray.io/market-type"

folders = pytest.mark.parametrize("folder", FOLDERS)


def pods_of(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Pod templates by who they belong to."""
    ray = {name: group["template"] for name, group in groups(cluster_spec(manifests)).items()}
    return {**ray, "redis": find(manifests, "StatefulSet")["spec"]["template"]}


@folders
def test_the_autoscaler_is_the_second_one_and_prefers_spot(folder: str) -> None:
    spec = cluster_spec(render(folder))
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["autoscalerOptions"]["version"] == "v2"
    by_name = groups(spec)
    workers = [group for name, group in by_name.items() if name != HEAD]
    assert [group["groupName"] for group in workers] == ["services", "stable", "spot"]
    for group in workers:
        assert group["minReplicas"] == group["replicas"] <= group["maxReplicas"]
        assert group["idleTimeoutSeconds"] > 0
    assert by_name["spot"]["priority"] > by_name["stable"]["priority"]
    assert by_name["spot"]["minReplicas"] == 0
    assert by_name["services"]["minReplicas"] == by_name["services"]["maxReplicas"] > 0
    assert {name: group["labels"][MARKET] for name, group in by_name.items()} == {
        HEAD: "on-demand",
        "services": "on-demand",
        "stable": "on-demand",
        "spot": "spot",
    }
    for group in by_name.values():  # the second autoscaler takes a pod that was restarted for the node that it was
        assert pod(group)["restartPolicy"] == "Never"


@folders
def test_pods_live_long_enough_to_hand_in(folder: str) -> None:
    by_name = groups(cluster_spec(render(folder)))
    for name, group in by_name.items():
        drain_s = float(env(group)[DRAIN])
        assert drain_s > 0
        assert pod(group)["terminationGracePeriodSeconds"] >= drain_s + AFTER_DRAIN_S
        if folder.startswith("gke") and name == "spot":
            assert drain_s < GKE_SPOT_S
        else:
            assert drain_s == 20


@folders
def test_ray_is_the_version_of_the_project(folder: str) -> None:
    pins = (ROOT / "docker" / "requirements.txt").read_text()
    (version,) = re.findall(r"^ray\[default\]==(\S+)$", pins, re.M)
    assert cluster_spec(render(folder))["rayVersion"] == version


@folders
def test_what_pods_refer_to_is_there(folder: str) -> None:
    manifests = render(folder)
    keys = set(re.findall(r"^([a-z-]+)=", (KUBERAY / "secrets.example.env").read_text(), re.M))
    accounts = {m["metadata"]["name"] for m in manifests if m["kind"] == "ServiceAccount"}
    claims = {m["metadata"]["name"] for m in manifests if m["kind"] == "PersistentVolumeClaim"}
    spec = cluster_spec(manifests)
    used = {spec["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]["key"]}
    for owner, template in pods_of(manifests).items():
        inside = template["spec"]
        if owner != "redis":
            assert inside["serviceAccountName"] in accounts
        volumes = {volume["name"]: volume for volume in inside.get("volumes", [])}
        if owner == "redis":
            volumes["data"] = find(manifests, "StatefulSet")["spec"]["volumeClaimTemplates"][0]
        for mount in inside["containers"][0]["volumeMounts"]:
            assert mount["name"] in volumes
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
        for variable in inside["containers"][0]["env"]:
            if "valueFrom" in variable:
                reference = variable["valueFrom"]["secretKeyRef"]
                assert reference["name"] == "diloco-keys"
                assert reference.get("optional", False) == (reference["key"] != "redis-password")
                used.add(reference["key"])
    assert used == keys


def test_the_example_of_secrets_holds_none() -> None:
    lines = (KUBERAY / "secrets.example.env").read_text().splitlines()
    assert all(line.startswith("# ") or line.endswith("=") for line in lines)
    assert "docker/kuberay/secrets.env" in (ROOT / ".gitignore").read_text().splitlines()


@folders
def test_redis_is_where_the_head_looks_for_it(folder: str) -> None:
    manifests = render(folder)
    service, redis = find(manifests, "Service", "redis"), find(manifests, "StatefulSet", "redis")
    (port,) = service["spec"]["ports"]
    options = cluster_spec(manifests)["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == f"{service['metadata']['name']}:{port['port']}"
    (inside,) = redis["spec"]["template"]["spec"]["containers"]
    assert port["port"] in [p["containerPort"] for p in inside["ports"]]
    labels = redis["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert redis["spec"]["selector"]["matchLabels"].items() <= labels.items()


@folders
def test_who_may_not_be_drained_at_once_is_found_by_its_labels(folder: str) -> None:
    manifests = render(folder)
    templates = pods_of(manifests)
    guarded = set()
    for budget in [m for m in manifests if m["kind"] == "PodDisruptionBudget"]:
        # what needs the number of pods that a controller wants can't be worked out for pods of a RayCluster
        assert type(budget["spec"]["minAvailable"]) is int
        wanted = budget["spec"]["selector"]["matchLabels"].items()
        (owner,) = [o for o, template in templates.items() if wanted <= template["metadata"]["labels"].items()]
        guarded.add(owner)
    assert guarded == {HEAD, "services", "redis"}


@folders
def test_nothing_runs_as_root_or_from_an_image_that_changes(folder: str) -> None:
    for template in pods_of(render(folder)).values():
        inside = template["spec"]
        assert inside["securityContext"]["runAsNonRoot"] is True
        assert inside["securityContext"]["runAsUser"] > 0
        for each in inside["containers"]:
            assert each["securityContext"]["allowPrivilegeEscalation"] is False
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            name, _, tag = each["image"].rpartition(":")
            assert name
            assert tag not in ("", "latest")


@folders
def test_a_pod_asks_for_what_it_may_use(folder: str) -> None:
    """Ray counts limits: a node that gives less would start more than it can run, and memory can't be lent."""
    for group in groups(cluster_spec(render(folder))).values():
        resources = container(group)["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        assert resources["requests"].get("nvidia.com/gpu") == resources["limits"].get("nvidia.com/gpu")
        assert "cpu" in resources["limits"]


@pytest.mark.parametrize("fleet", ["gke", "eks"])
def test_only_spot_learners_run_on_spot_nodes(fleet: str) -> None:
    spot = SPOT_NODES[fleet]
    templates = pods_of(render(f"{fleet}/cluster"))
    for owner, template in templates.items():
        inside = template["spec"]
        selector = inside.get("nodeSelector", {})
        tolerated = {(t["key"], t.get("value")) for t in inside.get("tolerations", [])}
        on_spot = spot["nodeSelector"].items() <= selector.items()
        assert on_spot == (owner == "spot")
        assert (spot["taint"] in tolerated) == on_spot
        assert (("nvidia.com/gpu", None) in tolerated) == (owner in ("stable", "spot"))
        if not on_spot:  # a toleration alone keeps nobody off: that is what these are for
            assert keeps_off(inside, *spot["nodeSelector"].items())


def keeps_off(inside: Manifest, spot: tuple[str, str]) -> bool:
    """Whether a pod can't come to a node with this label."""
    label, value = spot
    if inside.get("nodeSelector", {}).get(label, value) != value:
        return True
    required = inside["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    return {"key": label, "operator": "NotIn", "values": [value]} in term["matchExpressions"]


@folders
def test_accelerators_are_called_as_ray_calls_them(folder: str) -> None:
    known = {value for name, value in vars(accelerators).items() if name.isupper()}
    for name, group in groups(cluster_spec(render(folder))).items():
        kind = group["labels"].get("ray.io/accelerator-type")
        assert (kind is not None) == ("nvidia.com/gpu" in container(group)["resources"]["limits"]), name
        assert kind is None or kind in known


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_job_that_fails_is_tried_on_a_new_cluster(fleet: str) -> None:
    job = find(render(f"{fleet}/job"), "RayJob")["spec"]
    assert job["backoffLimit"] > 0
    assert job["shutdownAfterJobFinishes"] is True
    assert "run.resume=auto" in job["entrypoint"].split()
