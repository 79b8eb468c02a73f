"""Which ranks hold parts of the tensors that a layer's products take."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup


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
        varies: the number of tokens differs from product to product.
    """

    may_idle: ClassVar[bool] = False
    """There may be no tokens at all in a step."""

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
        """For one scale of a whole tensor."""
        if role is Role.WEIGHT:
            return _if_several(self._pgs.tp)
        cut = self._cuts_input or self._cuts_sequence
        if role is Role.GRADIENT:
            cut = not self._cuts_input
        return _if_several(self._pgs.tp_cp if cut else self._pgs.cp)

    def of_rows(self, role: Role) -> ProcessGroup | None:
        """For one scale of each row: of a token, or of an output feature of the weight."""
        return _if_several(self._pgs.tp) if self._cuts_features(role) else None

    def of_columns(self, role: Role) -> ProcessGroup | None:
        """For one scale of each column: over all tokens, or of an input feature of the weight."""
        if role is Role.WEIGHT:
            return None if self._cuts_input else _if_several(self._pgs.tp)
        cut = role is Role.INPUT and self._cuts_sequence
        return _if_several(self._pgs.tp_cp if cut else self._pgs.cp)

    def _cuts_features(self, role: Role) -> bool:
        return self._cuts_input if role is not Role.GRADIENT else not self._cuts_input

    def of_step(self) -> tuple[ProcessGroup, ...]:
        """Groups over which the largest magnitudes of a step are completed, one after the other:
        of all ranks that hold parts or copies of the layer.
        """
        return (self._pgs.tp_dp_cp,)


class ExpertParts(Parts):
    """Of a layer of an expert, to whose tokens belongs what a dispatcher brings to its rank.

    Which these are depends on the layout, as the scales of the recipes that look at the tensor
    itself do then.
    """

    may_idle: ClassVar[bool] = True

    def of_tensor(self, role: Role) -> ProcessGroup | None:
        """See `Parts.of_tensor`."""
        cut = role is Role.WEIGHT or self._cuts_features(role)
        return _if_several(self._pgs.expt_tp) if cut else None

    def of_rows(self, role: Role) -> ProcessGroup | None:
        """See `Parts.of_rows`."""
        return _if_several(self._pgs.expt_tp) if self._cuts_features(role) else None

    def of_columns(self, role: Role) -> ProcessGroup | None:
        """See `Parts.of_columns`."""
        cut = role is Role.WEIGHT and not self._cuts_input
        return _if_several(self._pgs.expt_tp) if cut else None

    def of_step(self) -> tuple[ProcessGroup, ...]:
        """See `Parts.of_step`."""
        return (self._pgs.expt_tp, self._pgs.expt_dp)


def _if_several(group: ProcessGroup) -> ProcessGroup | None:
    return group if group.size() > 1 else None
