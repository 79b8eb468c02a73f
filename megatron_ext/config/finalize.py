"""Completes a configuration with derived values and checks it, reporting all errors at once."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from packaging.specifiers import SpecifierSet

from megatron_ext.config.flags import changed_fields, default_of, range_errors
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.output import PlanningConfig
from megatron_ext.config.precision import TE_IMPL
from megatron_ext.config.rules import optimizer as optimizer_rules
from megatron_ext.config.rules import parallel as parallel_rules
from megatron_ext.config.rules.model import model_errors
from megatron_ext.config.run import RunConfig, TaskFlags, engine_sections
from megatron_ext.errors import ConfigError, FlagError, exclusive, flags_of

_version_of = lru_cache(importlib.metadata.version)
TESTED_CORES = ">=0.16.1,<0.20"
"""The releases of megatron-core that the tests run with, as in pyproject.toml."""


def finalize(
    config: RunConfig,
    task: TaskFlags,
    world_size: int,
    device: str,
    refusals: Callable[[RunConfig, RunConfig], Iterable[str]] = lambda decided, run: (),
    checked: RunConfig | None = None,
) -> RunConfig:
    """Fill in the values that follow from given ones, and check that the run is possible.

    Args:
        config: the values that the user gave; defaults elsewhere.
        task: the task, which fills in its own values first and adds its own checks.
        world_size: number of ranks; 0 computes it from ``--nproc-per-node`` and
            ``--dry-run-nodes``.
        device: "cpu" or "cuda"; a dry run for a GPU replaces it by "cuda".
        refusals: a check of the caller's. It takes the configuration as user and task set it and as
            the engine completed it, and returns a sentence for each flag that it refuses.
        checked: a configuration whose numbers are all within their ranges. Sections that it shares
            with ``config`` are not searched for such errors again.

    Raises:
        ConfigError: with a sentence for each error.
    """
    given, wrong = _within_ranges(config, checked)
    decided = task.resolve(given)
    run = derived(decided, world_size, device)
    errors: list[str] = list(wrong.values())
    for error in (*task.rules(given, run), *refusals(decided, run), *_errors(run)):
        # A consequence of a number that is already refused would be reported as another error.
        if flags_of(error).isdisjoint(wrong):
            errors.append(error)
    if errors:
        raise ConfigError(errors)
    return run


def errors_of_ranges(config: RunConfig) -> list[FlagError]:
    """Return one error for each number that is outside the range of its flag."""
    return list(_within_ranges(config)[1].values())


def _within_ranges(
    config: RunConfig, checked: RunConfig | None = None
) -> tuple[RunConfig, dict[str, FlagError]]:
    """Reset each number outside its flag's range to the default.

    Return the corrected configuration, and the errors by flag, such as ``--num-layers``. Sections
    of ``checked`` have no such numbers.
    """
    errors: dict[str, FlagError] = {}
    right = set() if checked is None else {id(x) for x in checked.by_name().values()}

    def within(section: Any) -> Any:
        if id(section) in right:
            return section
        wrong = range_errors(section)
        errors.update({f"--{name.replace('_', '-')}": wrong[name] for name in wrong})
        defaults = {name: default_of(section, name) for name in wrong}
        return dataclasses.replace(section, **defaults) if wrong else section

    engine = {name: within(getattr(config, name)) for name in engine_sections()}
    own = tuple(within(section) for section in config.sections)
    return dataclasses.replace(config, **engine, sections=own), errors


def derived(given: RunConfig, world_size: int, device: str) -> RunConfig:
    """Return a copy with the values that the engine derives filled in; check nothing.

    The task must have filled in the values that it derives itself.
    """
    planned = given.planning
    world_size = world_size or given.parallel.nproc_per_node * (planned.dry_run_nodes or 1)
    device = "cuda" if planned.dry_run_gpu else device
    run = dataclasses.replace(given, device=device)
    if device == "cpu":
        run = dataclasses.replace(run, model=run.model.on_cpu())
    has_te = _has_transformer_engine(run.model, device, planned)
    model = run.model.resolved(has_te=has_te and not _needs_torch_layers(run))
    for section in run.layer_sections:
        model = section.resolved_model(model)
    parallel = parallel_rules.resolve_parallel(run.parallel, model, world_size)
    training = run.training.resolved(parallel.data_parallel_size)
    return dataclasses.replace(
        run,
        model=model,
        parallel=parallel,
        lora=run.lora.resolved(),
        precision=run.precision.resolved(device),
        fp8=run.fp8.resolved(te=model.transformer_impl == "transformer_engine"),
        ema=run.ema.resolved(),
        training=training,
        loss=run.loss.resolved(
            fused=model.cross_entropy_loss_fusion and device == "cuda",
            fusion_impl=model.cross_entropy_fusion_impl,
        ),
        optimizer=optimizer_rules.resolve_optimizer(run.optimizer, training, device),
        checkpoint=run.checkpoint.resolved(may_restart=run.fault_tolerance.max_restarts > 0),
    )


def _has_transformer_engine(model: ModelConfig, device: str, planning: PlanningConfig) -> bool:
    """Return whether to assume that Transformer Engine is available.

    True on a GPU if the package is installed. A dry run for a GPU need not have the package if
    ``--transformer-impl transformer_engine`` is given.
    """
    is_chosen = model.transformer_impl == "transformer_engine"
    installed = importlib.util.find_spec("transformer_engine") is not None
    return bool(planning.dry_run_gpu and is_chosen) or (device == "cuda" and installed)


def _needs_torch_layers(run: RunConfig) -> bool:
    """Return whether a run's flags make ``--transformer-impl auto`` choose the torch layers."""
    from megatron_ext.config.rules.transformer_engine import needs_torch_layers

    return needs_torch_layers(run)


def _core_errors() -> Iterator[FlagError]:
    """Yield an error if the installed megatron-core is not among the tested releases."""
    installed = _version_of("megatron-core")
    if not _tested(installed):
        yield FlagError(
            "megatron-core",
            installed,
            f"must be a release that was tested ({TESTED_CORES})",
            f"run `pip install 'megatron-core{TESTED_CORES}'`, or give `--allow-untested-core`",
        )


@lru_cache
def _tested(version: str) -> bool:
    """Return whether a release of megatron-core is among those that the tests run with."""
    return SpecifierSet(TESTED_CORES).contains(version, prereleases=True)


def _precision_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags of FP8, of CUDA graphs and of host memory."""
    if changed_fields(run.fp8):
        from megatron_ext.config.rules.fp8 import fp8_errors

        yield from fp8_errors(run, may_use_te=not _needs_torch_layers(run))
    if changed_fields(run.cuda_graphs):
        from megatron_ext.config.rules.cuda_graphs import cuda_graph_errors

        yield from cuda_graph_errors(run)
    if changed_fields(run.offload):
        from megatron_ext.config.rules.offload import offload_errors

        yield from offload_errors(run)


def _names_transformer_engine(run: RunConfig) -> bool:
    """Return whether a flag or an environment variable is about Transformer Engine."""
    given = run.model.transformer_impl == TE_IMPL or bool(changed_fields(run.engine))
    return given or any(name.startswith("NVTE_") for name in os.environ)


def _state_beside_steps(run: RunConfig) -> str | None:
    """Return the given flag under which no step can be repeated; None if there is none.

    A step then changes state that cannot be restored: the random states of CUDA graphs, or the
    scales of Transformer Engine's delayed FP8 scaling.
    """
    if run.cuda_graphs.cuda_graph_impl != "none":
        return f"--cuda-graph-impl {run.cuda_graphs.cuda_graph_impl}"
    delayed = run.fp8.fp8_format is not None and run.fp8.fp8_recipe == "delayed"
    if delayed and run.model.transformer_impl == TE_IMPL:
        return f"--fp8-recipe delayed --transformer-impl {TE_IMPL}"
    return None


def _errors(run: RunConfig) -> Iterator[str]:
    """Yield a sentence for each fault that keeps the engine from running a configuration."""
    has_te = _has_transformer_engine(run.model, run.device, run.planning)
    if not run.parallel.allow_untested_core:
        yield from _core_errors()
    yield from model_errors(run)
    yield from parallel_rules.parallel_errors(run.parallel, run.model)
    if changed_fields(run.lora):
        from megatron_ext.config.rules.lora import lora_errors

        yield from lora_errors(run.lora, run.model, run.optimizer)
    if run.freeze.is_used:
        from megatron_ext.config.frozen_parts import freeze_errors

        yield from freeze_errors(run.freeze, adapters=run.lora.lora_rank is not None)
    if run.precision.bf16 and run.precision.fp16:
        yield exclusive("--bf16", "--fp16")
    yield from _precision_errors(run)
    if run.device != "cpu" or _names_transformer_engine(run):
        from megatron_ext.config.rules.transformer_engine import transformer_engine_errors

        yield from transformer_engine_errors(run, has_te=has_te)
    yield from run.training.errors(run.parallel.data_parallel_size)
    yield from parallel_rules.interleaving_errors(run.parallel, run.training)
    yield from run.loss.errors(per_token=run.training.calculate_per_token_loss, has_te=has_te)
    yield from optimizer_rules.optimizer_errors(run.optimizer, run.training)
    if run.optimizer.data_parallel_sharding_strategy != "no_shard":
        from megatron_ext.config.rules.sharding import sharding_errors

        yield from sharding_errors(run)
    if {"exp_avg_dtype", "exp_avg_sq_dtype", "use_precision_aware_optimizer"} & {
        *changed_fields(run.optimizer)
    }:
        from megatron_ext.config.rules.sharding import moment_errors

        yield from moment_errors(run.optimizer, run.model)
    yield from optimizer_rules.ema_errors(run.ema, run.training)
    yield from run.checkpoint.errors(evaluates=run.training.evaluates)
    whole = not (run.checkpoint.no_save_optim or run.checkpoint.no_save_rng)
    kept = _state_beside_steps(run)
    yield from run.fault_tolerance.errors(run.checkpoint.save, whole=whole, kept=kept)
    yield from run.logging.errors(run.checkpoint.save)
    yield from run.planning.errors()
    for own in run.sections:
        if hasattr(own, "errors"):
            yield from own.errors(run)
    if run.model.transformer_impl == "transformer_engine" and not has_te:
        yield FlagError(
            "--transformer-impl transformer_engine",
            None,
            "needs Transformer Engine, which was not found",
            "install it, or use torch or auto",
        )
    fused = run.model.cross_entropy_loss_fusion and run.model.cross_entropy_fusion_impl
    if run.device == "cuda" and fused == "native" and not run.precision.bf16:
        yield FlagError(
            "--cross-entropy-loss-fusion",
            None,
            "rounds the gradient of every logit to bf16, so it needs `--bf16`",
            "leave it out",
        )
    if os.environ.get("OMP_NUM_THREADS", "1") == "0":
        yield "`OMP_NUM_THREADS` (0) must be at least 1."
