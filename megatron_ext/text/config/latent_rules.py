"""Rules of multi-latent attention; only runs with ``--multi-latent-attention`` import this file."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config.flags import default_of, spelling_of
from megatron_ext.config.precision import TE_IMPL
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError
from megatron_ext.text.config.attention import AttentionConfig, LatentAttentionConfig
from megatron_ext.text.config.block import BlockConfig
from megatron_ext.text.config.positions import PositionConfig

REPLACED = {
    "group_query_attention": "its heads have keys of their own, from one vector per token",
    "add_qkv_bias": "its projections have no biases",
    "rotary_interleaved": "its channels are always rotated in neighbouring pairs",
    "rope_scaling": "its frequencies are scaled by `--rope-type yarn`",
    "rope_local_base_freq": "all its layers have one base",
    "qk_layernorm_all_heads": "its norms are those of the vectors before the heads",
    "qk_layernorm_after_rope": "its norms are those of the vectors before the heads",
    "no_rope_freq": "all its layers rotate a part of each head",
    "attention_output_gate": "its projections compute no gate",
    "softmax_scale": "its factor follows from the channels of a key and `--mscale-all-dim`",
}
"""Fields of other sections that do not go with multi-latent attention, each with the reason."""


def latent_attention_errors(given: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each flag that is wrong together with ``--multi-latent-attention``.

    ``given`` has the flags as the user gave them, before values are derived from others.
    """
    name = "`--multi-latent-attention`"
    model = given.model
    latent = given.section(LatentAttentionConfig)
    positions = given.section(PositionConfig)
    attention = given.section(AttentionConfig)
    block = given.section(BlockConfig)
    for field, reason in REPLACED.items():
        section = next(x for x in (positions, attention, block, model) if hasattr(x, field))
        if getattr(section, field) != default_of(section, field):
            spelled = spelling_of(section, field)
            yield FlagError(spelled, None, f"does not go with {name}: {reason}", "leave it out")
    if model.kv_channels not in (None, latent.v_head_dim):
        yield FlagError(
            "--kv-channels",
            model.kv_channels,
            f"must be `--v-head-dim` ({latent.v_head_dim}) with {name}, whose keys have "
            "`--qk-head-dim` plus `--qk-pos-emb-head-dim` channels",
            "leave it out",
        )
    kind = positions.position_embedding_type
    if kind == "none":
        yield from _unrotated_errors(given)
        return
    if kind != "rope":
        yield FlagError(
            name,
            None,
            "rotates a part of each head, which does not go with "
            f"`--position-embedding-type {kind}`",
            "use rope, or none to rotate nothing",
        )
    rotated = latent.qk_pos_emb_head_dim
    share = positions.rotary_percent
    if rotated % 2:
        yield FlagError(
            "--qk-pos-emb-head-dim",
            rotated,
            "must be even, since channels are rotated in pairs",
            f"use {rotated + 1}",
        )
    elif int(rotated * share) < 2:
        yield FlagError(
            "--rotary-percent",
            share,
            f"leaves no pair of the {rotated} channels of `--qk-pos-emb-head-dim` to rotate",
            f"use {2 / rotated:g} or more",
        )
    yield from _yarn_errors(latent, positions)


def _unrotated_errors(given: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each flag that is wrong if latent attention knows no positions."""
    growth = given.section(PositionConfig).llama_4_scaling_beta
    if growth is not None:
        yield FlagError(
            "--llama-4-scaling-beta",
            f"{growth:g}",
            "does not go with `--position-embedding-type none`, whose queries know no positions",
            "leave it out",
        )
    if given.model.transformer_impl == TE_IMPL:
        yield FlagError(
            "--transformer-impl",
            TE_IMPL,
            "always rotates a part of each head of `--multi-latent-attention`, which "
            "`--position-embedding-type none` forbids",
            "use torch",
        )


def _yarn_errors(latent: LatentAttentionConfig, positions: PositionConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags of YaRN (Peng et al., arXiv:2309.00071)."""
    growth = positions.llama_4_scaling_beta
    if latent.rope_type != "yarn":
        if growth is not None:
            yield FlagError(
                "--llama-4-scaling-beta",
                f"{growth:g}",
                f"does not go with `--rope-type {latent.rope_type}`, which has no original length",
                "use `--rope-type yarn`",
            )
        return
    share = positions.rotary_percent
    if share != 1:
        yield FlagError(
            "--rotary-percent",
            share,
            "must be 1 with `--rope-type yarn`, which rotates every channel of "
            "`--qk-pos-emb-head-dim`",
            "use `--rope-type rope`",
        )
    if latent.beta_slow > latent.beta_fast:
        yield FlagError(
            "--beta-slow",
            f"{latent.beta_slow:g}",
            f"must not be above `--beta-fast` ({latent.beta_fast:g})",
            f"use {latent.beta_fast / 32:g}",
        )
    if positions.rotary_base <= 1:
        yield FlagError(
            "--rotary-base", positions.rotary_base, "must be above 1 with yarn", "use 10000"
        )
