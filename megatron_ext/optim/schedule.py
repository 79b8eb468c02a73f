"""The schedule of learning rate and weight decay, which is counted in samples."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_ext.config.batch_size import samples_after
from megatron_ext.config.rules.optimizer import has_usual_warmup
from megatron_ext.config.run import RunConfig

WSD = "wsd_decay_steps"
"""Key in a state dict for the length of the final decay of ``--lr-decay-style WSD``, in samples.

megatron-core does not save it.
"""


def schedule_lengths(config: RunConfig) -> dict[str, Any]:
    """Return the lengths of the schedule's phases in samples, as arguments of `Schedule`.

    A length that a flag gives in iterations is converted to samples. If the batch size grows during
    the run, this is taken into account.
    """
    optimizer = config.optimizer
    training = config.training
    if training.train_samples is not None:
        total = training.train_samples
        decay = optimizer.lr_decay_samples or total
        warmup: float = optimizer.lr_warmup_samples
        wsd = optimizer.lr_wsd_decay_samples
    else:
        samples = partial(samples_of, config)
        assert training.train_iters is not None
        total = samples(training.train_iters)
        decay_iters = optimizer.lr_decay_iters or training.train_iters
        decay = samples(decay_iters)
        warmup = samples(optimizer.lr_warmup_iters or 0)
        wsd = None
        if optimizer.lr_wsd_decay_iters is not None:
            # The last phase ends with the decay, when batches may be larger than at the start.
            wsd = decay - samples(decay_iters - optimizer.lr_wsd_decay_iters)
    if optimizer.lr_warmup_fraction is not None:
        warmup = optimizer.lr_warmup_fraction * decay
    lengths = {"lr_warmup_steps": warmup, "lr_decay_steps": decay, "wd_incr_steps": total}
    return {**lengths, WSD: wsd}


def samples_of(config: RunConfig, iterations: int, consumed: int = 0) -> int:
    """Return how many samples the next ``iterations`` steps consume after ``consumed`` samples."""
    return samples_after(
        iterations,
        config.training,
        config.model.seq_length,
        config.parallel.data_parallel_size,
        consumed=consumed,
    )


class Schedule(OptimizerParamScheduler):  # type: ignore[misc]
    """megatron-core's schedule, which a resumed run may continue with phases of other lengths.

    Attributes:
        loaded: the state that was loaded, for `optim.resumed_schedule`; None for a new run.
        has_usual_warmup: whether the warm-up has its default length, which depends on the task and
            the length of the run; False if flags give another one.
    """

    loaded: dict[str, Any] | None = None
    has_usual_warmup = False
    lr_warmup_steps: float
    lr_decay_steps: float
    wsd_decay_steps: float | None
    wd_incr_steps: float

    def state_dict(self) -> dict[str, Any]:
        """Return megatron-core's state.

        With ``--lr-decay-style WSD``, also return the length of the final decay.
        """
        state: dict[str, Any] = super().state_dict()
        return {**state, WSD: self.wsd_decay_steps} if self.lr_decay_style == "WSD" else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a schedule's state; raise an AssertionError if its settings differ from the flags.

        There is no error with `--override-opt-param-scheduler`, which takes the settings from the
        flags, or `--use-checkpoint-opt-param-scheduler`, which takes them from the checkpoint. Two
        lengths may differ where they have no effect: that of the decay if the learning rate is
        constant, and that of the increase if the weight decay is constant. With a constant rate the
        checkpoint's warm-up is kept, unless a flag gives another one.
        """
        self.loaded = dict(state_dict)
        if self.lr_decay_style == state_dict.get("lr_decay_style") == "constant":
            state_dict = {**state_dict, "lr_decay_steps": self.lr_decay_steps}
            if self.has_usual_warmup and not self.override_opt_param_scheduler:
                self.lr_warmup_steps = state_dict["lr_warmup_steps"]
        if self.wd_incr_style == state_dict.get("wd_incr_style") == "constant":
            state_dict = {**state_dict, "wd_incr_steps": self.wd_incr_steps}
        super().load_state_dict(state_dict)
        if self.use_checkpoint_opt_param_scheduler:
            self.wsd_decay_steps = state_dict.get(WSD, self.wsd_decay_steps)


def build_scheduler(config: RunConfig, optimizer: MegatronOptimizer) -> Schedule:
    """Build the learning-rate and weight-decay schedule, whose steps are counted in samples."""
    flags = config.optimizer
    schedule = Schedule(
        optimizer,
        init_lr=flags.lr_warmup_init,
        max_lr=flags.lr,
        min_lr=flags.min_lr,
        lr_decay_style=flags.lr_decay_style,
        start_wd=flags.start_weight_decay,
        end_wd=flags.end_weight_decay,
        wd_incr_style=flags.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=flags.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=flags.override_opt_param_scheduler,
        lr_wsd_decay_style=flags.lr_wsd_decay_style,
        **schedule_lengths(config),
    )
    schedule.has_usual_warmup = has_usual_warmup(flags, config.training)
    return schedule
