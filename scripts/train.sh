#!/usr/bin/env bash
# Trains: scripts/train.sh [group=option ...] [key=value ...]; --help lists them. Relative paths in
# the arguments start at the root of the repository.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare ""
# exec: signals reach Python itself, and its exit code is this script's.
exec "$VENV_PYTHON" -m app.train "$@"
