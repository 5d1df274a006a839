"""How fast the codecs are: `python scripts/bench/codec.py [--mb MB] [--block B] [--rounds N]`.

Encodes and decodes a vector of fp32 on one thread through the interface that learners and syncer use, results in new
memory each time, and copies it in turn with each (np.copyto into memory that is there already). Speed is bytes of
fp32 a second; a ratio is the median over rounds of codec to copy in the same round. Every codec that is compiled has
to reach half the speed of the copy: else the exit code is 1. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.update(OMP_NUM_THREADS="1")

import numpy as np
import torch

from app.diloco.codec import get_codec
from app.diloco.codecs.blocks import BLOCK_CODECS
from app.diloco.settings import CODECS

TARGET = 0.5
WARM_ROUNDS = 2


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call, without the release of what it returns."""
    start = time.perf_counter()
    result = work()
    took = time.perf_counter() - start
    del result
    return took


def compare(copy: Callable[[], object], work: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median seconds of copy and work, taken in turn, and the median of their ratio in each round."""
    pairs = [(seconds(copy), seconds(work)) for _ in range(rounds + WARM_ROUNDS)][WARM_ROUNDS:]
    copied, worked = zip(*pairs, strict=True)
    ratio = statistics.median(one / other for one, other in pairs)
    return statistics.median(copied), statistics.median(worked), ratio


def measure(name: str, x: torch.Tensor, block: int, rounds: int) -> dict[str, Any]:
    """Speeds in GB/s of fp32, ratios to the copy, and what the codec does to a Gaussian vector."""
    codec = get_codec(name, block)
    n = x.numel()
    source, target = x.numpy(), np.zeros(n, np.float32)
    payload = codec.encode(x)
    error = float((codec.decode(payload, n) - x).norm() / x.norm())
    row: dict[str, Any] = {"codec": name, "bits": 8 * payload.size / n, "error": error}
    for kind, work in (("encode", lambda: codec.encode(x)), ("decode", lambda: codec.decode(payload, n))):
        copy_s, work_s, ratio = compare(lambda: np.copyto(target, source), work, rounds)
        speed = {"gb_s": x.nbytes / work_s / 1e9, "copy_gb_s": x.nbytes / copy_s / 1e9, "ratio": ratio}
        row |= {f"{kind}_{key}": value for key, value in speed.items()}
    return row


def main() -> None:
    """Print the table, then one line of JSON; exit with 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=64, help="size of the vector in MiB of fp32")
    parser.add_argument("--block", type=int, default=64, help="elements that share a scale")
    parser.add_argument("--rounds", type=int, default=21, help="rounds of each comparison")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(arguments.mb * 2**18, generator=torch.Generator().manual_seed(1))
    print("        bits  error    encode  (copy)  ratio   decode  (copy)  ratio   [GB/s of fp32, one thread]")
    rows = []
    for name in CODECS:
        row = measure(name, x, arguments.block, arguments.rounds)
        rows.append(row)
        speeds = "  ".join(
            f"{row[f'{kind}_gb_s']:6.2f}  {row[f'{kind}_copy_gb_s']:6.2f}  {row[f'{kind}_ratio']:5.2f}"
            for kind in ("encode", "decode")
        )
        print(f"{name:6} {row['bits']:5.2f}  {row['error']:.4f}  {speeds}", flush=True)
    ratios = [min(row["encode_ratio"], row["decode_ratio"]) for row in rows if row["codec"] in BLOCK_CODECS]
    reached = min(ratios) >= TARGET
    print(json.dumps({"target": TARGET, "reached": reached, "worst_ratio": min(ratios), "codecs": rows}))
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    main()
