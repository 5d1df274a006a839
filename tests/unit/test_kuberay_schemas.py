"""Every manifest of docker/kuberay is one that KubeRay and Kubernetes take, down to the last key.

KubeRay's schemas are not part of this project: the environment variable KUBERAY_CRDS names a folder that holds
`ray.io_rayclusters.yaml` and `ray.io_rayjobs.yaml`. The rules that are written into them as CEL are not looked at.
"""

import functools
import os
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.manifests import FOLDERS, KINDS, KUBERAY, Manifest, cluster_spec, find, render

CRDS = os.environ.get("KUBERAY_CRDS") or None
FILES = {"RayCluster": "ray.io_rayclusters.yaml", "RayJob": "ray.io_rayjobs.yaml"}
KUBERNETES = "1.33"
"""A version of Kubernetes that all three kinds of fleet can have."""
METADATA = {
    "type": "object",
    "required": ["name", "namespace"],
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
with_crds = pytest.mark.skipif(CRDS is None, reason="KUBERAY_CRDS names no folder with KubeRay's CRDs")


def close(schema: object) -> None:
    """Refuse keys that a schema does not name: the API server would drop them, and a typo with them."""
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict) and "type" in schema:
            schema.setdefault("additionalProperties", False)
        for value in schema.values():
            close(value)
    elif isinstance(schema, list):
        for value in schema:
            close(value)


@functools.cache
def validator(kind: str) -> Draft202012Validator:
    assert CRDS is not None
    crd = yaml.load((Path(CRDS) / FILES[kind]).read_text(), Loader=yaml.CSafeLoader)  # a megabyte: not in Python
    (version,) = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = METADATA
    close(schema)
    return Draft202012Validator(schema)


def faults(manifest: Manifest) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator(manifest["kind"]).iter_errors(manifest)]


@with_crds
@pytest.mark.parametrize("folder", FOLDERS)
def test_ray_resources_fit_kuberays_schema(folder: str) -> None:
    manifests = render(folder)
    ray = [m for m in manifests if m["apiVersion"] == "ray.io/v1"]
    assert [m["kind"] for m in ray] == [KINDS[folder.partition("/")[2]]]
    assert faults(ray[0]) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_all_others_fit_kubernetes_schema(folder: str) -> None:
    native = [m for m in render(folder) if m["apiVersion"] != "ray.io/v1"]
    assert {"ServiceAccount", "Service", "StatefulSet", "PodDisruptionBudget"} <= {m["kind"] for m in native}
    for manifest in native:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def put(manifest: Manifest, path: str, value: object) -> Manifest:
    """Set what lies at a path such as `spec/workerGroupSpecs/0/priority`."""
    *way, last = path.split("/")
    node = manifest
    for key in way:
        node = node[int(key)] if isinstance(node, list) else node[key]
    node[last] = value
    return manifest


@with_crds
@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec/workerGroupSpecs/2/prioritty", 10, "prioritty"),
        ("spec/workerGroupSpecs/2/priority", "first", "priority"),
        ("spec/autoscalerOptions/version", "v3", "v3"),
        ("spec/autoscalerOptions/idleTimeout", 60, "idleTimeout"),
        ("spec/gcsFaultToleranceOptions/redisAdress", "redis:6379", "redisAdress"),
        ("spec/headGroupSpec/template/spec/containers/0/securityContext/runAsNonroot", True, "runAsNonroot"),
        ("spec/workerGroupSpecs/1/template/spec/tolerations", [{"keys": "spot"}], "keys"),
        ("spec/workerGroupSpecs/1/template/spec/terminationGracePeriodSeconds", "60s", "60s"),
        ("specs", {}, "specs"),
        ("metadata/label", {}, "label"),
    ],
)
def test_kuberays_schema_finds_mistakes(path: str, value: object, said: str) -> None:
    cluster = put(find(render("gke/cluster"), "RayCluster"), path, value)
    (fault,) = faults(cluster)
    assert said in fault


def test_kubernetes_schema_finds_mistakes() -> None:
    manifests = render("kind/cluster")
    redis = put(find(manifests, "StatefulSet"), "spec/template/spec/containers/0/imagePullPolice", "Always")
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePullPolice"):
        kubernetes_validate.validate(redis, KUBERNETES, strict=True)


@pytest.mark.parametrize("fleet", ["kind", "gke", "eks"])
def test_a_job_has_the_cluster_of_its_fleet(fleet: str) -> None:
    cluster, job = render(f"{fleet}/cluster"), render(f"{fleet}/job")
    assert cluster_spec(job) == cluster_spec(cluster)

    def rest(manifests: list[Manifest]) -> list[Manifest]:
        return [m for m in manifests if m["kind"] not in KINDS.values()]

    assert rest(job) == rest(cluster)


def test_every_folder_is_rendered() -> None:
    """Nothing under docker/kuberay is left out of these tests: each file is named by a kustomization that they use."""
    named = {KUBERAY / folder for folder in FOLDERS}
    todo = list(named)
    while todo:
        folder = todo.pop()
        if not folder.is_dir():
            continue
        text = yaml.safe_load((folder / "kustomization.yaml").read_text())
        paths = [*text.get("resources", []), *text.get("components", [])]
        paths += [patch["path"] for patch in text.get("patches", []) if "path" in patch]
        found = {(folder / path).resolve() for path in paths} | {folder / "kustomization.yaml"}
        todo += found - named
        named |= found
    assert set(KUBERAY.rglob("*.yaml")) <= named
