"""Sharding of weights over data-parallel ranks (ZeRO-3; Rajbhandari et al., arXiv:1910.02054).

Between steps a rank holds only its shard of each layer's weights. Before a layer computes, in
either pass, its weights are gathered from all ranks; they are freed when the next layer begins.
So that the next layer need not wait, its weights are gathered meanwhile. Gradients are sharded too
(see `gradient_shards`), with one bucket for each layer.

A gathered parameter is a view of its layer's memory, which is given back and allocated again at
need. So tensors that autograd saves for the backward pass stay valid, as long as the weights have
been gathered again before they are read. In the meantime a parameter is NaN: one number, which
takes the place of all. Whatever needs weights outside of a pass, such as a checkpoint, uses the
parameter's attribute ``weight_shard``.

All ranks gather in the same order, since they run the same layers in the same order: a forward
pass gathers ahead in the order of the pass before it, and a backward pass in the reverse of its
own forward pass.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.distributed.param_and_grad_buffer import partition_buckets
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, ModuleDict, ModuleList, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megatron_ext.layers.gradient_shards import ShardedGradients
from megatron_ext.layers.hooks import in_backward
from megatron_ext.layers.linear import OutputLayer


class WeightShard(NamedTuple):
    """This rank's elements of a parameter; an attribute ``weight_shard`` of that parameter.

    Attributes:
        values: the elements, perhaps none, one-dimensional and in the dtype of the parameter.
        start: index of the first one in the flattened parameter.
        group: ranks that hold the other elements.
    """

    values: Tensor
    start: int
    group: ProcessGroup


class FirstShard(NamedTuple):
    """This rank's elements of a parameter before `WeightBucket` gives it a place in a layer.

    Attributes:
        values: the elements, padded so that all ranks have as many.
        group: ranks that hold the other elements.
    """

    values: Tensor
    group: ProcessGroup


def _group_of(parameter: Tensor, groups: ProcessGroupCollection) -> ProcessGroup:
    """Return the ranks that have copies of a parameter."""
    is_expert = not getattr(parameter, "allreduce", True)
    group: ProcessGroup = groups.expt_dp if is_expert else groups.dp_cp
    return group


@torch.no_grad()
def shard_at_start(parameter: Any, groups: ProcessGroupCollection) -> None:
    """Shard a parameter that has just got its values, so that no rank ever holds a whole model.

    The values must be equal on all ranks of the group. The parameter becomes NaN, and its attribute
    ``first_shard`` has the values. A parameter without copies on other ranks stays whole in it. A
    frozen parameter is left as it is, since nothing would gather it.
    """
    if not parameter.requires_grad:
        return
    group = _group_of(parameter, groups)
    flat = parameter.data.reshape(-1)
    ranks = group.size()
    values = flat
    if ranks > 1:
        length = -(-len(flat) // ranks)
        own = flat[group.rank() * length :][:length]
        values = flat.new_zeros(length)
        values[: len(own)] = own
    parameter.first_shard = FirstShard(values, group)
    parameter.data = flat.new_full((), math.nan).expand(parameter.shape)


def _whole_values(parameters: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the values of parameters, flattened, from their first shards; then drop these."""
    shards = [parameter.first_shard for parameter in parameters]
    group = shards[0].group
    own = torch.cat([shard.values for shard in shards])
    every = own.new_empty(group.size(), len(own))
    torch.distributed.all_gather_into_tensor(every.view(-1), own, group=group)
    parts = torch.split(every, [len(shard.values) for shard in shards], dim=1)
    for parameter, part in zip(parameters, parts, strict=True):
        yield part.reshape(-1)[: parameter.numel()]
        del parameter.first_shard


class _WithoutMemory(TorchFunctionMode):
    """Inside, ``torch.zeros`` takes no memory, and what is copied into such a tensor is dropped.

    megatron-core would fill a buffer with all weights, and allocate one for all gradients.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        # On machines without a GPU, ``torch.zeros`` is not the function that comes here.
        if func.__name__ == "zeros":
            return func((), **options).expand(*args)
        if func is Tensor.copy_ and args[0].dim() and not any(args[0].stride()):
            return args[0]
        return func(*args, **options)


class WeightBucket:
    """The weights of a layer that are of one dtype and sharded over one group, n elements in all.

    Attributes:
        params: the parameters; they are views of `whole` while that has memory.
        whole: the weights of all ranks, ``[n]``; it has memory only from `start` to `free`.
        own: this rank's shard, ``[n / ranks]``.
    """

    def __init__(self, buffer: Any, bucket: Any, own: Tensor) -> None:
        self.params: list[Any] = bucket.params_list
        self.group: ProcessGroup = buffer.data_parallel_group
        self.own = own
        self.whole = own.new_zeros(bucket.param_data.shape)
        self._num_bytes = self.whole.untyped_storage().nbytes()
        self._gather: Any = None
        self._views: list[Tensor] = []
        self._nothing = self.whole.new_full((), math.nan)
        first = self.group.rank() * len(own)
        for parameter in self.params:
            start, end = (x - bucket.offset for x in buffer.param_index_map[parameter][:2])
            self._views.append(self.whole[start:end].view(parameter.shape))
            low, high = (min(max(x - first, 0), len(own)) for x in (start, end))
            parameter.weight_shard = WeightShard(own[low:high], max(0, first - start), self.group)
        for view, values in zip(self._views, _whole_values(self.params), strict=True):
            view.copy_(values.view(view.shape))
        own.copy_(self._part)
        self.free()

    @property
    def _part(self) -> Tensor:
        start = self.group.rank() * len(self.own)
        return self.whole[start : start + len(self.own)]

    @property
    def live(self) -> bool:
        """Return whether the bucket has memory for the weights of all ranks."""
        return self.whole.untyped_storage().nbytes() > 0

    def start(self) -> None:
        """Start to gather the weights; `wait` completes it."""
        self.whole.untyped_storage().resize_(self._num_bytes)
        for parameter, view in zip(self.params, self._views, strict=True):
            parameter.data = view
        self._gather = torch.distributed.all_gather_into_tensor(
            self.whole, self.own, group=self.group, async_op=True
        )

    def wait(self) -> None:
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def keep(self) -> None:
        """Store what has been written to the whole weights in this rank's shard."""
        self.own.copy_(self._part)

    def free(self) -> None:
        """Free the whole weights; until the next `start`, the parameters are NaN."""
        self.wait()
        for parameter in self.params:
            parameter.data = self._nothing.expand(parameter.shape)
        self.whole.untyped_storage().resize_(0)


class Unit:
    """The weights of a layer, or of another module such as the embedding, which are used together.

    Attributes:
        buckets: its weights, one bucket for each dtype and group of ranks.
        holders: the passes that need them at the moment.
    """

    def __init__(self) -> None:
        self.buckets: list[WeightBucket] = []
        self.holders: set[object] = set()

    def hold(self, holder: object) -> None:
        """Start to gather the weights, unless they are there; they stay until `release`."""
        if not self.holders:
            for bucket in self.buckets:
                bucket.start()
        self.holders.add(holder)

    def wait(self) -> None:
        for bucket in self.buckets:
            bucket.wait()

    def release(self, holder: object) -> None:
        """Free the weights, unless something else holds them."""
        if holder in self.holders:
            self.holders.discard(holder)
            if not self.holders:
                self.free()

    def free(self) -> None:
        self.holders.clear()
        for bucket in self.buckets:
            bucket.free()


class _Call(NamedTuple):
    """A call of a module in a forward pass.

    Attributes:
        units: the weights that it uses.
        outer: weights of the modules in whose call it is.
        returns: whether the backward pass reads the weights; that of an embedding does not.
    """

    units: tuple[Unit, ...]
    outer: tuple[Unit, ...]
    returns: bool

    @property
    def all_units(self) -> tuple[Unit, ...]:
        return self.outer + self.units


class _Pass:
    """The forward and backward pass of a micro-batch through a chunk, and the weights they hold."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.open: list[int] = []
        """Numbers of the calls that have not returned yet."""
        self.kept: list[Unit] = []
        """Weights that were handed to a loss function, which uses them after the forward pass."""
        self.ahead: tuple[Unit, ...] = ()
        self._held: dict[Unit, None] = {}

    def hold(self, units: Iterable[Unit], ahead: Iterable[Unit] = ()) -> None:
        """Hold only ``units`` and, for later calls, ``ahead``; wait until ``units`` are there."""
        now = dict.fromkeys(units)
        self.ahead = tuple(ahead)
        wanted = {**now, **dict.fromkeys(self.ahead)}
        for unit in self._held:
            if unit not in wanted:
                unit.release(self)
        for unit in wanted:
            unit.hold(self)
        self._held = wanted
        for unit in now:
            unit.wait()

    def release(self) -> None:
        self.hold(())

    def last_call(self, units: tuple[Unit, ...]) -> int:
        """Return the number of the last call that used these weights."""
        return max(index for index, call in enumerate(self.calls) if call.units == units)

    def before(self, index: int) -> tuple[Unit, ...]:
        """Return the weights that the backward pass reads next after those of a call."""
        earlier = (call for call in reversed(self.calls[:index]) if call.returns)
        return next((call.units for call in earlier), ())


class ShardedWeights(ShardedGradients):
    """megatron-core's data-parallel wrapper with weights and gradients sharded over the ranks.

    Besides those of `ShardedGradients`, the caller must call `end_forward` after the loss of a
    micro-batch has been computed, and `begin_backward` before its backward pass.

    Args:
        equalize: whether all ranks take the weights of the first of them before they are sharded.
        arguments: arguments of `ShardedGradients`.
    """

    def __init__(self, *, equalize: bool, **arguments: Any) -> None:
        for parameter in arguments["module"].parameters():
            if hasattr(parameter, "first_shard"):
                continue
            groups = arguments["pg_collection"]
            if equalize:
                group = _group_of(parameter, groups)
                torch.distributed.broadcast(parameter.data, group=group, group_src=0)
            shard_at_start(parameter, groups)
        self._passes: deque[_Pass] = deque()
        self._forward: _Pass | None = None
        self._backward: _Pass | None = None
        self._order: list[_Call] = []
        self._bypassed = False
        super().__init__(**arguments)

    def _building(self) -> AbstractContextManager[object]:
        return _WithoutMemory()

    def _arrange(self) -> None:
        """Join the buckets of each layer, one for each parameter, and shard their weights."""
        modules = dict(_units(self.module))
        self._unit_of: dict[Parameter, Unit] = {}
        for module in modules:
            unit = Unit()
            for parameter in modules[module]:
                self._unit_of.setdefault(parameter, unit)
        for buffers, groups in (
            (self.buffers, self.bucket_groups),
            (self.expert_parallel_buffers, self.expert_parallel_bucket_groups),
        ):
            for buffer in buffers:
                _join(buffer, self._unit_of)
            groups[:] = partition_buckets(buffers)
            for group in groups:
                self.param_to_bucket_group |= dict.fromkeys(group.params, group)
            for buffer in buffers:
                if buffer.data_parallel_group.size() == 1:
                    _allocate(buffer)
                    continue
                for bucket in _sharded(buffer):
                    self._unit_of[bucket.params[0]].buckets.append(bucket)
        self.units = [unit for unit in dict.fromkeys(self._unit_of.values()) if unit.buckets]
        for module in self.module.modules():
            if module in modules or isinstance(module, OutputLayer):
                own = (self._unit_of[parameter] for parameter in modules.get(module, ()))
                units = tuple(unit for unit in dict.fromkeys(own) if unit.buckets)
                hooks: Any = partial(self._enter, units), partial(self._leave, units)
                module.register_forward_pre_hook(hooks[0], prepend=True, with_kwargs=True)
                module.register_forward_hook(hooks[1], with_kwargs=True)

    def _with_given(self, units: tuple[Unit, ...], kwargs: Mapping[str, Any]) -> tuple[Unit, ...]:
        """Add the weight that a call gives to an output layer, if it is the embedding's."""
        unit = self._unit_of.get(kwargs.get("weight"))  # type: ignore[arg-type]
        return units if unit is None or not unit.buckets or unit in units else (*units, unit)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the chunk on a micro-batch."""
        if self._forward is not None:
            self._forward.release()  # an evaluation does not end its passes
        self._forward = _Pass()
        return super().forward(*inputs, **kwargs)

    def end_forward(self) -> None:
        """Free the weights after a forward pass and its loss; the backward pass is to come."""
        assert self._forward is not None
        self._forward.release()
        self._order = self._forward.calls
        self._passes.append(self._forward)
        self._forward = None

    def begin_backward(self) -> None:
        """Gather the weights that the backward pass of the oldest micro-batch needs first."""
        self._backward = begun = self._passes.popleft()
        begun.hold(begun.kept, begun.before(len(begun.calls)))

    def finish_microbatch(self) -> None:
        """Reduce the gradients that the backward pass left out, and free the weights."""
        if self._backward is not None:
            self._backward.release()
            self._backward = None
        super().finish_microbatch()

    def zero_grad_buffer(self) -> None:
        """Set the sums to zero, and forget the passes of a step that an error has ended."""
        self.free()
        super().zero_grad_buffer()

    def free(self) -> None:
        """Free the weights of all ranks, and forget the passes that have begun."""
        self._passes.clear()
        self._forward = self._backward = None
        for unit in self.units:
            unit.free()

    def start_param_sync(self, *unused: Any, **also_unused: Any) -> None:
        """Forget the weights that an update has made old; each pass gathers the new ones."""
        self.free()

    # A newer name of megatron-core for the gather of some of the buckets.
    _start_bucket_group_param_sync = start_param_sync

    def _enter(
        self, units: tuple[Unit, ...], module: Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Gather the weights of a module before its forward pass, and start with the next ones."""
        units = self._with_given(units, kwargs)
        if self._bypassed or not units:
            return
        if in_backward():  # a recomputation
            current = self._backward
            assert current is not None
            call = current.calls[current.last_call(units)]
            current.hold(call.all_units, current.ahead)
            return
        if self._forward is None:  # the module is not called by its chunk
            self._forward = _Pass()
        current = self._forward
        outer = current.calls[current.open[-1]].all_units if current.open else ()
        number = len(current.calls)
        current.open.append(number)
        current.calls.append(_Call(units, outer, _reads_weights(module)))
        ahead = self._order[number + 1].units if number + 1 < len(self._order) else ()
        current.hold((*current.kept, *outer, *units), ahead)

    def _leave(
        self,
        units: tuple[Unit, ...],
        module: Module,
        args: Any,
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> None:
        """Free the weights of a module after its forward pass, until its backward pass begins."""
        units = self._with_given(units, kwargs)
        if self._bypassed or not units:
            return
        recomputes = in_backward()
        current = self._backward if recomputes else self._forward
        assert current is not None
        index = current.last_call(units) if recomputes else current.open.pop()
        if kwargs.get("weight_only"):
            current.kept += units
            return
        if not recomputes:
            current.hold((*current.kept, *current.calls[index].outer), current.ahead)
        if _reads_weights(module) and torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    hook = partial(self._return, current, index)
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _return(self, current: _Pass, index: int, _gradient: Tensor) -> None:
        """Gather the weights of a call before its backward pass, and start with the next ones."""
        if not self._bypassed:
            current.hold(current.calls[index].all_units, current.before(index))

    @contextmanager
    def whole_weights(self, *, writes: bool = False) -> Iterator[None]:
        """Inside the block, hold the weights of all ranks, as without sharding.

        With ``writes``, this rank's shard of what the block writes to them is kept.
        """
        self.free()
        for unit in self.units:
            unit.hold(self)
        for unit in self.units:
            unit.wait()
        self._bypassed = True
        try:
            yield
            for bucket in (bucket for unit in self.units for bucket in unit.buckets if writes):
                bucket.keep()
        finally:
            self._bypassed = False
            self.free()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load the state of the module; that of a sharded weight is a list of parts of the shard.

        They are in the order of their elements. A frozen weight may be a list of all its parts.
        Other tensors are whole.
        """
        self.free()
        bare: Any = unwrap_model(self)
        own = dict(bare.named_parameters())
        found = ((n, getattr(p, "weight_shard", None)) for n, p in own.items())
        shards = {name: shard for name, shard in found if shard is not None}
        parts = {n: x for n, x in state_dict.items() if n in own and isinstance(x, list)}
        for name, values in parts.items():
            kept = shards[name].values if name in shards else own[name].detach().view(-1)
            kept.copy_(torch.cat([value.reshape(-1) for value in values]))
        rest = {name: value for name, value in state_dict.items() if name not in parts}
        with self.whole_weights(writes=True) if shards.keys() & rest.keys() else ExitStack():
            result = bare.load_state_dict(rest, strict=False)
        lacking = [name for name in result.missing_keys if name not in parts]
        missing = [name for name in lacking if name not in shards or shards[name].values.numel()]
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(
                f"The state lacks {missing} of the model, which lacks {result.unexpected_keys}."
            )
        return result


def _reads_weights(module: Module) -> bool:
    """Return whether a module's backward pass reads its weights; that of a look-up does not."""
    return not hasattr(module, "num_embeddings")


def _units(module: Module, *, is_layer: bool = False) -> Iterator[tuple[Module, list[Parameter]]]:
    """Yield each module whose weights are gathered together, with its trained parameters.

    These are the items of the outermost lists or dictionaries of modules, the layers; outside of
    them, each module with parameters of its own. ``is_layer`` tells whether ``module`` is an item.
    """
    own = [p for p in module.parameters(recurse=is_layer) if p.requires_grad]
    if own:
        yield module, own
    for child in () if is_layer else module.children():
        yield from _units(child, is_layer=isinstance(module, (ModuleList, ModuleDict)))


def _join(buffer: Any, unit_of: Mapping[Parameter, Unit]) -> None:
    """Join adjacent buckets of a buffer of megatron-core that hold weights of the same unit."""
    joined: list[Any] = []
    spans: list[tuple[int, int]] = []
    for bucket, (start, end) in zip(buffer.buckets, buffer.bucket_indices, strict=True):
        unit = unit_of[bucket.params_list[0]]
        if joined and unit_of[joined[-1].params_list[0]] is unit:
            joined[-1].params_list += bucket.params_list
            spans[-1] = spans[-1][0], end
        else:
            joined.append(bucket)
            spans.append((start, end))
    for number, (bucket, (start, end)) in enumerate(zip(joined, spans, strict=True)):
        bucket.params = set(bucket.params_list)
        bucket.bucket_id = number
        bucket.param_data = buffer.param_data[start:end]
        bucket.grad_data = buffer.grad_data[start:end]
        for parameter in bucket.params_list:
            low, high = buffer.param_index_map[parameter][:2]
            buffer.param_index_map[parameter] = low, high, number
            buffer.param_to_bucket[parameter] = bucket
            bucket.param_to_index[parameter] = low - start, high - start
        # megatron-core does not count what follows the last parameter.
        bucket.numel_unpadded = max(high for _, high in bucket.param_to_index.values())
    buffer.buckets = joined
    buffer.bucket_indices = spans
    buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in joined)


def _allocate(buffer: Any) -> None:
    """Give a buffer memory for weights that have no copies on other ranks, and fill it."""
    buffer.param_data = buffer.param_data.new_zeros(buffer.numel)
    for bucket, (low, high) in zip(buffer.buckets, buffer.bucket_indices, strict=True):
        bucket.param_data = buffer.param_data[low:high]
    for parameter, (start, end, _) in buffer.param_index_map.items():
        whole = buffer.param_data[start:end].view(parameter.shape)
        whole.copy_(parameter.first_shard.values.view(whole.shape))
        parameter.data = whole
        del parameter.first_shard


def _sharded(buffer: Any) -> Iterator[WeightBucket]:
    """Replace a buffer's ``param_data`` by this rank's shard of it; yield its new buckets."""
    ranks = buffer.data_parallel_group.size()
    own = buffer.param_data.new_empty(buffer.numel // ranks)
    for bucket, (start, end) in zip(buffer.buckets, buffer.bucket_indices, strict=True):
        shard = WeightBucket(buffer, bucket, own[start // ranks : end // ranks])
        bucket.param_data = shard.whole
        yield shard
    buffer.param_data = own


@contextmanager
def whole_weights(chunks: Sequence[Module], *, writes: bool = False) -> Iterator[None]:
    """Inside the block, give every rank the weights of all; see `ShardedWeights.whole_weights`."""
    with ExitStack() as stack:
        for chunk in chunks:
            if isinstance(chunk, ShardedWeights):
                stack.enter_context(chunk.whole_weights(writes=writes))
        yield
