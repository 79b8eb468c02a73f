"""The lines that a run prints at its start, and the complete configuration for its save folder."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.core.optimizer import MegatronOptimizer

from megatron_ext.config.flags import changed_fields, spelling_of
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.precision import TE_IMPL, Fp8Config
from megatron_ext.config.run import RunConfig
from megatron_ext.layers.sdpa import flash_3_in_use
from megatron_ext.train.rank import threads_of_rank

STARTED = "> starting"
"""The beginning of the first line of a run that has passed all checks."""
_WIDTH = 100
_PACKAGE = __name__.split(".")[0]


def start_lines(config: RunConfig, given: Collection[str]) -> list[str]:
    """Return lines that describe a checked run: sizes, layout and non-default flags.

    ``given`` holds the names of the configuration fields that the command line sets.
    """
    model = config.model
    sizes = {
        "layers": model.num_layers,
        "hidden size": model.hidden_size,
        "feed-forward": model.ffn_hidden_size,
        "heads": model.num_attention_heads,
        "sequence length": model.seq_length,
        "vocabulary": model.padded_vocab_size,
    }
    named = ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)
    parallel = config.parallel
    replicas = config.parallel.data_parallel_size
    layout = (
        f"{parallel.world_size} ranks ({config.device}): tensor "
        f"{parallel.tensor_model_parallel_size} × pipeline {parallel.pipeline_model_parallel_size} "
        f"× context {parallel.context_parallel_size} × data {replicas}"
    )
    if parallel.expert_model_parallel_size > 1:
        layout += f", experts over {parallel.expert_model_parallel_size}"
    if parallel.pipeline_model_parallel_size > 1:
        layout += f", schedule {parallel.pipeline_schedule}"
    training = config.training
    micro, batch = config.training.batch_sizes
    length = f"{training.train_iters} iterations"
    if training.train_samples is not None:
        length = f"{training.train_samples} samples"
    number = batch // (micro * replicas)
    micro_sizes = sorted(set(training.micro_batch_range or (micro,)))
    samples = " to ".join(str(number * size * replicas) for size in micro_sizes)
    step = (
        f"{samples} samples in a step: {number} micro-batches × micro-batch size "
        f"{' to '.join(map(str, micro_sizes))} × data-parallel size {replicas}"
    )
    lines = [f"{STARTED} {layout}", f"> {length}; {step}", f"> model: {named}"]
    on_command_line = dict[str, list[str]]()
    elsewhere = dict[str, list[str]]()
    sections = config.by_name() | {"checkpoint": config.checkpoint.as_given()}
    for name, section in sections.items():
        for field in changed_fields(section):
            kind = on_command_line if field in given else elsewhere
            kind.setdefault(name, []).append(_as_flag(section, field))
    lines += _listed("given on the command line:", on_command_line)
    lines += _listed("derived, or from a file, a checkpoint or the task:", elsewhere)
    where = "`--print-config` shows the whole configuration"
    if config.checkpoint.save is not None:
        from megatron_ext.train.reporting.files import CONFIGURATION_FILE

        path = Path(config.checkpoint.save) / CONFIGURATION_FILE
        where = f"the whole configuration is in {path}"
    return [*lines, f"> {where}", *_busy(config)]


def _busy(config: RunConfig) -> list[str]:
    """Return a line if other programs take processors that a rank's own threads would need.

    OpenMP's threads wait for each other in a loop, so that one of them without a processor stops
    all; a step then takes up to 40 times as long.
    """
    cores = os.cpu_count() or 1
    threads = threads_of_rank(config.parallel.nproc_per_node)
    if config.device != "cpu" or threads < 2 or "OMP_NUM_THREADS" in os.environ:
        return []
    load = os.getloadavg()[0]
    if load < cores:
        return []
    return [
        f"> this machine is busy (load {load:.1f} on {cores} processors), and a rank's {threads} "
        "threads wait for each other; `OMP_NUM_THREADS=1` before the command may be much faster"
    ]


def _as_flag(section: Any, field: str) -> str:
    """Return the flag that sets a field of a section, followed by the field's present value."""
    value = getattr(section, field)
    spelling = spelling_of(section, field)
    if isinstance(value, bool):
        return spelling
    words = value if isinstance(value, (list, tuple)) else [value]
    return " ".join([spelling, *(shlex.quote(str(word)) for word in words)])


def _listed(title: str, flags: dict[str, list[str]]) -> list[str]:
    """Return a title line, and lines with the flags of each section; [] if there are no flags.

    ``flags`` holds the flags of each section, by the section's name.
    """
    wrapper = textwrap.TextWrapper(_WIDTH, initial_indent=">   ", subsequent_indent=">     ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    lines = [f"> {title}"] if flags else []
    for name, entries in flags.items():
        # Keep a flag and its value on one line.
        text = " ".join(entry.replace(" ", "\0") for entry in entries)
        lines += [line.replace("\0", " ") for line in wrapper.wrap(f"{name}: {text}")]
    return lines


def implementation_line(
    model: ModelConfig, fp8: Fp8Config, optimizer: MegatronOptimizer | None
) -> str:
    """Return the line with the layers, attention, optimizer and fp8 recipe of a run."""
    kernels = ", FlashAttention 3" if flash_3_in_use() else ""
    layers = f"torch {importlib.metadata.version('torch')}; attention: torch SDPA{kernels}"
    if model.transformer_impl == TE_IMPL:
        from megatron_ext.config.rules.te_version import found_version

        layers = (
            f"Transformer Engine {found_version() or 'of an unknown version'}; attention: "
            f"Transformer Engine ({model.attention_backend})"
        )
    products = "none"
    if fp8.fp8_format is not None:
        weights = ", weights kept in 8 bits" if fp8.fp8_param_gather else ""
        products = f"{fp8.fp8_format} by the {fp8.fp8_recipe} recipe{weights}"
    return f"layers: {layers}; optimizer: {_optimizer(optimizer)}; fp8: {products}"


def parameters_line(total: int, trained: int, largest: int) -> str:
    """Return a line with three numbers: all parameters, trained ones, and the most on one rank."""
    share = "" if trained == total else f", {trained:,} of them trained"
    return f"parameters: {total:,}{share}; at most {largest:,} on one rank"


def _optimizer(optimizer: MegatronOptimizer | None) -> str:
    """Return the optimizer's package and class, such as "torch AdamW" or "Triton AdamW".

    Muon updates only matrices and AdamW the other weights, so both are named: "Muon and torch
    AdamW". For a class defined in this package, return its first base class from another package.
    """
    if optimizer is None:
        return "none"
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = next((part.optimizer for part in parts if part.optimizer is not None), None)
    if inner is None:
        return "none on this rank"
    muon = "Muon and " if hasattr(inner, "matrices") else ""
    if getattr(inner, "make_kernel", None) is not None:
        return f"{muon}Triton AdamW"
    roots = {kind: kind.__module__.split(".")[0] for kind in type(inner).__mro__}
    kind, root = next((kind, root) for kind, root in roots.items() if root != _PACKAGE)
    fused = " fused" if any(group.get("fused") for group in inner.param_groups) else ""
    return f"{muon}{root} {kind.__name__}{fused}"
