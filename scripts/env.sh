# Sourced by the scripts beside it. Defines `prepare EXTRAS`: from the repository's root, makes .venv when it is
# missing or incomplete and installs the project into it. Does nothing when pyproject.toml hasn't changed since.

export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
# .venv is installed without bytecode, which Python adds for what it imports: without that every process would compile
# torch and transformers again.
unset PYTHONDONTWRITEBYTECODE
VENV_PYTHON=.venv/bin/python

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python; do
        if [[ -n "$candidate" ]] && command -v "$candidate" >/dev/null \
            && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or newer is needed, as python3.11 or python3 on the PATH (or set PYTHON)." >&2
    return 2
}

prepare() {
    local extras="$1" python stamp wanted found
    # A stamp for each set of extras; dev holds all. The path is in it because a moved .venv doesn't work any more.
    stamp=".venv/.installed${extras:+-$extras}"
    wanted="$(pwd) $(cksum <pyproject.toml)"
    for found in "$stamp" .venv/.installed-dev; do
        if [[ -x "$VENV_PYTHON" && -f "$found" && "$(<"$found")" == "$wanted" ]]; then
            return
        fi
    done
    python="$(find_python)" || return
    echo "Setting up .venv (once; a few minutes at most)" >&2
    # --clear only where the old one can't be used: another start may be at work in a good one.
    if ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --clear .venv || return
    fi
    # --no-compile: Python does that for what is imported; for every module of torch and others it takes as long as the rest.
    "$VENV_PYTHON" -m pip install --quiet --no-compile --disable-pip-version-check -e ".${extras:+[$extras]}" >&2 || return
    echo "$wanted" >"$stamp"
}
