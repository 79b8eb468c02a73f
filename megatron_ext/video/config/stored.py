"""The parts of a checkpoint's video configuration that ``--use-checkpoint-args`` takes over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.config.window import WINDOW
from megatron_ext.video.networks.wan.config import CAUSAL

_STREAMING, _MMDIT, _OTHER = "streaming", "mmdit", "other"
_NAMES = {
    _OTHER: "a model that this program does not train",
    _MMDIT: "an MMDiT",
    "video-dit": "a video DiT",
    CAUSAL: "a causal video DiT",
    _STREAMING: "the networks of `--task streaming`",
}
_NETWORKS = ("generator_size", "critic_size", "teacher_size", "latent_channels")
"""Flags of streaming that decide its networks, besides window, codec, encoder and adapters."""


def stored_video_model(stored: Mapping[str, Any], config: RunConfig) -> Mapping[str, Any]:
    """Return the stored flags, by section, from which this run builds the network of a checkpoint.

    ``stored`` is the configuration in the checkpoint, ``config`` that of the run. ConfigError is
    raised if the checkpoint holds a kind of model that the run cannot start from.
    """
    video = config.section(VideoConfig)
    builds = _STREAMING if video.streams else video.video_model
    kind = _kind(stored.get("video", {}))
    if kind == builds:
        return stored_network(stored)
    if {kind, builds} & {_OTHER, _MMDIT}:
        raise ConfigError(
            f"The checkpoint is of {_NAMES[kind]}, but this run builds {_NAMES[builds]}; give "
            "another checkpoint, or leave out `--use-checkpoint-args`."
        )
    if stored.get("lora", {}).get("lora_rank"):
        raise ConfigError(
            "`--use-checkpoint-args` finds a checkpoint of adapters, which flow matching does not "
            "train; make whole networks of them with `tools/lora.py merge`."
        )
    # Size, channels and window of one video DiT as another run names them.
    streaming = stored["streaming"]
    dit = stored["video_dit"]
    size = dit["video_dit_size"]
    channels = dit.get("dit_channels")
    if kind == _STREAMING:
        size = streaming["generator_size"]
        channels = streaming["latent_channels"]
    causal = {_STREAMING, CAUSAL}
    window = _window(streaming) if kind in causal and builds in causal else {}
    if builds == _STREAMING:
        return {"streaming": {"generator_size": size, "latent_channels": channels, **window}}
    return {"video_dit": {"video_dit_size": size}, "streaming": window}


def _window(streaming: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored flags of a causal window; earlier versions did not have all of them."""
    return {name: streaming[name] for name in WINDOW if name in streaming}


def _kind(video: Mapping[str, Any]) -> str:
    """Return the kind of model, such as ``"mmdit"``, that a run with the flags ``video`` built."""
    if not video.get("video"):
        return _OTHER
    if video.get("task") == "streaming":
        return _STREAMING
    return str(video.get("video_model", _MMDIT))


def stored_network(stored: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the flags, by section, that describe the networks of a video checkpoint."""
    kind = _kind(stored["video"])
    if kind == _STREAMING:
        streaming = stored["streaming"]
        networks = {name: streaming[name] for name in _NETWORKS} | _window(streaming)
        others = {name: dict(stored[name]) for name in ("codec", "text_encoder", "lora")}
        return {"streaming": networks, **others}
    if kind != _MMDIT:
        window = _window(stored["streaming"]) if kind == CAUSAL else {}
        return {"video_dit": dict(stored["video_dit"]), "streaming": window}
    # What else its model's section holds follows from these.
    names = ("hidden_size", "num_attention_heads")
    model = {name: stored["model"][name] for name in names}
    return {"model": model, "mmdit": dict(stored["mmdit"])}
