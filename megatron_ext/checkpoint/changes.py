"""Compares the flags of a run with those of the checkpoint that it loads.

Shapes and names of weights tell most differences between two models (`compatibility`). For what
they do not tell, each flag says whether it may differ (`IfChanged`), so that none changes what a
model computes without a word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.config.flags import IfChanged, if_changed
from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.config.sections import section_name
from megatron_ext.errors import CheckpointError


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
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield field.name, type(value)
    for own in config.own:
        yield section_name(type(own)), type(own)


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
