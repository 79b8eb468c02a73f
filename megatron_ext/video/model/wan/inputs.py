"""What a forward pass takes, checked.

How a video DiT of given sizes attends, starts, and is recomputed.

Blocks dealt to pipeline stages, and layouts that cannot hold the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.layers.attention import GATHER
from megatron_ext.video.config.wan import VideoDiTSizes
from megatron_ext.video.model.wan.attention import FrameWindow


def check_inputs(sizes: VideoDiTSizes, x: Tensor, timesteps: Tensor, text: Tensor) -> None:
    """Compare inputs with the sizes and with each other.

    Raises:
        DataError: one whose shape or dtype does not fit.
    """
    if x.dim() != 5 or x.size(2) != sizes.channels or 0 in x.shape:
        raise DataError(
            f"`x` has the shape {list(x.shape)}, but the model takes [b, t, {sizes.channels}, h, "
            "w], latent frames before channels."
        )
    b, t = x.shape[:2]
    if timesteps.shape not in ((b,), (b, t)):
        raise DataError(
            f"`timesteps` has the shape {list(timesteps.shape)}, but must be [{b}] for one of each "
            f"sample or [{b}, {t}] for one of each frame."
        )
    if timesteps.dtype not in (torch.float32, torch.float64):
        raise DataError(
            f"`timesteps` has the type {timesteps.dtype}, but must be float32: in 16 bits "
            "timesteps near 1000 have steps of 4."
        )
    if text.dim() != 3 or text.size(0) != b or text.size(2) != sizes.text_width or 0 in text.shape:
        raise DataError(
            f"`text` has the shape {list(text.shape)}, but must be [{b}, l, {sizes.text_width}]."
        )


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


def stage_blocks(num_blocks: int, num_stages: int) -> list[range]:
    """The blocks of each stage, whose numbers differ by one at most.

    Raises:
        ConfigError: fewer blocks than stages.
    """
    if num_stages > num_blocks:
        raise ConfigError(
            f"the pipeline has {num_stages} stages, but the model only {num_blocks} blocks; use a "
            "smaller `--pipeline-model-parallel-size`."
        )
    ends = [stage * num_blocks // num_stages for stage in range(num_stages + 1)]
    return [range(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def check_layout(
    config: TransformerConfig,
    sizes: VideoDiTSizes,
    options: VideoDiTOptions,
    groups: ProcessGroupCollection,
) -> None:
    """Compare the configuration with the sizes, and the heads with the context-parallel ranks.

    Raises:
        ConfigError: see there.
    """
    for name, value in sizes.transformer_fields().items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"`{name}` ({getattr(config, name)}) must be {value} for this video DiT; build the "
                "configuration from `VideoDiTSizes.transformer_fields()`."
            )
    tp, cp = groups.tp.size(), groups.cp.size()
    if options.cp_comm_type == "a2a" and sizes.num_heads // tp % cp:
        raise ConfigError(
            f"`cp_comm_type` a2a needs the attention heads of a tensor-parallel rank "
            f"({sizes.num_heads // tp}) to be divisible by `--context-parallel-size` ({cp}); use "
            "all_gather."
        )
