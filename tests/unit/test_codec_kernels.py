"""The compiled kernels and those in numpy are one: the same bits for every input. And they work without a cache."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from app.diloco.codec import get_codec
from app.diloco.codecs import compiled, plain
from app.diloco.codecs.blocks import BLOCK_CODECS
from app.diloco.codecs.kernels import Kernels, load_kernels

ROOT = Path(__file__).parents[2]
SPECIAL = np.array([0, -0.0, 1e-45, -1e-45, 1e-38, 3.4028e38, -3.4028235e38, np.nan, np.inf, 0.5, 1.5, 2.5], np.float32)


def through(kernels: Kernels, name: str, x: np.ndarray, block: int) -> bytes:
    scales = np.full(-(-x.size // block), 0xABCD, np.uint16)
    codes = np.full(x.size if name == "int8" else -(-x.size // 2), 0xEE, np.uint8)
    out = np.full(x.size, 42, np.float32)
    kernels.encode(x, scales, codes, block)
    kernels.decode(scales, codes, out, block)
    return scales.tobytes() + codes.tobytes() + out.tobytes()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_both_give_the_same_bits(name: str) -> None:
    fast, slow = load_kernels(name), plain.kernels(name)
    assert "numba" in type(fast.encode).__module__
    numbers = np.random.default_rng(7)
    for i in range(3000):
        n, block = int(numbers.integers(0, 300)), int(numbers.choice([16, 64, 128]))
        x = (numbers.standard_normal(n) * 10.0 ** numbers.uniform(-40, 37)).astype(np.float32)
        if i % 3 == 0:
            x = numbers.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
        if i % 2 and n:
            x[numbers.integers(0, n, 3)] = numbers.choice(SPECIAL, 3)
        assert through(fast, name, x, block) == through(slow, name, x, block), i


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_both_decode_garbage_alike(name: str) -> None:
    numbers = np.random.default_rng(8)
    for n in range(130):
        scales = numbers.integers(0, 2**16, -(-n // 16), dtype=np.uint16)
        codes = numbers.integers(0, 256, n if name == "int8" else -(-n // 2), dtype=np.uint8)
        results = [np.full(n, 42, np.float32) for _ in range(2)]
        for kernels, out in zip((load_kernels(name), plain.kernels(name)), results, strict=True):
            kernels.decode(scales, codes, out, 16)
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_two_threads_encode_at_once(name: str) -> None:
    codec = get_codec(name, 64)
    inputs = [torch.randn(300_001, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    alone = [codec.encode(x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            payload = codec.encode(inputs[i])
            same = torch.equal(codec.decode(payload, 300_001), codec.decode(alone[i], 300_001))
            if not np.array_equal(payload, alone[i]) or not same:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def python(code: str, **environment: str) -> str:
    env = os.environ | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_numba_the_codecs_work_the_same() -> None:
    code = """
import sys
sys.modules["numba"] = None
import torch
from app.diloco.codec import get_codec
print([get_codec(name, 64).encode(torch.arange(100.0)).sum() for name in ("int8", "int4", "fp4")])
assert "app.diloco.codecs.compiled" not in sys.modules
"""
    here = [get_codec(name, 64).encode(torch.arange(100.0)).sum() for name in BLOCK_CODECS]
    assert python(code) == str(here)


def test_numba_is_imported_for_the_block_codecs_alone() -> None:
    code = """
import sys
import app.diloco.replica, app.diloco.protocol
from app.diloco.codec import get_codec
get_codec("fp32", 64), get_codec("bf16", 64)
assert "numba" not in sys.modules
get_codec("fp4", 64)
assert "numba" in sys.modules
"""
    python(code)


def test_compiles_where_no_cache_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.caching import FunctionCache

    monkeypatch.setattr(FunctionCache._impl_class, "_locator_classes", [])
    kernels = compiled.kernels("int8")
    x = np.linspace(-1, 1, 100, dtype=np.float32)
    assert through(kernels, "int8", x, 64) == through(plain.kernels("int8"), "int8", x, 64)


ENCODED = """
import torch
from app.diloco.codec import get_codec
from app.diloco.codecs.kernels import load_kernels
{before}
codec = get_codec("int8", 64)
print(codec.encode(torch.arange(100.0)).sum(), type(load_kernels("int8").encode).__module__.split(".")[0])
"""


def encoded(cache: Path, before: str = "") -> str:
    """What another process with this cache folder makes of some numbers, and of which module its kernels are."""
    return python(ENCODED.format(before=before), NUMBA_CACHE_DIR=str(cache))


def encoded_here(module: str) -> str:
    return f"{get_codec('int8', 64).encode(torch.arange(100.0)).sum()} {module}"


@pytest.fixture(scope="module")
def filled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numba")
    assert encoded(folder) == encoded_here("numba")
    return folder


@pytest.mark.parametrize(("kind", "share"), [("*.nbi", 0.0), ("*.nbi", 0.5), ("*.nbc", 0.5)])
def test_a_truncated_cache_is_done_without(kind: str, share: float, filled_cache: Path, tmp_path: Path) -> None:
    """As a process leaves it that dies while it writes, or a disk that is full."""
    shutil.copytree(filled_cache, tmp_path, dirs_exist_ok=True)
    files = list(tmp_path.rglob(kind))
    assert len(files) >= 2  # encode and decode
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(whole[: int(share * len(whole))])
    assert encoded(tmp_path) == encoded_here("numba")


def test_a_cache_that_can_not_be_written_is_done_without(tmp_path: Path) -> None:
    """No file of this process may hold a byte, as on a full disk."""
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    assert encoded(tmp_path, full) == encoded_here("numba")
    assert not any(file.stat().st_size for file in tmp_path.rglob("*.nb?"))


def test_where_nothing_compiles_numpy_takes_over(tmp_path: Path) -> None:
    broken = """
from numba.core.dispatcher import Dispatcher
def compile(self, signature):
    raise SystemError("no code for this processor")
Dispatcher.compile = compile
"""
    assert encoded(tmp_path, broken) == encoded_here("builtins")
