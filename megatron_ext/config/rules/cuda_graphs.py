"""Checks the flags of CUDA graphs, and that nothing in the run excludes graphs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.precision import WARMUP_STEPS, Fp8Config
from megatron_ext.config.run import RunConfig
from megatron_ext.config.training import TrainingConfig
from megatron_ext.errors import FlagError

RECORDED_SCHEDULES = ("no-pipelining", "1f1b", "interleaved")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_no_graphs = partial(FlagError, "--cuda-graph-impl local", None)


def cuda_graph_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in CUDA graphs' flags, and each flag that graphs exclude."""
    impl = run.cuda_graphs.cuda_graph_impl
    steps = run.cuda_graphs.cuda_graph_warmup_steps
    if impl == "none" and steps != WARMUP_STEPS:
        yield FlagError(
            "--cuda-graph-warmup-steps", steps, "needs `--cuda-graph-impl local`", "give it too"
        )
    if impl == "transformer_engine":
        yield FlagError(
            "`--cuda-graph-impl` (transformer_engine), graphs by Transformer Engine,",
            None,
            "is not supported",
            "use local with `--transformer-impl torch`",
        )
    if impl != "local":
        return
    if run.model.blocks_dealt_by_cost:
        yield _no_graphs("does not go with models whose steps differ in shape", "leave it out")
    else:
        yield from _errors_in_layers(run.model, run.lora, run.fp8, run.training)
        if run.freeze.is_used:
            yield _no_graphs("does not go with parts that `--freeze` freezes", "leave one out")
        yield from _errors_between_layers(run.model, run.parallel, run.training)
    # NCCL registers a graph's buffers, which segments that grow do not survive.
    grows = [name for name in ALLOCATOR if "expandable_segments:True" in os.environ.get(name, "")]
    if run.device == "cuda" and grows and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        yield _no_graphs(
            f"with `{grows[0]}` (expandable_segments:True) needs `NCCL_GRAPH_REGISTER=0` in the "
            "environment",
            "set it",
        )


def _errors_in_layers(
    model: ModelConfig, lora: LoraConfig, fp8: Fp8Config, training: TrainingConfig
) -> Iterator[FlagError]:
    """Yield an error for each feature of the layers or of the run that CUDA graphs exclude."""
    if training.skip_train:
        yield _no_graphs(
            "has no effect with `--skip-train`, since evaluation uses none", "leave it out"
        )
    if model.transformer_impl == "transformer_engine":
        yield _no_graphs(
            "records torch's layers, not Transformer Engine's", "give `--transformer-impl torch`"
        )
    if lora.lora_rank is not None:
        yield _no_graphs("does not go with `--lora-rank`", "leave one of them out")
    if fp8.fp8_format is not None:
        yield _no_graphs("does not go with `--fp8-format` yet", "leave one of them out")
    if model.recompute_granularity is not None:
        yield _no_graphs(
            f"does not go with `--recompute-granularity` ({model.recompute_granularity}), since a "
            "graph's activations stay in its memory anyway",
            "leave one of them out",
        )


def _errors_between_layers(
    model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig
) -> Iterator[FlagError]:
    """Yield an error for each setting outside the layers that CUDA graphs exclude.

    Such settings concern dropout, the pipeline schedule, communication, and the release of memory.
    """
    if model.deterministic_dropout:
        yield _no_graphs(
            "does not go with `--deterministic-dropout`, whose masks the host seeds",
            "leave it out",
        )
    elif model.attention_dropout > 0 and not parallel.sequence_parallel:
        yield _no_graphs(
            f"needs `--attention-dropout` ({model.attention_dropout:g}) to be 0 without "
            "`--sequence-parallel`, since the random state is changed within a layer for it",
            "give 0",
        )
    if parallel.pipeline_schedule not in (None, *RECORDED_SCHEDULES):
        yield _no_graphs(
            f"does not go with `--pipeline-schedule` ({parallel.pipeline_schedule}), which is "
            "megatron-core's own or puts weight gradients off",
            "use 1f1b or interleaved",
        )
    sizes = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if parallel.distributed_backend == "gloo" and max(sizes) > 1:
        yield _no_graphs(
            "does not go with `--distributed-backend gloo`, whose communication within a layer "
            "cannot be recorded",
            "use nccl",
        )
    level = training.empty_unused_memory_level
    if level:
        yield _no_graphs(
            f"keeps the memory that `--empty-unused-memory-level` ({level}) would give back",
            "leave one of them out",
        )
