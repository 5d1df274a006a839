#!/usr/bin/env bash
# An example of a mixed fleet: starts a Ray cluster of four nodes with labels on this machine, trains on it with
# pools=fleet and ends it again: scripts/fleet.sh [overrides of scripts/train.sh].
set -euo pipefail
set -m # what runs in the background gets no Ctrl-C but from here

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare ""
export PATH="$PWD/.venv/bin:$PATH"
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=1 # a node that is stopped here has nobody to wait for

folder="$(mktemp -d /tmp/fleet.XXXXXX)" # short: it becomes part of the paths of sockets
port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
export RAY_ADDRESS="127.0.0.1:$port"
nodes=()
run=

node() { # NAME CPUS [arguments of ray start]
    local name="$1" cpus="$2"
    python -m ray.scripts.scripts start --block --temp-dir="$folder/$name" --num-cpus="$cpus" --object-store-memory=200000000 "${@:3}" \
        >"$folder/$name.log" 2>&1 &
    nodes+=($!)
    until grep -q "Ray runtime started" "$folder/$name.log"; do
        kill -0 $! 2>/dev/null || { cat "$folder/$name.log" >&2; exit 1; }
        sleep 0.2
    done
}

end() {
    local at
    for ((at = ${#nodes[@]} - 1; at >= 0; at--)); do
        kill "${nodes[at]}" 2>/dev/null || true
        wait "${nodes[at]}" || true
    done
    rm -rf "$folder"
}
trap end EXIT

worker() { # NAME CPUS LABELS
    node "$1" "$2" --address="$RAY_ADDRESS" --labels "$3" --dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0
}

echo "Starting four nodes: services (head), pair, old, spot" >&2
node services 2 --head --port="$port" --include-dashboard=false --labels machine=services
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" # the head makes a token where there is none yet; the others only take it
worker pair 2 machine=pair
worker old 1 machine=old
worker spot 1 ray.io/market-type=spot

# In the background, so that signals to this script reach it at once.
"$VENV_PYTHON" -m app.train pools=fleet run.name=fleet run.shared_dir=true "$@" &
run=$!
trap 'kill -TERM "$run"' TERM
trap 'kill -INT "$run"' INT
code=0
wait "$run" || code=$?
while kill -0 "$run" 2>/dev/null; do
    code=0
    wait "$run" || code=$?
done
exit "$code"
