"""Decides what a run that loads a checkpoint takes from it, and which flags may differ.

Shapes and names of weights tell most differences between two models (`compatibility`). For what
they do not tell, each flag says whether it may differ (`IfChanged`), so that none changes what a
model computes without a word.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from megatron_ext.checkpoint.compatibility import check_optimizer, same_model_ranks
from megatron_ext.checkpoint.files import checksum_fault, read_manifest
from megatron_ext.checkpoint.stored import RUN_CONFIG, CheckpointRef, find, read_json, refusal
from megatron_ext.checkpoint.unpickling import common_state_of
from megatron_ext.config.checkpoint import CheckpointConfig
from megatron_ext.config.flags import IfChanged, if_changed
from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.grid import Layout


def check_resume(config: RunConfig) -> None:
    """Compare a run with the checkpoint that it loads, as far as that needs no model.

    The ranks compare all of it again, and weights too. A rank may call this by itself.

    Raises:
        CheckpointError: flags of the model, or optimizer state, do not go with the run's.
    """
    found = find(config.checkpoint)
    if found is None:
        return
    path = found.path
    files = read_manifest(path) or {}
    small = [name for name in (COMMON_STATE_FNAME, RUN_CONFIG) if name in files]
    fault = checksum_fault(path, files, small)
    if fault is not None:
        raise CheckpointError(refusal(found.root, found.iteration, fault))
    common = common_state_of(path)
    arguments = common.get("args", Namespace())
    trains = not config.training.skip_train
    goes_on = trains and loads_optimizer(found, config.checkpoint, arguments, [])
    check_changes(
        path,
        config,
        read_json(path / RUN_CONFIG),
        weights_only=found.weights_only,
        with_optimizer=goes_on,
    )
    if goes_on:
        check_optimizer(
            path,
            dict(common.get("content_metadata") or {}),
            arguments,
            Layout.from_config(config.parallel),
            distributed=config.optimizer.use_distributed_optimizer,
            has_main_weights=config.precision.bf16 or config.precision.fp16,
        )


def loads_optimizer(
    found: CheckpointRef, config: CheckpointConfig, arguments: Namespace, notes: list[str]
) -> bool:
    """Return whether the run asks for optimizer state and the checkpoint holds some.

    Args:
        config: the run that loads.
        arguments: flags of the run that saved.
        notes: gets a sentence where the optimizer starts anew.
    """
    if found.weights_only or config.no_load_optim:
        return False
    if getattr(arguments, "no_save_optim", False):
        notes.append(f"{found.path} holds no optimizer, so it starts anew.")
        return False
    return True


def loads_random(
    found: CheckpointRef,
    config: CheckpointConfig,
    arguments: Namespace,
    layout: Layout,
    notes: list[str],
) -> bool:
    """Return whether the run asks for random states and the checkpoint's fit its layout.

    The states are kept for each model-parallel rank. Arguments are those of `loads_optimizer`.
    """
    if found.weights_only or config.no_load_rng:
        return False
    if getattr(arguments, "no_save_rng", False):
        notes.append(f"{found.path} holds no random states, so they start from `--seed`.")
        return False
    same = same_model_ranks(arguments, layout)
    apart = getattr(arguments, "data_parallel_random_init", False)
    if layout.expert_model_parallel_size > 1 or apart:
        same = same and getattr(arguments, "data_parallel_size", None) == layout.data_parallel_size
    if not same:
        notes.append("The layout has changed, so the random states start from `--seed`.")
    return same


@dataclass(frozen=True)
class Change:
    """A flag whose value is not the checkpoint's."""

    name: str
    value: Any
    before: Any
    answer: IfChanged

    def __str__(self) -> str:
        dashed = self.name.replace("_", "-")
        if isinstance(self.value, bool):
            return f"`--{'' if self.value else 'no-'}{dashed}`"
        return f"`--{dashed}` ({_shown(self.value)}, before {_shown(self.before)})"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def changes(config: RunConfig, stored: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the flags of a run that differ from stored ones, but for those that may.

    Args:
        config: the run that loads.
        stored: sections of the run that saved; a flag that they lack is not compared.
    """
    values_of = config.to_dict()
    for section, kind in _sections(config):
        values, before = values_of[section], stored.get(section)
        if not isinstance(before, Mapping):
            continue
        if section == "lora" and None in (values["lora_rank"], before.get("lora_rank")):
            # The names of the weights tell whether there are adapters.
            continue
        for name, answer in if_changed(kind).items():
            if name.startswith("rotary") and values["position_embedding_type"] != "rope":
                continue
            if answer != "allow" and name in before and values[name] != before[name]:
                yield Change(name, values[name], before[name], answer)


def _sections(config: RunConfig) -> Iterator[tuple[str, type]]:
    """Yield name and class of each section of a run, the task's own included."""
    for name, section in config.by_name().items():
        yield name, type(section)


def check_changes(
    path: Path,
    config: RunConfig,
    stored: Mapping[str, Any],
    *,
    weights_only: bool,
    with_optimizer: bool,
) -> list[str]:
    """Compare the flags of a run with those of the checkpoint that it loads.

    Args:
        path: the checkpoint.
        config: the run that loads.
        stored: sections of the run that saved.
        weights_only: the run starts from the weights, and does not go on.
        with_optimizer: the run goes on with the optimizer state of the checkpoint.

    Returns:
        Sentences about what differs and is said.

    Raises:
        CheckpointError: the model would compute something else with the weights.
    """
    found = sorted(changes(config, stored), key=lambda change: change.name)
    never, not_to_resume, keep, say = (
        [x for x in found if x.answer == answer]
        for answer in ("refuse", "refuse_to_resume", "keep", "say")
    )
    refused = never if weights_only else [*never, *not_to_resume]
    if refused:
        anew = "" if never else ", or `--finetune` to start from its weights with yours"
        raise CheckpointError(
            f"{path} holds a model with other flags than {_listed(refused)}, which would compute "
            f"something else with its weights; give the flags that it was saved with{anew}."
        )
    optimizer = config.optimizer
    if with_optimizer:
        _check_optimizer(path, optimizer, stored.get("optimizer", {}))
    kept = [x for x in keep if with_optimizer and x.name.startswith(f"{optimizer.optimizer}_")]
    said = not_to_resume if weights_only else say
    notes = []
    if kept:
        notes.append(
            f"The optimizer goes on with the settings of {path}, not with {_listed(kept)}; "
            "`--no-load-optim` starts it anew with yours."
        )
    if said:
        notes.append(
            f"Flags that differ from those of {path}, and count from here: {_listed(said)}."
        )
    return notes


def _check_optimizer(path: Path, config: OptimizerConfig, stored: Mapping[str, Any]) -> None:
    """Refuse state of another kind of optimizer, or of other groups of parameters."""
    kind, rate, momentum = config.optimizer, config.decoupled_lr, config.sgd_momentum
    before = stored.get("sgd_momentum", momentum)
    differs = {
        "optimizer": kind != stored.get("optimizer", kind),
        "decoupled_lr": (rate is None) != (stored.get("decoupled_lr", rate) is None),
        "sgd_momentum": kind == "sgd" and bool(momentum) != bool(before),
    }
    for name in (name for name, differ in differs.items() if differ):
        raise CheckpointError(
            f"`--{name.replace('_', '-')}` ({getattr(config, name)}) does not go with the "
            f"optimizer state of {path}, saved with {stored[name]}; use that, or give "
            "`--no-load-optim`."
        )


def _listed(found: list[Change]) -> str:
    return ", ".join(map(str, found))
