"""What the delayed recipe does between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.device.transfer import HostCopy
from megatron_ext.models.fp8.scaling import DelayedScaling


class AmaxHistories:
    """The delayed scalings of a rank's model chunks; none with other recipes.

    Args:
        chunks: of the model, with or without wrappers.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._scalings = [
            module
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, DelayedScaling)
        ]
        self._asked: tuple[list[DelayedScaling], HostCopy] | None = None

    @property
    def scalings(self) -> list[DelayedScaling]:
        """In the order of the modules, which is that of all ranks of a pipeline stage."""
        return self._scalings

    @torch.no_grad()
    def advance(self) -> None:
        """Take the largest magnitudes of a training step into the histories.

        All ranks of a pipeline stage call this together: they hold parts or copies of the same
        layers, and each expert's on those that hold the expert. A tensor that was nothing but
        zeros, or not finite, leaves its history as it is, and so its scale.
        """
        self._learn()
        for experts in (False, True):
            scalings = [x for x in self._scalings if x.parts.may_idle == experts]
            if scalings:
                _advance(scalings)
        self._ask()

    def _ask(self) -> None:
        """Which layers have whole histories, without waiting for the device."""
        lacking = [x for x in self._scalings if not (x.has_history or x.parts.may_idle)]
        if lacking:
            histories = torch.stack([scaling.amax_history for scaling in lacking])
            self._asked = lacking, HostCopy(histories.any(dim=1).all(dim=1))

    def _learn(self) -> None:
        """The answer of the step before."""
        if self._asked is None:
            return
        scalings, answer = self._asked
        self._asked = None
        for scaling, whole in zip(scalings, answer.read(), strict=True):
            scaling.has_history |= bool(whole)


def _advance(scalings: Sequence[DelayedScaling]) -> None:
    """The same of layers that lie on the same ranks."""
    amax = torch.stack([scaling.amax for scaling in scalings])
    # How collectives compare NaN is not defined.
    amax = torch.where(amax.isfinite(), amax, torch.inf)
    for group in scalings[0].parts.of_step():
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    before = torch.stack([scaling.amax_history for scaling in scalings])
    shifted = torch.cat([amax.unsqueeze(1), before[:, :-1]], dim=1)
    counts = (amax.isfinite() & (amax > 0)).unsqueeze(1)
    after = torch.where(counts, shifted, before)
    scales = scalings[0].scale_of(after)
    torch._foreach_copy_([x.amax_history for x in scalings], list(after.unbind()))
    torch._foreach_copy_([x.scale for x in scalings], list(scales.unbind()))
    torch._foreach_zero_([x.amax for x in scalings])
