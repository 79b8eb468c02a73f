#!/usr/bin/env bash
# Streaming long-tuning as in LongLive (arXiv:2509.22622): Wan 2.1 with 1.3 billion weights becomes a
# causal generator of videos of several minutes whose prompt may change. Wan 2.1 with 14 billion
# weights is the teacher.
# On 8 GPUs of 80 GB or more, in bf16; more nodes are data parallel.
#
#   VAE=... UMT5=... NEGATIVE=... bash examples/streaming/longtune_1.3b.sh \
#       TEACHER CRITIC START CHECKPOINTS [PROMPTS SECOND_PROMPTS]
#
#   TEACHER      Wan 2.1 14B, CRITIC Wan 2.1 1.3B, START the causal generator (LongLive's comes from
#                ODE trajectories of the teacher): checkpoints that
#                `tools/convert_checkpoint.py import` wrote of the published weights
#   PROMPTS      one prompt per line, and the prompts after the switch (examples/streaming/*.txt)
#   VAE, UMT5    folders of Wan's video VAE and of its text encoder (google/umt5-xxl)
#   NEGATIVE     negative prompt of the guidance, usually Wan's own
#   NODES=8 RENDEZVOUS=host:29500  the same on each of eight nodes
#
# Stage A adapts the generator to its window and its four steps, on clips of 5 seconds. Stage B tunes
# adapters on videos of a minute. The same command continues a run that was stopped.
# SMOKE=1 runs both stages with the same flags at a tiny size, also on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh
source examples/lib/nodes.sh

# Other flags have the defaults of `--task streaming`, which are LongLive's: blocks of 3 latent frames
# that attend to 12, of which 3 are sinks; four denoising steps; chunks of 21 frames; the generator is
# trained in one of five steps; betas of 0 and 0.999; gradients clipped to a norm of 10.
NETWORKS=(--generator-size 1.3b --critic-size 1.3b --teacher-size 14b --latent-size 60 104)

# A step has 64 chunks for each network that it trains. With full recomputation, a pass of the critic
# over 32,760 tokens needs only 3 GB.
TRAINING=(
    --micro-batch-size 1 --global-batch-size "${CHUNKS:-64}" --weight-decay 0.01
    --bf16 --use-distributed-optimizer --recompute-blocks 40
)

# Each GPU holds the teacher (29 GB) and its own sequence with its cache (10 GB).
LAYOUT=()

# In stage A a sequence is one chunk, and its prompt does not change.
STAGE_A=(--train-iters 700 --lr 2e-6 --critic-lr 4e-7 --sequence-lengths 21)
STAGE_B=(
    --train-iters 3000 --lr 1e-5 --critic-lr 2e-6 --sequence-lengths 240
    --lora-rank 256 --lora-alpha 256 --ema-decay 0
)

if [[ -n "${SMOKE:-}" ]]; then
    GPUS=2 OUT="${OUT:-out/smoke/longtune_1.3b}"
    TEACHER="$OUT/teacher" CRITIC="$OUT/teacher" START="$OUT/start"
    PROMPTS=examples/streaming/prompts.txt SECOND=examples/streaming/second_prompts.txt
    source examples/video/smoke_latents.sh
    smoke_latents "$OUT/latents" '{"32px": {"9": [1.0, 2]}}'
    # Flow matching of a few steps stands in for the published weights.
    FLOW=(--video-data-path "$OUT/latents" --micro-batch-size 2 --global-batch-size 4
        --train-iters 2 --lr 1e-3 --lr-warmup-iters 1 --log-interval 1 --resume-mode auto)
    "$PYTHON" pretrain_video.py --video-model video-dit "${FLOW[@]}" --save "$TEACHER"
    "$PYTHON" pretrain_video.py --video-model causal-video-dit --independent-block-timesteps \
        "${FLOW[@]}" --save "$START"
    ENCODERS=(--codec-channels 4 --codec-scale 0.0625 --text-length 8 --text-width 32)
    NETWORKS=(--generator-size tiny --latent-size 4 4)
    LAYOUT=(--tensor-model-parallel-size 2 --sequence-parallel)
    LAST=(--train-iters 2 --global-batch-size 1 --generator-interval 2 --log-interval 1)
    STAGE_B+=(--sequence-lengths 60 --lora-rank 4 --lora-alpha 4)
else
    GPUS=8
    TEACHER="${1:?usage: $0 TEACHER CRITIC START CHECKPOINTS}" CRITIC="${2:?CRITIC}"
    START="${3:?START}" OUT="${4:?CHECKPOINTS}"
    PROMPTS="${5:-examples/streaming/prompts.txt}"
    SECOND="${6:-examples/streaming/second_prompts.txt}"
    ENCODERS=(
        --codec "${VAE:?folder of the VAE}" --text-encoder umt5 --text-length 512
        --t5-path "${UMT5:?folder of umT5}"
    )
    LAST=(--log-interval 10)
fi

# run_stage FOLDER FLAGS...; if a flag is given twice, the last value counts.
run_stage() {
    local folder="$1"
    shift
    (run_on_nodes "$GPUS" pretrain_video.py --task streaming \
        "${LAYOUT[@]}" "${NETWORKS[@]}" "${ENCODERS[@]}" "${TRAINING[@]}" \
        --negative-prompt "${NEGATIVE:-}" --prompts-path "$PROMPTS" \
        --teacher-checkpoint "$TEACHER" --save "$OUT/$folder" --resume-mode auto \
        --save-interval 100 --keep-last 3 "$@" "${LAST[@]}")
}

run_stage stage_a "${STAGE_A[@]}" --pretrained-checkpoint "$START" --critic-checkpoint "$CRITIC"
# Generator and critic continue; the weights of the critic are those under `critic.` in the checkpoint.
run_stage stage_b "${STAGE_B[@]}" --second-prompts-path "$SECOND" \
    --pretrained-checkpoint "$OUT/stage_a" --critic-checkpoint "$OUT/stage_a"
echo "long videos of it: tools/sample_video.py --streaming --load $OUT/stage_b ..."
