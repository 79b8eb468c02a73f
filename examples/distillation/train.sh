#!/usr/bin/env bash
# Distils a teacher into a smaller model on conversations, on 4 ranks; TP2 x PP2, GPU or CPU.
#
#   bash examples/distillation/train.sh TEACHER STUDENT CHATS.jsonl CHECKPOINTS
#
# TEACHER and STUDENT are Hugging Face folders with one tokenizer. SMOKE=1 makes a tiny teacher and a
# tiny student, and distils one into the other on a toy task.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh

if [[ -n "${SMOKE:-}" ]]; then
    OUT="${OUT:-out/smoke/distillation}"
    mkdir -p "$OUT"
    "$PYTHON" examples/sft/make_toy.py --output "$OUT" --turns 200
    TEACHER="$OUT/teacher" STUDENT="$OUT/student" CHATS="$OUT/train.jsonl"
    "$PYTHON" examples/distillation/make_models.py --tokenizer "$OUT/tokenizer" --output "$OUT"
    STEPS=(--seq-length 128 --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 3e-3
        --log-interval 1 --teacher-top-k 5)
else
    OUT="${4:?usage: $0 TEACHER STUDENT CHATS.jsonl CHECKPOINTS}"
    TEACHER="$1" STUDENT="$2" CHATS="$3"
    STEPS=(--seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --train-epochs 2 --lr 1e-5
        --min-lr 1e-6 --lr-decay-style cosine --log-interval 10 --teacher-top-k 64)
fi

exec "$PYTHON" examples/distillation/train.py --nproc-per-node 4 \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel \
    --teacher-hf "$TEACHER" --load-hf "$STUDENT" --attention-dropout 0 --hidden-dropout 0 --bf16 \
    --sft --train-data-path "$CHATS" --eval-iters 0 --distill-alpha 0.9 "${STEPS[@]}" \
    --use-distributed-optimizer --save "$OUT" --load "$OUT" --save-interval 500 --save-hf "$OUT/hf"
