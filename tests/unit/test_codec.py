import numpy as np
import pytest
import torch

from app.diloco.codec import digest, get_codec
from app.diloco.settings import CODECS

SIZES = [0, 1, 2, 7, 1009]
BLOCK = 64


def vector(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("n", SIZES)
def test_payload_is_a_flat_byte_array_of_the_stated_size(name: str, n: int) -> None:
    codec = get_codec(name, BLOCK)
    payload = codec.encode(vector(n))
    assert codec.name == name
    assert (payload.dtype, payload.shape) == (np.uint8, (codec.nbytes(n),))
    assert payload.flags.c_contiguous
    decoded = codec.decode(payload, n)
    assert (decoded.dtype, decoded.shape) == (torch.float32, (n,))


@pytest.mark.parametrize("n", SIZES)
def test_fp32_is_lossless(n: int) -> None:
    codec = get_codec("fp32")
    assert codec.nbytes(n) == 4 * n
    assert torch.equal(codec.decode(codec.encode(vector(n)), n), vector(n))


@pytest.mark.parametrize("n", SIZES)
def test_bf16_rounds_as_torch_does(n: int) -> None:
    codec = get_codec("bf16")
    assert codec.nbytes(n) == 2 * n
    assert torch.equal(codec.decode(codec.encode(vector(n)), n), vector(n).to(torch.bfloat16).float())


def test_bf16_rounds_to_nearest_ties_to_even() -> None:
    ulp = 2.0**-7  # of bf16 between 1 and 2
    x = torch.tensor([1 + 0.5 * ulp, 1 + 1.5 * ulp, 1 + 0.501 * ulp, -(1 + 0.5 * ulp), 0.0, -0.0])
    codec = get_codec("bf16")
    decoded = codec.decode(codec.encode(x), 6)
    assert decoded.tolist() == [1.0, 1 + 2 * ulp, 1 + ulp, -1.0, 0.0, 0.0]
    assert torch.signbit(decoded).tolist() == [False, False, False, True, False, True]


@pytest.mark.parametrize("name", CODECS)
def test_encoding_twice_loses_nothing_more(name: str) -> None:
    codec = get_codec(name, BLOCK)
    once = codec.decode(codec.encode(vector(1009)), 1009)
    assert torch.equal(codec.decode(codec.encode(once), 1009), once)


@pytest.mark.parametrize("name", CODECS)
def test_no_memory_is_shared(name: str) -> None:
    codec = get_codec(name, BLOCK)
    x = torch.ones(8)
    payload = codec.encode(x)
    x.zero_()
    decoded = codec.decode(payload, 8)
    payload[:] = 0
    assert decoded.tolist() == pytest.approx([1.0] * 8, rel=0.01)
    decoded += 1
    assert not payload.any()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.filterwarnings("error")
def test_decodes_read_only_unaligned_and_strided_bytes(name: str) -> None:
    codec = get_codec(name, BLOCK)
    n = 33
    payload = codec.encode(vector(n))
    unaligned = np.concatenate([np.zeros(1, np.uint8), payload])[1:]
    strided = np.repeat(payload, 2)[::2]
    for view in (unaligned, strided):
        view.flags.writeable = False
        assert torch.equal(codec.decode(view, n), codec.decode(payload, n))


@pytest.mark.parametrize("name", CODECS)
def test_wrong_sizes_and_types_are_refused(name: str) -> None:
    codec = get_codec(name, BLOCK)
    payload = codec.encode(vector(8))
    wrong = [payload[:-1], np.append(payload, np.uint8(0)), payload.reshape(2, -1), payload.astype(np.int16)]
    for garbage in wrong:
        with pytest.raises(ValueError, match=name):
            codec.decode(garbage, 8)
    with pytest.raises(ValueError, match=name):
        codec.decode(payload, 6)
    with pytest.raises(ValueError, match="flat"):
        codec.encode(torch.zeros(2, 4))


@pytest.mark.parametrize("name", CODECS)
def test_encodes_from_any_float_type_and_stride(name: str) -> None:
    codec = get_codec(name, BLOCK)
    x = vector(20).to(torch.bfloat16)
    leaf = torch.stack([x.float(), torch.zeros(20)], dim=1)[:, 0].requires_grad_()
    assert np.array_equal(codec.encode(x), codec.encode(leaf))


def test_unknown_codec_names_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match=r"'zip', allowed: fp32, bf16, int8, int4, fp4"):
        get_codec("zip", BLOCK)


@pytest.mark.parametrize("name", CODECS)
def test_garbage_in_a_payload_is_found_after_decoding(name: str) -> None:
    codec = get_codec(name, BLOCK)
    payload = codec.encode(vector(8))
    payload[:8] = 0xFF
    assert not codec.decode(payload, 8).isfinite().all()


def test_digest_is_that_of_the_bytes() -> None:
    assert (
        digest(torch.zeros(0)) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )  # SHA-256 of nothing
    x = vector(100)
    assert digest(x) == digest(torch.stack([x, x], dim=1)[:, 1])
    flipped = x.clone()
    flipped.view(torch.int32)[17] ^= 1
    assert len({digest(x), digest(flipped), digest(x[:99])}) == 3
