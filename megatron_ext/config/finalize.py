"""From given values to a configuration that can be run: derived values, and all errors at once."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from typing import Any

from megatron_ext.config.flags import default_of, range_errors
from megatron_ext.config.rules.cuda_graphs import cuda_graph_errors
from megatron_ext.config.rules.fp8 import fp8_errors
from megatron_ext.config.rules.lora import lora_errors
from megatron_ext.config.rules.optimizer import ema_errors, optimizer_errors, resolve_optimizer
from megatron_ext.config.rules.parallel import parallel_errors, resolve_parallel
from megatron_ext.config.rules.pipeline import interleaving_errors
from megatron_ext.config.rules.transformer_engine import (
    found_version,
    needs_torch_layers,
    transformer_engine_errors,
)
from megatron_ext.config.run import RunConfig, TaskFlags
from megatron_ext.errors import ConfigError


def finalize(config: RunConfig, task: TaskFlags, world_size: int, device: str) -> RunConfig:
    """Fill in what follows from other values, and check that all of it can be run.

    Args:
        config: the values that were given.
        task: brings its own sections and rules.
        world_size: ranks that torchrun started; 0 lets ``--nproc-per-node`` decide.
        device: ``"cuda"`` or ``"cpu"``.

    Raises:
        ConfigError: with one sentence for every error.
    """
    given, wrong = _within_ranges(config)
    run = derived(task.resolve(given), world_size, device)
    errors = task.rules(given, run) + _errors(run)
    # What follows from a number that is already refused would be told as an error of its own.
    errors = [
        text
        for text in errors
        if not any(f"{name}`" in text or f"{name} " in text for name in wrong)
    ]
    if wrong or errors:
        raise ConfigError([*wrong.values(), *errors])
    return run


def _within_ranges(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """Return the run with defaults in the place of numbers outside of their flags' ranges.

    With it comes a sentence for each of them, by the flag's name as sentences quote it.
    """
    errors: dict[str, str] = {}

    def within(section: Any) -> Any:
        wrong = range_errors(section)
        errors.update({f"`--{name.replace('_', '-')}": wrong[name] for name in wrong})
        defaults = {name: default_of(section, name) for name in wrong}
        return dataclasses.replace(section, **defaults) if wrong else section

    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    engine = {k: within(v) for k, v in values.items() if dataclasses.is_dataclass(v)}
    own = tuple(within(section) for section in config.sections)
    return dataclasses.replace(config, **engine, sections=own), errors


def derived(given: RunConfig, world_size: int, device: str) -> RunConfig:
    """Return the configuration with what the engine derives from other values, unchecked."""
    planned = given.planning
    world_size = world_size or given.parallel.nproc_per_node * (planned.dry_run_nodes or 1)
    device = "cuda" if planned.dry_run_gpu else device
    run = dataclasses.replace(given, device=device)
    has_te = _has_transformer_engine(run) and not needs_torch_layers(run)
    model = run.model.resolved(has_te=has_te)
    parallel = resolve_parallel(run.parallel, model, world_size)
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
        optimizer=resolve_optimizer(run.optimizer, training, device),
        checkpoint=run.checkpoint.resolved(),
    )


def _has_transformer_engine(run: RunConfig) -> bool:
    """Return whether it is installed, or asked for in a plan for a GPU of another machine."""
    asked = run.model.transformer_impl == "transformer_engine"
    installed = importlib.util.find_spec("transformer_engine") is not None
    return bool(run.planning.dry_run_gpu and asked) or (run.device == "cuda" and installed)


def _errors(run: RunConfig) -> list[str]:
    """Return a sentence for everything that the engine cannot run."""
    has_te = _has_transformer_engine(run)
    version = found_version() if has_te else None
    found = [
        *run.model.errors(),
        *parallel_errors(run.parallel, run.model),
        *run.moe.errors(max(1, run.parallel.expert_model_parallel_size)),
        *lora_errors(run.lora, run.model, run.moe, run.optimizer),
        *lora_errors(run.lora, run.model, run.moe, run.optimizer),
        *run.precision.errors(),
        *fp8_errors(run, may_use_te=not needs_torch_layers(run)),
        *cuda_graph_errors(run),
        *transformer_engine_errors(run, found_version=version),
        *run.training.errors(run.parallel.data_parallel_size),
        *interleaving_errors(run.parallel, run.training),
        *run.loss.errors(per_token=run.training.calculate_per_token_loss, has_te=has_te),
        *optimizer_errors(run.optimizer, run.training),
        *ema_errors(run.ema, run.training),
        *run.checkpoint.errors(evaluates=run.training.evaluates),
        *run.logging.errors(),
        *run.planning.errors(),
        *(text for own in run.sections if hasattr(own, "errors") for text in own.errors(run)),
    ]
    if run.model.transformer_impl == "transformer_engine" and not has_te:
        found.append(
            "`--transformer-impl transformer_engine` needs Transformer Engine and a GPU, and "
            "one of them was not found; use torch or auto."
        )
    stages = run.parallel.pipeline_model_parallel_size
    learned = run.model.position_embedding_type == "learned_absolute"
    if run.model.mtp_num_layers and stages > 1 and learned:
        found.append(
            "`--mtp-num-layers` with more than one pipeline stage does not go with "
            "`--position-embedding-type learned_absolute`, whose table would differ between "
            "the stages; use rope."
        )
    fused = run.model.cross_entropy_loss_fusion and run.model.cross_entropy_fusion_impl
    if run.device == "cuda" and fused == "native" and not run.precision.bf16:
        found.append(
            "`--cross-entropy-loss-fusion` rounds the gradient of every logit to bf16, so it "
            "needs `--bf16`; leave it out."
        )
    if os.environ.get("OMP_NUM_THREADS", "1") == "0":
        found.append("`OMP_NUM_THREADS` (0) must be at least 1.")
    return found
