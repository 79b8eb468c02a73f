"""Finds the network that a run names, and imports it only then."""

from __future__ import annotations

from importlib import import_module

from megatron_ext.config.run import RunConfig
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.networks import NETWORKS
from megatron_ext.video.step import FlowNetwork


def network_of(config: RunConfig) -> FlowNetwork:
    """Return the network that `--video-model` names, built for the run's configuration."""
    module, _, name = NETWORKS[config.section(VideoConfig).video_model].partition(":")
    network: FlowNetwork = getattr(import_module(module), name)(config)
    return network
