"""Rules for the sequence mixers of a GPT's layers: their sizes, and what they go with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_ext.config.flags import must_divide
from megatron_ext.config.layers import ATTENTION, MIXERS, RECURRENT, mixer_of, mlp_of
from megatron_ext.config.optimizer import RECURRENT_TARGETS
from megatron_ext.config.precision import TE_IMPL
from megatron_ext.config.rules.fp8 import side_errors
from megatron_ext.config.run import RunConfig, Side
from megatron_ext.errors import FlagError
from megatron_ext.text.config.attention import AttentionConfig, LatentAttentionConfig
from megatron_ext.text.config.hybrid import INDEXER_SIZES, HybridConfig, MixerConfig
from megatron_ext.text.config.positions import PositionConfig


def mixer_errors(kinds: Sequence[str], run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each flag that does not go with the mixers of layers of these kinds."""
    depth = run.section(HybridConfig).depth_kind
    letters = {mixer_of(kind) for kind in (*kinds, depth or kinds[-1])}
    sizes = run.section(MixerConfig)
    ranks = run.parallel.tensor_model_parallel_size
    if letters & set("GK"):
        yield from _linear_errors(letters, sizes, ranks)
    if "M" in letters:
        yield from _mamba_errors(sizes, run)
    if "D" in letters:
        yield from _sparse_errors(sizes, run)
    if not letters & {ATTENTION, "D"}:
        yield from _logit_errors(run)
    if run.fp8.fp8_format is not None:
        yield from side_errors(run.fp8, list(_sides(letters, sizes, run)))
    mixers = ", ".join(MIXERS[letter] for letter in sorted(letters & set("MGKD")))
    model = run.model
    what = f"layers of {mixers}" if mixers else "layers with one part"
    refused = {
        "--transformer-impl": (model.transformer_impl, TE_IMPL, "torch"),
        "--cuda-graph-impl": (run.cuda_graphs.cuda_graph_impl, "local", "none"),
    }
    for name, (value, bad, remedy) in refused.items():
        if value == bad:
            yield FlagError(name, value, f"does not support {what}", f"use {remedy}")


def _logit_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each flag that follows logits of attention, which no layer has."""
    attention = run.section(AttentionConfig)
    given = {
        "--qk-clip": attention.qk_clip,
        "--log-max-attention-logit": attention.log_max_attention_logit,
    }
    for name, has in given.items():
        if has:
            yield FlagError(
                name, None, "needs attention, but no layer of the model has it", "leave it out"
            )


def _sides(letters: set[str], sizes: MixerConfig, run: RunConfig) -> Iterator[Side]:
    """Yield the dimensions of the matrices of recurrent mixers, apart from the hidden size."""
    tp = run.parallel.tensor_model_parallel_size
    keys = sizes.linear_num_key_heads * sizes.linear_key_head_dim
    values = sizes.linear_num_value_heads * sizes.linear_value_head_dim
    states = 2 * sizes.mamba_num_groups * sizes.mamba_state_dim
    heads = sizes.num_mamba_heads(run)
    inner = heads * sizes.mamba_head_dim
    rows = {
        "M": (2 * inner + states + heads, inner),
        "G": (2 * (keys + values + sizes.linear_num_value_heads), values),
        "K": (2 * keys + values + sizes.linear_num_key_heads, values),
    }
    for letter in sorted(letters & rows.keys()):
        for name, width in zip(("in_proj", "out_proj"), rows[letter], strict=True):
            yield f"the width of `{name}` in {MIXERS[letter]}", width, tp


def _linear_errors(letters: set[str], sizes: MixerConfig, ranks: int) -> Iterator[FlagError]:
    """Yield an error for each wrong size of gated DeltaNet or Kimi Delta Attention."""
    keys = sizes.linear_num_key_heads
    values = sizes.linear_num_value_heads
    tp = "--tensor-model-parallel-size"
    yield from must_divide("--linear-num-key-heads", keys, tp, ranks)
    yield from must_divide("--linear-num-value-heads", values, "--linear-num-key-heads", keys)
    if "K" in letters and keys != values:
        yield FlagError(
            "--linear-num-value-heads",
            values,
            f"must equal `--linear-num-key-heads` ({keys}) in {MIXERS['K']}",
            f"use {keys}",
        )


def _mamba_errors(sizes: MixerConfig, run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each wrong size of Mamba-2."""
    groups = sizes.mamba_num_groups
    tp = "--tensor-model-parallel-size"
    heads = sizes.num_mamba_heads(run)
    if heads % groups:
        yield FlagError(
            "--mamba-num-groups",
            groups,
            f"must divide the heads of a Mamba-2 layer ({heads}), which share B and C in groups",
            "use a divisor, or give `--mamba-num-heads`",
        )
    yield from must_divide(
        "--mamba-num-groups", groups, tp, run.parallel.tensor_model_parallel_size
    )
    longest = sizes.mamba_time_step_max
    if longest is not None and longest < sizes.mamba_time_step_min:
        yield FlagError(
            "--mamba-time-step-max",
            longest,
            f"must be at least `--mamba-time-step-min` ({sizes.mamba_time_step_min})",
            "leave it out",
        )


def _sparse_errors(sizes: MixerConfig, run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each missing part of sparse attention, and each that it excludes."""
    latent = run.section(LatentAttentionConfig)
    attention = run.section(AttentionConfig)
    what = f"{MIXERS['D']} (D)"
    kind = run.section(PositionConfig).position_embedding_type
    if kind == "none":
        yield FlagError(
            "--position-embedding-type",
            kind,
            f"does not go with {what}, whose indexer rotates its queries and keys",
            "use rope",
        )
    if not latent.multi_latent_attention:
        yield FlagError(
            "--multi-latent-attention", None, f"is missing, and {what} is built on it", "give it"
        )
    for field in INDEXER_SIZES:
        if getattr(sizes, field) is None:
            name = f"--{field.replace('_', '-')}"
            yield FlagError(name, None, f"is missing, and {what} needs it", "give it")
    channels = sizes.dsa_indexer_head_dim
    rotated = latent.qk_pos_emb_head_dim
    if channels is not None and latent.multi_latent_attention and channels < rotated:
        yield FlagError(
            "--dsa-indexer-head-dim",
            channels,
            f"must be at least `--qk-pos-emb-head-dim` ({rotated}), which are rotated",
            f"use {rotated} or more",
        )
    changes = {
        "--window-size": attention.window_size,
        "--attn-logit-softcapping": attention.attn_logit_softcapping,
        "--softmax-type": None if attention.softmax_type == "vanilla" else attention.softmax_type,
    }
    for name, value in changes.items():
        if value is not None:
            yield FlagError(
                name,
                value,
                f"does not go with {what}, whose indexer learns the plain softmax over all keys",
                "leave it out",
            )
    if run.parallel.context_parallel_size > 1 and "a2a" in run.parallel.cp_comm_type:
        yield FlagError(
            "--cp-comm-type",
            "a2a",
            f"does not go with {what}, whose indexer needs the probabilities of all heads",
            "use all_gather",
        )
    if run.lora.lora_rank is not None and sizes.dsa_indexer_loss_coeff:
        yield FlagError(
            "--dsa-indexer-loss-coeff",
            sizes.dsa_indexer_loss_coeff,
            "trains the indexer, which `--lora-rank` freezes",
            "leave it out",
        )
    if run.fp8.fp8_format is not None:
        from megatron_ext.config.rules.fp8 import side_errors

        sides = [
            ("--dsa-indexer-n-heads", sizes.dsa_indexer_n_heads, 1),
            ("--dsa-indexer-head-dim", channels, 1),
        ]
        yield from side_errors(run.fp8, sides)
    if sizes.dsa_indexer_use_sparse_loss and not sizes.dsa_indexer_loss_coeff:
        yield FlagError(
            "--dsa-indexer-use-sparse-loss",
            None,
            "changes a loss that has no weight",
            "give `--dsa-indexer-loss-coeff`, or leave it out",
        )


def present_targets(usual: Sequence[str], hybrid: HybridConfig) -> list[str]:
    """Return the LoRA targets of layers of different kinds: those of the parts that a layer has.

    ``usual`` are the targets of a model whose layers all have attention and an MLP.
    """
    kinds = (*(hybrid.layer_kinds or ()), hybrid.depth_kind or "")
    mixers = {mixer_of(kind) for kind in kinds}
    transforms = any(map(mlp_of, kinds))
    attends = bool(mixers & {ATTENTION, "D"})
    targets = [name for name in usual if (transforms if "_fc" in name else attends)]
    return targets + list(RECURRENT_TARGETS if mixers & set(RECURRENT) else ())
