"""A stored trajectory of merges and outer steps: a change of the arithmetic beyond rounding shows here.

Meant changes: `UPDATE_GOLDEN=1 python -m pytest tests/unit/test_golden_merge.py` writes the file anew.
"""

import json
import os
from pathlib import Path

import torch

from app.diloco.codec import get_codec
from app.diloco.fragments import Layout, TensorSpec, build_layout
from app.diloco.merge import merge_fragment, token_weight
from app.diloco.outer import outer_step

GOLDEN = Path(__file__).parent / "golden" / "merge.json"
ROUNDS = 4


def waves(n: int, phase: int) -> torch.Tensor:
    """n numbers in [-1, 1) from integer arithmetic, the same on every machine."""
    return torch.tensor([((i * 7919 + phase * 104_729) % 2048 - 1024) / 1024 for i in range(n)])


def trajectory(layout: Layout, codec_name: str) -> list[dict[str, list[float]]]:
    """Four rounds of every fragment with 1, 2, 3 and 1 learners; what Θ and the momentum are after each."""
    codec = get_codec(codec_name)
    thetas = {f.index: waves(f.numel, f.index) for f in layout.fragments}
    momenta = {f.index: torch.zeros(f.numel) for f in layout.fragments}
    rows = []
    for round_ in range(ROUNDS):
        learners = (1, 2, 3, 1)[round_]
        weights = [token_weight(1024 * (m + 1), 24 - m) for m in range(learners)]
        for f in layout.fragments:
            updates = [0.1 * waves(f.numel, 10 * round_ + m + 1) for m in range(learners)]
            received = [codec.decode(codec.encode(update), f.numel) for update in updates]
            grad = merge_fragment(f, layout, received, weights, "rda", 0.02)
            thetas[f.index], momenta[f.index] = outer_step(
                "nesterov", thetas[f.index], momenta[f.index], grad, 0.7, 0.9
            )
            rows.append({"theta": thetas[f.index].tolist(), "momentum": momenta[f.index].tolist()})
    return rows


def test_trajectory_is_the_stored_one() -> None:
    specs = [
        TensorSpec("embed", (5, 2), True),
        TensorSpec("scale", (), False),
        TensorSpec("w", (3, 3), False),
    ]
    layout = build_layout(specs, 2)
    got = {"layout": layout.hash} | {codec: trajectory(layout, codec) for codec in ("fp32", "bf16")}
    if os.environ.get("UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(json.dumps(got, indent=1) + "\n")
    want = json.loads(GOLDEN.read_text())
    assert got["layout"] == want["layout"]
    for codec in ("fp32", "bf16"):
        assert len(want[codec]) == ROUNDS * len(layout.fragments)
        for row, stored in zip(got[codec], want[codec], strict=True):
            for key in ("theta", "momentum"):
                torch.testing.assert_close(torch.tensor(row[key]), torch.tensor(stored[key]), rtol=1e-6, atol=1e-7)
