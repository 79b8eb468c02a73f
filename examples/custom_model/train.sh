#!/usr/bin/env bash
# Trains the model of examples/custom_model/train.py on 4 ranks; TP2 x PP2, GPU or CPU.
#
#   bash examples/custom_model/train.sh DATA_PREFIX TOKENIZER_MODEL CHECKPOINTS
#
# SMOKE=1 runs it at a tiny size on generated data.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh

if [[ -n "${SMOKE:-}" ]]; then
    OUT="${OUT:-out/smoke/custom_model}"
    MODEL=(--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
        --seq-length 32 --max-position-embeddings 32)
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,10,0)
    STEPS=(--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --log-interval 1
        --eval-interval 2 --eval-iters 1)
else
    OUT="${3:?usage: $0 DATA_PREFIX TOKENIZER_MODEL CHECKPOINTS}"
    MODEL=(--num-layers 12 --hidden-size 768 --ffn-hidden-size 2048 --num-attention-heads 12
        --seq-length 1024 --max-position-embeddings 1024)
    DATA=(--data-path "$1" --split 99,1,0
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$2")
    STEPS=(--micro-batch-size 8 --global-batch-size 128 --train-iters 20000 --log-interval 10
        --lr-warmup-iters 500 --eval-interval 1000 --eval-iters 10)
fi

exec "$PYTHON" examples/custom_model/train.py --nproc-per-node 4 \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel \
    "${MODEL[@]}" --position-embedding-type rope --normalization RMSNorm --swiglu \
    --disable-bias-linear --untie-embeddings-and-output-weights \
    --attention-dropout 0 --hidden-dropout 0 \
    "${DATA[@]}" "${STEPS[@]}" --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --bf16 \
    --save "$OUT" --load "$OUT" --save-interval 1000
