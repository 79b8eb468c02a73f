"""Finds video networks in their table, and imports the parts of a network that a run needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.networks import NETWORKS
from megatron_ext.video.networks.network import (
    Conversion,
    FlowNetwork,
    StreamedNetwork,
    VideoNetwork,
)


def network_named(name: str) -> VideoNetwork:
    """Return the network that ``name``, a value of ``--video-model``, stands for."""
    network: VideoNetwork = import_module(NETWORKS[name]).NETWORK
    return network


def all_networks() -> list[VideoNetwork]:
    """Return all networks of the table; one with several names is listed once."""
    return [*dict.fromkeys(map(network_named, NETWORKS))]


def chosen(config: RunConfig) -> VideoNetwork:
    """Return the network that ``--video-model`` names."""
    return network_named(config.section(VideoConfig).video_model)


def network_of(config: RunConfig) -> FlowNetwork:
    """Return the network that ``--video-model`` names, in the form that flow matching uses."""
    network: FlowNetwork = _part(chosen(config).flow)(config)
    return network


def _part(place: str) -> Any:
    """Import and return the object at a place of the form ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def streamed() -> VideoNetwork:
    """Return the network that streaming trains: the first in the table that it can train."""
    return next(network for network in all_networks() if network.streamed is not None)


def streamed_network() -> StreamedNetwork:
    """Return the network that streaming trains, in the form that streaming uses."""
    place = streamed().streamed
    assert place is not None
    network: StreamedNetwork = _part(place)
    return network


def conversions() -> list[Conversion]:
    """Return the conversions of public weights of all networks that have one."""
    return [_part(x.conversion) for x in all_networks() if x.conversion is not None]


def streamed_conversion() -> Conversion:
    """Return the conversion of public weights for the networks of a streaming run."""
    place = streamed().conversion
    assert place is not None
    conversion: Conversion = _part(place)
    return conversion


def named_by(names: Iterable[str]) -> str:
    """Return words for a message: the flag ``--video-model`` with one of the values ``names``."""
    return f"`--video-model {' or '.join(names)}`"


def without_pooled() -> str:
    """Return words for a message: ``--video-model`` with the networks that need no pooled text."""
    return named_by(name for name in NETWORKS if not network_named(name).takes_pooled)


def with_widths(config: RunConfig, manifest: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with the widths of latents and text embeddings of a dataset.

    Raises:
        ConfigError: the network needs pooled vectors of the text, which the dataset lacks.
    """
    network = chosen(config)
    video = config.section(VideoConfig)
    if network.takes_pooled and not manifest["pooled_width"]:
        paths = video.video_data_path or ()
        raise ConfigError.about(
            "--video-data-path",
            " ".join(paths),
            "holds captions without pooled vectors, as umt5 gives them, but "
            f"{network.titles[video.video_model]} needs these",
            f"give {without_pooled()}, or encode the captions with t5-clip",
        )
    return network_of(config).with_widths(manifest)
