#!/usr/bin/env bash
# DeepSeek-V3 (arXiv:2412.19437): 671 B parameters, of which a token uses 37 B, and a module of
# multi-token prediction, on 1024 GPUs of 80 GB. recipes/deepseek_v3.yaml has the model, its training
# and its layout, and says what differs from the report.
#
#   bash examples/gpt/pretrain_deepseek_v3.sh DATA_PREFIX TOKENIZER CHECKPOINTS
#
# Start it on each of the 128 nodes, with NNODES, NODE_RANK and MASTER_ADDR set. PLAN=1 only prints the
# plan of the run, without a GPU. SMOKE=1 runs the same architecture at a tiny size on generated data,
# also on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh

if [[ -n "${SMOKE:-}" ]]; then
    OUT="${OUT:-out/smoke/deepseek_v3}"
    START=(pretrain_gpt.py --nproc-per-node 4)
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,10,0)
    LAST=(
        --num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
        --padded-vocab-size 256 --seq-length 32 --max-position-embeddings 32 --init-method-std 0.02
        --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8
        --num-experts 16 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2
        --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 --moe-layer-freq [0,1,1]
        --pipeline-model-parallel-size 2 --expert-model-parallel-size 2
        --pipeline-model-parallel-layout 'Ett|tmL'
        --global-batch-size 4 --train-iters 4 --lr-warmup-iters 1
        --eval-interval 2 --eval-iters 1 --log-interval 1
    )
elif [[ -n "${PLAN:-}" ]]; then
    OUT=out/plan
    START=(pretrain_gpt.py)
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 129279)
    LAST=(--dry-run)
else
    OUT="${3:?usage: $0 DATA_PREFIX TOKENIZER CHECKPOINTS}"
    START=(-m torch.distributed.run --nnodes "${NNODES:-128}" --node-rank "${NODE_RANK:-0}"
        --nproc-per-node 8 --master-addr "${MASTER_ADDR:-localhost}" --master-port 29500
        pretrain_gpt.py)
    DATA=(--data-path "$1" --split 99,1,0
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$2")
    LAST=(--eval-interval 500 --eval-iters 10 --log-interval 10 --log-throughput)
fi

# Flags win over the recipe; if a flag is given twice, the last value counts.
exec "$PYTHON" "${START[@]}" --config recipes/deepseek_v3.yaml --layout 1024xH100 "${DATA[@]}" \
    --save "$OUT" --load "$OUT" --save-interval 500 "${LAST[@]}" "${@:4}"
