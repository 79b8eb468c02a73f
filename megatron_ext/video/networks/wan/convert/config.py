"""Translates the config.json of Wan 2.1 into an entry of `SIZES` of the video DiT, and back.

A config.json holds the arguments of diffusers' ``WanTransformer3DModel`` or of the original
``WanModel``. A missing argument has that class's default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.video.config.sizes import EPSILON, TIMESTEP_WIDTH
from megatron_ext.video.networks.published import CLASS
from megatron_ext.video.networks.wan.config import SIZES, VideoDiTSizes
from megatron_ext.video.networks.wan.convert.names import BLOCK_MODULES, MODULES, Naming

CLASSES = {
    Naming.DIFFUSERS: ("WanTransformer3DModel",),
    Naming.ORIGINAL: ("WanModel", "CausalWanModel"),
}
"""For each naming, the values of ``_class_name`` in config.json that can be converted.

CausalWanModel is the subclass of WanModel in Self-Forcing and LongLive."""
_PATCH = (1, 2, 2)
_USUAL_HEAD = 128
_FREE: dict[Naming, dict[str, int]] = {
    Naming.DIFFUSERS: {
        "num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40,
        "in_channels": 16, "text_dim": 4096,
    },
    Naming.ORIGINAL: {
        "num_heads": 16, "dim": 2048, "ffn_dim": 8192, "num_layers": 32, "in_dim": 16,
        "text_dim": 4096,
    },
}  # fmt: skip
"""For each naming, the entries of config.json that set the model's sizes, with their defaults."""
_SETTLED: dict[Naming, dict[str, Any]] = {
    Naming.DIFFUSERS: {
        "patch_size": _PATCH,
        "freq_dim": TIMESTEP_WIDTH,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": EPSILON,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
    },
    Naming.ORIGINAL: {
        "model_type": "t2v",
        "patch_size": _PATCH,
        "freq_dim": TIMESTEP_WIDTH,
        "cross_attn_norm": True,
        "qk_norm": True,
        "eps": EPSILON,
    },
}
"""For each naming, entries of config.json that must have the given value, the only one that the
video DiT supports. A missing entry has this value."""
_OUTPUT = {
    Naming.DIFFUSERS: ("in_channels", "out_channels"),
    Naming.ORIGINAL: ("in_dim", "out_dim"),
}


def read_config(raw: Mapping[str, Any], path: Path, *, naming: Naming) -> VideoDiTSizes:
    """Return the sizes of the model that a config.json describes.

    ``raw`` is the content of the file at ``path``. An entry that the video DiT does not support,
    and sizes that match no entry of `SIZES`, raise CheckpointError.
    """
    for name, value in _SETTLED[naming].items():
        entry = raw.get(name, value)
        if (tuple(entry) if isinstance(entry, list) else entry) != value:
            raise CheckpointError(
                f"{path} says `{name}` {entry!r}, but the video DiT has {value!r}; use Wan 2.1 "
                "text to video."
            )
    values = {name: raw.get(name, default) for name, default in _FREE[naming].items()}
    taken, given = _OUTPUT[naming]
    if raw.get(given, values[taken]) not in (values[taken], None):
        raise CheckpointError(
            f"{path} says `{given}` {raw[given]!r} and `{taken}` {values[taken]!r}, but the video "
            "DiT has as many channels behind as in front; use Wan 2.1 text to video."
        )
    bad = [name for name, value in values.items() if not isinstance(value, int)]
    if bad:
        raise CheckpointError(
            f"{path} says `{bad[0]}` {values[bad[0]]!r}, which must be an integer; mend it."
        )
    heads, width, *others = values.values()
    h = heads * width if naming is Naming.DIFFUSERS else width
    return _named([h, heads, *others], path)


def read_shapes(
    shapes: Mapping[str, tuple[int, ...]], path: Path, *, naming: Naming
) -> VideoDiTSizes:
    """Infer a model's sizes from ``shapes``, the shapes of its tensors by tensor name.

    ``path`` is only for error messages. No shape shows the number of heads; it is taken from the
    entry of `SIZES` with the same hidden size. Tensors that are not Wan's, or that match no entry
    of `SIZES`, raise CheckpointError.
    """

    def shape(names: tuple[str, str], dimensions: int, prefix: str = "") -> tuple[int, ...]:
        name = f"{prefix}{names[naming is Naming.ORIGINAL]}.weight"
        if len(shapes.get(name, ())) != dimensions:
            raise CheckpointError(
                f"{path} holds no `{name}` of {dimensions} dimensions; give weights of Wan 2.1 "
                "text to video."
            )
        return shapes[name]

    h, channels = shape(MODULES["embedder.patch_in"], 5)[:2]
    text = shape(MODULES["embedder.text_in"], 2)[1]
    ffn = shape(BLOCK_MODULES["linear_fc1"], 2, "blocks.0.")[0]
    blocks = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
    heads = [z.num_heads for z in SIZES.values() if z.hidden_size == h]
    heads.append(max(1, h // _USUAL_HEAD))
    return _named([h, heads[0], ffn, blocks, channels, text], path)


_COMPARED = "hidden_size num_heads ffn_size num_blocks channels patch_size rope_theta".split()


def _named(values: list[int], path: Path) -> VideoDiTSizes:
    """Return the sizes with these ``values``, which must match an entry of `SIZES`.

    ``values`` are hidden size, heads, feed-forward width, blocks, latent channels and text width.
    Any text width is allowed. If no entry matches, a CheckpointError names the nearest one.
    """
    h, heads, ffn, blocks, channels, text = values
    try:
        described = VideoDiTSizes(h, heads, ffn, blocks, channels, _PATCH[1], text)
    except (ConfigError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} is no model: {error}") from error
    same = {name: dataclasses.replace(z, text_width=text) for name, z in SIZES.items()}
    if described in same.values():
        return described

    def distance(name: str) -> float:
        """Return how far an entry of `SIZES` is from the model: the sum of |log ratio| per size."""
        pairs = ((getattr(same[name], x), getattr(described, x)) for x in _COMPARED)
        return sum(abs(math.log(x / y)) for x, y in pairs)

    nearest = min(same, key=distance)
    pairs = ((x, getattr(described, x), getattr(same[nearest], x)) for x in _COMPARED)
    differs = ", ".join(
        f"{x} {ours} instead of {theirs}" for x, ours, theirs in pairs if ours != theirs
    )
    raise CheckpointError(
        f"{path} describes a model that is no named size, the nearest being `{nearest}` "
        f"({differs}); give the weights of a named size ({', '.join(SIZES)}), or add one to SIZES "
        "in megatron_ext/video/networks/wan/config.py."
    )


def name_of(sizes: VideoDiTSizes) -> str:
    """Return the name in `SIZES` of a model's sizes, whatever its text width."""
    return next(
        name
        for name, named in SIZES.items()
        if dataclasses.replace(named, text_width=sizes.text_width) == sizes
    )


def config_json(sizes: VideoDiTSizes, naming: Naming) -> dict[str, Any]:
    """Return the content of config.json for a model of these sizes, as `read_config` reads it.

    ``naming`` decides which class, with which argument names, it is written for.
    """
    width = sizes.head_dim if naming is Naming.DIFFUSERS else sizes.hidden_size
    x = sizes
    free = (x.num_heads, width, x.ffn_size, x.num_blocks, x.channels, x.text_width)
    values: dict[str, Any] = {
        **_SETTLED[naming],
        **dict(zip(_FREE[naming], free, strict=True)),
        CLASS: CLASSES[naming][0],
        "patch_size": list(_PATCH),
        _OUTPUT[naming][1]: sizes.channels,
    }
    if naming is Naming.DIFFUSERS:
        return values
    left_out = {"patch_size", "cross_attn_norm", "qk_norm"}
    if sizes.text_width == _FREE[naming]["text_dim"]:
        left_out.add("text_dim")
    # The original's class does not take these entries from a file.
    return {k: v for k, v in values.items() if k not in left_out} | {"text_len": 512}
