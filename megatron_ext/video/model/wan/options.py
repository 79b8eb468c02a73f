"""How a Wan network of given sizes attends, starts, is recomputed, and is dealt to ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.errors import ConfigError
from megatron_ext.layers.attention import GATHER
from megatron_ext.video.config.wan import VideoDiTSizes
from megatron_ext.video.model.wan.attention import FrameWindow


@dataclass(frozen=True)
class VideoDiTOptions:
    """Options of a Wan network that change no shape of a parameter; weights fit with any of them.

    Attributes:
        window: block-causal attention for the student, None for bidirectional attention of critic
            and teacher.
        zero_head: the last layer starts at zero, so that the model predicts zero.
        recompute_blocks: the first so many blocks of the model keep only their inputs in passes
            with gradient, and are run again in the backward pass; more than there are means all.
        cp_comm_type: how context-parallel ranks attend to all tokens of the frames: ``all_gather``
            (or ``p2p``) shares out the cache by tokens and collects keys and values in every pass,
            ``a2a`` shares it out by heads and trades only those of the new frames.

    Raises:
        ConfigError: a value is out of its range.
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


def stage_blocks(num_blocks: int, num_stages: int) -> list[range]:
    """Return the blocks of each stage, whose numbers differ by one at most.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    if num_stages > num_blocks:
        raise ConfigError(
            f"the pipeline has {num_stages} stages, but the model only {num_blocks} blocks; use a "
            "smaller `--pipeline-model-parallel-size`."
        )
    ends = [stage * num_blocks // num_stages for stage in range(num_stages + 1)]
    return [range(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def check_heads(
    sizes: VideoDiTSizes, options: VideoDiTOptions, groups: ProcessGroupCollection
) -> None:
    """Check that context-parallel ranks can trade the heads, where the options ask them to.

    Raises:
        ConfigError: the heads of a rank cannot be dealt equally.
    """
    tp, cp = groups.tp.size(), groups.cp.size()
    if options.cp_comm_type == "a2a" and sizes.num_heads // tp % cp:
        raise ConfigError(
            f"`cp_comm_type` a2a needs the attention heads of a tensor-parallel rank "
            f"({sizes.num_heads // tp}) to be divisible by `--context-parallel-size` ({cp}); use "
            "all_gather."
        )
