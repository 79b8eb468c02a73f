#!/usr/bin/env bash
# Stage 1 of Open-Sora 2.0 (arXiv:2503.09642): an MMDiT with 11.9 billion weights learns to generate
# videos of 256px from captions. recipes/open_sora_2.yaml has the model, its training and layouts, of
# which LAYOUT chooses one: 8xH200, or 8xH100 for GPUs of 80 GB.
#
#   VAE=... T5=... CLIP=... bash examples/video/pretrain_stage1_256px.sh CLIPS LATENTS CHECKPOINTS
#
# CLIPS is a jsonl or csv with path and text. VAE, T5 and CLIP are local folders of the encoders, which
# are used once, to fill LATENTS. ONLY_LATENTS=1 stops after that; use it before training on several
# nodes (NODES, RENDEZVOUS: see examples/lib/nodes.sh). A run that was stopped continues.
# OPENSORA=1 takes the hyper-parameters of Open-Sora's code where they differ. WEIGHTS=PATH starts from
# published weights, as that code does: a file or folder of FLUX.1, or Open_Sora_v2.safetensors.
# SMOKE=1 runs the same steps at a tiny size on clips that it renders itself, also on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh
source examples/lib/nodes.sh

CHANGES=(${MICROBATCHES:+--global-batch-size "$MICROBATCHES"} ${WEIGHTS:+--load-weights "$WEIGHTS"})
if [[ -n "${OPENSORA:-}" ]]; then
    # Open-Sora starts from the weights of FLUX.1 [dev], with a lower, constant rate and no average.
    CHANGES+=(--lr 5e-5 --lr-warmup-iters 0 --adam-beta2 0.999 --weight-decay 0
        --reference-loss all --ema-decay 0)
fi

if [[ -n "${SMOKE:-}" ]]; then
    GPUS=4 OUT="${OUT:-out/smoke/stage1_256px}"
    LATENTS="$OUT/latents"
    source examples/video/smoke_latents.sh
    smoke_latents "$LATENTS" '{"32px": {"9": [0.5, 2]}, "16px": {"9": [1.0, 4]}}'
    LAST=(--mmdit-size tiny --recompute-double-blocks 1 --tensor-model-parallel-size 2
        --global-batch-size 4 --train-iters 4 --lr 1e-3 --lr-warmup-iters 1 --log-interval 1)
else
    GPUS=8
    CLIPS="${1:?usage: $0 CLIPS LATENTS CHECKPOINTS}"
    LATENTS="${2:?LATENTS}" OUT="${3:?CHECKPOINTS}"
    LAST=(--log-interval 10 --log-throughput)
fi

# The bucket plan has all lengths up to 129 frames at 256px, and images of 768px and 1024px.
if [[ ! -f "$LATENTS/manifest.json" ]]; then
    "$PYTHON" tools/preprocess_video.py --input "$CLIPS" --output "$LATENTS" \
        --buckets examples/video/buckets_256px.json --reference-lengths --fps-cap 24 \
        --codec "${VAE:?folder of the VAE}" --text-encoder t5-clip --text-length 512 \
        --t5-path "${T5:?folder of T5}" --clip-path "${CLIP:?folder of CLIP}" \
        --storage bfloat16 --device cuda --workers 8
fi
if [[ -n "${ONLY_LATENTS:-}" ]]; then
    exit 0
fi

# Flags win over the recipe; if a flag is given twice, the last value counts.
run_on_nodes "$GPUS" pretrain_video.py --config recipes/open_sora_2.yaml \
    --layout "${LAYOUT:-8xH200}" "${CHANGES[@]}" --video-data-path "$LATENTS" \
    --save "$OUT" --resume-mode auto --save-interval 500 --keep-last 3 "${LAST[@]}" "${@:4}"
