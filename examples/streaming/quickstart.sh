#!/usr/bin/env bash
# From clips of one second to endless videos that follow a change of prompt, in ten minutes on any
# machine, with or without a GPU, on 2 ranks (DP2):
#
#   0. make the Python environment (once)
#   1. render clips of shapes that swing, with captions, and pairs of prompts that differ in colour
#   2. turn the clips into latents and text embeddings
#   3. train the teacher by flow matching: a video DiT that attends to the whole clip
#   4. train the start of the generator, from the teacher's weights: frames do not attend to later
#      frames, and each frame block has its own noise
#   5. tune it on long videos of its own with prompt switches; teacher and critic judge them
#   6. make long videos with the start and with the tuned generator, and measure
#      their colour, motion and shape
#
# OUT=folder sets the folder of the results (out/streaming_quickstart); its content is removed first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

OUT="${OUT:-out/streaming_quickstart}"
if [[ -n "${SMOKE:-}" ]]; then
    CLIPS=2 WARMUP=2 TEACHER=4 START=4 TUNING=4 FRAMES=20 SWITCH=8 REQUIRED=0
else
    CLIPS=40 WARMUP=50 TEACHER=420 START=130 TUNING=140 FRAMES=48 SWITCH=24 REQUIRED=10
fi
rm -rf "$OUT"
mkdir -p "$OUT"

echo "== 1/6 clips and prompts"
"$PYTHON" examples/streaming/make_swings.py "$OUT/clips" \
    --per-caption "$CLIPS" --switch-frame "$SWITCH"
head -n 1 "$OUT/clips/clips.jsonl" "$OUT/clips/prompts.txt" "$OUT/clips/second_prompts.txt"

# These encoders have no weights: patches of 4 x 4 pixels of a frame are transformed and scaled, and
# words are hashed. The shift -0.875 is the value of the background.
ENCODERS=(
    --codec-spatial 4 --codec-temporal 1 --codec-channels 12 --codec-shift -0.875
    --codec-scale 1.2 --text-length 8
)
echo "== 2/6 latents and text embeddings"
"$PYTHON" tools/preprocess_video.py --input "$OUT/clips/clips.jsonl" --output "$OUT/data" \
    --buckets '{"32px": {"8": 1.0}}' --workers 2 "${ENCODERS[@]}"

# Blocks have 2 frames, and attend to the first 2 and the last 6 frames of the video.
WINDOW=(--frame-block 2 --window-frames 8 --sink-frames 2)
COMMON=(
    --nproc-per-node 2 --use-distributed-optimizer --log-interval 50 --seed 1 --resume-mode auto
)
FLOW=(
    --video-data-path "$OUT/data" --video-dit-size mini --num-workers 1 --flow-shift 3
    --micro-batch-size 16 --global-batch-size 32 --lr-warmup-iters "$WARMUP" --ema-decay 0.97
)

echo "== 3/6 the teacher"
"$PYTHON" pretrain_video.py "${COMMON[@]}" "${FLOW[@]}" --video-model video-dit \
    --train-iters "$TEACHER" --lr 1e-3 --lr-decay-style cosine --min-lr 1e-5 --save "$OUT/teacher"

echo "== 4/6 the generator's start"
"$PYTHON" pretrain_video.py "${COMMON[@]}" "${FLOW[@]}" --video-model causal-video-dit \
    "${WINDOW[@]}" --independent-block-timesteps --train-iters "$START" --lr 1e-3 \
    --lr-decay-style cosine --min-lr 1e-5 \
    --pretrained-checkpoint "$OUT/teacher" --pretrained-average --save "$OUT/start"

# A chunk has as many frames as the teacher's clips; all but 2 of them are new.
STREAMING=(
    --task streaming --generator-size mini "${WINDOW[@]}" "${ENCODERS[@]}" --latent-channels 12
    --latent-size 8 8 --chunk-frames 8 --min-new-frames 6 --max-new-frames 6 --recache-frames 8
    --sequence-lengths 44 --timestep-shift 3 --guidance-scale 2 --generator-interval 3
    --prompts-path "$OUT/clips/prompts.txt" --second-prompts-path "$OUT/clips/second_prompts.txt"
    --teacher-checkpoint "$OUT/teacher" --critic-checkpoint "$OUT/teacher" --pretrained-average
    --micro-batch-size 4 --global-batch-size 8 --adam-beta1 0.5 --critic-lr 3e-4
    --ema-decay 0.9 --ema-start 10
)

echo "== 5/6 tuning on long videos"
# One step with a learning rate of almost 0, to sample videos from before the tuning.
"$PYTHON" pretrain_video.py "${COMMON[@]}" "${STREAMING[@]}" --train-iters 1 --lr 1e-20 \
    --pretrained-checkpoint "$OUT/start" --save "$OUT/before"
"$PYTHON" pretrain_video.py "${COMMON[@]}" "${STREAMING[@]}" --train-iters "$TUNING" --lr 1e-4 \
    --pretrained-checkpoint "$OUT/start" --save "$OUT/tuned"

echo "== 6/6 videos of prompts that switch"
for WHICH in before tuned; do
    "$PYTHON" tools/sample_video.py --streaming --nproc-per-node 2 --load "$OUT/$WHICH" \
        --sample-prompts "$OUT/clips/held_out.jsonl" --sample-latent-frames "$FRAMES" \
        --sample-fps 8 --sample-batch-size 6 --sample-dir "$OUT/videos_$WHICH"
done
echo "-- before the tuning"
"$PYTHON" examples/streaming/measure_switches.py "$OUT/videos_before"
echo "-- after the tuning"
"$PYTHON" examples/streaming/measure_switches.py "$OUT/videos_tuned" --at-least "$REQUIRED"

echo
echo "the videos, all at once:  $OUT/videos_tuned/contact_sheet.png (and each as mp4 beside it)"
echo "losses:                   $OUT/tuned/loss.png"
