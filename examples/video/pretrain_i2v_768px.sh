#!/usr/bin/env bash
# The last stage of Open-Sora 2.0 (arXiv:2503.09642): the model of stage 1 learns 768px, and to
# continue given frames. recipes/open_sora_2_768px.yaml has the model, its training and layouts, for
# sequences of up to 76,544 tokens; LAYOUT chooses one (8xH200), and more nodes are data parallel.
#
#   VAE=... T5=... CLIP=... bash examples/video/pretrain_i2v_768px.sh \
#       CLIPS LATENTS STAGE1_CHECKPOINTS CHECKPOINTS
#
# examples/video/pretrain_stage1_256px.sh explains CLIPS, LATENTS, ONLY_LATENTS=1, NODES and OPENSORA=1.
# STAGE1_CHECKPOINTS may also be published weights, such as Open_Sora_v2.safetensors. A run that was
# stopped continues. SMOKE=1 runs both stages at a tiny size, also on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh
source examples/lib/nodes.sh

CHANGES=(${MICROBATCHES:+--global-batch-size "$MICROBATCHES"})
if [[ -n "${OPENSORA:-}" ]]; then
    # Open-Sora's intermediate stage, image to video at 256px, has --lr 1e-5.
    CHANGES+=(--lr 5e-5 --lr-warmup-iters 0 --adam-beta2 0.999 --weight-decay 0
        --reference-loss all --ema-decay 0)
fi

if [[ -n "${SMOKE:-}" ]]; then
    GPUS=4 OUT="${OUT:-out/smoke/i2v_768px}"
    LATENTS="$OUT/latents" STAGE1="$OUT/stage1"
    OUT="$STAGE1" bash examples/video/pretrain_stage1_256px.sh
    source examples/video/smoke_latents.sh
    smoke_latents "$LATENTS" '{"32px": {"9": [1.0, 2]}}'
    LAST=(--mmdit-size tiny --context-parallel-size 2 --global-batch-size 4 --train-iters 4
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

START=(--pretrained-checkpoint "$STAGE1")
if [[ -f "$STAGE1" || -f "$STAGE1/config.json" ]]; then
    START=(--load-weights "$STAGE1")
fi

# Flags win over the recipe; if a flag is given twice, the last value counts.
run_on_nodes "$GPUS" pretrain_video.py --config recipes/open_sora_2_768px.yaml \
    --layout "${LAYOUT:-8xH200}" "${CHANGES[@]}" --video-data-path "$LATENTS" \
    "${START[@]}" --save "$OUT" --resume-mode auto \
    --save-interval 500 --keep-last 3 "${LAST[@]}" "${@:5}"
