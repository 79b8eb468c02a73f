#!/usr/bin/env bash
# Stage 1 of Open-Sora 2.0 (arXiv:2503.09642): an MMDiT of 11.9 billion weights learns to make
# videos of 256px from captions. On 8 GPUs of 80 GB or more, in bf16: 4-way tensor parallel, the
# rest data parallel.
#
#   VAE=... T5=... CLIP=... bash examples/video/pretrain_stage1_256px.sh CLIPS LATENTS CHECKPOINTS
#
# CLIPS is a jsonl or csv of path and text. VAE, T5 and CLIP are local folders of the encoders; they
# are used once, to fill LATENTS. ONLY_LATENTS=1 stops there: do so before training on more nodes
# (NODES, RENDEZVOUS: see examples/lib/nodes.sh). A run that was stopped goes on where it was.
# OPENSORA=1 takes the hyper-parameters of Open-Sora's code, where they differ.
# SMOKE=1 runs the same steps at a tiny size on clips that it renders itself, on a CPU too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh
source examples/lib/nodes.sh

# 19 double and 38 single blocks of width 3072. Of the double blocks the first 8, and all single
# ones, keep only their inputs for the backward pass; more memory allows fewer.
MODEL=(--mmdit-size 11b --recompute-double-blocks 8 --recompute-single-blocks 38)

# Text to video only: no frame is ever given. Images are clips of one frame.
TASK=(--t2v-weight 1 --i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0)

# What is not named has the default of pretrain_video.py: lr 1e-4 after 1000 steps of warm-up, betas
# 0.9 and 0.95, epsilon 1e-15, gradients clipped to 1, an average of the weights with decay 0.9999.
# A step is 224 micro-batches of one bucket, whose plan says how many clips that is (45 images, 12
# to 3 videos): one on each of Open-Sora's 224 GPUs, so that any number of nodes trains alike.
TRAINING=(
    --train-iters 85000 --micro-batch-size 1 --global-batch-size "${MICROBATCHES:-224}"
    --weight-decay 0.01 --clip-grad 1.0
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
if [[ -n "${OPENSORA:-}" ]]; then
    # Its weights start from FLUX.1-dev, which a constant and lower rate suits. No average is kept.
    TRAINING+=(--lr 5e-5 --lr-warmup-iters 0 --adam-beta2 0.999 --weight-decay 0
        --reference-loss all --ema-decay 0)
fi

# A rank has 3 billion weights: 18 GB with their gradients, and 48 GB of optimizer and average that
# the replicas share, of which one node has 2 (see benchmarks/video_memory.py).
LAYOUT=(--tensor-model-parallel-size 4 --sequence-parallel)

if [[ -n "${SMOKE:-}" ]]; then
    GPUS=4 OUT="${OUT:-out/smoke/stage1_256px}"
    LATENTS="$OUT/latents"
    source examples/video/smoke_latents.sh
    smoke_latents "$LATENTS" '{"32px": {"9": [0.5, 2]}, "16px": {"9": [1.0, 4]}}'
    LAYOUT=(--tensor-model-parallel-size 2 --sequence-parallel)
    LAST=(--mmdit-size tiny --recompute-double-blocks 1 --global-batch-size 4 --train-iters 4
        --lr 1e-3 --lr-warmup-iters 1 --log-interval 1)
else
    GPUS=8
    CLIPS="${1:?usage: $0 CLIPS LATENTS CHECKPOINTS}"
    LATENTS="${2:?LATENTS}" OUT="${3:?CHECKPOINTS}"
    LAST=(--log-interval 10 --log-throughput)
fi

# The plan of buckets: of 256px all lengths to 129 frames, and images of 768px and 1024px.
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

# A flag that is given twice counts as it stands last.
run_on_nodes "$GPUS" pretrain_video.py \
    "${LAYOUT[@]}" "${MODEL[@]}" "${TASK[@]}" "${TRAINING[@]}" --video-data-path "$LATENTS" \
    --save "$OUT" --resume-mode auto --save-interval 500 --keep-last 3 "${LAST[@]}"
