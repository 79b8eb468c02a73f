#!/usr/bin/env bash
# DeepSeek-V3 (arXiv:2412.19437): 671 B parameters, of which a token uses 37 B, and a module of
# multi-token prediction. Multi-latent attention; 256 experts and a shared one, balanced by a bias
# on the router's scores; 16 pipeline stages and 64-way expert parallelism on 1024 GPUs of 80 GB.
#
#   bash examples/gpt/pretrain_deepseek_v3.sh DATA_PREFIX TOKENIZER CHECKPOINTS
#
# Start it on each of the 128 nodes, with NNODES, NODE_RANK and MASTER_ADDR set. PLAN=1 only prints the
# plan of the run, without a GPU. SMOKE=1 runs the same architecture at a tiny size on generated data,
# also on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh

MODEL=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --seq-length 4096 --max-position-embeddings 4096
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --padded-vocab-size 129280
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.006
)
ATTENTION=(
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-layernorm
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --position-embedding-type rope --rotary-base 10000 --rope-type rope
)
EXPERTS=(
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-layer-freq '([0]*3+[1]*58)'
    --moe-router-score-function sigmoid --moe-router-dtype fp32
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
)
PREDICTION=(--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 15360 --train-samples 3613281
    --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-decay-samples 3613281
    --lr-warmup-samples 30720
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
# Stages have 4 layers; the first also has the embedding; the last has 1 layer and multi-token
# prediction.
LAYOUT=(
    --pipeline-model-parallel-size 16 --expert-model-parallel-size 64
    --pipeline-model-parallel-layout 'Et*4|(t*4|)*14,tmL'
)

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
        --global-batch-size 4 --train-samples 16 --lr-decay-samples 16 --lr-warmup-samples 4
        --eval-interval 2 --eval-iters 1 --log-interval 1
    )
elif [[ -n "${PLAN:-}" ]]; then
    OUT=out/plan
    START=(pretrain_gpt.py --nproc-per-node 8)
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 129279)
    LAST=(--dry-run --dry-run-nodes 128 --dry-run-gpu H100)
else
    OUT="${3:?usage: $0 DATA_PREFIX TOKENIZER CHECKPOINTS}"
    START=(-m torch.distributed.run --nnodes "${NNODES:-128}" --node-rank "${NODE_RANK:-0}"
        --nproc-per-node 8 --master-addr "${MASTER_ADDR:-localhost}" --master-port 29500
        pretrain_gpt.py)
    DATA=(--data-path "$1" --split 99,1,0
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$2")
    LAST=(--eval-interval 500 --eval-iters 10 --log-interval 10 --log-throughput)
fi

# If a flag is given twice, the last value counts.
exec "$PYTHON" "${START[@]}" \
    "${LAYOUT[@]}" "${MODEL[@]}" "${ATTENTION[@]}" "${EXPERTS[@]}" "${PREDICTION[@]}" \
    "${TRAINING[@]}" "${DATA[@]}" --save "$OUT" --load "$OUT" --save-interval 500 "${LAST[@]}"
