"""Marks the weights that ``--freeze`` and ``--freeze-all-but`` freeze in the cost of a run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from megatron_ext.config.frozen_parts import FrozenParts, in_model, part_errors
from megatron_ext.config.optimizer import FreezeConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError, FlagError
from megatron_ext.planning.network import Flops
from megatron_ext.planning.task_cost import TaskCost
from megatron_ext.planning.weights import Weight, is_linear

_PLACE = re.compile(r"^decoder\.layers\.(\d+)\.")


def marked(
    freeze: FreezeConfig, weights: Iterable[Weight], layers: Sequence[int] = ()
) -> list[Weight]:
    """Return the weights of a stage; mark those that the flags freeze.

    ``layers`` are the numbers, in the model, of the layers that the stage counts from 0.
    """
    parts = FrozenParts(freeze)
    return [
        dataclasses.replace(x, frozen=True) if parts.freeze(_in_model(x, layers)) else x
        for x in weights
    ]


def _in_model(weight: Weight, layers: Sequence[int]) -> str:
    place = _PLACE.match(weight.name)
    number = layers[int(place[1])] if place and layers else None
    return in_model(weight.name, number, tied=weight.shared)


def trained_share(weights: Iterable[Weight]) -> float:
    """Return which share of the elements in linear layers is trained; 1 without such layers."""
    linear = [weight for weight in weights if is_linear(weight.name)]
    total = sum(weight.numel for weight in linear)
    return sum(x.numel for x in linear if not x.frozen) / total if total else 1.0


def without_frozen(flops: Flops, share: float) -> Flops:
    """Return operations in which only this share of the weight gradients is computed."""
    return dataclasses.replace(
        flops, weights=flops.weights * share, fp8_weights=flops.fp8_weights * share
    )


def check_parts(config: RunConfig, cost: TaskCost) -> None:
    """Raise a ConfigError if a flag names a part that the task's networks lack.

    The message is that of the ranks (`layers.frozen`), before any of them has started.
    """
    parts = FrozenParts(config.freeze)
    for case in list(cost.cases(config))[:1]:
        network = case.network
        names = {
            _in_model(weight, stage.layers): None
            for stage in network.stages()
            for weight in network.parameters(stage)
        }
        tied = not config.model.untie_embeddings_and_output_weights
        errors = list(part_errors(config.freeze, parts.found(names), names, tied=tied))
        rate = config.optimizer.decoupled_lr
        ends = [x for x in names if x.startswith(("embedding.", "output_layer."))]
        if rate is not None and all(map(parts.freeze, ends)):
            errors.append(
                FlagError(
                    "--decoupled-lr",
                    rate,
                    "is for the embedding and the output layer, which are frozen",
                    "leave it out",
                )
            )
        if errors:
            raise ConfigError(errors)
