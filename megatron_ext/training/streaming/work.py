"""How much a streaming step computes: counted while it runs, since exit steps are drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ext.models.causal_video import VideoDiT
from megatron_ext.models.causal_video.flops import flops_of_pass
from megatron_ext.models.flops import FORWARD_AND_BACKWARD


class WorkCounter:
    """Counts every pass of some networks: denoising steps, write-backs, teacher, critic and so on.

    A pass with gradient counts three times, for its backward pass, or twice where only its input
    gets one; what is computed again to save
    memory does not count, as in all throughputs of this package.

    Args:
        networks: this rank's parts, wrapped or not, whose operations are those of the `VideoDiT` in
            them; a score in closed form is free.
    """

    def __init__(self, networks: Iterable[torch.nn.Module]) -> None:
        self._flops = 0.0
        for network in networks:
            for module in network.modules():
                if isinstance(module, VideoDiT):
                    module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: VideoDiT, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        passes = FORWARD_AND_BACKWARD if trains else 1
        if not trains and torch.is_grad_enabled() and inputs["x"].requires_grad:
            passes = 2
        ranks = model.tp_group.size() * model.cp_group.size() * model.num_stages
        self._flops += passes * flops_of_pass(model, *args, **inputs) / ranks

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Passes inside of the block are no work of a step."""
        flops = self._flops
        try:
            yield
        finally:
            self._flops = flops

    def take(self) -> float:
        """Floating-point operations of this rank since the last call; all ranks have as many."""
        flops, self._flops = self._flops, 0.0
        return flops
