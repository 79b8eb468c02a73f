"""Optimizer state in host memory, for the share of it that ``--optimizer-cpu-offload`` moves.

The state of a weight is moved as a whole: its moments and, in a 16-bit run, its float32 weight. The
host then updates this weight: its gradient is copied down and the new weight up. Weights pass one
after another through buffers of the largest weight's size. With two buffers, the next gradient
comes down and the previous weight goes up while the host computes.

Gradients stay on the device until the update, so norm and clipping are computed there. On a CPU the
same copies are made, and an update gives the same bits as without offload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_ext.config.offload import OffloadConfig
from megatron_ext.device.copies import Buffers, Copies, Copy, Traffic
from megatron_ext.optim.adam import start_state
from megatron_ext.optim.fused_adam import model_weights
from megatron_ext.optim.host_share import host_share
from megatron_ext.optim.update import parts_of

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Hosted:
    """A weight that the host updates.

    Attributes:
        main: the float32 tensor that megatron-core's optimizer updates. In a 16-bit run it lies on
            the host; else it is the model's own weight, on the device.
        model: the model's weight on the device, which gets the result.
    """

    main: Tensor
    model: Tensor

    @property
    def has_copy(self) -> bool:
        """Return whether there is a float32 weight beside the model's."""
        return self.main is not self.model


class HostUpdate:
    """Updates some weights of an optimizer on the host, and the others as before.

    It replaces the method ``step`` of a torch optimizer, which gets two attributes: `on_host`, the
    tensors whose state lies on the host, and ``offload``, this object.

    Args:
        part: the optimizer of megatron-core around the torch optimizer, before its first update.

    Attributes:
        traffic: bytes that updates have copied so far.
    """

    def __init__(self, part: Any, flags: OffloadConfig) -> None:
        self._inner = part.optimizer
        self._update = self._inner.step
        self.traffic = Traffic()
        copies = model_weights(part)
        mains = [main for group in self._inner.param_groups for main in group["params"]]
        chosen = host_share([x.numel() for x in mains], flags.optimizer_offload_fraction)
        picked = [mains[index] for index in sorted(chosen)]
        self._hosted = [Hosted(main, copies.get(main, main)) for main in picked]
        self._inner.on_host = set(picked)
        self._inner.offload = self
        self._inner.step = self.step
        self._inner.register_load_state_dict_post_hook(self._move_state)
        self._others = {x: model for x, model in copies.items() if x not in self._inner.on_host}
        device = mains[0].device
        overlap = flags.overlap_cpu_optimizer_d2h_h2d
        self._down = Copies(device, self.traffic, beside=overlap)
        self._up = Copies(device, self.traffic, beside=overlap)
        self._count = 2 if overlap else 1
        pinned = device.type == "cuda" and flags.pin_cpu_params
        pins_gradients = device.type == "cuda" and flags.pin_cpu_grads
        self._gradients = self._buffers(self._hosted, torch.float32, pins_gradients)
        self._weights = {
            dtype: self._buffers([x for x in self._hosted if x.model.dtype is dtype], dtype, pinned)
            for dtype in {x.model.dtype for x in self._hosted}
        }
        for main in (x.main for x in self._hosted if x.has_copy):
            home = torch.empty_like(main, device=HOST, pin_memory=pinned)
            main.data = home.copy_(main)
        if copies:
            self._take_gradients = part._copy_model_grads_to_main_grads
            part._copy_model_grads_to_main_grads = self._copy_gradients
            part._copy_main_params_to_model_params = self._copy_others

    def _buffers(self, hosted: Sequence[Hosted], dtype: torch.dtype, pinned: bool) -> Buffers:
        numel = max((x.main.numel() for x in hosted), default=0)
        return Buffers(numel, dtype, self._count, pinned=pinned)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the parameters that have gradients."""
        assert closure is None, "the gradients are computed before"
        start_state(self._inner)
        groups = self._inner.param_groups
        group_of = {main: group for group in groups for main in group["params"]}
        hosted = [x for x in self._hosted if x.main.grad is not None]
        arrivals: list[Copy] = []
        sent: list[Copy] = []

        def fetch() -> None:
            turn = len(arrivals)
            if turn >= self._count:
                sent[turn - self._count].wait()  # its buffer is still being read
            arrivals.append(self._fetch(turn, hosted[turn]))

        self._down.begin()
        if hosted:
            fetch()
        with self._only(
            [{**group, "params": self._without_hosted(group["params"])} for group in groups]
        ):
            self._update()
        self._up.begin()
        with self._decision_on_host() as applies:
            for turn, each in enumerate(hosted if applies else ()):
                while len(arrivals) < min(turn + self._count, len(hosted)):
                    fetch()
                arrivals[turn].wait()
                self._update_on_host(turn, each, group_of[each.main])
                sent.append(self._send(turn, each))
        self._up.end()

    @contextmanager
    def _decision_on_host(self) -> Iterator[bool]:
        """Inside the block, let the optimizer have on the host what a fused Adam reads.

        These are the scale of the gradients, and whether to skip the update (see `optim.update`).
        The result is False if it must be skipped.
        """
        inner = self._inner
        names = ("found_inf", "grad_scale")
        kept = {name: x for name in names if (x := getattr(inner, name, None)) is not None}
        for name, value in kept.items():
            setattr(inner, name, value.to(HOST))
        try:
            yield "found_inf" not in kept or not bool(inner.found_inf)
        finally:
            for name, value in kept.items():
                setattr(inner, name, value)

    def _without_hosted(self, mains: Sequence[Tensor]) -> list[Tensor]:
        return [main for main in mains if main not in self._inner.on_host]

    def _fetch(self, turn: int, each: Hosted) -> Copy:
        """Begin to copy what the update needs to the host; return the last copy."""
        assert each.main.grad is not None
        copy = self._down.to_host(self._gradients.view(turn, each.main), each.main.grad)
        if not each.has_copy:
            copy = self._down.to_host(
                self._weights[each.main.dtype].view(turn, each.main), each.main
            )
        return copy

    def _update_on_host(self, turn: int, each: Hosted, group: dict[str, Any]) -> None:
        """Update a weight's state and its float32 value, both in host memory."""
        if each.has_copy:
            weight = each.main.detach()
        else:
            weight = self._weights[each.main.dtype].view(turn, each.main)
        weight.grad = self._gradients.view(turn, weight)
        inner = self._inner
        inner.state[weight] = inner.state[each.main]
        with self._only([{**group, "params": [weight]}], kernel=False):
            self._update()
        inner.state[each.main] = inner.state.pop(weight)
        weight.grad = None

    def _send(self, turn: int, each: Hosted) -> Copy:
        """Begin to copy an updated weight to the model."""
        source = self._weights[each.model.dtype].view(turn, each.model)
        if each.has_copy:
            source.copy_(each.main)
        return self._up.to_device(each.model, source)

    @contextmanager
    def _only(self, groups: list[dict[str, Any]], *, kernel: bool = True) -> Iterator[None]:
        """Inside the block, let the optimizer have these parameter groups.

        Without ``kernel`` it also has no kernel of its own for a GPU.
        """
        inner = self._inner
        kept = inner.param_groups
        make_kernel = getattr(inner, "make_kernel", None)
        inner.param_groups = groups
        if not kernel and make_kernel is not None:
            inner.make_kernel = None
        try:
            yield
        finally:
            inner.param_groups = kept
            if make_kernel is not None:
                inner.make_kernel = make_kernel

    def _move_state(self, inner: torch.optim.Optimizer) -> None:
        """Move loaded state to the host: torch puts it where the weight is."""
        for main in (x.main for x in self._hosted if x.main in inner.state):
            state = inner.state[main]
            inner.state[main] = {
                name: x.to(HOST) if isinstance(x, Tensor) else x for name, x in state.items()
            }

    def _copy_gradients(self) -> None:
        """Set the gradients of the float32 weights, on the device, as megatron-core does.

        torch checks that a gradient is set on the device of its tensor, but not later.
        """
        homes = [(x.main, x.main.data) for x in self._hosted if x.has_copy]
        for each in (x for x in self._hosted if x.has_copy):
            nothing = torch.empty((), dtype=each.main.dtype, device=each.model.device)
            each.main.data = nothing.expand(each.main.shape)
        try:
            self._take_gradients()
        finally:
            for main, home in homes:
                main.data = home

    @torch.no_grad()
    def _copy_others(self) -> None:
        """Round the float32 weights on the device to the model's; the host has sent its own."""
        for main, model in self._others.items():
            model.copy_(main)


def offload_state(optimizer: MegatronOptimizer, flags: OffloadConfig) -> None:
    """Move a share of the state of each optimizer in a chain to the host, and update it there."""
    for part in parts_of(optimizer):
        inner = getattr(part, "optimizer", None)
        if inner is not None and any(group["params"] for group in inner.param_groups):
            HostUpdate(part, flags)
