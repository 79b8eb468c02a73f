# Sourced by examples and by tests/run.sh: makes the repository's .venv once, then sets PYTHON.
#
#   source examples/lib/venv.sh        (from any folder)
#
# CORE=0.19 (or 0.16, or any other in constraints.txt) selects that release of megatron-core. If .venv has
#   another release, it makes a second environment, .venv-core-0.19, that holds only megatron-core and reads
#   the rest from .venv. CORE=other selects the release that .venv does not have.
# PYTHON=/path/to/python uses that interpreter as it is, and makes no environment.
# A stamp in each environment holds the hash of the requirements, so a second call does nothing.

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

_fail() {
    echo "error: $1" >&2
    exit 1
}

_version_is() {
    "$1" -c "import sys; sys.exit(not $2 <= sys.version_info[:2] <= $3)" 2>/dev/null
}

# Python 3.10 comes last, since it gets older versions of many packages.
_find_python() {
    local candidate
    for candidate in python3 python3.12 python3.13 python3.11; do
        if _version_is "$candidate" "(3, 11)" "(3, 13)"; then
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
    _fail "no Python 3.10 to 3.13 was found; install one, or set PYTHON to an interpreter that has the packages."
}

# Print the exact versions of a package in constraints.txt, without their conditions: _pins triton
_pins() {
    sed -n "s/^\($1==[^; ]*\).*/\1/p" "$REPOSITORY/constraints.txt"
}

_hash() {
    sha256sum | cut -c1-64
}

_make_venv() {
    local folder="$REPOSITORY/.venv" stamp wanted started=$SECONDS
    stamp="$folder/.megatron_ext"
    wanted="$(cat "$REPOSITORY/pyproject.toml" "$REPOSITORY/constraints.txt" | _hash)"
    PYTHON="$folder/bin/python"
    if [[ -x "$PYTHON" && -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
        return
    fi
    if [[ ! -x "$PYTHON" ]]; then
        local base
        base="$(_find_python)" || exit 1
        echo "> making .venv with $("$base" --version) (once: about 2 GB, and some minutes)"
        "$base" -m venv "$folder" || _fail "python -m venv failed; on Debian run 'apt install python3-venv'."
    fi
    # Install torch first: on Linux without a GPU, the CPU build, which is ten times smaller, if its index
    # can be reached.
    local torch=("$(_pins torch)")
    if [[ "$(uname -s)" == Linux ]] && ! command -v nvidia-smi >/dev/null; then
        local index="https://download.pytorch.org/whl/cpu"
        if curl --silent --fail --max-time 5 --head "$index/torch/" >/dev/null 2>&1; then
            torch+=(--extra-index-url "$index")
        fi
    fi
    "$PYTHON" -m pip install --quiet "${torch[@]}" || _fail "torch could not be installed; see pip's message above."
    (cd "$REPOSITORY" && "$PYTHON" -m pip install --quiet -e '.[dev,hf]' -c constraints.txt) \
        || _fail "the packages could not be installed; see pip's message above."
    echo "$wanted" >"$stamp"
    echo "> .venv is ready after $((SECONDS - started)) s ($(du -sm "$folder" | cut -f1) MB)"
}

# Print the exact version that CORE selects, such as megatron-core==0.19.2; .venv has version $1.
_core_pin() {
    local pin core known=""
    for pin in $(_pins megatron-core); do
        core="${pin#*==}"
        if [[ "$CORE" == "$core" || "$CORE" == "${core%.*}" ]] \
            || [[ "$CORE" == other && "$core" != "$1" ]]; then
            echo "$pin"
            return
        fi
        known+="${core%.*}, "
    done
    _fail "CORE ($CORE) must be ${known%, } or other; constraints.txt names the versions of megatron-core."
}

# Make the environment of CORE if .venv has another release, and set PYTHON to it.
_make_core_venv() {
    local base="$PYTHON" version has_triton packages pin name folder stamp wanted started=$SECONDS
    read -r version has_triton packages < <("$base" -c "
import importlib.metadata, importlib.util, sysconfig
has_triton = importlib.util.find_spec('triton') is not None
print(importlib.metadata.version('megatron-core'), has_triton, sysconfig.get_path('purelib'))") \
        || _fail ".venv is broken; remove it and try again."
    pin="$(_core_pin "$version")" || exit 1
    if [[ "$pin" == "megatron-core==$version" ]]; then
        return
    fi
    # Releases from 0.17 on import triton, which the CPU build of torch does not include.
    local wheels=("$pin")
    if [[ "$has_triton" == False ]]; then
        wheels+=("$(_pins triton)")
    fi
    name="${pin/megatron-core==/.venv-core-}"
    name="${name%.*}"
    folder="$REPOSITORY/$name"
    stamp="$folder/.megatron_ext"
    wanted="$(echo "${wheels[*]} $packages" | _hash)"
    PYTHON="$folder/bin/python"
    if [[ -x "$PYTHON" && -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
        return
    fi
    echo "> making $name with ${wheels[*]} on top of .venv (once)"
    "$base" -m venv --clear --without-pip "$folder" || _fail "python -m venv failed; see its message above."
    local own="$folder/${packages#"${packages%/*/*/*}"/}"  # lib/python3.11/site-packages
    # Wheels from 0.17 on require Python 3.12, but also run on 3.10 and 3.11.
    "$base" -m pip install --quiet --no-deps --ignore-requires-python --target "$own" "${wheels[@]}" \
        || _fail "${wheels[*]} could not be installed; see pip's message above."
    # Python searches the packages above first, then those of .venv, including its .pth files.
    echo "import site; site.addsitedir('$packages')" >"$own/rest_of_venv.pth"
    echo "$wanted" >"$stamp"
    echo "> $name is ready after $((SECONDS - started)) s ($(du -sm "$folder" | cut -f1) MB)"
}

_check_core_of_python() {
    local version
    version="$("$PYTHON" -c "import importlib.metadata; print(importlib.metadata.version('megatron-core'))")" \
        || _fail "PYTHON ($PYTHON) has no megatron-core."
    [[ "$(_core_pin "$version")" == "megatron-core==$version" ]] \
        || _fail "CORE ($CORE) is not the megatron-core of PYTHON ($PYTHON), which has $version; leave one of them out."
}

if [[ -n "${CORE:-}" ]]; then
    _core_pin "" >/dev/null || exit 1
fi
if [[ -z "${PYTHON:-}" ]]; then
    _make_venv
    if [[ -n "${CORE:-}" ]]; then
        _make_core_venv
    fi
elif [[ -n "${CORE:-}" ]]; then
    _check_core_of_python
fi
export PYTHON
