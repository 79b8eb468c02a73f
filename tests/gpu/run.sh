#!/usr/bin/env bash
# Everything that needs a GPU, in one call: what the machine has, the tests, the benchmarks.
#
#     bash tests/gpu/run.sh [folder]
#
# Results go to the folder (out/gpu_<date> without one), one file for each piece, and their exit
# codes to summary.txt there. A piece that fails or runs past its time does not stop the others.
#   PYTHON=...    the interpreter (python3 of the project's .venv, where there is one)
#   PIECES="..."  some of: doctor tests throughput peers attention fp8 cross_entropy (all)
#   TINY=1        the benchmarks at their smallest
#   LIMIT=600     seconds of a piece
#   WHEELS=...    a folder of packages to install first, for a machine that reaches no registry
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
OUT=${1:-out/gpu_$(date +%Y-%m-%d_%H%M%S)}
PIECES=${PIECES:-doctor tests attention fp8 cross_entropy throughput peers}
SIZE=()
CROSS_ENTROPY=(--gpu-size)
if [[ -n "${TINY:-}" ]]; then
    SIZE=(--tiny)
    CROSS_ENTROPY=(--tokens 2048 --hidden 64 --vocab 8192 --dtype bfloat16)
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} PYTHONUNBUFFERED=1
mkdir -p "$OUT"
if [[ -n "${WHEELS:-}" ]]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl || exit 1
    # Without its requirements: those of the machine are taken as they are.
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-build-isolation -e . || exit 1
fi
: >"$OUT/summary.txt"
FAILED=0

piece() {
    local name=$1
    shift
    timeout "${LIMIT:-600}" "$@" 2>&1 | tee "$OUT/$name.txt"
    local code=${PIPESTATUS[0]}
    echo "$name: exit code $code" >>"$OUT/summary.txt"
    ((code == 0)) || FAILED=1
}

for name in $PIECES; do
    case $name in
        doctor)
            piece doctor "$PYTHON" tools/doctor.py --json
            cp "$OUT/doctor.txt" "$OUT/doctor.json"
            piece doctor "$PYTHON" tools/doctor.py
            ;;
        tests) piece tests "$PYTHON" -m pytest tests/gpu -m gpu -v -p no:cacheprovider ;;
        attention) piece attention "$PYTHON" benchmarks/attention.py "${SIZE[@]}" ;;
        fp8) piece fp8 "$PYTHON" benchmarks/fp8_linear.py "${SIZE[@]}" ;;
        cross_entropy)
            piece cross_entropy "$PYTHON" benchmarks/cross_entropy.py "${CROSS_ENTROPY[@]}"
            ;;
        throughput)
            piece throughput "$PYTHON" benchmarks/gpu_throughput.py --precisions bf16 fp8 \
                "${SIZE[@]}"
            ;;
        peers) piece peers "$PYTHON" benchmarks/gpu_peers.py "${SIZE[@]}" ;;
        *)
            echo "error: $name is no piece; they are doctor tests throughput peers attention fp8" \
                "cross_entropy" >&2
            exit 2
            ;;
    esac
done
cat "$OUT/summary.txt"
echo "results are in $OUT"
exit "$FAILED"
