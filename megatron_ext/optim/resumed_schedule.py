"""Continues the schedule of learning rate and weight decay of a resumed run, with new flags.

megatron-core counts a schedule in samples since the start of the run, even if flags give its
lengths in iterations. So with another batch size or number of iterations, every phase would begin
and end at other samples, and the rate of a resumed run would jump. Here the schedule stays at the
same point of the same phase, and the rest of it is fitted to the rest of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from megatron_ext.config.run import RunConfig
from megatron_ext.optim.schedule import WSD, Schedule, samples_of


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
    return samples_of(config, max(0, end - iteration), consumed)


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


def go_on(schedule: Schedule, config: RunConfig, iteration: int, consumed: int) -> str | None:
    """Continue a loaded schedule without a jump, with the phase lengths of this run's flags.

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
    state = schedule.loaded
    last_phase = schedule.wsd_decay_steps or 0
    if state is None or not schedule.override_opt_param_scheduler:
        return None
    theirs = Place(
        state["lr_warmup_steps"],
        state["lr_decay_steps"],
        state.get(WSD, last_phase * state["lr_decay_steps"] / schedule.lr_decay_steps) or 0,
        state["num_steps"],
    )
    ours = Place(schedule.lr_warmup_steps, schedule.lr_decay_steps, last_phase, 0)
    if (ours.warmup, ours.decay, last_phase) == (
        theirs.warmup,
        theirs.decay,
        theirs.last_phase,
    ):
        return None
    left = samples_of_decay_left(config, iteration, consumed)
    ended = theirs.done >= theirs.decay and schedule.lr_decay_style != "constant"
    place = continued(schedule.lr_decay_style, theirs, ours, left)
    grown = min(1.0, state["num_steps"] / state["wd_incr_steps"])
    schedule.lr_warmup_steps = place.warmup
    schedule.lr_decay_steps = place.decay
    if schedule.wsd_decay_steps is not None:
        schedule.wsd_decay_steps = place.last_phase
    if grown:
        schedule.wd_incr_steps = place.done / grown
    schedule.num_steps = place.done
    schedule.step(0)
    rate = get_canonical_lr_for_logging(schedule.optimizer.param_groups) or 0.0
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
