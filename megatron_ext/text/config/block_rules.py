"""Rules for the flags of norms and factors in a decoder layer."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config.model import ACTIVATIONS
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError, exclusive
from megatron_ext.text.config.block import BlockConfig
from megatron_ext.text.config.hybrid import HybridConfig
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.config.positions import PositionConfig


def block_errors(block: BlockConfig, config: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each flag of ``block`` that does not go with the others of ``config``."""
    model = config.model
    if block.reordered_norm and model.sandwich_norm:
        yield exclusive("--reordered-norm", "--sandwich-norm")
    if not block.norm_elementwise_affine and model.apply_layernorm_1p:
        yield FlagError(
            "--apply-layernorm-1p",
            None,
            "stores the weight of a norm minus one, but `--no-norm-elementwise-affine` gives norms "
            "no weight",
            "leave it out",
        )
    if model.apply_residual_connection_post_layernorm and block.reordered_norm:
        yield FlagError(
            "--apply-residual-connection-post-layernorm",
            None,
            "takes the residual after a norm that `--reordered-norm` does not have",
            "leave it out",
        )
    if not block.norm_bias and (
        model.normalization != "LayerNorm" or not block.norm_elementwise_affine
    ):
        yield FlagError(
            "--no-norm-bias",
            None,
            "takes the bias of `--normalization LayerNorm` away, but norms here have none",
            "leave it out",
        )
    yield from _parallel_errors(block, config)
    if block.xielu:
        others = [name for name in ACTIVATIONS if getattr(model, name)]
        if others:
            yield exclusive("--xielu", f"--{others[0].replace('_', '-')}")
        if config.section(MoEConfig).num_experts is not None:
            yield FlagError(
                "--xielu", None, "is for dense MLPs, not for `--num-experts`", "leave it out"
            )
    yield from _qk_norm_errors(block, config)


def _parallel_errors(block: BlockConfig, config: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each flag that does not go with layers of parallel branches."""
    name = "--use-parallel-residual"
    if not block.use_parallel_residual:
        if block.shared_input_norm:
            yield FlagError("--shared-input-norm", None, f"needs `{name}`", "give both")
        return
    if block.reordered_norm and block.shared_input_norm:
        yield exclusive("--reordered-norm", "--shared-input-norm")
    given = {
        "--apply-residual-connection-post-layernorm": (
            config.model.apply_residual_connection_post_layernorm
        ),
        "--hybrid-layer-pattern": config.section(HybridConfig).layer_kinds is not None,
        "--overlap-moe-expert-parallel-comm": config.parallel.overlap_moe_expert_parallel_comm,
        "--moe-keep-dispatched-tokens": config.section(MoEConfig).moe_keep_dispatched_tokens,
    }
    for other, has in given.items():
        if has:
            yield exclusive(name, other)


def _qk_norm_errors(block: BlockConfig, config: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in where queries and keys are normalized."""
    model = config.model
    given = {
        "--qk-layernorm-all-heads": block.qk_layernorm_all_heads,
        "--qk-layernorm-after-rope": block.qk_layernorm_after_rope,
    }
    names = [name for name, has in given.items() if has]
    if len(names) > 1:
        yield exclusive(*names)
    for name in names:
        if not model.qk_layernorm:
            yield FlagError(
                name, None, "says where `--qk-layernorm` normalizes queries and keys", "give both"
            )
    if block.qk_layernorm_after_rope:
        kind = config.section(PositionConfig).position_embedding_type
        if kind != "rope":
            yield FlagError(
                "--qk-layernorm-after-rope",
                None,
                f"needs rotary positions, not `--position-embedding-type {kind}`",
                "use rope",
            )
    if block.qk_layernorm_all_heads:
        yield from _all_heads_errors(block, config)


def _all_heads_errors(block: BlockConfig, config: RunConfig) -> Iterator[FlagError]:
    """Yield an error if the norm over all heads has no form for the model or its ranks."""
    name = "--qk-layernorm-all-heads"
    model = config.model
    if model.normalization != "RMSNorm":
        yield FlagError(
            name, None, "needs `--normalization RMSNorm`", f"leave {name} out, or give it"
        )
    if not block.norm_elementwise_affine:
        yield exclusive(name, "--no-norm-elementwise-affine")
    groups = model.num_query_groups or model.num_attention_heads or 0
    ranks = config.parallel.tensor_model_parallel_size
    if groups % ranks:
        yield FlagError(
            name,
            None,
            f"needs the groups of heads ({groups}) to be divisible by "
            f"`--tensor-model-parallel-size` ({ranks}), so that ranks share no keys",
            "use fewer ranks",
        )
    if config.optimizer.apply_wd_to_qk_layernorm:
        yield FlagError(
            "--apply-wd-to-qk-layernorm",
            None,
            f"knows the norms of single heads only, not `{name}`'s",
            "leave it out",
        )
