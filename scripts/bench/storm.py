"""Trains through a storm of real faults: `scripts/storm.sh [--seconds N] [--learners N] [--kinds KIND,...] [--seed N]`.

First a short run finds how many tokens the machine trains on in that time; then two runs have that budget, one without
faults and one in which processes are killed, stopped, slowed, cut off and garbled, disks fill up and garbage is sent,
all at random moments that the seed decides. Nobody touches either. Prints a table of the faults and what they cost and,
last, one JSON line. `--dark` has half of the learners die at once instead, `--rival` adds synchronous data parallel in
the same storm, `--picture` draws ours. Exits with 1 when a run fails or a figure is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from options import names_among, positive
from storming.figures import Run, beside, figures, missed, table
from storming.picture import draw
from storming.runs import KINDS, RIVAL, Storm, tokens_per_s, train

WARM_UP_S = 60.0


def main() -> int:
    """Run, compare, print."""
    arguments = _arguments()
    storm = Storm(
        arguments.learners, arguments.seconds, tuple(arguments.kinds), arguments.rate, arguments.seed, arguments.dark
    )
    folder = Path(arguments.dir or tempfile.mkdtemp(prefix="diloco-storm-"))
    try:
        tokens = arguments.tokens or int(tokens_per_s(storm, folder / "probe", WARM_UP_S) * arguments.seconds)
        print(f"{tokens:,} tokens a run; everything lies in {folder}", flush=True)
        calm, rough = (Run.of(train(storm, folder / name, tokens, name == "storm")) for name in ("calm", "storm"))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = figures(storm, calm, rough)
    if arguments.rival:
        try:
            found |= beside(Run.of(train(storm, folder / "rival", tokens, True, RIVAL)))
        except RuntimeError as error:  # it may well not come through
            print(f"the rival: {error}", file=sys.stderr)
    if arguments.picture is not None:
        draw(Path(arguments.picture), rough, calm)
    print(table(rough, found))
    failed = missed(storm, found)
    print(json.dumps(found | {"missed": failed}))
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=positive, default=600, help="how long a run takes, about; 600 by default")
    parser.add_argument("--learners", type=positive, default=8, help="8 by default")
    kinds = names_among(KINDS, f"allowed are {', '.join(KINDS)}")
    parser.add_argument("--kinds", type=kinds, default=list(KINDS), help=f"kinds of faults: {','.join(KINDS)} (all)")
    parser.add_argument("--rate", type=positive, default=150, help="faults an hour, of all kinds; 150 by default")
    parser.add_argument("--seed", type=int, default=1, help="decides moments and victims; 1 by default")
    parser.add_argument("--tokens", type=positive, help="token budget of a run; by default as many as fit the seconds")
    parser.add_argument("--dir", help="where the runs lie; by default in a new temporary folder")
    parser.add_argument("--dark", type=positive, help="seconds for which half of the learners are gone, for one fault")
    parser.add_argument("--rival", action="store_true", help="elastic data parallel in the same storm as well")
    parser.add_argument("--picture", help="a PNG to draw")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
