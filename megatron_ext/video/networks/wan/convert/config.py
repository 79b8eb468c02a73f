"""Translates the config.json of Wan's models into sizes of the video DiT, and back.

A config.json holds the arguments of diffusers' ``WanTransformer3DModel`` or of the original
``WanModel``. A missing argument has that class's default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.video.config.sizes import EPSILON, TIMESTEP_WIDTH
from megatron_ext.video.networks.published import CLASS, Shapes
from megatron_ext.video.networks.wan.config import MASK_CHANNELS, SIZES, VideoDiTSizes
from megatron_ext.video.networks.wan.convert.names import (
    BLOCK_MODULES,
    MODULES,
    POSITIONS,
    VISION_MODULES,
    Naming,
)

CLASSES = {
    Naming.DIFFUSERS: ("WanTransformer3DModel",),
    Naming.ORIGINAL: ("WanModel", "CausalWanModel"),
}
"""For each naming, the values of ``_class_name`` in config.json that can be converted.

CausalWanModel is the subclass of WanModel in Self-Forcing and LongLive."""
_VACE = "Wan VACE, which has control blocks"
_ANIMATE = "Wan Animate, which is given faces and poses"
_S2V = "Wan S2V, which is given sound"
REFUSED = {
    "WanVACETransformer3DModel": _VACE,
    "VaceWanModel": _VACE,
    "WanAnimateTransformer3DModel": _ANIMATE,
    "WanAnimateModel": _ANIMATE,
    "WanModel_S2V": _S2V,
    "WanS2VTransformer3DModel": _S2V,
    "SkyReelsV2Transformer3DModel": "SkyReels V2, whose models may be told a frame rate",
    "ChronoEditTransformer3DModel": "ChronoEdit, whose frames lie further apart",
}
"""Values of ``_class_name`` of models of Wan that are not supported, with what they are."""
_REFUSED_PARTS = {
    "vace_": _VACE,
    "face_": _ANIMATE,
    "motion_encoder.": _ANIMATE,
    "pose_patch_embedding.": _ANIMATE,
    "casual_audio_encoder.": _S2V,
    "audio_injector.": _S2V,
    "audio_proj.": "a model of Wan that is given sound",
    "control_adapter.": "Wan Fun Control, which is given a camera or control frames",
    "ref_conv.": "Wan Fun Control, which is given a camera or control frames",
}
"""Beginnings of names of tensors that only models have which are not supported."""
_PATCH = (1, 2, 2)
_USUAL_HEAD = 128
"""The size of a head in all published models of Wan."""
_FREE: dict[Naming, dict[str, int]] = {
    Naming.DIFFUSERS: {
        "num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40,
        "in_channels": 16, "out_channels": 16, "text_dim": 4096,
    },
    Naming.ORIGINAL: {
        "num_heads": 16, "dim": 2048, "ffn_dim": 8192, "num_layers": 32, "in_dim": 16,
        "out_dim": 16, "text_dim": 4096,
    },
}  # fmt: skip
"""For each naming, the entries of config.json that set the model's sizes, with their defaults."""
_VISION = ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len")
"""Entries of diffusers' config.json about vision tokens, which are null in a model without any."""
_SETTLED: dict[Naming, dict[str, Any]] = {
    Naming.DIFFUSERS: {
        "patch_size": _PATCH,
        "freq_dim": TIMESTEP_WIDTH,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": EPSILON,
    },
    Naming.ORIGINAL: {
        "patch_size": _PATCH,
        "freq_dim": TIMESTEP_WIDTH,
        "cross_attn_norm": True,
        "qk_norm": True,
        "eps": EPSILON,
        "window_size": (-1, -1),
        "add_control_adapter": False,
        "add_ref_conv": False,
    },
}
"""For each naming, entries of config.json that must have the given value, the only one that the
video DiT supports. A missing entry has this value."""
_UNUSED: dict[Naming, tuple[str, ...]] = {
    Naming.DIFFUSERS: ("rope_max_seq_len",),
    Naming.ORIGINAL: (
        "text_len", "local_attn_size", "sink_size", "in_channels", "hidden_size",
        "in_dim_control_adapter", "downscale_factor_control_adapter", "in_dim_ref_conv",
        "cross_attn_type",
    ),
}  # fmt: skip
"""For each naming, entries that say nothing more about the weights.

They are the length of a table of rotations; rows of captions and the window of attention, which are
the run's own flags; sizes that other entries have under the original's names, or that belong to
parts which are not there; and the kind of cross attention, which the tensors show."""
_KINDS = ("t2v", "i2v", "flf2v", "ti2v")
"""Values of ``model_type`` in the original config.json that can be converted."""


def read_config(raw: Mapping[str, Any], path: Path, *, naming: Naming) -> VideoDiTSizes:
    """Return the sizes of the model that a config.json describes.

    ``raw`` is the content of the file at ``path``. The original's says nothing about vision tokens,
    which `with_vision` adds. An entry that the video DiT does not support, or that the class does
    not have, raises CheckpointError.
    """
    known = {"model_type", *_SETTLED[naming], *_FREE[naming], *_VISION, *_UNUSED[naming]}
    unknown = [name for name in raw if name not in known and not name.startswith("_")]
    if unknown:
        raise CheckpointError(
            f"{path} says `{unknown[0]}` {raw[unknown[0]]!r}, which {CLASSES[naming][0]} does not "
            "have; use Wan 2.1 or 2.2."
        )
    for name, value in _SETTLED[naming].items():
        entry = raw.get(name, value)
        if (tuple(entry) if isinstance(entry, list) else entry) != value:
            raise CheckpointError(
                f"{path} says `{name}` {entry!r}, but the video DiT has {value!r}; use Wan 2.1 or "
                "2.2."
            )
    kind = raw.get("model_type", "t2v") if naming is Naming.ORIGINAL else "t2v"
    if kind not in _KINDS:
        raise CheckpointError(
            f"{path} says `model_type` {kind!r}, but only {', '.join(_KINDS)} can be converted; "
            "use one of these."
        )
    values = {name: raw.get(name, default) for name, default in _FREE[naming].items()}
    read, predicted = [name for name in values if name.startswith(("in_", "out_"))]
    if values[predicted] is None:
        values[predicted] = values[read]
    vision = {name: raw.get(name) or 0 for name in _VISION if naming is Naming.DIFFUSERS}
    for name, value in {**values, **vision}.items():
        if type(value) is not int:
            raise CheckpointError(
                f"{path} says `{name}` {value!r}, which must be an integer; mend it."
            )
    heads, width, ffn, blocks, taken, channels, text = values.values()
    h = heads * width if naming is Naming.DIFFUSERS else width
    image_dim, added, positions = vision.values() if vision else (0, 0, 0)
    if added != (h if image_dim else 0):
        raise CheckpointError(
            f"{path} says `added_kv_proj_dim` {raw.get('added_kv_proj_dim')!r} and `image_dim` "
            f"{raw.get('image_dim')!r}; a video DiT has the hidden size ({h}) as the first, or "
            "null as both."
        )
    condition = _condition_channels(taken, channels, f"`{read}`", path)
    return _sizes(
        path,
        hidden_size=h,
        num_heads=heads,
        ffn_size=ffn,
        num_blocks=blocks,
        channels=channels,
        text_width=text,
        condition_channels=condition,
        vision_width=image_dim,
        vision_positions=positions,
    )


def _sizes(path: Path, **values: int) -> VideoDiTSizes:
    try:
        return VideoDiTSizes(patch_size=_PATCH[1], **values)
    except (ConfigError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} is no model: {error}") from error


def _condition_channels(taken: int, channels: int, what: str, path: Path) -> int:
    """Return how many input channels are for given frames.

    ``taken`` is the number of all input channels, named ``what`` in the error, ``channels`` that of
    the output. CheckpointError is raised if the input is neither latents, nor latents, mask and
    masked latents.
    """
    masked = 2 * channels + MASK_CHANNELS
    if taken not in (channels, masked):
        raise CheckpointError(
            f"{path} says {what} {taken} and {channels} output channels; a video DiT takes "
            f"{channels}, or {masked} with given frames, so this may be Wan Fun Control; use Wan "
            "2.1 or 2.2."
        )
    return taken - channels


def with_vision(sizes: VideoDiTSizes, shapes: Shapes, *, naming: Naming) -> VideoDiTSizes:
    """Return sizes with those of the vision tokens, which the shapes of the tensors show.

    The original's config.json does not tell the image-to-video model of Wan 2.1, which takes such
    tokens, from that of Wan 2.2.
    """
    own = naming is Naming.ORIGINAL
    first = shapes.get(f"{VISION_MODULES['embedder.vision_in.input_norm'][own]}.weight", (0,))
    positions = shapes.get(POSITIONS[own], (1, 0, 0))
    return dataclasses.replace(sizes, vision_width=first[0], vision_positions=positions[1])


def read_shapes(shapes: Shapes, path: Path, *, naming: Naming) -> VideoDiTSizes:
    """Infer a model's sizes from ``shapes``, the shapes of its tensors by tensor name.

    ``path`` is only for error messages. No shape shows the number of heads; it is taken from the
    entry of `SIZES` with the same hidden size, or a head has 128 features, as in all published
    models. Tensors that are not Wan's, or those of a model that is not supported, raise
    CheckpointError.
    """
    for begin, title in _REFUSED_PARTS.items():
        part = next((name for name in shapes if name.startswith(begin)), None)
        if part is not None:
            raise CheckpointError(
                f"{path} holds `{part}`, so it is {title}, and cannot be converted; give Wan 2.1 "
                "or 2.2."
            )

    def shape(names: tuple[str, str], dimensions: int, prefix: str = "") -> tuple[int, ...]:
        name = f"{prefix}{names[naming is Naming.ORIGINAL]}.weight"
        if len(shapes.get(name, ())) != dimensions:
            raise CheckpointError(
                f"{path} holds no `{name}` of {dimensions} dimensions; give weights of Wan 2.1 or "
                "2.2."
            )
        return shapes[name]

    h, taken = shape(MODULES["embedder.patch_in"], 5)[:2]
    channels = shape(MODULES["head.linear"], 2)[0] // (_PATCH[1] * _PATCH[2])
    condition = _condition_channels(taken, channels, "in its shapes input channels", path)
    blocks = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
    heads = [z.num_heads for z in SIZES.values() if z.hidden_size == h]
    if not heads and h % _USUAL_HEAD:
        raise CheckpointError(
            f"{path} has hidden size {h}, which is not divisible by {_USUAL_HEAD}, the size of a "
            "head in Wan's models, and no shape shows the number of heads; give a folder with "
            "config.json."
        )
    heads.append(h // _USUAL_HEAD)
    sizes = _sizes(
        path,
        hidden_size=h,
        num_heads=heads[0],
        ffn_size=shape(BLOCK_MODULES["linear_fc1"], 2, "blocks.0.")[0],
        num_blocks=blocks,
        channels=channels,
        text_width=shape(MODULES["embedder.text_in"], 2)[1],
        condition_channels=condition,
    )
    return with_vision(sizes, shapes, naming=naming)


def config_json(sizes: VideoDiTSizes, naming: Naming) -> dict[str, Any]:
    """Return the content of config.json for a model of these sizes, as `read_config` reads it.

    ``naming`` decides which class, with which argument names, it is written for.
    """
    x = sizes
    width = x.head_dim if naming is Naming.DIFFUSERS else x.hidden_size
    taken = x.channels + x.condition_channels
    free = (x.num_heads, width, x.ffn_size, x.num_blocks, taken, x.channels, x.text_width)
    values: dict[str, Any] = {
        **_SETTLED[naming],
        **dict(zip(_FREE[naming], free, strict=True)),
        CLASS: CLASSES[naming][0],
        "patch_size": list(_PATCH),
    }
    if naming is Naming.DIFFUSERS:
        vision = (x.vision_width, x.hidden_size if x.vision_width else 0, x.vision_positions)
        return values | {name: value or None for name, value in zip(_VISION, vision, strict=True)}
    left_out = {*_SETTLED[naming]} - {"freq_dim", "eps"}
    if sizes.text_width == _FREE[naming]["text_dim"]:
        left_out.add("text_dim")
    values["model_type"] = _kind_of(sizes)
    # The original's class does not take these entries from a file.
    return {k: v for k, v in values.items() if k not in left_out} | {"text_len": 512}


def _kind_of(sizes: VideoDiTSizes) -> str:
    """Return ``model_type`` of the original; the one model of 48 channels is also given frames."""
    if sizes.vision_positions:
        return "flf2v"
    if sizes.condition_channels:
        return "i2v"
    return "ti2v" if sizes.channels == SIZES["5b"].channels else "t2v"
