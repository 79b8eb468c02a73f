"""Rules of the layout: how ranks and layers are divided, and which schedule runs the stages."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from functools import partial

from megatron_ext.config.flags import must_divide
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.parallel import STAGES, V_SHAPED, ParallelConfig
from megatron_ext.config.training import TrainingConfig
from megatron_ext.errors import FlagError, exclusive

CHUNKS = {"no-pipelining": 1, "1f1b": 1, "zb-h1": 1, **dict.fromkeys(V_SHAPED, 2)}
"""Value of ``--pipeline-schedule`` -> chunks on each rank; ``interleaved`` allows 2 or more."""


def mtp_stage(parallel: ParallelConfig) -> int:
    """Return the index of the pipeline stage that holds the multi-token-prediction modules.

    Stages are counted in the order of the layers; with virtual chunks, each chunk is a stage.
    """
    if parallel.pipeline_model_parallel_layout is not None:
        from megatron_ext.config.rules.pipeline_layout import stages_of

        stages = stages_of(parallel.pipeline_model_parallel_layout)
        return next(index for index, stage in enumerate(stages) if "m" in stage)
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    return parallel.pipeline_model_parallel_size * chunks - 1


def _virtual_size(parallel: ParallelConfig, model: ModelConfig) -> int | None:
    """Return the number of virtual chunks on each rank, or None without virtual chunks."""
    size = parallel.pipeline_model_parallel_size
    layout = parallel.pipeline_model_parallel_layout
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    count = parallel.num_virtual_stages_per_pipeline_rank
    if size < 2:
        return None
    if parallel.pipeline_schedule in V_SHAPED:
        count = CHUNKS[parallel.pipeline_schedule]
    elif layout is not None:
        try:
            from megatron_ext.config.rules.pipeline_layout import stages_of

            count = len(stages_of(layout)) // size
        except ValueError:
            return None
    elif count is None and per_chunk:
        count = (model.num_layers or 0) // size // per_chunk
    return count if count is not None and count > 1 else None


def resolve_parallel(
    parallel: ParallelConfig, model: ModelConfig, world_size: int
) -> ParallelConfig:
    """Return a copy with derived sizes and the pipeline schedule filled in.

    Without ``--pipeline-schedule``, the schedule is the one that Megatron-LM would use: 1F1B,
    interleaved if there are virtual chunks, or none for a single stage.
    """
    chunks = _virtual_size(parallel, model)
    stages = parallel.pipeline_model_parallel_size
    tp = parallel.tensor_model_parallel_size
    usual = "no-pipelining" if stages < 2 else "1f1b" if chunks is None else "interleaved"
    replica = max(1, tp * stages * parallel.context_parallel_size)
    return dataclasses.replace(
        parallel,
        sequence_parallel=parallel.sequence_parallel and tp > 1,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_schedule=parallel.pipeline_schedule or usual,
        world_size=world_size,
        data_parallel_size=max(1, world_size // replica),
    )


def rank_errors(
    world_size: int, *, tensor: int, pipeline: int, context: int, expert: int, expert_tensor: int
) -> Iterator[FlagError]:
    """Yield an error for each size below 1, and each product of sizes that does not fit the ranks.

    ``world_size`` must be a multiple of tensor × pipeline × context size and of expert_tensor ×
    expert × pipeline size.
    """
    sizes = {
        "--tensor-model-parallel-size": tensor,
        STAGES: pipeline,
        "--context-parallel-size": context,
        "--expert-model-parallel-size": expert,
        "--expert-tensor-parallel-size": expert_tensor,
        "--world-size": world_size,
    }
    small = {name: value for name, value in sizes.items() if value < 1}
    for name, value in small.items():
        yield FlagError(name, value, "must be at least 1")
    products = [
        ("--tensor-model-parallel-size", STAGES, "--context-parallel-size"),
        ("--expert-tensor-parallel-size", "--expert-model-parallel-size", STAGES),
    ]
    reported = set()
    for names in products:
        shown = [name for name in names if sizes[name] != 1]
        size = math.prod(sizes[name] for name in shown)
        if not small and world_size % size and size not in reported:
            # Equal products are reported once, by the first of their names.
            reported.add(size)
            flags = " × ".join(f"`{name}`" for name in shown)
            numbers = " × ".join(str(sizes[name]) for name in shown)
            product = f"{numbers} = {size}" if len(shown) > 1 else numbers
            yield FlagError(
                "The number of ranks",
                world_size,
                f"must be divisible by {flags} ({product})",
                f"start {-(-world_size // size) * size} ranks, or lower one of the sizes",
            )


def parallel_errors(parallel: ParallelConfig, model: ModelConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in parallel sizes, the division of layers, or the schedule."""
    tp = parallel.tensor_model_parallel_size
    cp = parallel.context_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    ep = parallel.expert_model_parallel_size
    stages = parallel.pipeline_model_parallel_size
    sizes = {"tensor": tp, "pipeline": stages, "context": cp, "expert": ep, "expert_tensor": etp}
    errors = list(rank_errors(parallel.world_size, **sizes))
    yield from errors
    if not errors and parallel.use_tp_pp_dp_mapping and stages > 1 and tp * cp != etp * ep:
        # megatron-core cannot number such replicas after the stages.
        yield FlagError(
            "--use-tp-pp-dp-mapping",
            None,
            "with pipeline stages needs as many replicas of the experts as of the other layers, "
            f"but tensor × context parallel size is {tp} × {cp} and expert-tensor × expert "
            f"parallel size is {etp} × {ep}, also in a model without experts",
            "leave the flag out, or make the products equal",
        )
    yield from _split_errors(parallel, model)
    if parallel.pipeline_model_parallel_layout is not None:
        from megatron_ext.config.rules.pipeline_layout import layout_errors

        yield from layout_errors(parallel, model, parallel.pipeline_model_parallel_layout)
    yield from _schedule_errors(parallel)
    yield from _zero_bubble_errors(parallel, model)
    early = parallel.ep_overlap_early_attn_memory_release
    if parallel.overlap_moe_expert_parallel_comm or parallel.delay_wgrad_compute or early:
        from megatron_ext.config.rules.pairs import pair_errors

        yield from pair_errors(parallel)
    yield from share_errors(parallel, model)
    layers = 1 if model.blocks_dealt_by_cost else model.num_layers
    if len(parallel.cp_comm_type) not in (1, layers):
        yield FlagError(
            "--cp-comm-type",
            None,
            f"has {len(parallel.cp_comm_type)} values, but must have one for all layers or one "
            f"for each of the {layers}",
        )
    # Without torchrun, a run on GPUs starts it and hands its own flags on to the ranks.
    started = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    is_other = parallel.nproc_per_node not in (1, started)
    if started and is_other and "TORCHELASTIC_RUN_ID" in os.environ:
        yield FlagError(
            "--nproc-per-node",
            parallel.nproc_per_node,
            f"must be the number of ranks that torchrun has started on this machine ({started})",
            "leave it out, or give it to torchrun",
        )


def share_errors(parallel: ParallelConfig, model: ModelConfig) -> Iterator[FlagError]:
    """Yield an error for each number of heads or tokens that the ranks cannot divide equally."""
    tp = max(1, parallel.tensor_model_parallel_size)
    cp = max(1, parallel.context_parallel_size)
    tensor = "--tensor-model-parallel-size"
    yield from must_divide("--num-attention-heads", model.num_attention_heads, tensor, tp)
    yield from must_divide("--num-query-groups", model.num_query_groups, tensor, tp)
    length = model.seq_length or 0
    if cp > 1 and length % (2 * cp):
        yield FlagError(
            "--seq-length",
            length,
            f"must be divisible by 2 × `--context-parallel-size` (2 × {cp} = {2 * cp})",
            f"use {-(-length // (2 * cp)) * 2 * cp}",
        )
    if parallel.sequence_parallel and length % (tp * cp):
        yield FlagError(
            "--seq-length",
            length,
            f"must be divisible by `{tensor}` × `--context-parallel-size` ({tp} × {cp} = "
            f"{tp * cp}) with `--sequence-parallel`",
            f"use {-(-length // (tp * cp)) * tp * cp}",
        )


def _split_errors(parallel: ParallelConfig, model: ModelConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the division of layers into stages and chunks."""
    layers = model.num_layers or 0
    stages = parallel.pipeline_model_parallel_size
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    chunks_per_rank = parallel.num_virtual_stages_per_pipeline_rank
    if per_chunk is not None and chunks_per_rank is not None:
        yield exclusive(
            "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
        )
    name = "--num-virtual-stages-per-pipeline-rank"
    if per_chunk is not None:
        name = "--num-layers-per-virtual-pipeline-stage"
    if stages < 2 and (per_chunk is not None or (chunks_per_rank or 1) > 1):
        yield FlagError(name, None, f"needs `{STAGES}` ({stages}) of at least 2", "use 2")
    uneven = parallel.decoder_first_pipeline_num_layers or parallel.decoder_last_pipeline_num_layers
    whole = parallel.pipeline_model_parallel_layout is None and not model.blocks_dealt_by_cost
    if stages < 1 or uneven or not whole:
        return
    extra = parallel.counted_ends
    units = layers + extra
    factor = "chunks of a stage"
    per_stage = 1
    if parallel.pipeline_schedule in V_SHAPED:
        per_stage = CHUNKS[parallel.pipeline_schedule]
    elif stages > 1 and (per_chunk or chunks_per_rank):
        factor = f"`{name}`"
        per_stage = per_chunk or chunks_per_rank or 1
    chunks = stages * per_stage
    if chunks and units % chunks:
        yield FlagError(
            "--num-layers",
            layers,
            f"must be divisible by `{STAGES}` × {factor} ({stages} × {per_stage} = {chunks})",
            f"use {-(-units // chunks) * chunks - extra}",
        )


def _schedule_errors(parallel: ParallelConfig) -> Iterator[FlagError]:
    """Yield an error for each number of stages or chunks that the schedule cannot have."""
    schedule = (parallel.pipeline_schedule or "").removeprefix("core-")
    stages = parallel.pipeline_model_parallel_size
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    refused = partial(FlagError, f"--pipeline-schedule {parallel.pipeline_schedule}", None)
    if schedule == "no-pipelining" and stages > 1:
        yield refused(f"is for one stage, but `{STAGES}` is {stages}", "use 1f1b")
    if schedule in ("interleaved", *V_SHAPED) and stages < 2:
        yield refused(f"needs `{STAGES}` ({stages}) of at least 2", "use no-pipelining")
    elif schedule == "interleaved" and chunks < 2:
        yield refused("needs virtual chunks", "give `--num-virtual-stages-per-pipeline-rank 2`")
    elif schedule in CHUNKS and chunks != CHUNKS[schedule]:
        yield refused(
            f"has {CHUNKS[schedule]} chunk(s) on each rank, but the flags of virtual stages ask "
            f"for {chunks}",
            "drop them",
        )
    group = parallel.microbatch_group_size_per_vp_stage
    if group is not None and group < stages:
        yield FlagError(
            "--microbatch-group-size-per-virtual-pipeline-stage",
            group,
            f"must be at least `{STAGES}` ({stages})",
            f"use {stages}",
        )


def interleaving_errors(parallel: ParallelConfig, training: TrainingConfig) -> Iterator[FlagError]:
    """Yield an error if a step's micro-batches do not fit the schedule ``core-interleaved``.

    The schedule runs micro-batches in groups
    (``--microbatch-group-size-per-virtual-pipeline-stage``). A step needs at least one full group,
    and in a last group that is not full at least as many micro-batches as pipeline ranks.
    """
    replicas = parallel.data_parallel_size
    if parallel.pipeline_schedule != "core-interleaved" or any(training.errors(replicas)):
        return
    stages = parallel.pipeline_model_parallel_size
    group = parallel.microbatch_group_size_per_vp_stage or stages
    counts = training.microbatch_counts(replicas)
    wrong = [count for count in counts if count < group or 0 < count % group < stages]
    if wrong:
        yield FlagError(
            "--pipeline-schedule core-interleaved",
            None,
            f"needs steps whose micro-batches divide into groups of {group} with none or at least "
            f"{stages} left over, but one has {wrong[0]}",
            "use interleaved, or another `--global-batch-size`",
        )


def _zero_bubble_errors(parallel: ParallelConfig, model: ModelConfig) -> Iterator[FlagError]:
    """Yield an error for each option that does not go with split passes or stages in a V."""
    schedule = parallel.pipeline_schedule or ""
    if parallel.defers_weight_gradients and model.transformer_impl == "transformer_engine":
        delays = parallel.delay_wgrad_compute
        yield FlagError(
            "--delay-wgrad-compute" if delays else f"--pipeline-schedule {schedule}",
            None,
            "defers the weight gradients of our own layers, which `--transformer-impl "
            "transformer_engine` replaces",
            "use `--transformer-impl torch`, or " + ("leave it out" if delays else "1f1b"),
        )
    same_rank = {
        "tied embeddings": not model.untie_embeddings_and_output_weights,
        "`--mtp-num-layers`": model.mtp_num_layers,
        "`--pipeline-model-parallel-layout`": parallel.pipeline_model_parallel_layout,
        "an uneven split of the layers": (
            parallel.decoder_first_pipeline_num_layers
            or parallel.decoder_last_pipeline_num_layers
            or parallel.counted_ends
        ),
    }
    for name, given in same_rank.items():
        if schedule in V_SHAPED and given:
            yield FlagError(
                f"--pipeline-schedule {schedule}",
                None,
                f"keeps the first and the last stage on one rank, which does not go with {name}",
                "use zb-h1" if schedule == "zb-v" else "use interleaved",
            )
