"""A stream's blocks: what they hold, and that any of them can be read again from its position."""

import json
import os
from dataclasses import replace
from itertools import chain

import datasets
import numpy as np
import pytest

from app.config import ConfigError, DataConfig
from app.learning import data, stream, tokenizer
from app.learning.blocks import Place
from app.learning.corpus import is_held_out
from app.learning.parts import parts
from app.learning.stream import Position, Reader, Stream

SEED = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    texts = [f"{i} " + "ab é" * int(random.integers(0, 60)) for i in range(150)]
    texts[7] = "long " * 300  # more than a block
    texts[8], texts[9] = "", "x"
    (folder / "a.txt").write_text("one document\n\nof two paragraphs")
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:70]))
    datasets.Dataset.from_dict({"text": texts[70:]}).to_parquet(str(folder / "c.parquet"))
    return folder


@pytest.fixture
def config(folder):
    return DataConfig(
        source="files", path=str(folder), tokenizer="bytes", seq_len=16, block_samples=8, heldout_share=0.1,
        streaming=True, stream_head=40,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokens():
    return tokenizer.build("bytes", [], 0)


def epoch_of(config, tokens, epoch):
    """The rows of an epoch, packed at once."""
    every = parts(config)
    order = np.random.Generator(np.random.Philox(key=[SEED, epoch])).permutation(len(every))
    documents = chain.from_iterable(every[i].documents(every[i].open()) for i in order)
    texts = [d.text for d in documents if d.text and not is_held_out(d, config.heldout_share)]
    ids = tokenizer.encode(tokens, config.tokenizer, texts)
    return data.pack(np.concatenate([ids[-1:], ids]), config.seq_len)


def ordered(rows):
    return sorted(map(tuple, rows.tolist()))


@pytest.mark.parametrize("block_samples", [1, 8, 10_000])
def test_blocks_are_all_rows_of_an_epoch_once_and_then_those_of_the_next(config, tokens, block_samples):
    config = replace(config, block_samples=block_samples)
    reader = Reader(config, parts(config), tokens, SEED)
    for epoch in range(2):
        wanted = epoch_of(config, tokens, epoch)
        cut = range(0, len(wanted), block_samples)
        for number, start in enumerate(cut):
            block = reader.read()
            rows = wanted[start : start + block_samples]
            assert block.place == Place(epoch, number, 0, len(rows))
            assert ordered(block.rows) == ordered(rows)
    assert len(cut) == -(-len(wanted) // block_samples)


def test_rows_are_shuffled_within_their_block(config, tokens):
    rows = Reader(replace(config, block_samples=64), parts(config), tokens, SEED).read().rows
    assert rows.tolist() != epoch_of(config, tokens, 0)[:64].tolist()


def test_any_block_can_be_read_again_and_on_from_there(config, tokens):
    reader = Reader(config, parts(config), tokens, SEED)
    blocks = [reader.read() for _ in range(2 * (len(epoch_of(config, tokens, 0)) // 8 + 1))]
    assert blocks[-1].place.epoch == 1
    for number in (0, 1, 5, len(blocks) // 2 - 1, len(blocks) // 2, len(blocks) - 2):
        again = Reader(
            config, parts(config), tokens, SEED, Position.of(json.loads(json.dumps(blocks[number].start.state())))
        )
        for block in blocks[number : number + 2]:
            read = again.read()
            assert (read.place, read.start, read.end) == (block.place, block.start, block.end)
            assert read.rows.tolist() == block.rows.tolist()


def test_nothing_held_out_is_in_the_stream(config, tmp_path):
    prepared = data.prepare(config, tmp_path)
    head = stream.head(config)
    assert len(head) == 40
    held = [d for d in head if is_held_out(d, config.heldout_share)]
    assert prepared.manifest.heldout_documents == len(held) > 0
    texts = {text for d in stream.trained_on(head, config) for text in [d.text]}
    assert texts.isdisjoint({d.text for d in held})
    assert "" not in texts


def test_a_head_without_a_held_out_document_is_refused(config, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.stream_head=2 is refused: none of the first 2 documents is held out"):
        data.prepare(replace(config, stream_head=2, heldout_share=1e-6), tmp_path)


@pytest.fixture
def opened(config, tmp_path):
    data.prepare(config, tmp_path)
    return Stream(config, tmp_path, SEED)


def issued(some, count):
    places = []
    while len(places) < count:
        some.read()
        places.append(some.place(len(places)))
    return places


def test_a_stream_that_is_restarted_goes_on_and_has_what_was_issued(opened, config, tmp_path):
    assert opened.place(0) is None  # nothing was read yet
    first = issued(opened, 5)
    opened.read()  # read, not issued
    opened.keep({(0, 1), (0, 3)})
    with pytest.raises(KeyError):
        opened.rows(0, 0)
    again = Stream(config, tmp_path, SEED, json.loads(json.dumps(opened.state())))
    for block in (1, 3):
        assert again.rows(0, block).tolist() == opened.rows(0, block).tolist()
        assert len(again.rows(0, block)) == first[block].end
    with pytest.raises(KeyError):
        again.rows(0, 2)
    assert issued(again, 2) == [Place(0, 5, 0, 8), Place(0, 6, 0, 8)]
    assert opened.ahead == 1
    assert opened.place(5) == Place(0, 5, 0, 8)
    assert opened.rows(0, 5).tolist() == again.rows(0, 5).tolist()


def test_a_stream_that_was_never_read_can_be_restarted(opened, config, tmp_path):
    again = Stream(config, tmp_path, SEED, json.loads(json.dumps(opened.state())))
    assert issued(again, 3) == issued(opened, 3)
    assert again.rows(0, 2).tolist() == opened.rows(0, 2).tolist()


def test_a_source_that_was_away_is_read_on(config, folder, tokens, tmp_path):
    """A file that is gone when its turn comes, as on a mount that is lost."""
    config = replace(config, path=str(tmp_path / "text"), block_samples=64)
    os.symlink(folder, config.path)
    wanted = Reader(config, parts(config), tokens, SEED).read()
    data.prepare(config, tmp_path / "data")
    some = Stream(config, tmp_path / "data", SEED)
    os.unlink(config.path)
    with pytest.raises(FileNotFoundError):
        some.read()
    assert some.ahead == 0
    os.symlink(folder, config.path)
    some.read()
    assert some.place(0) == wanted.place
    assert some.rows(0, 0).tolist() == wanted.rows.tolist()


@pytest.mark.parametrize("damage", ["parquet", "field", "nothing"])
def test_text_that_cannot_be_used_is_named(tokens, tmp_path, damage):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' if damage == "nothing" else '{"text": "good"}\n{"txt": "bad"}\n')
    if damage == "parquet":
        (tmp_path / "a.jsonl").unlink()
        (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    config = DataConfig(source="files", path=str(tmp_path), tokenizer="bytes", seq_len=4, streaming=True)
    with pytest.raises(ConfigError, match=r"data\.path") as refusal:
        Reader(config, parts(config), tokens, SEED).read()
    wanted = {"parquet": "cannot be read", "field": "no text in the field 'text'", "nothing": "no text for one sample"}
    assert wanted[damage] in str(refusal.value)
