"""Dropout whose masks do not depend on the layout (``--deterministic-dropout``).

The mask of a full sample is drawn from a generator that is seeded with the sample's number in the
run, the layer and the place in it, and each rank keeps its part. While a micro-batch passes a model
chunk, the number of its first sample stands among the states of megatron-core's random number
tracker, which activation checkpointing puts back before it computes a layer again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from megatron_ext.layers.context_parallel import slices_of
from megatron_ext.layers.pointwise import masked_bias_dropout_add

_BITS = (1 << 63) - 1
_STATE = "first-sample-of-the-micro-batch"


def _hash(*parts: object) -> int:
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _BITS


@contextmanager
def microbatch_masks(seed: int, first_sample: int) -> Iterator[None]:
    """Draw the masks of the micro-batch that begins with this sample of the run."""
    tracker = get_cuda_rng_tracker()
    number = torch.tensor((_hash("dropout", seed) + first_sample) & _BITS)
    tracker.set_states({**tracker.get_states(), _STATE: number})
    try:
        yield
    finally:
        states = tracker.get_states()
        tracker.set_states({name: state for name, state in states.items() if name != _STATE})


def uniform(site: str, sample: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers in [0, 1) for a sample of the micro-batch at a place with a name.

    They depend on the kind of device, but on no layout.
    """
    generator = torch.Generator(device)
    first_sample = int(get_cuda_rng_tracker().get_states()[_STATE])
    generator.manual_seed(_hash(site, (first_sample + sample) & _BITS))
    return torch.rand(shape, generator=generator, device=device)


def local_positions(length: int, groups: ProcessGroupCollection, *, cut: bool) -> Tensor:
    """Return this rank's positions ``[s_local]``, with ``cut`` among tensor-parallel ranks too."""
    shards = groups.tp.size() if cut else 1
    whole, size = length * shards, groups.cp.size()
    half = whole // 2
    parts = [torch.arange(whole)]
    if size > 1:
        parts = [torch.arange(c * half, (c + 1) * half) for c in slices_of(groups.cp.rank(), size)]
    return torch.cat(parts).view(shards, length)[groups.tp.rank() if cut else 0]


class HiddenDropout(torch.nn.Module):
    """Dropout of hidden states, which sequence parallelism cuts over the tensor-parallel ranks."""

    def __init__(
        self, probability: float, site: str, groups: ProcessGroupCollection, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.probability, self.site = probability, site
        self.groups, self.cut = groups, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of ``[s_local, b, h]`` in training."""
        return _drop(x, self.drawn(x), self.probability) if self.drops else x

    @property
    def drops(self) -> bool:
        """Return whether any element is dropped now."""
        return self.training and self.probability > 0

    def drawn(self, x: Tensor) -> Tensor:
        """Return a number in [0, 1) for every element, which drops below the probability."""
        positions = local_positions(x.size(0), self.groups, cut=self.cut).to(x.device)
        full = x.size(0) * self.groups.cp.size() * (self.groups.tp.size() if self.cut else 1)
        shape = full, x.size(2)
        drawn = [uniform(self.site, i, shape, x.device)[positions] for i in range(x.size(1))]
        return torch.stack(drawn, dim=1)


class BiasDropoutAdd:
    """megatron-core's bias-dropout-add with `HiddenDropout` inside."""

    def __init__(self, dropout: HiddenDropout) -> None:
        self.dropout = dropout

    def __call__(self, training: bool, fused: bool) -> Any:
        def bias_dropout_add(
            x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float
        ) -> Tensor:
            x, bias = x_with_bias
            self.dropout.train(training)
            if not self.dropout.drops:
                return residual + (x if bias is None else x + bias)
            drawn = self.dropout.drawn(x)
            add = masked_bias_dropout_add if fused else masked_bias_dropout_add.eager
            return add(x, bias, residual, drawn, self.dropout.probability)

        return bias_dropout_add


def attention_dropout(
    probabilities: Tensor,
    probability: float,
    site: str,
    *,
    num_heads: int,
    length: int,
    first_head: int,
    first_query: int,
) -> Tensor:
    """Drop attention probabilities ``[b, n, q, k]``, from ``first_head`` and ``first_query`` on."""
    batch, heads, queries, keys = probabilities.shape
    rows = slice(first_query, first_query + queries)
    own = slice(first_head, first_head + heads), rows, slice(keys)
    shape = num_heads, length, length
    drawn = [uniform(site, i, shape, probabilities.device)[own] for i in range(batch)]
    return _drop(probabilities, torch.stack(drawn), probability)


def _drop(x: Tensor, drawn: Tensor, probability: float) -> Tensor:
    return x * (drawn >= probability) / (1 - probability)
