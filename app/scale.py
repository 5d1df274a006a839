"""Changes how far a pool of a living run may grow: `python -m app.scale RUN_DIR POOL N`, inside the run's cluster.

Exit code 0: the run has taken it; 2: it was refused, in one line.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from actors.spec import SUPERVISOR, namespace_of
from app.config import ConfigError
from app.ray_token import send_token
from app.run.folder import run_id_in

EXIT_REFUSED = 2
ANSWER_S = 60.0


class Refused(Exception):
    """It can't be done. `str()` says why, in one line."""


def main(arguments: list[str]) -> int:
    """Tell the run, and return the exit code."""
    try:
        location, pool, text = arguments
        most = int(text)
    except ValueError:
        print("usage: python -m app.scale RUN_DIR POOL N", file=sys.stderr)
        return EXIT_REFUSED
    try:
        scale(location, pool, most)
    except (ConfigError, Refused) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    print(f"pool {pool} of {location} may have {most} learners now")
    return 0


def scale(location: str, pool: str, most: int) -> None:
    """Let the pool of the run that lies there have `most` learners at most. Raises ConfigError or Refused."""
    run_id = run_id_in(location)
    send_token()  # before Ray is imported
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address="auto", log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError) as error:
        raise Refused(f"no cluster can be used: {str(error).splitlines()[0]}") from error
    try:
        supervisor = ray.get_actor(SUPERVISOR, namespace=namespace_of(run_id))
        ray.get(supervisor.scale.remote(pool, most), timeout=ANSWER_S)
    except ValueError as error:
        cause = getattr(error, "cause", None)  # what the run says; else Ray knows no such actor
        raise Refused(str(cause) if cause is not None else f"the run in {location} is not alive") from error
    except (RayError, TimeoutError) as error:
        raise Refused(f"the run in {location} does not answer: {str(error).splitlines()[0]}") from error
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
