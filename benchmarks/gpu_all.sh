#!/usr/bin/env bash
# Everything that a GPU is needed for, in two calls of ten minutes each.
#
#     bash benchmarks/gpu_all.sh 1 [folder]      our own rows, then tests of waits, attention, fp8
#     bash benchmarks/gpu_all.sh 2 [folder]      other people's, single kernels, whole runs
#     bash benchmarks/gpu_all.sh all [folder]    one after the other
#
# The folder (out/gpu_<date> without one) gets a table of each benchmark, row by row, traces,
# doctor.json, the whole output in log_<part>.txt and the exit codes in summary_<part>.txt. Each piece
# has a limit of its own, at which it is killed; what it wrote stays. A piece that fails does not stop
# the others. The limits of a call add up to 560 seconds at most, so that nothing is left out even if
# every piece takes all of its time.
#   LIST=1       print the pieces and their limits in seconds, and run nothing
#   TINY=1       the benchmarks at their smallest; DEVICE=cpu tries that without a GPU
#   PYTHON, WHEELS: see benchmarks/lib/machine.sh
# A machine that reaches no package registry gets what it lacks as wheels; docs/gpu.md says which.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PART="${1:?usage: $0 1|2|all [folder]}"
OUT=${2:-out/gpu_$(date +%Y-%m-%d_%H%M%S)}
GRACE=3
SIZE=()
CROSS_ENTROPY=(--gpu-size)
if [[ -n "${TINY:-}" ]]; then
    SIZE=(--tiny --device "${DEVICE:-cuda}")
    CROSS_ENTROPY=(--tokens 256 --hidden 64 --vocab 8192)
fi
FAILED=0

# piece NAME SECONDS COMMAND...
piece() {
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    if [[ -n "${LIST:-}" ]]; then
        echo "$name $limit"
        return
    fi
    echo "== $name, at most $limit s"
    timeout --kill-after="$GRACE" "$((limit - GRACE))" "$@" 2>&1 | tee -a "$OUT/log_$PART.txt"
    code=${PIPESTATUS[0]}
    echo "$name: exit code $code after $((SECONDS - start)) s" >>"$OUT/summary_$PART.txt"
    ((code == 0)) || FAILED=1
}

# table NAME SECONDS SCRIPT FLAGS...
table() {
    local name=$1 limit=$2 script=$3
    shift 3
    piece "$name" "$limit" "$PYTHON" "benchmarks/$script.py" --out "$OUT/$name.md" "$@"
}

# throughput NAME SECONDS FLAGS...
throughput() {
    local name=$1 limit=$2
    shift 2
    table "$name" "$limit" gpu_throughput --implementations torch --warm-up 3 --rounds 3 --steps 3 \
        "$@" "${SIZE[@]}"
}

# tests NAME SECONDS FLAGS...
tests() {
    local name=$1 limit=$2
    shift 2
    piece "$name" "$limit" "$PYTHON" -m pytest -m gpu -v -p no:cacheprovider "$@"
}

first() {
    table try 60 gpu_try --seconds 54 "${SIZE[@]}"
    throughput throughput_3b_4096 90 --sizes 3b --seq-length 4096 --batch 2 --precisions bf16 \
        --trace "$OUT/traces"
    throughput throughput_3b_8192 70 --sizes 3b --seq-length 8192 --batch 1 --precisions bf16
    throughput throughput_4b_8192 130 --sizes 4b --seq-length 8192 --batch 1 \
        --precisions bf16 fp8-delayed fp8-tensorwise
    table attention 60 attention "${SIZE[@]}"
    table cross_entropy 60 cross_entropy "${CROSS_ENTROPY[@]}" --ways eager weighted
    piece doctor 15 "$PYTHON" tools/doctor.py --out "$OUT/doctor.json"
    tests tests_first 60 tests/gpu/test_runs.py tests/gpu/test_attention.py tests/gpu/test_fp8.py \
        -k "waits or queue or bad_gradient or float64 or product or pass"
}

second() {
    local peer
    for peer in "plain torch" "Hugging Face" megatron-core torchtitan ours; do
        table "peer_${peer// /_}" 65 gpu_peers --size 3b --seq-length 4096 --repeats 8 --warm-up 3 \
            --peers "$peer" --speeds "$OUT/speeds.json" "${SIZE[@]}"
    done
    table cross_entropy_others 50 cross_entropy "${CROSS_ENTROPY[@]}" \
        --ways eager torch.compile Liger weighted
    table fp8_linear 40 fp8_linear "${SIZE[@]}"
    table mmdit_block 45 mmdit_block "${SIZE[@]}"
    # The benchmarks run by themselves, so their tests at a tiny size are left out.
    tests tests_all 85 tests/gpu -k "not tiny_size"
}

if [[ -z "${LIST:-}" ]]; then
    mkdir -p "$OUT"
    : >"$OUT/summary_$PART.txt"
fi
case $PART in
    1 | 2 | all) ;;
    *)
        echo "error: the part ($PART) must be 1, 2 or all" >&2
        exit 2
        ;;
esac
piece wheels 15 bash -c 'source benchmarks/lib/machine.sh'
WHEELS="" source benchmarks/lib/machine.sh
[[ "$PART" == 2 ]] || first
[[ "$PART" == 1 ]] || second
[[ -z "${LIST:-}" ]] || exit 0
cat "$OUT/summary_$PART.txt"
echo "results are in $OUT"
exit "$FAILED"
