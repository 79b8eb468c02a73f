"""Rules of the optimizer, of its schedules and of the averaged weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron_ext.config.flags import spelling_of
from megatron_ext.config.optimizer import (
    QUINTIC_STEPS,
    EmaConfig,
    OptimizerConfig,
)
from megatron_ext.config.training import TrainingConfig
from megatron_ext.errors import FlagError, exclusive


def with_warmup(optimizer: OptimizerConfig, training: TrainingConfig) -> OptimizerConfig:
    """Return ``optimizer`` with ``lr_warmup_iters`` filled in if it is None and can be known.

    The value is 0 if ``--lr-warmup-fraction`` is given or the task sets no default warm-up.
    Otherwise it is the task's default; but if the learning rate decays in no more steps than this
    default, it is a tenth of the decay steps. It stays None if the number of these is unknown.
    """
    if optimizer.lr_warmup_iters is not None:
        return optimizer
    if optimizer.lr_warmup_fraction is not None or not optimizer.usual_warmup_iters:
        return dataclasses.replace(optimizer, lr_warmup_iters=0)
    # None while epochs are not counted in steps yet.
    return dataclasses.replace(optimizer, lr_warmup_iters=_usual_warmup(optimizer, training))


def _usual_warmup(optimizer: OptimizerConfig, training: TrainingConfig) -> int | None:
    usual = optimizer.usual_warmup_iters
    decay = optimizer.lr_decay_iters or training.train_iters
    if decay is None:
        return None
    return usual if usual < decay else decay // 10


def has_usual_warmup(optimizer: OptimizerConfig, training: TrainingConfig) -> bool:
    """Return whether the warm-up is as long as `with_warmup` makes it from the task's default."""
    if not optimizer.usual_warmup_iters or optimizer.lr_warmup_fraction is not None:
        return False
    return optimizer.lr_warmup_iters == _usual_warmup(optimizer, training)


def resolve_optimizer(
    optimizer: OptimizerConfig, training: TrainingConfig, device: str
) -> OptimizerConfig:
    """Return a copy with warm-up steps and first and last weight decay filled in.

    ``dist_muon`` becomes ``muon`` with ``--use-distributed-optimizer``, and the default becomes
    ``custom`` with ``--optimizer-class``. On a CPU, communication that gloo cannot do is switched
    off.
    """
    changes: dict[str, object] = {}
    if optimizer.weight_decay_incr_style == "constant":  # others are refused
        ends = [
            x for x in ("start_weight_decay", "end_weight_decay") if getattr(optimizer, x) is None
        ]
        changes.update(dict.fromkeys(ends, optimizer.weight_decay))
    if optimizer.optimizer_class is not None and optimizer.optimizer == "adam":
        changes |= {"optimizer": "custom"}
    if optimizer.optimizer == "dist_muon":
        changes |= {"optimizer": "muon", "use_distributed_optimizer": True}
    if device == "cpu":
        on_gpu = ("overlap_grad_reduce", "overlap_param_gather", "ddp_average_in_collective")
        changes.update(dict.fromkeys(on_gpu, False))
    return dataclasses.replace(with_warmup(optimizer, training), **changes)  # type: ignore[arg-type]


def optimizer_errors(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags of the optimizer."""
    yield from _rate_errors(optimizer, training)
    yield from _decay_errors(optimizer)
    yield from _unit_errors(optimizer, training)
    yield from _custom_errors(optimizer)
    if optimizer.overlap_param_gather and not optimizer.use_distributed_optimizer:
        yield FlagError(
            "--overlap-param-gather", None, "needs `--use-distributed-optimizer`", "give both"
        )
    if optimizer.overlap_param_gather and not optimizer.overlap_grad_reduce:
        yield FlagError(
            "--overlap-param-gather", None, "needs `--overlap-grad-reduce`", "give both"
        )
    steps = optimizer.muon_num_ns_steps
    in_fives = optimizer.muon_coefficient_type == "quintic"
    if optimizer.optimizer == "muon" and in_fives and steps % QUINTIC_STEPS:
        yield FlagError(
            "--muon-num-ns-steps",
            steps,
            f"must be a multiple of {QUINTIC_STEPS} with `--muon-coefficient-type quintic`, whose "
            "polynomials follow each other",
            f"use {-(-steps // QUINTIC_STEPS) * QUINTIC_STEPS}",
        )
    if optimizer.optimizer == "sgd" and optimizer.use_distributed_optimizer:
        yield FlagError(
            "--optimizer sgd",
            None,
            "does not go with `--use-distributed-optimizer`, which keeps Adam's state only",
            "leave the latter out",
        )
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        yield exclusive("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler")
    if optimizer.ddp_bucket_size is not None and optimizer.ddp_num_buckets is not None:
        yield exclusive("--ddp-bucket-size", "--ddp-num-buckets")


def _custom_errors(optimizer: OptimizerConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags of an optimizer of the user's own."""
    own = optimizer.optimizer_class
    if own is None and optimizer.optimizer == "custom":
        yield FlagError(
            "--optimizer custom", None, "needs `--optimizer-class`", "name the class of yours"
        )
    if own is None and optimizer.optimizer_args:
        yield FlagError(
            "--optimizer-args",
            " ".join(optimizer.optimizer_args),
            "needs `--optimizer-class`",
            "name the class that takes them",
        )
    if own is not None and optimizer.optimizer != "custom":
        yield exclusive(("--optimizer", optimizer.optimizer), ("--optimizer-class", own))


def _rate_errors(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[FlagError]:
    lr = optimizer.lr
    least = optimizer.min_lr
    own = optimizer.decoupled_min_lr
    if lr is None and not training.skip_train:
        yield FlagError("--lr", None, "is missing", "give the learning rate")
    elif lr is not None and not training.skip_train:
        if least > lr:
            yield FlagError(
                "--min-lr", least, f"must be between 0 and `--lr` ({lr})", f"use {lr / 10:g}"
            )
        if optimizer.lr_warmup_init > lr:
            first = optimizer.lr_warmup_init
            yield FlagError("--lr-warmup-init", first, f"must be at most `--lr` ({lr})")
    name, smallest = ("--min-lr", least) if own is None else ("--decoupled-min-lr", own)
    if optimizer.decoupled_lr is None and own is not None:
        yield FlagError("--decoupled-min-lr", own, "needs `--decoupled-lr`", "give both")
    if optimizer.decoupled_lr is not None and smallest > optimizer.decoupled_lr:
        yield FlagError(
            "--decoupled-lr",
            optimizer.decoupled_lr,
            f"must be at least `{name}` ({smallest})",
            "give a smaller `--decoupled-min-lr`",
        )


def _decay_errors(optimizer: OptimizerConfig) -> Iterator[FlagError]:
    start = optimizer.start_weight_decay
    end = optimizer.end_weight_decay
    if optimizer.weight_decay_incr_style == "constant":
        for name, value in (("start", start), ("end", end)):
            if value not in (None, optimizer.weight_decay):
                yield FlagError(
                    f"--{name}-weight-decay",
                    value,
                    "needs `--weight-decay-incr-style` linear or cosine",
                    "give one, or `--weight-decay` alone",
                )
    elif start is None or end is None:
        yield FlagError(
            "--weight-decay-incr-style",
            optimizer.weight_decay_incr_style,
            "needs `--start-weight-decay` and `--end-weight-decay`",
            "give both",
        )
    elif end < start:
        yield FlagError(
            "--end-weight-decay",
            end,
            f"must be at least `--start-weight-decay` ({start}), since it only grows",
            "swap them, or use `--weight-decay` alone",
        )


def _unit_errors(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the lengths of warm-up and decay, or in their units."""
    by_samples = training.train_samples is not None
    unit, other = ("samples", "iters") if by_samples else ("iters", "samples")
    for phase in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(optimizer, f"{phase}_{other}"):
            name = f"--{phase.replace('_', '-')}"
            yield FlagError(
                f"{name}-{other}",
                None,
                f"does not go with `--train-{unit}`",
                f"use `{name}-{unit}`",
            )
    warmup = getattr(optimizer, f"lr_warmup_{unit}") or 0
    decay = getattr(optimizer, f"lr_decay_{unit}") or getattr(training, f"train_{unit}") or 0
    fraction = optimizer.lr_warmup_fraction
    if fraction is not None and warmup:
        yield exclusive(("--lr-warmup-fraction", fraction), (f"--lr-warmup-{unit}", warmup))
    if decay and warmup >= decay:
        yield FlagError(
            f"--lr-warmup-{unit}",
            warmup,
            f"must be less than the length of the decay ({decay})",
            f"use {decay // 10}",
        )
    if optimizer.lr_decay_style == "WSD" and getattr(optimizer, f"lr_wsd_decay_{unit}") is None:
        yield FlagError(
            "--lr-decay-style WSD", None, f"needs `--lr-wsd-decay-{unit}`", f"use {decay // 10}"
        )


def ema_errors(ema: EmaConfig, training: TrainingConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags of averaged weights."""
    needs = ("needs `--ema-decay`", "give one such as 0.9999")
    every = ema.ema_update_every
    if not ema.ema_decay and ema.ema_start not in (None, 1):
        yield FlagError("--ema-start", ema.ema_start, *needs)
    if not ema.ema_decay and every > 1:
        yield FlagError("--ema-update-every", every, *needs)
    if not ema.ema_decay and ema.ema_warmup is not None:
        yield FlagError(spelling_of(ema, "ema_warmup"), None, *needs)
    if ema.eval_ema and not ema.keeps_average(trains=not training.skip_train):
        yield FlagError("--eval-ema", None, *needs)
    if ema.eval_ema and not training.evaluates:
        yield FlagError(
            "--eval-ema",
            None,
            "needs evaluation, but `--eval-iters` is 0",
            "give a number of batches",
        )
