"""Rules of the optimizer, of its schedules, and of the averaged weights."""

from __future__ import annotations

import dataclasses

from megatron_ext.config.optimizer import EmaConfig, OptimizerConfig
from megatron_ext.config.training import TrainingConfig


def with_warmup(optimizer: OptimizerConfig, training: TrainingConfig) -> OptimizerConfig:
    """Settle the warm-up of a run whose length is known in steps, where none is given.

    The usual one is shortened to a tenth of a decay that has no room for it.
    """
    usual, decay = optimizer.usual_warmup_iters, optimizer.lr_decay_iters or training.train_iters
    if optimizer.lr_warmup_iters is not None:
        return optimizer
    if optimizer.lr_warmup_fraction is not None or not usual:
        return dataclasses.replace(optimizer, lr_warmup_iters=0)
    if decay is None:
        return optimizer  # epochs are not counted in steps yet
    warmup = usual if usual < decay else decay // 10
    return dataclasses.replace(optimizer, lr_warmup_iters=warmup)


def resolve_optimizer(
    optimizer: OptimizerConfig, training: TrainingConfig, device: str
) -> OptimizerConfig:
    """Return the section with warm-up and weight decay settled, without what a CPU cannot do."""
    changes: dict[str, object] = {}
    if optimizer.weight_decay_incr_style == "constant":
        # Others are refused.
        for name in ("start_weight_decay", "end_weight_decay"):
            if getattr(optimizer, name) is None:
                changes[name] = optimizer.weight_decay
    if device == "cpu":
        changes.update(
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            ddp_average_in_collective=False,
        )
    return dataclasses.replace(with_warmup(optimizer, training), **changes)  # type: ignore[arg-type]


def optimizer_errors(optimizer: OptimizerConfig, training: TrainingConfig) -> list[str]:
    """Return a sentence for everything that cannot be run."""
    found = [
        *_rate_errors(optimizer, training),
        *_decoupled_errors(optimizer),
        *_decay_errors(optimizer),
        *_unit_errors(optimizer, training),
    ]
    if optimizer.overlap_param_gather and not optimizer.use_distributed_optimizer:
        found.append("`--overlap-param-gather` needs `--use-distributed-optimizer`; give both.")
    if optimizer.overlap_param_gather and not optimizer.overlap_grad_reduce:
        found.append("`--overlap-param-gather` needs `--overlap-grad-reduce`; give both.")
    if optimizer.optimizer == "sgd" and optimizer.use_distributed_optimizer:
        found.append(
            "`--optimizer sgd` does not go with `--use-distributed-optimizer`, which keeps "
            "Adam's state only; leave the latter out."
        )
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        found.append(
            "`--override-opt-param-scheduler` and `--use-checkpoint-opt-param-scheduler` "
            "exclude each other; give one."
        )
    if optimizer.ddp_bucket_size is not None and optimizer.ddp_num_buckets is not None:
        found.append("`--ddp-bucket-size` and `--ddp-num-buckets` exclude each other; give one.")
    return found


def _decoupled_errors(optimizer: OptimizerConfig) -> list[str]:
    if optimizer.decoupled_lr is None:
        if optimizer.decoupled_min_lr is None:
            return []
        return [
            f"`--decoupled-min-lr` ({optimizer.decoupled_min_lr}) needs `--decoupled-lr`; give "
            "both."
        ]
    own = optimizer.decoupled_min_lr is not None
    name = "--decoupled-min-lr" if own else "--min-lr"
    smallest = optimizer.decoupled_min_lr if own else optimizer.min_lr
    if (smallest or 0.0) <= optimizer.decoupled_lr:
        return []
    return [
        f"`--decoupled-lr` ({optimizer.decoupled_lr}) must be at least `{name}` ({smallest}); give "
        "a smaller `--decoupled-min-lr`."
    ]


def _decay_errors(optimizer: OptimizerConfig) -> list[str]:
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if optimizer.weight_decay_incr_style == "constant":
        return [
            f"`--{name}-weight-decay` ({value}) needs `--weight-decay-incr-style` linear or "
            "cosine; give one, or `--weight-decay` alone."
            for name, value in (("start", start), ("end", end))
            if value not in (None, optimizer.weight_decay)
        ]
    if start is None or end is None:
        return [
            f"`--weight-decay-incr-style` ({optimizer.weight_decay_incr_style}) needs "
            "`--start-weight-decay` and `--end-weight-decay`; give both."
        ]
    if end < start:
        return [
            f"`--end-weight-decay` ({end}) must be at least `--start-weight-decay` ({start}), "
            "since it only grows; swap them, or use `--weight-decay` alone."
        ]
    return []


def _rate_errors(optimizer: OptimizerConfig, training: TrainingConfig) -> list[str]:
    if training.skip_train:
        return []
    if optimizer.lr is None:
        return ["`--lr` is missing; give the learning rate."]
    found = []
    if optimizer.min_lr > optimizer.lr:
        found.append(
            f"`--min-lr` ({optimizer.min_lr}) must be between 0 and `--lr` ({optimizer.lr}); use "
            f"{optimizer.lr / 10:g}."
        )
    if optimizer.lr_warmup_init > optimizer.lr:
        found.append(
            f"`--lr-warmup-init` ({optimizer.lr_warmup_init}) must be at most `--lr` "
            f"({optimizer.lr})."
        )
    return found


def _unit_errors(optimizer: OptimizerConfig, training: TrainingConfig) -> list[str]:
    """Return a sentence for lengths in another unit than the run's, or that do not fit it."""
    by_samples = training.train_samples is not None
    wrong = ("iters", "samples") if by_samples else ("samples", "iters")
    found = []
    for phase in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(optimizer, f"{phase}_{wrong[0]}"):
            name = phase.replace("_", "-")
            found.append(
                f"`--{name}-{wrong[0]}` does not go with `--train-{wrong[1]}`; use "
                f"`--{name}-{wrong[1]}`."
            )
    warmup = optimizer.lr_warmup_samples if by_samples else optimizer.lr_warmup_iters or 0
    total = training.train_samples if by_samples else training.train_iters
    decay = (optimizer.lr_decay_samples if by_samples else optimizer.lr_decay_iters) or total or 0
    if optimizer.lr_warmup_fraction is not None and warmup:
        found.append(
            f"`--lr-warmup-fraction` ({optimizer.lr_warmup_fraction}) and "
            f"`--lr-warmup-{wrong[1]}` ({warmup}) exclude each other; give one."
        )
    if decay and warmup >= decay:
        found.append(
            f"`--lr-warmup-{wrong[1]}` ({warmup}) must be less than the length of the decay "
            f"({decay}); use {decay // 10}."
        )
    wsd = optimizer.lr_wsd_decay_samples if by_samples else optimizer.lr_wsd_decay_iters
    if optimizer.lr_decay_style == "WSD" and wsd is None:
        found.append(
            f"`--lr-decay-style WSD` needs `--lr-wsd-decay-{wrong[1]}`; use {decay // 10}."
        )
    return found


def ema_errors(ema: EmaConfig, training: TrainingConfig) -> list[str]:
    """Return a sentence for every use of averaged weights that cannot be run."""
    found = []
    if not ema.ema_decay and ema.ema_start not in (None, 1):
        found.append(
            f"`--ema-start` ({ema.ema_start}) needs `--ema-decay`; give one such as 0.9999."
        )
    every = ema.ema_update_every
    if every > 1 and not ema.ema_decay:
        found.append(
            f"`--ema-update-every` ({every}) needs `--ema-decay`; give one such as 0.9999."
        )
    if ema.eval_ema and not ema.keeps_average(trains=not training.skip_train):
        found.append("`--eval-ema` needs `--ema-decay`; give one such as 0.9999.")
    if ema.eval_ema and not training.evaluates:
        found.append(
            "`--eval-ema` needs evaluation, but `--eval-iters` is 0; give a number of batches."
        )
    return found
