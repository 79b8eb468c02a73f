# Sourced by examples and by tests/run.sh: makes the repository's .venv once, then sets PYTHON.
#
#   source examples/lib/venv.sh        (from any folder)
#
# PYTHON=/path/to/python uses that interpreter as it is and makes nothing.
# A stamp in .venv keeps the hash of what was asked for, so that the second call does nothing.

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

_fail() {
    echo "error: $1" >&2
    exit 1
}

_version_is() {
    "$1" -c "import sys; sys.exit(not $2 <= sys.version_info[:2] <= $3)" 2>/dev/null
}

# 3.11 or 3.12 by preference: some of the exact versions in constraints.txt need them.
_find_python() {
    local candidate
    for candidate in python3 python3.12 python3.11; do
        if _version_is "$candidate" "(3, 11)" "(3, 12)"; then
            echo "$candidate"
            return
        fi
    done
    for candidate in python3 python3.10; do
        if _version_is "$candidate" "(3, 10)" "(3, 10)"; then
            echo "$candidate"
            return
        fi
    done
    _fail "no Python 3.10, 3.11 or 3.12 was found; install one, or set PYTHON to an interpreter that has the packages."
}

_make_venv() {
    local folder="$REPOSITORY/.venv" stamp wanted started=$SECONDS
    stamp="$folder/.megatron_ext"
    wanted="$(cat "$REPOSITORY/pyproject.toml" "$REPOSITORY/constraints.txt" | sha256sum | cut -c1-64)"
    PYTHON="$folder/bin/python"
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
        return
    fi
    if [[ ! -x "$PYTHON" ]]; then
        local base
        base="$(_find_python)" || exit 1
        echo "> making .venv with $("$base" --version) (once)"
        "$base" -m venv "$folder" || _fail "python -m venv failed; on Debian run 'apt install python3-venv'."
    fi
    # Torch first: on Linux without a GPU the build for CPUs, a tenth of the size, where its index answers.
    local torch=("torch==$(sed -n 's/^torch==//p' "$REPOSITORY/constraints.txt")")
    if [[ "$(uname -s)" == Linux ]] && ! command -v nvidia-smi >/dev/null; then
        local index="https://download.pytorch.org/whl/cpu"
        if curl --silent --fail --max-time 5 --head "$index/torch/" >/dev/null 2>&1; then
            torch+=(--extra-index-url "$index")
        fi
    fi
    "$PYTHON" -m pip install --quiet "${torch[@]}" || _fail "torch could not be installed; see pip's message above."
    local pins=(-c constraints.txt)
    if _version_is "$PYTHON" "(3, 10)" "(3, 10)"; then
        pins=("${torch[@]}")
    fi
    (cd "$REPOSITORY" && "$PYTHON" -m pip install --quiet -e '.[dev,hf]' "${pins[@]}") \
        || _fail "the packages could not be installed; see pip's message above."
    echo "$wanted" >"$stamp"
    echo "> .venv is ready after $((SECONDS - started)) s ($(du -sm "$folder" | cut -f1) MB)"
}

if [[ -z "${PYTHON:-}" ]]; then
    _make_venv
fi
export PYTHON
