"""Communication within a step: messages between pipeline ranks, and reduction of gradients.

Messages to higher and to lower pipeline ranks use separate process groups. So all messages from one
rank to another use a group in one direction only, in the order of the plan at both ends.

The memory of a sent message is freed when the message has arrived. NCCL can be asked without
waiting whether it has; Gloo cannot. With either, a message has certainly arrived if the peer has
since sent the result of a computation that used it (`settled_messages`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.layers.gradient_shards import ShardedGradients
from megatron_ext.layers.weight_gradients import zero_untouched
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Placement
from megatron_ext.schedules.plan import (
    Action,
    Key,
    Kind,
    Plan,
    Shape,
    passes_of,
    settled_messages,
)

_PENDING = 64
"""The largest number of messages of one rank that may be in flight at a time."""


class Channels:
    """Sends and receives the messages of one step on one rank.

    Args:
        shape: shape of all messages, ``[s, b, h]``, or a list with the shape of each micro-batch.
            It is ignored if the shapes vary (``variable_seq_lengths`` or ``mtp_standalone``); the
            shape of each message is then sent before the message.

    Attributes:
        sent: sent messages that are kept until they have arrived, in the order of sending.
    """

    def __init__(
        self,
        transformer_config: TransformerConfig,
        context: ParallelContext,
        plan: Plan,
        shape: Shape,
    ) -> None:
        self.rank = context.pp_rank
        self.ranks = context.pipeline_ranks
        self.recorder = context.recorder
        self.groups = context.pipeline_channels
        varies = transformer_config.variable_seq_lengths or transformer_config.mtp_standalone
        self.shape = None if varies else shape
        self.dtype = transformer_config.pipeline_dtype
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.settled = settled_messages(plan, self.rank)
        self.sent: dict[Key, list[tuple[torch.distributed.Work, Tensor]]] = {}
        self.received: dict[Key, tuple[torch.distributed.Work, Tensor, int]] = {}
        self.peers: dict[Key, int] = {}

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start to send ``tensor`` to the action's peer; keep it in memory until it has arrived."""
        assert action.peer is not None
        # Forget the oldest messages that have arrived, as far as this is known without a wait.
        while self.sent and all(work.is_completed() for work, _ in next(iter(self.sent.values()))):
            self.sent.pop(next(iter(self.sent)))
        message = tensor.detach().contiguous()
        ahead = []
        if self.shape is None:
            # The receiver does not know the shape, so it is sent first.
            ahead = [torch.tensor(message.shape, dtype=torch.int64, device=self.device)]
        group = self.groups[action.peer < self.rank]
        works = []
        for part in (*ahead, message):
            work = torch.distributed.isend(part, group=group, group_dst=action.peer)
            assert work is not None
            works.append((work, part))
        key = action.kind, action.microbatch, action.stage
        self.sent[key] = works
        self.peers[key] = self.ranks[action.peer]
        while len(self.sent) > _PENDING:
            # A wait bounds the memory of messages. The order of the plan ensures that it cannot
            # deadlock.
            self._wait(*next(iter(self.sent)))

    def receive(self, action: Action) -> None:
        """Start to receive a message from the action's peer; `take` returns it."""
        assert action.peer is not None
        group = self.groups[self.rank < action.peer]
        shape = self._shape_of(action)
        if shape is None:
            sizes = torch.empty(3, dtype=torch.int64, device=self.device)
            torch.distributed.recv(sizes, group=group, group_src=action.peer)
            shape = sizes.tolist()
        message = torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
        work = torch.distributed.irecv(message, group=group, group_src=action.peer)
        assert work is not None
        peer = self.ranks[action.peer]
        self.received[action.kind, action.microbatch, action.stage] = (work, message, peer)

    def _shape_of(self, action: Action) -> Sequence[int] | None:
        """Return the shape of a micro-batch's messages; None if their shapes are sent first."""
        if self.shape is None or isinstance(self.shape[0], int):
            return self.shape  # type: ignore[return-value]
        return self.shape[action.microbatch]  # type: ignore[return-value]

    def take(self, kind: Kind, action: Action) -> Tensor:
        """Wait until the message that a computation, ``action``, needs has arrived; return it.

        ``kind`` is `Kind.RECEIVE_INPUT` or `Kind.RECEIVE_GRADIENT`.
        """
        work, message, peer = self.received.pop((kind, action.microbatch, action.stage))
        with self.recorder.waiting(kind.value, action.microbatch, action.stage, peer):
            work.wait()
        # This message shows that these messages have arrived, so these waits are short.
        for key in self.settled.get((kind, action.microbatch, action.stage), ()):
            self._wait(*key)
        return message

    def _wait(self, kind: Kind, microbatch: int, stage: int) -> None:
        works = self.sent.pop((kind, microbatch, stage), ())
        if not works:
            return
        peer = self.peers[kind, microbatch, stage]
        with self.recorder.waiting(kind.value, microbatch, stage, peer):
            for work, _ in works:
                work.wait()

    def finish(self) -> None:
        """Wait for all sends that are still pending."""
        for key in list(self.sent):
            self._wait(*key)


class GradientSync:
    """Starts the data-parallel reduction of each chunk's gradients, and the gathers of its weights.

    It is used with ``--overlap-grad-reduce`` or sharded gradients. Sharded gradients are reduced
    after each backward pass. Others are summed over the micro-batches, and reduced once per step:

    - during the chunk's last backward pass, each bucket as soon as its gradients are complete;
    - after that pass with ``--align-grad-reduce``, if weight gradients are deferred, and for
      buckets with a parameter that gets no gradient in this step. As in megatron-core, the flag has
      no effect on the first stage if its rank has only one chunk.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        transformer_config: TransformerConfig,
        actions: Sequence[Action],
        placement: Placement,
    ) -> None:
        self.placement = placement
        self.chunks = chunks
        self.no_sync = _list_of(transformer_config.no_sync_func, len(chunks))
        self.grad_sync = _list_of(transformer_config.grad_sync_func, len(chunks))
        self.param_sync = _list_of(transformer_config.param_sync_func, len(chunks))
        last_to_end = len(chunks) == 1 and any(action.stage == 0 for action in actions)
        # Deferred gradients are not autograd's, so no bucket learns when they are complete.
        splits = any(action.kind is Kind.WEIGHT for action in actions)
        deferred = splits or getattr(transformer_config, "weight_gradients", None) is not None
        self.during = not deferred and (last_to_end or not self.grad_sync)
        if self.no_sync and not self.grad_sync:
            self.grad_sync = [chunk.start_grad_sync for chunk in chunks]
        passes = passes_of(actions)
        of_weights = (Kind.WEIGHT, Kind.BACKWARD)
        self.last = {action.stage: action for action in passes if action.kind in of_weights}
        self.waiting: dict[int, AbstractContextManager[None]] = {}
        self.gathered = 0
        self.shards_weights = hasattr(chunks[0], "begin_backward")

    def start(self) -> None:
        """Suspend gradient reduction in all chunks; call this before the first action."""
        if self.no_sync:
            for index, no_sync in enumerate(self.no_sync):
                self.waiting[index] = no_sync()
                self.waiting[index].__enter__()

    def before_forward(self, chunk: int) -> None:
        """Start to gather the weights of this and the next chunk, if not started before.

        Do nothing without ``--align-param-gather``.
        """
        while self.param_sync and self.gathered < min(chunk + 2, len(self.chunks)):
            self.param_sync[self.gathered](self.chunks[self.gathered].parameters())
            self.gathered += 1

    def after_forward(self, chunk: int) -> None:
        """Free sharded weights after a chunk's forward pass, of which the loss is a part."""
        if self.shards_weights:
            self.chunks[chunk].end_forward()

    def before_backward(self, action: Action) -> None:
        """Gather sharded weights; resume gradient reduction before a chunk's last backward pass.

        The reduction is not resumed if it must wait for the end of the pass.
        """
        if self.shards_weights:
            self.chunks[self.placement.chunk_of(action.stage)].begin_backward()
        if self.during and self.last.get(action.stage) == action:
            self._release(self.placement.chunk_of(action.stage))

    def computed(self, action: Action) -> None:
        """Start the reductions that are due after ``action``, a computation of gradients.

        Sharded gradients are reduced after each backward pass; others when the action is the last
        that adds to the chunk's gradients.
        """
        own = self.chunks[self.placement.chunk_of(action.stage)]
        if isinstance(own, ShardedGradients):
            own.finish_microbatch()
            return
        if not self.grad_sync or self.last.get(action.stage) != action:
            return
        chunk = self.placement.chunk_of(action.stage)
        zero_untouched(self.chunks[chunk])
        if chunk in self.waiting:
            self._release(chunk)
            self.grad_sync[chunk](self.chunks[chunk].parameters())
            return
        done = self.chunks[chunk]
        for bucket in (*done.bucket_groups, *done.expert_parallel_bucket_groups):
            counts = bucket.per_param_grad_ready_counts
            if bucket.is_first_batch and len(counts) < len(bucket.params):
                counts.clear()  # an incomplete count, which later steps must not expect
            if bucket.grad_reduce_handle is None:
                bucket.start_grad_sync()

    def finish(self) -> None:
        """Resume gradient reduction in all chunks; call this after the last action."""
        for chunk in list(self.waiting):
            self._release(chunk)

    def _release(self, chunk: int) -> None:
        if chunk in self.waiting:
            self.waiting.pop(chunk).__exit__(None, None, None)


def _list_of(hook: Any, length: int) -> list[Callable[..., Any]]:
    """Return ``hook`` as a list of functions, one per chunk; an empty list for None.

    A hook of megatron-core is a function, a list of functions, or None.
    """
    if hook is None:
        return []
    return list(hook) if isinstance(hook, list) else [hook] * length
