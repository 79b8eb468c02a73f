"""Rules of what data-parallel ranks share, and of the dtypes of the state that they share.

Only runs with ``--data-parallel-sharding-strategy``, or with flags of moments, import this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.config.parallel import SPLIT_SCHEDULES
from megatron_ext.config.precision import TE_IMPL
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError


def sharding_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each reason against the given ``--data-parallel-sharding-strategy``."""
    given = run.optimizer.data_parallel_sharding_strategy
    refused = partial(FlagError, "--data-parallel-sharding-strategy", given)
    if given != "no_shard" and not run.optimizer.use_distributed_optimizer:
        yield refused("needs `--use-distributed-optimizer`, which shares its state", "give both")
    if not run.optimizer.shards_gradients:
        return
    schedule = run.parallel.pipeline_schedule or ""
    if run.parallel.delay_wgrad_compute:
        yield refused(
            "does not go with `--delay-wgrad-compute`, which adds weight gradients to buckets that "
            "sharding frees",
            "leave one out",
        )
    graphs = run.cuda_graphs.cuda_graph_impl
    if schedule in SPLIT_SCHEDULES:
        yield refused(
            f"does not go with `--pipeline-schedule` ({schedule}), which puts weight gradients "
            "off, so that all buckets would stay in memory",
            "use 1f1b or interleaved",
        )
    if schedule.startswith("core-"):
        yield refused(
            f"does not go with `--pipeline-schedule` ({schedule}), which does not say when a "
            "micro-batch is over",
            "leave the latter out",
        )
    if graphs != "none":
        yield refused(
            f"does not go with `--cuda-graph-impl` ({graphs}), whose kernels write gradients to "
            "memory that stays",
            "leave the latter out",
        )
    if run.model.transformer_impl == TE_IMPL and run.model.gradient_accumulation_fusion:
        yield refused(
            "does not go with Transformer Engine's products, which add to gradients that have no "
            "memory yet",
            "use `--transformer-impl torch`, or `--no-gradient-accumulation-fusion`",
        )
    if run.optimizer.shards_weights:
        yield from _weight_sharding_errors(run, refused)
    if run.fp8.fp8_param_gather:
        yield refused(
            "does not go with `--fp8-param-gather`, whose buckets are joined to those of 16-bit "
            "weights",
            "leave the latter out",
        )


def _weight_sharding_errors(
    run: RunConfig, refused: Callable[[str, str], FlagError]
) -> Iterator[FlagError]:
    """Yield an error for each reason against weights that are sharded over data-parallel ranks."""
    if run.lora.lora_rank is not None:
        yield refused(
            "does not go with `--lora-rank`: frozen weights would stay whole on every rank",
            "use optim_grads",
        )
    if run.fp8.fp8_format is not None:
        yield refused(
            f"does not go with `--fp8-format` ({run.fp8.fp8_format}): weights are cast to 8 bits "
            "once a step, and these copies would stay whole on every rank",
            "use optim_grads",
        )
    if run.model.transformer_impl == TE_IMPL:
        yield refused(
            "does not go with `--transformer-impl transformer_engine`, whose layers keep copies of "
            "their weights",
            "use torch",
        )


def moment_errors(optimizer: OptimizerConfig, model: ModelConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the dtypes of Adam's moments."""
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        given = getattr(optimizer, name)
        said = f"--{name.replace('_', '-')}"
        if given != "fp32" and not optimizer.use_precision_aware_optimizer:
            yield FlagError(said, given, "needs `--use-precision-aware-optimizer`", "give it too")
    if not optimizer.use_precision_aware_optimizer:
        return
    if not optimizer.use_distributed_optimizer:
        yield FlagError(
            "--use-precision-aware-optimizer",
            None,
            "needs `--use-distributed-optimizer`, which saves the moments in float32",
            "give both",
        )
    in_bf16 = "bf16" in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
    if in_bf16 and model.transformer_impl == TE_IMPL:
        yield FlagError(
            "--use-precision-aware-optimizer",
            None,
            "with moments in bf16 is done by the optimizer of the torch layers",
            "use `--transformer-impl torch`",
        )
