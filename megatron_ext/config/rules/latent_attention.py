"""Rules of multi-latent attention: what its flags must be, and which other flags it replaces."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_ext.config.flags import default_of, spelling_of
from megatron_ext.config.model import ModelConfig

REPLACED = {
    "group_query_attention": "its heads have keys of their own, from one vector per token",
    "add_qkv_bias": "its projections have no biases",
    "rotary_interleaved": "its channels are always rotated in neighbouring pairs",
    "rotary_seq_len_interpolation_factor": "its frequencies are scaled by `--rope-type yarn`",
    "use_rope_scaling": "its frequencies are scaled by `--rope-type yarn`",
    "rope_scaling": "its frequencies are scaled by `--rope-type yarn`",
    "rope_local_base_freq": "all its layers have one base",
    "no_rope_freq": "all its layers rotate a part of each head",
    "softmax_scale": "its factor follows from the channels of a key and `--mscale-all-dim`",
}
"""Fields of flags that multi-latent attention does not use, each with the reason."""


def latent_attention_errors(given: ModelConfig, model: ModelConfig) -> Iterator[str]:
    """Yield a sentence for each fault in the flags of ``--multi-latent-attention``.

    ``given`` are the flags before anything was derived from them.
    """
    name = "`--multi-latent-attention`"
    if not model.multi_latent_attention:
        return
    for field, reason in REPLACED.items():
        if getattr(given, field) != default_of(given, field):
            yield f"`{spelling_of(given, field)}` does not go with {name}: {reason}; leave it out."
    if given.kv_channels not in (None, model.v_head_dim):
        yield (
            f"`--kv-channels` ({given.kv_channels}) must be `--v-head-dim` ({model.v_head_dim}) "
            f"with {name}, whose keys have `--qk-head-dim` plus `--qk-pos-emb-head-dim` channels; "
            "leave it out."
        )
    kind = given.position_embedding_type
    if kind != "rope":
        yield (
            f"{name} rotates a part of each head, which does not go with "
            f"`--position-embedding-type {kind}`; use rope."
        )
    rotated = model.qk_pos_emb_head_dim
    if rotated % 2:
        yield (
            f"`--qk-pos-emb-head-dim` ({rotated}) must be even, since channels are rotated in "
            f"pairs; use {rotated + 1}."
        )
    elif int(rotated * model.rotary_percent) < 2:
        yield (
            f"`--rotary-percent` ({model.rotary_percent}) leaves no pair of the {rotated} channels "
            f"of `--qk-pos-emb-head-dim` to rotate; use {2 / rotated:g} or more."
        )
    yield from _yarn_errors(model)


def _yarn_errors(model: ModelConfig) -> Iterator[str]:
    """Yield a sentence for each fault in the flags of YaRN (Peng et al., arXiv:2309.00071)."""
    if model.rope_type != "yarn":
        return
    if model.rotary_percent != 1:
        yield (
            f"`--rotary-percent` ({model.rotary_percent}) must be 1 with `--rope-type yarn`, which "
            "rotates every channel of `--qk-pos-emb-head-dim`; use `--rope-type rope`."
        )
    if model.beta_slow >= model.beta_fast:
        yield (
            f"`--beta-slow` ({model.beta_slow:g}) must be below `--beta-fast` "
            f"({model.beta_fast:g}); use {model.beta_fast / 32:g}."
        )
    if model.rotary_base <= 1:
        yield f"`--rotary-base` ({model.rotary_base}) must be above 1 with yarn; use 10000."


def softmax_scale(model: ModelConfig) -> float:
    """Return the factor of attention's scores, ``m**2 / sqrt(d)``, d channels of a key.

    m is 1, or ``0.1 * mscale_all_dim * ln(factor) + 1`` if YaRN scales lengths by a factor above 1
    (arXiv:2309.00071, section 3.4, where it multiplies queries and keys).
    """
    growth = 0.1 * model.mscale_all_dim * math.log(model.rotary_scaling_factor) + 1.0
    return growth**2 / math.sqrt(model.qk_head_dim + model.qk_pos_emb_head_dim)
