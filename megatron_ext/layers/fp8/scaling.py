"""The scales of a layer's 8-bit tensors, for each recipe, and the ranks that must agree on them.

Except for experts, a scale does not depend on how a tensor is sharded: the ranks that hold its
parts take the maximum of their largest magnitudes (`Parts`). Only the delayed recipe also takes the
maximum over data-parallel ranks, because its scales are used for a whole step.
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
from megatron_ext.layers.fp8 import casting, matrices
from megatron_ext.layers.fp8.matrices import Layouts, Pass, Quantized, Wanted


class Role(IntEnum):
    """The three tensors in a layer's matrix products: input, weight, and gradient of the output."""

    INPUT = 0
    WEIGHT = 1
    GRADIENT = 2
    """The gradient of the output."""


class Parts:
    """The groups of ranks that hold the parts of a layer's tensors, and so must agree on scales.

    A scale belongs to a whole tensor, to a row or to a column; each has its own group.

    Args:
        cuts_input: whether the layer is row-parallel and shards its input features; other layers
            shard their output features.
        cuts_sequence: whether sequence parallelism shards the tokens of the input.
        varies: whether the layer gets a different number of tokens in each call; if so, its kernels
            are not compiled anew for each number.
    """

    may_idle: ClassVar[bool] = False
    """Whether the layer may get no tokens in a step; if so, `DelayedScaling.is_given` is False."""

    def __init__(
        self,
        pgs: ProcessGroupCollection,
        *,
        cuts_input: bool,
        cuts_sequence: bool = False,
        varies: bool = False,
    ) -> None:
        self._pgs = pgs
        self.varies = varies
        self._cuts_input = cuts_input
        self._cuts_sequence = cuts_sequence

    def of_tensor(self, role: Role) -> ProcessGroup | None:
        """Return the group that holds the parts of a tensor; None if this rank holds all of it."""
        if role is Role.WEIGHT:
            return _if_several(self._pgs.tp)
        cut = self._cuts_features(role) or (role is Role.INPUT and self._cuts_sequence)
        return _if_several(self._pgs.tp_cp if cut else self._pgs.cp)

    def of_rows(self, role: Role) -> ProcessGroup | None:
        """Return the group with the parts of each row; None if this rank holds whole rows.

        A row is a token, or an output feature of the weight.
        """
        return _if_several(self._pgs.tp) if self._cuts_features(role) else None

    def of_columns(self, role: Role) -> ProcessGroup | None:
        """Return the group with the parts of each column; None if this rank holds whole columns.

        A column is a feature of all tokens, or an input feature of the weight.
        """
        if role is Role.WEIGHT:
            return None if self._cuts_input else _if_several(self._pgs.tp)
        cut = role is Role.INPUT and self._cuts_sequence
        return _if_several(self._pgs.tp_cp if cut else self._pgs.cp)

    def _cuts_features(self, role: Role) -> bool:
        return self._cuts_input != (role is Role.GRADIENT)

    def of_step(self) -> tuple[ProcessGroup, ...]:
        """Return the groups over which delayed scaling takes the maximum of a step's magnitudes.

        The maximum is taken over one group after another. Together they cover all ranks that hold
        parts or copies of the layer.
        """
        return (self._pgs.tp_dp_cp,)


class WholeParts(Parts):
    """`Parts` for a layer whose weight is whole on every tensor-parallel rank.

    Under sequence parallelism each rank multiplies its own tokens, so both the input and the
    output's gradient are sharded by tokens.
    """

    def of_tensor(self, role: Role) -> ProcessGroup | None:
        return None if role is Role.WEIGHT else self.of_columns(role)

    def of_rows(self, role: Role) -> ProcessGroup | None:
        return None

    def of_columns(self, role: Role) -> ProcessGroup | None:
        if role is Role.WEIGHT:
            return None
        return _if_several(self._pgs.tp_cp if self._cuts_sequence else self._pgs.cp)


class ExpertParts(Parts):
    """`Parts` for a layer of experts; its input is the tokens dispatched to this rank.

    Which tokens these are depends on the parallel layout, and so do scales computed from several
    tokens: of the whole tensor, or of a column.
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
"""Suffix of the checkpoint keys of amax histories, the only saved state of the delayed recipe."""


def _over(amax: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the maximum of ``amax`` over the group; without a group, return ``amax`` unchanged.

    With a group NaN counts as infinity, because collectives do not define comparisons with NaN.
    """
    if group is None:
        return amax
    # Collectives do not define the comparison of NaN.
    amax = torch.where(amax.isfinite(), amax, torch.full_like(amax, torch.inf))
    torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    return amax


class Pair(NamedTuple):
    """A matrix ``[m, k]`` in 8 bits and its transpose ``[k, m]`` (None if not requested)."""

    rows: Quantized
    columns: Quantized | None


def _pair(scale: Tensor, inverse: Tensor, rows: Tensor | None, columns: Tensor | None) -> Pair:
    assert rows is not None
    turned = None if columns is None else Quantized(columns, scale, inverse)
    return Pair(Quantized(rows, scale, inverse), turned)


class Scaling(torch.nn.Module):
    """One scale per tensor, computed from the tensor itself (``--fp8-recipe tensorwise``).

    Attributes:
        keeps_weight: whether to cast the weight only once and reuse the 8-bit weight; True while
            `KeptWeights` promises that the weight is constant.
        kept_weight: the 8-bit weight to reuse; None before its first use.
        activation: the `fp8.activation.Activation` that the layer applies to its argument before
            its own matrix product; None if the layer multiplies its argument directly.
        handed: set in the backward pass of an MLP if its second layer has computed the gradient of
            this layer's output in 8 bits (see `fp8.activation`): the placeholder that autograd
            passes instead, and the gradient. None if autograd passes the gradient itself.
    """

    activation: Any = None
    handed: tuple[Tensor, Pair] | None = None

    def __init__(self, config: Fp8Config, parts: Parts) -> None:
        super().__init__()
        assert config.fp8_format is not None
        self.config = config
        self.parts = parts
        self.formats = (matrices.E4M3, matrices.E4M3, matrices.GRADIENT_FORMATS[config.fp8_format])
        self.keeps_weight = False
        self.kept_weight: Pair | None = None

    def pair(self, x: Tensor, role: Role, *, columns: bool) -> Pair:
        """Return a matrix ``[m, k]`` in 8 bits; with ``columns`` also its transpose."""
        return _pair(*self._quantize(x, role, "both" if columns else "rows"))

    def gradient(self, x: Tensor, *, columns: bool) -> Pair:
        """Return the gradient ``[m, k]`` of the layer's output in 8 bits.

        ``x`` is what autograd passes: the gradient, which is cast here, and with ``columns`` also
        transposed; or the placeholder in `handed`, whose 8-bit gradient is then returned.

        Raises:
            RuntimeError: `handed` is set, but ``x`` is not its placeholder.
        """
        handed, self.handed = self.handed, None
        if handed is None:
            return self.pair(x.flatten(0, -2), Role.GRADIENT, columns=columns)
        placeholder, pair = handed
        if x is not placeholder:
            raise RuntimeError(
                "The output of an MLP's first layer has another use than the activation, whose "
                "gradient would be lost; `--no-bias-swiglu-fusion` computes them apart."
            )
        return pair

    def rows(self, x: Tensor, role: Role) -> Quantized:
        """Return a matrix ``[m, k]`` in 8 bits, for a product that sums over k."""
        return self.pair(x, role, columns=False).rows

    def columns(self, x: Tensor, role: Role, scale: Tensor) -> Quantized:
        """Return the transpose ``[k, m]`` of ``[m, k]`` in 8 bits, for a product that sums over m.

        ``scale`` is the scale that `rows` computed for the same tensor.
        """
        _, turned = casting.cast_with(x, scale, self.formats[role], "columns")
        assert turned is not None
        return Quantized(turned, scale)

    def across(self, x: Tensor, role: Role, rows: Quantized) -> Quantized:
        """Return ``[m, k]`` in 8 bits, to be transposed later for a product that sums over m.

        ``rows`` is the result of `Scaling.rows` for the same ``x``, and serves a product that sums
        over k. With one scale for the whole tensor it serves both, so it is returned.
        """
        return rows

    def weight(self, weight: Tensor) -> Pair:
        """Return the layer's weight in 8 bits; with ``keeps_weight`` cast it only once."""
        if not self.keeps_weight:
            return self.pair(weight, Role.WEIGHT, columns=False)
        if self.kept_weight is None:
            self.kept_weight = self.pair(weight, Role.WEIGHT, columns=True)
        return self.kept_weight

    def weight_columns(self, weight: Tensor, scale: Tensor) -> Quantized:
        """Return the transposed 8-bit weight ``[in, out]``, reused or cast with ``scale``."""
        if self.kept_weight is not None and self.kept_weight.columns is not None:
            return self.kept_weight.columns
        return self.columns(weight, Role.WEIGHT, scale)

    def _quantize(self, x: Tensor, role: Role, layout: Wanted) -> Pass:
        """Cast a matrix to 8 bits; return its scale and the cast matrix in the given ``layout``."""
        varies = self.parts.varies
        amax = _over(casting.LARGEST(x, varies=varies), self.parts.of_tensor(role))
        return casting.cast_by_magnitude(x, amax, self.formats[role], layout, varies=varies)


class RowScaling(Scaling):
    """One scale for each row or column along which a product sums (``--fp8-recipe rowwise``)."""

    def pair(self, x: Tensor, role: Role, *, columns: bool) -> Pair:
        """Return ``[m, k]`` in 8 bits with a scale per row; with ``columns`` also its transpose."""
        rows = self._along(x, role, 1, "rows")
        return Pair(rows, self.columns(x, role, rows.scale) if columns else None)

    def columns(self, x: Tensor, role: Role, scale: Tensor) -> Quantized:
        """Return the transpose ``[k, m]`` with its own scales ``[k, 1]``; ``scale`` is unused."""
        return self._along(x, role, 0, "columns")

    def across(self, x: Tensor, role: Role, rows: Quantized) -> Quantized:
        """Return ``[m, k]`` in 8 bits with one scale per column; ``rows`` is ignored."""
        return self._along(x, role, 0, "rows")

    def _along(self, x: Tensor, role: Role, along: int, layout: Wanted) -> Quantized:
        varies = self.parts.varies
        group = self.parts.of_rows(role) if along else self.parts.of_columns(role)
        # If no other rank has a part, one pass finds the magnitudes and casts.
        amax = None if group is None else _over(casting.LARGEST(x, along, varies=varies), group)
        quantized: Pass = casting.QUANTIZE(
            x, amax, self.formats[role], along, layout, varies=varies
        )
        if quantized.rows is not None:
            return Quantized(quantized.rows, quantized.scale, quantized.inverse)
        assert quantized.columns is not None
        return Quantized(quantized.columns, quantized.scale.t(), quantized.inverse.t())


class DelayedScaling(Scaling):
    """One scale for each tensor, computed from earlier steps (``--fp8-recipe delayed``).

    The scales are fixed during a step; `AmaxHistories` updates them after it. A tensor may have no
    history: in the first step, or if it has always been zero or not finite. Then it is scaled by
    its own largest magnitude, since Transformer Engine's scale of 1 would lose small gradients.

    Attributes:
        amax_history: largest magnitudes by step and `Role`, ``[steps, 3]`` float32, the latest
            first; zero for missing steps. Only this attribute is saved in checkpoints.
        scale: scales computed from the history, one for each `Role`, ``[3]``.
        inverse: reciprocals of the scales, ``[3]``.
        amax: largest magnitudes of the current step on this rank, ``[3]``.
        has_history: whether all three tensors are known to have a history; a Python bool. If so, a
            tensor is cast without a pass that first finds its largest magnitude, and a value that
            is not finite becomes NaN, so that the step is skipped.
        limits: the largest numbers of the 8-bit formats of the three tensors, ``[3]``. They are
            kept on the device, because copying them there would make the host wait in each step.
    """

    amax_history: Tensor
    scale: Tensor
    inverse: Tensor
    amax: Tensor
    limits: Tensor

    def __init__(self, config: Fp8Config, parts: Parts) -> None:
        super().__init__(config, parts)
        self.register_buffer("amax_history", torch.zeros(config.fp8_amax_history_len, len(Role)))
        self.register_buffer("scale", torch.ones(len(Role)), persistent=False)
        self.register_buffer("inverse", torch.ones(len(Role)), persistent=False)
        self.register_buffer("amax", torch.zeros(len(Role)), persistent=False)
        limits = torch.tensor([torch.finfo(dtype).max for dtype in self.formats])
        self.register_buffer("limits", limits, persistent=False)
        self.has_history = False
        self.register_load_state_dict_post_hook(_follow_history)  # type: ignore[no-untyped-call]
        self._mark()

    def _mark(self) -> None:
        """Tell the checkpoint loader that older checkpoints may lack the history."""
        self.amax_history.new_branch = True  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DelayedScaling:
        """Move the state with the model, but keep it in float32 when the model is cast."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self._buffers[name]
            assert buffer is not None and moved is not None
            self._buffers[name] = buffer.to(moved.device)
        self._mark()
        return self

    @property
    def is_given(self) -> bool:
        """Return whether the history gives all scales, so that no tensor's magnitude is needed."""
        return self.has_history and not self.parts.may_idle

    def pair_by(self, cast: Callable[..., Layouts], role: Role, *, columns: bool) -> Pair:
        """Return a tensor that ``cast`` computes in 8 bits; with ``columns`` also its transpose.

        ``cast`` is a kernel that computes the tensor and casts it. It takes the scale of ``role``,
        the 8-bit format, "both" or "rows" (with or without the transpose), and the tensor ``[]`` in
        which to record the largest magnitude (None in evaluation), as `matrices.quantize_with`.
        """
        layout: Wanted = "both" if columns else "rows"
        layouts = cast(self.scale[role], self.formats[role], layout, self._noted(role))
        return _pair(self.scale[role], self.inverse[role], *layouts)

    def _quantize(self, x: Tensor, role: Role, layout: Wanted) -> Pass:
        dtype = self.formats[role]
        given = self.scale[role]
        noted = self._noted(role)
        if self.is_given:
            layouts = casting.cast_with(x, given, dtype, layout, noted)
            return Pass(given, self.inverse[role], *layouts)
        amax = _over(casting.LARGEST(x, varies=self.parts.varies), self.parts.of_tensor(role))
        history = self.amax_history[:, role]
        limit = torch.finfo(dtype).max
        scale, inverse = casting.KNOWN_SCALE(amax, history, given, limit)
        return Pass(scale, inverse, *casting.cast_with(x, scale, dtype, layout, noted))

    def _noted(self, role: Role) -> Tensor | None:
        """Return the tensor ``[]`` in which casts record a role's largest magnitude in this step.

        Return None in evaluation, where magnitudes are not recorded.
        """
        return self.amax[role] if self.training else None

    def scale_of(self, histories: Tensor) -> Tensor:
        """Return scales ``[..., 3]`` from histories ``[..., steps, 3]`` of the 3 roles."""
        takes_max = self.config.fp8_amax_compute_algo == "max"
        amax = histories.amax(dim=-2) if takes_max else histories[..., 0, :]
        return matrices.scale_for(amax, self.limits, self.config.fp8_margin)


def _follow_history(scaling: Any, _keys: Any) -> None:
    """Recompute scales and `has_history` from a loaded history; called by ``load_state_dict``."""
    scaling.scale.copy_(scaling.scale_of(scaling.amax_history))
    scaling.inverse.copy_(scaling.scale.reciprocal())
    scaling.has_history = bool(scaling.amax_history.any(dim=0).all())


RECIPES = {"tensorwise": Scaling, "rowwise": RowScaling, "delayed": DelayedScaling}
"""The class of scaling for each value of ``--fp8-recipe``."""
