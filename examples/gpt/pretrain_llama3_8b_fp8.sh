#!/usr/bin/env bash
# Llama 3 8B in fp8 on 8 GPUs of 80 GB (Ada, Hopper or newer): 2-way tensor x 4-way data parallel.
#
#   bash examples/gpt/pretrain_llama3_8b_fp8.sh DATA_PREFIX TOKENIZER CHECKPOINTS
#
# The matrix products of the layers are in fp8; everything else is as in recipes/llama3_8b.yaml. If
# Transformer Engine is installed its layers are used, otherwise those of torch; the run says which.
# IMPL=torch or IMPL=transformer_engine chooses. SMOKE=1 runs the same architecture at a tiny size on
# generated data; on a CPU, fp8 is emulated by quantizing to fp8 and multiplying in full precision.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh

# e4m3 in the forward pass, e5m2 for gradients; each tensor is scaled by its own largest entry. The
# first and the last layer, where rounding hurts the loss most, stay in bf16.
FP8=(
    --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16
    --transformer-impl "${IMPL:-auto}"
)

if [[ -n "${SMOKE:-}" ]]; then
    GPUS=4 OUT="${OUT:-out/smoke/llama3_8b_fp8}"
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,10,0)
    LAST=(
        --num-layers 4 --hidden-size 64 --ffn-hidden-size 224 --kv-channels 8
        --num-attention-heads 8 --num-query-groups 2 --padded-vocab-size 256
        --seq-length 32 --max-position-embeddings 32
        --global-batch-size 4 --train-iters 4 --lr-warmup-iters 1
        --eval-interval 2 --eval-iters 1 --log-interval 1
    )
else
    GPUS=8 OUT="${3:?usage: $0 DATA_PREFIX TOKENIZER CHECKPOINTS}"
    DATA=(--data-path "$1" --split 99,1,0
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$2")
    LAST=(--eval-interval 500 --eval-iters 10 --log-interval 10 --log-throughput)
fi

# Flags win over the recipe; if a flag is given twice, the last value counts.
exec "$PYTHON" pretrain_gpt.py --config recipes/llama3_8b.yaml --layout 8xH100 \
    --nproc-per-node "$GPUS" "${FP8[@]}" "${DATA[@]}" \
    --save "$OUT" --load "$OUT" --save-interval 500 "${LAST[@]}" "${@:4}"
