#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [pytest arguments].
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare dev
exec "$VENV_PYTHON" -m pytest "$@"
