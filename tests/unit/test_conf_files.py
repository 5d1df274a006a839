"""Every file of conf/ composes, overrides only what the schema has, and explains its keys."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import conf
from app.config import load
from app.config.help import group_options, known_keys

ROOT = Path(conf.__file__).parent
FILES = sorted(ROOT.rglob("*.yaml"))
DILOCO_KEYS = """fragments sync_interval overlap_steps min_quorum grace_safety ring_versions codec_up codec_down
codec_block error_feedback adopt outer_lr outer_momentum"""
NEEDS = {
    "model/hf": ["model.path=org/name"],
    "data/files": [f"data.path={ROOT}"],
    "data/hub": ["data.hub_name=x"],
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def given_in(node: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and value of all that a file says; not of lists and of what is worked out from other keys."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from (((key, *path), leaf) for path, leaf in given_in(value))
        elif not isinstance(value, list) and not str(value).startswith("${"):
            yield (key,), value


def value_of(node: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        node = node[key] if isinstance(node, dict) else getattr(node, key)
    return node


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_composes_to_what_it_says(path: Path) -> None:
    name = name_of(path)
    if "/" not in name:
        load([])
        return
    group, option = name.split("/")
    config = load([f"{group}={option}", *NEEDS.get(name, [])])
    whole = path.read_text().startswith("# @package _global_")
    section = config if whole else getattr(config, group)
    for key, value in given_in(yaml.safe_load(path.read_text())):
        assert value_of(section, key) == value
    if group == "chaos":
        assert len(config.chaos.faults) == (0 if option in ("none", "storm") else 1)
        assert sum(rate for _, rate in config.chaos.rates.items()) == (150 if option == "storm" else 0)


def test_the_contract_of_keys_and_groups() -> None:
    assert set(group_options()) == {"model", "data", "diloco", "algo", "pools", "chaos", "tracking"}
    contract = ["learners", "train.tokens", *(f"run.{k}" for k in ("dir", "name", "seed", "resume"))]
    contract += [f"diloco.{k}" for k in DILOCO_KEYS.split()]
    assert set(contract) <= set(known_keys())


def in_list(lines: list[str], i: int) -> bool:
    """Whether line i is part of an entry of a list."""
    return any(re.match(r" *- ", line) for line in lines[:i]) and lines[i].startswith(" ")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_comment_stands_above_every_key(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# "), "what is this file?"
    keys = [i for i, line in enumerate(lines) if re.match(r" *\w+:", line) and not in_list(lines, i)]
    assert keys
    for i in keys:
        assert lines[i - 1].lstrip().startswith("# "), f"no comment above {lines[i]!r}"
    first = keys[0]
    assert name_of(path) == "config" or first >= 2, "one comment for the file, one for its first key"
