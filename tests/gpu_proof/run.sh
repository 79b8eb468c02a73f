#!/usr/bin/env bash
# What can be proven of the GPU path without a GPU: compiles every kernel for H200 (sm_90) and B200 (sm_100),
# and traces whole training steps on fake CUDA tensors. Arguments go to pytest.
#
#   bash tests/gpu_proof/run.sh                     everything
#   TARGETS=90 bash tests/gpu_proof/run.sh -k fp8   one generation, some of the tests
#
# Makes .venv-gpu-proof on the first call: torch's build for CUDA, several GB. Needs Linux, gcc, and Python
# 3.11 to 3.13; no GPU and no driver. GPU_PROOF_VENV=/path keeps the environment elsewhere, or names one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
HERE=tests/gpu_proof
VENV="${GPU_PROOF_VENV:-$PWD/.venv-gpu-proof}"
started=$SECONDS

fail() {
    echo "error: $1" >&2
    exit 1
}

command -v gcc >/dev/null || fail "gcc was not found; on Debian run 'apt install gcc'."

find_python() {
    local candidate
    # A shim of pyenv names versions that it does not start, so the versions themselves come first.
    for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python \
        python3.12 python3.13 python3.11 python3; do
        if "$candidate" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 to 3.13 was found; install one, or set GPU_PROOF_VENV to an environment that has the packages."
}

# The versions of constraints.txt, so that what is proven is what the tests run with; PyPI's torch is for CUDA.
make_venv() {
    local stamp="$VENV/.megatron_ext" wanted base
    wanted="$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-64)"
    if [[ -x "$VENV/bin/python" && -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
        return
    fi
    if [[ ! -x "$VENV/bin/python" ]]; then
        base="$(find_python)" || exit 1
        echo "> making $VENV with $("$base" --version) and torch for CUDA (once, several GB)"
        "$base" -m venv "$VENV" || fail "python -m venv failed; on Debian run 'apt install python3-venv'."
    fi
    # Three signs of equality leave out wheels for CPUs (2.13.0+cpu) that pip may know of.
    "$VENV/bin/python" -m pip install --quiet "torch===$(sed -n 's/^torch==//p' constraints.txt)" \
        || fail "torch could not be installed; see pip's message above."
    "$VENV/bin/python" -m pip install --quiet -e . pytest -c constraints.txt \
        || fail "the packages could not be installed; see pip's message above."
    "$VENV/bin/python" -c "import sys, torch; sys.exit(torch.version.cuda is None)" \
        || fail "torch in $VENV is not the build for CUDA; remove the folder, and see what pip's settings prefer."
    echo "$wanted" >"$stamp"
    echo "> ready after $((SECONDS - started)) s ($(du -sm "$VENV" | cut -f1) MB)"
}

make_venv
BUILD="$VENV/gpu_proof"
mkdir -p "$BUILD"
gcc -shared -fPIC -Wall -Wextra -Werror -o "$BUILD/libcuda.so.1" "$HERE/stubs/libcuda.c"
gcc -shared -fPIC -Wall -Wextra -Werror -o "$BUILD/preload.so" "$HERE/stubs/preload.c"

failed=0
for target in ${TARGETS:-90 100}; do
    echo "> sm_$target"
    env GPU_PROOF_TARGET="$target" GPU_PROOF_PRELOAD="$BUILD/preload.so" LD_PRELOAD="$BUILD/preload.so" \
        LD_LIBRARY_PATH="$BUILD${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 \
        TRITON_CACHE_DIR="$BUILD/triton" TORCHINDUCTOR_CACHE_DIR="$BUILD/inductor" \
        "$VENV/bin/python" -m pytest --quiet --show-capture=stdout "$HERE" "$@" || failed=1
done
echo "> $((SECONDS - started)) s; $VENV has $(du -sm "$VENV" | cut -f1) MB"
exit $failed
