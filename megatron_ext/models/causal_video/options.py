"""How a video DiT of given sizes attends, starts, and is recomputed."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.errors import ConfigError
from megatron_ext.models.attention import GATHER
from megatron_ext.models.causal_video.window import FrameWindow


@dataclass(frozen=True)
class VideoDiTOptions:
    """What changes no shape of a parameter, so that weights fit with any of it.

    Attributes:
        window: block-causal attention for the student, None for bidirectional attention of
            critic and teacher.
        zero_head: the last layer starts at zero, so that the model predicts zero.
        recompute_blocks: the first so many blocks of the model keep only their inputs in passes
            with gradient, and are run again in the backward pass; more than there are means all.
        cp_comm_type: how context-parallel ranks attend to all tokens of the frames: ``all_gather``
            (or ``p2p``) shares out the cache by tokens and collects keys and values in every pass,
            ``a2a`` shares it out by heads and trades only those of the new frames.

    Raises:
        ConfigError: a value out of its range.
    """

    window: FrameWindow | None = None
    zero_head: bool = True
    recompute_blocks: int = 0
    cp_comm_type: str = "all_gather"

    def __post_init__(self) -> None:
        if self.recompute_blocks < 0:
            raise ConfigError(
                f"`recompute_blocks` ({self.recompute_blocks}) must be 0 or more; 0 recomputes "
                "nothing."
            )
        if self.cp_comm_type not in (*GATHER, "a2a"):
            raise ConfigError(
                f"`cp_comm_type` ({self.cp_comm_type}) must be p2p, all_gather or a2a."
            )
