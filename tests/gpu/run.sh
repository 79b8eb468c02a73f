#!/usr/bin/env bash
# What a machine with a GPU has, and the tests that need one.
#
#     bash tests/gpu/run.sh [folder] [flags of pytest]
#
# The doctor's findings go to doctor.json in the folder (out/gpu_<date> without one). The benchmarks
# are another call: benchmarks/gpu_all.sh, which can run this one too.
#   PYTHON=...   the interpreter (that of the project's .venv, where there is one, else python3)
#   WHEELS=...   a folder of packages to install first, for a machine that reaches no registry
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source benchmarks/lib/machine.sh
OUT=${1:-out/gpu_$(date +%Y-%m-%d_%H%M%S)}
mkdir -p "$OUT"
FAILED=0
"$PYTHON" tools/doctor.py --out "$OUT/doctor.json" || FAILED=1
"$PYTHON" -m pytest tests/gpu -m gpu -v -p no:cacheprovider "${@:2}" || FAILED=1
exit "$FAILED"
