"""Quality at equal tokens: `python scripts/bench/quality.py [--rows NAME,...] [--seeds N] [--tokens N] [--size SIZE]`.

Every row is a setting, trained at the same token budget, model and data. A row of the core table gets three paired
seeds (or `--seeds`); the others get one and half of the tokens, with a data parallel of their own at that budget. Each
row first tries its learning rates with one seed and goes on with its best. Finished runs are kept in a results file and
not run again, so a sweep can go on in pieces. Learners are stepped in virtual time in one process
(`app/stepped_run.py`); `--both-ways` runs some rows by the real actors too. `--report` writes docs/quality.md and its
picture. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys

from options import names_among, positive
from sweep.both_ways import both_ways
from sweep.figures import figures, table
from sweep.report import draw, write_table
from sweep.results import ACTORS, ROOT, STEPPED, Line, Results, sweep
from sweep.rows import ROWS, SIZES

RESULTS = ROOT / "docs" / "quality.jsonl"
PAGE = ROOT / "docs" / "quality.md"
PICTURE = ROOT / "docs" / "img" / "quality.png"
TOKENS = 6_553_600
BOTH_WAYS_TOKENS = 819_200
BOTH = ("loss", "contributors", "tokens_per_s")
"""What a run both ways is compared by; stepped runs have no real tokens/s."""


def main() -> int:
    """Run what is missing, print the table and the JSON line."""
    arguments = _arguments()
    results = Results(RESULTS)
    if arguments.both_ways:
        return _both_ways(results, arguments.tokens or BOTH_WAYS_TOKENS)
    names = arguments.rows or _names(arguments.core, arguments.size)
    if arguments.list:
        print("\n".join(names))
        return 0
    rows, tokens = [ROWS[name] for name in names], arguments.tokens or TOKENS
    if not arguments.report:
        sweep(results, rows, arguments.seeds, tokens)
    every = {row.name: figures(results, row, arguments.seeds, tokens) for row in rows}
    found = {name: row for name, row in every.items() if row is not None}
    if arguments.report and not found:
        print(f"error: --report: no row has run with {tokens:,} tokens", file=sys.stderr)
        return 2
    if arguments.report:
        write_table(PAGE, found, f"{len(found)} of {len(rows)} rows ran.")
        draw(
            PICTURE,
            found,
            f"{tokens / 1e6:.1f} M tokens or half of that, steps of 32 samples",
        )
    print(table(found))
    print(json.dumps(found))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quality at equal tokens.")
    rows = names_among(ROWS, "no such row; --list names them")
    parser.add_argument(
        "--rows",
        type=rows,
        help="names, separated by commas; by default all of one size",
    )
    parser.add_argument("--size", choices=sorted(SIZES), help="model size of the rows; small by default")
    parser.add_argument("--core", action="store_true", help="only the rows of the core table")
    parser.add_argument("--seeds", type=positive, help="seeds of every row")
    parser.add_argument("--tokens", type=positive, help=f"token budget of the core table; {TOKENS:,} by default")
    parser.add_argument("--both-ways", action="store_true", help="run some rows stepped and by the real actors")
    parser.add_argument("--report", action="store_true", help="run nothing; write the page and the picture")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    arguments = parser.parse_args()
    if arguments.report and (arguments.rows or arguments.core or arguments.size):
        parser.error("--report writes the page of all rows: it goes with neither --rows, --core nor --size")
    if arguments.size is None and not arguments.report and not arguments.list:
        arguments.size = "small"
    return arguments


def _names(core: bool, size: str | None) -> list[str]:
    return [row.name for row in ROWS.values() if size in (None, row.size) and (row.core or not core)]


def _both_ways(results: Results, tokens: int) -> int:
    found = both_ways(results, tokens)
    for row, lines in found.items():
        for how, line in zip((STEPPED, ACTORS), lines, strict=True):
            speed = f", {line['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in line else ""
            print(f"{row} {how}: loss {line['loss']:.4f}, {line['contributors']:.2f} contributors a merge{speed}")
    print(json.dumps({"tokens": tokens} | {row: _difference(*lines) for row, lines in found.items()}))
    return 0


def _difference(stepped: Line, actors: Line) -> Line:
    figures = {how: {key: line.get(key) for key in BOTH} for how, line in ((STEPPED, stepped), (ACTORS, actors))}
    return figures | {"difference_percent": 100 * (actors["loss"] / stepped["loss"] - 1)}


if __name__ == "__main__":
    sys.exit(main())
