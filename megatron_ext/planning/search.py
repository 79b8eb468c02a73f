"""The search for the fastest layouts of a run that fit into a number of GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import Gpu
from megatron_ext.errors import ConfigError, FlagError
from megatron_ext.planning.layouts import Candidate, LayoutFlags, candidates, refuse_misfits
from megatron_ext.planning.memory import RankMemory, fullest, memory
from megatron_ext.planning.network import Network
from megatron_ext.planning.state import rank_state
from megatron_ext.planning.step_time import Estimate, estimate, least_seconds, needed_on
from megatron_ext.planning.task_cost import TaskCost
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
        variants: number of layouts with the same parallel sizes that fit; this one is the fastest.
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
        tried: number of layouts that were priced, whether or not they fit.
        fitting: number of layouts that fit, each with the first mode that makes it fit.
        closest: without a layout that fits, the bytes of the one that needs least, and this layout.
        refused: sentences on layouts that cannot run, each with their number, the most frequent
            first.
    """

    best: list[Layout]
    tried: int
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

    Each layout uses the first mode of recomputation of `TaskCost.modes` that fits, the distributed
    optimizer unless the optimizer is SGD, and sequence parallelism with tensor parallelism. Other
    flags remain.

    Args:
        base: the configuration without flags of a layout, for one rank.
        flags: returns the flags of a layout.
        complete: takes the values that a layout sets and returns the configuration of its run.
        count: the largest number of layouts to return.

    Raises:
        ConfigError: no layout can run, whatever the memory; the message has up to 5 reasons.
    """
    found: list[_Fitting] = []
    refusals = _Refusals()
    tried = 0
    closest: tuple[float, Candidate] | None = None
    (first, *_) = flags.cost.cases(base)
    bound = StateBound.of(first.network, world_size)
    every = candidates(base, world_size, gpu, flags.cost, first.network)
    for _, modes in groupby(every, key=lambda candidate: replace(candidate, recompute="")):
        layout = list(modes)
        try:
            refuse_misfits(base, layout[0], world_size)
            needed = bound.bytes_of(layout[0])
            least = layout[0]
            if needed <= gpu.memory:
                config = complete(flags.values(layout[0]))
                fitting, needed, least = _first_that_fits(layout, flags.cost, config, gpu)
                found += fitting
        except ConfigError as error:
            refusals.add(error.messages[0])
            continue
        tried += 1
        if closest is None or needed < closest[0]:
            closest = needed, least
    if not tried:
        none = f"No layout of {world_size} ranks can run this model."
        raise ConfigError([none, *[text for text, _ in refusals.counted()[:5]]])
    best = _fastest(found, flags, complete, gpu, count)
    return SearchResult(best, tried, len(found), None if best else closest, refusals.counted())


@dataclass(frozen=True)
class _Fitting:
    """A layout that fits.

    Attributes:
        seconds: the least time that a step can take, if no rank ever waits for another.
    """

    candidate: Candidate
    network: Network
    ranks: list[RankMemory]
    seconds: float


def _first_that_fits(
    modes: Sequence[Candidate], cost: TaskCost, config: RunConfig, gpu: Gpu
) -> tuple[list[_Fitting], int, Candidate]:
    """Return the first mode of recomputation with which a layout fits, in a list.

    The list is empty if none fits. Return the bytes too that the mode needs which needs least, and
    this mode.

    Args:
        modes: the layout with each mode.
        config: the configuration of the first mode.
    """
    cases = cost.cases(config)
    known: list[list[RankMemory]] = [memory(case.network) for case in cases]
    closest: tuple[int, Candidate] | None = None
    for candidate in modes:
        if candidate is not modes[0]:
            # Recomputation changes only activations.
            changed = cost.recompute(config, candidate.recompute)
            cases = [
                replace(case, network=case.network.with_recomputation(changed)) for case in cases
            ]
            known = [memory(case.network, kept) for case, kept in zip(cases, known, strict=True)]
        network, ranks = max(
            ((case.network, ranks) for case, ranks in zip(cases, known, strict=True)),
            key=lambda entry: fullest(entry[1]).total,
        )
        needed = needed_on(gpu, network, ranks)
        if closest is None or needed < closest[0]:
            closest = needed, candidate
        if needed <= gpu.memory:
            seconds = least_seconds(network, gpu, ranks)
            return [_Fitting(candidate, network, ranks, seconds)], needed, candidate
    assert closest is not None
    return [], *closest


def _fastest(
    found: Sequence[_Fitting], flags: LayoutFlags, complete: Complete, gpu: Gpu, count: int
) -> list[Layout]:
    """Return the fastest layout for each choice of parallel sizes: the ``count`` fastest of them.

    The pipeline schedule, whose simulation takes long, is simulated only for layouts that could be
    among them by their least times.
    """
    variants = Counter(layout.candidate.sizes for layout in found)
    best: dict[tuple[int, ...], Layout] = {}
    for layout in sorted(found, key=lambda layout: layout.seconds):
        listed = sorted(x.cost.seconds for x in best.values())
        if len(listed) >= count and layout.seconds > listed[count - 1]:
            break
        sizes = layout.candidate.sizes
        if sizes in best and layout.seconds > best[sizes].cost.seconds:
            continue
        try:
            # Only the first mode of recomputation has been checked.
            complete(flags.values(layout.candidate))
        except ConfigError:
            continue
        cost = estimate(layout.network, gpu, ranks=layout.ranks)
        if sizes not in best or cost.seconds < best[sizes].cost.seconds:
            words = tuple(tuple(entry) for entry in flags.words(layout.candidate))
            best[sizes] = Layout(layout.candidate, words, cost, variants[sizes])
    return sorted(best.values(), key=lambda layout: layout.cost.seconds)[:count]


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
        dense, routed: bytes of the weights and gradients of the whole model without its routed
            experts, and of these.
        shared: bytes of optimizer, averages and sharded weights, which may be spread evenly over
            all ranks.
    """

    dense: float
    routed: float
    shared: float

    @classmethod
    def of(cls, network: Network, world_size: int) -> StateBound:
        """Return the bound of a model, whose ``network`` is that of one rank."""
        weights = [network.weights(stage) for stage in network.stages()]
        listed = [weight for stage in weights for weight in stage]
        if any(weight.frozen for weight in listed):
            return cls(0.0, 0.0, 0.0)
        state = rank_state(network.config, network.sizes, 0, weights)
        routed = sum(weight.numel for weight in listed if ROUTED in weight.name)
        share = routed / sum(weight.numel for weight in listed)
        flags = network.config.optimizer
        spread = state.optimizer + state.average
        unsharded = 0 if flags.shards_gradients else state.gradients
        if flags.shards_weights:
            spread += state.parameters
        else:
            unsharded += state.parameters
        return cls(unsharded * (1 - share), unsharded * share, spread / world_size)

    def bytes_of(self, candidate: Candidate) -> float:
        """Return the bound of a layout."""
        cut = self.dense / candidate.tp + self.routed / candidate.ep
        return cut / candidate.pp + self.shared
