import json
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from app.config import ConfigError, DataConfig
from app.learning import corpus
from app.learning.corpus import Document


def files(path: Path, **fields) -> DataConfig:
    return DataConfig(source="files", path=str(path), **fields)


def test_stdlib_is_the_running_pythons_sources_without_tests_and_packages():
    documents = corpus.read(DataConfig())
    names = [d.name for d in documents]
    assert len(names) > 500
    assert "abc.py" in names
    assert "email/message.py" in names
    assert not [n for n in names if {"site-packages", "test", "tests", "idle_test"} & set(Path(n).parts)]
    facts = corpus.facts(documents)
    assert facts.bytes > 8_000_000
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts == corpus.facts(corpus.read(DataConfig()))


def test_facts_change_with_names_and_texts():
    base = corpus.facts([Document("a", "x"), Document("b", "y")])
    assert base.documents == 2
    assert base.bytes == 2
    assert corpus.facts([Document("a", "x"), Document("c", "y")]).sha256 != base.sha256
    assert corpus.facts([Document("a", "xy"), Document("b", "")]).sha256 != base.sha256


def test_a_folder_is_read_sorted_with_one_document_per_file_or_row(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "late.txt").write_text("late")
    (tmp_path / "early.txt").write_text("early é")
    (tmp_path / "ignored.csv").write_text("nothing")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("one", "two")))
    datasets.Dataset.from_dict({"text": ["three", "four"]}).to_parquet(str(tmp_path / "t.parquet"))
    documents = corpus.read(files(tmp_path))
    assert [d.text for d in documents] == ["late", "early é", "one", "two", "three", "four"]
    assert [d.name for d in documents][:2] == ["b/late.txt", "early.txt"]
    assert len({d.name for d in documents}) == 6


def test_max_bytes_cuts_the_corpus_within_a_document(tmp_path):
    (tmp_path / "a.txt").write_text("abcd")
    (tmp_path / "b.txt").write_text("efgh")
    documents = corpus.read(files(tmp_path, max_bytes=6))
    assert [d.text for d in documents] == ["abcd", "ef"]


def test_max_bytes_never_leaves_half_a_character(tmp_path):
    (tmp_path / "a.txt").write_text("aé")
    assert [d.text for d in corpus.read(files(tmp_path, max_bytes=2))] == ["a"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "none", "no such file"),
        (lambda p: p, ".jsonl"),  # a folder with nothing to read
        (lambda p: _written(p / "a.txt", ""), "no text"),
        (lambda p: _written(p / "a.jsonl", '{"body": "x"}\n'), "fields: body"),
        (lambda p: _written(p / "a.jsonl", '{"text": 3}\n'), "no text in the field 'text'"),
        (lambda p: _written(p / "a.jsonl", '{"text": "x"\n'), "cannot be read"),
        (lambda p: _written(p / "a.parquet", "not parquet"), "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_one_clear_line(tmp_path, make, says):
    with pytest.raises(ConfigError) as caught:
        corpus.read(files(make(tmp_path)))
    assert caught.value.key == "data.path"
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_stands_for_a_data_set_of_the_hub(tmp_path):
    datasets.Dataset.from_dict({"body": ["one", "two"]}).to_parquet(str(tmp_path / "train.parquet"))
    hub = DataConfig(source="hub", hub_name=str(tmp_path), text_field="body")
    assert [d.text for d in corpus.read(hub)] == ["one", "two"]
    with pytest.raises(ConfigError, match=r"^data\.hub_name=.* cannot be read .*validation"):
        corpus.read(replace(hub, split="validation"))


def test_files_that_may_not_be_read_are_the_fault_of_their_path(tmp_path, monkeypatch):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    for look in (corpus.read, corpus.source_stamp):
        with pytest.raises(ConfigError, match=r"^data\.path=.* cannot be read \(.*gone|a\.txt"):
            look(files(tmp_path))


def test_split_holds_out_whole_documents_and_other_documents_never_move_one():
    many = [Document(f"d{i}", "x") for i in range(2000)]
    train, held = corpus.split(many, 0.1)
    assert {d.name for d in train} | {d.name for d in held} == {d.name for d in many}
    assert not {d.name for d in train} & {d.name for d in held}
    assert len(held) == pytest.approx(200, abs=60)
    _, held_of_half = corpus.split(many[::2], 0.1)
    assert {d.name for d in held_of_half} == {d.name for d in many[::2]} & {d.name for d in held}


def test_split_leaves_something_on_each_side():
    two = [Document("a", "x"), Document("b", "y")]
    for share in (1e-9, 1 - 1e-9):
        train, held = corpus.split(two, share)
        assert len(train) == len(held) == 1


def test_the_end_of_a_single_document_is_held_out():
    train, held = corpus.split([Document("a", "0123456789")], 0.2)
    assert [d.text for d in train] == ["01234567"]
    assert [d.text for d in held] == ["89"]


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
