"""Finds video networks in their table, and imports the parts of a network that a run needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.config.weights import check_sizes
from megatron_ext.video.networks import NETWORKS
from megatron_ext.video.networks.network import (
    FlowNetwork,
    StreamedNetwork,
    VideoNetwork,
)

if TYPE_CHECKING:
    from megatron_ext.video.networks.published import Conversion


def network_named(name: str) -> VideoNetwork:
    """Return the `VideoNetwork` for ``name``, a value of ``--video-model``."""
    network: VideoNetwork = import_module(NETWORKS[name]).NETWORK
    return network


def all_networks() -> list[VideoNetwork]:
    """Return all networks of the table; one with several names is listed once."""
    return [*dict.fromkeys(map(network_named, NETWORKS))]


def chosen(config: RunConfig) -> VideoNetwork:
    """Return the network that ``--video-model`` names."""
    return network_named(config.section(VideoConfig).video_model)


def network_of(config: RunConfig) -> FlowNetwork:
    """Build the `FlowNetwork` of the network that ``--video-model`` names, for flow matching."""
    network: FlowNetwork = _part(chosen(config).flow)(config)
    return network


def _part(place: str) -> Any:
    """Import and return the object named by ``place``, which has the form ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def streamed() -> VideoNetwork:
    """Return the network of ``--task streaming``: the first in the table that supports it."""
    return next(network for network in all_networks() if network.streamed is not None)


def streamed_network() -> StreamedNetwork:
    """Return the network of ``--task streaming`` as a `StreamedNetwork`."""
    place = streamed().streamed
    assert place is not None
    network: StreamedNetwork = _part(place)
    return network


def conversions() -> list[Conversion]:
    """Return the `Conversion` of each network whose published weights can be read and written."""
    return [_part(x.conversion) for x in all_networks() if x.conversion is not None]


def conversion_of(name: str) -> Conversion | None:
    """Return the `Conversion` of the network that ``--video-model name`` names, if it has one."""
    place = network_named(name).conversion
    return None if place is None else _part(place)


def streamed_conversion() -> Conversion:
    """Return the `Conversion` for the published weights of the network of ``--task streaming``."""
    place = streamed().conversion
    assert place is not None
    conversion: Conversion = _part(place)
    return conversion


def named_by(names: Iterable[str]) -> str:
    """Return text for a message: "--video-model A or B", in backticks, for ``names`` A and B."""
    return f"`--video-model {' or '.join(names)}`"


def without_pooled() -> str:
    """Return text for a message: "--video-model A or B", the networks that take no pooled text."""
    return named_by(name for name in NETWORKS if not network_named(name).takes_pooled)


def with_widths(config: RunConfig, manifest: Mapping[str, Any]) -> RunConfig:
    """Return ``config`` with latent channels and text widths set from a dataset's ``manifest``.

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
    return check_sizes(network_of(config).with_widths(manifest))
