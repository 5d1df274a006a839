import gzip
import os
import pydoc_data.topics
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest

from app.config import ConfigError, DataConfig
from app.learning import data, tokenizer
from app.learning.reference import gzip_bits_per_byte

TOPICS = Path(pydoc_data.topics.__file__).read_text()


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i:02d}.txt").write_text(TOPICS[i * 3000 : (i + 1) * 3000])
    return folder


@pytest.fixture
def config(text_folder) -> DataConfig:
    return DataConfig(source="files", path=str(text_folder), tokenizer="bytes", seq_len=16, heldout_share=0.2)


def test_pack_predicts_each_token_once():
    rows = data.pack(np.arange(11, dtype=np.uint16), 4)
    assert rows.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert data.pack(np.arange(3, dtype=np.uint16), 4).shape == (0, 4)


def test_bytes_are_their_own_ids_and_documents_are_joined_by_eos(config, tmp_path, text_folder):
    prepared = data.prepare(config, tmp_path)
    assert prepared.manifest.vocab == 257
    assert prepared.manifest.eos_id == 256
    assert prepared.token_bytes.tolist() == [1] * 256 + [0]
    rows = prepared.heldout.take(np.arange(len(prepared.heldout)))
    stream = [256, *rows[:, 1:].flatten().tolist()]
    texts = "".join(chr(t) if t < 256 else "\0" for t in stream).strip("\0").split("\0")
    for text in texts[:-1]:
        assert text.encode("latin-1").decode() in {p.read_text() for p in text_folder.iterdir()}


def test_nothing_held_out_is_trained_on(config, tmp_path, text_folder):
    prepared = data.prepare(config, tmp_path)
    assert 0 < prepared.manifest.heldout_documents < 12
    held_bytes = prepared.manifest.heldout_bytes
    whole = sum(p.stat().st_size for p in text_folder.iterdir())
    tail = config.seq_len - 1
    assert whole - held_bytes - tail <= len(prepared.train) * (config.seq_len - 1) <= whole - held_bytes + 12
    assert held_bytes - tail <= len(prepared.heldout) * (config.seq_len - 1) <= held_bytes + 12


def test_what_is_on_disk_is_a_dataset_of_fixed_rows(config, tmp_path):
    prepared = data.prepare(config, tmp_path)
    stored = datasets.load_from_disk(str(tmp_path / "train"))
    assert len(stored) == len(prepared.train) == prepared.manifest.train_samples
    indices = np.array([0, len(stored) - 1, 1001])
    assert prepared.train.take(indices).tolist() == [stored[int(i)]["input_ids"] for i in indices]
    with pytest.raises(IndexError):
        prepared.train.take(np.array([len(stored)]))


def test_spread_is_fixed_and_reaches_both_ends(config, tmp_path):
    rows = data.prepare(config, tmp_path).train
    few = rows.spread(5)
    assert len(few) == 5
    last = np.array([0, len(rows) - 1])
    assert few.take(np.array([0, 4])).tolist() == rows.take(last).tolist()
    assert few.take(np.arange(5)).tolist() == rows.spread(5).take(np.arange(5)).tolist()
    assert len(rows.spread(10**9)) == len(rows)


def test_prepared_data_is_reused_until_its_settings_or_its_source_change(config, tmp_path, text_folder):
    out = tmp_path / "data"
    first = data.prepare(config, out)
    written = (out / "manifest.json").stat().st_mtime_ns
    data.prepare(replace(config, leases_ahead=9, block_samples=7, eval_samples=3), out)
    assert (out / "manifest.json").stat().st_mtime_ns == written
    assert data.prepare(replace(config, seq_len=8), out).manifest.seq_len == 8
    assert data.prepare(config, out).manifest == first.manifest
    copy = tmp_path / "text"
    shutil.copytree(text_folder, copy)
    moved = replace(config, path=str(copy))
    before = data.prepare(moved, out).manifest
    assert before.samples_sha256 == first.manifest.samples_sha256
    (copy / "zz.txt").write_text("something new " * 99)
    assert data.prepare(moved, out).manifest.corpus["documents"] == before.corpus["documents"] + 1


@pytest.mark.parametrize("manifest", [None, "", '{"fingerprint": "x"}', '{"fingerprint": '])
def test_a_torn_folder_is_refused_and_rebuilt(config, tmp_path, manifest):
    first = data.prepare(config, tmp_path).manifest
    if manifest is None:
        (tmp_path / "manifest.json").unlink()
    else:
        (tmp_path / "manifest.json").write_text(manifest)
    shutil.rmtree(tmp_path / "heldout")
    with pytest.raises(FileNotFoundError, match="no prepared data"):
        data.load(tmp_path)
    assert data.prepare(config, tmp_path).manifest == first


def test_too_little_text_for_one_row_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match=r"data\.seq_len=50000"):
        data.prepare(replace(config, seq_len=50_000), tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_trained_bpe_is_lossless_and_its_token_bytes_are_exact(config, tmp_path):
    prepared = data.prepare(replace(config, tokenizer="train", vocab=300), tmp_path)
    assert prepared.manifest.vocab == 300
    loaded = prepared.tokenizer()
    text = "def f(x):\n    return 'naïve → x'  # 漢字\t\n\n"
    ids = loaded(text).input_ids
    assert loaded.decode(ids) == text
    assert prepared.token_bytes[ids].sum() == len(text.encode())
    assert prepared.token_bytes[prepared.manifest.eos_id] == 0
    assert prepared.manifest.bytes_per_token > 1.2


def test_bpe_training_gives_the_same_tokenizer_again():
    first, second = (tokenizer.build("train", [TOPICS[:60_000]], 400) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()


@pytest.mark.parametrize("spec", ["train", "bytes"])
def test_encoding_word_by_word_equals_encoding_the_text(spec):
    texts = [TOPICS[:20_000], "", "ünï ½ ²:\r\n\t x\x1c\x85y\u3000z'''_a9\n  \n    end ", "😀" * 3]
    own = tokenizer.build(spec, texts, 400)
    expected = [i for text in texts for i in [*own(text).input_ids, own.eos_token_id]]
    assert tokenizer.encode(own, spec, texts).tolist() == expected


def test_a_tokenizer_from_a_folder_is_taken_as_it_is(tmp_path):
    own = tokenizer.build("train", [TOPICS[:20_000]], 300)
    own.save_pretrained(str(tmp_path))
    taken = tokenizer.build(str(tmp_path), [], 0)
    texts = [TOPICS[:5000], "x"]
    assert tokenizer.encode(taken, str(tmp_path), texts).tolist() == tokenizer.encode(own, "train", texts).tolist()
    assert tokenizer.token_bytes(taken).tolist() == tokenizer.token_bytes(own).tolist()


def test_token_bytes_of_a_tokenizer_that_is_not_byte_level():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"</s>": 0, "▁ab": 1, "é": 2, "<0x0A>": 3}
    pieces = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, [])), eos_token="</s>")
    assert tokenizer.token_bytes(pieces).tolist() == [0, 3, 2, 1]


def test_tokenizers_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.vocab=256"):
        tokenizer.build("train", ["x"], 256)
    with pytest.raises(ValueError, match="cannot be loaded"):
        tokenizer.build(str(tmp_path), [], 0)


def test_gzip_reference_is_what_gzip_makes_of_the_held_out_bytes(config, tmp_path):
    content = TOPICS[:9000].encode()
    assert gzip_bits_per_byte(content) == 8 * len(gzip.compress(content, 9, mtime=0)) / len(content)
    assert 1.0 < data.prepare(config, tmp_path).manifest.gzip_bits_per_byte < 8.0
    with pytest.raises(ValueError, match="nothing"):
        gzip_bits_per_byte(b"")


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def huge(path: Path) -> None:
    """A header that says more than the file has."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i4", "fortran_order": False, "shape": (2**40,)})


DAMAGE = {
    "rows flipped": lambda folder: flip(next(folder.glob("train/*.arrow")), -200),
    "rows cut": lambda folder: emptied(next(folder.glob("train/*.arrow"))),
    "rows of the other side": lambda folder: shutil.copytree(folder / "train", folder / "heldout", dirs_exist_ok=True),
    "no table of files": lambda folder: (folder / "train/state.json").unlink(),
    "table of files elsewhere": lambda folder: (folder / "train/state.json").write_text(
        '{"_data_files": [{"filename": "../../../etc/passwd"}]}'
    ),
    "table of files a list": lambda folder: (folder / "heldout/state.json").write_text("[1]"),
    "bytes of tokens": lambda folder: huge(folder / "token_bytes.npy"),
    "bytes of tokens as code": lambda folder: np.save(folder / "token_bytes.npy", np.array([Path()], object)),
    "tokenizer": lambda folder: emptied(folder / "tokenizer/tokenizer.json"),
    "a link": lambda folder: (shutil.rmtree(folder / "tokenizer"), (folder / "tokenizer").symlink_to("/etc")),
    "manifest a folder": lambda folder: ((folder / "manifest.json").unlink(), (folder / "manifest.json").mkdir()),
    "manifest not UTF-8": lambda folder: (folder / "manifest.json").write_bytes(b"\xff"),
    "manifest deep": lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
    "manifest of another type": lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"eos_id": 256', '"eos_id": "256"')
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_prepared_data_that_is_damaged_is_made_again(how, config, tmp_path):
    first = data.prepare(config, tmp_path)
    before = first.train.sha256()
    del first
    DAMAGE[how](tmp_path)
    again = data.prepare(config, tmp_path)
    assert again.manifest == data.load(tmp_path).manifest
    assert again.train.sha256() == before == again.manifest.samples_sha256
    assert len(again.tokenizer()) == again.manifest.vocab == len(again.token_bytes)


def test_damaged_data_whose_text_has_changed_is_refused_for_good(config, tmp_path):
    text, folder = tmp_path / "text", tmp_path / "data"
    text.mkdir()
    (text / "a.txt").write_text("one text and more of it " * 500)
    (text / "b.txt").write_text("another text of some size " * 500)
    files = replace(config, path=str(text))
    data.prepare(files, folder)
    for path in text.iterdir():  # of the same size, and as old
        stat = path.stat()
        path.write_text(path.read_text().replace("text", "test"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    emptied(next(folder.glob("train/*.arrow")))
    for _ in range(2):
        with pytest.raises(ConfigError, match="the text has changed"):
            data.prepare(files, folder)
