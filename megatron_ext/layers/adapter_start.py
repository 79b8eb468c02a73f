"""Starts of adapters other than a kaiming-uniform A: drawn ones, and those that follow from W.

=============  ==============================================================  ====================
start          A and B                                                         W afterwards
=============  ==============================================================  ====================
gaussian       A normal with deviation 1 / r, B = 0                            as before
orthogonal     both drawn, so that ``B A = 0`` [1]                             as before
pissa          ``scale * B A`` is W's part of rank r with the largest          ``W - scale * B0 A0``
               singular values (PiSSA, arXiv:2404.02948)
=============  ==============================================================  ====================

The last one subtracts the start ``B0 A0`` of the adapter. The weight itself stays as it was loaded:
the adapter keeps A0 and B0 (`Adapter.removed`) and subtracts their term. So checkpoints may still
refer to the published weights, nothing is rounded, and ``[A | A0], [B | -B0]`` is a plain adapter
of the published weights.

[1] https://datta0.github.io/posts/rethink-lora-init, as in peft
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config.optimizer import PRINCIPAL, LoraConfig
from megatron_ext.layers.dora import MagnitudeAdapter
from megatron_ext.layers.initialization import generator_of, memory_key, shards_of
from megatron_ext.layers.lora import Adapter, adapted_layers, attach_adapters, draw_by_name
from megatron_ext.layers.quantized import weight_of
from megatron_ext.parallel.context import ParallelContext


def attach_variants(chunks: Sequence[torch.nn.Module], config: LoraConfig, seed: int) -> None:
    """Attach adapters of the kind, and with the start, that the flags ask for.

    What follows from the weights is NaN until `start_adapters`, or until it is loaded.
    """
    kind = MagnitudeAdapter if config.lora_use_dora else Adapter
    attach_adapters(chunks, config, seed, kind)
    for chunk in chunks:
        _draw_start(chunk, config, seed)


@torch.no_grad()
def _draw_start(chunk: torch.nn.Module, config: LoraConfig, seed: int) -> None:
    """Draw A and B of a chunk's adapters as ``--lora-init`` says, or fill them with NaN.

    Those with NaN wait for `start_adapters`.
    """
    adapters = [adapter for _, adapter in adapted_layers(chunk)]
    rank = config.lora_rank or 0
    if config.lora_init == "gaussian":
        normal = partial(torch.nn.init.normal_, std=1 / rank)
        draw_by_name(chunk, [adapter.a for adapter in adapters], normal, seed)
    elif config.lora_init == "orthogonal":
        _draw_orthogonal(chunk, adapters, rank, seed)
    for adapter in adapters if config.is_principal else ():
        assert adapter.removed is not None
        for matrix in (adapter.a, adapter.b, adapter.removed.a, adapter.removed.b):
            matrix.fill_(torch.nan)


def _draw_orthogonal(
    chunk: torch.nn.Module, adapters: Sequence[Adapter], rank: int, seed: int
) -> None:
    """Draw A from the odd rows of an orthogonal matrix, and B from its even rows."""
    side = {memory_key(x.a): "a" for x in adapters} | {memory_key(x.b): "b" for x in adapters}
    half = rank // 2
    for shard in shards_of(chunk):
        kind = side.get(memory_key(shard.tensor))
        if kind is None:
            continue
        with generator_of(shard.name.replace(f".lora.{kind}", ".lora"), seed):
            rows = torch.linalg.qr(torch.randn(rank, rank))[0]
        height, width = shard.full_shape
        with generator_of(shard.name, seed):
            if kind == "b":
                full = torch.randn(height, half) @ rows[1::2] / 10
            else:
                drawn = torch.randn(height // rank, width, half) @ rows[0::2] / 10
                full = drawn.transpose(1, 2).flatten(0, 1)
        shard.tensor.copy_(shard.cut(full))


@torch.no_grad()
def start_adapters(
    chunks: Sequence[torch.nn.Module], config: LoraConfig, context: ParallelContext, seed: int
) -> bool:
    """Set adapters that follow from the weights, unless they were loaded; return whether any was.

    All ranks that share the chunks' weights call this together, when the weights are there.

    Args:
        chunks: model chunks without wrappers.
    """
    groups = context.pgs
    started = False
    for chunk in chunks:
        for layer, adapter in adapted_layers(chunk):
            if adapter.removed is not None and bool(adapter.removed.a.isnan().any()):
                _start_principal(layer, adapter, config, seed)
                started = True
            if isinstance(adapter, MagnitudeAdapter) and bool(adapter.magnitude.isnan().any()):
                adapter.start_from(layer)
                started = True
            # Replicas on another kind of machine may have computed other digits.
            replicas = groups.expt_dp if getattr(layer, "is_expert", False) else groups.dp_cp
            for parameter in adapter.parameters() if started and replicas.size() > 1 else ():
                torch.distributed.broadcast(parameter.detach(), group=replicas, group_src=0)
    return started


def _start_principal(layer: Any, adapter: Adapter, config: LoraConfig, seed: int) -> None:
    """Start A and B from the layer's weight, and keep a copy of both to subtract."""
    weight = _gathered(adapter, weight_of(layer).float(), dim=1 if adapter.is_row else 0)
    rank = adapter.b.size(1)
    count = len(adapter.a) // rank
    b = weight.new_zeros(len(weight), rank)
    a = weight.new_zeros(len(adapter.a), weight.size(1))
    owner = torch.zeros(len(weight), dtype=torch.long, device=weight.device)
    if adapter.owner is not None:
        owner = _gathered(adapter, adapter.owner.argmax(dim=1), dim=0)
    for index in range(count):
        rows = owner == index
        left, right = _factors(weight[rows], rank, adapter.scale, config, seed)
        # A weight narrower than the rank has no more vectors.
        b[rows, : left.size(1)] = left
        a[index * rank :][: len(right)] = right
    assert adapter.removed is not None
    for part in (adapter, adapter.removed):
        part.a.copy_(_own(adapter, a, "a"))
        part.b.copy_(_own(adapter, b, "b"))


def _factors(
    weight: Tensor, rank: int, scale: float, config: LoraConfig, seed: int
) -> tuple[Tensor, Tensor]:
    """Return B ``[out, r]`` and A ``[r, in]`` with the largest singular values of a weight.

    A vector's largest element in A is positive, so that all layouts start alike.
    """
    match = PRINCIPAL.fullmatch(config.lora_init)
    assert match is not None
    if match["iterations"] is None:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        with generator_of(config.lora_init, seed):
            left, values, right = torch.svd_lowrank(weight, rank, niter=int(match["iterations"]))
        right = right.t()
    roots = (values[:rank] / scale).sqrt()
    places = right[:rank].abs().argmax(dim=1, keepdim=True)
    signs = right[:rank].gather(1, places).sign()
    return left[:, :rank] * (roots * signs[:, 0]), right[:rank] * roots.unsqueeze(1) * signs


def _gathered(adapter: Adapter, part: Tensor, dim: int) -> Tensor:
    """Return the tensor of which each rank holds a part along ``dim``; halves follow as in `_own`.

    A part of a gated layer's weight has rows of both halves.
    """
    size = adapter.tp_group.size()
    if not adapter.sides_cut or size == 1 or (adapter.is_row and dim == 0):
        return part
    parts = [torch.empty_like(part) for _ in range(size)]
    torch.distributed.all_gather(parts, part.contiguous(), group=adapter.tp_group)
    if adapter.gated and dim == 0:
        halves = [x.chunk(2) for x in parts]
        parts = [half[index] for index in range(2) for half in halves]
    return torch.cat(parts, dim)


def _own(adapter: Adapter, full: Tensor, name: str) -> Tensor:
    """Return this rank's part of matrix "a" or "b"; ranks agree on the first one's digits."""
    group = adapter.tp_group
    if not adapter.sides_cut or group.size() == 1:
        return full
    full = full.contiguous()
    torch.distributed.broadcast(full, group=group, group_src=0)
    if name not in adapter.sides_cut:
        return full
    dim = adapter.sides_cut[name]
    if adapter.gated and dim == 0:
        halves = [half.chunk(group.size())[group.rank()] for half in full.chunk(2)]
        return torch.cat(halves)
    part: Tensor = full.chunk(group.size(), dim)[group.rank()]
    return part
