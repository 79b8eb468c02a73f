#!/usr/bin/env bash
# The last stage of Open-Sora 2.0 (arXiv:2503.09642): the model of stage 1 learns 768px, and to
# continue given frames. On 8 GPUs of 80 GB or more, in bf16: 4-way context parallel, for sequences of
# up to 76,544 tokens, and 2-way tensor parallel; more nodes are data parallel.
#
#   VAE=... T5=... CLIP=... bash examples/video/pretrain_i2v_768px.sh \
#       CLIPS LATENTS STAGE1_CHECKPOINTS CHECKPOINTS
#
# examples/video/pretrain_stage1_256px.sh explains CLIPS, LATENTS, ONLY_LATENTS=1, NODES and OPENSORA=1.
# A run that was stopped continues. SMOKE=1 runs both stages at a tiny size, also on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh
source examples/lib/nodes.sh

# For such long sequences all blocks are recomputed in the backward pass, which is the default.
MODEL=(--mmdit-size 11b)

# Of 8 clips, 1 is given no frame, 5 are given the first, 1 the last, and 1 both. The model has a branch
# for given frames that the checkpoint of stage 1 lacks. It is initialized to zero, so that the initial
# model is exactly that of stage 1. Given frames do not count in the loss.
TASK=(--t2v-weight 1 --i2v-head-weight 5 --i2v-tail-weight 1 --i2v-loop-weight 1)

# A step has 48 micro-batches of one bucket (of 130 to 2 clips), as on the 192 GPUs of Open-Sora, where
# four share a sequence. Other flags have the defaults of pretrain_video.py; see stage 1.
TRAINING=(
    --train-iters 13000 --micro-batch-size 1 --global-batch-size "${MICROBATCHES:-48}"
    --weight-decay 0.01 --clip-grad 1.0
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
if [[ -n "${OPENSORA:-}" ]]; then
    # Open-Sora's intermediate stage, image to video at 256px, has --lr 1e-5.
    TRAINING+=(--lr 5e-5 --lr-warmup-iters 0 --adam-beta2 0.999 --weight-decay 0
        --reference-loss all --ema-decay 0)
fi

# A rank has 6 billion weights, which take 36 GB with their gradients. Optimizer state and averages take
# 95 GB, shared by the ranks with the same weights: 4 on one node.
LAYOUT=(--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 4)

if [[ -n "${SMOKE:-}" ]]; then
    GPUS=4 OUT="${OUT:-out/smoke/i2v_768px}"
    LATENTS="$OUT/latents" STAGE1="$OUT/stage1"
    OUT="$STAGE1" bash examples/video/pretrain_stage1_256px.sh
    source examples/video/smoke_latents.sh
    smoke_latents "$LATENTS" '{"32px": {"9": [1.0, 2]}}'
    LAYOUT=(--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2)
    LAST=(--mmdit-size tiny --global-batch-size 4 --train-iters 4
        --lr 1e-3 --lr-warmup-iters 1 --log-interval 1)
else
    GPUS=8
    CLIPS="${1:?usage: $0 CLIPS LATENTS STAGE1_CHECKPOINTS CHECKPOINTS}" LATENTS="${2:?LATENTS}"
    STAGE1="${3:?STAGE1_CHECKPOINTS}" OUT="${4:?CHECKPOINTS}"
    LAST=(--log-interval 10 --log-throughput)
fi

# The bucket plan has all lengths up to 129 frames, at 768px and 256px. The first and the last frame are
# also encoded separately, since later frames would leak into them through the VAE.
if [[ ! -f "$LATENTS/manifest.json" ]]; then
    "$PYTHON" tools/preprocess_video.py --input "$CLIPS" --output "$LATENTS" \
        --buckets examples/video/buckets_768px.json --reference-lengths 1 --fps-cap 24 \
        --codec "${VAE:?folder of the VAE}" --text-encoder t5-clip --text-length 512 \
        --t5-path "${T5:?folder of T5}" --clip-path "${CLIP:?folder of CLIP}" \
        --storage bfloat16 --device cuda --workers 8
fi
if [[ -n "${ONLY_LATENTS:-}" ]]; then
    exit 0
fi

# If a flag is given twice, the last value counts.
run_on_nodes "$GPUS" pretrain_video.py \
    "${LAYOUT[@]}" "${MODEL[@]}" "${TASK[@]}" "${TRAINING[@]}" --video-data-path "$LATENTS" \
    --pretrained-checkpoint "$STAGE1" --save "$OUT" --resume-mode auto \
    --save-interval 500 --keep-last 3 "${LAST[@]}"
