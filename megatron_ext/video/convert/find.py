"""Finds what lies at a path: published weights of a video network, or what was given instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.safetensors_files import SAFETENSORS, file_of_each
from megatron_ext.config.run import RunConfig
from megatron_ext.disk.reading import read_model_settings
from megatron_ext.errors import CheckpointError
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.networks import NETWORKS
from megatron_ext.video.networks.lookup import (
    conversion_of,
    conversions,
    named_by,
    network_named,
    network_of,
    streamed_conversion,
)
from megatron_ext.video.networks.published import CLASS, Conversion, Form
from megatron_ext.video.streaming.config import Role, StreamingConfig

SUFFIXES = (SAFETENSORS, ".pt", ".pth", ".ckpt", ".bin")
"""The endings of files of weights that can be read."""
_INDEX = ".safetensors.index.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.(safetensors|bin)$")
_NUMBERED = re.compile(r"-\d{5}\.safetensors$")
"""Matches the names of ColossalAI's shards, but also those of files that a trainer numbers."""
_POINTER = b"version https://git-lfs.github.com/spec/"
"""The beginning of the small file that git keeps in place of a large one."""
_LEVELS = ("transformer", "transformer_2", "high_noise_model", "low_noise_model")
"""Folders of the networks within a folder of a whole pipeline, of diffusers or of Wan 2.2."""
_ADAPTERS = re.compile(
    r"lora_(A|B|up|down|linear_layer|magnitude_vector)\b|\.(hada|lokr)_w|\.lora\.(up|down)\."
    r"|_lora\d*\.(up|down)\.|\.(diff|diff_[bm]|dora_scale)$"
)
_QUANTIZED = {
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".qweight": "nunchaku or GPTQ",
    ".wscales": "nunchaku",
    ".qzeros": "GPTQ or AWQ",
    ".weight._data": "quanto",
    ".weight_scale_2": "ModelOpt or ComfyUI to 4 bits",
}
"""Endings of names of tensors -> the library that has quantized the weights."""
_PARTS = (
    (re.compile(r"^(first_stage_model\.|vae\.)?(de|en)coder\.(conv_in|conv1|mid|up_blocks|"
                r"down_blocks|upsamples|downsamples|middle)\b"), "a VAE"),
    (re.compile(r"^(text_model|shared|token_embedding|model\.embed_tokens|embed_tokens|"
                r"encoder\.block)\b"), "a text encoder"),
    (re.compile(r"^(vision_model|visual)\b"), "an image encoder"),
)  # fmt: skip
"""Patterns of the names of tensors -> the part of a pipeline that has such tensors."""
_PART_CLASSES = (
    ("Autoencoder", "a VAE"),
    ("Scheduler", "a scheduler, which has no weights"),
    ("Encoder", "a text encoder"),
)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a video network; raise CheckpointError if it cannot be read."""
    path = folder / "config.json"
    if not path.is_file():
        _refuse_level(folder)
    return read_model_settings(path, "give the folder of the model.")


def _refuse_level(folder: Path) -> None:
    """Raise a CheckpointError for a folder without config.json that shows what to give instead."""
    inner = [folder / name for name in _LEVELS if (folder / name).is_dir()]
    if inner:
        experts = " with two experts, each for some noise levels" if len(inner) > 1 else ""
        raise CheckpointError(
            f"{folder} holds a whole pipeline{experts}; give {' or '.join(map(str, inner))}."
        )
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} holds LoRA adapters instead of whole weights; give the model that they are "
            "for."
        )
    snapshots = sorted((folder / "snapshots").glob("*"))
    if snapshots:
        raise CheckpointError(
            f"{folder} is a model's folder in the cache of Hugging Face; give a snapshot in it, "
            f"such as {snapshots[-1]}."
        )
    if any(folder.glob("*.distcp")):
        raise CheckpointError(
            f"{folder} holds a checkpoint of torch.distributed; write its weights to one file by "
            "`python -m torch.distributed.checkpoint.format_utils dcp_to_torch`, and give this."
        )
    if (folder / "zero_to_fp32.py").is_file():
        raise CheckpointError(
            f"{folder} holds a checkpoint of DeepSpeed; write its weights by the `zero_to_fp32.py` "
            "in it, and give what it writes."
        )
    files = sorted(x.name for x in folder.glob("*") if x.suffix in SUFFIXES)
    if len(files) == 1 and not is_shard(files[0]):
        raise CheckpointError(f"{folder} has no config.json; give the file {folder / files[0]}.")
    if files and not stems(folder) and not any(map(is_shard, files)):
        shown = ", ".join(files[:4]) + (" and others" if len(files) > 4 else "")
        raise CheckpointError(
            f"{folder} has no config.json, but several files of weights ({shown}); give one of "
            "them."
        )


def is_shard(name: str) -> bool:
    """Return whether a file's name says that it is one of several files of a model."""
    return _SHARD.search(name) is not None


def check_file(path: Path) -> None:
    """Raise a CheckpointError for a file that cannot be one of published weights."""
    if path.name.endswith(_INDEX) or path.name in ("config.json", "model_index.json"):
        raise CheckpointError(f"{path} describes a model; give its folder, {path.parent}.")
    if path.suffix == ".gguf":
        raise CheckpointError(
            f"{path} holds weights that are quantized as GGUF; give the model before it was "
            "quantized."
        )
    if path.suffix == ".sft":
        raise CheckpointError(
            f"{path} must end with {SAFETENSORS}, of which .sft is short; rename it."
        )
    if path.suffix not in SUFFIXES:
        raise CheckpointError(
            f"{path} must be a folder, or a file that ends with {', '.join(SUFFIXES[:-1])} or "
            f"{SUFFIXES[-1]}; give another."
        )
    if is_shard(path.name) or is_listed(path):
        raise CheckpointError(
            f"{path} is only one of several files of a model; give their folder, {path.parent}."
        )
    check_no_pointer(path)


def is_listed(path: Path) -> bool:
    """Return whether an index beside a file lists it as one of several files, as ColossalAI's does.

    Only names that look like a shard's, such as ``model-00001.safetensors``, are looked up.
    """
    if _NUMBERED.search(path.name) is None:
        return False
    return any(path.name in file_of_each(path.parent, stem).values() for stem in stems(path.parent))


def stems(folder: Path) -> list[str]:
    """Return the beginnings of the names of the indices of safetensors in a folder."""
    return sorted(path.name.removesuffix(_INDEX) for path in folder.glob(f"*{_INDEX}"))


def form_of_index(folder: Path) -> tuple[str, Conversion, Form] | None:
    """Return what a folder's only index tells of weights without config.json, as Open-Sora saves.

    These are the beginning of the files' names, the conversion and the form; None is returned if
    there is a config.json, or not one index of a video network.
    """
    if (folder / "config.json").is_file() or len(stems(folder)) != 1:
        return None
    (stem,) = stems(folder)
    found = _known_form(file_of_each(folder, stem))
    return None if found is None else (stem, *found)


def _known_form(names: Collection[str]) -> tuple[Conversion, Form] | None:
    """Return the first conversion and form that know these names of tensors, or None."""
    known = ((reader, form) for reader in conversions() for form in reader.forms)
    return next(((reader, form) for reader, form in known if form.knows(names)), None)


def check_no_pointer(path: Path) -> None:
    """Raise a CheckpointError if git has left a pointer in place of a large file."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise CheckpointError(
                f"{path} is only a pointer of Git LFS; fetch the file itself by `git lfs pull`."
            )


def holds_video_weights(source: Path) -> bool:
    """Return whether a folder or file is to be read as public weights of a video network.

    It is not if it shows to be a language model, whose config.json names no class.

    Raises:
        CheckpointError: config.json cannot be read, or the folder or file is neither.
    """
    if source.is_file():
        check_file(source)
        return True
    if form_of_index(source) is not None:
        return True
    if not (source / "config.json").is_file():
        _refuse_level(source)
        return (source / "model_index.json").is_file()
    return CLASS in read_config(source)


def form_of_folder(folder: Path) -> tuple[Conversion, Form]:
    """Return the conversion and the form for the class that a folder's config.json names.

    Raises:
        CheckpointError: no conversion reads this class, or the weights are quantized.
    """
    content = read_config(folder)
    path = folder / "config.json"
    if content.get("quantization_config"):
        method = content["quantization_config"].get("quant_method", "another program")
        raise CheckpointError(
            f"{folder} holds weights that are quantized by {method}; give the model before it was "
            "quantized."
        )
    readers = conversions()
    for reader in readers:
        for form in reader.forms:
            if content.get(CLASS) in form.classes:
                return reader, form
    known = ", ".join(name for reader in readers for name in reader.classes)
    if CLASS not in content:
        kind = content.get("model_type", "no known model")
        raise CheckpointError(
            f"{path} names no `{CLASS}` but is of {kind}, such as a text encoder; give the folder "
            f"of a video network, whose class is one of {known}."
        )
    name = str(content[CLASS])
    said = f"{path} says `{CLASS}` {name!r}"
    for reader in readers:
        if name in reader.refused:
            raise CheckpointError(
                f"{said}, which is {reader.refused[name]}, and cannot be converted; give "
                f"{reader.title}."
            )
    for part, what in _PART_CLASSES:
        if part in name:
            raise CheckpointError(
                f"{said}, which is {what}; give the folder of the network, such as `transformer` "
                "beside it."
            )
    raise CheckpointError(f"{said}, which cannot be converted; use one of {known}.")


def form_of_names(names: Collection[str], source: Path) -> tuple[Conversion, Form]:
    """Return the conversion and the form that know these names of tensors.

    Raises:
        CheckpointError: there is none.
    """
    readers = conversions()
    for name in names:
        if _ADAPTERS.search(name):
            others = [other for other in names if not _ADAPTERS.search(other)]
            if _known_form(others) is not None:
                raise CheckpointError(
                    f"{source} holds LoRA adapters, such as `{name}`, beside whole weights; give "
                    "the model without them, or with the adapters merged into it."
                )
            raise CheckpointError(
                f"{source} holds LoRA adapters, such as `{name}`, instead of whole weights; give "
                "the model that they are for."
            )
        for ending, library in _QUANTIZED.items():
            if name.endswith(ending):
                raise CheckpointError(
                    f"{source} holds `{name}`, as weights have that are quantized by {library}; "
                    "give the model before it was quantized."
                )
    found = _known_form(names)
    if found is not None:
        return found
    known = ", ".join(reader.title for reader in readers)
    for pattern, what in _PARTS:
        named = next(filter(pattern.search, sorted(names)), None)
        if named is not None:
            raise CheckpointError(
                f"{source} holds {what}, with tensors such as `{named}`; give the weights of the "
                f"network, {known}."
            )
    example = f", such as `{min(names)}`," if names else ""
    raise CheckpointError(
        f"{source} holds tensors{example} of no network that can be read; give weights of {known}."
    )


def writer_of(stored: Mapping[str, Any]) -> Conversion | None:
    """Return the conversion that writes the networks of a checkpoint as public weights.

    ``stored`` is the checkpoint's configuration. None stands for a language model's checkpoint.

    Raises:
        CheckpointError: the network has no public form.
    """
    if is_streaming(stored):
        return streamed_conversion()
    video = stored.get("video")
    if video is None:
        return None
    name = video["video_model"]
    conversion = conversion_of(name)
    if conversion is None:
        known = [each for each in NETWORKS if conversion_of(each) is not None]
        raise CheckpointError(
            f"The checkpoint is of {network_named(name).titles[name]}, whose weights have no "
            f"public form; only those of {named_by(known)} can be exported."
        )
    return conversion


def is_streaming(stored: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's configuration is that of a streaming run.

    The result is also True for a checkpoint made from public weights of a network that streaming
    can train.
    """
    return (stored.get("video") or {}).get("task") == "streaming"


def sizes_of(run: RunConfig, network: str | None = None) -> Any:
    """Return the sizes of a run's network.

    ``network`` chooses one of a streaming run: ``"generator"`` (None), ``"critic"`` or
    ``"teacher"``.
    """
    if not run.section(VideoConfig).streams:
        return network_of(run).sizes
    role: Role = network or "generator"  # type: ignore[assignment]
    return run.section(StreamingConfig).sizes(role)


def stamps_of(source: Path) -> tuple[tuple[str, int], ...]:
    """Return name and time of change of a file, or of the files in a folder; () if it is missing.

    What has been read of them may be kept as long as this is equal.
    """
    if not source.exists():
        return ()
    files = [source] if source.is_file() else [x for x in source.iterdir() if x.is_file()]
    return tuple(sorted((x.name, x.stat().st_mtime_ns) for x in files))
