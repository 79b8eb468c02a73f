"""Flags for faults of machines, wrong results of computations, and loss spikes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.config.flags import COUNT, FACTOR, NATURAL, SIZE, Range, UsersOwn, flag
from megatron_ext.disk.host_folder import generation, restarts_by_torchrun
from megatron_ext.errors import FlagError

DISABLED, VALIDATE, STATS = "disabled", "validate_results", "report_stats"
"""Values of ``--rerun-mode``: repeat no step; repeat a step whose result looks wrong, such as NaN,
and use the second result if it is good; repeat steps only to report whether results are equal.
"""


@dataclass(frozen=True)
class FaultToleranceConfig(UsersOwn):
    """Flags for how a run detects faults and recovers from them."""

    max_restarts: int = flag(
        0,
        "start the ranks again, from the newest state, so many times after a rank has failed; "
        "torchrun has a flag of this name, which does it under torchrun",
        NATURAL,
        "restarts",
    )
    elastic_min_nodes: int | None = flag(
        None,
        "go on with fewer nodes, but at least this many, where not all can be started again, and "
        "with more when they come back; the global batch stays. A data-parallel replica stands "
        "for a node where --nproc-per-node starts the ranks of one machine on CPUs",
        SIZE,
        "nodes",
    )

    rerun_mode: str = flag(
        DISABLED,
        "validate_results computes a step again whose result is refused, because it is not finite, "
        "differs between replicas or is a spike, and uses the second result if that is good; "
        "report_stats only tells whether steps repeat (the default differs from Megatron-LM's)",
        choices=(DISABLED, VALIDATE, STATS),
    )
    rerun_interval: int | None = flag(
        None,
        "with --rerun-mode, compute the gradients of one step in so many twice and compare their "
        "bits; where they differ, validate_results lets a third computation decide",
        COUNT,
        "steps",
    )
    check_state_interval: int | None = flag(
        None,
        "in one step out of so many, check that no bit of a weight or of the optimizer's state "
        "changes between two updates",
        COUNT,
        "steps",
    )

    on_spike: str | None = flag(
        None,
        "what to do about a step whose loss or gradient norm leaps far above those of the steps "
        "before: log tells it, skip does not apply its update, rewind also goes back to the newest "
        "checkpoint and on with the samples after the spike; without it nobody looks",
        choices=("log", "skip", "rewind"),
    )
    spike_window: int = flag(
        128,
        "with --on-spike, the steps whose median and deviation a step is compared with; nothing is "
        "a spike in the first half of so many steps",
        Range(4, 10**4),
        "steps",
    )
    spike_factor: float = flag(
        8.0,
        "with --on-spike, the standard deviations above the median beyond which a value is a spike",
        FACTOR,
    )

    @property
    def is_elastic(self) -> bool:
        """Return whether the run may continue with a different number of nodes."""
        return self.elastic_min_nodes is not None

    @property
    def may_be_restarted(self) -> bool:
        """Return whether a launcher may start the ranks of this run again, or has done so."""
        by_torchrun = restarts_by_torchrun()
        return bool(self.max_restarts or by_torchrun or self.is_elastic or generation())

    def errors(self, save: str | None, *, whole: bool, kept: str | None) -> Iterator[FlagError]:
        """Yield an error for each of these flags that conflicts with another flag of the run.

        Args:
            save: the folder of ``--save``; None without that flag.
            whole: whether checkpoints also hold the optimizer and random states, which a run needs
                to resume.
            kept: a flag of the run under which no step can be repeated, since a step changes state
                that cannot be restored; None if there is none.
        """
        if self.elastic_min_nodes is not None and save is None:
            yield FlagError(
                "--elastic-min-nodes",
                self.elastic_min_nodes,
                "needs `--save`, from which another number of nodes goes on",
                "give a folder",
            )
        mode = self.rerun_mode
        interval = self.rerun_interval
        if mode == DISABLED and interval is not None:
            yield FlagError(
                "--rerun-interval",
                interval,
                "needs `--rerun-mode`",
                "give validate_results or report_stats",
            )
        if mode != DISABLED and kept is not None:
            yield FlagError(
                "--rerun-mode",
                mode,
                f"does not go with `{kept}`, whose state cannot be put back to compute a step "
                "again",
                "leave one of them out",
            )
        if self.on_spike == "rewind" and (save is None or not whole):
            yield FlagError(
                "--on-spike",
                "rewind",
                "needs whole checkpoints to go back to",
                "give `--save`, and neither `--no-save-optim` nor `--no-save-rng`",
            )
        if mode == STATS and interval is None:
            yield FlagError(
                "--rerun-mode", mode, "needs `--rerun-interval`", "1 compares every step"
            )
