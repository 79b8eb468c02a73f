"""Starts the adapters of a run from published ones (``--adapter-path``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_ext.checkpoint.adapter_files import flattened, read_adapters
from megatron_ext.checkpoint.adapters import MARK
from megatron_ext.config.lora_targets import adapts, is_named
from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError, FlagError
from megatron_ext.layers.initialization import shards_of
from megatron_ext.parallel.collectives import on_every_rank
from megatron_ext.video.config.rules import PARTS, without_parts
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.config.weights import PublishedConfig
from megatron_ext.video.convert.adapters import AdapterMap, Adapters
from megatron_ext.video.convert.find import sizes_of, stamps_of, writer_of
from megatron_ext.video.networks.lookup import conversion_of, network_named, streamed_conversion
from megatron_ext.video.networks.published import Conversion

_BEFORE_FLAT = ("Hunyuan_video_I2V_lora_",)
"""Text that Tencent's program puts before names of layers, in which ``_`` stands for dots."""


def with_adapters(config: RunConfig) -> RunConfig:
    """Return the configuration with the flags of adapters that ``--adapter-path`` determines."""
    adapters = _adapters_of(config)
    given = config.lora
    targets = given.lora_target_modules
    lora = dataclasses.replace(
        given,
        lora_rank=adapters.rank,
        lora_alpha=adapters.alpha,
        lora_rslora=False,
        lora_separate_projections=adapters.separate,
        lora_target_modules=adapters.targets if targets is None else targets,
    )
    return dataclasses.replace(config, lora=lora)


def _adapters_of(config: RunConfig) -> Adapters:
    path = config.section(PublishedConfig).adapter_path
    assert path is not None
    conversion = writer_of(config.to_dict())
    assert conversion is not None
    source = Path(path)
    stamps = stamps_of(source)
    separate = config.lora.lora_separate_projections
    return _read(conversion, sizes_of(config), source, stamps, separate)


@lru_cache(maxsize=1)
def _read(
    conversion: Conversion, sizes: Any, source: Path, _stamps: Any, separate: bool
) -> Adapters:
    """Keep what `read_for` returns, since flags are resolved several times."""
    return read_for(conversion, sizes, source, separate=separate)


def read_for(
    conversion: Conversion, sizes: Any, source: Path, *, separate: bool = False
) -> Adapters:
    """Return the adapters in a folder or file as those of the layers of a network of these sizes.

    Raises:
        CheckpointError: they cannot be read, or are those of another network.
    """
    file = read_adapters(source, _BEFORE_FLAT)
    maps = [AdapterMap(conversion, form, sizes) for form in conversion.forms]
    known = [sum(name in flattened(each.pieces) for name in file.layers) for each in maps]
    best = maps[known.index(max(known))]
    return best.to_ours(file, separate=separate)


def adapter_errors(given: RunConfig, run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in ``--adapter-path`` and the flags of adapters.

    ``given`` has the flags as given, ``run`` also values derived from them.
    """
    video = run.section(VideoConfig)
    name = video.video_model
    conversion = streamed_conversion() if video.streams else conversion_of(name)
    takes = video.streams or network_named(name).takes_adapters
    layers = None
    if takes and conversion is not None and conversion.adapted is not None:
        layers = AdapterMap(conversion, conversion.forms[0], sizes_of(run)).layers
        yield from _target_errors(given.lora, layers)
    path = run.section(PublishedConfig).adapter_path
    if path is None:
        return
    if layers is None:
        yield FlagError(
            "--adapter-path",
            path,
            f"does not go with `--video-model {name}`, which has no published adapters",
            "leave it out",
        )
        return
    theirs = with_adapters(dataclasses.replace(run, lora=given.lora)).lora
    for field in ("lora_rank", "lora_alpha", "lora_rslora"):
        value = getattr(given.lora, field)
        if value not in (getattr(LoraConfig(), field), getattr(theirs, field)):
            yield FlagError(
                f"--{field.replace('_', '-')}",
                None if value is True else value,
                f"contradicts `--adapter-path` ({path}), whose adapters have "
                f"`--lora-rank {theirs.lora_rank} --lora-alpha {theirs.lora_alpha:g}`",
                "leave it out",
            )
    left_out = [x for x in _adapters_of(run).matrices if not adapts(run.lora, x)]
    if left_out:
        yield FlagError(
            "--lora-target-modules",
            " ".join(given.lora.lora_target_modules or ()),
            f"leaves out `{left_out[0]}`, which has an adapter in `--adapter-path` ({path})",
            "leave the flag out, or name all layers of the file",
        )


def _target_errors(lora: LoraConfig, layers: Sequence[str]) -> Iterator[FlagError]:
    """Yield an error if ``--lora-target-modules`` names what none of ``layers`` is.

    Resolved flags name all layers of a part, of which a network may lack some.
    """

    def exists(target: str) -> bool:
        return any(is_named(x, name) for name in without_parts([target]) for x in layers)

    targets = lora.lora_target_modules or ()
    parts = [names for part, names in PARTS.items() if exists(part) and {*names} <= {*targets}]
    whole = {name for names in parts for name in names}
    unknown = [target for target in targets if target not in whole and not exists(target)]
    if unknown:
        own = dict.fromkeys(layer.rpartition(".")[2] for layer in layers)
        names = ", ".join([*filter(exists, PARTS), *(x for x in own if x not in PARTS)])
        yield FlagError("--lora-target-modules", " ".join(unknown), f"must be names among {names}")


def load_adapters(config: RunConfig, chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Fill the adapters in this rank's chunks from ``--adapter-path``; return notes.

    All ranks call this together. Adapters that the file lacks keep their values: they start as they
    do without a file.
    """
    path = config.section(PublishedConfig).adapter_path

    @torch.no_grad()
    def load() -> list[str]:
        adapters = _adapters_of(config)
        for chunk in unwrap_model(list(chunks)):
            for shard in shards_of(chunk):
                layer, mark, matrix = shard.name.rpartition(MARK)
                if not mark or layer not in adapters.matrices:
                    continue
                a, b = adapters.matrices[layer]
                if shard.full_shape != (a if matrix == "a" else b).shape:
                    raise CheckpointError(
                        f"{path} holds an adapter of `{layer}` whose matrices do not fit those of "
                        "the run; give adapters of this model."
                    )
                if matrix == "b":
                    shard.tensor.copy_(shard.cut(b))
                else:
                    rows = adapters.given[layer]
                    shard.tensor[rows] = shard.cut(a)[rows].to(shard.tensor)
        _read.cache_clear()
        notes = [f"loaded {path} (adapters of rank {adapters.rank}, alpha {adapters.alpha:g})"]
        if adapters.missing:
            notes.append(
                f"{path} lacks {adapters.missing} of the projections that the run adapts; their "
                "adapters start at zero."
            )
        return notes

    return on_every_rank(load, f"{path} cannot be read")
