#!/usr/bin/env bash
# Trains a chat model on pairs of a chosen and a rejected answer (DPO) on 4 ranks; TP2 x PP2, GPU or CPU.
#
#   bash examples/dpo/train.sh HF_FOLDER PAIRS.jsonl VALID_PAIRS.jsonl CHECKPOINTS
#
# 1. every pair is scored once with the model as it is, the reference; CHECKPOINTS keeps the scores
# 2. the model is trained; the log shows how often it prefers the chosen answer (rewards/accuracies)
# 3. CHECKPOINTS/hf gets the trained model for transformers and vLLM
#
# MORE sets further flags, such as MORE="--lora-rank 16 --lora-alpha 32". SMOKE=1 makes a toy task and trains a tiny model on it from nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh

if [[ -n "${SMOKE:-}" ]]; then
    OUT="${OUT:-out/smoke/dpo}"
    mkdir -p "$OUT"
    "$PYTHON" examples/sft/make_toy.py --output "$OUT" --turns 200
    for part in train valid; do
        "$PYTHON" examples/dpo/make_pairs.py --input "$OUT/$part.jsonl" --output "$OUT/$part-pairs.jsonl"
    done
    MODEL=(--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
        --seq-length 192 --max-position-embeddings 192 --position-embedding-type rope
        --normalization RMSNorm --swiglu --disable-bias-linear --make-vocab-size-divisible-by 16
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$OUT/tokenizer")
    DATA=(--dpo-data "$OUT/train-pairs.jsonl" --dpo-valid-data "$OUT/valid-pairs.jsonl")
    STEPS=(--micro-batch-size 2 --global-batch-size 16 --train-iters 30 --log-interval 1 --lr 2e-3
        --eval-interval 15 --eval-iters 4)
else
    OUT="${4:?usage: $0 HF_FOLDER PAIRS.jsonl VALID_PAIRS.jsonl CHECKPOINTS}"
    MODEL=(--load-hf "$1" --seq-length 4096)
    DATA=(--dpo-data "$2" --dpo-valid-data "$3")
    STEPS=(--micro-batch-size 1 --global-batch-size 64 --train-iters 500 --log-interval 10 --lr 5e-7
        --lr-warmup-fraction 0.1 --eval-interval 100 --eval-iters 4)
fi

# shellcheck disable=SC2086
exec "$PYTHON" examples/dpo/train.py --nproc-per-node 4 \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel \
    "${MODEL[@]}" --attention-dropout 0 --hidden-dropout 0 --bf16 \
    "${DATA[@]}" --dpo-beta 0.1 "${STEPS[@]}" --use-distributed-optimizer \
    --save "$OUT" --load "$OUT" --save-interval 100 --save-hf "$OUT/hf" ${MORE:-}
