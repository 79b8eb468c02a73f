"""CUDA graphs of transformer layers (``--cuda-graph-impl local``).

The kernels of a layer's forward pass are recorded once and then launched by a single call; the same
holds for its backward pass. They read and write fixed addresses, so each layer has a pair of graphs
for each micro-batch in flight: a *slot*. The graphs of one slot share a memory pool, and graphs of
different slots may be replayed in any order.

`torch.cuda.make_graphed_callables` records the graphs, with the weights as arguments of the
recorded function. A recording uses new leaf tensors that share the parameters' storage, because the
parameters' own gradient accumulators belong to the default stream, and a recording must not wait
for that stream. A replay uses the parameters themselves, whose accumulators and hooks run as usual.
The hooks of data parallelism consume each gradient at once, before the next replay overwrites it.

megatron-core's own CUDA graph manager (0.16.1) is not used, for the reasons in DECISIONS.md (62),
and because it overwrites a chunk's input with an output gradient before the backward pass reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.func import functional_call

from megatron_ext.device.streams import other_threads_go_on
from megatron_ext.layers import masks
from megatron_ext.layers.hooks import call_pre_hooks

Graphed = Callable[..., Tensor]


@dataclass(frozen=True)
class Argument:
    """The properties of a layer's tensor argument, which must not change after the recording."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def arguments_of(call: dict[str, Any]) -> tuple[Argument, ...]:
    """Return the `Argument` of each tensor in a layer's arguments; all others must be None."""
    arguments = []
    for name, x in ((name, value) for name, value in call.items() if value is not None):
        assert torch.is_tensor(x), f"{name} of a layer is neither a tensor nor None"
        arguments.append(Argument(name, x.shape, x.dtype, x.device, x.requires_grad))
    return tuple(arguments)


@dataclass
class LayerGraphs:
    """The graphs of one layer.

    Attributes:
        is_first: whether the layer is the first of its chunk; if so, its input gradient may be sent
            to another stage.
        live: whether the graphs may be replayed.
        arguments: the tensor arguments of the layer's first call.
        seen: all keyword arguments of that call by name, with None for those that need a gradient.
        slots: for each micro-batch in flight, a function that replays the graphs.
        added: for each weight, whether the graphs add its gradient to the data-parallel buffer, so
            that autograd's hooks must not.
    """

    is_first: bool
    live: bool = False
    arguments: tuple[Argument, ...] = ()
    seen: dict[str, Tensor | None] = field(default_factory=dict)
    slots: list[Graphed] = field(default_factory=list)
    added: list[bool] = field(default_factory=list)

    def note(self, call: dict[str, Any]) -> None:
        """Store the arguments of the layer's first call."""
        if not self.arguments:
            self.arguments = arguments_of(call)
            free = {argument.name for argument in self.arguments if argument.requires_grad}
            self.seen = {name: None if name in free else value for name, value in call.items()}

    def samples(self, copies: dict[int, Tensor]) -> list[Tensor]:
        """Return the input tensors with which a graph of the layer is recorded.

        An argument that needs a gradient is recorded with zeros, any other one with a copy of the
        tensor of the layer's first call. ``copies`` collects these copies by the id of the copied
        tensor. Pass the same dict for all layers of a slot: layers that were called with the same
        tensor must get the same copy, because they cache results by the identity of a tensor.
        """
        tensors = []
        for argument in self.arguments:
            seen = self.seen[argument.name]
            if seen is None:
                like: Any = {"dtype": argument.dtype, "device": argument.device}
                tensors.append(torch.zeros(argument.shape, **like, requires_grad=True))
            else:
                tensors.append(copies.setdefault(id(seen), seen.clone()))
        return tensors

    def takes(self, call: dict[str, Any]) -> bool:
        """Return whether the graphs are live and fit the properties of this call's arguments."""
        return self.live and arguments_of(call) == self.arguments

    def replay(self, layer: TransformerLayer, call: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Replay the layer's graphs; return its output ``[s, b, h]``, and None as the context."""
        weights = list(layer.parameters())
        for weight, added in zip(weights, self.added, strict=True):
            if added:
                weight.grad_added_to_main_grad = True
        call_pre_hooks(layer)
        tensors = [call[argument.name] for argument in self.arguments]
        if self.is_first:
            tensors = [_Owned.apply(x) if x.requires_grad else x for x in tensors]  # type: ignore[no-untyped-call]
        slot = self.slots[layer.current_microbatch % len(self.slots)]
        return slot(*tensors, *weights), None

    def function(self, layer: TransformerLayer) -> Graphed:
        """Return the layer as a function of its tensor arguments followed by its weights."""
        names = [argument.name for argument in self.arguments]
        weights = [name for name, _ in layer.named_parameters()]
        absent = dict.fromkeys(self.seen)

        def run(*tensors: Tensor) -> Tensor:
            given = dict(zip(names, tensors[: len(names)], strict=True))
            parameters = dict(zip(weights, tensors[len(names) :], strict=True))
            output, _ = functional_call(layer, parameters, (), {**absent, **given})
            return output  # type: ignore[no-any-return]

        return run


class _Owned(torch.autograd.Function):
    """An identity whose gradient is copied out of the graph's memory.

    The next micro-batch overwrites that memory, perhaps while the gradient is still being sent.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


class ChunkGraphs:
    """The graphs of one model chunk, recorded after each layer has run ``warmup_steps`` times.

    Attributes:
        gradient_placeholder: tensors by shape and dtype; autograd gets one of them for a weight
            whose gradient is already in the gradient buffer.
    """

    def __init__(self, layers: Sequence[TransformerLayer], warmup_steps: int) -> None:
        self.layers = list(layers)
        self.warmup_steps = warmup_steps
        self.gradient_placeholder: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self._masks: list[dict[Any, Any]] = []  # for each slot; see `masks.NewestMask`
        self.graphs = [LayerGraphs(is_first=index == 0) for index in range(len(layers))]
        for layer, graphs in zip(self.layers, self.graphs, strict=True):
            layer.graphs = graphs

    @property
    def num_slots(self) -> int:
        """Return the number of slots: the largest number of micro-batches in flight at a time."""
        return len(self.graphs[0].slots) if self.graphs else 0

    def switch(self, on: bool) -> None:
        """Enable or disable the replay of the layers' graphs."""
        for graphs in self.graphs:
            graphs.live = on

    def capture(self, num_slots: int) -> None:
        """Record graphs until there are ``num_slots`` slots; record none if a layer never ran.

        All ranks that share a layer call this together. Afterwards the gradient buffers are zero,
        the GPU's random state is as before, and replay is disabled until `switch` enables it.
        """
        self.switch(False)
        random_state = torch.cuda.get_rng_state()
        if self.layers and all(graphs.arguments for graphs in self.graphs):
            for _ in range(num_slots - self.num_slots):
                self._add_slot()
        torch.cuda.set_rng_state(random_state)
        for layer in self.layers:
            for parameter in layer.parameters():
                if hasattr(parameter, "main_grad"):
                    parameter.main_grad.zero_()

    def _add_slot(self) -> None:
        functions = []
        samples = []
        weights = []
        copies: dict[int, Tensor] = {}
        for layer, graphs in zip(self.layers, self.graphs, strict=True):
            weights.append([self._leaf_of(parameter) for parameter in layer.parameters()])
            functions.append(graphs.function(layer))
            samples.append((*graphs.samples(copies), *weights[-1]))
        self._masks.append({})
        with other_threads_go_on(), masks.newest.kept_for_graphs(self._masks[-1]):
            recorded = torch.cuda.make_graphed_callables(
                tuple(functions), tuple(samples), num_warmup_iters=self.warmup_steps
            )
        for graphs, slot, leaves in zip(self.graphs, recorded, weights, strict=True):
            graphs.slots.append(slot)  # type: ignore[arg-type]
            graphs.added = [getattr(leaf, "grad_added_to_main_grad", False) for leaf in leaves]

    def _leaf_of(self, parameter: torch.nn.Parameter) -> Tensor:
        """Return a new leaf tensor with the parameter's storage and gradient buffer."""
        leaf: Any = parameter.detach().requires_grad_(parameter.requires_grad)
        if hasattr(parameter, "main_grad"):
            leaf.main_grad = parameter.main_grad
            key = parameter.shape, parameter.dtype
            if key not in self.gradient_placeholder:
                self.gradient_placeholder[key] = torch.empty_like(parameter, requires_grad=False)
            leaf.gradient_placeholder = self.gradient_placeholder[key]
        return leaf  # type: ignore[no-any-return]
