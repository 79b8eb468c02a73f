"""Rules of CUDA graphs: the runs whose layers cannot be recorded."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron_ext.config.acceleration import WARMUP_STEPS
from megatron_ext.config.run import RunConfig

SCHEDULES = ("no-pipelining", "1f1b", "interleaved")


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def cuda_graph_errors(run: RunConfig) -> list[str]:
    """Return a sentence for everything that cannot be run."""
    impl, steps = run.cuda_graphs.cuda_graph_impl, run.cuda_graphs.cuda_graph_warmup_steps
    if impl == "none":
        if steps == WARMUP_STEPS:
            return []
        return [
            f"`--cuda-graph-warmup-steps` ({steps}) needs `--cuda-graph-impl local`; give it too."
        ]
    if impl == "transformer_engine":
        return [
            "`--cuda-graph-impl` (transformer_engine), graphs by Transformer Engine, is not "
            "supported; use local with `--transformer-impl torch`."
        ]
    found = [f"`--cuda-graph-impl local` {text}." for text in _obstacles(run)]
    if run.device == "cuda":
        found += _environment_errors(os.environ)
    return found


def _obstacles(run: RunConfig) -> Iterator[str]:
    """Yield the reasons why graphs cannot stand for the layers of a run."""
    if run.model.blocks_dealt_by_cost:
        yield "does not go with models whose steps differ in shape; leave it out"
        return
    if run.training.skip_train:
        yield "has no effect with `--skip-train`, since evaluation uses none; leave it out"
    yield from _obstacles_in_layers(run)
    yield from _obstacles_in_random_numbers(run)
    schedule = run.parallel.pipeline_schedule
    if schedule is not None and schedule not in SCHEDULES:
        yield (
            f"does not go with `--pipeline-schedule` ({schedule}), which is megatron-core's own or "
            "puts weight gradients off; use 1f1b or interleaved"
        )
    sizes = run.parallel.tensor_model_parallel_size, run.parallel.context_parallel_size
    if run.parallel.distributed_backend == "gloo" and max(sizes) > 1:
        yield (
            "does not go with `--distributed-backend gloo`, whose communication within a layer "
            "cannot be recorded; use nccl"
        )
    level = run.training.empty_unused_memory_level
    if level:
        yield (
            f"keeps the memory that `--empty-unused-memory-level` ({level}) would give back; leave "
            "one of them out"
        )


def _obstacles_in_layers(run: RunConfig) -> Iterator[str]:
    model = run.model
    if model.transformer_impl == "transformer_engine":
        yield "records torch's layers, not Transformer Engine's; give `--transformer-impl torch`"
    if run.moe.num_experts is not None:
        yield "does not go with `--num-experts`, whose experts get any number of tokens"
    if run.lora.lora_rank is not None:
        yield "does not go with `--lora-rank`; leave one of them out"
    if run.fp8.fp8_format is not None:
        yield "does not go with `--fp8-format` yet; leave one of them out"
    if model.recompute_granularity is not None:
        yield (
            f"does not go with `--recompute-granularity` ({model.recompute_granularity}), since a "
            "graph's activations stay in its memory anyway; leave one of them out"
        )


def _obstacles_in_random_numbers(run: RunConfig) -> Iterator[str]:
    model = run.model
    if model.deterministic_dropout:
        yield "does not go with `--deterministic-dropout`, whose masks the host seeds; leave it out"
    elif model.attention_dropout > 0 and not run.parallel.sequence_parallel:
        yield (
            f"needs `--attention-dropout` ({model.attention_dropout:g}) to be 0 without "
            "`--sequence-parallel`, since the random state is changed within a layer for it; give 0"
        )


def _environment_errors(environ: os._Environ[str] | dict[str, str]) -> list[str]:
    """NCCL registers a graph's buffers, which segments that grow do not survive."""
    grows = [name for name in ALLOCATOR if "expandable_segments:True" in environ.get(name, "")]
    if not grows or environ.get("NCCL_GRAPH_REGISTER") == "0":
        return []
    return [
        f"`--cuda-graph-impl local` with `{grows[0]}` (expandable_segments:True) needs "
        "`NCCL_GRAPH_REGISTER=0` in the environment; set it."
    ]
