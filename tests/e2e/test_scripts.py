"""What `scripts/train.sh` says before it trains, and where it puts things."""

import subprocess

import pytest

from tests.e2e.conftest import clean_env

pytestmark = pytest.mark.timeout(120)


def train(repository, *arguments):
    script = repository / "scripts" / "train.sh"
    done = subprocess.run([script, *arguments], cwd="/", env=clean_env(), capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


def test_help_names_every_group(repository):
    code, out, err = train(repository, "--help")
    assert (code, err) == (0, "")
    for group in ("run", "model", "data", "train", "diloco", "pools", "chaos", "tracking", "eval", "checkpoint"):
        assert group in out


def test_a_wrong_key_is_one_line_and_exit_code_2(repository):
    code, out, err = train(repository, "train.tokns=1")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert "train.tokns" in line
    assert not (repository / "runs" / "main").exists()
