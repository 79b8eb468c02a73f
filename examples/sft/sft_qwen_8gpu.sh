#!/usr/bin/env bash
# Qwen2.5 7B on conversations, on 8 GPUs of 80 GB, in bf16: 2-way tensor x 4-way data parallel.
#
#   bash examples/sft/sft_qwen_8gpu.sh QWEN_FOLDER CHATS.jsonl OUT
#
# QWEN_FOLDER holds the weights and the tokenizer in Hugging Face's format (safetensors). Other sizes,
# Qwen3, Llama and Mistral work in the same way: the shape of the model comes from the import.
# LORA=16 trains adapters of that rank instead of all weights. A run that was stopped continues. SMOKE=1
# runs the same steps on a tiny random Qwen2 and generated conversations, also on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh

if [[ -n "${SMOKE:-}" ]]; then
    GPUS=2 OUT="${OUT:-out/smoke/sft_qwen}" LENGTH=128
    rm -rf "$OUT"
    "$PYTHON" examples/sft/make_toy.py --output "$OUT/data" --turns 200
    "$PYTHON" examples/sft/make_tiny_qwen.py --tokenizer "$OUT/data/tokenizer" --output "$OUT/qwen"
    QWEN="$OUT/qwen" CHATS="$OUT/data/train.jsonl"
    PRECISION=(--micro-batch-size 1 --global-batch-size 4)
    LAST=(--train-iters 4 --eval-interval 2 --log-interval 1 --split 90,10,0)
else
    GPUS=8 LENGTH=8192
    QWEN="${1:?usage: $0 QWEN_FOLDER CHATS.jsonl OUT}" CHATS="${2:?CHATS.jsonl}" OUT="${3:?OUT}"
    PRECISION=(--bf16 --micro-batch-size 1 --global-batch-size 64)
    LAST=(--train-epochs 3 --eval-interval 100 --log-interval 5 --log-throughput --split 98,2,0)
fi

if [[ ! -f "$OUT/base/latest_checkpointed_iteration.txt" ]]; then
    "$PYTHON" tools/convert_checkpoint.py import --hf "$QWEN" --save "$OUT/base"
fi

TRAINING=(
    --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-fraction 0.03
    --weight-decay 0.0 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity selective --attention-dropout 0 --hidden-dropout 0
)
if [[ -n "${LORA:-}" ]]; then
    TRAINING+=(--lora-rank "$LORA" --lora-alpha 32 --lr 1e-4 --min-lr 1e-5)
fi
SFT=(
    --sft --data-path "$CHATS" --data-cache-path "$OUT/cache"
    --seq-length "$LENGTH" --max-position-embeddings "$LENGTH"
    --sft-batching packed --sft-truncation right
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$QWEN"
)

# If a flag is given twice, the last value counts.
exec "$PYTHON" pretrain_gpt.py --nproc-per-node "$GPUS" \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --pretrained-checkpoint "$OUT/base" --use-checkpoint-args --resume-mode auto \
    "${TRAINING[@]}" "${PRECISION[@]}" "${SFT[@]}" \
    --save "$OUT/checkpoints" --save-interval 200 --keep-last 2 --keep-best 1 "${LAST[@]}"
