#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [pytest arguments].
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare dev
if (($#)); then
  exec "$VENV_PYTHON" -m pytest "$@"
fi
# What uses no Ray in two processes of one thread each, else they wait for each other; the rest needs the machine for
# itself.
OMP_NUM_THREADS=1 "$VENV_PYTHON" -m pytest --numprocesses=2 tests/unit
exec "$VENV_PYTHON" -m pytest tests/cluster tests/nodes tests/e2e
