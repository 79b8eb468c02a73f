"""Sharding of gradients over data-parallel ranks (ZeRO-2; Rajbhandari et al., arXiv:1910.02054).

megatron-core keeps the gradients of all parameters on every rank, in a buffer of buckets, and
reduce-scatters them once a step. Here a bucket has memory only while a backward pass fills it. As
soon as it has all gradients of a micro-batch, it is reduce-scattered, this rank's part is added to
a float32 sum, and the memory is freed. So between backward passes a rank holds only the sums of its
own shard, which its part of the distributed optimizer needs.

All ranks reduce the buckets of a chunk in the same order, the last parameters of the model first:
ranks that wait for each other in different orders would wait forever. If a parameter is not used,
its bucket is still incomplete after the pass, and is reduced then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.distributed import ReduceOp


class GradientBucket:
    """The gradients of adjacent parameters, n elements in all.

    Attributes:
        params: the parameters.
        missing: parameters that have got no gradient from this micro-batch so far.
        whole: this rank's gradients of the current micro-batch, ``[n]``, or after `gather` the
            step's reduced gradients; it has memory only while `live`.
        sums: a shard of the gradients, reduced over ranks and summed over the step's micro-batches,
            float32 ``[n / ranks]``.
    """

    def __init__(self, buffer: Any, bucket: Any, sums: Tensor) -> None:
        self.params: list[Any] = bucket.params_list
        self.missing = set(self.params)
        self.sums = sums
        self.whole = torch.empty_like(bucket.grad_data)
        self._group = buffer.data_parallel_group
        self._part = self.whole.chunk(self._group.size())[self._group.rank()]
        self._scaling: float = bucket.gradient_scaling_factor
        averages = buffer.ddp_config.average_in_collective
        self._op = ReduceOp.AVG if averages else ReduceOp.SUM
        self._num_bytes = self.whole.untyped_storage().nbytes()
        self._reduction: Any = None
        self._views: list[tuple[Any, Tensor, Tensor]] = []
        first = self._group.rank() * len(sums)
        for parameter in self.params:
            start, end = (x - bucket.offset for x in buffer.param_index_map[parameter][:2])
            whole: Any = self.whole[start:end].view(parameter.shape)
            whole.bucket = self  # used by `writable`
            low, high = (min(max(x - first, 0), len(sums)) for x in (start, end))
            self._views.append((parameter, whole, sums[low:high]))
        self.free()

    @property
    def live(self) -> bool:
        """Return whether the bucket has memory for the gradients of a micro-batch."""
        return self.whole.untyped_storage().nbytes() > 0

    @property
    def reducing(self) -> bool:
        return self._reduction is not None

    def show(self, *, whole: bool) -> None:
        """Let each parameter's ``main_grad`` be its part of `whole`, if asked for; else of `sums`.

        The part of `sums` is one-dimensional: the elements that this rank updates, perhaps none.
        """
        for parameter, everything, part in self._views:
            parameter.main_grad = everything if whole else part

    def allocate(self) -> None:
        """Give the bucket memory for a micro-batch, all zeros, unless it has memory."""
        if self.reducing:
            self.add()  # this gradient came late; it is reduced after the pass
        if not self.live:
            self.whole.untyped_storage().resize_(self._num_bytes)
            self.whole.zero_()

    def reduce(self) -> None:
        """Start to sum a micro-batch's gradients over the ranks; `add` completes the reduction."""
        self.allocate()
        if self._scaling != 1.0:
            self.whole *= self._scaling
        self._reduction = torch.distributed.reduce_scatter_tensor(
            self._part, self.whole, op=self._op, group=self._group, async_op=True
        )

    def add(self) -> None:
        """Add this rank's part of a reduced micro-batch to the sums, and free the memory."""
        self._reduction.wait()
        self._reduction = None
        self.sums += self._part
        self.free()

    def gather(self) -> None:
        """Fill `whole` with the reduced gradients: the `sums` of all ranks, one after another."""
        self.allocate()
        own = self.sums.to(self.whole.dtype)
        torch.distributed.all_gather_into_tensor(self.whole, own, group=self._group)

    def free(self) -> None:
        """Free the bucket's memory; its views must not be used until the next `allocate`."""
        self.whole.untyped_storage().resize_(0)


class ShardedGradients(DistributedDataParallel):  # type: ignore[misc]
    """megatron-core's data-parallel wrapper with gradients that are sharded over the ranks.

    From the first forward pass of a step on, a parameter's ``main_grad`` is its whole gradient of
    one micro-batch; before writing to it, call `weight_gradients.writable`, which gives it memory.
    After `finish_grad_sync`, and until the next step, ``main_grad`` is this rank's shard of the
    step's reduced gradient; the shard may be empty. The ``grad_data`` of each of the wrapper's
    ``buffers`` holds these shards.

    Args:
        bucket_size: number of parameters at which a bucket is closed, on every pipeline stage.
        overlap: whether the backward pass continues while one bucket is being reduced.
        arguments: arguments of megatron-core's class.
    """

    def __init__(self, *, bucket_size: int | None, overlap: bool, **arguments: Any) -> None:
        self._bucket_size = bucket_size
        self._overlap = overlap
        with self._building():
            super().__init__(**arguments)
        self._arrange()
        order = _places(self.module, self.params_with_grad)
        buckets = [
            bucket
            for buffer in (*self.buffers, *self.expert_parallel_buffers)
            for bucket in _sharded(buffer)
        ]
        self.gradient_buckets = sorted(buckets, key=lambda x: -min(order[p] for p in x.params))
        self._bucket_of = {p: bucket for bucket in self.gradient_buckets for p in bucket.params}
        self._reduced = 0
        self._last: GradientBucket | None = None
        self._shows_whole = True
        self._show(whole=False)

    def _building(self) -> AbstractContextManager[object]:
        """Return the context in which megatron-core's constructor runs; a subclass may choose."""
        return nullcontext()

    def _arrange(self) -> None:
        """Change megatron-core's buckets before gradients are sharded; a subclass may do so."""

    @property
    def bucket_size(self) -> int | None:
        """Return the number of parameters at which a bucket is closed; None for a single bucket.

        megatron-core's constructor sets this to None on all pipeline stages but the first. The
        setter ignores that, so that buckets close at the same size on every stage.
        """
        return self._bucket_size

    @bucket_size.setter
    def bucket_size(self, _size: int | None) -> None:
        pass

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the chunk, after setting each parameter's ``main_grad`` to its whole gradient."""
        self._show(whole=True)
        return super().forward(*inputs, **kwargs)

    def _show(self, *, whole: bool) -> None:
        if whole != self._shows_whole:
            self._shows_whole = whole
            for bucket in self.gradient_buckets:
                bucket.show(whole=whole)

    def _make_backward_post_hook(self, param: Any) -> Callable[..., None]:
        """Return a hook that stores a parameter's gradient, and reduces complete buckets."""
        take = super()._make_backward_post_hook(param)

        def hook(*unused: Any) -> None:
            self._bucket_of[param].allocate()
            take(*unused)
            self._bucket_of[param].missing.discard(param)
            self._reduce_complete()

        return hook

    def _reduce_complete(self) -> None:
        buckets = self.gradient_buckets
        while self._reduced < len(buckets) and not buckets[self._reduced].missing:
            self._reduced += 1
            self._reduce(buckets[self._reduced - 1])

    def _reduce(self, bucket: GradientBucket) -> None:
        self._complete()
        bucket.reduce()
        self._last = bucket
        if not self._overlap:
            self._complete()

    def _complete(self) -> None:
        """Wait for the running reduction, if any, and add its result to the sums."""
        if self._last is not None and self._last.reducing:
            self._last.add()
        self._last = None

    def finish_microbatch(self) -> None:
        """Reduce the buckets that a backward pass left out; all replicas call this after the pass.

        A bucket is left out if a parameter in it, or in a bucket before it, got no gradient.
        """
        for index, bucket in enumerate(self.gradient_buckets):
            if index >= self._reduced or (bucket.live and not bucket.reducing):
                self._reduce(bucket)
            bucket.missing = set(bucket.params)
        self._reduced = 0

    def start_grad_sync(self, *unused: Any) -> None:
        """Do nothing, since each micro-batch is reduced separately."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait for the last reduction; set each parameter's ``main_grad`` to this rank's shard.

        ``force_all_reduce`` is ignored; use `whole_gradients` where every rank needs whole
        gradients.
        """
        self._complete()
        self._show(whole=False)
        for group in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
            group.param_gather_dispatched = False

    def zero_grad_buffer(self) -> None:
        """Set the sums to zero."""
        super().zero_grad_buffer()
        self._show(whole=False)

    @contextmanager
    def whole_gradients(self) -> Iterator[None]:
        """Inside the block, let each ``main_grad`` be the whole reduced gradient, not a shard."""
        for bucket in self.gradient_buckets:
            bucket.gather()
        self._show(whole=True)
        try:
            yield
        finally:
            self._show(whole=False)
            for bucket in self.gradient_buckets:
                bucket.free()


def _places(chunk: torch.nn.Module, parameters: Sequence[Any]) -> dict[Any, int]:
    """Return each parameter's position in a forward pass; a backward pass runs in reverse.

    The position is the parameter's index in ``parameters``, except for shared experts. A layer
    registers them after its other experts, but runs them first; so they get the position of the
    layer's first parameter. Otherwise the buckets of the other experts would have to wait for the
    gradients of the shared experts, which come last, and would keep their memory until then.
    """
    places = {parameter: place for place, parameter in enumerate(parameters)}
    for layer in chunk.modules():
        shared = getattr(layer, "shared_experts", None)
        if isinstance(shared, torch.nn.Module):
            first = min((places[p] for p in layer.parameters() if p in places), default=0)
            places |= {p: first for p in shared.parameters() if p in places}
    return places


def _sharded(buffer: Any) -> Iterable[GradientBucket]:
    """Replace a buffer's ``grad_data`` by the sums of this rank's shard; yield its new buckets."""
    ranks = buffer.data_parallel_group.size()
    like: dict[str, Any] = {"dtype": torch.float32, "device": buffer.grad_data.device}
    buffer.grad_data = torch.zeros(buffer.numel // ranks, **like)
    for bucket in buffer.buckets:
        start = bucket.offset // ranks
        length = bucket.grad_data.numel() // ranks
        shard = GradientBucket(buffer, bucket, buffer.grad_data[start : start + length])
        bucket.grad_data = shard.whole
        yield shard


@contextmanager
def whole_gradients(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside the block, give every rank the whole reduced gradients of the chunks."""
    with ExitStack() as stack:
        for chunk in chunks:
            if isinstance(chunk, ShardedGradients):
                stack.enter_context(chunk.whole_gradients())
        yield
