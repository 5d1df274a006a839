"""`scripts/env.sh` makes the environment: with a Python of one's own choice, and once."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.timeout(300)

PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "small"
version = "1"
"""
BACKEND = """
import os, zipfile

def build_editable(folder, settings=None, metadata=None):
    name = "small-1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("small.pth", os.getcwd())
        wheel.writestr("small-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: small\\nVersion: 1\\n")
        wheel.writestr("small-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("small-1.dist-info/RECORD", "")
    return name
"""


@pytest.fixture
def project(tmp_path):
    """A project that needs nothing from anywhere, with this one's script, and a Python that notes its uses."""
    folder = tmp_path / "project"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "env.sh", folder / "scripts")
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "small.py").write_text("ANSWER = 42")
    other = tmp_path / "other-python"
    other.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/uses\nexec {sys._base_executable} "$@"\n')
    other.chmod(0o755)
    return folder


def prepare(project, python):
    script = (
        'set -euo pipefail; source scripts/env.sh; prepare "" && "$VENV_PYTHON" -c "import small; print(small.ANSWER)"'
    )
    env = {**os.environ, "PYTHON": str(python), "PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1"}
    env.pop("PYTHONPATH", None)
    return subprocess.run(["bash", "-c", script], cwd=project, env=env, capture_output=True, text=True)


def test_another_python_makes_it_once(project, tmp_path):
    other, uses = tmp_path / "other-python", tmp_path / "uses"
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "python").symlink_to(tmp_path / "gone")  # of a Python that is not there any more
    first = prepare(project, other)
    assert (first.returncode, first.stdout) == (0, "42\n"), first.stderr
    assert "Setting up .venv" in first.stderr
    assert "-m venv --clear .venv" in uses.read_text()
    uses.unlink()

    again = prepare(project, other)
    assert (again.returncode, again.stdout, again.stderr) == (0, "42\n", "")
    assert not uses.exists()

    (project / "pyproject.toml").write_text(PROJECT + "# changed")  # the environment is good: only installed into
    changed = prepare(project, other)
    assert (changed.returncode, changed.stdout) == (0, "42\n"), changed.stderr
    assert "venv" not in uses.read_text()


def test_without_a_python_that_is_new_enough_it_says_so(project, tmp_path):
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    for name in ("python3.11", "python3", "python"):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(old)
    script = "source scripts/env.sh; prepare ''"
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHON": str(old)}
    refused = subprocess.run(["bash", "-c", script], cwd=project, env=env, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "Python 3.11 or newer is needed" in refused.stderr
    assert not (project / ".venv").exists()
