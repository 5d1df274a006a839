#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [pytest arguments].
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare dev
# Two processes: one runs all that uses Ray, which waits a lot, the other one begins with the rest.
exec "$VENV_PYTHON" -m pytest --numprocesses=2 --dist=loadgroup "$@"
