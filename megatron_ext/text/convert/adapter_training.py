"""Starts the adapters of a run from a folder of peft (``--adapter-path``).

The run's adapters have one rank and one scale. Where a file's adapters have lower ranks than
others, or leave out layers or projections that others have, the rest is filled up with zeros. It
stays zero, as in peft: where a row of A and a column of B are both zero, so are their gradients.
An expert's gate and up projections have one A here; adapters with an A for each become one of
twice the rank.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.checkpoint.adapter_files import AdapterFile, LowRank, bare, read_adapters
from megatron_ext.checkpoint.adapters import MARK
from megatron_ext.config.lora_targets import is_named, trains_whole
from megatron_ext.config.optimizer import WHOLE_PARTS, LoraConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError, FlagError
from megatron_ext.layers.initialization import Shard, shards_of
from megatron_ext.parallel.collectives import on_every_rank
from megatron_ext.text.config.hugging_face import HuggingFaceConfig
from megatron_ext.text.convert.adapters import ROUTED, TextAdapters, in_class
from megatron_ext.text.convert.table import Run, parse

FOLLOWING = (
    "lora_rank", "lora_alpha", "lora_rslora", "lora_separate_projections", "lora_target_modules",
    "lora_modules_to_save",
)  # fmt: skip
"""The flags of adapters that ``--adapter-path`` determines."""
_MLP = ("mlp.", "mlp.experts.", "mlp.shared_experts.")


@dataclass(frozen=True)
class _Place:
    """The place of a public layer: our layer, and which of the tensors that it joins.

    Attributes:
        pattern: matches the names of such layers.
        linear: name of our layer in checkpoints, without the number of its decoder layer.
        index: index of the public layer among those that ours joins.
    """

    pattern: re.Pattern[str]
    linear: str
    index: int


@dataclass(frozen=True)
class Given:
    """The adapters of a file, as those of our layers.

    Attributes:
        projections: by name of our layer, number of its decoder layer, and number of the expert
            (None elsewhere), the adapters of the tensors that it joins, by index.
        lora: the flags of adapters that follow.
        notes: sentences on what is not used.
    """

    file: AdapterFile
    projections: Mapping[tuple[str, int, int | None], Mapping[int, LowRank]]
    lora: LoraConfig
    notes: Sequence[str]


def with_adapters(config: RunConfig) -> RunConfig:
    """Return the configuration with the flags of adapters that ``--adapter-path`` determines."""
    theirs = _given(config).lora
    values = {name: getattr(theirs, name) for name in FOLLOWING}
    return dataclasses.replace(config, lora=dataclasses.replace(config.lora, **values))


def adapter_errors(given: RunConfig, run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each flag that contradicts ``--adapter-path``.

    ``given`` has the flags as given, ``run`` also values derived from them.
    """
    path = run.section(HuggingFaceConfig).adapter_path
    for name in FOLLOWING:
        value = getattr(given.lora, name)
        theirs = getattr(run.lora, name)
        if value in (getattr(LoraConfig(), name), theirs):
            continue
        shown = " ".join(value) if isinstance(value, list) else value
        wanted = " ".join(theirs) if isinstance(theirs, list) else theirs
        yield FlagError(
            f"--{name.replace('_', '-')}",
            None if value is True else shown,
            f"contradicts `--adapter-path` ({path}), whose adapters have {wanted}",
            "leave it out",
        )


def _given(config: RunConfig) -> Given:
    source = Path(config.section(HuggingFaceConfig).adapter_path or "")
    stamps: tuple[tuple[str, int], ...] = ()
    if source.exists():
        files = [source] if source.is_file() else [x for x in source.iterdir() if x.is_file()]
        stamps = tuple(sorted((x.name, x.stat().st_mtime_ns) for x in files))
    adapters = TextAdapters.of(config, source)
    key = f"{adapters.family.model_type} {adapters.gpt}"
    return _read(_Held(adapters, key), source, stamps)


class _Held:
    """The places of a model's adapters, equal for equal models."""

    def __init__(self, adapters: TextAdapters, key: str) -> None:
        self.adapters = adapters
        self._key = key

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other._key == self._key


@lru_cache(maxsize=1)
def _read(held: _Held, source: Path, _stamps: object) -> Given:
    """Read a file once, since flags are resolved several times."""
    return placed(held.adapters, read_adapters(source, takes_whole=True))


def _places(adapters: TextAdapters) -> Iterator[_Place]:
    """Yield the place of each layer, and each parameter of stacked experts, of the family."""
    for name, parts in adapters.table.layer.items():
        linear = name.removesuffix(".weight")
        if linear == name or not _LINEAR.search(linear):
            continue
        # The name of a tensor that stacks experts is that of their parameter, below.
        tensors = dict.fromkeys(part.tensor for part in parts if not part.stacked)
        for index, tensor in enumerate(tensors):
            layer = tensor.removesuffix(".weight")
            for text in dict.fromkeys((layer, in_class(layer))):
                yield _Place(_pattern(text), linear, index)
        if linear.startswith(ROUTED):
            yield _Place(_pattern(adapters.parameter(linear)), linear, -1)


_LINEAR = re.compile(r"\.(linear_\w+|\w+_proj)$")
"""The end of the name of a layer that may have an adapter."""


def _pattern(template: str) -> re.Pattern[str]:
    text = re.escape(bare(template))
    for number in ("layer", "mlp_layer"):
        text = text.replace(rf"\{{{number}\}}", rf"(?P<{number}>\d+)")
    return re.compile(text.replace(r"\{expert\}", r"(?P<expert>\d+)"))


def placed(adapters: TextAdapters, file: AdapterFile) -> Given:
    """Return the adapters of a file as those of our layers.

    Raises:
        CheckpointError: the model has no such layer, or no flags give such adapters.
    """
    places = list(_places(adapters))
    found: dict[tuple[str, int, int | None], dict[int, LowRank]] = {}
    for name, adapter in file.layers.items():
        matches = ((place, place.pattern.fullmatch(name)) for place in places)
        place, match = next(((p, m) for p, m in matches if m is not None), (None, None))
        if place is None or match is None:
            raise CheckpointError(
                f"{file.path} holds an adapter of `{name}`, which is none of the linear layers of "
                f"a model of `{adapters.family.model_type}` on which adapters are trained; give "
                "adapters of other layers, or merge it into the weights first."
            )
        layer = _layer_of(adapters, match.groupdict())
        if place.index < 0:
            count = adapters.gpt.moe.num_experts
            if adapter.experts != count:
                raise CheckpointError(
                    f"{file.path} holds an adapter of `{name}` for {adapter.experts} experts, but "
                    f"the model has {count}; give adapters of this model."
                )
            for number in range(adapter.experts):
                found[place.linear, layer, number] = {-1: adapter.of_expert(number)}
            continue
        expert = int(match["expert"]) if "expert" in match.re.groupindex else None
        found.setdefault((place.linear, layer, expert), {})[place.index] = adapter
    return Given(file, found, *_flags(adapters, file, found))


def _layer_of(adapters: TextAdapters, numbers: Mapping[str, str | None]) -> int:
    """Return the number of our decoder layer, given that of a mixer or an MLP in the files.

    Where these are layers of their own, ours has both (see `Table`).
    """
    (name,) = numbers.keys() & {"layer", "mlp_layer"}
    number = int(numbers[name] or 0)
    if not adapters.table.layers:
        return number
    pairs = adapters.table.layers
    return next((i for i, pair in enumerate(pairs) if pair[name == "mlp_layer"] == number), -1)


def _flags(
    adapters: TextAdapters,
    file: AdapterFile,
    found: Mapping[tuple[str, int, int | None], Mapping[int, LowRank]],
) -> tuple[LoraConfig, list[str]]:
    """Return the flags of adapters that follow from a file, and notes on what is not used."""
    ranks = [_rank(group, expert is not None) for (_, _, expert), group in found.items()]
    scales = {adapter.scale: name for name, adapter in file.layers.items()}
    if len(scales) > 1:
        (one, first), (two, second), *_ = scales.items()
        raise CheckpointError(
            f"{file.path} scales the adapter of `{first}` by {one:g} and that of `{second}` by "
            f"{two:g}, but the adapters of a run have one scale; give adapters of one scale."
        )
    separate = any(
        len(tensors) > 1 and not _is_joint(group, len(tensors))
        for (linear, _, expert), group in found.items()
        if expert is None
        for tensors in [_tensors(adapters, linear)]
    )
    whole, notes = _whole_parts(adapters, file)
    if file.dropout:
        notes.append(
            f"{file.path} says `lora_dropout` {file.dropout:g}, which is not taken over; give "
            "`--lora-dropout` for it."
        )
    rank = max(ranks)
    (scale,) = scales
    lora = LoraConfig(
        lora_rank=rank,
        lora_alpha=round(scale * rank, 9),
        lora_separate_projections=separate,
        lora_target_modules=_targets(adapters, {linear for linear, *_ in found}),
        lora_modules_to_save=whole or None,
    )
    return lora, [*file.notes, *notes]


def _tensors(adapters: TextAdapters, linear: str) -> list[str]:
    """Return the templates of the tensors that a layer of ours joins."""
    return list(dict.fromkeys(part.tensor for part in adapters.table.layer[f"{linear}.weight"]))


def _is_joint(group: Mapping[int, LowRank], count: int) -> bool:
    """Return whether the adapters of ``count`` projections are all there, and share their A."""
    first = next(iter(group.values()))
    return len(group) == count and all(torch.equal(x.a, first.a) for x in group.values())


def _rank(group: Mapping[int, LowRank], of_expert: bool) -> int:
    """Return the rank that the adapter of a layer of ours needs."""
    ranks = [adapter.rank for adapter in group.values()]
    apart = of_expert and not _is_joint(group, len(group))
    return sum(ranks) if apart else max(ranks)


def _targets(adapters: TextAdapters, linears: set[str]) -> list[str]:
    """Return names for ``--lora-target-modules`` of the given layers and no others."""
    kinds = {x.replace("experts.experts.", "experts.") for x in linears}
    every = {
        name.removesuffix(".weight").replace("experts.experts.", "experts.")
        for name in adapters.table.layer
        if name.endswith(".weight") and _LINEAR.search(name.removesuffix(".weight"))
    }
    moe = adapters.gpt.moe
    layers = moe.expert_layers(adapters.gpt.model.num_layers or 0)
    lacking = [
        prefix
        for prefix, there in zip(
            _MLP,
            (not all(layers), any(layers), moe.moe_shared_expert_intermediate_size),
            strict=True,
        )
        if not there
    ]
    every = {x for x in every if not any(re.fullmatch(rf"{y}linear_\w+", x) for y in lacking)}
    found = dict[str, None]()
    for kind in sorted(kinds):
        own = kind.rpartition(".")[2]
        clear = all(other in kinds for other in every if is_named(other, own))
        found[own if clear else kind.removeprefix("self_attention.").removeprefix("mlp.")] = None
        if not clear and kind.count(".") == 1:
            del found[own]
            found[kind] = None
    return list(found)


def _whole_parts(adapters: TextAdapters, file: AdapterFile) -> tuple[list[str], list[str]]:
    """Return the parts of the model that a file has whole, and notes on those that it lacks."""
    templates = {**adapters.table.outer}
    templates |= {f"decoder.layers.0.{name}": x for name, x in adapters.table.layer.items()}
    parts: dict[str, set[str]] = {part: set() for part in WHOLE_PARTS}
    lacking: dict[str, str] = {}
    for name, sources in templates.items():
        for part in WHOLE_PARTS:
            if trains_whole(LoraConfig(lora_modules_to_save=[part]), name):
                patterns = [
                    _pattern(text) for x in sources for text in (x.tensor, in_class(x.tensor))
                ]
                hits = {n for n in file.whole if any(p.fullmatch(n) for p in patterns)}
                parts[part] |= hits
                if not hits:
                    lacking.setdefault(part, sources[0].tensor)
    unknown = file.whole.keys() - set().union(*parts.values())
    if unknown:
        raise CheckpointError(
            f"{file.path} holds `{min(unknown)}` whole, which is no part that "
            f"`--lora-modules-to-save` names ({', '.join(WHOLE_PARTS)}); merge it into the weights "
            "first."
        )
    found = [part for part in WHOLE_PARTS if parts[part]]
    return found, [
        f"{file.path} lacks `{name}`, which is trained from its own values as a part of `{part}`."
        for part, name in lacking.items()
        if part in found and not _is_absent(adapters, name)
    ]


def _is_absent(adapters: TextAdapters, tensor: str) -> bool:
    """Return whether a model of the family need not have a tensor, such as a norm of queries."""
    return "q_" in tensor or "k_" in tensor or tensor.endswith(".bias")


def load_adapters(config: RunConfig, chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Fill the adapters in this rank's chunks from ``--adapter-path``; return notes.

    All ranks call this together. Projections that the file leaves out get zeros, and depths of
    multi-token prediction keep their start.
    """
    path = config.section(HuggingFaceConfig).adapter_path

    @torch.no_grad()
    def load() -> list[str]:
        adapters = TextAdapters.of(config, Path(path or ""))
        given = _given(config)
        filling = _Filling(adapters, given)
        for chunk in unwrap_model(list(chunks)):
            for shard in shards_of(chunk):
                filling.fill(shard)
        _read.cache_clear()
        rank = given.lora.lora_rank
        alpha = given.lora.lora_alpha
        return [f"loaded {path} (adapters of rank {rank}, alpha {alpha:g})", *given.notes]

    return on_every_rank(load, f"{path} cannot be read")


@dataclass(frozen=True)
class _Filling:
    """Fills shards of a run's adapters, and of weights trained whole, from a file."""

    adapters: TextAdapters
    given: Given

    def fill(self, shard: Shard) -> None:
        layer, mark, rest = shard.name.rpartition(MARK)
        if mark:
            matrix = rest[:1]
            indices = rest[1:]
            own = parse(f"{layer}.weight{indices}")
            if matrix not in "ab" or own is None or own.block != "decoder":
                return
            linear = own.rest.removesuffix(".weight")
            group = self.given.projections.get((linear, own.layer, own.expert), {})
            values = torch.zeros(shard.full_shape)
            if matrix == "a":
                self._fill_a(values, linear, own.expert is not None, group)
            else:
                runs = self.adapters.runs(f"{layer}.weight{indices}", len(values))
                self._fill_b(values, linear, own.expert is not None, group, runs)
            shard.tensor.copy_(shard.cut(values))
        elif self.given.file.whole and trains_whole(self.given.lora, shard.name.partition("[")[0]):
            self._fill_whole(shard)

    def _blocks(
        self, linear: str, of_expert: bool, group: Mapping[int, LowRank]
    ) -> Iterator[tuple[int, LowRank, slice, slice]]:
        """Yield index, adapter, rows of A and columns of B of each projection in a group."""
        rank = self.given.lora.lora_rank or 0
        apart = of_expert and bool(group) and not _is_joint(group, len(group))
        separate = self.given.lora.lora_separate_projections and not of_expert
        start = 0
        for index, adapter in sorted(group.items()):
            own = slice(0, adapter.rank)
            if apart:
                own = slice(start, start + adapter.rank)
                start += adapter.rank
            several = separate and len(_tensors(self.adapters, linear)) > 1
            first = index * rank if several else own.start
            yield index, adapter, slice(first, first + adapter.rank), own

    def _fill_a(
        self, values: Tensor, linear: str, of_expert: bool, group: Mapping[int, LowRank]
    ) -> None:
        for _, adapter, rows, _ in self._blocks(linear, of_expert, group):
            if adapter.a.size(1) != values.size(1):
                raise self._misfit(linear, adapter.a.size(1), values.size(1), "inputs")
            values[rows] = adapter.a.float()
            if not of_expert and len(_tensors(self.adapters, linear)) == 1:
                # A layer that the family does not split has a copy for each of our projections.
                for more in range(1, len(values) // (self.given.lora.lora_rank or 1)):
                    values[more * (self.given.lora.lora_rank or 1) :][: adapter.rank] = adapter.a

    def _fill_b(
        self,
        values: Tensor,
        linear: str,
        of_expert: bool,
        group: Mapping[int, LowRank],
        runs: Sequence[Run],
    ) -> None:
        tensors = list(dict.fromkeys(run.tensor for run in runs))
        for index, adapter, _, columns in self._blocks(linear, of_expert, group):
            own = [run for run in runs if index < 0 or run.tensor == tensors[index]]
            expected = sum(run.count for run in own)
            if len(adapter.b) != expected:
                raise self._misfit(linear, len(adapter.b), expected, "outputs")
            if index < 0 and own[0].expert is None:
                # transformers joins gate and up in the order in which ours does.
                values[:, columns] = adapter.b.float()
                continue
            for run in own:
                theirs = slice(run.start, run.start + (run.count - 1) * run.step + 1, run.step)
                values[run.row : run.row + run.count, columns] = adapter.b[theirs].float()

    def _misfit(self, linear: str, found: int, expected: int, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.given.file.path} holds an adapter of a part of `{linear}` with {found} {what}, "
            f"but the model's has {expected}; give adapters of this model."
        )

    def _fill_whole(self, shard: Shard) -> None:
        whole = self.given.file.whole
        for run in self.adapters.runs(shard.name, shard.full_shape[0]):
            values = whole.get(bare(run.tensor), whole.get(bare(in_class(run.tensor))))
            overlap = run.overlap(shard.offset, shard.tensor.shape)
            if values is None or overlap is None:
                continue
            expected = run.shape(shard.full_shape)
            if tuple(values.shape) != expected:
                raise CheckpointError(
                    f"{self.given.file.path} holds `{run.tensor}` with shape {list(values.shape)}, "
                    f"but the model's has {list(expected)}; give adapters of this model."
                )
            rows, index = overlap
            shard.tensor[rows] = values[index].to(shard.tensor)
