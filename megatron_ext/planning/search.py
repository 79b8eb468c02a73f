"""The search for the fastest layouts of a run that fit into a number of GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import Gpu
from megatron_ext.errors import ConfigError, FlagError
from megatron_ext.planning.layouts import Candidate, LayoutFlags, candidates, refuse_misfits
from megatron_ext.planning.memory import worst_case
from megatron_ext.planning.network import Network
from megatron_ext.planning.state import ROUTED, rank_state
from megatron_ext.planning.step_time import Estimate, estimate, needed_on

Parse = Callable[[Sequence[str]], RunConfig]
"""Returns the checked configuration of a command line; raises a ConfigError if it has errors."""


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
    parse: Parse,
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
        parse: takes the flags of a layout and returns the configuration of its run.
        count: the largest number of layouts to return.

    Raises:
        ConfigError: no layout can run, whatever the memory; the message has up to 5 reasons.
    """
    found: list[Layout] = []
    refusals = _Refusals()
    runs = set[Candidate]()
    settled = set[Candidate]()
    closest: tuple[float, Candidate] | None = None
    (first, *_) = flags.cost.cases(base)
    bound = StateBound.of(first.network, world_size)
    for candidate in candidates(base, world_size, gpu, flags.cost, first.network):
        layout = replace(candidate, recompute="")
        if layout in settled:
            continue
        words = flags.words(candidate)
        try:
            refuse_misfits(base, candidate, world_size)
            needed = bound.bytes_of(candidate)
            if needed <= gpu.memory:
                cases = flags.cost.cases(parse([word for entry in words for word in entry]))
                network, ranks = worst_case(cases)
                needed = needed_on(gpu, network, ranks)
            else:
                # Recomputation does not change what is kept between steps.
                settled.add(layout)
        except ConfigError as error:
            refusals.add(error.messages[0])
            settled.add(layout)
            continue
        runs.add(layout)
        if closest is None or needed < closest[0]:
            closest = needed, candidate
        if needed <= gpu.memory:
            settled.add(layout)
            entries = tuple(tuple(entry) for entry in words)
            found.append(Layout(candidate, entries, estimate(network, gpu, ranks=ranks)))
    if not runs:
        none = f"No layout of {world_size} ranks can run this model."
        raise ConfigError([none, *[text for text, _ in refusals.counted()[:5]]])
    found.sort(key=lambda layout: layout.cost.seconds)
    best = _fastest_of_sizes(found)[:count]
    return SearchResult(best, len(runs), len(found), None if best else closest, refusals.counted())


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
        shared: bytes of optimizer and averages, which may be spread evenly over all ranks.
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
        unsharded = state.parameters + (
            0 if network.config.optimizer.shards_gradients else state.gradients
        )
        return cls(
            unsharded * (1 - share),
            unsharded * share,
            (state.optimizer + state.average) / world_size,
        )

    def bytes_of(self, candidate: Candidate) -> float:
        """Return the bound of a layout."""
        cut = self.dense / candidate.tp + self.routed / candidate.ep
        return cut / candidate.pp + self.shared


def _fastest_of_sizes(found: Sequence[Layout]) -> list[Layout]:
    """Return the first of the layouts for each choice of parallel sizes, with their number."""
    counts = Counter(layout.candidate.sizes for layout in found)
    first: dict[tuple[int, ...], Layout] = {}
    for layout in found:
        first.setdefault(layout.candidate.sizes, layout)
    return [replace(x, variants=counts[x.candidate.sizes]) for x in first.values()]
