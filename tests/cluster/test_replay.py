"""A run's merges, computed again from what it recorded."""

import subprocess
import sys
from pathlib import Path

import pytest

from actors.spec import SYNCER
from app.replay import main
from tests.cluster.harness import kill, wait_for

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[2]


def nbytes(codec: str, numel: int) -> int:
    """Bytes of a contribution: of int4, two codes a byte and a scale of 2 bytes for each 64 elements."""
    return 4 * numel if codec == "fp32" else 2 * -(-numel // 64) + -(-numel // 2)


@pytest.fixture
def replay(capsys):
    """Replays: exit code, standard output, error output."""

    def run(folder: Path) -> tuple[int, str, str]:
        capsys.readouterr()
        return main([str(folder)]), *capsys.readouterr()

    return run


@pytest.mark.parametrize("codec", ["int4", pytest.param("fp32", marks=pytest.mark.slow)])
def test_every_version_is_computed_again_and_a_difference_is_named(start, codec, replay):
    run = start("tape.payloads=true", f"diloco.codec_up={codec}", f"diloco.codec_down={codec}", "train.tokens=60000")
    run.wait_merges(4)
    kill(run.syncer().pid)
    wait_for("the syncer is back", lambda: (s := run.status(SYNCER)) and s.epoch > 2)
    summary = run.wait_done()
    folder = run.spec.work_dir
    sizes = [nbytes(codec, fragment.numel) for fragment in run.spec.layout.fragments]
    assert {file.stat().st_size for file in folder.glob("payloads/*/*.payload")} == set(sizes)
    whole = [4 * fragment.numel for fragment in run.spec.layout.fragments]
    shares = [size / full for size, full in zip(sizes, whole, strict=True)]
    assert min(shares) <= summary["bytes"]["up"] / summary["bytes"]["up_fp32"] <= max(shares)
    assert summary["bytes"]["up"] >= min(sizes) * summary["merges"]
    found = subprocess.run([sys.executable, "-m", "app.replay", folder], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr + found.stdout
    assert found.stdout.startswith(f"{summary['merges']} versions of 2 fragments are equal; ")
    assert replay(folder) == (0, found.stdout, "")
    merge = run.events("merge")[5]
    entry = merge["contains"][0]
    payload = folder / "payloads" / str(entry["epoch"])
    payload /= f"{entry['round']:09d}-{entry['learner']}-{entry['incarnation']}.payload"
    good = payload.read_bytes()
    payload.write_bytes(bytes([good[0] ^ 0x40]) + good[1:])
    named = f"round {merge['round']}, fragment {merge['fragment']}, version {merge['version']}: "
    code, out, _ = replay(folder)
    assert (code, out[: len(named)]) == (1, named)
    assert "5 versions before it are equal" in out
    payload.unlink()
    told = f"error: {named}what {entry['learner']}#{entry['incarnation']} gave is missing\n"
    assert replay(folder) == (2, "", told)


def test_a_folder_without_what_is_needed_is_refused_in_one_line(start, tmp_path, replay):
    run = start("train.tokens=20000")
    run.wait_done()
    for folder in (run.spec.work_dir, tmp_path / "nowhere"):
        code, out, err = replay(folder)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert err.startswith("error: ")
