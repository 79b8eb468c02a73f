#!/usr/bin/env bash
# Qwen3-Next 80B-A3B: gated DeltaNet in three of four layers, attention with gated outputs in the
# fourth, 512 experts in each, on 64 GPUs of 80 GB. recipes/qwen3_next_80b_a3b.yaml has the model, its
# training and its layout, and says what is not published.
#
#   bash examples/gpt/pretrain_qwen3_next_80b.sh DATA_PREFIX TOKENIZER CHECKPOINTS
#
# Start it on each of the 8 nodes, with NNODES, NODE_RANK and MASTER_ADDR set. PLAN=1 only prints the
# plan of the run, without a GPU. SMOKE=1 runs the same architecture at a tiny size on generated data,
# also on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh

if [[ -n "${SMOKE:-}" ]]; then
    OUT="${OUT:-out/smoke/qwen3_next_80b}"
    START=(pretrain_gpt.py --nproc-per-node 4)
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,10,0)
    LAST=(
        --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --padded-vocab-size 256
        --num-attention-heads 4 --kv-channels 16 --seq-length 32 --max-position-embeddings 32
        --linear-key-head-dim 8 --linear-value-head-dim 8
        --linear-num-key-heads 4 --linear-num-value-heads 8
        --num-experts 16 --moe-router-topk 4
        --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
        --pipeline-model-parallel-size 2 --expert-model-parallel-size 2
        --global-batch-size 4 --train-iters 4 --lr-warmup-iters 1
        --eval-interval 2 --eval-iters 1 --log-interval 1
    )
elif [[ -n "${PLAN:-}" ]]; then
    OUT=out/plan
    START=(pretrain_gpt.py)
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 151935)
    LAST=(--dry-run)
else
    OUT="${3:?usage: $0 DATA_PREFIX TOKENIZER CHECKPOINTS}"
    START=(-m torch.distributed.run --nnodes "${NNODES:-8}" --node-rank "${NODE_RANK:-0}"
        --nproc-per-node 8 --master-addr "${MASTER_ADDR:-localhost}" --master-port 29500
        pretrain_gpt.py)
    DATA=(--data-path "$1" --split 99,1,0
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$2")
    LAST=(--eval-interval 500 --eval-iters 10 --log-interval 10 --log-throughput)
fi

# Flags win over the recipe; if a flag is given twice, the last value counts.
exec "$PYTHON" "${START[@]}" --config recipes/qwen3_next_80b_a3b.yaml --layout 64xH100 "${DATA[@]}" \
    --save "$OUT" --load "$OUT" --save-interval 500 "${LAST[@]}" "${@:4}"
