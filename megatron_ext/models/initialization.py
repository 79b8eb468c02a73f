"""The same initial weights on every layout.

megatron-core draws each rank's part of a weight from that rank's generator, so its weights depend
on the layout. Here a parameter is only marked while the model is built (`Marked`); then each full
tensor is drawn in float32 on the CPU from a generator that its name and the seed decide, and the
rank keeps its part. ``--use-cpu-initialization`` keeps Megatron-LM's own way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.models.shards import Shard, shards_of

Initialize = Callable[[Tensor], Any]


class Marked:
    """An initialization method that marks a parameter with the method, to be applied by name.

    Args:
        method: fills a tensor in place, as ``torch.nn.init`` does.
    """

    def __init__(self, method: Initialize) -> None:
        self.method = method

    def __call__(self, tensor: Tensor) -> Any:
        """Mark a parameter; fill any other tensor at once."""
        if not isinstance(tensor, torch.nn.Parameter):
            return self.method(tensor)
        tensor.initialize = self.method  # type: ignore[attr-defined]
        return tensor


def mark_methods(config: Any) -> None:
    """Wrap the methods of a TransformerConfig, each of them once."""
    for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
        method = getattr(config, name)
        if not isinstance(method, Marked):
            setattr(config, name, Marked(method))


def seed_of(name: str, seed: int) -> int:
    """What seeds the generator of a tensor, 63 bits."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@torch.no_grad()
def initialize_by_name(chunks: Sequence[torch.nn.Module], seed: int) -> None:
    """Fill the parameters of this rank's model chunks; one full tensor exists at a time.

    Args:
        chunks: without wrappers, on any device and in any dtype.
        seed: ``--seed``.
    """
    for chunk in chunks:
        shards = list(shards_of(chunk))
        marked = {_memory(p): p for p in chunk.parameters() if hasattr(p, "initialize")}
        _reset_plain_modules(chunk, shards, seed)
        drawn: tuple[str, Tensor] | None = None
        for shard in shards:
            parameter = marked.get(_memory(shard.tensor))
            if parameter is None:
                continue
            if drawn is None or drawn[0] != shard.name:
                drawn = None
                drawn = shard.name, _draw(shard, _method(parameter, chunk), seed)
            shard.tensor.copy_(shard.cut(drawn[1]))
        for parameter in marked.values():
            del parameter.initialize


def _memory(tensor: Tensor) -> int:
    """What a parameter and its parts have in common."""
    return tensor.untyped_storage().data_ptr()


def _method(parameter: Any, chunk: Any) -> Initialize:
    """A copy of the embedding, made for another stage, is filled as the embedding is."""
    if getattr(parameter, "shared_embedding", False):
        method: Initialize = chunk.config.embedding_init_method.method
        return method
    own: Initialize = parameter.initialize
    return own


def _draw(shard: Shard, method: Initialize, seed: int) -> Tensor:
    full = torch.empty(shard.full_shape, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(shard.name, seed))
        method(full)
    return full


def _reset_plain_modules(chunk: torch.nn.Module, shards: Sequence[Shard], seed: int) -> None:
    """Draw again what a user's own torch modules drew for themselves, seeded by name."""
    names = {shard.tensor.data_ptr(): shard.name for shard in shards}
    for module in chunk.modules():
        reset = getattr(module, "reset_parameters", None)
        own = list(module.parameters(recurse=False))
        if not callable(reset) or not own or any(_is_ours(p) for p in own):
            continue
        name = names.get(own[0].data_ptr())
        if name is not None:
            with torch.random.fork_rng():
                torch.manual_seed(seed_of(name, seed))
                reset()


def _is_ours(parameter: Tensor) -> bool:
    """Marked, or cut over tensor-parallel ranks, where a reset would draw each part alone."""
    cut = getattr(parameter, "tensor_model_parallel", False)
    return hasattr(parameter, "initialize") or bool(cut)
