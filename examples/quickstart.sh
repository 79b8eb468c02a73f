#!/usr/bin/env bash
# From text to a trained GPT in a few minutes, on any machine, with or without a GPU:
#
#   0. make the Python environment (once)
#   1. make a corpus and a tokenizer, without downloads
#   2. turn the corpus into Megatron's .bin/.idx files
#   3. train on 4 ranks: 2-way tensor parallel, 2 pipeline stages; stop half way
#   4. continue from the checkpoint in another layout: 2-way context parallel, 2 data-parallel replicas
#   5. let the trained model write sentences, on 2 ranks: tensor parallel
#
# On a CPU the ranks are processes of this machine; with 4 GPUs the same commands use the GPUs. The
# weights are fp32, which is fast on CPUs; on GPUs add --bf16.
# OUT=folder sets the folder of the results (out/quickstart); its content is removed first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/lib/venv.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

OUT="${OUT:-out/quickstart}"
if [[ -n "${SMOKE:-}" ]]; then
    DOCUMENTS=300 ITERATIONS=8 HALF=4 WARMUP=2
else
    DOCUMENTS=4000 ITERATIONS=100 HALF=50 WARMUP=10
fi
rm -rf "$OUT"
mkdir -p "$OUT"

echo "== 1/5 corpus and tokenizer"
"$PYTHON" examples/make_corpus.py --documents "$DOCUMENTS" \
    --output "$OUT/corpus.jsonl" --tokenizer "$OUT/tokenizer.model"
head -n 1 "$OUT/corpus.jsonl"

echo "== 2/5 preprocess"
"$PYTHON" tools/preprocess_data.py \
    --input "$OUT/corpus.jsonl" --output-prefix "$OUT/corpus" \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model" \
    --append-eod --workers 2

MODEL=(
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 344 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
DATA=(
    --data-path "$OUT/corpus_text_document" --split 95,5,0
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model"
)
TRAINING=(
    --micro-batch-size 4 --global-batch-size 16 --train-iters "$ITERATIONS"
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters "$WARMUP"
    --weight-decay 0.1 --clip-grad 1.0 --use-distributed-optimizer
    --eval-interval 10 --eval-iters 2 --log-interval 2
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval "$HALF"
)

echo "== 3/5 train on 4 ranks (TP2 x PP2) and stop at iteration $HALF"
"$PYTHON" pretrain_gpt.py --nproc-per-node 4 \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel \
    "${MODEL[@]}" "${DATA[@]}" "${TRAINING[@]}" --exit-interval "$HALF"

echo "== 4/5 go on from the checkpoint on 4 ranks (CP2 x DP2)"
"$PYTHON" pretrain_gpt.py --nproc-per-node 4 \
    --context-parallel-size 2 \
    "${MODEL[@]}" "${DATA[@]}" "${TRAINING[@]}"
echo
echo "loss of every iteration: $OUT/checkpoints/metrics.jsonl"
echo "loss plot:               $OUT/checkpoints/loss.png"
echo

echo "== 5/5 what the model writes (TP2)"
"$PYTHON" tools/generate_text.py --nproc-per-node 2 --tensor-model-parallel-size 2 \
    --load "$OUT/checkpoints" --prompt "There was" "In the evening" \
    --max-new-tokens 40 --do-sample --temperature 0.8 --top-p 0.95
