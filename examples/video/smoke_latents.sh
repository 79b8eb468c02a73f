# Sourced by the examples under SMOKE=1: makes some clips of moving shapes and their latents in seconds.
#
#   smoke_latents FOLDER BUCKETS [flags of tools/preprocess_video.py]
#
# The codec and the text encoder need no weights. The scale 1/16 brings the largest channel, the
# brightness of a patch of 8 x 8 pixels in 4 frames, to about the range -1 to 1.
smoke_latents() {
    local folder="$1" buckets="$2"
    shift 2
    "$PYTHON" examples/video/make_clips.py "$folder.clips" --per-caption 1 --size 32 --frames 9
    "$PYTHON" tools/preprocess_video.py --input "$folder.clips/clips.jsonl" --output "$folder" \
        --buckets "$buckets" --codec-channels 4 --codec-scale 0.0625 \
        --text-length 8 --text-width 32 --pooled-width 16 "$@"
}
