"""The networks that pretrain_video.py trains by flow matching; a new one is a line here."""

from __future__ import annotations

from megatron_ext.config.run import RunConfig
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.model.mmdit.flow import MMDIT
from megatron_ext.video.model.wan.flow import WAN
from megatron_ext.video.step import FlowNetwork

NETWORKS: dict[str, FlowNetwork] = {"mmdit": MMDIT, "video-dit": WAN, "causal-video-dit": WAN}
"""Networks by the value of ``--video-model``."""


def network_of(config: RunConfig) -> FlowNetwork:
    """Return the network that a run trains."""
    return NETWORKS[config.section(VideoConfig).video_model]
