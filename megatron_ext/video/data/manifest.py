"""The manifest of a dataset of encoded clips, which records the options of its making."""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import DataError
from megatron_ext.video.config.encoding import (
    FOLDERS,
    HASHED,
    PATCH,
    TILE_FLAGS,
)
from megatron_ext.video.data import shards
from megatron_ext.video.data.geometry import Bucket, BucketPlan
from megatron_ext.video.data.options import STORAGES, VideoPreprocessOptions

if TYPE_CHECKING:
    from megatron_ext.video.data.encode import ClipEncoder


def sample_options(options: VideoPreprocessOptions, encoder: ClipEncoder) -> dict[str, Any]:
    """Return the settings that determine how clips become samples, as the manifest stores them."""
    from megatron_ext.video.data.encode import reference_names

    codec = encoder.codec
    text_encoder = encoder.text_encoder
    about = {
        "format": shards.FORMAT,
        "codec": codec.identity,
        "text_encoder": text_encoder.identity,
        "encode": asdict(options.encode),
        "plan": options.plan.as_dict(),
        "storage": options.storage,
        "references": list(reference_names(options.encode)),
        "latent_channels": codec.channels,
        "text_length": text_encoder.length,
        "text_width": text_encoder.width,
        "pooled_width": text_encoder.pooled_width,
        "latents": codec.facts,
    }
    tiles = {name: getattr(options.codec, name) for name in TILE_FLAGS}
    if any(tiles.values()):
        about["tiles"] = tiles
    image_encoder = encoder.image_encoder
    if image_encoder is not None:
        about["image_encoder"] = image_encoder.identity
        about["image_embeds"] = {
            "sides": list(encoder.image_sides),
            "tokens": image_encoder.tokens,
            "width": image_encoder.width,
        }
    return about


def latent_factor(manifest: Mapping[str, Any], axis: str) -> int | None:
    """Return how many frames (``axis`` "temporal") or pixels ("spatial") a latent one encodes.

    Return None for a set of an earlier version that does not say so.
    """
    codec = manifest["codec"]
    factor: int | None = manifest.get("latents", {}).get(axis, codec.get(f"codec_{axis}"))
    return factor


def folders_of(options: VideoPreprocessOptions) -> dict[str, str]:
    """Return the folders of the models that encode clips, by the field of the flag.

    A dataset keeps them, so that sampling finds its encoders.
    """
    given = {
        **asdict(options.text_encoder),
        "codec": None if options.codec.codec == PATCH else options.codec.codec,
        "image_encoder": options.image_encoder.image_encoder,
    }
    fields = dict.fromkeys(["codec", "image_encoder", *(x for y in FOLDERS.values() for x in y)])
    return {name: str(Path(given[name]).resolve()) for name in fields if given[name]}


def folder_of_model(manifest: Mapping[str, Any], name: str, given: str | None) -> str | None:
    """Return the folder of a model that encoded a dataset.

    It is the ``given`` one or, if that is None, the one that the manifest has under the flag's
    field ``name``, if it is still there.
    """
    known = manifest.get("folders", {}).get(name)
    return known if given is None and known and Path(known).is_dir() else given


def weights_stamp(options: VideoPreprocessOptions) -> str:
    """Return a hash by which a later run notices that the weights of a model have changed.

    It covers sizes and modification times of all files of the codec's VAE and the text encoder.
    """
    from megatron_ext.video.data.register import stamp

    text = options.text_encoder
    models = [options.codec.codec, text.t5_path, text.clip_path, text.llama_path]
    models.append(options.image_encoder.image_encoder)
    files = [sorted(Path(model).rglob("*")) for model in models if model]
    weights = [stamp(path) for model in files for path in model if path.is_file()]
    return hashlib.sha256(json.dumps(weights).encode()).hexdigest()


def make_manifest(
    about: Mapping[str, Any],
    plan: BucketPlan,
    buckets: Sequence[Bucket],
    rates: Sequence[float],
    clips: Sequence[Any],
) -> dict[str, Any]:
    """Return the entries of a manifest, all but the list of shards.

    The entry ``fingerprint`` is a hash of the other entries and of ``clips``.

    Args:
        about: the settings that determine how clips become samples.
        buckets: the buckets in the order of their numbers.
        rates: frame rate of each sample, 0 for pictures, in order.
        clips: the key of each sample, in order.
    """
    rules = plan.rules
    moving = [rate for rate in rates if rate]
    content = {
        **about,
        "buckets": [
            {
                "shape": asdict(bucket),
                "micro_batch_size": rules[bucket.resolution][bucket.num_frames].micro_batch_size,
            }
            for bucket in buckets
        ],
        # The most common frame rate, which sampling uses too.
        "fps": Counter(moving).most_common(1)[0][0] if moving else 24,
    }
    deciding = json.dumps([_deciding(content), clips], sort_keys=True)
    return {**content, "fingerprint": hashlib.sha256(deciding.encode()).hexdigest()}


def _deciding(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a manifest that decide what the data are.

    What follows from others is left out, and so are the defaults of flags that earlier versions did
    not have: the data of a run that is resumed then count as the same.
    """
    kept = {name: value for name, value in content.items() if name != "latents"}
    newer = ("middle_reference", "masked_references")
    if "encode" in kept:
        given = kept["encode"].items()
        kept["encode"] = {name: value for name, value in given if name not in newer or value}
    return kept


def buckets_of(manifest: Mapping[str, Any]) -> list[Bucket]:
    """Return the buckets that a manifest lists; a bucket's number is its index."""
    return [Bucket(**entry["shape"]) for entry in manifest["buckets"]]


def _whole(least: int) -> tuple[str, Callable[[Any], bool]]:
    return f"a whole number of at least {least}", lambda x: type(x) is int and x >= least


SIDES = ("head", "tail", "middle")
"""The frames of a clip of which a set may have image embeddings."""
_SIZE = _whole(1)
_TEXT = ("text", lambda x: isinstance(x, str))
_NUMBER = ("a number", lambda x: type(x) in (int, float) and math.isfinite(x))
_ENTRIES = {
    "codec": {"codec": _TEXT},
    "text_encoder": {
        "text_encoder": (f"one of {', '.join(FOLDERS)}", lambda x: x in list(FOLDERS)),
        "length": _SIZE,
    },
    "plan": {},
    "buckets": [
        {
            "shape": {"resolution": _TEXT, "num_frames": _SIZE, "height": _SIZE, "width": _SIZE},
            "micro_batch_size": (f"null or {_SIZE[0]}", lambda x: x is None or _SIZE[1](x)),
        }
    ],
    "shards": [{"name": _TEXT, "clips": _whole(0)}],
    "references": [_TEXT],
    "storage": _TEXT,
    "latent_channels": _SIZE,
    "text_length": _SIZE,
    "text_width": _SIZE,
    "pooled_width": _whole(0),
    "fps": ("a number above 0", lambda x: _NUMBER[1](x) and x > 0),
    "fingerprint": _TEXT,
}
"""The entries that a manifest must have, each with the form of its value.

The form of a single value is a pair (description, check), where ``check`` must accept the value. A
dict is the form of a mapping that has these entries; a list ``[form]`` is the form of a list, all
items of which have this form."""
_OPTIONAL = {
    "folders": {},
    "latents": {"temporal": _SIZE, "spatial": _SIZE},
    "image_encoder": {},
    "image_embeds": {"sides": [(f"one of {', '.join(SIDES)}", lambda x: x in SIDES)],
                     "tokens": _SIZE, "width": _SIZE},
}  # fmt: skip
"""Entries that a manifest may have, each with the form of its value, as in `_ENTRIES`."""
_SIZES = {
    ("text_encoder", HASHED): {"width": _SIZE, "pooled_width": _SIZE},
    ("codec", PATCH): {
        **dict.fromkeys(("codec_spatial", "codec_temporal", "codec_channels"), _SIZE),
        **dict.fromkeys(("codec_shift", "codec_scale"), _NUMBER),
    },
}
"""Further entries that a manifest's ``text_encoder`` or ``codec`` must have for a built-in one.

The hashed text encoder and the patch codec have no model folder, so the manifest gives their sizes.
A key is (entry, name); its value has the form of `_ENTRIES`.
"""


def _faults(value: Any, expected: Any, name: str) -> Iterator[tuple[str, str | None]]:
    """Yield (name, fault) for each entry of ``value`` that is missing or wrong.

    The fault is a clause for an error message, or None for a missing entry. ``expected`` says what
    ``value`` must hold, in the form of `_ENTRIES`. ``name`` is the place of ``value`` in the
    manifest, such as ``buckets[0]``; a yielded name begins with it.
    """
    if not isinstance(expected, dict | list):
        if not expected[1](value):
            yield name, f"holds `{name}` {reprlib.repr(value)}, which must be {expected[0]}"
    elif not isinstance(value, type(expected)):
        kind = "a table" if isinstance(expected, dict) else "a list"
        yield name, f"holds `{name}` {reprlib.repr(value)}, which must be {kind}"
    elif isinstance(expected, list):
        for i, inner in enumerate(value):
            yield from _faults(inner, expected[0], f"{name}[{i}]")
    else:
        for key, inner in expected.items():
            inside = f"{name}.{key}".lstrip(".")
            if key in value:
                yield from _faults(value[key], inner, inside)
            else:
                yield inside, None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read ``manifest.json``, which describes the shards of a folder.

    DataError is raised if the file is missing or damaged, if its format is that of another version,
    and if an entry is missing or wrong.
    """
    path = folder / shards.MANIFEST
    manifest = shards.read_json(path)
    faults = list(_faults(manifest, _ENTRIES, ""))
    for (name, kind), sizes in _SIZES.items():
        entry = manifest.get(name)
        if isinstance(entry, dict) and entry.get(name) == kind:
            faults += _faults(entry, sizes, name)
    for name, expected in _OPTIONAL.items():
        if name in manifest:
            faults += _faults(manifest[name], expected, name)
    missing = [f"`{name}`" for name, fault in faults if fault is None]
    wrong = [f"lacks {', '.join(missing)}"] if missing else [fault for _, fault in faults]
    if wrong:
        raise DataError(f"{path} {wrong[0]}; {shards.ADVICE} again.")
    for name in [*(shard["name"] for shard in manifest["shards"]), *manifest["references"]]:
        if Path(name).name != name:
            raise DataError(
                f"{path} names {name}, which leads out of the folder; get the data from a source "
                "that you trust."
            )
    if manifest["storage"] not in STORAGES:
        raise DataError(
            f"{path} has the storage {manifest['storage']}, which must be one of "
            f"{', '.join(STORAGES)}; {shards.ADVICE} again."
        )
    return manifest
