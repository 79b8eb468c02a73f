"""Messages between pipeline ranks.

megatron-core's P2PCommunicator names neighbours (previous, next), which on two ranks are the same
peer, so its messages can swap; here a message names its ends. Messages to higher and to lower ranks
go through process groups of their own: the channel between two ranks then carries one direction
only, and both ends use it in the order of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.schedules.plan import Action, Kind

if TYPE_CHECKING:
    from megatron_ext.layout import ParallelContext

_DIMENSIONS = 3
_PENDING = 64
"""Messages that may be on their way from one rank."""


class Channels:
    """The messages of one step on one rank.

    Args:
        config: megatron-core's, for the dtype of the messages and whether their shapes vary.
        context: groups of this rank.
        shape: of all messages, ``[s, b, h]``; where shapes vary each is sent ahead of its message.
    """

    def __init__(
        self, config: TransformerConfig, context: ParallelContext, shape: Sequence[int]
    ) -> None:
        self.rank = context.pp_rank
        self.groups = context.pipeline_channels
        self.shape = None if config.variable_seq_lengths or config.mtp_standalone else shape
        self.dtype = config.pipeline_dtype
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.sent: dict[tuple[Kind, int, int], list[tuple[torch.distributed.Work, Tensor]]] = {}
        self.received: dict[tuple[Kind, int, int], tuple[torch.distributed.Work, Tensor]] = {}

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start to send.

        The message holds the memory until it has left, whatever becomes of ``tensor``.
        """
        assert action.peer is not None
        message = tensor.detach().contiguous()
        parts = [message]
        if self.shape is None:
            parts.insert(0, torch.tensor(message.shape, dtype=torch.int64, device=self.device))
        group = self.groups[action.peer < self.rank]
        works = []
        for part in parts:
            work = torch.distributed.isend(part, group=group, group_dst=action.peer)
            assert work is not None
            works.append((work, part))
        self.sent[action.kind, action.microbatch, action.stage] = works
        while len(self.sent) > _PENDING:
            # Safe at any time, by the order of the plan; it bounds the memory of messages.
            self._wait(*next(iter(self.sent)))

    def receive(self, action: Action) -> None:
        """Start to receive."""
        assert action.peer is not None
        group = self.groups[self.rank < action.peer]
        shape = self.shape
        if shape is None:
            sizes = torch.empty(_DIMENSIONS, dtype=torch.int64, device=self.device)
            torch.distributed.recv(sizes, group=group, group_src=action.peer)
            shape = sizes.tolist()
        message = torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
        work = torch.distributed.irecv(message, group=group, group_src=action.peer)
        assert work is not None
        self.received[action.kind, action.microbatch, action.stage] = (work, message)

    def take(self, kind: Kind, action: Action) -> Tensor:
        """Wait for the message that a computation needs."""
        work, message = self.received.pop((kind, action.microbatch, action.stage))
        work.wait()
        if kind is Kind.RECEIVE_GRADIENT:
            # Its output was used on the other side, so it has left.
            self._wait(Kind.SEND_OUTPUT, action.microbatch, action.stage)
        return message

    def _wait(self, kind: Kind, microbatch: int, stage: int) -> None:
        for work, _ in self.sent.pop((kind, microbatch, stage), ()):
            work.wait()

    def finish(self) -> None:
        """Wait until all messages have left."""
        for key in list(self.sent):
            self._wait(*key)
