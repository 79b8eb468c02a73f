"""Flags of text runs that are refused or have no effect, always or together with other flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megatron_ext.config.inapplicable import (
    Inapplicable,
    Values,
    beside,
    longer_than_run,
    names_of,
    on_cpu,
    without,
    without_engine,
)
from megatron_ext.config.layers import MIXERS, mixer_of
from megatron_ext.text.config.hybrid import (
    INDEXER_LOSS,
    LINEAR_SIZES,
    MAMBA_SIZES,
    SIZES_BY_LETTER,
)
from megatron_ext.text.config.sft import SftConfig

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
    without("--tokenizer-type HuggingFaceTokenizer", "trust-remote-code"),
    beside("--tokenizer-type NullTokenizer", "tokenizer-special-tokens"),
    beside("--tokenizer-special-tokens", "tiktoken-special-tokens"),
)
"""Rules of tokenizer flags: each names flags, and the tokenizers or flags that decide their use."""


def _lacks_validation(values: Values) -> bool:
    """Return whether ``--split`` leaves no documents for the evaluations that a run asks for."""
    split = values["split"]
    evaluates = values["eval_iters"] or values["full_validation"]
    if split is None or values["mock_data"] or values["sft"] or not evaluates:
        return False
    shares = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    return len(shares) < 2 or shares[1] == 0


def _uses_no_library(values: Values) -> bool:
    """Return whether a run cannot use the library of its ``--moe-flex-dispatcher-backend``."""
    if values["moe_token_dispatcher_type"] != "flex":
        return True
    from megatron_ext.text.config.flex import uses_library

    return not uses_library(values)


def _recomputes_no_experts(values: Values) -> bool:
    """Return whether no layer of experts runs again in the backward pass."""
    if values["num_experts"] is None:
        return True
    from megatron_ext.text.config.flex import recomputes_experts

    return not recomputes_experts(values)


def _on(parts: str, flag: str, needed: str) -> Inapplicable:
    """Return an entry that says that ``flag`` has no effect on ``parts`` without ``needed``."""
    names = parts.split()
    field = flag.replace("-", "_")
    lacks = needed.replace("-", "_")
    return Inapplicable(
        flag,
        says=f"has no effect on {' or '.join(names)} without `--{needed}`",
        holds=lambda values: values[lacks] is None and any(x in names for x in values[field] or ()),
    )


PARTS_OF_LAYERS = (
    _on("moe moe_act shared_experts", "recompute-modules", "num-experts"),
    _on("shared_experts", "recompute-modules", "moe-shared-expert-intermediate-size"),
    _on("expert_fc1 moe_act", "offload-modules", "num-experts"),
    Inapplicable(
        "recompute-modules",
        says="has no effect on mlp, since each layer has experts in its place",
        holds=lambda values: (
            "mlp" in (values["recompute_modules"] or ())
            and values["num_experts"] is not None
            and values["moe_layer_freq"] == "1"
            and values["hybrid_layer_pattern"] is None
        ),
    ),
)
"""Notes on flags that name parts of a layer that no layer of the model has."""


def _has_no_mixer(letters: str) -> Callable[[Values], bool]:
    """Return a function that tells whether no layer has a mixer with one of these letters."""

    def lacks(values: Values) -> bool:
        kinds = (*(values["layer_kinds"] or ()), values["depth_kind"] or "")
        return not {mixer_of(kind) for kind in kinds} & set(letters)

    return lacks


def _of_mixers(letters: str, fields: Sequence[str]) -> Inapplicable:
    """Return an entry that says that sizes of mixers have no effect without such a mixer."""
    names = " or ".join(MIXERS[letter] for letter in letters)
    return Inapplicable(
        " ".join(fields).replace("_", "-"),
        says=f"has no effect: no layer of the model has {names}",
        holds=_has_no_mixer(letters),
    )


SIZES_OF_MIXERS = (
    _of_mixers("GK", LINEAR_SIZES),
    _of_mixers("M", MAMBA_SIZES),
    _of_mixers("D", (*SIZES_BY_LETTER["D"], *INDEXER_LOSS)),
    without("--experimental-attention-variant gated_delta_net", "linear-attention-freq"),
)
"""Notes on sizes of mixers that no layer of the model has."""

NO_VALIDATION = Inapplicable(
    "eval-interval eval-iters full-validation",
    "`--split` leaves no documents to the validation split",
    holds=_lacks_validation,
)
WITHOUT_SFT = Inapplicable(
    names_of(SftConfig),
    remedy="add it, or leave this out",
    says="has an effect only with `--sft`",
    holds=lambda values: not values["sft"],
)
_GIVE_DIRECT = "give `--data-order direct`"
_with_sft = partial(
    Inapplicable,
    remedy="leave it out",
    says="does not go with `--sft`",
    holds=lambda values: values["sft"],
)
_with_direct = partial(
    Inapplicable,
    remedy="leave it out",
    says="does not go with `--data-order direct`",
    holds=lambda values: values["data_order"] == "direct" and not values["sft"],
)

TEXT_FLAGS = (
    NO_VALIDATION,
    *PARTS_OF_LAYERS,
    *SIZES_OF_MIXERS,
    without("--sample-interval", "sample-new-tokens"),
    longer_than_run("sample-interval"),
    WITHOUT_SFT,
    Inapplicable(
        "train-epochs",
        remedy="give `--train-iters`",
        says="needs `--sft`",
        holds=lambda values: not values["sft"],
    ),
    _with_sft(
        "rampup-batch-size step-batch-size-schedule decrease-batch-size-if-needed",
        "its steps would not add up to epochs",
    ),
    _with_sft("mock-data", "conversations are read, not made up"),
    _with_sft("dataloader-type", "every epoch is shuffled anew"),
    _with_sft("data-args-path", "files are named by --data-path"),
    _with_sft("per-split-data-args-path", "files are named by --train-data-path and its likes"),
    _with_sft("per-dataset-sequences-path", "lengths are read from the data"),
    _with_sft("mmap-bin-files", "tokens are always mapped into memory"),
    _with_sft("data-order", "conversations have an order of their own"),
    _with_sft("data-schedule", "conversations have no mixture that changes"),
    _with_sft("document-packing", "conversations are packed by --sft-batching"),
    _with_sft("fim-data", "conversations are trained as they are"),
    _with_sft("multiple-validation-sets", "the validation files are one split"),
    _with_sft("data-sharding", "samples are dealt to replicas by their cost"),
    _with_sft("reset-position-ids", "positions always start anew with each conversation"),
    _with_sft("reset-attention-mask", "attention always stays within a conversation"),
    _with_sft("eod-mask-loss", "the mask of the conversation says what is trained"),
    _with_sft(
        "num-dataset-builder-threads mid-level-dataset-surplus", "there is no blend to build"
    ),
    _with_sft("allow-ambiguous-pad-tokens", "padding is known by its place"),
    _with_direct("mock-data", "made-up samples have no order"),
    _with_direct("dataloader-type", "every epoch is permuted anew"),
    _with_direct("data-sharding", "all replicas share one order"),
    _with_direct("data-cache-path", "no indices are built"),
    _with_direct("per-dataset-sequences-path", "indices are not read when the run starts"),
    _with_direct("num-dataset-builder-threads", "nothing is built"),
    _with_direct("mid-level-dataset-surplus", "no part of a blend is drawn in advance"),
    Inapplicable(
        "object-storage-cache-path object-storage-cache-size",
        remedy=_GIVE_DIRECT,
        says="is for addresses, which only the direct order reads",
        holds=lambda values: values["data_order"] != "direct",
    ),
    Inapplicable(
        "fim-data",
        remedy=_GIVE_DIRECT,
        says="needs an order whose samples do not depend on who reads them",
        holds=lambda values: values["data_order"] != "direct" and not values["sft"],
    ),
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
        "use-rope-scaling rope-scaling rope-local-base-freq no-rope-freq llama-4-scaling-beta",
    ),
    beside(
        "--multi-latent-attention",
        "use-rope-scaling rope-scaling-factor rotary-seq-len-interpolation-factor",
        "its frequencies are scaled by `--rope-type yarn`",
    ),
    without("--window-size", "window-attn-skip-freq"),
    without("--qk-clip", "qk-clip-alpha qk-clip-threshold"),
    without("--use-rope-scaling", "rope-scaling-factor"),
    without(
        "--multi-latent-attention",
        "q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim rope-type "
        "rotary-scaling-factor original-max-position-embeddings beta-fast beta-slow mscale "
        "mscale-all-dim latent-norm-epsilon",
    ),
    Inapplicable(
        "rope-type rotary-scaling-factor original-max-position-embeddings beta-fast beta-slow "
        "mscale mscale-all-dim",
        "nothing is rotated",
        says="has no effect with `--position-embedding-type none`",
        holds=lambda values: (
            values["multi_latent_attention"] and values["position_embedding_type"] == "none"
        ),
    ),
    without("--rope-type yarn", "original-max-position-embeddings beta-fast beta-slow mscale"),
    without("--mtp-num-layers", "mtp-loss-scaling-factor"),
    without(
        "--num-experts",
        "moe-layer-freq moe-ffn-hidden-size moe-latent-size moe-shared-expert-intermediate-size "
        "moe-shared-expert-gate moe-shared-expert-overlap moe-router-topk "
        "moe-router-load-balancing-type moe-aux-loss-coeff "
        "moe-z-loss-coeff moe-input-jitter-eps moe-router-dtype moe-router-score-function "
        "moe-router-pre-softmax moe-router-norm-topk-prob moe-router-num-groups "
        "moe-router-group-topk "
        "moe-router-group-scores moe-router-topk-scaling-factor moe-router-enable-expert-bias "
        "moe-router-bias-update-rate moe-router-force-load-balancing moe-token-dispatcher-type "
        "moe-flex-dispatcher-backend moe-ranks-per-node "
        "moe-expert-capacity-factor moe-pad-expert-input-to-capacity moe-token-drop-policy "
        "moe-layer-recompute moe-keep-dispatched-tokens moe-dispatch-fwd-dtype "
        "moe-combine-bwd-dtype moe-apply-probs-on-input",
    ),
    without("--moe-router-group-topk", "moe-router-num-groups"),
    Inapplicable(
        "moe-router-norm-topk-prob",
        "other scores are always divided by their sum",
        says="has no effect without a softmax over all experts, `--moe-router-pre-softmax`",
        holds=lambda values: (
            values["num_experts"] is not None
            and (
                values["moe_router_score_function"] != "softmax"
                or not values["moe_router_pre_softmax"]
            )
        ),
    ),
    without("--moe-router-enable-expert-bias", "moe-router-bias-update-rate"),
    without("--moe-token-dispatcher-type flex", "moe-flex-dispatcher-backend moe-ranks-per-node"),
    without(
        "--expert-model-parallel-size above 1",
        "moe-flex-dispatcher-backend moe-ranks-per-node moe-keep-dispatched-tokens "
        "moe-dispatch-fwd-dtype moe-combine-bwd-dtype",
    ),
    Inapplicable(
        "moe-keep-dispatched-tokens",
        says="has no effect, since no layer of experts is recomputed",
        holds=_recomputes_no_experts,
    ),
    Inapplicable(
        "moe-flex-dispatcher-backend",
        "tokens make the same hops by torch's collectives",
        says="has no effect without a GPU and a library that fits the run",
        holds=_uses_no_library,
    ),
    without("--moe-expert-capacity-factor", "moe-token-drop-policy"),
    without(
        "--moe-shared-expert-intermediate-size", "moe-shared-expert-gate moe-shared-expert-overlap"
    ),
    on_cpu(
        "moe-shared-expert-overlap", "communication on a CPU does not run beside the shared expert"
    ),
    Inapplicable(
        "moe-aux-loss-coeff",
        says="has no effect with `--moe-router-load-balancing-type none`",
        holds=lambda values: set(values["moe_router_load_balancing_type"]) == {"none"},
    ),
    without("--qk-layernorm", "apply-wd-to-qk-layernorm"),
    without("--dataloader-type cyclic", "data-sharding"),
    beside(
        "--mock-data",
        "per-dataset-sequences-path mmap-bin-files num-dataset-builder-threads "
        "mid-level-dataset-surplus",
        "made-up samples are in no files",
    ),
    without("--eval-tasks", "eval-batch-size"),
    without(
        "--fim-data",
        "fim-rate fim-spm-rate fim-split-sample fim-fragment-rate fim-no-prefix fim-prefix-token "
        "fim-middle-token fim-suffix-token fim-pad-token fim-eod-token",
    ),
    without("--fim-split-sample", "fim-fragment-rate"),
)
"""Rules of text runs: each names flags, and when they are refused or have no effect."""
