"""The bytes that a run says it sent are those of its payloads."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.syncer import Syncer
from actors.syncer_status import Traffic
from app.config import load
from app.diloco.codec import get_codec
from app.diloco.fragments import build_layout, gather, specs_of
from app.learning.model import build_model
from tests.unit.tiny import opened

BITS = {"fp32": (32, 0), "bf16": (16, 0), "int8": (8, 16), "int4": (4, 16), "fp4": (4, 16)}
"""Codec → bits of an element and of a block's scale."""


def nbytes(codec: str, numel: int, block: int) -> int:
    """By the text of `app/diloco/codecs/blocks.py`: the codes of a block fill whole bytes."""
    bits, scale = BITS[codec]
    whole, rest = divmod(numel, block)
    codes = [block * bits] * whole + ([rest * bits] if rest else [])
    return sum((-(-each // 8)) + scale // 8 for each in codes)


@pytest.mark.parametrize("codec", BITS)
@pytest.mark.parametrize("block", [16, 64, 4096])
def test_the_payloads_of_the_shipped_model_have_their_size(codec: str, block: int) -> None:
    config = load([])
    model = build_model(config.model, config.data.vocab, config.data.seq_len, 1)
    layout = build_layout(specs_of(model), config.diloco.fragments)
    up = 0
    for fragment in layout.fragments:
        encode = get_codec(codec, block)
        payload = encode.encode(gather(fragment, dict(model.named_parameters())))
        assert payload.nbytes == encode.nbytes(fragment.numel) == nbytes(codec, fragment.numel, block)
        up += payload.nbytes
    bits, scale = BITS[codec]
    assert up / (4 * layout.numel) == pytest.approx((bits + scale / block) / 32, rel=1e-3)


@pytest.mark.parametrize("codec", BITS)
def test_the_syncer_counts_what_came_and_went(codec: str) -> None:
    """Both directions, what is refused included: it was sent too."""
    hand = opened(codec_up=codec, codec_down=codec, codec_block=16)
    layout = hand.protocol.layout
    spawned: list[object] = []
    syncer: Any = SimpleNamespace(
        _spec=SimpleNamespace(layout=layout),
        _traffic=Traffic(),
        _spawn=spawned.append,
        _decode=lambda contribution: contribution,
    )
    numel = layout.fragments[1].numel
    given = hand.answer("a", 1)
    for each in (given, replace(given, digest="0" * 64)):
        Syncer._take(syncer, each)
    assert (syncer._traffic.up, syncer._traffic.up_fp32) == (2 * nbytes(codec, numel, 16), 2 * 4 * numel)
    assert len(spawned) == 2
    hand.answer("b", 1)
    hand.publish()
    offer = hand.poll("a").offers[0]
    assert offer.payload.dtype == np.uint8
    Syncer._count_down(syncer, offer.payload.size, offer.fragment)
    assert (syncer._traffic.down, syncer._traffic.down_fp32) == (nbytes(codec, numel, 16), 4 * numel)
