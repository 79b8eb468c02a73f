#!/usr/bin/env bash
# Style, types and tests. Arguments go to pytest: bash tests/run.sh tests/data -k sampler
# SLOW=1 adds the tests marked slow: the example scripts, and layouts over several steps.
# WORKERS=0 runs the tests in one process, which shows prints and takes --pdb; 2 is made for 2 cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/lib/venv.sh
export OMP_NUM_THREADS=1

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet . \
    || { echo "error: some files are not formatted; run '$PYTHON -m ruff format .'" >&2; exit 1; }
"$PYTHON" -m mypy megatron_ext
SELECTED=(-m "not slow")
if [[ -n "${SLOW:-}" ]]; then
    SELECTED=()
fi
exec "$PYTHON" -m pytest --numprocesses "${WORKERS:-2}" --dist loadfile "${SELECTED[@]}" "$@"
