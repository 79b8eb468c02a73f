"""Initial weights that do not depend on the parallel layout.

megatron-core draws each rank's part of a weight from that rank's generator, so the weights depend
on the layout. Here building the model only registers the parameters (`Marked`). Then each full
tensor is drawn in float32 on the CPU, from a generator seeded with the tensor's name and the run's
seed, and the rank keeps its part. ``--use-cpu-initialization`` keeps Megatron-LM's method.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import mapping
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from megatron_ext.errors import ConfigError


def device_of(transformer_config: Any) -> Any:
    """Return the device on which the parameters of a model are created."""
    on_cpu = transformer_config.use_cpu_initialization
    return "cpu" if on_cpu else torch.cuda.current_device()


@dataclass(frozen=True)
class Shard:
    """The part of one full parameter (or gradient) that a rank holds.

    Attributes:
        name: name of the full tensor with the indices of its layer and expert, such as
            ``decoder.layers.mlp.linear_fc1.weight[3]``; the same in all layouts.
        full_shape, offset: shape of the full tensor, and the position in it where the part begins.
        tensor: this rank's part, a view of the parameter's memory.
        is_main: True on exactly one of the ranks that hold a copy of the part.
        is_vocabulary: whether rows are entries of a vocabulary, whose padding depends on the
            layout.
    """

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
    is_main: bool
    is_vocabulary: bool

    def cut(self, full: Tensor) -> Tensor:
        """Return the part of the tensor ``full`` that this shard covers."""
        parts = zip(self.offset, self.tensor.shape, strict=True)
        return full[tuple(slice(start, start + size) for start, size in parts)]


def shards_of(
    chunk: Any,
    tensor_of: Callable[[Tensor], Tensor | None] = lambda parameter: parameter,
    *,
    buffers: bool = False,
) -> Iterator[Shard]:
    """Yield a shard for each parameter of a chunk, or for each half or expert in a parameter.

    Args:
        tensor_of: takes a parameter and returns the tensor to yield in its place, such as its
            gradient; None skips the parameter.
        buffers: whether to also yield buffers that are saved, such as the bias of experts.
    """
    for parameter, entry in _entries(chunk, buffers=buffers):
        tensor = tensor_of(parameter)
        if tensor is not None:
            yield from _parts(entry, tensor)


def _entries(chunk: Any, *, buffers: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yield each parameter of a chunk with its entry in ``sharded_state_dict``."""
    by_place = {_place(parameter): parameter for parameter in chunk.parameters()}
    if buffers:
        by_place |= {_place(buffer): buffer for buffer in chunk.buffers()}
    kinds = mapping.ShardedTensor, mapping.ShardedTensorFactory
    for entry in chunk.sharded_state_dict(metadata=_METADATA).values():
        if isinstance(entry, kinds) and entry.data is not None:
            parameter = by_place.get(_place(entry.data))
            if parameter is not None:
                yield parameter, entry
                entry.data = None  # the memory of values that have moved elsewhere is free


def _parts(entry: Any, tensor: Tensor) -> Iterator[Shard]:
    """Yield the shards of one entry of ``sharded_state_dict``, with ``tensor`` as its data."""
    entry.data = tensor.view(entry.data.shape)
    state: dict[str, Any] = {entry.key: entry}
    mapping.apply_factories(state)
    for part in nested_values(state):
        layers = part.prepend_axis_num
        indices = "".join(f"[{index}]" for index in part.global_offset[:layers])
        yield Shard(
            name=part.key + indices,
            full_shape=tuple(part.global_shape[layers:]),
            offset=tuple(part.global_offset[layers:]),
            tensor=part.data,
            is_main=mapping.is_main_replica(part.replica_id),
            is_vocabulary=part.allow_shape_mismatch,
        )


def _place(tensor: Tensor) -> int:
    """Return a key for a parameter: its address, or the object's id if it is kept in 8 bits."""
    return id(tensor) if is_float8tensor(tensor) else tensor.data_ptr()


_METADATA = {"singleton_local_shards": False}

Initialize = Callable[[Tensor], Any]

Staged = dict[int, tuple[Any, Tensor]]
"""By the id of an 8-bit parameter: the parameter, and a plain tensor to fill in its place."""

METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")


class Marks:
    """The parameters that wait for initial values, and the methods that will draw them.

    A parameter is identified by its storage, because Transformer Engine puts a weight into a new
    Parameter without the attributes of the old one.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Tensor, Initialize]] = {}
        self._held: list[Any] = []

    def settle(self) -> None:
        """Recompute the keys from the storages, since a parameter may have moved to a new one."""
        waiting = self._waiting.values()
        self._waiting = {memory_key(p): (p, method) for p, method in waiting}

    @torch.no_grad()
    def add(self, parameter: Tensor, method: Initialize, *, keeps_memory: bool = True) -> None:
        """Register a parameter and fill it with NaN, which shows if it never gets a value.

        Without ``keeps_memory``, the parameter has no memory until `allocate`.
        """
        if not keeps_memory and not is_float8tensor(parameter):
            # One number takes the place of all.
            parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
        # Keep two references, so that no other parameter can reuse this memory, even after a move.
        self._waiting[memory_key(parameter)] = parameter, method
        if not is_float8tensor(parameter):
            self._held.append(parameter.untyped_storage())
        parameter.fill_(math.nan)

    def allocate(self, parameter: Tensor) -> None:
        """Give a registered parameter memory for its values, unless it has kept its own."""
        if parameter.untyped_storage().nbytes() < parameter.numel() * parameter.element_size():
            parameter.data = parameter.data.contiguous()

    def method_of(self, tensor: Tensor) -> Initialize | None:
        """Return the method registered for a tensor, or for the parameter of which it is a part.

        Return None if no method is registered.
        """
        return self._waiting.get(memory_key(tensor), (None, None))[1]

    def clear(self) -> None:
        self._waiting.clear()
        self._held.clear()


class Marked:
    """Wraps an initialization method: parameters are registered in `Marks`, and filled later.

    ``keeps_memory`` is an argument of `Marks.add`.
    """

    def __init__(self, method: Initialize, marks: Marks, *, keeps_memory: bool = True) -> None:
        self.method = method
        self.marks = marks
        self._keeps_memory = keeps_memory

    def __call__(self, tensor: Tensor) -> Any:
        """Register a parameter to be filled later; fill any other tensor at once."""
        if not isinstance(tensor, torch.nn.Parameter):
            return self.method(tensor)
        self.marks.add(tensor, self.method, keeps_memory=self._keeps_memory)
        return tensor

    def __deepcopy__(self, _memo: Any) -> Marked:
        """Return this object: modules that copy their configuration must share one `Marks`."""
        return self


def mark_methods(transformer_config: Any, *, keeps_memory: bool = True) -> None:
    """Wrap a TransformerConfig's initialization methods in `Marked`, unless they already are.

    Without ``keeps_memory``, a parameter has no memory until it gets its values, unless it is an
    embedding: two pipeline stages may sum theirs while they are built.
    """
    methods = {name: getattr(transformer_config, name) for name in METHODS}
    shared = [method.marks for method in methods.values() if isinstance(method, Marked)]
    marks = shared[0] if shared else Marks()
    for name, method in methods.items():
        if not isinstance(method, Marked):
            keeps = keeps_memory or name == "embedding_init_method"
            setattr(transformer_config, name, Marked(method, marks, keeps_memory=keeps))


def unmark_methods(transformer_config: Any) -> None:
    """Undo `mark_methods`, so that modules built later fill their parameters at once."""
    for name in METHODS:
        method = getattr(transformer_config, name)
        if isinstance(method, Marked):
            setattr(transformer_config, name, method.method)


@torch.no_grad()
def initialize_split(
    parameter: torch.nn.Parameter, method: Initialize, transformer_config: Any, tp_group: Any
) -> None:
    """Fill a parameter whose first axis tensor-parallel ranks split by a method of its own.

    Like the methods of a TransformerConfig, the method is called with the full tensor, and maybe
    later (see `Marked`).
    """
    if not transformer_config.perform_initialization:
        return
    if isinstance(transformer_config.init_method, Marked):
        transformer_config.init_method.marks.add(parameter, method)
        return
    full = torch.empty(len(parameter) * tp_group.size(), *parameter.shape[1:])
    method(full)
    parameter.copy_(full.chunk(tp_group.size())[tp_group.rank()])


@torch.no_grad()
def initialize_by_name(
    chunks: Sequence[torch.nn.Module],
    transformer_config: Any,
    seed: int,
    vocab_size: int | None = None,
    keep: Callable[[torch.nn.Parameter], None] | None = None,
) -> None:
    """Fill this rank's parameters with values that depend only on their names and the seed.

    Only one full tensor exists at a time. Parameters that `Marked` did not register keep their
    values, except random ones of modules with a ``reset_parameters`` method, such as torch's own:
    these are drawn again by name.

    Args:
        chunks: model chunks without wrappers, on any device and in any dtype.
        transformer_config: the configuration that built the chunks, after `mark_methods`.
        vocab_size: size of the vocabulary before padding, so that its weights do not depend on the
            padding; None means that there is no padding.
        keep: function that is called with each registered parameter as soon as it has its values;
            it may move them elsewhere.

    Raises:
        ConfigError: a chunk's ``sharded_state_dict`` does not name a registered parameter.
    """
    marks: Marks = transformer_config.init_method.marks
    marks.settle()
    for chunk in chunks:
        staged: Staged = {}
        if any(map(is_float8tensor, chunk.parameters())):
            from megatron_ext.layers.transformer_engine import stage_quantized

            staged = stage_quantized(chunk, marks.add)

        def unquantized(parameter: Tensor, staged: Staged = staged) -> Tensor | None:
            if id(parameter) in staged:
                return staged[id(parameter)][1]
            return None if is_float8tensor(parameter) else parameter

        marked = {id(p) for p in chunk.parameters() if marks.method_of(p) is not None}
        filled = set[int]()
        others: list[Shard] = []
        for parameter, entry in _entries(chunk):
            values = unquantized(parameter)
            if values is None:
                continue
            method = marks.method_of(values)
            if method is None:
                others += _parts(entry, values)
                continue
            if getattr(parameter, "shared_embedding", False):
                # A copy of the embedding on another stage gets the values of the embedding.
                method = transformer_config.embedding_init_method.method
            marks.allocate(values)
            _draw_parts(_parts(entry, values), method, seed, vocab_size)
            filled.add(id(parameter))
            if keep is not None:
                keep(parameter)
        for parameter, values in staged.values():
            parameter.copy_(values)
            if hasattr(parameter, "get_high_precision_init_val"):
                # The optimizer's fp32 weights start from the exact values.
                parameter.get_high_precision_init_val().copy_(values)
        # Without initialization, a weight is whatever its memory contained, which may include NaN.
        for name, parameter in chunk.named_parameters():
            checked = transformer_config.perform_initialization and parameter.is_floating_point()
            if checked and id(parameter) not in filled and parameter.flatten()[:1].isnan().any():
                raise ConfigError(
                    f"the weight `{name}` has no initial values: `sharded_state_dict()` of its "
                    "module must name it, so that its values can be drawn and saved; or use "
                    "`--use-cpu-initialization`."
                )
        _redraw_plain_modules(chunk, others, marked, seed)
    marks.clear()


def memory_key(tensor: Tensor) -> int:
    """Return a key shared by a parameter and its views: storage address, or id if in 8 bits."""
    if is_float8tensor(tensor):
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _draw_parts(
    shards: Iterable[Shard], method: Initialize, seed: int, vocab_size: int | None
) -> None:
    """Fill the shards of a parameter, drawing each full tensor once."""
    drawn: tuple[str, Tensor] | None = None
    for shard in shards:
        if drawn is None or drawn[0] != shard.name:
            drawn = None
            drawn = shard.name, draw(shard, method, seed, vocab_size)
        shard.tensor.copy_(shard.cut(drawn[1]))


@contextmanager
def generator_of(name: str, seed: int) -> Iterator[None]:
    """Seed the CPU's generator with a name and the run's seed; restore it after the block."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield


def draw(shard: Shard, method: Initialize, seed: int, vocab_size: int | None) -> Tensor:
    full = torch.empty(shard.full_shape, dtype=torch.float32)
    with generator_of(shard.name, seed):
        if not shard.is_vocabulary or vocab_size is None or vocab_size >= len(full):
            method(full)
        else:
            # A method may depend on the shape, so it must not see the padding, which depends on the
            # layout.
            method(full[:vocab_size])
            method(full[vocab_size:])
    return full


def _redraw_plain_modules(
    chunk: torch.nn.Module, shards: Sequence[Shard], marked: Container[int], seed: int
) -> None:
    """Draw the parameters of modules with ``reset_parameters`` again, seeded by their names.

    Modules whose parameters are sharded, constant, or ``marked`` (by their ids) are left out.
    """
    whole = [shard for shard in shards if shard.full_shape == shard.tensor.shape]
    names = {shard.tensor.data_ptr(): shard.name for shard in whole}
    for module in chunk.modules():
        own = list(module.parameters(recurse=False))
        if not own or not _can_reset(module):
            continue
        name = None if is_float8tensor(own[0]) else names.get(own[0].data_ptr())
        waited = any(id(parameter) in marked for parameter in own)
        # A reset would draw each rank's part of a sharded parameter separately.
        cut = any(getattr(parameter, "tensor_model_parallel", False) for parameter in own)
        # The ones of a norm are not random, and stay.
        varies = any(bool((parameter != parameter.flatten()[:1]).any()) for parameter in own)
        if name is not None and varies and not (waited or cut):
            _redraw(module, name, seed)


def _can_reset(module: torch.nn.Module) -> bool:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        return False
    needed = [p for p in inspect.signature(reset).parameters.values() if p.default is p.empty]
    return all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed)


def _redraw(module: torch.nn.Module, name: str, seed: int) -> None:
    """Initialize a float32 copy of the module on the CPU, and copy the values to the module.

    Parameters that the user's code has written to after ``reset_parameters`` keep their values.
    They are recognized by their version counter, which differs from that of a freshly initialized
    copy.
    """
    fresh = copy.copy(module)
    fresh._parameters = {
        key: None if parameter is None else torch.nn.Parameter(torch.empty(parameter.shape))
        for key, parameter in module._parameters.items()
    }
    reset: Any = fresh.reset_parameters
    with generator_of(name, seed):
        reset()
    for key, parameter in module.named_parameters(recurse=False):
        value = fresh._parameters[key]
        if value is not None and parameter._version == value._version:
            parameter.copy_(value)
