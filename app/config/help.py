"""The keys of the schema with type, default and meaning, and the text of `--help`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from app.config.schema import Config

NAMED = "<name>"
"""Stands in a key for a name that the user gives."""


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    name: str
    """With dots, for example diloco.fragments; `<name>` stands for any name, as in pools.<name>.learners."""
    type: str
    """As written in the schema."""
    default: object
    """What it is when nobody sets it."""
    doc: str
    """What it means."""


@cache
def known_keys() -> dict[str, Key]:
    """Every key that has a value (no sections), in the order of the schema."""
    return {key.name: key for key in _keys(Config, "")}


def find_key(name: str) -> Key | None:
    """The key of this name, which may be that of one entry of a dictionary; None when the schema has no such key."""
    for key in known_keys().values():
        pattern = re.escape(key.name).replace(NAMED, r"[^.]+")
        entries = r"(\..+)?" if key.type.startswith("dict") else ""
        if re.fullmatch(pattern + entries, name):
            return key
    return None


@cache
def group_options() -> dict[str, tuple[str, ...]]:
    """The groups of `conf/` with the options of each, sorted."""
    groups: dict[str, tuple[str, ...]] = {}
    for entry in resources.files("conf").iterdir():
        if entry.is_dir():
            names = sorted(f.name.removesuffix(".yaml") for f in entry.iterdir() if f.name.endswith(".yaml"))
            if names:
                groups[entry.name] = tuple(names)
    return dict(sorted(groups.items()))


def describe() -> str:
    """Help text: how to override, the groups with their options, every key with default and meaning."""
    lines = [
        "usage: python -m app.train [group=option ...] [key=value ...]",
        "",
        "Groups (the first of a pair picks a file of conf/):",
        *(f"  {group}={'|'.join(options)}" for group, options in group_options().items()),
        "",
        "Keys, with type and default:",
    ]
    for key in known_keys().values():
        lines.append(f"  {key.name}: {key.type} = {_shown(key.default)}")
        lines += textwrap.wrap(key.doc, width=100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _keys(cls: type, prefix: str) -> Iterator[Key]:
    docs = field_docs(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        section = _section_of(hint)
        if section is not None:
            name = f"{field.name}.{NAMED}" if section is not hint else field.name
            yield from _keys(section, f"{prefix}{name}.")
        else:
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            yield Key(f"{prefix}{field.name}", str(field.type), default, docs[field.name])


def _section_of(hint: Any) -> type | None:
    """The dataclass that a field's type is, or of which it holds some by name; None for a value."""
    kinds = [hint, *typing.get_args(hint)[1:]] if typing.get_origin(hint) is dict else [hint]
    return next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass, joined to one line; "" where there is none."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    field = ""  # the last one seen, until a string or another statement follows it
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            field = node.target.id
            docs[field] = ""
        elif field and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs[field] = " ".join(str(node.value.value).split())
            field = ""
        else:
            field = ""
    return docs


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value) if value == "" else str(value)
