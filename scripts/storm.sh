#!/usr/bin/env bash
# Trains through a storm of faults, and without one, and compares: scripts/storm.sh [--help].
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare dev
exec "$VENV_PYTHON" scripts/bench/storm.py "$@"
