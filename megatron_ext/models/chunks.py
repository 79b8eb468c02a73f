"""All model chunks of one rank: built, put on the device, cast, wrapped for data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule

from megatron_ext.config.transformer_engine import TE_IMPL
from megatron_ext.models.fp8.attach import attach_fp8
from megatron_ext.models.initialization import (
    initialize_by_name,
    mark_methods,
    unmark_methods,
)
from megatron_ext.models.lora import attach_adapters

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.layout import ParallelContext

ModelChunk = Callable[..., MegatronModule]


def build_chunks(
    build: ModelChunk,
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    vocab_size: int | None = None,
) -> list[MegatronModule]:
    """Build the bare chunks of this rank, one for each virtual stage.

    Args:
        build: the task's model provider, called as ``build(config, transformer_config, context,
            pre_process=..., post_process=..., vp_stage=...)``.
        vocab_size: entries of the tokenizer, before padding.
    """
    if config.model.use_cpu_initialization:
        chunks = _build_all(build, config, transformer_config, context)
    else:
        random_state = torch.get_rng_state()
        mark_methods(transformer_config)
        chunks = _build_all(build, config, transformer_config, context)
        initialize_by_name(chunks, transformer_config, config.training.seed, vocab_size)
        unmark_methods(transformer_config)
        # Which of its modules a rank builds must not show in what it draws later.
        torch.set_rng_state(random_state)
    if config.lora.lora_rank is not None:
        attach_adapters(chunks, config.lora, config.training.seed)
    if config.fp8.fp8_format is not None and config.model.transformer_impl != TE_IMPL:
        attach_fp8(chunks, config, context.pgs)
    for chunk in chunks:
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunks


def _build_all(
    build: ModelChunk,
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
) -> list[MegatronModule]:
    placement = context.placement
    interleaves = config.parallel.virtual_pipeline_model_parallel_size is not None
    chunks = []
    for index in range(placement.num_chunks):
        position = placement.stage_of(context.pp_rank, index)
        stage = index if interleaves else None
        chunk = build(
            config,
            transformer_config,
            context,
            pre_process=position == 0,
            post_process=position == placement.num_stages - 1,
            vp_stage=stage,
        )
        chunk.vp_stage = stage
        chunks.append(chunk)
    return chunks


def ddp_config(
    config: RunConfig, context: ParallelContext, num_parameters: int
) -> DistributedDataParallelConfig:
    """megatron-core's DDP configuration of a run.

    Gradients are not checked one by one for NaN here: the step looks at the global norm and skips.
    """
    optimizer = config.optimizer
    bucket_size = optimizer.ddp_bucket_size
    if optimizer.ddp_num_buckets is not None:
        bucket_size = num_parameters // optimizer.ddp_num_buckets
    if bucket_size is None:
        bucket_size = max(40_000_000, 1_000_000 * context.pgs.dp_cp.size())
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.precision.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=optimizer.overlap_grad_reduce,
        overlap_param_gather=optimizer.overlap_param_gather,
        align_param_gather=optimizer.overlap_param_gather and optimizer.align_param_gather,
        use_distributed_optimizer=optimizer.use_distributed_optimizer,
        check_for_nan_in_grad=False,
        bucket_size=bucket_size if optimizer.overlap_grad_reduce else None,
        average_in_collective=optimizer.ddp_average_in_collective,
        fp8_param_gather=config.fp8.fp8_param_gather,
        reuse_grad_buf_for_mxfp8_param_ag=config.fp8.reuse_grad_buf_for_mxfp8_param_ag,
    )


def wrap_chunks(
    chunks: list[MegatronModule],
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    device: torch.device,
) -> list[DistributedDataParallel]:
    """Move the chunks to the device, cast them, and wrap them for data parallelism."""
    wrapped: list[Any] = [chunk.to(device) for chunk in chunks]
    if config.precision.bf16 or config.precision.fp16:
        wrapped = [Float16Module(transformer_config, chunk) for chunk in wrapped]
    trained = (p for chunk in chunks for p in chunk.parameters() if p.requires_grad)
    num_parameters = sum(parameter.numel() for parameter in trained)
    core_config = ddp_config(config, context, num_parameters)
    ddp = [
        DistributedDataParallel(
            config=transformer_config,
            ddp_config=core_config,
            module=chunk,
            # Later chunks overlap with computation anyway.
            disable_bucketing=index > 0,
            pg_collection=context.pgs,
        )
        for index, chunk in enumerate(wrapped)
    ]
    if config.training.data_parallel_random_init:
        for chunk in ddp:
            chunk.broadcast_params()
    return ddp
