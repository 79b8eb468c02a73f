#!/usr/bin/env bash
# Trains the video model of examples/custom_model/dit.py on 4 ranks; PP2 x DP2, GPU or CPU.
#
#   bash examples/custom_model/dit.sh LATENTS CHECKPOINTS
#
# LATENTS is a folder that tools/preprocess_video.py has written. SMOKE=1 renders some clips, encodes
# them without weights, and trains a tiny model on them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh

if [[ -n "${SMOKE:-}" ]]; then
    OUT="${OUT:-out/smoke/custom_dit}"
    LATENTS="$OUT/latents"
    source examples/video/smoke_latents.sh
    smoke_latents "$LATENTS" '{"32px": {"9": [1.0, 2]}}'
    STEPS=(--mmdit-size tiny --micro-batch-size 2 --global-batch-size 8 --train-iters 4
        --lr 1e-3 --lr-warmup-iters 1 --log-interval 1)
else
    LATENTS="${1:?usage: $0 LATENTS CHECKPOINTS}" OUT="${2:?usage: $0 LATENTS CHECKPOINTS}"
    STEPS=(--mmdit-size base --micro-batch-size 4 --global-batch-size 64 --train-iters 50000
        --lr 1e-4 --lr-warmup-iters 1000 --log-interval 10 --bf16)
fi

exec "$PYTHON" examples/custom_model/dit.py --nproc-per-node 4 \
    --pipeline-model-parallel-size 2 --use-distributed-optimizer \
    --video-data-path "$LATENTS" "${STEPS[@]}" --clip-grad 1.0 \
    --save "$OUT" --load "$OUT" --save-interval 1000
