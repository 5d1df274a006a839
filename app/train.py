"""One run from the command line: `python -m app.train [key=value ...]`.

The driver is thin: it checks the configuration, prepares data and version 0, starts or attaches the run's actors and
shows how they get on. It may die; the run does not depend on it on a cluster that it does not own.
"""

from __future__ import annotations

import gc
import os
import sys

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from app.ray_token import send_token

if os.environ.get("RAY_ADDRESS"):
    send_token()

from actors.preloader import fork_preloader
from app.config import Config, ConfigError, as_yaml, describe, load
from app.config.location import IN_JOB
from app.jobs.job import LAST_LINE

EXIT_WRONG_CONFIG = 2
EXIT_INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    """Run, and return the exit code: 0 only when the budget was reached and `model/` was written."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(describe())
        return 0
    show = "--cfg" in arguments
    try:
        config = load([argument for argument in arguments if argument not in ("--cfg", "job")])
        if show:
            print(as_yaml(config), end="")
            return 0
        return _run(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WRONG_CONFIG
    except KeyboardInterrupt:  # before there was anything to checkpoint
        return EXIT_INTERRUPTED


def _run(config: Config) -> int:
    gc.disable()  # while modules load it finds nothing, and takes a fifth of the time
    if config.run.preload and not os.environ.get("RAY_ADDRESS"):
        fork_preloader()
    from actors.driver import Driver  # slow to import: torch and Ray

    gc.enable()
    return Driver(config).run()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if IN_JOB in os.environ:
        print(f"{LAST_LINE}{code}", flush=True)
    sys.exit(code)
