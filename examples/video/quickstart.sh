#!/usr/bin/env bash
# From clips to a video model in a few minutes, on any machine, with or without a GPU:
#
#   0. make the Python environment (once)
#   1. render clips of moving shapes with captions; 16 captions are held out of training
#   2. turn them into latents and text embeddings
#   3. train by flow matching on 2 ranks (DP2), text-to-video and image-to-video; stop half way
#   4. continue from the checkpoint on 2 ranks in another layout (PP2), and sample during training
#   5. sample the held-out captions from the averaged weights, and measure colour and motion
#
# OUT=folder sets the folder of the results (out/video_quickstart); its content is removed first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

OUT="${OUT:-out/video_quickstart}"
if [[ -n "${SMOKE:-}" ]]; then
    CLIPS=2 ITERATIONS=8 HALF=4 WARMUP=2 STEPS=4 REQUIRED=0
else
    CLIPS=24 ITERATIONS=1000 HALF=800 WARMUP=100 STEPS=25 REQUIRED=13
fi
rm -rf "$OUT"
mkdir -p "$OUT"

echo "== 1/5 clips"
"$PYTHON" examples/video/make_clips.py "$OUT/clips" --per-caption "$CLIPS" --held-out 16
head -n 1 "$OUT/clips/clips.jsonl"

echo "== 2/5 latents and text embeddings"
# The encoders have no weights: patches of pixels are transformed and scaled, and words are hashed. The
# shift -0.875 is the value of the background.
"$PYTHON" tools/preprocess_video.py --input "$OUT/clips/clips.jsonl" --output "$OUT/data" \
    --buckets '{"32px": {"9": 1.0}}' --workers 2 \
    --codec-spatial 4 --codec-temporal 4 --codec-channels 24 --codec-shift -0.875 --codec-scale 0.8 \
    --text-length 8

MODEL=(
    --mmdit-size tiny --hidden-size 128 --num-attention-heads 4 --axes-dim 8 12 12
    --recompute-double-blocks 0 --recompute-single-blocks 0
)
TRAINING=(
    --video-data-path "$OUT/data" --micro-batch-size 16 --global-batch-size 32
    --train-iters "$ITERATIONS" --lr 2e-3 --lr-warmup-iters "$WARMUP" --ema-decay 0.995
    --t2v-weight 6 --i2v-head-weight 1 --i2v-tail-weight 0 --i2v-loop-weight 0
    --use-distributed-optimizer --num-workers 1 --log-interval 50
    --save "$OUT/checkpoints" --save-interval "$HALF" --resume-mode auto
)
SAMPLING=(--sample-steps "$STEPS" --sample-text-scale 3 --sample-batch-size 8)

echo "== 3/5 train on 2 ranks (DP2) and stop at iteration $HALF"
"$PYTHON" pretrain_video.py --nproc-per-node 2 \
    "${MODEL[@]}" "${TRAINING[@]}" --exit-interval "$HALF"

echo "== 4/5 go on from the checkpoint on 2 ranks (PP2)"
head -n 4 "$OUT/clips/held_out.txt" >"$OUT/prompts.txt"
"$PYTHON" pretrain_video.py --nproc-per-node 2 --pipeline-model-parallel-size 2 \
    "${MODEL[@]}" "${TRAINING[@]}" "${SAMPLING[@]}" \
    --sample-interval "$ITERATIONS" --sample-prompts "$OUT/prompts.txt"

echo "== 5/5 sample what it has not seen, and measure it"
"$PYTHON" tools/sample_video.py --nproc-per-node 2 --load "$OUT/checkpoints" \
    "${SAMPLING[@]}" --sample-prompts "$OUT/clips/held_out.txt" --sample-dir "$OUT/samples"
"$PYTHON" examples/video/measure_clips.py "$OUT/samples" --at-least "$REQUIRED"

echo
echo "the clips, all at once:  $OUT/samples/contact_sheet.png (and each as mp4 beside it)"
echo "loss, learning rate:     $OUT/checkpoints/loss.png"
