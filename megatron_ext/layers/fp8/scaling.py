"""Where the scales of a layer's tensors come from, and over which ranks they are completed.

No scale may depend on how a tensor is cut: the largest magnitude of a part is completed over the
ranks that hold the other parts (`Parts`). Only the delayed recipe, whose scales serve a whole step,
looks at the micro-batches of other data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.precision import Fp8Config
from megatron_ext.layers.fp8 import matrices
from megatron_ext.layers.fp8.matrices import Pass, Quantized, Wanted


class Role(IntEnum):
    """The three tensors that a layer's products take."""

    INPUT = 0
    WEIGHT = 1
    GRADIENT = 2
    """The gradient of the output."""


class Parts:
    """Which ranks hold the other parts of what one scale covers; None if this rank has it all.

    A row-parallel layer cuts the features of its input, other layers those of their output.
    Sequence parallelism cuts the sequence. ``varies`` says that the number of tokens changes from
    one matrix product to the next.
    """

    may_idle: ClassVar[bool] = False
    """Whether a step may bring no tokens at all."""

    def __init__(
        self,
        pgs: ProcessGroupCollection,
        *,
        cuts_input: bool,
        cuts_sequence: bool = False,
        varies: bool = False,
    ) -> None:
        self._pgs, self.varies = pgs, varies
        self._cuts_input, self._cuts_sequence = cuts_input, cuts_sequence

    def of_tensor(self, role: Role) -> ProcessGroup | None:
        """Return the ranks for one scale of a whole tensor."""
        if role is Role.WEIGHT:
            return _if_several(self._pgs.tp)
        cut = self._cuts_features(role) or (role is Role.INPUT and self._cuts_sequence)
        return _if_several(self._pgs.tp_cp if cut else self._pgs.cp)

    def of_rows(self, role: Role) -> ProcessGroup | None:
        """Return the ranks for one scale of each row: a token, or a feature of the output."""
        return _if_several(self._pgs.tp) if self._cuts_features(role) else None

    def of_columns(self, role: Role) -> ProcessGroup | None:
        """Return the ranks for one scale of each column: over all tokens, or an input feature."""
        if role is Role.WEIGHT:
            return None if self._cuts_input else _if_several(self._pgs.tp)
        cut = role is Role.INPUT and self._cuts_sequence
        return _if_several(self._pgs.tp_cp if cut else self._pgs.cp)

    def _cuts_features(self, role: Role) -> bool:
        return self._cuts_input != (role is Role.GRADIENT)

    def of_step(self) -> tuple[ProcessGroup, ...]:
        """Return the groups, in order, whose ranks together hold the layer and all its copies."""
        return (self._pgs.tp_dp_cp,)


class ExpertParts(Parts):
    """The same as `Parts` for a layer of experts, whose input is the tokens sent to this rank.

    Which tokens these are depends on the layout, and so does a scale computed from them alone.
    """

    may_idle: ClassVar[bool] = True

    def of_tensor(self, role: Role) -> ProcessGroup | None:
        cut = role is Role.WEIGHT or self._cuts_features(role)
        return _if_several(self._pgs.expt_tp) if cut else None

    def of_rows(self, role: Role) -> ProcessGroup | None:
        return _if_several(self._pgs.expt_tp) if self._cuts_features(role) else None

    def of_columns(self, role: Role) -> ProcessGroup | None:
        cut = role is Role.WEIGHT and not self._cuts_input
        return _if_several(self._pgs.expt_tp) if cut else None

    def of_step(self) -> tuple[ProcessGroup, ...]:
        return (self._pgs.expt_tp, self._pgs.expt_dp)


def _if_several(group: ProcessGroup) -> ProcessGroup | None:
    return group if group.size() > 1 else None


HISTORY = ".fp8.amax_history"
"""The end of the names of the delayed recipe's state, all of it that a checkpoint holds."""


def _over(amax: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the largest magnitude over a group; infinite where a rank's is not finite."""
    if group is None:
        return amax
    # Collectives do not define how they compare NaN.
    amax = torch.where(amax.isfinite(), amax, torch.full_like(amax, torch.inf))
    torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    return amax


class Pair(NamedTuple):
    """A matrix ``[m, k]`` as it is, to be summed along k, and its transpose, None unless wanted."""

    rows: Quantized
    columns: Quantized | None


class Scaling(torch.nn.Module):
    """One scale for each tensor, from the tensor itself (``--fp8-recipe tensorwise``).

    Attributes:
        keeps_weight: the weight does not change for a while, so it is cast once (`KeptWeights`).
        kept_weight: what it was cast to.
    """

    def __init__(self, config: Fp8Config, parts: Parts) -> None:
        super().__init__()
        assert config.fp8_format is not None
        self.config, self.parts = config, parts
        self.formats = (matrices.E4M3, matrices.E4M3, matrices.GRADIENT_FORMATS[config.fp8_format])
        self.keeps_weight = False
        self.kept_weight: Pair | None = None

    def pair(self, x: Tensor, role: Role, *, columns: bool) -> Pair:
        """Return a matrix ``[m, k]`` in 8 bits, with ``columns`` also transposed."""
        wanted: Wanted = "both" if columns else "rows"
        scale, rows, turned = self._quantize(x, role, wanted)
        assert rows is not None
        return Pair(Quantized(rows, scale), None if turned is None else Quantized(turned, scale))

    def rows(self, x: Tensor, role: Role) -> Quantized:
        """Return a matrix ``[m, k]`` in 8 bits, to be summed along k."""
        return self.pair(x, role, columns=False).rows

    def columns(self, x: Tensor, role: Role, scale: Tensor) -> Quantized:
        """Return the transpose ``[k, m]`` of ``[m, k]`` in 8 bits, with the scale of its rows."""
        _, _, turned = matrices.QUANTIZE_WITH(
            x, scale, self.formats[role], "columns", varies=self.parts.varies
        )
        return Quantized(turned, scale)

    def across(self, x: Tensor, role: Role, rows: Quantized) -> Quantized:
        """Return ``[m, k]``, whose `rows` are given, with the scales of its `columns`."""
        return rows

    def weight(self, weight: Tensor) -> Pair:
        """Return the layer's weight in 8 bits, cast again only where it is not kept."""
        if not self.keeps_weight:
            return self.pair(weight, Role.WEIGHT, columns=False)
        if self.kept_weight is None:
            self.kept_weight = self.pair(weight, Role.WEIGHT, columns=True)
        return self.kept_weight

    def weight_columns(self, weight: Tensor, scale: Tensor) -> Quantized:
        """Return the transpose of the weight ``[out, in]``, with the scale of its rows."""
        if self.kept_weight is not None and self.kept_weight.columns is not None:
            return self.kept_weight.columns
        return self.columns(weight, Role.WEIGHT, scale)

    def _quantize(self, x: Tensor, role: Role, wanted: Wanted) -> Pass:
        """Return scale, rows and columns."""
        varies = self.parts.varies
        amax = _over(matrices.LARGEST(x, varies=varies), self.parts.of_tensor(role))
        found: Pass = matrices.QUANTIZE(x, amax, self.formats[role], None, wanted, varies=varies)
        return found


class RowScaling(Scaling):
    """A scale for each row that a product sums along (``--fp8-recipe rowwise``)."""

    def pair(self, x: Tensor, role: Role, *, columns: bool) -> Pair:
        """Return rows and columns with a scale for each, ``[m, 1]`` and ``[k, 1]``."""
        rows = self._along(x, role, 1, "rows")
        return Pair(rows, self.columns(x, role, rows.scale) if columns else None)

    def columns(self, x: Tensor, role: Role, scale: Tensor) -> Quantized:
        """Return the transpose with a scale for each of its rows, made anew, ``[k, 1]``."""
        return self._along(x, role, 0, "columns")

    def across(self, x: Tensor, role: Role, rows: Quantized) -> Quantized:
        """Return the matrix with a scale for each of its columns, made anew, ``[1, k]``."""
        return self._along(x, role, 0, "rows")

    def _along(self, x: Tensor, role: Role, along: int, wanted: Wanted) -> Quantized:
        varies = self.parts.varies
        group = self.parts.of_rows(role) if along else self.parts.of_columns(role)
        # Where no other rank has a part, the magnitudes are found in the same pass.
        amax = None if group is None else _over(matrices.LARGEST(x, along, varies=varies), group)
        found: Pass = matrices.QUANTIZE(x, amax, self.formats[role], along, wanted, varies=varies)
        if found.rows is not None:
            return Quantized(found.rows, found.number)
        assert found.columns is not None
        return Quantized(found.columns, found.number.t())


class DelayedScaling(Scaling):
    """One scale for each tensor, from the steps before (``--fp8-recipe delayed``).

    The scales of a step are fixed at its beginning; `AmaxHistories` moves them on after it. Before
    its first history (in the first step, and while it was nothing but zeros or not finite) a tensor
    is scaled by itself: Transformer Engine's scale of 1 would lose small gradients.

    Attributes:
        amax_history: largest magnitudes, ``[steps, 3]`` float32, the latest first; zero where there
            is none yet. The only state that a checkpoint holds.
        scale: what follows from it, ``[3]``.
        amax: largest magnitudes of the step so far, on this rank, ``[3]``.
        has_history: the host knows that all three tensors have one, so a pass over a tensor for its
            largest magnitude is saved.
        limits: the largest numbers of the three formats, ``[3]``; kept on the device, because a
            step would wait for a copy.
    """

    amax_history: Tensor
    scale: Tensor
    amax: Tensor
    limits: Tensor

    def __init__(self, config: Fp8Config, parts: Parts) -> None:
        super().__init__(config, parts)
        self.register_buffer("amax_history", torch.zeros(config.fp8_amax_history_len, len(Role)))
        self.register_buffer("scale", torch.ones(len(Role)), persistent=False)
        self.register_buffer("amax", torch.zeros(len(Role)), persistent=False)
        limits = torch.tensor([torch.finfo(dtype).max for dtype in self.formats])
        self.register_buffer("limits", limits, persistent=False)
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

    def _quantize(self, x: Tensor, role: Role, wanted: Wanted) -> Pass:
        varies, given = self.parts.varies, self.scale[role]
        if self.has_history and not self.parts.may_idle:
            found: Pass = matrices.QUANTIZE_WITH(
                x, given, self.formats[role], wanted, varies=varies
            )
            self._note(found.number, role)
            # A value that is not finite must not be cut off unseen; see `scale_for`.
            return found._replace(number=torch.where(found.number.isfinite(), given, torch.nan))
        amax: Tensor = matrices.LARGEST(x, varies=varies)
        self._note(amax, role)
        amax = _over(amax, self.parts.of_tensor(role))
        own = matrices.scale_for(amax, torch.finfo(self.formats[role]).max)
        known = self.amax_history[:, role].any() & amax.isfinite()
        scale = torch.where(known, given, own)
        found = matrices.QUANTIZE_WITH(x, scale, self.formats[role], wanted, varies=varies)
        return found._replace(number=scale)

    def _note(self, amax: Tensor, role: Role) -> None:
        if self.training:
            self.amax[role] = torch.maximum(self.amax[role], amax)

    def scale_of(self, histories: Tensor) -> Tensor:
        """Return scales ``[..., 3]`` that follow from histories ``[..., steps, 3]``."""
        takes_max = self.config.fp8_amax_compute_algo == "max"
        amax = histories.amax(dim=-2) if takes_max else histories[..., 0, :]
        return matrices.scale_for(amax, self.limits, self.config.fp8_margin)


def _follow_history(scaling: Any, _keys: Any) -> None:
    """Derive the scales after a history was loaded."""
    scaling.scale.copy_(scaling.scale_of(scaling.amax_history))
    scaling.has_history = bool(scaling.amax_history.any(dim=0).all())


RECIPES = {"tensorwise": Scaling, "rowwise": RowScaling, "delayed": DelayedScaling}
"""Scalings by ``--fp8-recipe``."""
