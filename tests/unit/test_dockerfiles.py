"""The images: what they are built from, what goes into them, and that their steps work in a clean folder."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.dockerfiles import DOCKER, IMAGES, PINS, ROOT, Step, below, context, steps

HADOLINT = Path(sys.executable).with_name("hadolint")
EXTRAS = ("wandb", "s3", "gcs")
HOME = "/home/ray"
CUDA = "cu130"
"""CUDA of the base image: that which torch brings."""

images = pytest.mark.parametrize("image", IMAGES)


def pins() -> dict[str, Requirement]:
    lines = PINS.read_text().splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


def version_of(pin: Requirement) -> str:
    (only,) = pin.specifier
    assert only.operator == "=="
    assert "*" not in only.version
    return only.version


def only(image: str, name: str) -> Step:
    (found,) = [step for step in steps(image) if step.name == name]
    return found


@images
def test_hadolint_has_nothing_to_say(image: str) -> None:
    done = subprocess.run([HADOLINT, DOCKER / f"{image}.Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_has_something_to_say() -> None:
    done = subprocess.run([HADOLINT, "-"], input="FROM debian\nRUN pip install x\n", text=True, stdout=subprocess.PIPE)
    assert done.returncode != 0
    assert {"DL3006", "DL3013", "DL3042"} <= set(re.findall(r"DL\d+", done.stdout))


@images
def test_the_base_is_rays_own_of_the_same_version(image: str) -> None:
    platform = {"cpu": "cpu", "cuda": CUDA}[image]
    assert only(image, "FROM").text == f"rayproject/ray:{version_of(pins()['ray'])}-py311-{platform}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"


@images
def test_it_does_not_run_as_root(image: str) -> None:
    assert only(image, "USER").text == "1000"
    assert all("sudo" not in step.text for step in steps(image))
    assert all(step.text.startswith("--chown=1000:100 ") for step in steps(image) if step.name == "COPY")


def test_the_images_differ_in_base_and_torch_alone() -> None:
    def common(image: str) -> list[Step]:
        return [step for step in steps(image) if step.name not in ("FROM", "ARG")]

    assert common("cpu") == common("cuda")
    assert [step.name for step in steps("cuda") if step.name == "ARG"] == []


def test_all_that_the_project_needs_is_pinned_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [d for extra in EXTRAS for d in project["optional-dependencies"][extra]]
    found = pins()
    for text in wanted:
        requirement = Requirement(text)
        pin = found[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version_of(pin)), text
        assert requirement.extras <= pin.extras
    assert all(version_of(pin) for pin in found.values())


def test_only_what_is_copied_is_sent_to_a_build() -> None:
    sent = context(ROOT)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    code = {name for name in tracked if name.partition("/")[0] in ("app", "actors", "conf")}
    assert sent >= code | {"docker/requirements.txt"}
    for image in IMAGES:
        sources = [step.copied[0] for step in steps(image) if step.name == "COPY"]
        assert {name for name in sent if not any(below(name, source) for source in sources)} == set()
        assert all(any(below(name, source) for name in sent) for source in sources)


def test_caches_runs_and_secrets_are_not_sent_to_a_build(tmp_path: Path) -> None:
    kept = {"app/train.py", "actors/driver.py", "conf/pools/gke.yaml", "docker/requirements.txt", "app/diloco/ring.py"}
    left = {
        ".git/config",
        ".venv/bin/python",
        "runs/main/model/model.safetensors",
        "wandb/x",
        "tests/unit/test_config.py",
        "docker/kuberay/secrets.env",
        "docker/cpu.Dockerfile",
        "app/__pycache__/train.cpython-311.pyc",
        "app/diloco/__pycache__/ring.cpython-311.pyc",
        "application.env",
    }
    for name in kept | left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert context(tmp_path) == kept


def build(image: str, home: Path, arguments: dict[str, str]) -> dict[str, str]:
    """Carry out the steps of a Dockerfile in a folder instead of /home/ray, with a Python of its own.

    Returns the environment of the image's processes. `arguments` are those of `docker build --build-arg`.
    """
    venv.create(home / "python", with_pip=True)
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RAY_ADDRESS")}
    env |= {"PATH": f"{home}/python/bin:{os.environ['PATH']}", "HOME": str(home)}
    for step in steps(image):
        moved = Step(step.name, step.text.replace(HOME, str(home)))
        if step.name == "ARG":
            env |= moved.variables | arguments
        elif step.name == "ENV":
            env |= moved.variables
        elif step.name == "COPY":
            source, target = moved.copied
            for name in context(ROOT):
                if below(name, source):
                    place = Path(target) / Path(name).relative_to(source)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / name, place)
        elif step.name == "RUN":
            subprocess.run(["bash", "-c", moved.text], env=env, cwd=home, check=True)
    return env


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_steps_of_the_image_work_in_a_clean_folder(tmp_path: Path) -> None:
    """Those of the other image are the same. Torch comes from where pip looks here, not from PyTorch's own index."""
    env = build("cpu", tmp_path, {"PIP_EXTRA_INDEX_URL": ""})
    workdir = only("cpu", "WORKDIR").text.replace(HOME, str(tmp_path))

    def run(*command: str) -> str:
        return subprocess.run(command, env=env, cwd=workdir, check=True, capture_output=True, text=True).stdout

    installed = {p["name"]: p["version"] for p in json.loads(run("pip", "list", "--format=json"))}
    installed = {canonicalize_name(name): version.partition("+")[0] for name, version in installed.items()}
    assert installed.pop("pip")
    pinned = {name: version_of(pin) for name, pin in pins().items()}
    brought = {name for name in installed if name not in pinned and not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert brought == set(), "not pinned"
    assert {name: installed[name] for name in pinned} == pinned
    assert "No broken requirements" in run("pip", "check")
    assert "train.tokens" in run("python", "-m", "app.train", "--help")
    assert run("python", "-c", "import app.train, conf; print(app.train.__file__)").startswith(workdir)
    (tmp_path / "elsewhere").mkdir()
    workdir = str(tmp_path / "elsewhere")  # where processes of the cluster start
    assert "train.tokens" in run("python", "-m", "app.train", "--help")
