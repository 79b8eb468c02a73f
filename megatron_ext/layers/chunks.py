"""Builds a rank's model chunks, moves and casts them, and wraps them for data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule, float16_to_fp32
from torch import Tensor

from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.config.precision import TE_IMPL, Fp8Config, PrecisionConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers.initialization import initialize_by_name, mark_methods, unmark_methods
from megatron_ext.parallel.context import ParallelContext

ModelChunk = Callable[..., MegatronModule]


def build_chunks(
    build: ModelChunk,
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    vocab_size: int | None = None,
) -> list[MegatronModule]:
    """Build and initialize this rank's model chunks, one for each virtual stage.

    `wrap_chunks` wraps them afterwards. ``build`` is `Task.model_chunk`, which builds one chunk.
    ``vocab_size`` is the size of the vocabulary before padding.
    """
    placement = context.placement
    parallel = config.parallel
    several = parallel.pipeline_model_parallel_size > 1
    tied_stages = several and not config.model.untie_embeddings_and_output_weights
    by_name = not config.model.use_cpu_initialization
    keep: Callable[[Any], None] | None = None
    # While they are built, two stages sum an output layer that is tied to the embedding.
    if by_name and config.optimizer.shards_weights and not tied_stages:
        from megatron_ext.layers.weight_shards import shard_at_start

        keep = partial(shard_at_start, groups=context.pgs)
    bits = config.lora.lora_quantize_weights
    if bits is not None:
        from megatron_ext.layers.quantized import drop_values, mark_weights

        keep = drop_values
    random_state = torch.get_rng_state()
    if by_name:
        mark_methods(transformer_config, keeps_memory=keep is None)
    chunks = []
    for index in range(placement.num_chunks):
        position = placement.stage_of(context.pp_rank, index)
        stage = None if parallel.virtual_pipeline_model_parallel_size is None else index
        chunk = build(
            config, transformer_config, context, pre_process=position == 0,
            post_process=position == placement.num_stages - 1, vp_stage=stage,
        )  # fmt: skip
        check_chunk(chunk, tied_stages=tied_stages)
        if transformer_config.num_moe_experts is not None:
            from megatron_ext.layers.expert_parameters import mark_experts

            mark_experts(chunk, context.pgs)
        if bits is not None:
            mark_weights(chunk, bits)
        chunk.vp_stage = stage
        chunks.append(chunk)
    if config.freeze.is_used and not config.training.skip_train:
        from megatron_ext.layers.frozen import freeze_parts

        freeze_parts(chunks, config)
    if by_name:
        initialize_by_name(chunks, transformer_config, config.training.seed, vocab_size, keep)
        unmark_methods(transformer_config)
        # A rank's later random draws must not depend on the modules that it has built.
        torch.set_rng_state(random_state)
    if bits is not None:
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            drop_values(parameter)
    if config.lora.lora_rank is not None:
        if config.lora.is_variant:
            from megatron_ext.layers.adapter_start import attach_variants as attach_adapters
        else:
            from megatron_ext.layers.lora import attach_adapters

        attach_adapters(chunks, config.lora, config.training.seed)
        # The bias of the experts' scores is a buffer, and frozen with the model.
        transformer_config.moe_router_bias_update_rate = 0.0
    if config.fp8.fp8_format is not None and config.model.transformer_impl != TE_IMPL:
        from megatron_ext.layers.fp8.attach import attach_fp8

        attach_fp8(
            chunks, config.fp8, context.pgs, num_layers=config.model.num_layers,
            on_gpu=config.device == "cuda", varies=config.model.blocks_dealt_by_cost,
        )  # fmt: skip
    keeps = getattr(transformer_config, "kept_tokens", None) is not None
    ranks_per_node = getattr(transformer_config, "moe_ranks_per_node", None)
    if ranks_per_node is not None and context.layout.expert_model_parallel_size > 1:
        from megatron_ext.layers.keeping_dispatcher import KeepingTwoHopDispatcher
        from megatron_ext.layers.two_hop_dispatcher import TwoHopDispatcher, use_two_hops
        from megatron_ext.parallel.expert_hops import expert_hops

        minutes = parallel.distributed_timeout_minutes
        hops = expert_hops(context, ranks_per_node, timeout_minutes=minutes)
        use_two_hops(chunks, hops, context, KeepingTwoHopDispatcher if keeps else TwoHopDispatcher)
    if config.offload.moves_activations and not config.training.skip_train:
        from megatron_ext.layers.activation_offload import offload_activations

        recomputes = config.model.recompute_granularity == "full"
        offload_activations(chunks, config.offload, recomputes=recomputes)
    if keeps:
        from megatron_ext.layers.keeping_dispatcher import drop_unread_outputs
        from megatron_ext.layers.transformer_layer import TransformerLayer

        for chunk in chunks:
            transformer_config.kept_tokens.follow(chunk)
            drop_unread_outputs(chunk, TransformerLayer)
    for chunk in chunks:
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunks


_TIED = (
    "the first and the last pipeline stage sum the gradients of a shared embedding; set it in "
    "`__init__` (False where nothing is shared), or give `--untie-embeddings-and-output-weights`"
)
_REQUIRED = {
    "sharded_state_dict": (
        "its weights are named, drawn and saved; derive its class from "
        "`megatron.core.transformer.module.MegatronModule`"
    ),
    "set_input_tensor": (
        "a pipeline stage gets what the stage before it computed; add `def set_input_tensor(self, "
        "tensors)`, which keeps the one tensor of the list (None on the first stage) for `forward`"
    ),
}


def check_chunk(chunk: torch.nn.Module, *, tied_stages: bool) -> None:
    """Check that a model has the attributes that megatron-core's schedules and checkpoints use.

    With ``tied_stages`` (the first and last pipeline stage share an embedding) it must also have
    ``pre_process`` and ``share_embeddings_and_output_weights``.

    Raises:
        ConfigError: attributes are missing; the error has one message for each.
    """
    required = dict(_REQUIRED)
    if tied_stages:
        required |= dict.fromkeys(("pre_process", "share_embeddings_and_output_weights"), _TIED)
    missing = [
        f"The model `{type(chunk).__name__}` has no `{name}`, by which {why}."
        for name, why in required.items()
        if not hasattr(chunk, name)
    ]
    if missing:
        raise ConfigError(missing)


def _ddp_config(
    optimizer: OptimizerConfig,
    precision: PrecisionConfig,
    fp8: Fp8Config,
    context: ParallelContext,
    num_parameters: int,
) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=precision.accumulate_allreduce_grads_in_fp32,
        # Another class reduces sharded gradients.
        overlap_grad_reduce=optimizer.overlap_grad_reduce and not optimizer.shards_gradients,
        overlap_param_gather=optimizer.gathers_in_forward,
        align_param_gather=optimizer.gathers_in_forward and optimizer.align_param_gather,
        use_distributed_optimizer=optimizer.use_distributed_optimizer,
        # Non-finite values are found later: the step checks the global norm and skips.
        check_for_nan_in_grad=False,
        bucket_size=optimizer.bucket_size(num_parameters, context.pgs.dp_cp.size()),
        average_in_collective=optimizer.ddp_average_in_collective,
        fp8_param_gather=fp8.fp8_param_gather,
        reuse_grad_buf_for_mxfp8_param_ag=fp8.reuse_grad_buf_for_mxfp8_param_ag,
    )


class _In16Bits(Float16Module):  # type: ignore[misc]
    """megatron-core's `Float16Module`, changed to cast the output of the last stage to float32.

    megatron-core casts on the last pipeline rank. With stages in a V shape that rank does not hold
    the last stage of the model.
    """

    def __init__(self, config: TransformerConfig, module: Any, *, is_last: bool) -> None:
        super().__init__(config, module)
        self._is_last = is_last

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        output = super().forward(*inputs, fp32_output=False, **kwargs)
        return float16_to_fp32(output) if fp32_output and self._is_last else output


class LoneReplica(DistributedDataParallel):  # type: ignore[misc]
    """megatron-core's data-parallel wrapper for the only replica, with which there is no exchange.

    A reduce-scatter or an all-gather over a single rank would copy the whole buffer, with Gloo even
    three times.
    """

    def finish_grad_sync(self, force_all_reduce: bool | None = True) -> None:
        """Scale the gradients; their all-reduce over a single rank copies nothing."""
        super().finish_grad_sync(force_all_reduce=True)

    def start_param_sync(self, *_unused: Any, **_options: bool) -> None:
        """Do nothing: no other rank has updated a weight."""


def _is_alone(ddp_config: DistributedDataParallelConfig, groups: ProcessGroupCollection) -> bool:
    """Return whether no parameter has a copy on another rank, and nothing waits for an exchange.

    Weights in 8 bits are converted after each gather.
    """
    converts = ddp_config.fp8_param_gather or ddp_config.reuse_grad_buf_for_mxfp8_param_ag
    overlaps = ddp_config.overlap_grad_reduce or ddp_config.overlap_param_gather
    # A model without experts may lack groups for them.
    replicas = [groups.dp_cp, getattr(groups, "expt_dp", groups.dp_cp)]
    return not (converts or overlaps) and all(group.size() == 1 for group in replicas)


def wrap_chunks(
    chunks: list[MegatronModule],
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    device: torch.device,
) -> list[DistributedDataParallel]:
    """Move the chunks to the device, cast them to fp16 or bf16 if set, and wrap them with DDP."""
    wrapped: list[Any] = [chunk.to(device) for chunk in chunks]
    if config.precision.bf16 or config.precision.fp16:
        placement = context.placement
        stages = [placement.stage_of(context.pp_rank, index) for index in range(len(chunks))]
        wrapped = [
            _In16Bits(transformer_config, chunk, is_last=stage == placement.num_stages - 1)
            for stage, chunk in zip(stages, wrapped, strict=True)
        ]
    trained = (p for chunk in chunks for p in chunk.parameters() if p.requires_grad)
    num_parameters = sum(parameter.numel() for parameter in trained)
    sections = config.optimizer, config.precision, config.fp8
    ddp_config = _ddp_config(*sections, context, num_parameters)
    wrap: Any = LoneReplica if _is_alone(ddp_config, context.pgs) else DistributedDataParallel
    if config.optimizer.shards_gradients:
        from megatron_ext.layers.gradient_shards import ShardedGradients

        size = config.optimizer.bucket_size(num_parameters, context.pgs.dp_cp.size())
        overlap = config.optimizer.overlap_grad_reduce
        wrap = partial(ShardedGradients, bucket_size=size, overlap=overlap)
        if config.optimizer.shards_weights:
            from megatron_ext.layers.weight_shards import ShardedWeights

            equalize = config.training.data_parallel_random_init
            wrap = partial(ShardedWeights, equalize=equalize, bucket_size=size, overlap=overlap)
    ddp = [
        wrap(
            config=transformer_config,
            ddp_config=ddp_config,
            module=chunk,
            # Buckets help overlap only in the first chunk: reductions of later chunks overlap
            # anyway.
            disable_bucketing=index > 0 and not config.optimizer.shards_gradients,
            pg_collection=context.pgs,
        )
        for index, chunk in enumerate(wrapped)
    ]
    if config.training.data_parallel_random_init and not config.optimizer.shards_weights:
        for chunk in ddp:
            chunk.broadcast_params()
    return ddp


def named_parameters(
    chunks: Sequence[DistributedDataParallel],
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return pairs of name and trainable parameter.

    If there are several chunks, a name begins with its chunk, such as "chunk 0: ".
    """
    several = len(chunks) > 1
    return [
        (f"chunk {index}: {name}" if several else name, parameter)
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    ]


def own_elements(parameter: torch.nn.Parameter) -> Tensor:
    """Return the elements of a parameter that this rank keeps between steps.

    They are all, unless weights are sharded over the replicas (see `weight_shards`).
    """
    shard = getattr(parameter, "weight_shard", None)
    return parameter.detach() if shard is None else shard.values
