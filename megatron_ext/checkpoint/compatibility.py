"""Checks, before a load, that a checkpoint fits a run, and decides which of its states are loaded.

Most differences between two models show in the names and shapes of their weights. Others lie in
flags alone: each flag declares whether it may differ from the flag stored in the checkpoint
(`IfChanged`). So no flag silently changes what a model computes. A checkpoint that does not fit
raises a CheckpointError.
"""

from __future__ import annotations

import dataclasses
import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint.files import root_of
from megatron_ext.checkpoint.flat_state import FLAT
from megatron_ext.checkpoint.state import CRITIC, PREFIX, SHARDING
from megatron_ext.checkpoint.stored import (
    RUN_CONFIG,
    CheckpointRef,
    find_intact,
    read_progress,
    read_settings,
)
from megatron_ext.checkpoint.unpickling import common_state_of, stored_entries
from megatron_ext.config.flags import IfChanged, if_changed
from megatron_ext.config.optimizer import FreezeConfig, OptimizerConfig
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.rules.optimizer import has_usual_warmup
from megatron_ext.config.run import LayerSection, RunConfig, in_present_sections
from megatron_ext.errors import CheckpointError
from megatron_ext.optim.schedule import schedule_lengths
from megatron_ext.parallel.grid import Layout

LENIENT = ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all")
_ANEW = "give `--finetune` to start it at zero on its weights, or the flags that it was saved with"
_MODEL_AXES = ("tensor", "pipeline", "expert")


def _advice(config: CheckpointConfig) -> str:
    """Return what to do about a checkpoint that does not fit the model of the flags."""
    if config.use_checkpoint_args:
        return "leave out the flags of the model, which `--use-checkpoint-args` reads from it"
    return "give the flags that it was saved with, or `--use-checkpoint-args`"


def is_new_branch(value: object) -> bool:
    """Return whether a tensor is marked as one that an older checkpoint may lack.

    Such a tensor is, for example, a weight of an added module that starts at zero.
    """
    return bool(getattr(value, "new_branch", False))


def same_model_ranks(arguments: Namespace, layout: Layout) -> bool:
    """Return whether a checkpoint has the tensor, pipeline and expert parallel sizes of ``layout``.

    ``arguments`` are the flags of the run that saved the checkpoint.
    """
    return all(
        getattr(arguments, f"{axis}_model_parallel_size", 1)
        == getattr(layout, f"{axis}_model_parallel_size")
        for axis in _MODEL_AXES
    )


def check_model(
    path: Path,
    model_state: dict[str, Any],
    arguments: Namespace,
    layout: Layout,
    config: CheckpointConfig,
) -> None:
    """Raise a CheckpointError if a weight of this rank is missing or stored in another shape.

    Shapes may differ by the padding of the vocabulary, which depends on the layout.

    Args:
        path: folder of the checkpoint.
        model_state: the sharded state of this rank's model.
        arguments: flags of the run that saved the checkpoint.
        config: the lenient values of its ``dist_ckpt_strictness`` accept missing weights.
    """
    stored = stored_entries(path)
    for tensor in tensors_in(model_state):
        entry = stored.get(tensor.key)
        if not isinstance(entry, TensorStorageMetadata):
            if config.dist_ckpt_strictness in LENIENT:
                continue
            advice = _ANEW if is_new_branch(tensor.data) else _advice(config)
            problem = f"{path} holds no `{tensor.key}`, which the model needs"
            raise CheckpointError(f"{problem}; {advice}.")
        theirs = tuple(entry.size)
        ours = tuple(tensor.global_shape)
        # The sizes may differ because the same vocabulary was padded for different tensor-parallel
        # sizes.
        ranks = getattr(arguments, "tensor_model_parallel_size", 1)
        unit = getattr(arguments, "make_vocab_size_divisible_by", 128)
        unit *= max(ranks, layout.tensor_model_parallel_size)
        padded = theirs[1:] == ours[1:] and abs(theirs[0] - ours[0]) < unit
        if theirs == ours or (tensor.allow_shape_mismatch and padded):
            continue
        raise CheckpointError(
            f"{path} holds `{tensor.key}` with shape {list(theirs)}, but the model's has shape "
            f"{list(ours)}; {_advice(config)}."
        )


def tensors_in(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Yield the sharded tensors of a state, including those that its tensor factories produce."""
    expanded, _, _ = load_preprocess(state)
    return (value for value in nested_values(expanded) if isinstance(value, ShardedTensor))


def check_optimizer(
    path: Path,
    stored: dict[str, Any],
    arguments: Namespace,
    layout: Layout,
    *,
    distributed: bool,
    has_main_weights: bool = False,
) -> None:
    """Raise a CheckpointError if the stored optimizer state cannot be resharded for this run.

    Args:
        stored: the checkpoint's content metadata, which says how its state is sharded.
        arguments: flags of the run that saved the checkpoint.
        distributed: whether this run shards optimizer state over data-parallel ranks
            (megatron-core's distributed optimizer).
        has_main_weights: whether this run's optimizer keeps fp32 weights beside 16-bit ones.
    """
    kind = stored.get(SHARDING)
    if kind == FLAT:
        # This is a snapshot of this run. `recovery` has already compared the layouts.
        return
    if (kind is not None) != distributed:
        there, here = ("with", "without") if kind else ("without", "with")
        raise CheckpointError(
            f"{path} was saved {there} `--use-distributed-optimizer`, but this run is {here} it; "
            "use the same, or give `--no-load-optim`."
        )
    held_them = any(getattr(arguments, name, False) for name in ("bf16", "fp16"))
    if not distributed and held_them != has_main_weights:
        there, here = ("bf16 or fp16", "fp32") if held_them else ("fp32", "bf16 or fp16")
        raise CheckpointError(
            f"{path} was saved in {there}, but this run is in {here}, whose optimizer state only "
            "`--use-distributed-optimizer` can take over; use the same precision, or give "
            "`--no-load-optim`."
        )
    if kind == "dp_reshardable" and not same_model_ranks(arguments, layout):
        raise CheckpointError(
            f"{path} was saved with `--no-dist-ckpt-optim-fully-reshardable`, so that its "
            "optimizer state loads only with the same tensor, pipeline and expert parallel sizes; "
            "use those, or give `--no-load-optim`."
        )


_OF_A_BLOCK = re.compile(r"((?:.*\.)?(?:\w*blocks|layers))\.(\d+)\.")
_CRITIC = f"{CRITIC}."
_HEADS = "mtp."
"""Name prefix of multi-token-prediction layers; a run may have fewer than its checkpoint has."""


def weights_in(state: dict[str, Any]) -> set[str]:
    """Return the names of the weights in a sharded state."""
    return {tensor.key for tensor in tensors_in(state)}


def check_unexpected(path: Path, expected: Collection[str], config: CheckpointConfig) -> list[str]:
    """Check whether a checkpoint has weights that the run's network lacks and so would not load.

    A checkpoint may hold two networks, but only one is checked (see ``expected``). Optimizer state,
    random states and averaged weights are ignored.

    Args:
        path: folder of the checkpoint.
        expected: names of the network's weights in the run, from all ranks. If they begin with
            `CRITIC`, the second network of the checkpoint is checked, otherwise the first.
        config: the lenient values of its ``dist_ckpt_strictness`` skip the check.

    Returns:
        One log message if some weights of the checkpoint are not loaded; otherwise an empty list.

    Raises:
        CheckpointError: the checkpoint has whole blocks (layers) that the network lacks.
    """
    if config.dist_ckpt_strictness in LENIENT:
        return []
    needed = {name.removeprefix(PREFIX) for name in expected}
    critic = any(name.startswith(_CRITIC) for name in expected)
    stored = {
        name
        for name, entry in stored_entries(path).items()
        if isinstance(entry, TensorStorageMetadata)
        and "optimizer." not in name
        and not name.startswith(PREFIX)
        and name.startswith(_CRITIC) == critic
    }
    ours = _blocks(needed)
    for kind, numbers in _blocks(stored).items():
        own = ours.get(kind, set())
        if numbers > own and not kind.startswith(_HEADS):
            raise CheckpointError(
                f"{path} holds {len(numbers)} `{kind}`, but the model has only {len(own)}, so that "
                f"`{kind}.{min(numbers - own)}` would be dropped; {_advice(config)}."
            )
    left = sorted(stored - needed)
    note = f"{path} holds {len(left)} weight(s) that the model does not take, such as"
    return [f"{note} `{left[0]}`; they are left out."] if left else []


def _blocks(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers of the blocks (layers) in weight names, by the name of the list of blocks.

    For example, ``decoder.layers.3.mlp.weight`` adds 3 to the numbers of ``decoder.layers``.
    """
    blocks: dict[str, set[int]] = {}
    for name in names:
        match = _OF_A_BLOCK.match(name)
        if match is not None:
            blocks.setdefault(match[1], set()).add(int(match[2]))
    return blocks


def check_resume(config: RunConfig) -> None:
    """Raise a CheckpointError if a run does not fit the checkpoint that it loads.

    A single process calls this before the model is built, and checks flags and optimizer state.
    When the checkpoint is loaded, all ranks repeat the check and also compare the weights.
    """
    checkpoint = find_intact(config.checkpoint, {COMMON_STATE_FNAME, RUN_CONFIG}.intersection)
    if checkpoint is None:
        return
    path = checkpoint.path
    common = common_state_of(path)
    arguments = common.get("args", Namespace())
    takes_it = loads_optimizer(checkpoint, config.checkpoint, arguments, [], config.freeze)
    goes_on = takes_it and not config.training.skip_train
    stored = read_settings(path)
    read_progress(path)
    check_changes(
        path, config, stored, weights_only=checkpoint.weights_only, with_optimizer=goes_on
    )
    if goes_on:
        check_optimizer(
            path,
            dict(common.get("content_metadata") or {}),
            arguments,
            Layout.from_config(config.parallel),
            distributed=config.optimizer.use_distributed_optimizer,
            has_main_weights=config.precision.bf16 or config.precision.fp16,
        )


def freeze_of(arguments: Namespace) -> FreezeConfig:
    """Return which parts the run that saved a checkpoint froze, from its flags ``arguments``."""
    names = [field.name for field in dataclasses.fields(FreezeConfig)]
    values: dict[str, Any] = {name: getattr(arguments, name, None) for name in names}
    own: dict[str, Any] = {k: x for k, x in values.items() if isinstance(x, list | bool)}
    return FreezeConfig(**own)


def freezes(run_config: Mapping[str, Any]) -> bool:
    """Return whether a run with these values, by section and field, freezes weights."""
    return FreezeConfig(**run_config.get("freeze", {})).is_used


def loads_optimizer(
    checkpoint: CheckpointRef,
    config: CheckpointConfig,
    arguments: Namespace,
    notes: list[str],
    freeze: FreezeConfig | None = None,
) -> bool:
    """Return whether the run wants optimizer state and the checkpoint holds some that fits.

    If the run wants state that the checkpoint lacks, a sentence is appended to ``notes``.

    Args:
        arguments: flags of the run that saved the checkpoint.
        freeze: which parts the run freezes; None to compare nothing. Weights that have been frozen
            have no state, and beside others' they could not get any: all count their updates from
            the same step.
    """
    if checkpoint.weights_only or config.no_load_optim:
        return False
    if getattr(arguments, "no_save_optim", False):
        notes.append(f"{checkpoint.path} holds no optimizer.")
        return False
    if freeze is not None and not freeze.trains_as(freeze_of(arguments)):
        notes.append(f"Other weights are trained than by the run that saved {checkpoint.path}.")
        return False
    return True


def loads_random(
    checkpoint: CheckpointRef,
    config: CheckpointConfig,
    arguments: Namespace,
    layout: Layout,
    notes: list[str],
) -> bool:
    """Return whether to load the states of random generators from a checkpoint.

    They are loaded if the flags ask for it, and if the checkpoint holds states that fit the layout.
    If the flags ask for it but the checkpoint does not allow it, append a message to ``notes``.

    Args:
        arguments: flags of the run that saved the checkpoint.
        layout: the layout of this run.
    """
    if checkpoint.weights_only or config.no_load_rng:
        return False
    if getattr(arguments, "no_save_rng", False):
        notes.append(f"{checkpoint.path} holds no random states, so they start from `--seed`.")
        return False
    same = same_model_ranks(arguments, layout)
    apart = getattr(arguments, "data_parallel_random_init", False)
    has_experts = layout.expert_model_parallel_size > 1
    axes = ["data_parallel_size"] if has_experts or apart else []
    axes += ["context_parallel_size"] if has_experts else []
    same = same and all(getattr(arguments, x, None) == getattr(layout, x) for x in axes)
    if not same:
        notes.append("The layout has changed, so the random states start from `--seed`.")
    return same


@dataclass(frozen=True)
class Change:
    """A flag whose value differs from the checkpoint's.

    ``value`` is the run's, ``before`` the checkpoint's; ``answer`` is the declared consequence.
    """

    name: str
    value: Any
    before: Any
    answer: IfChanged

    def __str__(self) -> str:
        dashed = self.name.replace("_", "-")
        if isinstance(self.value, bool):
            return f"`--{'' if self.value else 'no-'}{dashed}`"
        return f"`--{dashed}` ({_shown(self.value)}, before {_shown(self.before)})"


def _changes(
    sections: Mapping[str, Any], given: Mapping[str, Any], stored: Mapping[str, Any]
) -> Iterator[Change]:
    """Yield each flag whose value differs from the value that the checkpoint stores.

    Flags that declare "allow" (see `IfChanged`) may differ and are skipped. So are flags that the
    checkpoint does not store, or that this run does not use.

    Args:
        sections: the run's configuration sections by name.
        given: values of the run's flags, by section and field.
        stored: values of the checkpoint's flags, by section and field.
    """
    for section, kind in sections.items():
        values = given[section]
        before = stored.get(section)
        if not isinstance(before, Mapping):
            continue
        if section == "lora" and None in (values["lora_rank"], before.get("lora_rank")):
            # The names of the weights already show whether there are adapters.
            continue
        unused = kind.unused_fields() if isinstance(kind, LayerSection) else frozenset()
        for name, answer in if_changed(type(kind)).items():
            if name in unused:
                continue
            # Earlier versions stored some lists of layers, and some RoPE bases, as integers.
            same = name in before and str(values[name]) == str(before[name])
            if answer != "allow" and name in before and not same and values[name] != before[name]:
                yield Change(name, values[name], before[name], answer)


def check_changes(
    path: Path,
    config: RunConfig,
    stored: Mapping[str, Any],
    *,
    weights_only: bool,
    with_optimizer: bool,
) -> list[str]:
    """Return messages on the flags whose values differ between a run and its checkpoint.

    Raise a CheckpointError if a flag differs that must be the same.

    Args:
        path: folder of the checkpoint.
        config: the run's configuration.
        stored: values of the checkpoint's flags, by section and field.
        weights_only: whether the run only starts from the checkpoint's weights, without resuming;
            more flags may then differ.
        with_optimizer: whether the run resumes with the checkpoint's optimizer state; flags of the
            optimizer and of the learning rate are then compared, too.
    """
    stored = in_present_sections(stored, [type(section) for section in config.sections])
    changes = _changes(config.by_name(), config.to_dict(), stored)
    in_order = sorted(changes, key=lambda change: change.name)
    never, not_to_resume, keep, say = (
        [x for x in in_order if x.answer == answer]
        for answer in ("refuse", "refuse_to_resume", "keep", "say")
    )
    refused = never if weights_only else [*never, *not_to_resume]
    if refused:
        anew = "" if never else ", or `--finetune` to start from its weights with yours"
        raise CheckpointError(
            f"{path} holds a model with other flags than {_listed(refused)}, which would compute "
            f"something else with its weights; {_advice(config.checkpoint)}{anew}."
        )
    optimizer = config.optimizer
    goes_on = not (weights_only or config.training.skip_train)
    schedule = _schedule_changes(config, stored) if goes_on else []
    said = [str(change) for change in (not_to_resume if weights_only else say)]
    notes = []
    if with_optimizer:
        _check_optimizer(path, optimizer, stored.get("optimizer", {}))
        custom = optimizer.optimizer == "custom"
        kind = "optimizer_args" if custom else f"{optimizer.optimizer}_"
        kept = [x for x in keep if x.name.startswith(kind)]
        if kept:
            notes.append(
                f"The optimizer goes on with the settings of {path}, not with {_listed(kept)}; "
                "`--no-load-optim` starts it anew with yours."
            )
    if schedule and with_optimizer and optimizer.use_checkpoint_opt_param_scheduler:
        notes.append(
            f"The learning-rate schedule goes on with the settings of {path}, as "
            "`--use-checkpoint-opt-param-scheduler` asks, not with "
            f"{', '.join(schedule)}; `--override-opt-param-scheduler` takes yours."
        )
    elif schedule and with_optimizer and not optimizer.override_opt_param_scheduler:
        ended = _decay_has_ended(path, RunConfig.from_dict(stored))
        raise CheckpointError(
            f"The learning-rate schedule is not the checkpoint's ({path}), because of "
            f"{', '.join(schedule)}; give the flags of the run that saved it, "
            + (
                "or, since its rate has come down to `--min-lr` and would stay there, `--finetune` "
                "for a schedule that starts anew."
                if ended
                else "`--use-checkpoint-opt-param-scheduler` to keep its schedule, or "
                "`--override-opt-param-scheduler` to go on from its rate to the end that yours set."
            )
        )
    else:
        said = [*said, *(text for text in schedule if text not in said)]
    counts = f"Flags that differ from those of {path}, and count from here"
    return [*notes, *([f"{counts}: {', '.join(said)}."] if said else [])]


def _check_optimizer(path: Path, config: OptimizerConfig, stored: Mapping[str, Any]) -> None:
    """Raise a CheckpointError if a changed flag makes the stored optimizer state unusable.

    ``config`` has the run's flags, ``stored`` the checkpoint's values of the same flags.
    """
    kind = config.optimizer
    rate = config.decoupled_lr
    momentum = config.sgd_momentum
    before = stored.get("sgd_momentum", momentum)
    own = config.optimizer_class
    differs = {
        "optimizer": kind != stored.get("optimizer", kind),
        "optimizer_class": _name(own) != _name(stored.get("optimizer_class", own)),
        "decoupled_lr": (rate is None) != (stored.get("decoupled_lr", rate) is None),
        "sgd_momentum": kind == "sgd" and bool(momentum) != bool(before),
    }
    for name in (name for name, differ in differs.items() if differ):
        raise CheckpointError.about(
            f"--{name.replace('_', '-')}",
            getattr(config, name),
            f"does not go with the optimizer state of {path}, saved with {stored[name]}",
            "use that, or give `--no-load-optim`",
        )


def _name(spec: str | None) -> str | None:
    """Return the name of the class in a spec such as ``file.py:Class``, whose file may move."""
    return None if spec is None else spec.rpartition(":")[2]


_RATES = "lr min_lr lr_decay_style weight_decay_incr_style"
_PHASES = (
    "lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction "
    "lr_wsd_decay_iters lr_wsd_decay_samples"
)
_BATCHES = "global_batch_size rampup_batch_size step_batch_size_schedule"


def _decay_has_ended(path: Path, saved: RunConfig) -> bool:
    """Return whether the decay of the learning rate had ended when a checkpoint was saved.

    ``path`` is the checkpoint's folder, ``saved`` the configuration of its run. False, too, where
    the length of the decay is given in samples.
    """
    iteration = root_of(path)[1]
    end = saved.optimizer.lr_decay_iters or saved.training.train_iters
    if iteration is None or end is None or saved.optimizer.lr_decay_style == "constant":
        return False
    return iteration >= end


def _schedule_changes(config: RunConfig, stored: Mapping[str, Any]) -> list[str]:
    """Return a text for each changed flag by which the learning rate or the weight decay differ.

    ``config`` is the configuration of the resumed run, ``stored`` that of the checkpoint.
    """
    flags = config.optimizer
    training = config.training
    if not (stored.get("optimizer") and stored.get("training")):
        return []
    before = RunConfig.from_dict(stored)
    lengths_of_run = before.training.train_iters, before.training.train_samples
    if lengths_of_run == (None, None):
        return []
    constant = flags.weight_decay_incr_style == "constant"
    decays = "weight_decay" if constant else "start_weight_decay end_weight_decay"
    moved = _moved(f"{_RATES} {decays}", flags, before.optimizer)
    lengths = schedule_lengths(config)
    earlier = schedule_lengths(before)
    end_is_given = bool(flags.lr_decay_iters or flags.lr_decay_samples)
    unused = ["wd_incr_steps"] if constant else []
    if flags.lr_decay_style == before.optimizer.lr_decay_style == "constant":
        unused.append("lr_decay_steps")
        end_is_given = True
        if has_usual_warmup(flags, training) and has_usual_warmup(
            before.optimizer, before.training
        ):
            unused.append("lr_warmup_steps")
    for name in unused:
        del lengths[name], earlier[name]
    if lengths != earlier:
        moved += _moved(_PHASES, flags, before.optimizer)
        end = "" if constant and end_is_given else "train_iters train_samples "
        moved += _moved(end + _BATCHES, training, before.training)
    return moved


def _moved(names: str, now: object, before: object) -> list[str]:
    """Return a text for each of the fields ``names`` whose value has changed since the checkpoint.

    The text gives the flag's name and both values.

    Args:
        names: the fields to compare, separated by spaces.
        now: a configuration section of this run.
        before: the same section as the checkpoint stores it.
    """
    values = {name: (getattr(now, name), getattr(before, name)) for name in names.split()}
    return [
        f"`--{name.replace('_', '-')}` ({_shown(value)}, before {_shown(earlier)})"
        for name, (value, earlier) in values.items()
        if value != earlier
    ]


def _shown(value: object) -> str:
    if value is None:
        return "left out"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _listed(changes: list[Change]) -> str:
    return ", ".join(map(str, changes))
