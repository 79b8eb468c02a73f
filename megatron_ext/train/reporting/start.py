"""The lines that a run prints at its start, and the whole configuration for its save folder."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from megatron.core.optimizer import MegatronOptimizer

from megatron_ext.config.acceleration import TE_IMPL
from megatron_ext.config.flags import changed_fields, spelling_of
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.precision import Fp8Config
from megatron_ext.config.rules.transformer_engine import found_version
from megatron_ext.config.run import RunConfig
from megatron_ext.config.training import TrainingConfig

CONFIGURATION_FILE = "config.yaml"
STARTED = "> starting"
"""Begins the first line of a run that has passed all checks."""
_WIDTH = 100
_PACKAGE = __name__.split(".")[0]


def start_lines(config: RunConfig, given: Collection[str]) -> list[str]:
    """Describe a run that has passed all checks: sizes, layout, and what is not a default.

    Args:
        config: the resolved configuration.
        given: fields of the flags on the command line.
    """
    lines = [
        f"{STARTED} {_layout(config.parallel, config.device)}",
        f"> {_batch(config.training, config.parallel.data_parallel_size)}",
        f"> model: {_sizes(config.model)}",
    ]
    on_command_line, elsewhere = dict[str, list[str]](), dict[str, list[str]]()
    for name, section in config.by_name().items():
        for field in changed_fields(section):
            kind = on_command_line if field in given else elsewhere
            kind.setdefault(name, []).append(_as_flag(section, field))
    lines += _listed("given on the command line:", on_command_line)
    lines += _listed("derived, or from a file, a checkpoint or the task:", elsewhere)
    where = "`--print-config` shows the whole configuration"
    if config.checkpoint.save is not None:
        path = Path(config.checkpoint.save) / CONFIGURATION_FILE
        where = f"the whole configuration is in {path}"
    return [*lines, f"> {where}"]


def _layout(parallel: ParallelConfig, device: str) -> str:
    sizes = {
        "tensor": parallel.tensor_model_parallel_size,
        "pipeline": parallel.pipeline_model_parallel_size,
        "context": parallel.context_parallel_size,
        "data": parallel.data_parallel_size,
    }
    factors = " × ".join(f"{name} {size}" for name, size in sizes.items())
    text = f"{parallel.world_size} ranks ({device}): {factors}"
    if parallel.expert_model_parallel_size > 1:
        text += f", experts over {parallel.expert_model_parallel_size}"
    if parallel.pipeline_model_parallel_size > 1:
        text += f", schedule {parallel.pipeline_schedule}"
    return text


def _batch(training: TrainingConfig, replicas: int) -> str:
    micro_batch_size, global_batch_size = training.batch_sizes
    count = global_batch_size // (micro_batch_size * replicas)
    length = f"{training.train_iters} iterations"
    if training.train_samples is not None:
        length = f"{training.train_samples} samples"
    return (
        f"{length}; {global_batch_size} samples in a step: {count} micro-batches × micro-batch "
        f"size {micro_batch_size} × data-parallel size {replicas}"
    )


def _sizes(model: ModelConfig) -> str:
    sizes = {
        "layers": model.num_layers,
        "hidden size": model.hidden_size,
        "feed-forward": model.ffn_hidden_size,
        "heads": model.num_attention_heads,
        "sequence length": model.seq_length,
        "vocabulary": model.padded_vocab_size,
    }
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)


def _as_flag(section: Any, field: str) -> str:
    """Return the words that give a field its value on a command line."""
    value, spelling = getattr(section, field), spelling_of(section, field)
    if isinstance(value, bool):
        return spelling
    words = value if isinstance(value, (list, tuple)) else [value]
    return " ".join([spelling, *(shlex.quote(str(word)) for word in words)])


def _listed(title: str, flags: dict[str, list[str]]) -> list[str]:
    """Return the flags under a title, a paragraph for each section."""
    lines = [f"> {title}"] if flags else []
    for name, entries in flags.items():
        # A flag and its value stay on one line.
        text = " ".join(entry.replace(" ", "\0") for entry in entries)
        wrapped = textwrap.wrap(
            f"{name}: {text}",
            _WIDTH,
            initial_indent=">   ",
            subsequent_indent=">     ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [line.replace("\0", " ") for line in wrapped]
    return lines


def as_yaml(config: RunConfig) -> str:
    """Return the whole configuration, which ``--config`` reads back."""
    return yaml.safe_dump(config.to_dict(), sort_keys=False)


def write_configuration(config: RunConfig, folder: Path) -> None:
    """Write the whole configuration to a save folder, where it replaces an earlier one.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{CONFIGURATION_FILE}.tmp"
    temporary.write_text(as_yaml(config), encoding="utf-8")
    os.replace(temporary, folder / CONFIGURATION_FILE)


def implementation_line(config: RunConfig, optimizer: MegatronOptimizer | None) -> str:
    """Name the implementations that a run uses; the optimizer is the one that was really built."""
    return "; ".join(
        (
            *_layers(config.model),
            f"optimizer: {_optimizer(optimizer)}",
            f"fp8: {_fp8(config.fp8)}",
        )
    )


def parameters_line(total: int, trained: int, largest: int) -> str:
    """Tell the number of parameters; a parameter with copies counts once."""
    share = "" if trained == total else f", {trained:,} of them trained"
    return f"parameters: {total:,}{share}; at most {largest:,} on one rank"


def _layers(model: ModelConfig) -> tuple[str, str]:
    if model.transformer_impl != TE_IMPL:
        return f"layers: torch {importlib.metadata.version('torch')}", "attention: torch SDPA"
    return (
        f"layers: Transformer Engine {found_version() or 'of an unknown version'}",
        f"attention: Transformer Engine ({model.attention_backend})",
    )


def _optimizer(optimizer: MegatronOptimizer | None) -> str:
    """Name the class that computes, and its package; a subclass of ours adds no arithmetic."""
    if optimizer is None:
        return "none"
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = next((part.optimizer for part in parts if part.optimizer is not None), None)
    if inner is None:
        return "none on this rank"
    roots = {kind: kind.__module__.split(".")[0] for kind in type(inner).__mro__}
    kind, root = next((kind, root) for kind, root in roots.items() if root != _PACKAGE)
    fused = " fused" if any(group.get("fused") for group in inner.param_groups) else ""
    return f"{root} {kind.__name__}{fused}"


def _fp8(fp8: Fp8Config) -> str:
    if fp8.fp8_format is None:
        return "none"
    weights = ", weights kept in 8 bits" if fp8.fp8_param_gather else ""
    return f"{fp8.fp8_format} by the {fp8.fp8_recipe} recipe{weights}"
