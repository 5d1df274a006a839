#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [pytest arguments].
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare dev
if (($#)); then
  exec "$VENV_PYTHON" -m pytest "$@"
fi

# What uses no Ray runs beside the rest, which mostly waits, and gets only what that leaves of the processors: its own
# session is its own scheduling group on Linux, whose priority counts more than that of its processes.
output="$(mktemp)"
setsid bash -c 'echo 19 2>/dev/null >/proc/self/autogroup; exec nice -n 19 "$@"' unit \
  env OMP_NUM_THREADS=1 "$VENV_PYTHON" -m pytest --numprocesses=2 --timeout=600 tests/unit >"$output" 2>&1 &
unit=$!
trap 'kill -- "-$unit" 2>/dev/null; rm -f "$output"' EXIT

code=0
"$VENV_PYTHON" -m pytest tests/cluster tests/e2e || code=$?
echo "tests/unit, meanwhile:"
wait "$unit" || code=$?
cat "$output"
exit "$code"
