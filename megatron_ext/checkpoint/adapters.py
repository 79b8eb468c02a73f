"""Saves and loads low-rank adapters (LoRA), with or without the frozen weights under them.

The frozen weights may be in another checkpoint (`FrozenBase`). The digest of its manifest
identifies the weights, even if the folder is moved. Random weights, as in tests, are identified by
their seed. A CheckpointError is raised if adapters would be put on other weights than in training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.checkpoint.compatibility import LENIENT, is_new_branch
from megatron_ext.checkpoint.files import digest_of, standing_folder_of
from megatron_ext.checkpoint.manifest import MANIFEST
from megatron_ext.checkpoint.shared_reading import strategy_of
from megatron_ext.checkpoint.state import (
    PREFIX,
    Chunks,
    apply_state,
    chunk_keys,
    holds_averages,
    sharded_state,
)
from megatron_ext.checkpoint.storage import read_state, verify
from megatron_ext.checkpoint.stored import CheckpointRef, choose, find, find_intact
from megatron_ext.checkpoint.unpickling import common_state_of, stored_entries
from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.fp8.scaling import HISTORY
from megatron_ext.parallel.context import ParallelContext

MARK = ".lora."


def adapters_among(names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that are LoRA matrices, sorted.

    Averages (EMA) and optimizer state of such matrices are left out.
    """
    weights = (n for n in names if "optimizer." not in n and not n.startswith(PREFIX))
    return sorted(name for name in weights if MARK in name)


def leave_out_new(
    path: Path, state: dict[str, Any], chunks: Iterable[str]
) -> dict[str, dict[str, Tensor]]:
    """Remove from ``state``, in place, tensors that are new in this run and not in the checkpoint.

    Only adapters, and tensors marked as new (`is_new_branch`), such as weights of an added module,
    are removed. A load would fail on them. They keep their initial values instead.

    Args:
        path: folder of the checkpoint.
        state: the sharded state to load into.
        chunks: keys in ``state`` under which the model chunks lie.

    Returns:
        The removed tensors, by chunk key and then by weight name.
    """
    stored = stored_entries(path)
    new: dict[str, dict[str, Tensor]] = {}
    for chunk in chunks:
        for name, entry in list(state.get(chunk, {}).items()):
            may_be_new = isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and (
                MARK in entry.key or is_new_branch(entry.data)
            )
            if may_be_new and entry.key not in stored:
                new.setdefault(chunk, {})[name] = entry.data
                del state[chunk][name]
    return new


def check_new_branches(path: Path, new: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise CheckpointError if a tensor in ``new`` would stay as it starts, since it is frozen.

    That is a weight marked as new (`is_new_branch`) in a run that trains adapters. ``new`` is the
    result of `leave_out_new` for the checkpoint ``path``.
    """
    for name, value in ((n, x) for values in new.values() for n, x in values.items()):
        frozen = isinstance(value, torch.nn.Parameter) and not value.requires_grad
        if is_new_branch(value) and frozen:
            raise CheckpointError(
                f"{path} holds no `{name}`, and a run with `--lora-rank` trains adapters alone, so "
                "that it would stay zero; give weights that have it, train all weights, or leave "
                "out what needs it, such as condition modes other than t2v."
            )


def new_branches(path: Path, new: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Return a log message for each tensor in ``new`` that is marked as new (`is_new_branch`).

    ``new`` is the result of `leave_out_new` for the checkpoint ``path``: tensors that it lacks, by
    chunk key and weight name. Adapters get no message. FP8 amax histories share one message.
    """
    names = [n for values in new.values() for n, value in values.items() if is_new_branch(value)]
    notes = [
        f"{path} holds no `{name}`, so it starts at zero."
        for name in names
        if not name.endswith(HISTORY)
    ]
    if len(notes) < len(names):
        notes.append(f"{path} holds no scales of 8-bit products, so their history starts anew.")
    return notes


def check_adapters(
    path: Path, state: dict[str, Any], chunks: Iterable[str], strictness: str
) -> None:
    """Raise a CheckpointError if checkpoint and run have different adapters on this rank's layers.

    Args:
        path: folder of the checkpoint.
        state: the sharded state of the run.
        chunks: keys in ``state`` under which the model chunks lie.
        strictness: ``--dist-ckpt-strictness``; its lenient values skip the check.
    """
    if strictness in LENIENT:
        return
    entries = [entry for chunk in chunks for entry in state.get(chunk, {}).values()]
    keys = [getattr(entry, "key", "") for entry in entries]
    # A pipeline stage without adapters, such as one without layers, cannot judge those of other
    # stages.
    ours = adapters_among(keys)
    stored = adapters_among(stored_entries(path))
    layers = [key.rpartition(".")[0] for key in keys]
    dropped = [x for x in stored if x.partition(MARK)[0] in layers and x not in ours]
    missing = [name for name in ours if name not in stored]
    if dropped:
        raise CheckpointError(
            f"{path} holds the adapter `{dropped[0]}`, which the model would drop; give the "
            "`--lora-rank`, `--lora-target-modules`, `--lora-use-dora` and `--lora-init` that it "
            "was saved with, or merge the adapters first with `tools/lora.py merge`."
        )
    if missing and stored:
        raise CheckpointError(
            f"{path} holds no adapter `{missing[0]}`, which the model needs, but others such as "
            f"`{stored[0]}`; give the flags of the model and the `--lora-target-modules` that it "
            "was saved with."
        )
    if missing:
        raise CheckpointError(
            f"{path} holds no adapter `{missing[0]}`, which the model needs; give `--finetune` to "
            "start new adapters on its weights."
        )


BASE = "frozen_base"
"""Key of the `FrozenBase` in the common state of a checkpoint that holds only adapters."""


@dataclass(frozen=True)
class FrozenBase:
    """The identity of the frozen weights under adapters.

    Attributes:
        path: folder of the checkpoint that holds the weights, or folder or file of published
            weights; None for random weights.
        identity: a digest or a seed, which is the same for the same weights.
        flag: the flag that gave the weights, if they are published ones.
    """

    path: str | None
    identity: str
    flag: str | None = None

    @classmethod
    def at(cls, path: Path, *, average: bool = False) -> FrozenBase:
        """Return the identity of the weights in the checkpoint folder ``path``.

        With ``average``, identify the averaged (EMA) weights if the checkpoint has any.
        """
        manifest = path / MANIFEST
        # Megatron-LM writes no manifest. Its metadata at least identify names and shapes.
        file = manifest if manifest.is_file() else path / ".metadata"
        averaged = " averaged" if average and holds_averages(path) else ""
        return cls(str(path), f"{digest_of(file)}{averaged}")

    @classmethod
    def given(cls, root: str, *, average: bool) -> FrozenBase:
        """Return the identity of the weights that ``--pretrained-checkpoint`` loads.

        ``root`` is the value of the flag. With ``average``, identify the averaged (EMA) weights if
        the checkpoint has any.
        """
        checkpoint = find(CheckpointConfig(pretrained_checkpoint=root))
        assert checkpoint is not None
        return cls.at(checkpoint.path, average=average)

    @classmethod
    def under(cls, root: Path, step: int | None) -> FrozenBase | None:
        """Return the identity of the frozen weights under the adapters of a checkpoint in ``root``.

        A ``step`` of None stands for the latest checkpoint. The result is None if the checkpoint
        holds the frozen weights itself.
        """
        iteration = choose(root, step)
        assert iteration is not None
        return cls.recorded(common_state_of(standing_folder_of(root, iteration)))

    @classmethod
    def of_run(
        cls, lora: LoraConfig, seed: int, published: tuple[str, str, str] | None = None
    ) -> FrozenBase | None:
        """Return the identity of the first weights under a run's adapters.

        They are ``published`` ones (`CheckpointConfig.published`), or random ones drawn from
        ``seed``. The result is None if the run trains no adapters, or saves the frozen weights too.
        """
        if lora.lora_rank is None or not lora.saves_adapters_only:
            return None
        return cls.drawn(seed) if published is None else cls(*published)

    @classmethod
    def drawn(cls, seed: int) -> FrozenBase:
        """Return the identity of the random weights that a run initializes from ``seed``."""
        return cls(None, f"seed {seed}")

    @classmethod
    def recorded(cls, state: Mapping[str, Any]) -> FrozenBase | None:
        """Return the identity of the frozen weights that a checkpoint's common state records.

        The result is None if the checkpoint holds all weights.
        """
        record = state.get(BASE)
        return None if record is None else cls(**record)

    def record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def check_given(self, path: Path, config: CheckpointConfig) -> None:
        """Raise a CheckpointError if a run's flags name no weights, but these are stored ones.

        Args:
            path: folder of the checkpoint with the adapters.
            config: the run's flags of checkpoints.
        """
        given = config.pretrained_checkpoint if self.flag is None else config.published
        if self.path is not None and not given:
            flag = self.flag or "--pretrained-checkpoint"
            raise CheckpointError(
                f"`{flag}` is missing: {path} holds adapters without the weights under them, which "
                f"are those of {self.path}; give these."
            )

    def check(self, path: Path, recorded: FrozenBase, flag: str) -> None:
        """Raise a CheckpointError unless this identity equals ``recorded``.

        Adapters work only on the frozen weights that they were trained on.

        Args:
            path: folder of the checkpoint with the adapters.
            recorded: identity of the frozen weights that the adapters were trained on.
            flag: the flag that chose the weights identified by ``self``, for the error message.
        """
        if self.identity == recorded.identity:
            return
        flag = recorded.flag or flag
        there = f"random ones of {recorded.identity}; leave it out"
        if recorded.path is not None:
            there = f"those of {recorded.path} ({recorded.identity}); give these"
        raise CheckpointError(
            f"`{flag}` ({self.path or 'not given'}; {self.identity}) must be the weights under the "
            f"adapters in {path}, which were {there}."
        )


def check_base_given(config: CheckpointConfig) -> None:
    """Raise a CheckpointError if a run goes on from adapters, but its flags name no weights.

    A single process calls this before the model is built. Random weights need no flag.
    """
    checkpoint = find_intact(config, {COMMON_STATE_FNAME}.intersection)
    if checkpoint is None or checkpoint.weights_only:
        return
    recorded = FrozenBase.recorded(common_state_of(checkpoint.path))
    if recorded is not None:
        recorded.check_given(checkpoint.path, config)


def leave_out_base(
    state: dict[str, Any], chunks: Sequence[str], stored: Collection[str] | None = None
) -> None:
    """Remove, in place, the frozen weights under adapters from a sharded state.

    Adapters stay, and the history of FP8's scales, which changes in training.

    Args:
        chunks: the keys in ``state`` under which the model chunks lie.
        stored: names of the tensors of a checkpoint to load. Histories that it lacks are removed,
            too, since earlier versions did not save them.
    """

    def stays(name: str, entry: Any) -> bool:
        if MARK in f".{name}":
            return True
        return name.endswith(HISTORY) and (stored is None or entry.key in stored)

    for chunk in set(chunks) & set(state):
        state[chunk] = {x: entry for x, entry in state[chunk].items() if stays(x, entry)}


def put_back_base(loaded: dict[str, Any], model: Chunks) -> None:
    """Add to ``loaded``, in place, the model's weights that it lacks, with their current values.

    ``loaded`` maps each key of `chunk_keys` to the loaded weights of that chunk, by name.
    """
    for key, chunk in zip(chunk_keys(model), unwrap_model(model), strict=True):
        loaded[key] = {**chunk.state_dict(), **loaded.get(key, {})}


def load_adapters(
    checkpoint: CheckpointRef,
    base: FrozenBase,
    model: Chunks,
    section: str,
    config: CheckpointConfig,
    context: ParallelContext,
) -> None:
    """Load the adapters of a second network, such as a critic; all ranks call this together.

    Args:
        checkpoint: the checkpoint with the adapters.
        base: identity of the frozen weights, which ``model`` must already have.
        model: the chunks of the second network.
        section: key of the second network's state in the checkpoint, and prefix of the names of
            its tensors.
    """
    verify(checkpoint, context)
    common = common_state_of(checkpoint.path)
    recorded = FrozenBase.recorded(common[section])
    assert recorded is not None
    base.check(checkpoint.path, recorded, "--pretrained-checkpoint")
    metadata = {**common["content_metadata"], "dp_cp_group": context.pgs.dp_cp}
    state = sharded_state(model, None, metadata=metadata, is_loading=True)
    leave_out_base(state, chunk_keys(model))
    add_prefix_for_sharding(state, f"{section}.")
    strategy = strategy_of(config, context)
    loaded = read_state(checkpoint.path, {section: state}, strategy, config, context, [])[section]
    put_back_base(loaded, model)
    apply_state(loaded, model, None, None, with_optimizer=False)
