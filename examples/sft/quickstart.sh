#!/usr/bin/env bash
# Supervised fine-tuning in a few minutes, on any machine, with or without a GPU:
#
#   0. make the Python environment (once)
#   1. make conversations of a toy task, and a tokenizer, without downloads
#   2. tokenize them once, and look at what will be trained
#   3. train on 2 ranks (DP2) and stop half way
#   4. continue from the checkpoint on 2 ranks in another layout (TP2)
#   5. export to Hugging Face, let it answer held-out questions, and count the exact answers
#
# The conversations are packed: several share a row, but do not attend to each other.
# OUT=folder sets the folder of the results (out/sft_quickstart); its content is removed first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/lib/venv.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

OUT="${OUT:-out/sft_quickstart}"
if [[ -n "${SMOKE:-}" ]]; then
    TURNS=300 EPOCHS=2 HALF=4 REQUIRED=0
else
    TURNS=12000 EPOCHS=3 HALF=200 REQUIRED=0.95
fi
rm -rf "$OUT"
mkdir -p "$OUT"

echo "== 1/5 conversations and a tokenizer"
"$PYTHON" examples/sft/make_toy.py --output "$OUT" --turns "$TURNS"
head -n 1 "$OUT/train.jsonl"

TOKENIZER=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$OUT/tokenizer")
MODEL=(
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 344 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128 --make-vocab-size-divisible-by 16
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
DATA=(--sft --train-data-path "$OUT/train" --valid-data-path "$OUT/valid" "${TOKENIZER[@]}")
TRAINING=(
    --micro-batch-size 4 --global-batch-size 16 --train-epochs "$EPOCHS"
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --adam-beta2 0.95
    --weight-decay 0.01 --clip-grad 1.0 --use-distributed-optimizer
    --eval-interval 50 --log-interval 10
    --save "$OUT/checkpoints" --save-interval "$HALF" --resume-mode auto --keep-best 1
)

echo "== 2/5 tokenize, and look"
for part in train valid; do
    "$PYTHON" tools/preprocess_data.py --sft --input "$OUT/$part.jsonl" \
        --output-prefix "$OUT/$part" --workers 2 "${TOKENIZER[@]}"
done
"$PYTHON" tools/preview_batch.py --max-rows 2 --html "$OUT/preview.html" -- \
    "${MODEL[@]}" "${DATA[@]}" "${TRAINING[@]}"

echo "== 3/5 train on 2 ranks (DP2) and stop at iteration $HALF"
"$PYTHON" pretrain_gpt.py --nproc-per-node 2 \
    "${MODEL[@]}" "${DATA[@]}" "${TRAINING[@]}" --exit-interval "$HALF"

echo "== 4/5 go on from the checkpoint on 2 ranks (TP2)"
"$PYTHON" pretrain_gpt.py --nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel \
    "${MODEL[@]}" "${DATA[@]}" "${TRAINING[@]}"

echo "== 5/5 export, and ask what it has not seen"
"$PYTHON" tools/convert_checkpoint.py export --load "$OUT/checkpoints" --hf "$OUT/hf"
"$PYTHON" examples/sft/exact_match.py --model "$OUT/hf" --tokenizer "$OUT/tokenizer" \
    --questions "$OUT/test.jsonl" --required "$REQUIRED"

echo
echo "what was trained, in colour: $OUT/preview.html"
echo "loss of every iteration:     $OUT/checkpoints/metrics.jsonl"
