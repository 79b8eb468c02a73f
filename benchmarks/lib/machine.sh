# Sourced by scripts that run on a machine with a GPU: sets PYTHON, and installs WHEELS once.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} PYTHONUNBUFFERED=1
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    if [[ -x .venv/bin/python ]]; then
        PYTHON=$PWD/.venv/bin/python
    fi
fi
export PYTHON
if [[ -n "${WHEELS:-}" ]]; then
    # Without their requirements: what the machine has is taken as it is.
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile "$WHEELS"/*.whl || exit 1
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-build-isolation -e . \
        || echo "> this project could not be installed; it runs from its folder"
    export WHEELS=""
fi
