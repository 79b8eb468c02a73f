#!/usr/bin/env bash
# A GPT of 857 million weights on the 8 GPUs of one node: 2-way tensor x 4-way data parallel.
#
#   bash examples/gpt/pretrain_gpt_1node.sh DATA_PREFIX TOKENIZER_MODEL CHECKPOINTS
#
# DATA_PREFIX is the output of tools/preprocess_data.py, without .bin; TOKENIZER_MODEL is the
# SentencePiece model that it used. SMOKE=1 runs a tiny model on generated data, also on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh

MODEL=(
    --num-layers 24 --hidden-size 1536 --ffn-hidden-size 4096 --num-attention-heads 16
    --seq-length 2048 --max-position-embeddings 2048
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
TRAINING=(
    --micro-batch-size 8 --global-batch-size 256 --train-iters 50000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 1000
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.02
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
LAYOUT=(--tensor-model-parallel-size 2 --sequence-parallel)

if [[ -n "${SMOKE:-}" ]]; then
    GPUS=4 OUT="${OUT:-out/smoke/gpt_1node}"
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,10,0)
    LAST=(
        --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
        --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8
        --train-iters 4 --lr-warmup-iters 1 --eval-interval 2 --eval-iters 1 --log-interval 1
    )
else
    GPUS=8 OUT="${3:?usage: $0 DATA_PREFIX TOKENIZER_MODEL CHECKPOINTS}"
    DATA=(--data-path "$1" --split 99,1,0
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$2")
    LAST=(--eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput)
fi

# If a flag is given twice, the last value counts.
exec "$PYTHON" pretrain_gpt.py --nproc-per-node "$GPUS" \
    "${LAYOUT[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" \
    --save "$OUT" --load "$OUT" --save-interval 1000 "${LAST[@]}"
