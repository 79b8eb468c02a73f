"""What the delayed recipe does between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.models.fp8.scaling import DelayedScaling


class AmaxHistories:
    """The delayed scalings of a rank's model chunks; none with other recipes.

    Args:
        chunks: of the model, with or without wrappers.
        pgs: groups of this rank.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], pgs: ProcessGroupCollection) -> None:
        self._scalings = [
            module
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, DelayedScaling)
        ]
        self._pgs = pgs

    @torch.no_grad()
    def advance(self) -> None:
        """Take the largest magnitudes of a training step into the histories.

        All ranks of a pipeline stage call this together: they hold parts or copies of the same
        layers. A tensor that was nothing but zeros, or not finite, leaves its history as it is,
        and so its scale.
        """
        if not self._scalings:
            return
        amax = torch.stack([scaling.amax for scaling in self._scalings])
        # How collectives compare NaN is not defined.
        amax = torch.where(amax.isfinite(), amax, torch.inf)
        group = self._pgs.tp_dp_cp
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
        before = torch.stack([scaling.amax_history for scaling in self._scalings])
        shifted = torch.cat([amax.unsqueeze(1), before[:, :-1]], dim=1)
        counts = (amax.isfinite() & (amax > 0)).unsqueeze(1)
        after = torch.where(counts, shifted, before)
        scales = self._scalings[0].scale_of(after)
        torch._foreach_copy_([x.amax_history for x in self._scalings], list(after.unbind()))
        torch._foreach_copy_([x.scale for x in self._scalings], list(scales.unbind()))
        torch._foreach_zero_([x.amax for x in self._scalings])
        for scaling in self._scalings:
            scaling.has_history = True
