"""Activations in host memory between the forward and the backward pass.

Autograd hands each tensor that it saves for a backward pass to a hook. Here the hook copies the
tensor's memory to the host, beside what the device computes, and keeps only this copy. When the
backward pass needs the first tensor of a layer, all memory of this layer comes back, and with it
that of the layer before, which the backward pass needs next.

``--cpu-offloading-num-layers`` moves what the first layers of each model chunk save; of layers that
are recomputed this is their input. ``--offload-modules`` moves what the named parts of all layers
save. Weights stay, and so does what layers share, such as rotary angles.

The memory of a tensor is moved as a whole, once for all tensors that share it. So each tensor has
its old strides when it is back, and a backward pass computes the same bits. On a CPU the same
copies are made.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from megatron_ext.config.offload import OffloadConfig
from megatron_ext.device.copies import Copies, Copy, Traffic
from megatron_ext.errors import ConfigError
from megatron_ext.layers.hooks import in_backward

EXPERT_PRODUCT = "linear_fc1"


class Stored:
    """The memory of saved tensors: on the host, and on the device again once it is needed."""

    def __init__(self, host: Tensor, left: Copy, group: Group) -> None:
        self._host = host
        self._left = left
        self._group = group
        self._here: Tensor | None = None
        self._back: Copy | None = None

    def fetch(self, up: Copies, device: torch.device) -> None:
        """Begin to copy the memory to the device, unless that was done before."""
        if self._here is None:
            self._here = torch.empty(len(self._host), dtype=torch.uint8, device=device)
            up.begin()
            up.follow(self._left)
            self._back = up.to_device(self._here, self._host)

    def memory(self) -> Any:
        """Return the storage on the device, for use after the copy."""
        self._group.need()
        assert self._here is not None and self._back is not None
        self._back.precede()
        return self._here.untyped_storage()


@dataclass(frozen=True)
class Saved:
    """A saved tensor, as the place of its elements in memory on the host."""

    stored: Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self, device: torch.device) -> Tensor:
        """Return the tensor on the device."""
        place = self.offset, self.size, self.stride
        return torch.empty(0, dtype=self.dtype, device=device).set_(self.stored.memory(), *place)


class Group:
    """The memory that one call of a layer has saved; it comes back together.

    Args:
        before: the group that a backward pass needs next.
    """

    def __init__(self, up: Copies, device: torch.device, before: Group | None) -> None:
        self._up = up
        self._device = device
        self._before = before
        self._entries: list[weakref.ref[Stored]] = []

    def add(self, host: Tensor, left: Copy) -> Stored:
        """Return a new entry of the group."""
        stored = Stored(host, left, self)
        self._entries.append(weakref.ref(stored))
        return stored

    def fetch(self) -> None:
        """Begin to copy all memory of the group to the device, unless that was done before."""
        entries = self._entries
        self._entries = []
        for reference in entries:
            stored = reference()
            if stored is not None:  # else no backward pass needs it any more
                stored.fetch(self._up, self._device)

    def need(self) -> None:
        """Fetch this group and the one before it."""
        self.fetch()
        if self._before is not None:
            self._before.fetch()
            self._before = None


class ActivationOffload:
    """Moves to the host what layers of a model chunk save for the backward pass.

    Args:
        chunk: the model chunk, whose modules get a ``forward`` that turns the hooks on.
        recomputes: whether whole layers are recomputed, so that their inputs are saved outside of
            them.

    Attributes:
        traffic: bytes that have been copied so far.
    """

    def __init__(
        self, chunk: nn.Module, flags: OffloadConfig, device: torch.device, *, recomputes: bool
    ) -> None:
        self._device = device
        self._minimum = max(1, flags.min_offloaded_tensor_size)
        self.traffic = Traffic()
        self._down = Copies(device, self.traffic, beside=True)
        self._up = Copies(device, self.traffic, beside=True)
        self._kept: set[int] = set()
        self._group: Group | None = None
        self._last: Group | None = None
        self._open: dict[tuple[int, int], tuple[Stored, Any]] = {}
        self._recomputes = recomputes
        names = frozenset(flags.offload_modules if flags.fine_grained_activation_offloading else ())
        for block in _blocks(chunk):
            self._replace(block, self._run_block)
            count = flags.cpu_offloading_num_layers
            for index, layer in enumerate(() if names else block.layers):
                offloads = index < count
                how = {"layer": layer, "offloads": offloads, "after": index == count}
                self._replace(layer, functools.partial(self._run_layer, **how))
            norm = getattr(block, "final_layernorm", None)
            if recomputes and isinstance(norm, nn.Module):
                how = {"layer": norm, "offloads": False, "after": False}
                self._replace(norm, functools.partial(self._run_layer, **how))
        for layer in _transformer_layers(chunk) if names else ():
            self._attach_parts(layer, names)

    @staticmethod
    def _replace(module: Any, run: Callable[..., Any], name: str = "forward") -> None:
        """Replace a method of a module by ``run``, which gets the old method first."""
        setattr(module, name, functools.partial(run, getattr(module, name)))

    def _run_block(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the layers of a chunk in order, as the beginning of a pass through the chunk."""
        self._last = self._group = None
        if not (self._recomputes and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        with self._hooks():
            return forward(*args, **kwargs)

    def _run_layer(
        self,
        forward: Callable[..., Any],
        *args: Any,
        layer: nn.Module,
        offloads: bool,
        after: bool,
        **kwargs: Any,
    ) -> Any:
        """Run a layer, and move what is saved in it if it ``offloads``.

        ``after`` says that it is the first layer that does not: its backward pass comes just before
        that of the last one that does.
        """
        if in_backward():
            return forward(*args, **kwargs)
        with self._call(layer, kwargs, offloads=offloads):
            if not (offloads and torch.is_grad_enabled()):
                result = forward(*args, **kwargs)
            else:
                with self._hooks():
                    result = forward(*args, **kwargs)
        last = self._last
        output = result[0] if isinstance(result, tuple) else result
        if after and last is not None and output.requires_grad:
            output.register_hook(lambda _: last.fetch())
        return result

    @contextmanager
    def _call(
        self, layer: nn.Module, kwargs: Mapping[str, Any], *, offloads: bool
    ) -> Iterator[None]:
        """Inside the block, let what is saved belong to a group of its own, if it is moved.

        A recomputed layer runs without gradients. Its input is saved after it, in its group.
        """
        self._open = {}
        self._group = None
        if offloads:
            shared = [value for name, value in kwargs.items() if name != "hidden_states"]
            tensors = (*tree_leaves(shared), *layer.parameters(), *layer.buffers())
            self._kept = {x.untyped_storage()._cdata for x in tensors if isinstance(x, Tensor)}
            self._group = Group(self._up, self._device, self._last)
            if torch.is_grad_enabled() or self._recomputes:
                self._last = self._group
        yield
        if torch.is_grad_enabled():
            self._open = {}
            self._group = None

    def _hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | Saved:
        """Return what autograd keeps of a tensor that it saves."""
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        small = storage.nbytes() < self._minimum * tensor.element_size()
        stays = small or tensor.device != self._device or key[0] in self._kept
        if self._group is None or stays:
            return tensor
        if key not in self._open:
            memory = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            on_gpu = self._device.type == "cuda"
            like: dict[str, Any] = {"dtype": torch.uint8, "device": "cpu", "pin_memory": on_gpu}
            host = torch.empty(len(memory), **like)
            self._down.begin()
            left = self._down.to_host(host, memory)
            # While the storage is held, no other has its number.
            self._open[key] = self._group.add(host, left), storage
        stored = self._open[key][0]
        offset = int(tensor.storage_offset())
        return Saved(stored, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def _unpack(self, kept: Tensor | Saved) -> Tensor:
        """Return the saved tensor of which autograd has kept ``kept``."""
        return kept.tensor(self._device) if isinstance(kept, Saved) else kept

    def _attach_parts(self, layer: Any, names: frozenset[str]) -> None:
        """Turn the hooks on in the named parts of a layer."""
        self._replace(layer, functools.partial(self._run_layer_of_parts, layer=layer))
        attention = getattr(layer, "self_attention", None)
        parts: dict[str, Sequence[Any]] = {
            "attn_norm": [getattr(layer, "input_layernorm", None)],
            "qkv_linear": [getattr(attention, name, None) for name in QKV],
            "core_attn": [getattr(attention, "core_attention", None)],
            "attn_proj": [getattr(attention, "linear_proj", None)],
            "mlp_norm": [getattr(layer, "pre_mlp_layernorm", None)],
        }
        for module in (x for name in names for x in parts.get(name, ()) if x is not None):
            self._replace(module, self._run_part)
        for part in (layer, attention):
            if hasattr(part, "_fuses"):  # Fused functions do not call the parts.
                part._fuses = lambda *_: False  # type: ignore[union-attr]
        experts = getattr(getattr(layer, "mlp", None), "experts", None)
        if experts is None or not names & {"expert_fc1", "moe_act"}:
            return
        first = self._run_part if "expert_fc1" in names else self._run_still
        local = getattr(experts, "local_experts", ())
        for expert in local:
            self._replace(expert.linear_fc1, first)
            self._replace(expert.linear_fc2, self._run_still)
        with_activation = local
        if hasattr(experts, "_product"):
            with_activation = [experts]
            product = functools.partial(self._run_product, first, self._run_still)
            self._replace(experts, product, "_product")
        for module in with_activation if "moe_act" in names else ():
            self._replace(module, self._run_part)

    def _run_layer_of_parts(
        self, forward: Callable[..., Any], *args: Any, layer: nn.Module, **kwargs: Any
    ) -> Any:
        if in_backward() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with self._call(layer, kwargs, offloads=True):
            return forward(*args, **kwargs)

    def _run_part(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if in_backward() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with self._hooks():
            return forward(*args, **kwargs)

    @staticmethod
    def _run_still(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a part of a part without the hooks."""
        with saved_tensors_hooks(_same, _same):
            return forward(*args, **kwargs)

    @staticmethod
    def _run_product(
        first: Callable[..., Any], second: Callable[..., Any], product: Callable[..., Any],
        x: Tensor, ends: Tensor, name: str,
    ) -> Any:  # fmt: skip
        """Run a grouped product of experts as their first or their second linear layer."""
        run = first if name == EXPERT_PRODUCT else second
        return run(product, x, ends, name)


QKV = (
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
)
"""Linear layers that make queries, keys and values, of any kind of attention."""


def _same(tensor: Tensor) -> Tensor:
    return tensor


def offload_activations(
    chunks: Sequence[nn.Module], flags: OffloadConfig, *, recomputes: bool
) -> None:
    """Let what layers of the chunks save lie on the host until a backward pass needs it.

    ``recomputes`` says that whole layers are recomputed. Each chunk gets an `ActivationOffload` as
    its attribute ``activation_offload``.

    Raises:
        ConfigError: a chunk has no ``decoder`` with ``layers``.
    """
    device = torch.empty(0, device=torch.cuda.current_device()).device
    for chunk in chunks:
        if not _blocks(chunk):
            raise ConfigError(
                f"The model `{type(chunk).__name__}` has no `decoder` with `layers`, whose "
                "activations could wait on the host; leave out `--cpu-offloading-num-layers` and "
                "`--fine-grained-activation-offloading`."
            )
        offload = ActivationOffload(chunk, flags, device, recomputes=recomputes)
        chunk.activation_offload = offload  # type: ignore[assignment]


def _blocks(chunk: nn.Module) -> list[Any]:
    """Return the modules that run the layers of a chunk's decoder."""
    decoder = getattr(chunk, "decoder", None)
    return [decoder] if hasattr(decoder, "layers") else []


def _transformer_layers(chunk: nn.Module) -> list[Any]:
    """Return the layers of the decoder and of multi-token prediction."""
    return [x for x in chunk.modules() if hasattr(x, "pre_mlp_layernorm")]
