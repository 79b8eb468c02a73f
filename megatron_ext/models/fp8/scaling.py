"""Where the scales of a layer's tensors come from.

No scale may depend on how a tensor is cut: the largest magnitude of a part is completed over the
ranks that hold the other parts (`Parts`). Data-parallel ranks hold other micro-batches, which are
other tensors; only the delayed recipe, whose scales serve a whole step, looks at all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.fp8 import Fp8Config
from megatron_ext.models.fp8.formats import (
    E4M3,
    GRADIENT_FORMATS,
    Quantized,
    cast,
    largest,
    scale_for,
)

HISTORY = ".fp8.amax_history"
"""Ends the names of the delayed recipe's state, of all that there is in a checkpoint."""


class Role(IntEnum):
    """The three tensors that a layer's products take."""

    INPUT = 0
    WEIGHT = 1
    GRADIENT = 2
    """Of the output."""


class Parts:
    """Which ranks hold the other parts of what a scale covers; None where it is whole.

    Args:
        pgs: groups of this rank.
        cuts_input: the layer is row-parallel, so that the input's features are cut; otherwise the
            output's are.
        cuts_sequence: the input comes cut along the sequence (sequence parallelism).
    """

    def __init__(
        self, pgs: ProcessGroupCollection, *, cuts_input: bool, cuts_sequence: bool
    ) -> None:
        self._pgs = pgs
        self._cuts_input = cuts_input
        self._cuts_sequence = cuts_sequence

    def of_tensor(self, role: Role) -> ProcessGroup | None:
        """For one scale of a whole tensor."""
        if role is Role.WEIGHT:
            return _if_several(self._pgs.tp)
        cut = self._cuts_input or self._cuts_sequence
        if role is Role.GRADIENT:
            cut = not self._cuts_input
        return _if_several(self._pgs.tp_cp if cut else self._pgs.cp)

    def of_rows(self, role: Role) -> ProcessGroup | None:
        """For one scale of each row: of a token, or of an output feature of the weight."""
        cut = self._cuts_input if role is not Role.GRADIENT else not self._cuts_input
        return _if_several(self._pgs.tp) if cut else None

    def of_columns(self, role: Role) -> ProcessGroup | None:
        """For one scale of each column: over all tokens, or of an input feature of the weight."""
        if role is not Role.WEIGHT:
            return _if_several(self._pgs.cp)
        return None if self._cuts_input else _if_several(self._pgs.tp)


def _if_several(group: ProcessGroup) -> ProcessGroup | None:
    return group if group.size() > 1 else None


def _over(amax: Tensor, group: ProcessGroup | None) -> Tensor:
    """The largest over a group; infinite where a rank's is not finite."""
    if group is None:
        return amax
    # How collectives compare NaN is not defined.
    amax = torch.where(amax.isfinite(), amax, torch.full_like(amax, torch.inf))
    torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    return amax


class Scaling(torch.nn.Module):
    """One scale for each tensor, from the tensor itself (``--fp8-recipe tensorwise``).

    Args:
        config: with a format.
        parts: how the layer is cut.
    """

    by_rows: ClassVar[bool] = False

    def __init__(self, config: Fp8Config, parts: Parts) -> None:
        super().__init__()
        assert config.fp8_format is not None
        self.config = config
        self.parts = parts
        self.formats = (E4M3, E4M3, GRADIENT_FORMATS[config.fp8_format])

    @property
    def keeps_input(self) -> bool:
        """The weight's gradient needs the input itself, not what the forward product took."""
        return self.by_rows or not self.config.fp8_wgrad

    def rows(self, x: Tensor, role: Role) -> Quantized:
        """A matrix ``[m, k]``, to be summed along k."""
        scale = self._scale(x, role)
        return Quantized(cast(x, scale, self.formats[role]), scale)

    def columns(self, x: Tensor, role: Role, scale: Tensor) -> Quantized:
        """The transpose ``[k, m]`` of a matrix ``[m, k]``, to be summed along m.

        Args:
            x: the matrix.
            role: of it.
            scale: what `rows` gave the same matrix.
        """
        return Quantized(cast(x, scale, self.formats[role]), scale).transposed()

    def _scale(self, x: Tensor, role: Role) -> Tensor:
        amax = _over(largest(x), self.parts.of_tensor(role))
        return scale_for(amax, torch.finfo(self.formats[role]).max)


class RowScaling(Scaling):
    """A scale for each row that a product sums along (``--fp8-recipe rowwise``)."""

    by_rows = True

    def rows(self, x: Tensor, role: Role) -> Quantized:
        """See `Scaling.rows`; the scale is ``[m, 1]``."""
        return self._quantized(x, role, self.parts.of_rows(role))

    def columns(self, x: Tensor, role: Role, scale: Tensor) -> Quantized:
        """See `Scaling.columns`; the scale is made anew, ``[k, 1]``."""
        return self._quantized(x.t(), role, self.parts.of_columns(role))

    def _quantized(self, x: Tensor, role: Role, group: ProcessGroup | None) -> Quantized:
        dtype = self.formats[role]
        amax = _over(largest(x, of_rows=True), group)
        scale = scale_for(amax, torch.finfo(dtype).max)
        return Quantized(cast(x, scale, dtype), scale)


class DelayedScaling(Scaling):
    """One scale for each tensor, from the steps before (``--fp8-recipe delayed``).

    The scales of a step are those of its beginning, whatever the order of its micro-batches, and
    what it sees is gathered as a maximum, so that a pass that is computed twice counts once.
    `history.AmaxHistories` moves them on after the step. Until then, in the first step of all, a
    tensor has the scale of its own: Transformer Engine's 1 would lose gradients that are below
    the smallest number of the format.

    Attributes:
        amax_history: largest magnitudes, ``[steps, 3]`` float32, the latest first; zero where
            there is none yet. The only state that a checkpoint holds.
        scale: that follows from it, ``[3]``.
        amax: of the step so far, on this rank, ``[3]``.
    """

    amax_history: Tensor
    scale: Tensor
    amax: Tensor

    def __init__(self, config: Fp8Config, parts: Parts) -> None:
        super().__init__(config, parts)
        self.register_buffer("amax_history", torch.zeros(config.fp8_amax_history_len, len(Role)))
        self.register_buffer("scale", torch.ones(len(Role)), persistent=False)
        self.register_buffer("amax", torch.zeros(len(Role)), persistent=False)
        self.has_history = False
        self.register_load_state_dict_post_hook(_follow_history)  # type: ignore[no-untyped-call]
        self._mark()

    def _mark(self) -> None:
        """Let runs start on weights that were saved without a history."""
        self.amax_history.new_branch = True  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DelayedScaling:
        """Move the state along, but keep it in float32 when the model is cast to 16 bits."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self._buffers[name]
            assert buffer is not None and moved is not None
            self._buffers[name] = buffer.to(moved.device)
        self._mark()
        return self

    def _scale(self, x: Tensor, role: Role) -> Tensor:
        amax = largest(x)
        if self.training:
            self.amax[role] = torch.maximum(self.amax[role], amax)
        if self.has_history:
            # As in `scale_for`: what is not finite must not be cut off unseen.
            return torch.where(amax.isfinite(), self.scale[role], torch.nan)
        amax = _over(amax, self.parts.of_tensor(role))
        return scale_for(amax, torch.finfo(self.formats[role]).max)

    def limits(self) -> Tensor:
        """The largest numbers of the three formats, ``[3]`` float32."""
        return self.scale.new_tensor([torch.finfo(dtype).max for dtype in self.formats])

    def scale_of(self, histories: Tensor) -> Tensor:
        """Scales ``[..., 3]`` that follow from histories ``[..., steps, 3]``."""
        if self.config.fp8_amax_compute_algo == "max":
            amax = histories.amax(dim=-2)
        else:
            amax = histories[..., 0, :]
        return scale_for(amax, self.limits(), self.config.fp8_margin)


def _follow_history(scaling: Any, _keys: Any) -> None:
    """After a history was loaded."""
    scaling.scale.copy_(scaling.scale_of(scaling.amax_history))
    scaling.has_history = bool(scaling.amax_history.any())


RECIPES: dict[str, type[Scaling]] = {
    "tensorwise": Scaling,
    "rowwise": RowScaling,
    "delayed": DelayedScaling,
}
"""By ``--fp8-recipe``."""
