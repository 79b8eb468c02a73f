"""Which formulas are those of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.errors import ConfigError
from megatron_ext.planning.contents import Sizes
from megatron_ext.planning.network import GptNetwork, Network
from megatron_ext.video.cost.clip import Clip
from megatron_ext.video.cost.mmdit import MMDiTNetwork
from megatron_ext.video.cost.wan import DiTNetwork

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig


def network_of(config: RunConfig, clip: Clip | None = None) -> Network:
    """The model of a run.

    Args:
        config: resolved; of text with its vocabulary.
        clip: of video, the bucket whose clips it is given.

    Raises:
        ConfigError: no vocabulary, no clips, or streaming, whose networks are three.
    """
    if not config.video.video:
        return GptNetwork(config, Sizes.of(config))
    if config.video.streams or clip is None:
        raise ConfigError(
            "A plan of one network needs clips of `--task flow`; plan `--task streaming` with "
            "`pretrain_video.py --dry-run`."
        )
    return (DiTNetwork if config.video.uses_dit else MMDiTNetwork).of(config, clip)
