"""Flags of text runs that have no effect."""

from __future__ import annotations

from megatron_ext.config.inapplicable import Inapplicable, on_cpu, without, without_engine

_SENTENCE_PIECE = "SentencePieceTokenizer or GPTSentencePieceTokenizer or Llama2Tokenizer"

ALWAYS_FAST = Inapplicable(
    "tokenizer-hf-use-fast", "Hugging Face tokenizers are always the fast ones here"
)
TOKENIZER_FLAGS = (
    without("--tokenizer-type GPT2BPETokenizer", "vocab-file merge-file"),
    without("--tokenizer-type NullTokenizer or TikTokenizer or ByteLevelTokenizer", "vocab-size"),
    without(
        "--tokenizer-type TikTokenizer",
        "tiktoken-pattern tiktoken-num-special-tokens tiktoken-special-tokens",
    ),
    without(f"--tokenizer-type {_SENTENCE_PIECE}", "tokenizer-sentencepiece-legacy"),
    without("--tokenizer-type HuggingFaceTokenizer", "tokenizer-hf-include-special-tokens"),
    without(
        f"--tokenizer-type HuggingFaceTokenizer or TikTokenizer or {_SENTENCE_PIECE}",
        "tokenizer-model",
    ),
)
"""Flags of tokenizers that a type of tokenizer does not read."""

TEXT_FLAGS = (
    ALWAYS_FAST,
    *TOKENIZER_FLAGS,
    Inapplicable(
        "masked-softmax-fusion", "attention is computed by kernels that mask and normalize in one"
    ),
    on_cpu("bias-gelu-fusion bias-swiglu-fusion apply-rope-fusion", "a fused kernel of a GPU"),
    on_cpu("moe-grouped-gemm", "a kernel of Hopper GPUs, or of Transformer Engine"),
    on_cpu("moe-permute-fusion moe-router-fusion", "a kernel of Transformer Engine"),
    without_engine("moe-permute-fusion moe-router-fusion", "the torch layers have no such kernel"),
    without(
        "--group-query-attention",
        "num-query-groups",
        "each head has keys and values of its own",
    ),
    without(
        "--position-embedding-type rope",
        "rotary-base rotary-percent rotary-interleaved rotary-seq-len-interpolation-factor "
        "use-rope-scaling rope-scaling rope-local-base-freq no-rope-freq",
    ),
    without("--window-size", "window-attn-skip-freq"),
    without("--use-rope-scaling", "rope-scaling-factor"),
    without(
        "--multi-latent-attention",
        "q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim rope-type "
        "rotary-scaling-factor original-max-position-embeddings beta-fast beta-slow mscale "
        "mscale-all-dim",
    ),
    without("--rope-type yarn", "original-max-position-embeddings beta-fast beta-slow mscale"),
    without("--mtp-num-layers", "mtp-loss-scaling-factor"),
    without(
        "--num-experts",
        "moe-layer-freq moe-ffn-hidden-size moe-shared-expert-intermediate-size "
        "moe-shared-expert-gate moe-router-topk moe-router-load-balancing-type moe-aux-loss-coeff "
        "moe-z-loss-coeff moe-input-jitter-eps moe-router-dtype moe-router-score-function "
        "moe-router-pre-softmax moe-router-num-groups moe-router-group-topk "
        "moe-router-group-scores moe-router-topk-scaling-factor moe-router-enable-expert-bias "
        "moe-router-bias-update-rate moe-router-force-load-balancing moe-token-dispatcher-type "
        "moe-expert-capacity-factor moe-pad-expert-input-to-capacity moe-token-drop-policy "
        "moe-layer-recompute moe-apply-probs-on-input",
    ),
    without("--dataloader-type cyclic", "data-sharding"),
    without(
        "--fim-data",
        "fim-rate fim-spm-rate fim-split-sample fim-fragment-rate fim-no-prefix fim-prefix-token "
        "fim-middle-token fim-suffix-token fim-pad-token fim-eod-token",
    ),
    without("--fim-split-sample", "fim-fragment-rate"),
)
"""Flags of text runs that do nothing in some of them, or in all."""
