"""Dropout whose masks do not depend on the parallel layout (``--deterministic-dropout``).

Each rank draws the mask of a full sample and uses the part for its own elements. The seed depends
on the run's seed, the index of the sample in the run, and the site: the layer and the place in the
layer. While a micro-batch passes through a model chunk, the index of its first sample is kept among
the states of megatron-core's random number tracker, because activation checkpointing restores these
states before it recomputes a layer.
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
"""Bit mask that keeps the low 63 bits of a number, so that it is a nonnegative int64 seed."""
_STATE = "first-sample-of-the-micro-batch"


def _hash(*parts: object) -> int:
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _BITS


@contextmanager
def microbatch_masks(seed: int, first_sample: int) -> Iterator[None]:
    """Inside the block, let `uniform` draw the numbers of one micro-batch.

    ``seed`` is the run's seed; ``first_sample`` is the index of the micro-batch's first sample,
    counted over the whole run.
    """
    tracker = get_cuda_rng_tracker()
    number = torch.tensor((_hash("dropout", seed) + first_sample) & _BITS)
    tracker.set_states({**tracker.get_states(), _STATE: number})
    try:
        yield
    finally:
        states = tracker.get_states()
        tracker.set_states({name: state for name, state in states.items() if name != _STATE})


def uniform(site: str, sample: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return uniform numbers in [0, 1) for one sample of the micro-batch of `microbatch_masks`.

    ``site`` names the layer and the place of the dropout in it; ``sample`` is the index within the
    micro-batch. The numbers depend on the kind of device, but not on the parallel layout.
    """
    generator = torch.Generator(device)
    first_sample = int(get_cuda_rng_tracker().get_states()[_STATE])
    generator.manual_seed(_hash(site, (first_sample + sample) & _BITS))
    return torch.rand(shape, generator=generator, device=device)


def local_positions(length: int, groups: ProcessGroupCollection, *, cut: bool) -> Tensor:
    """Return the positions of this rank's ``length`` tokens in the whole sequence, ``[length]``.

    ``cut`` must be True under sequence parallelism, where the tensor-parallel ranks hold different
    tokens; without it they all hold the same tokens.
    """
    shards = groups.tp.size() if cut else 1
    whole = length * shards
    size = groups.cp.size()
    half = whole // 2
    parts = [torch.arange(whole)]
    if size > 1:
        parts = [torch.arange(c * half, (c + 1) * half) for c in slices_of(groups.cp.rank(), size)]
    return torch.cat(parts).view(shards, length)[groups.tp.rank() if cut else 0]


class HiddenDropout(torch.nn.Module):
    """Layout-independent dropout of hidden states, also under sequence parallelism."""

    def __init__(
        self, probability: float, site: str, groups: ProcessGroupCollection, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.probability = probability
        self.site = site
        self.groups = groups
        self.cut = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to this rank's hidden states; return them unchanged in evaluation."""
        return _drop(x, self.drawn(x), self.probability) if self.drops else x

    @property
    def drops(self) -> bool:
        """Return whether dropout is active: in training with a probability above 0."""
        return self.training and self.probability > 0

    def drawn(self, x: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1) shaped like ``x``, one for each element.

        Elements whose number is below the dropout probability are dropped.
        """
        positions = local_positions(x.size(0), self.groups, cut=self.cut).to(x.device)
        full = x.size(0) * self.groups.cp.size() * (self.groups.tp.size() if self.cut else 1)
        shape = full, x.size(2)
        drawn = [uniform(self.site, i, shape, x.device)[positions] for i in range(x.size(1))]
        return torch.stack(drawn, dim=1)


class BiasDropoutAdd:
    """megatron-core's bias-dropout-add with `HiddenDropout` in place of torch's dropout."""

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
    """Apply dropout to attention probabilities ``[b, n, q, k]``.

    The whole model has ``num_heads`` heads, and the whole sequence ``length`` positions. The tensor
    holds n of these heads and q of these queries, from the indices ``first_head`` and
    ``first_query`` on, and the first k keys. ``site`` names the layer.
    """
    batch, heads, queries, keys = probabilities.shape
    rows = slice(first_query, first_query + queries)
    own = slice(first_head, first_head + heads), rows, slice(keys)
    shape = num_heads, length, length
    drawn = [uniform(site, i, shape, probabilities.device)[own] for i in range(batch)]
    return _drop(probabilities, torch.stack(drawn), probability)


def _drop(x: Tensor, drawn: Tensor, probability: float) -> Tensor:
    return x * (drawn >= probability) / (1 - probability)
