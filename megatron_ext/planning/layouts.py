"""The layouts that a search tries, and the flags of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, groupby, product
from typing import Any

from megatron_ext.config import sections
from megatron_ext.config.files import NO_LAYOUT
from megatron_ext.config.flag_line import words_of
from megatron_ext.config.flags import Flag, flags_of
from megatron_ext.config.inapplicable import answer_to, megatron_flags
from megatron_ext.config.parser import read_words
from megatron_ext.config.rules.offload import offload_errors
from megatron_ext.config.rules.parallel import share_errors
from megatron_ext.config.run import Program, RunConfig
from megatron_ext.device.gpus import Gpu
from megatron_ext.errors import ConfigError, FlagError
from megatron_ext.planning.network import Network
from megatron_ext.planning.switch import Switch
from megatron_ext.planning.task_cost import TaskCost

MOST_CHUNKS = 8
"""The largest number of virtual chunks on a pipeline rank that a search tries."""

LEAST_SLICE = 512
"""The fewest tokens of a sequence that a search gives to a context-parallel rank beyond a node."""

PARALLEL = (
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "expert_model_parallel_size expert_tensor_parallel_size num_layers_per_virtual_pipeline_stage "
    "num_virtual_stages_per_pipeline_rank pipeline_schedule pipeline_model_parallel_layout "
    "microbatch_group_size_per_vp_stage sequence_parallel decoder_first_pipeline_num_layers "
    "decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split distribute_saved_activations "
    "overlap_moe_expert_parallel_comm delay_wgrad_compute"
).split()
"""Fields whose flags a search decides itself, beside those of recomputation."""

SIZES = PARALLEL[:4]
"""The fields of the parallel sizes that a layout's flags always give."""

START = ("nproc_per_node", "dry_run", "dry_run_nodes", "dry_run_gpu")
"""Fields whose flags say how a run is started, and not what it computes."""


def without(words: Sequence[str], program: Program, dropped: Collection[str]) -> list[str]:
    """Return a command line without the flags of the fields ``dropped``, and without ``--layout``.

    Old spellings of these flags are left out too.
    """
    table = sections.spellings(sections.all_flags(program))
    renamed = megatron_flags()

    def drops(word: str) -> bool:
        name = sections.canonical(word.partition("=")[0])
        entry = answer_to(name, renamed)
        now = entry.instead.split() if entry is not None and entry.instead else [name]
        if name == "--layout":
            return True
        return any(table[each][0].field in dropped for each in now if each in table)

    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = drops(word)
        if not dropping:
            kept.append(word)
    return kept


def no_layout(words: Sequence[str], program: Program) -> list[str]:
    """Return the flags that choose none of the layouts of a run's ``--config`` files.

    ``words`` are the run's flags; without layouts in its files, it needs no flags.
    """
    files = read_words(words, program).files
    return ["--layout", NO_LAYOUT] if files is not None and files.layouts else []


def one_rank(program: Program) -> list[str]:
    """Return the flags of a run without parallelism; they replace sizes of a ``--config`` file."""
    flags = {flag.field: flag for flag in sections.all_flags(program)}
    return [word for name in SIZES if name in flags for word in words_of(flags[name], 1)]


SHARDED_GRADIENTS = Switch(
    "sharded gradients",
    {"data_parallel_sharding_strategy": "optim_grads"},
    applies=lambda layout, _: True,
    saves="state",
)
"""Each replica keeps a share of the summed gradients."""

SHARDED_WEIGHTS = Switch(
    "sharded weights",
    {"data_parallel_sharding_strategy": "optim_grads_params"},
    applies=lambda layout, _: SHARDED_GRADIENTS in layout.switches,
    saves="state",
)
"""Each replica keeps a share of the weights, too, and gathers a layer's before it runs."""


HALF_ON_HOST = Switch(
    "half host state",
    {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "overlap_cpu_optimizer_d2h_h2d": True,
    },
    applies=lambda layout, _: True,
    saves="state",
    on_host=True,
)
"""The host keeps half of the optimizer's state, and updates the weights that it belongs to."""

ALL_ON_HOST = Switch(
    "host state",
    {**HALF_ON_HOST.values, "optimizer_offload_fraction": 1.0},
    applies=lambda layout, _: HALF_ON_HOST in layout.switches,
    saves="state",
    on_host=True,
)
"""The host keeps the other half of the state, too."""


@dataclass(frozen=True)
class Candidate:
    """A layout to try: parallel sizes, virtual chunks, micro-batch size and recomputation mode.

    Attributes:
        chunks: virtual chunks of a pipeline rank.
        recompute: one of `TaskCost.modes`.
        stages: the value of ``--pipeline-model-parallel-layout``; None to cut the layers evenly.
        switches: what the layout uses besides.
    """

    tp: int
    pp: int
    cp: int
    ep: int
    chunks: int
    micro_batch: int
    recompute: str
    stages: str | None = None
    switches: tuple[Switch, ...] = ()

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.chunks, "cp": self.cp, "ep": self.ep}
        return "".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "dp"

    @property
    def uses(self) -> list[str]:
        """Return the names of the switches, without those whose values a later one replaces."""
        later = [set[str]().union(*(x.values for x in self.switches[i + 1 :]))
                 for i in range(len(self.switches))]  # fmt: skip
        pairs = zip(self.switches, later, strict=True)
        return [switch.name for switch, fields in pairs if not switch.values.keys() <= fields]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the parallel sizes, without which two layouts are variants of each other."""
        return self.tp, self.pp, self.cp, self.ep


@dataclass(frozen=True)
class LayoutFlags:
    """The flags with which a search describes layouts of one run.

    Attributes:
        program: the program that the flags are for.
        cost: the cost of the run's task.
        base: the configuration without flags of a layout, for one rank.
    """

    program: Program
    cost: TaskCost
    base: RunConfig

    @cached_property
    def _flags(self) -> dict[str, Flag]:
        return {flag.field: flag for flag in sections.all_flags(self.program)}

    @cached_property
    def _recomputation(self) -> dict[str, dict[str, Any]]:
        return {mode: recomputation(self.base, self.cost, mode) for mode in self.cost.modes}

    @cached_property
    def _shards(self) -> bool:
        """Return whether the distributed optimizer can shard the run's optimizer."""
        optimizer = self.base.optimizer
        if optimizer.optimizer == "custom":
            from megatron_ext.optim.custom import findings

            return findings(optimizer).is_elementwise
        return optimizer.optimizer != "sgd"

    def values(self, candidate: Candidate) -> dict[str, Any]:
        """Return the values of the fields that a layout sets."""
        values: dict[str, Any] = {
            "tensor_model_parallel_size": candidate.tp,
            "pipeline_model_parallel_size": candidate.pp,
            "context_parallel_size": candidate.cp,
            "sequence_parallel": candidate.tp > 1,
            "micro_batch_size": candidate.micro_batch,
            **self.variant_values(candidate),
        }
        if self.cost.num_experts(self.base):
            values["expert_model_parallel_size"] = candidate.ep
            values["expert_tensor_parallel_size"] = 1
        if candidate.stages is not None:
            values["pipeline_model_parallel_layout"] = candidate.stages
        elif candidate.chunks > 1:
            values["num_virtual_stages_per_pipeline_rank"] = candidate.chunks
        if self._shards:
            values["use_distributed_optimizer"] = True
        return values

    def variant_values(self, candidate: Candidate) -> dict[str, Any]:
        """Return the values that differ between the variants of a layout."""
        values = dict(self._recomputation[candidate.recompute])
        for switch in candidate.switches:
            values.update(switch.values)
        return values

    def words(self, candidate: Candidate) -> list[list[str]]:
        """Return the words of each flag that a layout needs."""
        values = self.values(candidate)
        entries = [words_of(self._flags[name], value) for name, value in values.items()]
        return [words for words in entries if words]

    @cached_property
    def switches(self) -> tuple[Switch, ...]:
        """Return what a search tries with and without; what the run uses anyway is left out."""
        sharding = [SHARDED_GRADIENTS, SHARDED_WEIGHTS] if self._shards else []
        moves = self.base.offload.optimizer_cpu_offload
        hosting = [] if moves else [HALF_ON_HOST, ALL_ON_HOST]
        tried = [*sharding, *hosting, *self.cost.switches(self.base)]
        runs = [self.base.with_values(x.values) for x in tried]
        # Rules that ask for another layout than that of one rank are checked for each layout.
        return tuple(
            switch
            for switch, run in zip(tried, runs, strict=True)
            if run != self.base and not any(offload_errors(run))
        )

    def variants(self, layout: Candidate, gpu: Gpu) -> Iterator[Candidate]:
        """Yield a layout with each set of those `switches` that save no memory."""
        usable = [x for x in self.switches if not x.saves and x.applies(layout, gpu)]
        for count in range(len(usable) + 1):
            for chosen in combinations(usable, count):
                yield replace(layout, switches=chosen)

    def leaner(self, layout: Candidate, gpu: Gpu) -> Iterator[Candidate]:
        """Yield the variants to try where one does not fit: they save memory by one more way.

        A way is the next mode of recomputation, or a switch that saves memory.
        """
        after = self.modes.index(layout.recompute) + 1
        saving = [switch for switch in layout.switches if switch.saves]
        if after < len(self.modes):
            changed = replace(layout, recompute=self.modes[after], switches=())
            for variant in self.variants(changed, gpu):
                leaner = variant
                for switch in saving:
                    if switch.applies(leaner, gpu):
                        leaner = self.with_switch(leaner, switch)
                yield leaner
        for switch in self.switches:
            if switch.saves and switch not in saving and switch.applies(layout, gpu):
                yield self.with_switch(layout, switch)

    def leanest(self, layout: Candidate, gpu: Gpu) -> Candidate:
        """Return the variant of a layout that needs the least memory."""
        return self.leanest_state(replace(layout, recompute=self.modes[-1], switches=()), gpu)

    def leanest_state(self, layout: Candidate, gpu: Gpu) -> Candidate:
        """Return a layout with all switches that save memory of the state between steps."""
        for switch in self.switches:
            new = switch.saves == "state" and switch not in layout.switches
            if new and switch.applies(layout, gpu):
                layout = self.with_switch(layout, switch)
        return layout

    def hosting(self, layout: Candidate, gpu: Gpu) -> Candidate:
        """Return a layout with all switches that move something to host memory."""
        for switch in self.switches:
            if switch.on_host and switch not in layout.switches and switch.applies(layout, gpu):
                layout = self.with_switch(layout, switch)
        return layout

    def with_switch(self, layout: Candidate, switch: Switch) -> Candidate:
        """Return a layout with one more switch; a later one may change what an earlier one sets."""
        used = {switch, *layout.switches}
        return replace(layout, switches=tuple(x for x in self.switches if x in used))

    @cached_property
    def modes(self) -> tuple[str, ...]:
        """Return the modes of recomputation that the run can use."""
        return self.cost.modes_with(self.base.cuda_graphs)


def recomputation(config: RunConfig, cost: TaskCost, mode: str) -> dict[str, Any]:
    """Return the values of the flags that differ between modes of recomputation, for ``mode``."""
    runs = {name: cost.recompute(config, name) for name in cost.modes}
    chosen = runs[mode].by_name()
    return {
        flag.field: getattr(section, flag.field)
        for name, section in chosen.items()
        for flag in flags_of(name, type(section))  # type: ignore[arg-type]
        if any(
            getattr(run.by_name()[name], flag.field) != getattr(section, flag.field)
            for run in runs.values()
        )
    }


def decided_fields(config: RunConfig, cost: TaskCost) -> set[str]:
    """Return the fields whose flags a search decides: of the layout, and of recomputation."""
    return {*PARALLEL, *START, *recomputation(config, cost, cost.modes[0])}


def fixed_errors(
    config: RunConfig, task_defaults: Mapping[str, Any], decided: Collection[str]
) -> list[FlagError]:
    """Return an error for each value that a search decides and that a ``--config`` file fixes.

    No flag can take these values back. Sizes are no error, since the flags of a layout replace
    them.

    Args:
        config: the configuration without flags of a layout.
        task_defaults: the defaults of the run's task, by field.
        decided: the fields that the search decides.
    """
    replaced = {*SIZES, "expert_tensor_parallel_size", "sequence_parallel", *START}
    usual = {**task_defaults, "pipeline_schedule": "no-pipelining"}
    return [
        FlagError(
            f"`{flag.field}` in a `--config` file",
            value,
            "fixes what `--search` tries in several ways",
            "remove it from the file, or put it under `layouts`",
        )
        for name, section in config.by_name().items()
        for flag in flags_of(name, type(section))  # type: ignore[arg-type]
        if flag.field in decided and flag.field not in replaced
        if (value := getattr(section, flag.field)) != usual.get(flag.field, flag.default)
    ]


def candidates(
    config: RunConfig, world_size: int, gpu: Gpu, cost: TaskCost, network: Network | None = None
) -> Iterator[Candidate]:
    """Yield the layouts to try, each with the first mode of recomputation and without switches.

    Tensor parallelism stays within a node of ``gpu``, and so does context parallelism whose ranks
    would have fewer than `LEAST_SLICE` tokens of a sequence. Micro-batch sizes are the run's, its
    half, its quarter and so on, down to 1. Layers are cut evenly where that is possible; else, with
    the ``network`` of one rank, so that the slowest stage is as fast as can be.
    """
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    layers = config.model.num_layers or 1
    in_node = [size for size in sizes if size <= gpu.per_node]
    most_slices = max(gpu.per_node, (config.model.seq_length or 0) // LEAST_SLICE)
    slices = [size for size in sizes if size <= most_slices]
    cuts = [size for size in sizes if size <= layers]
    num_experts = cost.num_experts(config) or 1
    experts = [size for size in sizes if num_experts % size == 0]
    micro = config.training.micro_batch_size or 1
    batches = sorted({max(1, micro >> shift) for shift in range(micro.bit_length())})
    anyhow = config.model.blocks_dealt_by_cost
    for pp, chunks in product(cuts, range(1, MOST_CHUNKS + 1)):
        if chunks > 1 and pp == 1:
            continue
        stages = None
        if layers % (pp * chunks) and not anyhow:
            if network is None:
                continue
            stages = balanced(network, pp, chunks)
            if stages is None:
                continue
        for tp, cp, ep in product(in_node, slices, experts):
            if world_size % (tp * pp * cp) or world_size % (ep * pp):
                continue
            for batch in batches:
                yield Candidate(tp, pp, cp, ep, chunks, batch, cost.modes[0], stages)


def refuse_misfits(config: RunConfig, candidate: Candidate, world_size: int) -> None:
    """Raise a ConfigError if a size of a layout does not divide what it shares out.

    Most layouts that cannot run fail here, long before all rules have been checked.
    """
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=candidate.tp,
        context_parallel_size=candidate.cp,
        sequence_parallel=candidate.tp > 1,
    )
    # Only a fixed sequence limits the layout in this way.
    errors = [] if config.model.blocks_dealt_by_cost else list(share_errors(parallel, config.model))
    training = replace(config.training, micro_batch_size=candidate.micro_batch)
    replicas = world_size // (candidate.tp * candidate.pp * candidate.cp)
    errors += training.errors(replicas)
    if errors:
        raise ConfigError(errors)


def balanced(network: Network, pipeline_size: int, chunks: int) -> str | None:
    """Return a value of ``--pipeline-model-parallel-layout`` whose slowest stage is fastest.

    ``network`` is that of one rank. Return None if multi-token prediction would get a place where
    it cannot be.
    """
    parts = _parts(network)
    count = pipeline_size * chunks
    if len(parts) < count:
        return None
    low = max(seconds for _, seconds in parts)
    high = sum(seconds for _, seconds in parts)
    for _ in range(30):
        middle = (low + high) / 2
        fits = len(_dealt(parts, count, middle)) == count
        low, high = (low, middle) if fits else (middle, high)
    stages = ["".join(letters) for letters in _dealt(parts, count, high)]
    depths = [index for index, stage in enumerate(stages) if "m" in stage]
    if depths and (depths[0] % pipeline_size == 0 or depths[0] < count - pipeline_size):
        return None
    return _spelled(stages)


def _parts(network: Network) -> list[tuple[str, float]]:
    """Return the letters of each part of a model that no stage can cut, and its operations."""
    (whole,) = network.stages()
    bare = whole.only()
    parts = [("t", network.flops(whole.only(x)).forward) for x in whole.layers]
    if whole.depths:
        depths = network.flops(replace(bare, depths=whole.depths)).forward
        parts.append(("m" * whole.depths, depths))
    return [("E", 0.0), *parts, ("L", network.flops(replace(bare, head=True)).forward)]


def _dealt(parts: Sequence[tuple[str, float]], count: int, limit: float) -> list[list[str]]:
    """Deal parts to ``count`` stages, each of which takes at most ``limit`` in all.

    Each stage gets one part at least. The result has more stages if the limit is too low.
    """
    stages: list[list[str]] = [[]]
    taken = 0.0
    for index, (letters, seconds) in enumerate(parts):
        left = len(parts) - index
        must_open = left <= count - len(stages)
        if stages[-1] and (taken + seconds > limit or must_open):
            stages.append([])
            taken = 0.0
        stages[-1].append(letters)
        taken += seconds
    return stages


def _spelled(stages: Sequence[str]) -> str:
    """Return stages such as ["Ett", "tt", "tt", "L"] as a flag's value: "Et*2|(t*2|)*2,L"."""
    *before, last = [_short(stage) for stage in stages]
    text = ""
    for stage, same in groupby(before):
        times = len(list(same))
        text += f"{stage}|" if times == 1 else f"({stage}|)*{times},"
    return text + last


def _short(stage: str) -> str:
    runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
    return "".join(letter if times == 1 else f"{letter}*{times}," for letter, times in runs).rstrip(
        ","
    )


def size_fields(candidate: Candidate) -> Mapping[str, Any]:
    """Return the sizes of a layout by their names in JSON."""
    names = {
        "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size",
        "cp": "context_parallel_size", "ep": "expert_parallel_size",
        "chunks": "virtual_chunks", "micro_batch": "micro_batch_size",
        "recompute": "recomputation", "stages": "pipeline_layout",
    }  # fmt: skip
    sizes = {name: getattr(candidate, field) for field, name in names.items()}
    return {**sizes, "switches": candidate.uses}
