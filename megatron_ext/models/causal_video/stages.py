"""Blocks dealt to pipeline stages, and layouts that cannot hold the model."""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from megatron_ext.config.video_dit_sizes import VideoDiTSizes
from megatron_ext.errors import ConfigError
from megatron_ext.models.causal_video.options import VideoDiTOptions


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
