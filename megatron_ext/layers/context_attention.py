"""Attention over a sequence that context-parallel ranks share, in two ways.

The ranks gather all keys and values, or they exchange heads, so that each has some heads of the
whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError
from megatron_ext.layers.context_parallel import (
    gather_sequence,
    heads_to_sequence,
    sequence_to_heads,
    slices_of,
)
from megatron_ext.layers.masks import is_dense


class AttendLocally(Protocol):
    """Attends without communication, as `attention.DotProductAttention.attend_locally` does."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, first_query: int
    ) -> Tensor:
        """Return the attention output ``[q, b, n, d]``."""


@dataclass(frozen=True)
class SharedSequence:
    """The attention of a layer over a sequence that the ranks of ``group`` share.

    Both ways take queries ``[s/cp, b, n, d]``, keys and values ``[s/cp, b, g, d]`` of g groups and
    a mask as `attention.DotProductAttention.forward` does, and return the output for this rank's
    queries, ``[s/cp, b, n, d]``.

    Attributes:
        causal: whether a query attends to no later key.
    """

    attend_locally: AttendLocally
    group: ProcessGroup
    causal: bool

    def attend_to_gathered(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attend from this rank's queries to the gathered keys of all ranks."""
        sizes = [key.size(-1), value.size(-1)]
        gathered = gather_sequence(torch.cat((key, value), dim=-1), self.group)
        key, value = torch.split(gathered, sizes, dim=-1)
        length = query.size(0) // 2
        outputs = []
        for part, index in enumerate(slices_of(self.group.rank(), self.group.size())):
            own = slice(part * length, (part + 1) * length)
            first = index * length
            # The mask covers all keys, but a rank has only some of the queries.
            end = first + length if self.causal and mask is None else key.size(0)
            outputs.append(
                self.attend_locally(
                    query[own], key[:end], value[:end],
                    mask[:, :, own] if is_dense(mask) else mask, first_query=first,
                )
            )  # fmt: skip
        return torch.cat(outputs)

    def attend_with_traded_heads(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attend with ``--cp-comm-type a2a``.

        An all-to-all before attention gives each rank some of the heads for the whole sequence;
        another one afterwards undoes this.

        Raises:
            ConfigError: the number of heads is not divisible by the number of ranks.
        """
        size = self.group.size()
        if query.size(2) % size:
            raise ConfigError(
                f"`--cp-comm-type a2a` needs the attention heads of a tensor-parallel rank "
                f"({query.size(2)}) to be divisible by `--context-parallel-size` ({size}); use "
                "all_gather."
            )
        if key.size(2) % size:
            repeats = query.size(2) // key.size(2)
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        query, key, value = (heads_to_sequence(x, self.group) for x in (query, key, value))
        if is_dense(mask):
            rows = mask.permute(2, 0, 1, 3).to(torch.uint8)
            mask = gather_sequence(rows, self.group).permute(1, 2, 0, 3).bool()
        context = self.attend_locally(query, key, value, mask, first_query=0)
        return sequence_to_heads(context, self.group)
