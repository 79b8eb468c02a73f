"""Says where the weights of a family lie in its files: our name of each, and its tensors.

A family's `Weights` are data, derived from those of its nearest family by adding, removing and
renaming. `Weights.table` fills in the sizes of one model.

Names are templates: ``{layer}`` and ``{expert}`` stand for their numbers, and an item whose name
has ``{kind}`` stands for two, a weight and a bias. Names that a model lacks do no harm, since only
the parameters that it has are looked up.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_ext.config.model import ModelConfig
from megatron_ext.text.config.hybrid import MixerConfig
from megatron_ext.text.convert.table import (
    Part,
    Parts,
    Table,
    fused_qkv,
    gated_qkv,
    grouped_qkv,
    qkv_with_gate,
)


class Shaped(Protocol):
    """The parts of a `family.Gpt` that decide the shapes of a model's tensors."""

    @property
    def model(self) -> ModelConfig:
        """Return the sizes of its heads and layers."""

    @property
    def mixer(self) -> MixerConfig:
        """Return the sizes of its mixers other than attention."""

    @property
    def kinds(self) -> Sequence[str]:
        """Return the kind of each layer (see `config.layers`)."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of one model that decide how rows are arranged in its tensors.

    Attributes:
        model: the sizes of its heads and layers.
        mixer: the sizes of its mixers other than attention.
        vocab_size: number of rows of the embedding, without padding.
    """

    model: ModelConfig
    mixer: MixerConfig
    vocab_size: int


Arrange = Callable[[tuple[str, ...], Sizes], Parts]
"""A function from the names of tensors to the runs of their rows that make up our parameter."""


@dataclass(frozen=True)
class Source:
    """The tensors that hold one of our parameters, and how its rows are arranged in them.

    Attributes:
        tensors: templates of the tensors' names.
        arrange: returns the rows of our parameter, in order.
        transposed: whether matrices are stored ``[in, out]``; biases never are.
        stacked: whether each tensor holds all experts along its first axis.
    """

    tensors: tuple[str, ...]
    arrange: Arrange
    transposed: bool = False
    stacked: bool = False

    def with_names(self, change: Callable[[str], str]) -> Source:
        """Return a copy in which ``change`` has been applied to each tensor's name."""
        return dataclasses.replace(self, tensors=tuple(map(change, self.tensors)))

    def parts(self, sizes: Sizes, *, is_matrix: bool) -> Parts:
        """Return the parts of our parameter for a model of the given sizes."""
        turned = self.transposed and is_matrix
        return tuple(
            dataclasses.replace(part, transposed=turned, stacked=self.stacked)
            for part in self.arrange(self.tensors, sizes)
        )


def _concatenated(tensors: tuple[str, ...], sizes: Sizes) -> Parts:
    return tuple(Part(tensor) for tensor in tensors)


def _vocabulary(tensors: tuple[str, ...], sizes: Sizes) -> Parts:
    return (Part(tensors[0], sizes.vocab_size),)


def _separate_qkv(tensors: tuple[str, ...], sizes: Sizes) -> Parts:
    return grouped_qkv(sizes.model, *tensors)


def _gated_qkv(tensors: tuple[str, ...], sizes: Sizes) -> Parts:
    return gated_qkv(sizes.model, *tensors)


def _qkv_and_gate(tensors: tuple[str, ...], sizes: Sizes) -> Parts:
    return qkv_with_gate(sizes.model, *tensors)


def _fused_qkv(tensors: tuple[str, ...], sizes: Sizes) -> Parts:
    return fused_qkv(sizes.model, tensors[0])


def _alternating(tensors: tuple[str, ...], sizes: Sizes) -> Parts:
    return tuple(Part(tensors[0], start=start, step=2) for start in (0, 1))


def whole(tensor: str, *, transposed: bool = False, stacked: bool = False) -> Source:
    """Return the source of a parameter that is one whole tensor; a plain name means the same."""
    return Source((tensor,), _concatenated, transposed, stacked)


def scalar(tensor: str) -> Source:
    """Return the source of a parameter of one row that is a number without an axis."""
    return Source((tensor,), lambda tensors, sizes: (Part(tensors[0], scalar=True),))


def joined(*tensors: str, transposed: bool = False, stacked: bool = False) -> Source:
    """Return the source of a parameter that concatenates tensors with equally many rows."""
    return Source(tensors, _concatenated, transposed, stacked)


def alternating(tensor: str, *, transposed: bool = False, stacked: bool = False) -> Source:
    """Return the source of a gated projection in one tensor, whose even rows are the gate's."""
    return Source((tensor,), _alternating, transposed, stacked)


def vocabulary(tensor: str) -> Source:
    """Return the source of a parameter with one row for each token; ours may have padding rows."""
    return Source((tensor,), _vocabulary)


def separate_qkv(query: str, key: str, value: str, *, transposed: bool = False) -> Source:
    """Return the source of ``linear_qkv`` in separate tensors of queries, keys and values."""
    return Source((query, key, value), _separate_qkv, transposed)


def separate_gated_qkv(query: str, key: str, value: str) -> Source:
    """Return the source of ``linear_qkv`` with gates, in tensors of queries, keys and values.

    ``query`` has the rows of each head's query, and then those of its gate.
    """
    return Source((query, key, value), _gated_qkv)


def qkv_and_gate(query: str, gate: str, key: str, value: str) -> Source:
    """Return the source of ``linear_qkv`` with gates, whose tensor has the rows of all heads."""
    return Source((query, gate, key, value), _qkv_and_gate)


def fused_qkv_of(tensor: str, *, transposed: bool = False) -> Source:
    """Return the source of ``linear_qkv`` in one tensor: all queries, then keys, then values.

    A tensor that holds, for each query group, its queries, its key and its value has our own order,
    and is `whole`.
    """
    return Source((tensor,), _fused_qkv, transposed)


Given = Mapping[str, "Source | str"]
"""Our name of a parameter -> its source; a plain tensor name means `whole`."""
Sources = Mapping[str, Source]


def _sources(given: Given) -> dict[str, Source]:
    """Return ``given`` with a source for each name, and an item for each ``{kind}``."""
    result: dict[str, Source] = {}
    for name, value in given.items():
        source = whole(value) if isinstance(value, str) else value
        for kind in ("weight", "bias") if "{kind}" in name else ("",):
            filled = source.with_names(lambda x, kind=kind: x.replace("{kind}", kind))  # type: ignore[misc]
            result[name.replace("{kind}", kind)] = filled
    return result


@dataclass(frozen=True)
class Weights:
    """The tensors of a family of models, by our names of the parameters that they hold.

    Attributes:
        layers: template of the path of a layer, such as ``model.layers.{layer}``, which precedes
            each tensor in ``layer`` and ``depth``.
        outer: sources of the parameters outside of layers.
        layer: sources of the parameters of a decoder layer, by our name within the layer.
        depth: sources of the parameters of an MTP depth, except those of its transformer layer.
            transformers numbers depths as layers after the decoder's.
        depth_copies: names of the tensors of a depth that are copies, each with its original.
        exact: suffixes of the names of tensors that stay in float32, whatever the model's dtype.
        unused: beginnings of the names of tensors that have no place in our model.
        halves: whether a mixer and the MLP after it are layers of their own in the files, as in
            Nemotron-H.
        depths: template of the path of the layer of an MTP depth, such as ``mtp.layers.{layer}``,
            if depths have paths of their own; the tensors in ``depth`` then have whole names.
            Otherwise depths are numbered as layers after the decoder's.
    """

    layers: str
    outer: Sources
    layer: Sources
    depth: Sources = field(default_factory=dict)
    depth_copies: Mapping[str, str] = field(default_factory=dict)
    exact: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    halves: bool = False
    depths: str = ""

    @classmethod
    def of(cls, layers: str, outer: Given, layer: Given) -> Weights:
        """Return weights from templates that may have ``{kind}`` in their names."""
        return cls(layers, _sources(outer), _sources(layer))

    def but(
        self,
        *,
        outer: Given | None = None,
        layer: Given | None = None,
        depth: Given | None = None,
        depth_copies: Mapping[str, str] | None = None,
        exact: tuple[str, ...] = (),
        unused: tuple[str, ...] = (),
        without: Collection[str] = (),
        renamed: Mapping[str, str] | None = None,
        halves: bool = False,
        depths: str = "",
    ) -> Weights:
        """Return weights that differ from these in what is given.

        Args:
            outer, layer, depth, depth_copies: items that are added, or replace those of the same
                name.
            exact, unused: suffixes and beginnings that are added.
            without: beginnings of our names of parameters that the family does not have.
            renamed: path within a tensor's name, such as ``self_attn`` or ``mlp.gate_proj`` -> the
                path in its place. It applies to the tensors of the nearest family only.
            halves: whether mixers and MLPs are layers of their own.
            depths: path of the layer of an MTP depth, if depths have paths of their own.
        """
        change = _renaming(renamed or {})

        def merged(old: Sources, new: Given | None) -> Sources:
            kept = {
                name: source.with_names(change)
                for name, source in old.items()
                if not name.startswith(tuple(without))
            }
            return kept | _sources(new or {})

        copies = {change(name): change(original) for name, original in self.depth_copies.items()}
        return Weights(
            change(self.layers),
            merged(self.outer, outer),
            merged(self.layer, layer),
            merged(self.depth, depth),
            copies | dict(depth_copies or {}),
            (*self.exact, *exact),
            (*self.unused, *unused),
            self.halves or halves,
            depths or self.depths,
        )

    def table(self, gpt: Shaped, vocab_size: int) -> Table:
        """Return the table of the rows of each parameter, for a model of the given sizes."""
        sizes = Sizes(gpt.model, gpt.mixer, vocab_size)

        def filled(sources: Sources, before: str = "") -> dict[str, Parts]:
            return {
                name: source.with_names(lambda tensor: before + tensor).parts(
                    sizes, is_matrix=not name.endswith("bias")
                )
                for name, source in sources.items()
            }

        prefix = f"{self.layers}."
        layer = filled(self.layer, prefix)
        if self.halves:
            of_mlps = {x: self.layer[x] for x in self.layer if x.startswith(_OF_MLPS)}
            layer |= filled(of_mlps, prefix.replace("{layer}", "{mlp_layer}"))

        first = gpt.model.num_layers or 0
        copies = {
            f"{self.layers.format(layer=number)}.{name}": original
            for number in range(first, first + (gpt.model.mtp_num_layers or 0))
            for name, original in self.depth_copies.items()
        }
        return Table(
            filled(self.outer),
            layer,
            filled(self.depth, "" if self.depths else prefix),
            copies,
            self.exact,
            self.unused,
            numbers_of_halves(gpt.kinds) if self.halves else (),
            filled(self.layer, f"{self.depths}.") if self.depths else {},
        )


_OF_MLPS = ("mlp.", "pre_mlp_layernorm.")
"""Beginnings of our names of the parameters of a layer's MLP or experts."""


def numbers_of_halves(kinds: Sequence[str]) -> list[tuple[int, int]]:
    """Return the numbers of the mixer and of the MLP of each layer, if each is a layer by itself.

    A layer with one of them has its number twice. ``kinds`` are those of the layers.
    """
    ends = list(itertools.accumulate(map(len, kinds)))
    return [(end - len(kind), end - 1) for kind, end in zip(kinds, ends, strict=True)]


def _renaming(renamed: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces paths in the name of a tensor, the longest first.

    A path is one or more whole components of the name. What has been replaced is not replaced
    again.
    """
    if not renamed:
        return lambda name: name
    paths = sorted(renamed, key=len, reverse=True)
    pattern = re.compile(rf"(?<![^.])({'|'.join(map(re.escape, paths))})(?![^.])")
    return lambda name: pattern.sub(lambda match: renamed[match[1]], name)
