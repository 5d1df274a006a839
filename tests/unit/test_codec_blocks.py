"""int8, int4 and fp4 against a slow version in plain Python, written from the text of `app/diloco/codecs/blocks.py`."""

import math
import random
import struct

import numpy as np
import pytest
import torch

from app.diloco.codec import get_codec
from app.diloco.codecs.blocks import BLOCK_CODECS, BlockCodec
from app.diloco.settings import CODEC_BLOCKS

TOP = {"int8": 127, "int4": 7, "fp4": 64}
E3M0 = (0, 1, 2, 4, 8, 16, 32, 64)
TINY, HUGE = 2.0**-126, 3.4028234663852886e38


def fp32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16_bits(x: float) -> int:
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    low, high = bits & 0xFFFF, bits >> 16
    return high + (low > 0x8000 or (low == 0x8000 and high & 1))


def from_bf16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def nibbles(codes: list[int]) -> list[int]:
    half = (len(codes) + 1) // 2
    high = codes[half:] + [0] * (2 * half - len(codes))
    return [low | high << 4 for low, high in zip(codes[:half], high, strict=True)]


def code_of(name: str, y: float) -> int:
    if name != "fp4":
        return round(y) & (0xFF if name == "int8" else 0xF)  # Python rounds ties to even too
    size = min(range(8), key=lambda e: (abs(E3M0[e] - abs(y)), e & 1))
    return size | 8 * (math.copysign(1, y) < 0)


def value_of(name: str, code: int) -> float:
    if name == "fp4":
        return E3M0[code & 7] * (-1.0 if code & 8 else 1.0)
    bits = 8 if name == "int8" else 4
    return float(code - (code >> (bits - 1) << bits))


def reference(name: str, x: list[float], block: int) -> tuple[bytes, list[float]]:
    """Payload and what it decodes to."""
    scales, codes, decoded = [], [], []
    for start in range(0, len(x), block):
        part = x[start : start + block]
        if all(math.isfinite(v) for v in part):
            bits = bf16_bits(fp32(max(map(abs, part)) / TOP[name]))
            bits = 0 if bits < 0x80 else min(bits, 0x7C7F) if name == "fp4" else bits
            inverse = fp32(1 / from_bf16(bits)) if bits else 0.0
            quantized = [code_of(name, fp32(v * inverse)) for v in part]
        else:
            bits, quantized = 0x7FC0, [0] * len(part)
        scales.append(bits)
        codes += quantized if name == "int8" else nibbles(quantized)
        values = [value_of(name, code) * from_bf16(bits) for code in quantized]
        assert all(math.isnan(v) or fp32(v) == v for v in values), "decoding has to be exact"
        decoded += values
    return np.array(scales, "<u2").tobytes() + bytes(codes), decoded


def vectors(seed: int) -> list[float]:
    """A vector of any length, with blocks of very different sizes and with special values."""
    chosen = random.Random(seed)
    special = [0.0, -0.0, 1e-45, TINY, -TINY, 127 * TINY, 1e38, HUGE, -HUGE, 0.5, 1.5, 2.5, -1.5, 7.0, 127.0]
    x: list[float] = []
    for _ in range(chosen.randrange(4)):
        level = 10.0 ** chosen.uniform(-44, 37)
        x += [fp32(chosen.gauss(0, level)) for _ in range(chosen.randrange(40))]
        x += chosen.sample(special, chosen.randrange(3))
        if chosen.random() < 0.1:
            x.append(chosen.choice([math.nan, math.inf, -math.inf]))
    return x


@pytest.mark.parametrize("name", BLOCK_CODECS)
@pytest.mark.parametrize("block", [16, 64])
def test_bytes_and_values_are_those_of_the_slow_version(name: str, block: int) -> None:
    codec = get_codec(name, block)
    for seed in range(1500):
        x = vectors(seed)
        payload, decoded = reference(name, x, block)
        got = codec.encode(torch.tensor(x, dtype=torch.float32))
        assert got.tobytes() == payload, seed
        assert codec.nbytes(len(x)) == len(payload)
        want = torch.tensor(decoded, dtype=torch.float32)
        assert torch.equal(codec.decode(got, len(x)).nan_to_num(7.5), want.nan_to_num(7.5)), seed


@pytest.mark.parametrize(
    ("name", "x", "want"),
    [
        ("int8", [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], [127, 0, 2, 2, 0, -2, -2, 126]),
        ("int4", [7, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5], [7, 0, 2, 2, 0, -2, -2, 6]),
        ("fp4", [64, 0.5, 1.5, 3, 6, -12, -24, 48], [64, 0, 2, 2, 8, -8, -32, 32]),
    ],
)
def test_ties_go_to_the_even_code(name: str, x: list[float], want: list[float]) -> None:
    codec = get_codec(name, 16)
    assert codec.decode(codec.encode(torch.tensor(x)), len(x)).tolist() == want
    below, above = (torch.tensor(x) * factor for factor in (1 - 2**-20, 1 + 2**-20))
    below[0] = above[0] = x[0]
    near = {factor: codec.decode(codec.encode(y), len(x)) for factor, y in ((-1, below), (1, above))}
    assert bool((near[-1].abs() <= near[1].abs()).all())
    assert bool((near[-1] != near[1])[1:].all()), "a tie is where the rounded value changes"


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_every_byte_string_of_the_right_length_is_decoded(name: str) -> None:
    codec = get_codec(name, 16)
    random_bytes = np.random.default_rng(1)
    for n in [*range(70), 1009]:
        payload = random_bytes.integers(0, 256, codec.nbytes(n), dtype=np.uint8)
        decoded = codec.decode(payload, n)
        blocks = (n + 15) // 16
        want: list[float] = []
        for b in range(blocks):
            scale = from_bf16(int(payload[2 * b]) | int(payload[2 * b + 1]) << 8)
            size = min(16, n - 16 * b)
            at = 2 * blocks + (16 if name == "int8" else 8) * b
            if name == "int8":
                codes = [int(c) for c in payload[at : at + size]]
            else:
                packed = [int(c) for c in payload[at : at + (size + 1) // 2]]
                codes = [c & 15 for c in packed] + [c >> 4 for c in packed][: size // 2]
            with np.errstate(over="ignore"):
                want += [float(np.float32(value_of(name, c)) * np.float32(scale)) for c in codes]
        assert torch.equal(decoded.nan_to_num(7.5), torch.tensor(want, dtype=torch.float32).nan_to_num(7.5))


def scales_of(codec: BlockCodec, payload: np.ndarray, n: int) -> torch.Tensor:
    """The scale of each element, float64."""
    blocks = -(-n // codec.block)
    bits = payload[: 2 * blocks].copy().view(np.uint16).astype(np.uint32) << 16
    return torch.from_numpy(bits.view(np.float32)).double().repeat_interleave(codec.block)[:n]


@pytest.mark.parametrize("name", BLOCK_CODECS)
@pytest.mark.parametrize("block", [16, 64, 1024])
def test_the_error_is_bounded_by_the_scale(name: str, block: int) -> None:
    codec = get_codec(name, block)
    assert isinstance(codec, BlockCodec)
    for level in (1e-30, 1.0, 1e30):
        x = torch.from_numpy(np.random.default_rng(3).standard_t(2, 10_007).astype(np.float32)) * level
        payload = codec.encode(x)
        scale = scales_of(codec, payload, x.numel())
        error = (codec.decode(payload, x.numel()).double() - x.double()).abs()
        bound = scale / 2 if name != "fp4" else torch.maximum(scale / 2, x.double().abs() / 3)
        assert bool((error <= bound * (1 + 1e-4)).all())
        assert float((error / bound.clamp(min=1e-300)).max()) > 0.98, "a bound that is never near says nothing"


@pytest.mark.parametrize(
    ("name", "gaussian", "heavy"), [("int8", 0.006, 0.012), ("int4", 0.11, 0.19), ("fp4", 0.19, 0.17)]
)
def test_relative_error_with_blocks_of_64(name: str, gaussian: float, heavy: float) -> None:
    codec = get_codec(name, 64)
    numbers = np.random.default_rng(5)
    for x, bound in ((numbers.standard_normal(2**17), gaussian), (numbers.standard_t(3, 2**17), heavy)):
        vector = torch.from_numpy(x.astype(np.float32))
        error = codec.decode(codec.encode(vector), vector.numel()) - vector
        assert 0.8 * bound < float(error.norm() / vector.norm()) < bound


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_a_payload_that_was_decoded_is_encoded_to_the_same_bytes(name: str) -> None:
    codec = get_codec(name, 64)
    for seed in range(400):
        x = torch.tensor(vectors(seed), dtype=torch.float32)
        payload = codec.encode(x)
        assert np.array_equal(codec.encode(codec.decode(payload, x.numel())), payload), seed


@pytest.mark.parametrize("name", BLOCK_CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_found_after_decoding_and_spoil_their_block_alone(name: str, bad: float) -> None:
    codec = get_codec(name, 16)
    for at in (0, 15, 16, 40):
        x = torch.ones(41)
        x[at] = bad
        decoded = codec.decode(codec.encode(x), 41)
        block = torch.arange(41) // 16 == at // 16
        assert bool(decoded[block].isnan().all())
        assert decoded[~block].tolist() == pytest.approx([1.0] * int((~block).sum()), rel=0.01)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_what_is_too_small_for_a_scale_becomes_zero_and_nothing_becomes_subnormal(name: str) -> None:
    codec = get_codec(name, 16)
    for largest in (0.0, 1e-45, TINY, TOP[name] * TINY * 0.99, TOP[name] * TINY * 1.01, 1e-30):
        x = torch.linspace(-largest, largest, 16)
        decoded = codec.decode(codec.encode(x), 16)
        assert bool(((decoded == 0) | (decoded.abs() >= TINY)).all())
        assert bool(decoded.any()) == (largest > TOP[name] * TINY)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_the_largest_numbers_stay_finite(name: str) -> None:
    codec = get_codec(name, 16)
    x = torch.tensor([HUGE, -HUGE, 3e38, 1e38, 0.0])
    decoded = codec.decode(codec.encode(x), 5)
    assert bool(decoded.isfinite().all())
    assert decoded[:2].tolist() == pytest.approx([HUGE, -HUGE], rel=0.01)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_another_block_size_is_refused_or_makes_no_difference(name: str) -> None:
    for n in (1, 15, 16, 17, 64, 65, 1000):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n))
        payload = get_codec(name, 16).encode(x)
        for block in CODEC_BLOCKS[1:]:
            other = get_codec(name, block)
            if n <= 16:
                assert torch.equal(other.decode(payload, n), get_codec(name, 16).decode(payload, n))
            else:
                with pytest.raises(ValueError, match=name):
                    other.decode(payload, n)


@pytest.mark.parametrize("block", [None, 0, 1, 8, 48, 8192, -64])
def test_impossible_block_sizes_are_refused(block: int | None) -> None:
    with pytest.raises(ValueError, match="int4"):
        get_codec("int4", block)
