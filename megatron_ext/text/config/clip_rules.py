"""Rules of ``--qk-clip``, which scales weights of queries and keys; only it imports this file."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError
from megatron_ext.text.config.attention import AttentionConfig, LatentAttentionConfig


def clip_errors(attention: AttentionConfig, config: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each flag with which scaled weights would have another effect."""
    latent = config.section(LatentAttentionConfig).multi_latent_attention
    if config.model.qk_layernorm and not latent:
        yield FlagError(
            "--qk-clip",
            None,
            "has no effect with `--qk-layernorm`, whose norms undo any scale of queries and keys",
            "give one of them",
        )
    if attention.attn_logit_softcapping is not None:
        yield FlagError(
            "--qk-clip",
            None,
            f"does not go with `--attn-logit-softcapping` ({attention.attn_logit_softcapping}), "
            "which limits the logits already",
            "give one of them",
        )
    fixes = {
        "--lora-rank": config.lora.lora_rank is not None,
        "--freeze": bool(config.freeze.freeze),
        "--freeze-all-but": bool(config.freeze.freeze_all_but),
        "--freeze-base-for-mtp": config.freeze.freeze_base_for_mtp,
    }
    for name, given in fixes.items():
        if given:
            yield FlagError(
                "--qk-clip",
                None,
                f"scales weights of queries and keys, which `{name}` may keep as they are",
                "leave one of them out",
            )
