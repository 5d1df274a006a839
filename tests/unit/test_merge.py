"""The merge against an independent float64 reference, by hand, and against the promises of the protocol."""

import itertools

import numpy as np
import pytest
import torch

from app.diloco.fragments import TensorSpec, build_layout, pieces_of
from app.diloco.merge import NORM_CHUNK, merge_fragment, norm, rda, token_weight, weighted_mean

SHAPES = [(), (1,), (1, 5), (7,), (13, 17), (101, 3), (NORM_CHUNK + 1,)]
DTYPES = [torch.float32, torch.bfloat16]
THRESHOLD = 0.02


def updates(count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Vectors of norms that differ by much, with a common part so that their directions do not cancel."""
    generator = torch.Generator().manual_seed(count)
    common = torch.randn(shape, generator=generator)
    noise = [torch.randn(shape, generator=generator) for _ in range(count)]
    return [(10.0 ** (m - 3) * (common.abs() + 0.1 * n)).to(dtype) for m, n in enumerate(noise)]


def weights(count: int) -> list[float]:
    return [token_weight(1024 * (m + 1), m + 3) for m in range(count)]


def mean64(vs: list[torch.Tensor], ws: list[float]) -> np.ndarray:
    stacked = np.stack([v.double().numpy() for v in vs])
    return np.tensordot(np.asarray(ws), stacked, axes=1) / np.sum(ws)


def rda64(vs: list[torch.Tensor], ws: list[float]) -> np.ndarray:
    flat = [v.double().numpy().ravel() for v in vs]
    radius = np.average([np.linalg.norm(v) for v in flat], weights=ws)
    direction = np.average([v / np.linalg.norm(v) for v in flat], axis=0, weights=ws)
    return (radius * direction / np.linalg.norm(direction)).reshape(vs[0].shape)


def assert_close(got: torch.Tensor, want: np.ndarray, tolerance: float = 1e-6) -> None:
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert np.linalg.norm(got.double().numpy() - want) <= tolerance * np.linalg.norm(want)


def test_token_weight_by_hand() -> None:
    assert token_weight(6000, 3) == 12_000_000.0  # 6000 tokens at 2000 a step
    assert token_weight(0, 5) == 0.0
    assert token_weight(0, 0) == token_weight(10, 0) == 0.0
    # Twice the tokens in the same steps count four times, in twice the steps twice.
    assert token_weight(200, 10) == 4 * token_weight(100, 10)
    assert token_weight(200, 20) == 2 * token_weight(100, 10)


@pytest.mark.parametrize("counters", [(-1, 1), (1, -1)])
def test_negative_counters_are_refused(counters: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        token_weight(*counters)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_mean_equals_the_reference(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    vs, ws = updates(count, shape, dtype), weights(count)
    assert_close(weighted_mean(vs, ws), mean64(vs, ws))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rda_equals_the_reference(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    vs, ws = updates(count, shape, dtype), weights(count)
    assert_close(rda(vs, ws, THRESHOLD), rda64(vs, ws))


def test_rda_by_hand() -> None:
    # Norms 5 and 10, weights 3 and 1: radius 6.25. Mean direction (0.75·(0.6, 0.8) + 0.25·(0.8, −0.6)) has norm
    # √(0.65² + 0.45²) = √0.625.
    merged = rda([torch.tensor([3.0, 4.0]), torch.tensor([8.0, -6.0])], [3.0, 1.0], THRESHOLD)
    assert_close(merged, 6.25 * np.array([0.65, 0.45]) / np.sqrt(0.625))


def test_rda_of_one_is_that_one() -> None:
    for scale in (1e-12, 1.0, 1e12):
        v = scale * torch.randn(1009, generator=torch.Generator().manual_seed(3))
        assert_close(rda([v], [7.0], THRESHOLD), v.double().numpy())


@pytest.mark.parametrize("count", [2, 5, 16])
def test_rda_keeps_the_norm_of_orthogonal_updates(count: int) -> None:
    q, _ = torch.linalg.qr(torch.randn(101, count, dtype=torch.float64))
    lengths = [0.5 + m for m in range(count)]
    vs = [(length * q[:, m]).float() for m, length in enumerate(lengths)]
    assert norm(rda(vs, [1.0] * count, THRESHOLD)) == pytest.approx(np.mean(lengths), rel=1e-6)
    assert norm(weighted_mean(vs, [1.0] * count)) < 0.9 * np.mean(lengths)


def test_cancelling_directions_fall_back_to_the_mean() -> None:
    v = torch.randn(101, generator=torch.Generator().manual_seed(0))
    pair, ws = [v, -3.0 * v], [2.0, 2.0]
    assert torch.equal(rda(pair, ws, THRESHOLD), weighted_mean(pair, ws))
    assert norm(weighted_mean(pair, ws)) == pytest.approx(norm(v), rel=1e-6)


@pytest.mark.parametrize(("length", "falls_back"), [(0.019, True), (0.021, False)])
def test_the_threshold_is_on_the_norm_of_the_mean_direction(length: float, falls_back: bool) -> None:
    across = np.sqrt(1 - length**2)
    pair = [torch.tensor([across, length]), torch.tensor([-across, length])]
    assert norm(rda(pair, [1.0, 1.0], THRESHOLD)) == pytest.approx(length if falls_back else 1.0, rel=1e-4)


def test_zero_updates_have_no_direction() -> None:
    zero, v = torch.zeros(5), torch.tensor([0.0, 3.0, 0.0, 4.0, 0.0])
    # φ(0) = 0: the direction is v's, the radius is the mean norm.
    assert_close(rda([zero, v], [1.0, 1.0], THRESHOLD), 0.5 * v.double().numpy())
    for threshold in (0.0, THRESHOLD):
        assert rda([zero, zero], [1.0, 1.0], threshold).tolist() == [0.0] * 5


def test_the_smallest_numbers_stay_finite() -> None:
    vs = [torch.tensor([1e-45, 0.0]), torch.tensor([1e-38, 1e-38]), torch.tensor([1e30, 0.0])]
    assert torch.isfinite(rda(vs, [1.0, 1.0, 1.0], THRESHOLD)).all()


def test_a_member_without_weight_changes_nothing() -> None:
    vs, ws = updates(3, (101,)), weights(3)
    for merge in (weighted_mean, lambda v, w: rda(v, w, THRESHOLD)):
        with_it = merge([vs[0], torch.full((101,), 5.0), *vs[1:]], [ws[0], 0.0, *ws[1:]])
        assert torch.equal(with_it, merge(vs, ws))


@pytest.mark.parametrize("count", [3, 5])
def test_order_matters_only_to_rounding(count: int) -> None:
    vs, ws = updates(count, (13, 17)), weights(count)
    want_mean, want_rda = mean64(vs, ws), rda64(vs, ws)
    for order in itertools.permutations(range(count)):
        members, shares = [vs[m] for m in order], [ws[m] for m in order]
        assert_close(weighted_mean(members, shares), want_mean)
        assert_close(rda(members, shares, THRESHOLD), want_rda)


def test_norm_over_chunks() -> None:
    x = torch.randn(2 * NORM_CHUNK + 17, generator=torch.Generator().manual_seed(0))
    assert norm(x) == pytest.approx(np.linalg.norm(x.double().numpy()), rel=1e-12)
    assert norm(torch.zeros(0)) == 0.0
    assert norm(torch.tensor([3e38, 3e38])) == pytest.approx(3e38 * np.sqrt(2), rel=1e-6)


def test_bits_do_not_depend_on_threads() -> None:
    vs, ws = updates(3, (300_007,)), weights(3)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append((weighted_mean(vs, ws), rda(vs, ws, THRESHOLD)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_fragment_merges_embeddings_by_mean_and_the_rest_tensor_by_tensor() -> None:
    specs = [
        TensorSpec("embed", (11, 3), True),
        TensorSpec("w", (7, 5), False),
        TensorSpec("b", (5,), False),
        TensorSpec("scale", (), False),
    ]
    layout = build_layout(specs, 2)
    ws = weights(3)
    rules = set()
    for fragment in layout.fragments:
        flats = updates(3, (fragment.numel,))
        before = [flat.clone() for flat in flats]
        merged = merge_fragment(fragment, layout, flats, ws, "rda", THRESHOLD)
        assert all(torch.equal(flat, was) for flat, was in zip(flats, before, strict=True))
        columns = zip(*(pieces_of(fragment, flat) for flat in flats), strict=True)
        for (piece, got), column in zip(pieces_of(fragment, merged), columns, strict=True):
            vs = [view for _, view in column]
            reference = mean64 if piece.name == "embed" else rda64
            rules.add(reference)
            assert_close(got, reference(vs, ws))
    assert rules == {mean64, rda64}


def test_by_mean_every_tensor_is_the_weighted_mean() -> None:
    layout = build_layout([TensorSpec("embed", (11, 3), True), TensorSpec("w", (7, 5), False)], 2)
    for fragment in layout.fragments:
        vs = [torch.randn(fragment.numel, generator=torch.Generator().manual_seed(s)) for s in range(3)]
        merged = merge_fragment(fragment, layout, vs, [1.0, 2.0, 5.0], "mean", THRESHOLD)
        want = (vs[0].double() + 2 * vs[1].double() + 5 * vs[2].double()) / 8
        assert (merged.double() - want).norm() <= 1e-6 * want.norm()


def test_a_cut_embedding_merges_as_a_whole_one() -> None:
    whole = build_layout([TensorSpec("embed", (11, 3), True), TensorSpec("w", (3,), False)], 1)
    cut = build_layout([TensorSpec("embed", (11, 3), True), TensorSpec("w", (3,), False)], 2)
    vs = updates(3, (36,))
    merged = merge_fragment(whole.fragments[0], whole, vs, weights(3), "rda", THRESHOLD)
    parts = []
    for fragment in cut.fragments:
        rows = [(p.start_row * 3, p.stop_row * 3) if p.name == "embed" else (33, 36) for p in fragment.pieces]
        flats = [torch.cat([v[start:stop] for start, stop in rows]) for v in vs]
        part = merge_fragment(fragment, cut, flats, weights(3), "rda", THRESHOLD)
        parts += [(start, view.ravel()) for (start, _), (_, view) in zip(rows, pieces_of(fragment, part), strict=True)]
    assert len(parts) == 3
    assert torch.equal(torch.cat([view for _, view in sorted(parts, key=lambda p: p[0])]), merged)


@pytest.mark.parametrize(
    ("vs", "ws", "message"),
    [
        ([], [], "no contribution"),
        ([torch.ones(4)], [0.0], "all weights are 0"),
        ([torch.ones(4)], [1.0, 1.0], "1 contributions but 2 weights"),
        ([torch.ones(4), torch.ones(1)], [1.0, 1.0], "differ in shape"),
        ([torch.ones(4)], [-1.0], "at least 0"),
        ([torch.ones(4)], [float("nan")], "finite"),
    ],
)
def test_what_cannot_be_merged_is_refused(vs: list[torch.Tensor], ws: list[float], message: str) -> None:
    layout = build_layout([TensorSpec("w", (4,), False)], 1)
    with pytest.raises(ValueError, match=message):
        weighted_mean(vs, ws)
    with pytest.raises(ValueError, match=message):
        rda(vs, ws, THRESHOLD)
    with pytest.raises(ValueError, match=message):
        merge_fragment(layout.fragments[0], layout, vs, ws, "rda", THRESHOLD)


def test_a_vector_of_another_size_is_refused() -> None:
    layout = build_layout([TensorSpec("w", (4,), False)], 1)
    with pytest.raises(ValueError, match="4 elements"):
        merge_fragment(layout.fragments[0], layout, [torch.ones(5)], [1.0], "rda", THRESHOLD)
