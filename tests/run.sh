#!/usr/bin/env bash
# Style, types and tests. Arguments go to pytest: bash tests/run.sh tests/data -k sampler
# SLOW=1 adds the tests marked slow: the example scripts, and layouts over several steps. SLOW=3/10 adds the
# third tenth of them.
# CORE=0.19, CORE=0.16 or CORE=other runs the tests on that megatron-core (examples/lib/venv.sh). Style and
# types are checked in .venv only.
# WORKERS=0 runs the tests in one process, which shows prints and takes --pdb; 2 is made for 2 cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/lib/venv.sh
unset CORE
export OMP_NUM_THREADS=1
# Huge pages: a worker with all tests loaded takes 1 GB, and each rank that it forks copies its page table.
export PYTHONMALLOC=malloc GLIBC_TUNABLES=glibc.malloc.hugetlb=1

if [[ "$PYTHON" != */.venv-core-*/bin/python ]]; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check --quiet . \
        || { echo "error: some files are not formatted; run '$PYTHON -m ruff format .'" >&2; exit 1; }
    "$PYTHON" -m mypy megatron_ext
fi
"$PYTHON" -c "
import importlib.metadata, platform
print('> megatron-core', importlib.metadata.version('megatron-core'), 'on Python', platform.python_version())"
SELECTED=(-m "not slow")
if [[ -n "${SLOW:-}" ]]; then
    SELECTED=()
    if [[ "$SLOW" == */* ]]; then
        SELECTED=(--slow-share "$SLOW")
    fi
fi
exec "$PYTHON" -m pytest --numprocesses "${WORKERS:-2}" --dist loadfile "${SELECTED[@]}" "$@"
