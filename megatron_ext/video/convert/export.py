"""A checkpoint of the video DiT as public weights of Wan 2.1.

Tensors are read from the checkpoint as they are written: in memory are those of one file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint.files import checksum_fault, read_manifest, standing_folder_of
from megatron_ext.checkpoint.optimizer_state import PREFIX
from megatron_ext.checkpoint.safetensors_files import check_target, torch_dtype, write_folder
from megatron_ext.checkpoint.stored import choose, read_run_config, refusal
from megatron_ext.checkpoint.unpickling import read_tensors, stored_entries
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.transformer_config import params_dtype
from megatron_ext.video.config.wan import VideoDiTSizes
from megatron_ext.video.convert.config import config_json
from megatron_ext.video.convert.names import Naming, shapes, to_wan, wan_names
from megatron_ext.video.convert.wan import STEM

_PARTS = ("embedder.", "blocks.", "head.")
"""What the names of a video DiT's parameters begin with."""
NETWORKS = {"generator": "", "critic": "critic."}
"""Networks of a streaming run that checkpoints hold, and what their names begin with there."""


@dataclass(frozen=True)
class WanExport:
    """How to export a checkpoint.

    Attributes:
        load: folder of checkpoints.
        target: new folder for config.json and safetensors.
        step: iteration; None takes the latest.
        dtype: of the weights; None keeps the run's.
        max_shard_size: of one file, in bytes or such as ``"5GB"``.
        network: of `NETWORKS`.
        ema: the averaged weights of the generator (``--ema-decay``), in place of the last ones.
        naming: of the tensors, and of config.json.
    """

    load: Path
    target: Path
    step: int | None = None
    dtype: str | None = None
    max_shard_size: int | str = "5GB"
    network: str = "generator"
    ema: bool = False
    naming: Naming = Naming.DIFFUSERS


def is_streaming(stored: Mapping[str, Any]) -> bool:
    """Whether a stored configuration is that of a streaming run, or of imported weights of Wan."""
    video = stored.get("video") or {}
    return bool(video.get("video")) and video.get("task") == "streaming"


def export_wan(order: WanExport) -> None:
    """Write one network of a checkpoint as Wan's weights.

    Raises:
        CheckpointError: a checkpoint without such weights, or a folder that cannot be read or
            written.
    """
    run = RunConfig.from_dict(read_run_config(order.load, order.step))
    if order.ema and order.network != "generator":
        raise CheckpointError(
            f"`--ema` is for the generator, but `--network` is {order.network}, of which a run "
            "keeps no averages; leave one of them out."
        )
    check_target(order.target)
    sizes = run.streaming.sizes(run.streaming.critic_size if order.network == "critic" else None)
    path = _verified(order)
    dtype = torch_dtype(order.dtype) if order.dtype else params_dtype(run)
    prefix = PREFIX if order.ema else NETWORKS[order.network]
    weights = StoredWeights(path, sizes, prefix=prefix, naming=order.naming, dtype=dtype)
    write_folder(
        order.target,
        weights,
        config_json(sizes, order.naming),
        like=None,
        max_shard_size=order.max_shard_size,
        stem=STEM,
    )


def _verified(order: WanExport) -> Path:
    """The folder of the iteration, whose files are as they were written.

    Raises:
        CheckpointError: a missing or damaged checkpoint.
    """
    iteration = choose(order.load, order.step)
    assert iteration is not None
    path = standing_folder_of(order.load, iteration)
    files = read_manifest(path) or {}
    fault = checksum_fault(path, files, files)
    if fault is not None:
        raise CheckpointError(refusal(order.load, iteration, fault))
    return path


class StoredWeights:
    """Wan's tensors of a network in a checkpoint, read when they are asked for.

    Args:
        path: folder of the iteration.
        sizes: of the network.
        prefix: of the network's names in the checkpoint.
        naming: of the tensors to give.
        dtype: of the tensors to give.

    Attributes:
        described: all tensors on the meta device, by Wan's names.

    Raises:
        CheckpointError: weights that are missing, of another shape, or without place in Wan.
    """

    def __init__(
        self,
        path: Path,
        sizes: VideoDiTSizes,
        *,
        prefix: str,
        naming: Naming,
        dtype: torch.dtype,
    ) -> None:
        self._path, self._sizes, self._prefix = path, sizes, prefix
        self._naming, self._dtype = naming, dtype
        self._stored = self._checked()
        self._owner: dict[str, str] = {}
        self.described: dict[str, Tensor] = {}
        for ours, stored in self._stored.items():
            parts = self._of(ours, torch.empty(stored.size, dtype=dtype, device="meta"))
            self.described |= parts
            self._owner |= dict.fromkeys(parts, ours)

    def _checked(self) -> dict[str, TensorStorageMetadata]:
        """What the checkpoint holds of each parameter, by our names without the prefix."""
        metadata = stored_entries(self._path)
        held = {
            name.removeprefix(self._prefix): entry
            for name, entry in metadata.items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith(self._prefix)
        }
        wanted = shapes(self._sizes)
        for name, shape in wanted.items():
            if name not in held:
                raise CheckpointError(
                    f"{self._path} holds no `{self._prefix}{name}`; only a training run "
                    "saves a critic, and averages only with `--ema-decay`."
                )
            if tuple(held[name].size) != shape:
                raise CheckpointError(
                    f"{self._path} holds `{self._prefix}{name}` with shape "
                    f"{list(held[name].size)}, but its configuration implies {list(shape)}; "
                    "export another checkpoint."
                )
        extra = [n for n in held if n.startswith(_PARTS) and n not in wanted]
        if extra:
            raise CheckpointError(
                f"{self._path} holds `{self._prefix}{min(extra)}`, which Wan 2.1 does not have; "
                "export a checkpoint of the plain model, adapters merged."
            )
        return {name: held[name] for name in wanted}

    def _of(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        parts = to_wan(name, parameter, self._sizes)
        return dict(zip(wan_names(name, self._naming), parts, strict=True))

    def some(self, names: list[str]) -> dict[str, Tensor]:
        """Some tensors, each in memory of its own, as safetensors wants them."""
        wanted, found = set(names), dict[str, Tensor]()
        stored = self._read({self._owner[name] for name in names})
        while stored:
            # So that what was read makes place for what is written.
            ours, parameter = stored.popitem()
            for theirs, part in self._of(ours, parameter).items():
                if theirs in wanted:
                    found[theirs] = part.to(self._dtype, copy=True).contiguous()
        return found

    def _read(self, ours: set[str]) -> dict[str, Tensor]:
        state = read_tensors(self._path, [self._prefix + name for name in ours])
        return {name.removeprefix(self._prefix): tensor for name, tensor in state.items()}
