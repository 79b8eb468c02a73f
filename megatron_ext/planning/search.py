"""The search for the fastest layouts of a run that fit into a number of GPUs."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from megatron_ext.config.rules.pipeline_layout import stages_of
from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import Gpu
from megatron_ext.errors import ConfigError, FlagError
from megatron_ext.planning.hardware import DEFAULT, Rates, reserve_on
from megatron_ext.planning.layouts import (
    SHARDED_GRADIENTS,
    SHARDED_WEIGHTS,
    Candidate,
    LayoutFlags,
    candidates,
    refuse_misfits,
)
from megatron_ext.planning.memory import rank_memories, worst_case
from megatron_ext.planning.network import Case, Network
from megatron_ext.planning.offload import update_parts
from megatron_ext.planning.stages import Stage
from megatron_ext.planning.state import State, optimizer_bytes, rank_state
from megatron_ext.planning.step_time import (
    Clock,
    Estimate,
    estimate,
    gradient_volume,
    least_seconds,
    needed_on,
)
from megatron_ext.planning.switch import Switch
from megatron_ext.planning.weights import ROUTED

Complete = Callable[[Mapping[str, Any]], RunConfig]
"""Returns the checked configuration of a run with the given values of fields.

It raises a ConfigError if the run has errors.
"""


@dataclass(frozen=True)
class Layout:
    """A layout that can run.

    Attributes:
        words: the words of each of its flags.
        variants: number of layouts with the same parallel sizes that were considered; this one is
            the fastest.
    """

    candidate: Candidate
    words: tuple[tuple[str, ...], ...]
    cost: Estimate
    variants: int = 1


@dataclass(frozen=True)
class SearchResult:
    """The fastest layouts that fit the GPU's memory.

    Attributes:
        best: the fastest layout for each choice of parallel sizes, the fastest first.
        tried: number of layouts that were considered. A layout counts once, however it recomputes
            and whatever switches it uses.
        checked: number of them whose memory was computed or bounded in at least one way to run
            them. Others cannot be faster than ``best``, or do not fit by `StateBound`.
        fitting: number of checked layouts that fit in such a way. In ways that cannot be faster
            than ``best``, more of them may fit.
        closest: without a layout that fits, the bytes of the one that needs least, and this layout.
        refused: sentences on layouts that cannot run, each with their number, the most frequent
            first.
    """

    best: list[Layout]
    tried: int
    checked: int
    fitting: int
    closest: tuple[float, Candidate] | None = None
    refused: tuple[tuple[str, int], ...] = ()


def search(
    base: RunConfig,
    flags: LayoutFlags,
    complete: Complete,
    world_size: int,
    gpu: Gpu,
    *,
    count: int = 10,
) -> SearchResult:
    """Return the fastest layouts of a run that fit on ``world_size`` GPUs.

    Each layout uses the distributed optimizer unless the optimizer is SGD, and sequence parallelism
    with tensor parallelism. It recomputes, and uses `LayoutFlags.switches`, as is fastest among the
    ways that fit. Other flags remain.

    Args:
        base: the configuration without flags of a layout, for one rank.
        flags: returns the flags of a layout.
        complete: takes the values that a layout sets and returns the configuration of its run.
        count: the largest number of layouts to return.

    Raises:
        ConfigError: no layout can run, whatever the memory; the message has up to 5 reasons.
    """
    searching = _Search(base, flags, complete, world_size, gpu)
    best = searching.run(count)
    refused = searching.refusals.counted()
    if not searching.tried:
        none = f"No layout of {world_size} ranks can run this model."
        raise ConfigError([none, *[text for text, _ in refused[:5]]])
    closest = None if best else searching.closest
    checked = searching.checked
    counts = searching.tried, len(checked), sum(checked.values())
    return SearchResult(best, *counts, closest, refused)


@dataclass(order=True)
class _Step:
    """A step of the search that is still to do.

    Attributes:
        seconds: a time that no layout can beat to which the step leads.
        number: breaks ties: the step that was found first.
        sizes: the parallel sizes of these layouts.
        run: does the step; returns a layout if its time is known.
    """

    seconds: float
    number: int
    sizes: tuple[int, ...] = field(compare=False)
    run: Callable[[], Layout | None] = field(compare=False)


class _Search:
    """Follows the layouts whose lower bound of a step's time is least, one step after the other.

    Each step makes the bound tighter: without a layout's own configuration, with it and with the
    memory of its ranks, and last by simulating its schedule. So a layout whose own time is the next
    is the fastest of those that are left, and slow layouts cost next to nothing.
    """

    def __init__(
        self,
        base: RunConfig,
        flags: LayoutFlags,
        complete: Complete,
        world_size: int,
        gpu: Gpu,
    ) -> None:
        self.base = base
        self.flags = flags
        self.complete = complete
        self.world_size = world_size
        self.gpu = gpu
        self.refusals = _Refusals()
        self.tried = 0
        self.checked: dict[Candidate, bool] = {}
        self.closest: tuple[float, Candidate] | None = None
        self.variants: Counter[tuple[int, ...]] = Counter()
        (first, *_) = flags.cost.cases(base)
        self.network = first.network
        self.least = LeastCosts(flags, world_size, gpu)
        self.state = StateBound.of(first.network, world_size)
        self._steps: list[_Step] = []
        self._seen: set[Candidate] = set()
        self._configs: dict[Candidate, RunConfig | None] = {}
        self._networks: dict[Hashable, Network] = {}
        self._needed: dict[Candidate, float] = {}
        self._number = itertools.count()

    def run(self, count: int) -> list[Layout]:
        """Return the ``count`` fastest layouts that fit."""
        for layout in candidates(
            self.base, self.world_size, self.gpu, self.flags.cost, self.network
        ):
            self._begin(layout)
        best: dict[tuple[int, ...], Layout] = {}
        while self._steps and len(best) < count:
            step = heapq.heappop(self._steps)
            if step.sizes not in best and (found := step.run()) is not None:
                best[step.sizes] = replace(found, variants=self.variants[step.sizes])
        return list(best.values())

    def _then(self, seconds: float, layout: Candidate, run: Callable[[], Layout | None]) -> None:
        heapq.heappush(self._steps, _Step(seconds, next(self._number), layout.sizes, run))

    def _begin(self, layout: Candidate) -> None:
        """Add the first step of a layout, unless it cannot run or surely does not fit."""
        try:
            refuse_misfits(self.base, layout, self.world_size)
        except ConfigError as error:
            self.refusals.add(error.messages[0])
            return
        self.tried += 1
        self.variants[layout.sizes] += 1
        leanest = self.flags.leanest(layout, self.gpu)
        needed = self.state.bytes_of(leanest)
        if needed > self.gpu.memory:
            self._note(needed, leanest)
        else:
            self._then(self.least.of_layout(layout), layout, partial(self._open, layout))

    def _open(self, layout: Candidate) -> None:
        """Follow the variants of a layout."""
        for variant in self.flags.variants(layout, self.gpu):
            self._follow(variant)

    def _follow(self, variant: Candidate) -> None:
        if variant not in self._seen:
            self._seen.add(variant)
            run = partial(self._check, variant)
            self._then(self.least.of_variant(variant), variant, run)

    def _check(self, variant: Candidate) -> None:
        """Find out whether a variant can run and fits; if it does not fit, follow leaner ones."""
        layout = self._plain(variant)
        if layout not in self._configs:
            self.checked.setdefault(layout, False)
        if not self._may_run(variant):
            return
        if self._fits(variant):
            self.checked[layout] = True
            seconds = min(least_seconds(case.network, self.gpu) for case in self._cases(variant))
            self._then(seconds, variant, partial(self._simulate, variant))
        else:
            self._follow_leaner(variant)

    def _may_run(self, variant: Candidate) -> bool:
        """Return whether a variant's layout can run, as far as its memory makes this matter."""
        layout = self._plain(variant)
        if self._least_bytes(variant) <= self.gpu.memory:
            return self._complete(layout) is not None
        return self._configs.get(layout, True) is not None

    def _complete(self, layout: Candidate) -> RunConfig | None:
        """Return the configuration of a layout; None, and count it as refused, if it cannot run."""
        if layout not in self._configs:
            self._configs[layout] = None
            try:
                self._configs[layout] = self.complete(self.flags.values(layout))
            except ConfigError as error:
                self.refusals.add(error.messages[0])
                self.tried -= 1
                self.variants[layout.sizes] -= 1
                self.checked.pop(layout, None)
        return self._configs[layout]

    def _follow_leaner(self, variant: Candidate) -> None:
        """Follow the ways to run a variant, which does not fit, with less memory."""
        least = self.flags.leanest_state(variant, self.gpu)
        kept = self.least.activations(variant)
        in_vain = set[str]()
        if self.state.bytes_of(least) + kept > self.gpu.memory:
            # No state leaves enough room for these activations.
            in_vain |= {switch.name for switch in self.flags.switches if switch.saves == "state"}
        hosting = self.flags.hosting(variant, self.gpu)
        if not (self._may_run(hosting) and self._fits(hosting)):
            in_vain |= {switch.name for switch in self.flags.switches if switch.on_host}
        for leaner in self.flags.leaner(variant, self.gpu):
            new = {switch.name for switch in leaner.switches if switch not in variant.switches}
            if not new & in_vain or leaner.recompute != variant.recompute:
                self._follow(leaner)

    def _plain(self, variant: Candidate) -> Candidate:
        """Return the layout of which a candidate is a variant."""
        return replace(variant, recompute=self.flags.modes[0], switches=())

    def _cases(self, variant: Candidate) -> Sequence[Case]:
        """Return the cases of a variant, whose configuration is not checked."""
        config = self._complete(self._plain(variant))
        assert config is not None
        cases = self.flags.cost.cases(config.with_values(self.flags.variant_values(variant)))
        sharing = variant.switches
        if SHARDED_WEIGHTS not in sharing:
            # Only the weights that are gathered at a time depend on whether passes run in pairs.
            sharing = tuple(switch for switch in sharing if switch.saves)
        for case in cases:
            weights = variant.tp, variant.ep, variant.pp, case.name
            case.network.share(self._networks.setdefault(weights, case.network), states=False)
            first = self._networks.setdefault((*weights, sharing), case.network)
            case.network.share(first, states=True)
        return cases

    def _fits(self, variant: Candidate) -> bool:
        """Return whether a variant fits the GPU's memory."""
        changing = tuple(switch for switch in variant.switches if switch.changes_memory)
        alike = replace(variant, switches=changing)
        if alike not in self._needed:
            needed = self._least_bytes(alike)
            if needed <= self.gpu.memory:
                needed = self._least_needed(alike)
            self._needed[alike] = needed
            self._note(needed, alike)
        return self._needed[alike] <= self.gpu.memory

    def _least_bytes(self, variant: Candidate) -> float:
        """Return a lower bound of the bytes that a variant needs; no configuration is needed."""
        return self.state.bytes_of(variant) + self.least.activations(variant)

    def _note(self, needed: float, layout: Candidate) -> None:
        """Remember a layout if it needs fewer bytes than all before."""
        if self.closest is None or needed < self.closest[0]:
            self.closest = needed, layout

    def _least_needed(self, variant: Candidate) -> float:
        """Return the bytes that the fullest rank of a variant needs.

        If that is too much, return the bytes of the first rank that does not fit.
        """
        worst = 0.0
        for case in self._cases(variant):
            network = case.network
            ranks = []
            for rank in rank_memories(network, messages=False):
                needed = rank.total + sum(reserve_on(self.gpu, network.sizes, 0).values())
                if needed > self.gpu.memory:
                    return needed
                ranks.append(rank)
            worst = max(worst, needed_on(self.gpu, network, ranks))
        return worst

    def _simulate(self, variant: Candidate) -> None:
        """Check the rules of all flags of a variant, and simulate its schedule."""
        try:
            config = self.complete(self.flags.values(variant))
        except ConfigError:
            return
        network, ranks = worst_case(self.flags.cost.cases(config))
        if needed_on(self.gpu, network, ranks) > self.gpu.memory:
            self._follow_leaner(variant)
            return
        cost = estimate(network, self.gpu, ranks=ranks)
        words = tuple(tuple(entry) for entry in self.flags.words(variant))
        self._then(cost.seconds, variant, partial(Layout, variant, words, cost))


class LeastCosts:
    """Computes lower bounds of a step's time and memory, without the configuration of a layout.

    The passes through the stages of a pipeline together take as long as those through the whole
    model on as many ranks as a stage has. A rank has at least its share of them to do. It waits for
    the first micro-batch to reach it and, after its last pass, for that to reach the first rank.
    """

    def __init__(self, flags: LayoutFlags, world_size: int, gpu: Gpu) -> None:
        self.flags = flags
        self.world_size = world_size
        self.gpu = gpu
        self._found: dict[Candidate, tuple[Whole, ...]] = {}
        self._networks: dict[tuple[int, int, int], Network] = {}

    def of_layout(self, layout: Candidate) -> float:
        """Return a bound for all variants of a layout, of which leaner ones are slower."""
        return min(map(self.of_variant, self.flags.variants(layout, self.gpu)))

    def of_variant(self, variant: Candidate) -> float:
        """Return a bound for a layout with its recomputation and its switches."""
        share = host_fraction(variant) / variant.pp
        return min(x.seconds(variant) + share * x.hosted for x in self._wholes(variant))

    def activations(self, variant: Candidate) -> float:
        """Return a bound of the bytes that the fullest rank keeps for backward passes.

        It is the mean over pipeline ranks. It is 0 for layers that are not cut evenly, whose
        stages are not known before the run is configured, and where layers keep unlike bytes by
        their place in a stage.
        """
        base = self.flags.base
        values = self.flags.variant_values(variant)
        moved = values.get("cpu_offloading_num_layers") or base.offload.cpu_offloading_num_layers
        partly = base.model.num_microbatches_with_partial_activation_checkpoints
        if base.model.blocks_dealt_by_cost or moved or partly is not None:
            return 0.0
        total = base.model.num_layers or 0
        pairs = bool(values.get("overlap_moe_expert_parallel_comm"))
        moving = next((x for x in variant.switches if x.on_host and x.saves == "activations"), None)
        sizes = variant.pp, variant.chunks, variant.stages
        return max(
            whole.kept(moving) * held_layers(*sizes, total, whole.num_microbatches, pairs=pairs)
            for whole in self._wholes(variant)
        )

    def _wholes(self, layout: Candidate) -> tuple[Whole, ...]:
        """Return the passes through the whole model, for each kind of batch."""
        stage_ranks = self.world_size // layout.pp
        # Copies to the host can only make passes longer.
        switches = tuple(switch for switch in layout.switches if not switch.on_host)
        one = replace(layout, pp=1, chunks=1, stages=None, switches=switches)
        key = replace(one, pp=stage_ranks)
        if key not in self._found:
            base = self.flags.base.with_values(
                {
                    **self.flags.values(one),
                    "world_size": stage_ranks,
                    "data_parallel_size": stage_ranks // (layout.tp * layout.cp),
                }
            )
            networks = [case.network for case in self.flags.cost.cases(base)]
            for index, network in enumerate(networks):
                first = self._networks.setdefault((layout.tp, layout.ep, index), network)
                network.share(first, states=False)
            self._found[key] = tuple(Whole.of(network, self.gpu) for network in networks)
        return self._found[key]


@dataclass(frozen=True)
class Whole:
    """The time of a micro-batch's passes through a whole model.

    Attributes:
        passes: seconds of forward and backward pass.
        hidden: the most seconds that pairs of passes can hide.
        num_microbatches: micro-batches of a step.
        replicas: seconds of a step in which replicas reduce gradients, without padding.
        network: the cost formulas of the model on these ranks.
        hosted: the fewest seconds in which the host would update all weights.
    """

    passes: float
    hidden: float
    num_microbatches: int
    replicas: float
    network: Network
    hosted: float

    @classmethod
    def of(cls, network: Network, gpu: Gpu) -> Whole:
        """Return the times of a model whose ``network`` has one stage."""
        (stage,) = network.stages()
        clock = Clock(network, Rates(gpu, DEFAULT))
        hidden = 0.0
        if network.schedule.pairs:
            hidden = clock.hideable_exchange(network.traffic(stage)) * DEFAULT.hidden
        return cls(
            clock.durations(stage).passes,
            hidden,
            network.num_microbatches,
            clock.replicas(gradient_volume(network, [stage])),
            network,
            max(update_parts(network, hosted_share(network, stage))),
        )

    def kept(self, moving: Switch | None) -> int:
        """Return the fewest bytes that a layer keeps of a micro-batch for its backward pass.

        ``moving`` is the switch that moves others to the host; None without.
        """
        if moving not in self._kept:
            network = self.network
            if moving is not None:
                network = network.with_config(network.config.with_values(moving.values))
            (stage,) = network.stages()
            layers = [stage.only(layer) for layer, _ in network.unlike(stage.layers)]
            self._kept[moving] = min(network.activations(layer).kept for layer in layers)
        return self._kept[moving]

    @cached_property
    def _kept(self) -> dict[Switch | None, int]:
        return {}

    def seconds(self, layout: Candidate) -> float:
        """Return a lower bound of a step's time in a layout."""
        busy = self.num_microbatches * (self.passes - self.hidden) + self.replicas
        return busy / layout.pp + (layout.pp - 1) * self.passes / (layout.pp * layout.chunks)


def hosted_share(network: Network, stage: Stage) -> State:
    """Return the state of a rank's share of a stage's weights if the host keeps all of it."""
    x = network.sizes
    flags = network.config.optimizer
    elements = network.elements(stage)
    count = elements.trained
    if flags.use_distributed_optimizer:
        dense = (count - elements.expert) // (x.dp * x.cp)
        count = dense + elements.expert // x.expert_dp
    return State(hosted=count, host_optimizer=optimizer_bytes(flags, count, 0, 0, half=x.half))


@lru_cache(maxsize=1 << 12)
def held_layers(
    size: int,
    chunks: int,
    stages: str | None,
    num_layers: int,
    num_microbatches: int,
    *,
    pairs: bool,
) -> float:
    """Return a lower bound of how many layers' activations a pipeline rank holds at its peak.

    It is the mean over the ranks. A layer counts once for each micro-batch whose activations it
    holds after the warm-up of 1F1B or interleaved 1F1B; see `schedules.orders`.

    Args:
        size: number of pipeline ranks, each with ``chunks`` stages.
        stages: the value of ``--pipeline-model-parallel-layout``; None for equal stages.
    """
    of_stage = [num_layers / (size * chunks)] * (size * chunks)
    if stages is not None:
        of_stage = [float(stage.count("t")) for stage in stages_of(stages)]
    group = num_microbatches if num_microbatches < 2 * size else size
    held = 0.0
    for rank in range(size):
        of_chunk = of_stage[rank::size]
        if chunks == 1:
            passes = (2 if pairs else 1) * (size - rank - 1)
        else:
            passes = 2 * (size - rank - 1) + (chunks - 1) * group
        passes = min(passes + 1 + pairs, chunks * num_microbatches)
        for chunk in [*range(chunks), 0]:
            run = min(passes, num_microbatches if chunks == 1 else group)
            held += run * of_chunk[chunk]
            passes -= run
    return held / size


def host_fraction(layout: Candidate) -> float:
    """Return the share of the optimizer's state that the switches of a layout put on the host."""
    shares = [x.values.get("optimizer_offload_fraction", 0.0) for x in layout.switches]
    return max(shares, default=0.0)


class _Refusals:
    """Counts the layouts that cannot run, by the flag at fault and the flags of its rule."""

    def __init__(self) -> None:
        self._found: dict[object, tuple[str, int]] = {}

    def add(self, error: str) -> None:
        """Count one more layout that cannot run because of ``error``."""
        key = (error.subject, error.flags) if isinstance(error, FlagError) else error
        text, count = self._found.get(key, (error, 0))
        self._found[key] = text, count + 1

    def counted(self) -> tuple[tuple[str, int], ...]:
        """Return an error of each kind and the number of layouts, the most frequent first."""
        return tuple(sorted(self._found.values(), key=lambda entry: -entry[1]))


@dataclass(frozen=True)
class StateBound:
    """A lower bound of the bytes that the fullest rank of a layout keeps between steps.

    It is quick to compute, and tells most layouts that do not fit from those that may.

    Attributes:
        parameters, gradients: bytes of the whole model's weights, and of their gradients.
        routed: share of the routed experts in them.
        optimizer: bytes of optimizer and averages, which may be spread evenly over all ranks.
        shards_gradients, shards_weights: whether all layouts spread these, too.
    """

    parameters: float
    gradients: float
    routed: float
    optimizer: float
    world_size: int
    shards_gradients: bool
    shards_weights: bool

    @classmethod
    def of(cls, network: Network, world_size: int) -> StateBound:
        """Return the bound of a model, whose ``network`` is that of one rank."""
        weights = [network.weights(stage) for stage in network.stages()]
        listed = [weight for stage in weights for weight in stage]
        if any(weight.frozen for weight in listed):
            return cls(0.0, 0.0, 0.0, 0.0, world_size, False, False)
        state = rank_state(network.config, network.sizes, 0, weights)
        routed = sum(weight.numel for weight in listed if ROUTED in weight.name)
        flags = network.config.optimizer
        return cls(
            state.parameters,
            state.gradients,
            routed / sum(weight.numel for weight in listed),
            state.optimizer + state.average,
            world_size,
            flags.shards_gradients,
            flags.shards_weights,
        )

    def bytes_of(self, candidate: Candidate) -> float:
        """Return the bound of a layout."""
        cut = 0.0
        spread = self.optimizer
        if self.shards_weights or SHARDED_WEIGHTS in candidate.switches:
            spread += self.parameters
        else:
            cut += self.parameters
        if not self.shards_gradients and SHARDED_GRADIENTS not in candidate.switches:
            cut += self.gradients
        spread -= self.optimizer * host_fraction(candidate)
        cut *= (1 - self.routed) / candidate.tp + self.routed / candidate.ep
        return cut / candidate.pp + spread / self.world_size
