"""What the documentation names is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEST = re.compile(r"(tests/[a-z0-9_/]+\.py)::(test_[a-z0-9_]+)")


@pytest.mark.parametrize(
    "page", sorted(p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("docs/*.md"), ROOT / "README.md"])
)
def test_every_test_that_a_page_names_exists(page):
    for file, name in TEST.findall((ROOT / page).read_text()):
        functions = {n.name for n in ast.parse((ROOT / file).read_text()).body if isinstance(n, ast.FunctionDef)}
        assert name in functions, f"{page}: {file}::{name}"


def test_the_page_of_failures_names_tests_for_every_kind_of_fault():
    faults = (ROOT / "docs" / "failures.md").read_text().split("## What optimizer state")[0]
    bodies = [line for line in faults.splitlines() if line.startswith("| ") and not line.startswith("| fault")]
    assert len(bodies) > 25
    assert all(TEST.search(line) for line in bodies)
