"""The schedule of learning rate and weight decay, which a resumed run may continue with new flags.

megatron-core counts a schedule in samples since the start of the run, even if flags give its
lengths in iterations. So with another batch size or number of iterations, every phase would begin
and end at other samples, and the rate of a resumed run would jump. Here the schedule stays at the
same point of the same phase, and the rest of it is fitted to the rest of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)

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
        samples = partial(_samples, config)
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


def _samples(config: RunConfig, iterations: int, consumed: int = 0) -> int:
    """Return how many samples the next ``iterations`` steps consume after ``consumed`` samples."""
    return samples_after(
        iterations,
        config.training,
        config.model.seq_length,
        config.parallel.data_parallel_size,
        consumed=consumed,
    )


def samples_of_decay_left(config: RunConfig, iteration: int, consumed: int) -> int:
    """Return the number of samples from step ``iteration`` to the end of the learning rate's decay.

    The flags set this end; return 0 if it has passed. ``consumed`` is the number of samples in the
    steps up to ``iteration``.
    """
    optimizer = config.optimizer
    training = config.training
    if training.train_samples is not None:
        return max(0, (optimizer.lr_decay_samples or training.train_samples) - consumed)
    end = optimizer.lr_decay_iters or training.train_iters or 0
    return _samples(config, max(0, end - iteration), consumed)


@dataclass
class Place:
    """The lengths of a schedule's phases, and its current point, all in samples.

    Attributes:
        warmup: length of the warm-up.
        decay: samples from the start of the run to the end of the decay.
        last_phase: length of the final part of ``decay``, in which ``--lr-decay-style WSD`` lowers
            the rate.
        done: samples from the start of the run to the current point.
    """

    warmup: float
    decay: float
    last_phase: float
    done: float


class Schedule(OptimizerParamScheduler):  # type: ignore[misc]
    """megatron-core's schedule, which can continue without a jump when its phases get new lengths.

    Attributes:
        has_usual_warmup: whether the warm-up has its default length, which depends on the task and
            the length of the run; False if flags give another one.
    """

    _loaded: dict[str, Any] | None = None
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
        self._loaded = dict(state_dict)
        if self.lr_decay_style == state_dict.get("lr_decay_style") == "constant":
            state_dict = {**state_dict, "lr_decay_steps": self.lr_decay_steps}
            if self.has_usual_warmup and not self.override_opt_param_scheduler:
                self.lr_warmup_steps = state_dict["lr_warmup_steps"]
        if self.wd_incr_style == state_dict.get("wd_incr_style") == "constant":
            state_dict = {**state_dict, "wd_incr_steps": self.wd_incr_steps}
        super().load_state_dict(state_dict)
        if self.use_checkpoint_opt_param_scheduler:
            self.wsd_decay_steps = state_dict.get(WSD, self.wsd_decay_steps)

    def go_on(self, config: RunConfig, iteration: int, consumed: int) -> str | None:
        """Continue the loaded schedule without a jump, with the phase lengths of this run's flags.

        The rate and the phase stay as they were, and the decay ends where the flags say. If it had
        ended already, the rate stays at the minimum.

        Args:
            iteration: number of steps that the run has done so far.
            consumed: number of samples in these steps.

        Returns:
            A log message that says how the schedule continues. None if it needs no change: without
            `--override-opt-param-scheduler`, without a loaded state, or if the loaded lengths equal
            those of the flags.
        """
        state = self._loaded
        last_phase = self.wsd_decay_steps or 0
        if state is None or not self.override_opt_param_scheduler:
            return None
        theirs = Place(
            state["lr_warmup_steps"],
            state["lr_decay_steps"],
            state.get(WSD, last_phase * state["lr_decay_steps"] / self.lr_decay_steps) or 0,
            state["num_steps"],
        )
        ours = Place(self.lr_warmup_steps, self.lr_decay_steps, last_phase, 0)
        if (ours.warmup, ours.decay, last_phase) == (
            theirs.warmup,
            theirs.decay,
            theirs.last_phase,
        ):
            return None
        left = samples_of_decay_left(config, iteration, consumed)
        ended = theirs.done >= theirs.decay and self.lr_decay_style != "constant"
        place = continued(self.lr_decay_style, theirs, ours, left)
        grown = min(1.0, state["num_steps"] / state["wd_incr_steps"])
        self.lr_warmup_steps = place.warmup
        self.lr_decay_steps = place.decay
        if self.wsd_decay_steps is not None:
            self.wsd_decay_steps = place.last_phase
        if grown:
            self.wd_incr_steps = place.done / grown
        self.num_steps = place.done
        self.step(0)
        rate = get_canonical_lr_for_logging(self.optimizer.param_groups) or 0.0
        if ended:
            return (
                "The decay of the checkpoint's learning rate has ended, so that it stays at "
                f"`--min-lr` ({rate:g}); give another one, or `--finetune` for a schedule that "
                "starts anew."
            )
        return (
            f"The schedule goes on at the checkpoint's place, with a learning rate of {rate:g}, "
            "and its decay ends where the flags say."
        )


def continued(style: str, theirs: Place, ours: Place, left: int) -> Place:
    """Return the phase lengths and current sample with which a loaded schedule continues.

    The schedule stays at the same point of the same phase.

    Args:
        style: ``--lr-decay-style``.
        theirs: lengths and current sample of the loaded schedule.
        ours: the lengths that the flags give; its current sample is not used.
        left: samples until the decay should end.
    """
    passed = max(ours.decay - left, 0)
    warmup = ours.warmup
    done = max(passed, ours.warmup)
    last_phase = ours.last_phase
    if theirs.done < theirs.warmup:
        share = theirs.done / theirs.warmup
        rest = max(ours.warmup - passed, 0)
        # The flags may no longer have a warm-up.
        warmup = rest / (1 - share)
        done = warmup - rest if rest else done
    elif theirs.done >= theirs.decay:
        return Place(warmup, done + 1, min(last_phase, 1), done + 2)
    elif style == "inverse-square-root":
        done = max(theirs.done * max(warmup, 1) / max(theirs.warmup, 1), done)
    elif style in ("linear", "cosine"):
        share = (theirs.done - theirs.warmup) / (theirs.decay - theirs.warmup)
        decay = warmup + left / (1 - share)
        return Place(warmup, decay, last_phase, decay - left)
    elif style == "WSD":
        start = theirs.decay - theirs.last_phase
        share = max(0.0, (theirs.done - start) / theirs.last_phase)
        last_phase = left / (1 - share) if share else min(last_phase, left)
    return Place(warmup, max(done + left, warmup + 1), last_phase, done)


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
