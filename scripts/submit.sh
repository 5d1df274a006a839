#!/usr/bin/env bash
# Runs as Ray jobs: scripts/submit.sh [--address URL] [--detach] -- [overrides], and status, logs, stop, scale; see --help.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare ""
exec "$VENV_PYTHON" -m app.submit "$@"
