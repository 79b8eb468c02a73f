#!/usr/bin/env bash
# Llama 3 8B on 8 GPUs of 80 GB, in bf16: 2-way tensor x 2-stage pipeline x 2-way data parallel.
#
#   bash examples/gpt/pretrain_llama3_8b.sh DATA_PREFIX TOKENIZER CHECKPOINTS
#
# TOKENIZER is the folder or name of the Hugging Face tokenizer that DATA_PREFIX was made with.
# SMOKE=1 runs the same architecture at a tiny size on generated data, also on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh

MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.0134
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125
    --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-samples 1949218
    --lr-warmup-samples 3906
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity selective
)
LAYOUT=(
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel
)

if [[ -n "${SMOKE:-}" ]]; then
    GPUS=4 OUT="${OUT:-out/smoke/llama3_8b}"
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,10,0)
    LAST=(
        --num-layers 4 --hidden-size 64 --ffn-hidden-size 224 --kv-channels 8
        --num-attention-heads 8 --num-query-groups 2 --seq-length 32 --max-position-embeddings 32
        --global-batch-size 4 --train-samples 16 --lr-decay-samples 16 --lr-warmup-samples 4
        --eval-interval 2 --eval-iters 1 --log-interval 1
    )
else
    GPUS=8 OUT="${3:?usage: $0 DATA_PREFIX TOKENIZER CHECKPOINTS}"
    DATA=(--data-path "$1" --split 99,1,0
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$2")
    LAST=(--eval-interval 500 --eval-iters 10 --log-interval 10 --log-throughput)
fi

# If a flag is given twice, the last value counts.
exec "$PYTHON" pretrain_gpt.py --nproc-per-node "$GPUS" \
    "${LAYOUT[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" \
    --save "$OUT" --load "$OUT" --save-interval 500 "${LAST[@]}"
