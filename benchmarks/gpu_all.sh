#!/usr/bin/env bash
# Everything that a GPU is needed for, in two calls of ten minutes each, or in one long one.
#
#     bash benchmarks/gpu_all.sh 1 [folder]      kernels, the doctor, tests/gpu
#     bash benchmarks/gpu_all.sh 2 [folder]      whole models, beside other people's
#     bash benchmarks/gpu_all.sh all [folder]
#
# The folder (out/gpu_<date> without one) gets a table of each benchmark, row by row, doctor.json,
# the whole output in log_<part>.txt and the exit codes in summary_<part>.txt. A piece that fails or
# runs past its time does not stop the others; one that finds no time left is skipped, and said so.
#   BUDGET=560   seconds of a part (7200 of all)
#   TINY=1       the benchmarks at their smallest; DEVICE=cpu tries that without a GPU
#   PYTHON, WHEELS: see benchmarks/lib/machine.sh
# A machine that reaches no package registry gets what it lacks as wheels; docs/gpu.md says which.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PART="${1:?usage: $0 1|2|all [folder]}"
OUT=${2:-out/gpu_$(date +%Y-%m-%d_%H%M%S)}
LEAST=15
if [[ "$PART" == all ]]; then
    BUDGET=${BUDGET:-7200}
else
    BUDGET=${BUDGET:-560}
fi
mkdir -p "$OUT"
source benchmarks/lib/machine.sh
SIZE=()
CROSS_ENTROPY=(--gpu-size)
if [[ -n "${TINY:-}" ]]; then
    SIZE=(--tiny --device "${DEVICE:-cuda}")
    CROSS_ENTROPY=(--tokens 256 --hidden 64 --vocab 8192 --ways eager weighted)
fi
FAILED=0

# piece NAME SECONDS COMMAND...
piece() {
    local name=$1 limit=$2 left=$((BUDGET - SECONDS)) code
    shift 2
    if ((left < LEAST)); then
        echo "$name: skipped, $left s are left" | tee -a "$OUT/summary_$PART.txt"
        FAILED=1
        return
    fi
    echo "== $name ($left s are left)"
    timeout --kill-after=10 "$((limit < left ? limit : left))" "$@" 2>&1 | tee -a "$OUT/log_$PART.txt"
    code=${PIPESTATUS[0]}
    echo "$name: exit code $code" >>"$OUT/summary_$PART.txt"
    ((code == 0)) || FAILED=1
}

# table NAME SECONDS SCRIPT FLAGS...
table() {
    local name=$1 limit=$2 script=$3
    shift 3
    piece "$name" "$limit" "$PYTHON" "benchmarks/$script.py" --out "$OUT/$name.md" "$@"
}

kernels() {
    table attention 90 attention "${SIZE[@]}"
    table fp8_linear 90 fp8_linear "${SIZE[@]}"
    table cross_entropy 150 cross_entropy "${CROSS_ENTROPY[@]}"
    table mmdit_block 90 mmdit_block "${SIZE[@]}"
    # The benchmarks run by themselves, so their tests at a tiny size are left out.
    piece tests "$BUDGET" bash tests/gpu/run.sh "$OUT" -k "not tiny_size"
}

models() {
    table throughput_3b 150 gpu_throughput --sizes 3b --batch 1 --precisions bf16 \
        --implementations torch --rounds 3 "${SIZE[@]}"
    table throughput_4b 150 gpu_throughput --sizes 4b --batch 1 --seq-length 8192 \
        --rounds 3 "${SIZE[@]}"
    table peers "$BUDGET" gpu_peers --size 3b --seq-length 4096 "${SIZE[@]}"
}

: >"$OUT/summary_$PART.txt"
case $PART in
    1) kernels ;;
    2) models ;;
    all)
        kernels
        models
        ;;
    *)
        echo "error: the part ($PART) must be 1, 2 or all" >&2
        exit 2
        ;;
esac
cat "$OUT/summary_$PART.txt"
echo "results are in $OUT"
exit "$FAILED"
