#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [pytest arguments].
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare dev
if (($#)); then
  exec "$VENV_PYTHON" -m pytest "$@"
fi
# Two processes of one thread each for what uses no Ray, else they wait for each other; of the rest as well two at a
# time, file by file, each with a Ray of its own: they wait more than they compute.
OMP_NUM_THREADS=1 "$VENV_PYTHON" -m pytest --numprocesses=2 tests/unit
exec "$VENV_PYTHON" -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder tests/e2e tests/nodes tests/autoscaler tests/cluster
