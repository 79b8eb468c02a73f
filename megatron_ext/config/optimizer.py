"""Optimizer, learning-rate schedule, and data-parallel gradient reduction."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_ext.config.flags import flag
from megatron_ext.config.training import TrainingConfig

OVERLAP = "communication on a CPU does not run beside computation"


@dataclass(frozen=True)
class OptimizerConfig:
    """Update rule and schedule; names and defaults are Megatron-LM's."""

    optimizer: str = flag("adam", "update rule", choices=("adam", "sgd"))
    lr: float | None = flag(None, "largest learning rate")
    min_lr: float = flag(0.0, "smallest learning rate after the warm-up")
    lr_decay_style: str = flag(
        "linear",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(None, "end of the decay; default: of the run", unit="steps")
    lr_decay_samples: int | None = flag(None, "the same", unit="samples")
    lr_wsd_decay_style: str = flag(
        "exponential",
        "shape of the last phase of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(None, "length of that phase", unit="steps")
    lr_wsd_decay_samples: int | None = flag(None, "the same", unit="samples")
    lr_warmup_fraction: float | None = flag(None, "share of the decay that is warm-up")
    lr_warmup_iters: int = flag(0, "length of the warm-up", unit="steps", names=("--warmup",))
    lr_warmup_samples: int = flag(0, "the same", unit="samples")
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up")
    decoupled_lr: float | None = flag(None, "learning rate of embedding and output layer")
    decoupled_min_lr: float | None = flag(None, "its smallest value")
    weight_decay: float = flag(0.01, "decoupled weight decay")
    start_weight_decay: float | None = flag(None, "weight decay at the start")
    end_weight_decay: float | None = flag(None, "weight decay at the end")
    weight_decay_incr_style: str = flag(
        "constant", "shape in between", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = flag(1.0, "largest global gradient norm, 0 for no clipping")
    adam_beta1: float = flag(0.9, "decay of Adam's first moment")
    adam_beta2: float = flag(0.999, "decay of Adam's second moment")
    adam_eps: float = flag(1e-8, "epsilon of Adam")
    sgd_momentum: float = flag(0.9, "momentum of SGD")
    apply_wd_to_qk_layernorm: bool = flag(False, "decay the norms of queries and keys too")
    use_distributed_optimizer: bool = flag(False, "share optimizer state over replicas")
    overlap_grad_reduce: bool = flag(False, "reduce while backward runs", gpu_only=OVERLAP)
    overlap_param_gather: bool = flag(False, "gather while forward runs", gpu_only=OVERLAP)
    align_grad_reduce: bool = flag(True, "all stages reduce together", gpu_only=OVERLAP)
    align_param_gather: bool = flag(True, "all stages gather together", gpu_only=OVERLAP)
    ddp_bucket_size: int | None = flag(None, "parameters of a bucket", gpu_only=OVERLAP)
    ddp_num_buckets: int | None = flag(None, "number of buckets", gpu_only=OVERLAP)
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

    def resolved(self, device: str) -> OptimizerConfig:
        """With weight decay settled, and without what a CPU cannot do."""
        changes: dict[str, object] = {}
        if self.weight_decay_incr_style == "constant":
            changes.update(start_weight_decay=self.weight_decay, end_weight_decay=self.weight_decay)
        if device == "cpu":
            changes.update(
                overlap_grad_reduce=False,
                overlap_param_gather=False,
                ddp_average_in_collective=False,
            )
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def errors(self, training: TrainingConfig) -> list[str]:
        """What cannot be run, one sentence each."""
        found = [*self._rate_errors(training), *self._unit_errors(training)]
        if self.clip_grad < 0:
            found.append(f"`--clip-grad` ({self.clip_grad}) must be at least 0; 0 means none.")
        if self.weight_decay_incr_style != "constant" and None in (
            self.start_weight_decay,
            self.end_weight_decay,
        ):
            found.append(
                f"`--weight-decay-incr-style` ({self.weight_decay_incr_style}) needs "
                "`--start-weight-decay` and `--end-weight-decay`; give both."
            )
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

    def _rate_errors(self, training: TrainingConfig) -> list[str]:
        if training.skip_train:
            return []
        if self.lr is None:
            return ["`--lr` is missing; give the learning rate."]
        found = []
        if not 0 <= self.min_lr <= self.lr:
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
        warmup = self.lr_warmup_samples if by_samples else self.lr_warmup_iters
        total = training.train_samples if by_samples else training.train_iters
        decay = (self.lr_decay_samples if by_samples else self.lr_decay_iters) or total or 0
        if self.lr_warmup_fraction is not None and warmup:
            found.append(
                f"`--lr-warmup-fraction` ({self.lr_warmup_fraction}) and "
                f"`--lr-warmup-{wrong[1]}` ({warmup}) exclude each other; give one."
            )
        if self.lr_warmup_fraction is not None and not 0 <= self.lr_warmup_fraction < 1:
            found.append(
                f"`--lr-warmup-fraction` ({self.lr_warmup_fraction}) must be at least 0 and below "
                "1; use 0.01."
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
