#!/usr/bin/env bash
# Llama 3 8B on 8 GPUs of 80 GB, in bf16, as recipes/llama3_8b.yaml says: model, optimizer, layout.
#
#   bash examples/gpt/pretrain_llama3_8b.sh DATA_PREFIX TOKENIZER CHECKPOINTS
#
# TOKENIZER is the folder or name of the Hugging Face tokenizer that DATA_PREFIX was made with.
# Flags after these three win over the recipe. SMOKE=1 runs the same architecture at a tiny size on
# generated data, also on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh

if [[ -n "${SMOKE:-}" ]]; then
    GPUS=4 OUT="${OUT:-out/smoke/llama3_8b}"
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,10,0)
    LAST=(
        --num-layers 4 --hidden-size 64 --ffn-hidden-size 224 --kv-channels 8
        --num-attention-heads 8 --num-query-groups 2 --padded-vocab-size 256
        --seq-length 32 --max-position-embeddings 32 --pipeline-model-parallel-size 2
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
    --nproc-per-node "$GPUS" "${DATA[@]}" \
    --save "$OUT" --load "$OUT" --save-interval 500 "${LAST[@]}" "${@:4}"
