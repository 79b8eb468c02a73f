"""The parts of a checkpoint's video configuration that ``--use-checkpoint-args`` takes over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.config.window import stored_window
from megatron_ext.video.networks import NETWORKS
from megatron_ext.video.networks.lookup import network_named, streamed
from megatron_ext.video.networks.network import STREAMING, Sections, VideoNetwork

_SIZES = (
    "generator_size", "generator_sizes", "critic_size", "teacher_size", "latent_channels"
)  # fmt: skip
"""Flags of `StreamingConfig` that decide the sizes of its networks.

Other flags that describe these networks are those in `WINDOW`, and the sections ``codec``,
``text_encoder`` and ``lora``."""


def stored_video_model(stored: Mapping[str, Any], config: RunConfig) -> Sections:
    """Return the flags stored in a checkpoint from which this run builds its network.

    They are those of `_stored_flags`, and where the published weights came from, if any did.
    """
    origin = stored.get("weights", {}).get("weights_origin")
    return {**_stored_flags(stored, config), "weights": {"weights_origin": origin}}


def _stored_flags(stored: Mapping[str, Any], config: RunConfig) -> Sections:
    """Return the flags stored in a checkpoint from which this run builds its network.

    The flags are grouped by section. ``stored`` is the configuration in the checkpoint, ``config``
    that of the run. ConfigError is raised if the checkpoint holds a kind of model that the run
    cannot start from.
    """
    video = config.section(VideoConfig)
    builds = STREAMING if video.streams else video.video_model
    kind = _kind(stored.get("video", {}))
    if kind is not None and kind == builds:
        return stored_network(stored)
    network = None if kind is None else _network(kind)
    if kind is None or network is not _network(builds) or network.restated is None:
        raise ConfigError(
            f"The checkpoint is of {_title(kind)}, but this run builds {_title(builds)}; give "
            "another checkpoint, or leave out `--use-checkpoint-args`."
        )
    if stored.get("lora", {}).get("lora_rank"):
        raise ConfigError.about(
            "--use-checkpoint-args",
            None,
            f"finds adapters of {_title(kind)}, but this run builds {_title(builds)}",
            "make whole networks of them with `tools/lora.py merge`",
        )
    return network.restated(stored, kind, builds)


def _kind(video: Mapping[str, Any]) -> str | None:
    """Return the kind of model that a run with the flags ``video`` built.

    The kind is `STREAMING` for the streaming task, else the value of ``--video-model``. Return None
    for a model that this program does not train.
    """
    if not video.get("video"):
        return None
    if video.get("task") == "streaming":
        return STREAMING
    name = str(video.get("video_model", VideoConfig.video_model))  # not in the oldest checkpoints
    return name if name in NETWORKS else None


def _network(kind: str) -> VideoNetwork:
    return streamed() if kind == STREAMING else network_named(kind)


def _title(kind: str | None) -> str:
    if kind is None:
        return "a model that this program does not train"
    if kind == STREAMING:
        return "the networks of `--task streaming`"
    return network_named(kind).titles[kind]


def stored_network(stored: Mapping[str, Any]) -> Sections:
    """Return the flags, by section, that describe the networks in a video checkpoint."""
    kind = _kind(stored["video"])
    assert kind is not None
    if kind != STREAMING:
        return network_named(kind).stored_model(stored, kind)
    streaming = stored["streaming"]
    # Earlier versions had named sizes alone.
    networks = {name: streaming.get(name) for name in _SIZES} | stored_window(stored)
    others = {name: dict(stored[name]) for name in ("codec", "text_encoder", "lora")}
    return {"streaming": networks, **others}
