"""Optimizer, learning-rate schedule, and data-parallel gradient reduction.

The average of the weights that a run keeps beside them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import (
    BELOW_ONE,
    COUNT,
    LONG_COUNT,
    LONG_NATURAL,
    NATURAL,
    NORM,
    RATE,
    IfChanged,
    Range,
    flag,
)
from megatron_ext.config.training import TrainingConfig

DECAY = Range(0, 100)
OVERLAP = "communication on a CPU does not run beside computation"


@dataclass(frozen=True)
class OptimizerConfig:
    """Update rule and schedule; names and defaults are Megatron-LM's.

    Attributes:
        usual_warmup_iters: warm-up of a run that does not give one.
    """

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    optimizer: str = flag("adam", "update rule", choices=("adam", "sgd"))
    lr: float | None = flag(None, "largest learning rate", bounds=RATE)
    min_lr: float = flag(0.0, "smallest learning rate after the warm-up", bounds=RATE)
    lr_decay_style: str = flag(
        "linear",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(
        None, "end of the decay; default: of the run", unit="steps", bounds=COUNT
    )
    lr_decay_samples: int | None = flag(None, "the same", unit="samples", bounds=LONG_COUNT)
    lr_wsd_decay_style: str = flag(
        "exponential",
        "shape of the last phase of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        if_changed="say",
    )
    lr_wsd_decay_iters: int | None = flag(
        None, "length of that phase", unit="steps", bounds=COUNT, if_changed="say"
    )
    lr_wsd_decay_samples: int | None = flag(
        None, "the same", unit="samples", bounds=LONG_COUNT, if_changed="say"
    )
    lr_warmup_fraction: float | None = flag(
        None, "share of the decay that is warm-up", bounds=BELOW_ONE
    )
    lr_warmup_iters: int | None = flag(
        None,
        "length of the warm-up; default: 0, in pretrain_video.py 1000, or a tenth of a shorter run",
        unit="steps",
        names=("--warmup",),
        bounds=NATURAL,
    )
    lr_warmup_samples: int = flag(0, "the same", unit="samples", bounds=LONG_NATURAL)
    lr_warmup_init: float = flag(
        0.0, "learning rate at the start of the warm-up", bounds=RATE, if_changed="say"
    )
    decoupled_lr: float | None = flag(
        None, "learning rate of embedding and output layer", bounds=RATE
    )
    decoupled_min_lr: float | None = flag(None, "its smallest value", bounds=RATE)
    weight_decay: float = flag(0.01, "decoupled weight decay", bounds=DECAY)
    start_weight_decay: float | None = flag(None, "weight decay at the start", bounds=DECAY)
    end_weight_decay: float | None = flag(None, "weight decay at the end", bounds=DECAY)
    weight_decay_incr_style: str = flag(
        "constant", "shape in between", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = flag(
        1.0, "largest global gradient norm, 0 for no clipping", bounds=NORM, if_changed="say"
    )
    adam_beta1: float = flag(
        0.9, "decay of Adam's first moment", bounds=BELOW_ONE, if_changed="keep"
    )
    adam_beta2: float = flag(
        0.999, "decay of Adam's second moment", bounds=BELOW_ONE, if_changed="keep"
    )
    adam_eps: float = flag(1e-8, "epsilon of Adam", bounds=Range(1e-30, 1), if_changed="keep")
    sgd_momentum: float = flag(0.9, "momentum of SGD", bounds=BELOW_ONE, if_changed="keep")
    apply_wd_to_qk_layernorm: bool = flag(
        False, "decay the norms of queries and keys too", if_changed="say"
    )
    use_distributed_optimizer: bool = flag(False, "share optimizer state over replicas")
    overlap_grad_reduce: bool = flag(False, "reduce while backward runs", gpu_only=OVERLAP)
    overlap_param_gather: bool = flag(False, "gather while forward runs", gpu_only=OVERLAP)
    align_grad_reduce: bool = flag(True, "all stages reduce together", gpu_only=OVERLAP)
    align_param_gather: bool = flag(True, "all stages gather together", gpu_only=OVERLAP)
    ddp_bucket_size: int | None = flag(
        None, "parameters of a bucket", gpu_only=OVERLAP, bounds=COUNT
    )
    ddp_num_buckets: int | None = flag(None, "number of buckets", gpu_only=OVERLAP, bounds=COUNT)
    ddp_average_in_collective: bool = flag(
        False, "average inside of the collective", gpu_only="gloo cannot average"
    )
    log_num_zeros_in_grad: bool = flag(False, "count and log zero gradients")
    override_opt_param_scheduler: bool = flag(
        False, "schedule from flags, not checkpoint", names=("--override-opt_param-scheduler",)
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "schedule from checkpoint, not flags",
        names=("--use-checkpoint-opt_param-scheduler",),
    )
    usual_warmup_iters: int = 0

    def with_warmup(self, training: TrainingConfig) -> OptimizerConfig:
        """Settle the warm-up of a run whose length is known in steps, where none is given.

        The usual one is shortened to a tenth of a decay that has no room for it.
        """
        usual, decay = self.usual_warmup_iters, self.lr_decay_iters or training.train_iters
        if self.lr_warmup_iters is not None:
            return self
        if self.lr_warmup_fraction is not None or not usual:
            return dataclasses.replace(self, lr_warmup_iters=0)
        if decay is None:
            return self  # epochs are not counted in steps yet
        warmup = usual if usual < decay else decay // 10
        return dataclasses.replace(self, lr_warmup_iters=warmup)

    def warmup_notes(self) -> list[str]:
        """Say that the usual warm-up was shortened; for runs that give none."""
        usual, warmup = self.usual_warmup_iters, self.lr_warmup_iters
        if warmup is None or warmup >= usual or self.lr_warmup_fraction is not None:
            return []
        return [
            f"The usual warm-up of {usual} steps is shortened to {warmup}, a tenth of the learning "
            "rate's decay; `--lr-warmup-iters` decides otherwise."
        ]

    def resolved(self, device: str, training: TrainingConfig) -> OptimizerConfig:
        """With warm-up and weight decay settled, and without what a CPU cannot do."""
        changes: dict[str, object] = {}
        if self.weight_decay_incr_style == "constant":
            # Others are refused.
            for name in ("start_weight_decay", "end_weight_decay"):
                if getattr(self, name) is None:
                    changes[name] = self.weight_decay
        if device == "cpu":
            changes.update(
                overlap_grad_reduce=False,
                overlap_param_gather=False,
                ddp_average_in_collective=False,
            )
        return dataclasses.replace(self.with_warmup(training), **changes)  # type: ignore[arg-type]

    def errors(self, training: TrainingConfig) -> list[str]:
        """What cannot be run, one sentence each."""
        found = [
            *self._rate_errors(training),
            *self._decoupled_errors(),
            *self._decay_errors(),
            *self._unit_errors(training),
        ]
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            found.append("`--overlap-param-gather` needs `--use-distributed-optimizer`; give both.")
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            found.append("`--overlap-param-gather` needs `--overlap-grad-reduce`; give both.")
        if self.optimizer == "sgd" and self.use_distributed_optimizer:
            found.append(
                "`--optimizer sgd` does not go with `--use-distributed-optimizer`, which keeps "
                "Adam's state only; leave the latter out."
            )
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            found.append(
                "`--override-opt-param-scheduler` and `--use-checkpoint-opt-param-scheduler` "
                "exclude each other; give one."
            )
        if self.ddp_bucket_size is not None and self.ddp_num_buckets is not None:
            found.append(
                "`--ddp-bucket-size` and `--ddp-num-buckets` exclude each other; give one."
            )
        return found

    def _decoupled_errors(self) -> list[str]:
        if self.decoupled_lr is None:
            if self.decoupled_min_lr is None:
                return []
            return [
                f"`--decoupled-min-lr` ({self.decoupled_min_lr}) needs `--decoupled-lr`; give both."
            ]
        own = self.decoupled_min_lr is not None
        name = "--decoupled-min-lr" if own else "--min-lr"
        smallest = self.decoupled_min_lr if own else self.min_lr
        if (smallest or 0.0) <= self.decoupled_lr:
            return []
        return [
            f"`--decoupled-lr` ({self.decoupled_lr}) must be at least `{name}` ({smallest}); give "
            "a smaller `--decoupled-min-lr`."
        ]

    def _decay_errors(self) -> list[str]:
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            return [
                f"`--{name}-weight-decay` ({value}) needs `--weight-decay-incr-style` linear or "
                "cosine; give one, or `--weight-decay` alone."
                for name, value in (("start", start), ("end", end))
                if value not in (None, self.weight_decay)
            ]
        if start is None or end is None:
            return [
                f"`--weight-decay-incr-style` ({self.weight_decay_incr_style}) needs "
                "`--start-weight-decay` and `--end-weight-decay`; give both."
            ]
        if end < start:
            return [
                f"`--end-weight-decay` ({end}) must be at least `--start-weight-decay` ({start}), "
                "since it only grows; swap them, or use `--weight-decay` alone."
            ]
        return []

    def _rate_errors(self, training: TrainingConfig) -> list[str]:
        if training.skip_train:
            return []
        if self.lr is None:
            return ["`--lr` is missing; give the learning rate."]
        found = []
        if self.min_lr > self.lr:
            found.append(
                f"`--min-lr` ({self.min_lr}) must be between 0 and `--lr` ({self.lr}); use "
                f"{self.lr / 10:g}."
            )
        if self.lr_warmup_init > self.lr:
            found.append(
                f"`--lr-warmup-init` ({self.lr_warmup_init}) must be at most `--lr` ({self.lr})."
            )
        return found

    def _unit_errors(self, training: TrainingConfig) -> list[str]:
        """Lengths of the schedule in another unit than that of the run, or that do not fit."""
        by_samples = training.train_samples is not None
        wrong = ("iters", "samples") if by_samples else ("samples", "iters")
        found = []
        for phase in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            if getattr(self, f"{phase}_{wrong[0]}"):
                name = phase.replace("_", "-")
                found.append(
                    f"`--{name}-{wrong[0]}` does not go with `--train-{wrong[1]}`; use "
                    f"`--{name}-{wrong[1]}`."
                )
        warmup = self.lr_warmup_samples if by_samples else self.lr_warmup_iters or 0
        total = training.train_samples if by_samples else training.train_iters
        decay = (self.lr_decay_samples if by_samples else self.lr_decay_iters) or total or 0
        if self.lr_warmup_fraction is not None and warmup:
            found.append(
                f"`--lr-warmup-fraction` ({self.lr_warmup_fraction}) and "
                f"`--lr-warmup-{wrong[1]}` ({warmup}) exclude each other; give one."
            )
        if decay and warmup >= decay:
            found.append(
                f"`--lr-warmup-{wrong[1]}` ({warmup}) must be less than the length of the decay "
                f"({decay}); use {decay // 10}."
            )
        wsd = self.lr_wsd_decay_samples if by_samples else self.lr_wsd_decay_iters
        if self.lr_decay_style == "WSD" and wsd is None:
            found.append(
                f"`--lr-decay-style WSD` needs `--lr-wsd-decay-{wrong[1]}`; use {decay // 10}."
            )
        return found


STREAMING_START = 200
"""First averaged step of LongLive (arXiv:2509.22622)."""


@dataclass(frozen=True)
class EmaConfig:
    """Exponential moving average: ``average = decay * average + (1 - decay) * weights``."""

    ema_decay: float | None = flag(
        None,
        "keep an average of the weights that retains this share at each update, 0 for none",
        bounds=BELOW_ONE,
        advice="use 0.9999",
    )
    ema_start: int | None = flag(
        None,
        "first step that is averaged, until then it is the weights; default: 1, with --task "
        "streaming 200",
        bounds=COUNT,
    )
    ema_update_every: int = flag(
        1,
        "average only after each so-manyth training step of the model, with the same decay; with "
        "--task streaming steps of the generator",
        unit="steps",
        bounds=COUNT,
    )
    eval_ema: bool = flag(False, "evaluate with the averaged weights too", if_changed="allow")
    for_sampling: bool = False
    """A run that only samples, with the averaged weights."""

    def resolved(self, *, streams: bool) -> EmaConfig:
        """With the first step, where there is an average."""
        if not self.ema_decay or self.ema_start is not None:
            return self
        return dataclasses.replace(self, ema_start=STREAMING_START if streams else 1)

    def keeps_average(self, *, trains: bool) -> bool:
        """Whether the run holds averaged weights: to go on with, or only to evaluate."""
        return bool(self.ema_decay) if trains else self.eval_ema or self.for_sampling

    def errors(self, training: TrainingConfig) -> list[str]:
        """What cannot be run, one sentence each."""
        found = []
        if not self.ema_decay and self.ema_start not in (None, 1):
            found.append(
                f"`--ema-start` ({self.ema_start}) needs `--ema-decay`; give one such as 0.9999."
            )
        every = self.ema_update_every
        if every > 1 and not self.ema_decay:
            found.append(
                f"`--ema-update-every` ({every}) needs `--ema-decay`; give one such as 0.9999."
            )
        if self.eval_ema and not self.keeps_average(trains=not training.skip_train):
            found.append("`--eval-ema` needs `--ema-decay`; give one such as 0.9999.")
        if self.eval_ema and not training.evaluates:
            found.append(
                "`--eval-ema` needs evaluation, but `--eval-iters` is 0; give a number of batches."
            )
        return found
