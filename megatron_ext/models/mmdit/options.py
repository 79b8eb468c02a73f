"""How an MMDiT of given sizes is initialized, recomputed and cut."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.errors import ConfigError
from megatron_ext.models.attention import GATHER


@dataclass(frozen=True)
class MMDiTOptions:
    """What changes no shape of a parameter.

    Attributes:
        adaln_zero: modulations and the last layer start at zero (DiT, arXiv:2212.09748), so that
            every block begins as the identity and the model predicts zero. For training from
            scratch; Open-Sora starts from the weights of FLUX instead.
        recompute_double_blocks: the first so many double blocks of the model keep only their
            inputs, and are run again in the backward pass; more than there are means all.
        recompute_single_blocks: the same of single blocks.
        cp_comm_type: how context-parallel ranks attend to the whole sequence: ``all_gather`` (or
            ``p2p``) collects keys and values, ``a2a`` trades heads for sequence.
        double_block_cost: time of a double block over that of a single one, by which blocks are
            dealt to pipeline stages. Both multiply every token by 12 h^2 weights (mlp_ratio 4) and
            attend alike, so it is 1; measure it, or take 2.4, the ratio of their parameters, to
            balance memory.

    Raises:
        ConfigError: a value out of its range.
    """

    adaln_zero: bool = False
    recompute_double_blocks: int = 0
    recompute_single_blocks: int = 0
    cp_comm_type: str = "all_gather"
    double_block_cost: float = 1.0

    def __post_init__(self) -> None:
        for name in ("recompute_double_blocks", "recompute_single_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"`{name}` ({getattr(self, name)}) must be 0 or more; 0 recomputes nothing."
                )
        if self.cp_comm_type not in (*GATHER, "a2a"):
            raise ConfigError(
                f"`cp_comm_type` ({self.cp_comm_type}) must be p2p, all_gather or a2a."
            )
        if not 0 < self.double_block_cost < float("inf"):
            raise ConfigError(
                f"`double_block_cost` ({self.double_block_cost}) must be a positive number; 1 if "
                "it was not measured."
            )
