"""What ``--use-checkpoint-args`` takes of a stored configuration: what makes the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.config.streaming import stored_streaming
from megatron_ext.config.video_dit import CAUSAL, WINDOW, stored_dit
from megatron_ext.errors import ConfigError

Sections = dict[str, dict[str, Any]]

_STREAMING, _MMDIT, _TEXT = "streaming", "mmdit", "text"
_NAMES = {
    _TEXT: "a text model",
    _MMDIT: "an MMDiT",
    "video-dit": "a video DiT",
    CAUSAL: "a causal video DiT",
    _STREAMING: "the networks of `--task streaming`",
}


def model_of(stored: Mapping[str, Any], asked: Mapping[str, Any]) -> Sections:
    """The sections of a stored configuration that describe the weights, as a run takes them.

    Args:
        stored: the configuration in the checkpoint.
        asked: the section ``video`` of the run.

    Raises:
        ConfigError: the run builds another kind of model.
    """
    held, wanted = _kind(stored.get("video", {})), _kind(asked)
    if held == wanted:
        return _same(stored)
    if {held, wanted} & {_TEXT, _MMDIT}:
        raise ConfigError(
            f"The checkpoint is of {_NAMES[held]}, but this run builds {_NAMES[wanted]}; give "
            "another checkpoint, or leave out `--use-checkpoint-args`."
        )
    if stored.get("lora", {}).get("lora_rank"):
        raise ConfigError(
            "`--use-checkpoint-args` finds a checkpoint of adapters, which flow matching does not "
            "train; make whole networks of them with `tools/lora.py merge`."
        )
    return _between_dits(held, wanted, stored)


def _kind(video: Mapping[str, Any]) -> str:
    """What a run builds, by its section ``video``."""
    if not video.get("video"):
        return _TEXT
    if video.get("task") == "streaming":
        return _STREAMING
    return str(video.get("video_model", _MMDIT))


def _same(stored: Mapping[str, Any]) -> Sections:
    """Of a checkpoint of the same kind of model."""
    of_dits = stored_streaming(stored) or stored_dit(stored)
    if of_dits is not None:
        return of_dits
    if stored.get("video", {}).get("video"):
        # What else its model's section holds follows from these.
        names = ("hidden_size", "num_attention_heads")
        model = {name: stored["model"][name] for name in names}
        return {"model": model, "mmdit": dict(stored["mmdit"])}
    return {"model": _shape(stored), "moe": stored["moe"], "lora": stored.get("lora", {})}


def _between_dits(held: str, wanted: str, stored: Mapping[str, Any]) -> Sections:
    """Size, channels and window of one video DiT as another run names them."""
    streaming, dit = stored["streaming"], stored["video_dit"]
    size, channels = dit["video_dit_size"], dit.get("dit_channels")
    if held == _STREAMING:
        size, channels = streaming["generator_size"], streaming["latent_channels"]
    causal = {_STREAMING, CAUSAL}
    window = {x: streaming[x] for x in WINDOW} if held in causal and wanted in causal else {}
    if wanted == _STREAMING:
        return {"streaming": {"generator_size": size, "latent_channels": channels, **window}}
    return {"video_dit": {"video_dit_size": size}, "streaming": window}


def _shape(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What of a stored model section describes the weights rather than how they are computed."""
    keep = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups "
        "group_query_attention max_position_embeddings position_embedding_type rotary_base "
        "rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling "
        "rope_scaling_factor normalization "
        "norm_epsilon apply_layernorm_1p swiglu squared_relu quick_geglu add_bias_linear "
        "add_qkv_bias qk_layernorm untie_embeddings_and_output_weights padded_vocab_size "
        "mtp_num_layers seq_length"
    ).split()
    return {name: value for name, value in stored["model"].items() if name in keep}
