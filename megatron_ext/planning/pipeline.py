"""The schedule of a step for plans: its time and memory, from as few micro-batches as decide them.

After its warm-up, a pipeline repeats the same actions: micro-batch by micro-batch (1F1B), or group
by group (interleaved). So the time of a step grows by the same amount with each repetition, and its
memory not at all. A step of thousands of micro-batches need not be simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_ext.config.parallel import V_SHAPED, ParallelConfig
from megatron_ext.config.training import TrainingConfig
from megatron_ext.parallel.grid import Placement
from megatron_ext.schedules.orders import build_plan, interleaved, one_f_one_b
from megatron_ext.schedules.plan import (
    EVEN,
    Action,
    Durations,
    Kind,
    Plan,
    passes_of,
    recomputed_whole,
    timeline,
)
from megatron_ext.schedules.price import span

SIMULATED = {"no-pipelining": 2, "1f1b": 2, "interleaved": 4, "dualpipe-v": 4}
"""Schedule -> the rounds of micro-batches to simulate; other schedules are simulated whole."""


def microbatches(parallel: ParallelConfig, training: TrainingConfig) -> int:
    """Return the number of micro-batches per rank in a step with the full global batch."""
    micro, batch = training.batch_sizes
    return max(1, batch // (micro * parallel.data_parallel_size))


@dataclass(frozen=True)
class PipelineTime:
    """The time of a step's forward and backward passes on the busiest pipeline rank.

    Attributes:
        makespan: time from the first start to the last end.
        bubble: the time in which the rank waits for others.
    """

    makespan: float
    bubble: float

    @property
    def bubble_share(self) -> float:
        """Return the fraction of the time in which the rank waits for others."""
        return self.bubble / self.makespan if self.makespan else 0.0


@dataclass(frozen=True)
class Schedule:
    """The pipeline schedule of a step with the full global batch.

    Attributes:
        name: a name of ``--pipeline-schedule`` without "core-".
        group: micro-batches that an interleaved chunk runs before the next chunk; None for the
            pipeline size.
        pairs: whether forward and backward passes run in pairs.
        partly: micro-batches of those in flight that do not recompute all layers (see
            `recomputed_whole`); None if all recompute the same.
    """

    name: str
    pipeline_size: int
    num_microbatches: int
    num_chunks: int
    group: int | None
    pairs: bool = False
    partly: int | None = None

    @classmethod
    def of(
        cls, parallel: ParallelConfig, training: TrainingConfig, partly: int | None = None
    ) -> Schedule:
        """Return the schedule of a run's steps."""
        return cls(
            (parallel.pipeline_schedule or "no-pipelining").removeprefix("core-"),
            parallel.pipeline_model_parallel_size,
            microbatches(parallel, training),
            parallel.virtual_pipeline_model_parallel_size or 1,
            parallel.microbatch_group_size_per_vp_stage,
            parallel.overlap_moe_expert_parallel_comm,
            partly,
        )

    def plan(self, num_microbatches: int | None = None) -> Plan:
        """Return the actions of all ranks for a step; None stands for its own micro-batches."""
        return build_plan(
            self.name,
            pipeline_size=self.pipeline_size,
            num_microbatches=num_microbatches or self.num_microbatches,
            num_chunks=self.num_chunks,
            group_size=self.group,
            pairs=self.pairs,
        )

    @property
    def placement(self) -> Placement:
        """Return which rank holds which stage."""
        return Placement(self.pipeline_size, self.num_chunks, v_shape=self.name in V_SHAPED)

    def orders(self, num_microbatches: int) -> Sequence[Sequence[Action]]:
        """Return the computations of each rank in a step.

        Those of 1F1B and of interleaved 1F1B come without messages, which take longer to find.
        """
        if self.name == "interleaved":
            group = self.group or self.pipeline_size
            return interleaved(self.placement, num_microbatches, group, pairs=self.pairs)
        if self.name in ("no-pipelining", "1f1b"):
            return one_f_one_b(self.placement, num_microbatches, pairs=self.pairs)
        return self.plan(num_microbatches).ranks

    def short_orders(self) -> Sequence[Sequence[Action]]:
        """Return the `orders` of a step with `simulated` micro-batches."""
        return self.orders(self.simulated)

    @property
    def period(self) -> int:
        """Return after how many micro-batches the steady phase repeats itself.

        In 1F1B it does so after one, if messages take no time; else only after the messages of as
        many micro-batches as there are stages, or of two micro-batches in pairs.
        """
        return 2 if self.pairs and self.name == "1f1b" else self._round

    @property
    def _round(self) -> int:
        """Return the number of micro-batches that pass a stage before the first one returns."""
        interleaves = self.name == "interleaved"
        return (self.group if interleaves else None) or self.pipeline_size

    @property
    def simulated(self) -> int:
        """Return the number of micro-batches to simulate, at most those of the step.

        The rest of the step is a multiple of `period`.
        """
        # The warm-up of pairs is up to twice as long.
        least = SIMULATED.get(self.name, 0) * self._round * (2 if self.pairs else 1)
        if not least or self.num_microbatches <= least + self.period:
            return self.num_microbatches
        return least + (self.num_microbatches - least) % self.period

    def short(self) -> Plan:
        """Return the actions of a step with `simulated` micro-batches.

        It holds as many activations at its peak as the whole step.
        """
        return self.plan(self.simulated)

    def num_pairs(self, rank: int) -> int:
        """Return how many pairs of passes a pipeline rank runs in a step."""
        if not self.pairs:
            return 0
        count = _pairs(replace(self, num_microbatches=self.simulated))[rank]
        return count + (self.num_microbatches - self.simulated) * self.num_chunks

    def whole_share(self, rank: int) -> float:
        """Return the share of a rank's forward passes whose layers are all recomputed."""
        if self.partly is None:
            return 0.0
        actions = self.short().ranks[rank]
        forwards = sum(action.kind is Kind.FORWARD for action in passes_of(actions))
        return len(recomputed_whole(actions, self.partly)) / forwards

    def time(self, durations: Durations = EVEN, latency: float = 0.0) -> PipelineTime:
        """Return the time of a step, for the durations of a stage and of a message between two."""
        count = self.simulated
        cost = self._simulate(count, durations, latency)
        left = (self.num_microbatches - count) // self.period
        if not left:
            return cost
        before = self._simulate(count - self.period, durations, latency)
        return PipelineTime(
            cost.makespan + left * (cost.makespan - before.makespan),
            cost.bubble + left * (cost.bubble - before.bubble),
        )

    def _simulate(
        self, num_microbatches: int, durations: Durations, latency: float
    ) -> PipelineTime:
        orders = self.orders(num_microbatches)
        return PipelineTime(*span(timeline(orders, self.placement, durations, latency)))


@lru_cache(maxsize=256)
def _pairs(short: Schedule) -> tuple[int, ...]:
    """Return the number of pairs of passes on each rank in a step that is simulated whole."""
    return tuple(
        sum(action.kind is Kind.PAIR for action in order) for order in short.short_orders()
    )
