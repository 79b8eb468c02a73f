"""Freezes the parts of a model that ``--freeze`` and ``--freeze-all-but`` name.

A frozen parameter needs no gradient, so that it is in no gradient buffer and no optimizer, and in
no average of weights. Below the first trained parameter autograd records nothing, and nothing is
computed backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_ext.config.frozen_parts import FrozenParts, in_model, part_errors
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers.lora import require_gradient


def freeze_parts(chunks: Sequence[torch.nn.Module], config: RunConfig) -> None:
    """Freeze parts of this rank's model chunks; all ranks call this together.

    The bias of the scores of a frozen router stays as it is, too.

    Raises:
        ConfigError: a flag names a part that no rank has, or nothing is trained.
    """
    parts = FrozenParts(config.freeze)
    names: list[str] = []
    for chunk in chunks:
        frozen = set()
        for own_name, name, parameter in named_in_model(chunk):
            names.append(name)
            if parts.freeze(name):
                parameter.requires_grad_(False)
                frozen.add(own_name)
        for own_name, module in chunk.named_modules():
            if isinstance(module, TopKRouter) and f"{own_name}.weight" in frozen:
                module.register_forward_hook(_forget_counts)
        _begin_gradients(chunk, config)
    check_found(parts, names, config)


def check_found(parts: FrozenParts, names: Sequence[str], config: RunConfig) -> None:
    """Raise a ConfigError if a part is on no rank, or nothing is trained; all ranks call this.

    ``names`` are the names in the whole model of this rank's parameters.
    """
    found = torch.tensor(parts.found(names), device=torch.cuda.current_device()).int()
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    tied = not config.model.untie_embeddings_and_output_weights
    errors = list(part_errors(config.freeze, found.bool().tolist(), names, tied=tied))
    if errors:
        raise ConfigError(errors)


def named_in_model(chunk: torch.nn.Module) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Yield each parameter with its name in the chunk, and before it in the whole model.

    A layer with a ``layer_number``, counted from 1 along the model, has its index in the chunk
    replaced by it.
    """
    numbers: dict[str, int] = {}
    for name, module in chunk.named_modules():
        number = getattr(module, "layer_number", None)
        if name.rpartition(".")[2].isdigit() and number is not None:
            numbers[name] = number - 1
    for name, parameter in chunk.named_parameters():
        layer = ".".join(name.split(".")[:3])
        tied = getattr(parameter, "shared_embedding", False)
        yield name, in_model(name, numbers.get(layer), tied=tied), parameter


def _forget_counts(router: Any, _inputs: Any, _output: Any) -> None:
    """Forget how many tokens each expert got: without counts, the bias of the scores stays."""
    if router.enable_expert_bias:
        router.local_tokens_per_expert.zero_()


def _begin_gradients(chunk: torch.nn.Module, config: RunConfig) -> None:
    """Let autograd begin before the first layer with trained parameters, not within it.

    A layer that is recomputed, or whose weight gradients wait, needs an input with a gradient. If
    whole layers are recomputed, several of them may be so together, and the first layer of the
    chunk gets such an input. Chunks of later stages receive it anyway.
    """
    embedding: Any = getattr(chunk, "embedding", None)
    if embedding is None or not _trains(chunk):
        return
    whole = config.model.recompute_granularity == "full"
    layers = list(getattr(getattr(chunk, "decoder", None), "layers", ()))
    trained = [index for index, layer in enumerate(layers) if _trains(layer)]
    first = 0 if whole else min(trained, default=len(layers))
    before = layers[first - 1] if first else embedding
    before.register_forward_hook(require_gradient)


def _trains(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
