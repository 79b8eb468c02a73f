"""Rules of the layout: whether the ranks can be shared out, and what they can share."""

from __future__ import annotations

import dataclasses
import os

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.rules.pipeline import default_schedule, stage_errors, virtual_size


def rank_errors(
    world_size: int, *, tensor: int, pipeline: int, context: int, expert: int, expert_tensor: int
) -> list[str]:
    """Return a sentence for everything that keeps a number of ranks from being laid out."""
    sizes = {
        "--tensor-model-parallel-size": tensor,
        "--pipeline-model-parallel-size": pipeline,
        "--context-parallel-size": context,
        "--expert-model-parallel-size": expert,
        "--expert-tensor-parallel-size": expert_tensor,
        "--world-size": world_size,
    }
    found = [
        f"`{name}` ({value}) must be at least 1." for name, value in sizes.items() if value < 1
    ]
    if found:
        return found
    products = {
        "tensor × pipeline × context": tensor * pipeline * context,
        "expert-tensor × expert × pipeline": expert_tensor * expert * pipeline,
    }
    refused: set[int] = set()
    for what, size in products.items():
        if world_size % size and size not in refused:
            refused.add(size)
            found.append(
                f"The number of ranks ({world_size}) must be divisible by {what} parallel size "
                f"({size}); start {-(-world_size // size) * size} ranks, or lower one of the "
                "sizes."
            )
    return found


def resolve_parallel(
    parallel: ParallelConfig, model: ModelConfig, world_size: int
) -> ParallelConfig:
    """Return the section with the derived sizes filled in."""
    chunks = virtual_size(parallel, model)
    return dataclasses.replace(
        parallel,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_schedule=parallel.pipeline_schedule
        or default_schedule(parallel.pipeline_model_parallel_size, chunks),
        world_size=world_size,
        data_parallel_size=max(
            1,
            world_size
            // max(
                1,
                parallel.tensor_model_parallel_size
                * parallel.pipeline_model_parallel_size
                * parallel.context_parallel_size,
            ),
        ),
    )


def parallel_errors(parallel: ParallelConfig, model: ModelConfig) -> list[str]:
    """Return a sentence for every layout that cannot be run."""
    expert_tensor = parallel.expert_tensor_parallel_size
    found = rank_errors(
        parallel.world_size,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        expert_tensor=expert_tensor or parallel.tensor_model_parallel_size,
    )
    if not found:
        found.extend(_mapping_errors(parallel))
    found.extend(stage_errors(parallel, model))
    found.extend(_share_errors(parallel, model))
    layers = 1 if model.blocks_dealt_by_cost else model.num_layers
    if len(parallel.cp_comm_type) not in (1, layers):
        found.append(
            f"`--cp-comm-type` has {len(parallel.cp_comm_type)} values, but must have one for all "
            f"layers or one for each of the {layers}."
        )
    started = int(os.environ.get("WORLD_SIZE", "0"))
    if started and parallel.nproc_per_node > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        found.append(
            f"`--nproc-per-node` ({parallel.nproc_per_node}) is for a run without torchrun, which "
            f"has started {started} ranks; give it to torchrun instead."
        )
    return found


def _mapping_errors(parallel: ParallelConfig) -> list[str]:
    """Return a sentence for replicas that megatron-core cannot number after the stages."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    ep = parallel.expert_model_parallel_size
    staged = parallel.use_tp_pp_dp_mapping and parallel.pipeline_model_parallel_size > 1
    if not staged or tp * cp == etp * ep:
        return []
    return [
        "`--use-tp-pp-dp-mapping` with pipeline stages needs as many replicas of the experts "
        f"as of the other layers, but tensor × context parallel size is {tp} × {cp} and "
        f"expert-tensor × expert parallel size is {etp} × {ep}, also in a model without "
        "experts; leave the flag out, or make the products equal."
    ]


def _share_errors(parallel: ParallelConfig, model: ModelConfig) -> list[str]:
    """Return a sentence for heads and sequences that the ranks cannot share."""
    found = []
    tp, cp = max(1, parallel.tensor_model_parallel_size), max(1, parallel.context_parallel_size)
    for name, heads in (
        ("--num-attention-heads", model.num_attention_heads),
        ("--num-query-groups", model.num_query_groups),
    ):
        if heads and heads % tp:
            found.append(
                f"`{name}` ({heads}) must be divisible by `--tensor-model-parallel-size` "
                f"({tp}); use {-(-heads // tp) * tp}."
            )
    length = model.seq_length or 0
    if cp > 1 and length % (2 * cp):
        found.append(
            f"`--seq-length` ({length}) must be divisible by 2 × `--context-parallel-size` "
            f"(2 × {cp} = {2 * cp}); use {-(-length // (2 * cp)) * 2 * cp}."
        )
    if parallel.sequence_parallel and length % (tp * cp):
        found.append(
            f"`--seq-length` ({length}) must be divisible by tensor × context parallel size "
            f"({tp} × {cp} = {tp * cp}) with `--sequence-parallel`; use "
            f"{-(-length // (tp * cp)) * tp * cp}."
        )
    return found
