"""Exports a checkpoint of the video DiT as public weights of Wan 2.1.

Each output file's tensors are read from the checkpoint just before the file is written, so memory
holds only the tensors of one file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint.adapters import FrozenBase
from megatron_ext.checkpoint.conversion import verified_folder
from megatron_ext.checkpoint.safetensors_files import (
    Converted,
    check_target,
    torch_dtype,
    write_folder,
)
from megatron_ext.checkpoint.state import PREFIX
from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.checkpoint.unpickling import common_state_of, read_tensors, stored_entries
from megatron_ext.config.run import RunConfig
from megatron_ext.config.sections import described
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.transformer_config import params_dtype
from megatron_ext.video.config.rules import SECTIONS
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.networks.wan.config import VideoDiTConfig, VideoDiTSizes
from megatron_ext.video.networks.wan.convert.config import config_json
from megatron_ext.video.networks.wan.convert.names import Naming, shapes, to_wan, wan_names
from megatron_ext.video.networks.wan.convert.weights import STEM
from megatron_ext.video.streaming.config import STORED_ROLES, StreamingConfig

_PARTS = ("embedder.", "blocks.", "head.")
"""The prefixes that the names of a video DiT's parameters can have."""


def export_wan(
    load: Path,
    target: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    network: str | None = None,
    ema: bool = False,
    naming: Naming = Naming.DIFFUSERS,
) -> None:
    """Write one network of a video run's checkpoint as weights of Wan.

    Args:
        load: folder of checkpoints, the run's ``--save``.
        target: folder to create for config.json and safetensors.
        step: iteration of the checkpoint; None takes the latest.
        dtype: dtype to write; None takes the dtype of the run's parameters.
        max_shard_size: largest size of one file, in bytes or as text like ``"5GB"``.
        network: the network of ``--task streaming`` to write, ``"generator"`` (None) or
            ``"critic"``; None for ``--task flow``.
        ema: whether to write the averages of the weights (``--ema-decay``), which a streaming run
            keeps of its generator, instead of the weights themselves.
        naming: whether tensors and entries of config.json get diffusers' or the original's names.

    Raises:
        CheckpointError: a weight is missing, has another shape, or does not exist in Wan; or a
            folder cannot be read or written.
    """
    run = RunConfig.from_dict(described(read_run_config(load, step), SECTIONS), SECTIONS)
    if ema and network == "critic":
        raise CheckpointError(
            f"`--ema` is for the generator, but `--network` is {network}, of which a run "
            "keeps no averages; leave one of them out."
        )
    sizes = _sizes(run, load, network)
    check_target(target)
    path = verified_folder(load, step)
    prefix = PREFIX if ema else STORED_ROLES[network or "generator"]
    _check_stored(path, sizes, prefix)

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        state = read_tensors(path, [prefix + name for name in names])
        return {name.removeprefix(prefix): tensor for name, tensor in state.items()}

    def convert(name: str, parameter: Tensor) -> dict[str, Tensor]:
        parts = to_wan(name, parameter, sizes)
        return dict(zip(wan_names(name, naming), parts, strict=True))

    kind = torch_dtype(dtype) if dtype else params_dtype(run.precision)
    weights = Converted(shapes(sizes), read, convert, kind)
    content = config_json(sizes, naming)
    write_folder(target, weights, content, max_shard_size=max_shard_size, stem=STEM)


def _sizes(run: RunConfig, load: Path, network: str | None) -> VideoDiTSizes:
    """Return the sizes of a run's network, or of ``network`` in a run of ``--task streaming``."""
    if not run.section(VideoConfig).streams:
        if network is not None:
            raise CheckpointError(
                f"`--network {network}` is for a run of `--task streaming`, but {load} is of "
                "`--task flow`, which has one network; leave it out."
            )
        return run.section(VideoDiTConfig).sizes
    sizes = run.section(StreamingConfig).sizes("critic" if network == "critic" else "generator")
    assert isinstance(sizes, VideoDiTSizes)
    return sizes


def _check_stored(path: Path, sizes: VideoDiTSizes, prefix: str) -> None:
    """Check that the tensors under ``prefix`` in a checkpoint are exactly those of a video DiT.

    A CheckpointError names the first tensor that is missing, has another shape, or is unknown.
    """
    stored = {
        name.removeprefix(prefix): tuple(entry.size)
        for name, entry in stored_entries(path).items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    }
    needed = shapes(sizes)
    if not stored.keys() & needed.keys() and FrozenBase.recorded(common_state_of(path)):
        raise CheckpointError(
            f"{path} holds adapters without the weights under them; merge the two with "
            "`tools/lora.py merge`, and export what it writes, or export the adapters alone with "
            "`tools/lora.py export`."
        )
    for name, shape in needed.items():
        if name not in stored:
            raise CheckpointError(
                f"{path} holds no `{prefix}{name}`; only a training run saves a critic, and "
                "averages only with `--ema-decay`."
            )
        if stored[name] != shape:
            raise CheckpointError(
                f"{path} holds `{prefix}{name}` with shape {list(stored[name])}, but its "
                f"configuration implies {list(shape)}; export another checkpoint."
            )
    extra = [name for name in stored if name.startswith(_PARTS) and name not in needed]
    if extra:
        raise CheckpointError(
            f"{path} holds `{prefix}{min(extra)}`, which Wan 2.1 does not have; export a "
            "checkpoint of the plain model, adapters merged."
        )
