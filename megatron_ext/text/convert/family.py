"""Describes a family of Hugging Face models: how its config.json and its weights relate to ours.

A family is data, said relative to its nearest one: the entries of config.json, of which each is
read and written by one declaration (`megatron_ext.text.convert.entries`); our fields that are the
same in all its models; and the tensors that hold each weight (`megatron_ext.text.convert.weights`).
Each file of ``families/`` declares one or several.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.config import flag_line
from megatron_ext.config.flags import flags_of
from megatron_ext.config.layers import layers_without_rope, mixer_of
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.run import RunConfig, named
from megatron_ext.errors import CheckpointError
from megatron_ext.text.config.attention import AttentionConfig, LatentAttentionConfig
from megatron_ext.text.config.block import BlockConfig
from megatron_ext.text.config.hybrid import (
    SIZES,
    SIZES_BY_LETTER,
    HybridConfig,
    MixerConfig,
    kinds_of,
)
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.config.rules import SHAPE, SHAPE_SECTIONS
from megatron_ext.text.convert.table import Table
from megatron_ext.text.convert.weights import Weights

FREE = (
    "seq_length padded_vocab_size max_position_embeddings mtp_num_layers group_query_attention"
).split()
"""Fields of the model's shape in which a run may differ from the config.json of its weights.

The number of positions is free only if positions are not learned."""
FLAGS_OF_KINDS = (
    "hybrid_layer_pattern hybrid_attention_ratio hybrid_mlp_ratio experimental_attention_variant "
    "linear_attention_freq"
).split()
"""Flags that say the kinds of layers in several ways; models are compared by the kinds."""
K_NORM_EPSILON = "dsa_indexer_k_norm_epsilon"
MOE_SHAPE = (
    "num_experts moe_ffn_hidden_size moe_latent_size moe_shared_expert_intermediate_size "
    "moe_shared_expert_gate "
    "moe_router_topk moe_router_score_function moe_router_pre_softmax "
    "moe_router_norm_topk_prob moe_router_num_groups moe_router_group_topk "
    "moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_apply_probs_on_input"
).split()
"""Names of the `MoEConfig` fields that decide what a layer with experts computes."""


@dataclass(frozen=True)
class Settings:
    """The entries of a config.json, with transformers' defaults for missing ones.

    Attributes:
        path: the path of config.json, for messages.
        values: the entries, by name.
        given: the entries that the file has, as they are there.
        read: the names of the entries that have been read so far.
        ignored: parts of entries that have no effect here, such as ``rope_scaling.factor``.
    """

    path: Path
    values: Mapping[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    ignored: list[str] = field(default_factory=list)

    def replaced(self, **values: Any) -> Settings:
        """Return these settings with other values; what is read there is read here too."""
        return dataclasses.replace(self, values={**self.values, **values})

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self.values.get(key)

    def refuse(self, key: str, value: Any = None, advice: str = "use a model without it") -> None:
        """Raise a CheckpointError which says that the value of an entry cannot be converted.

        Args:
            key: name of the entry.
            value: the value that the message shows; None shows the value of the entry.
            advice: the end of the message, which tells the user what to do.
        """
        shown = self[key] if value is None else value
        raise CheckpointError(
            f"{self.path} says `{key}` {shown!r}, which the converted model would not have; "
            f"{advice}."
        )

    def require(self, key: str, value: Any) -> None:
        """Raise a CheckpointError if an entry is neither missing nor None nor ``value``."""
        if self[key] not in (None, value):
            has = "without it" if value in (None, False) else f"with {value}"
            self.refuse(key, advice=f"use a model {'with true' if value is True else has}")


Fields = dict[str, Any]
"""Configuration fields of the sections in a `Gpt`: name -> value."""


@dataclass(frozen=True)
class Gpt:
    """The configuration sections that decide what a GPT computes with its weights."""

    model: ModelConfig
    positions: PositionConfig
    attention: AttentionConfig
    latent: LatentAttentionConfig
    block: BlockConfig
    moe: MoEConfig
    hybrid: HybridConfig
    mixer: MixerConfig

    @classmethod
    def of(cls, config: RunConfig) -> Gpt:
        """Return the sections of a resolved configuration."""
        return cls(
            model=config.model,
            positions=config.section(PositionConfig),
            attention=config.section(AttentionConfig),
            latent=config.section(LatentAttentionConfig),
            block=config.section(BlockConfig),
            moe=config.section(MoEConfig),
            hybrid=config.section(HybridConfig),
            mixer=config.section(MixerConfig),
        )

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Gpt:
        """Return sections with the given fields; other fields get default or derived values."""
        fields = with_kinds(fields)

        def section(kind: type[Any]) -> Any:
            names = {field.name for field in dataclasses.fields(kind)} & fields.keys()
            return kind(**{name: fields[name] for name in names})

        latent = section(LatentAttentionConfig)
        model = latent.resolved_model(section(ModelConfig).resolved(has_te=False))
        return cls(
            model=model,
            positions=section(PositionConfig).resolved(),
            attention=section(AttentionConfig),
            latent=latent,
            block=section(BlockConfig),
            moe=section(MoEConfig),
            hybrid=section(HybridConfig),
            mixer=section(MixerConfig),
        )

    def value(self, name: str) -> Any:
        """Return the value of the field ``name``; raise a KeyError if there is none."""
        for section in self._sections:
            if name in vars(section):
                return vars(section)[name]
        raise KeyError(name)

    def values(self) -> Fields:
        """Return the values of all fields by name."""
        return {name: value for each in self._sections for name, value in vars(each).items()}

    @property
    def _sections(self) -> Sequence[Any]:
        return (
            self.model,
            self.positions,
            self.attention,
            self.latent,
            self.block,
            self.moe,
            self.hybrid,
            self.mixer,
        )

    @property
    def kinds(self) -> list[str]:
        """Return the kind of each decoder layer (see `config.layers`)."""
        return list(kinds_of(self.hybrid, self.moe, self.model.num_layers or 0))


def with_kinds(fields: Mapping[str, Any]) -> Fields:
    """Return fields with those that follow from the flags of the kinds of layers among them."""
    pattern = fields.get("hybrid_layer_pattern")
    variant = fields.get("experimental_attention_variant")
    if pattern is None and variant is None:
        return dict(fields)
    from megatron_ext.text.hybrid import pattern_of_variant, read_pattern

    if pattern is not None:
        return {**fields, **read_pattern(pattern).fields()}
    moe = MoEConfig(
        num_experts=fields.get("num_experts"), moe_layer_freq=fields.get("moe_layer_freq", "1")
    )
    experts = moe.expert_layers(fields["num_layers"])
    frequency = fields.get("linear_attention_freq")
    depths = fields.get("mtp_num_layers") or 0
    return {**fields, **pattern_of_variant(str(variant), experts, frequency, depths).fields()}


SECTIONS = {**SHAPE_SECTIONS, **named((MoEConfig,))}
"""The classes, by section name, of the sections that describe the architecture of a GPT."""


class Entry(Protocol):
    """One or several entries of config.json, which become fields of ours, and come back."""

    @property
    def fields(self) -> Collection[str]:
        """The names of the fields that `read` may return."""

    @property
    def keys(self) -> Collection[str]:
        """The names of the entries that `read` reads and `write` returns."""

    def read(self, settings: Settings) -> Fields:
        """Return our fields; raise a CheckpointError if they cannot express the entries."""

    def write(self, gpt: Gpt) -> dict[str, Any]:
        """Return the entries of config.json; the inverse of `read`."""

    def limits(self) -> tuple[str, ...]:
        """Return what `read` refuses, in words, for the documentation."""


@dataclass(frozen=True)
class Family:
    """A family of Hugging Face models.

    Attributes:
        model_type: the entry `model_type` of its config.json.
        architecture: the name of its class in transformers.
        says: what its models have, in a few words, for the documentation.
        entries: the entries of config.json that become our fields.
        fixed: our fields that have the same value in all models of the family, by name.
        only: entries of config.json for which just one value is supported, by name; they may also
            be None or missing.
        weights: the tensors that hold our parameters, as they are written.
        weights_of: returns the tensors instead of ``weights`` if their names depend on the model.
        read_too: other forms of ``weights`` that files of such models may have. The form whose
            names a folder has is read.
        nearest: the `model_type` of the family from which this one is derived.
        known_as: the `model_type` under which transformers knows the same config.json, if models
            of this family come with code of their own.
        defaults: the values that missing entries have in that code, where they differ from those
            of transformers.
        as_published: returns entries with which transformers' class computes what the code of the
            published models does, where it reads others.
    """

    model_type: str
    architecture: str
    says: str
    entries: Sequence[Entry]
    fixed: Mapping[str, Any]
    weights: Weights
    only: Mapping[str, Any] = field(default_factory=dict)
    read_too: Sequence[Weights] = ()
    nearest: str | None = None
    known_as: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    weights_of: Callable[[Gpt], Weights] | None = None
    as_published: Callable[[Gpt], dict[str, Any]] | None = None

    def but(
        self,
        *,
        model_type: str,
        architecture: str,
        says: str,
        entries: Sequence[Entry] = (),
        fixed: Mapping[str, Any] | None = None,
        only: Mapping[str, Any] | None = None,
        without: Collection[str] = (),
        weights: Weights | None = None,
        weights_of: Callable[[Gpt], Weights] | None = None,
        read_too: Sequence[Weights] = (),
        known_as: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        as_published: Callable[[Gpt], dict[str, Any]] | None = None,
    ) -> Family:
        """Return a family that differs from this one in what is given.

        What the new family says about a field of ours, or about an entry of config.json, replaces
        all that this one says about the same: an entry of this family is dropped if it shares a
        field or a name with something new.

        Args:
            without: names of entries of config.json and of our fields about which the new family
                says nothing.
        """
        fixed = dict(fixed or {})
        only = dict(only or {})
        keys = {key for each in entries for key in each.keys} | only.keys() | set(without)
        fields = {name for each in entries for name in each.fields} | fixed.keys() | set(without)
        kept = [x for x in self.entries if not keys & set(x.keys) and not fields & set(x.fields)]
        return Family(
            model_type,
            architecture,
            says,
            (*kept, *entries),
            {name: value for name, value in self.fixed.items() if name not in fields} | fixed,
            self.weights if weights is None else weights,
            {key: value for key, value in self.only.items() if key not in keys} | only,
            read_too,
            self.model_type,
            known_as,
            dict(defaults or {}),
            weights_of,
            as_published,
        )

    def fields(self, settings: Settings) -> Fields:
        """Translate the entries of a config.json into our fields.

        Raise a CheckpointError if our fields cannot express them.
        """
        for key, value in self.only.items():
            settings.require(key, value)
        fields = dict(self.fixed)
        for entry in self.entries:
            fields |= entry.read(settings)
        sigmoid = fields.get("moe_router_score_function") == "sigmoid"
        if sigmoid and fields.get("moe_router_topk") == 1:
            # transformers divides the only score by itself; megatron-core leaves it as it is.
            settings.refuse(
                self.key_of("moe_router_topk"),
                1,
                "use a model with 2 or more, since it divides the scores by their sum",
            )
        return with_kinds(fields)

    def settings(self, gpt: Gpt) -> dict[str, Any]:
        """Return the entries of config.json that describe a model; the inverse of `fields`."""
        settings = {"model_type": self.model_type, "architectures": [self.architecture]}
        for entry in self.entries:
            settings |= entry.write(gpt)
        return settings | dict(self.only)

    def key_of(self, name: str) -> str:
        """Return the name of the entry of config.json that holds our field ``name``.

        Raise a KeyError if there is none.
        """
        for entry in self.entries:
            if name in entry.fields:
                return next(iter(entry.keys))
        raise KeyError(name)

    def table(
        self,
        gpt: Gpt,
        vocab_size: int,
        shapes: Mapping[str, Sequence[int]] | None = None,
        change: Callable[[Weights], Weights] = lambda weights: weights,
    ) -> Table:
        """Return the table of weights of a model of this family.

        Args:
            vocab_size: number of entries of its vocabulary, without padding.
            shapes: the shapes of the tensors in its folder, which decide the form of the weights
                by their names, and where these are the same; None returns the form that is written.
            change: is applied to the weights of each form first.
        """
        own = self.weights if self.weights_of is None else self.weights_of(gpt)
        forms = (own, *self.read_too)
        tables = [change(form).table(gpt, vocab_size) for form in forms]
        if shapes is None or len(tables) == 1:
            return tables[0]
        size = gpt.model.hidden_size or 0
        return max(tables, key=lambda table: (table.names_in(shapes), table.turns(shapes, size)))


def architecture_of(gpt: Gpt) -> Fields:
    """Return the fields in which models must agree to compute the same with the same weights."""
    model = gpt.model
    moe = gpt.moe
    positions = gpt.positions
    values = gpt.values()
    left_out = {*FREE, *FLAGS_OF_KINDS, *SIZES}
    fields = {name: values[name] for name in SHAPE.split() if name not in left_out}
    fields["layer_kinds"] = gpt.kinds
    for letter in {mixer_of(kind) for kind in gpt.kinds} & SIZES_BY_LETTER.keys():
        fields |= {name: values[name] for name in SIZES_BY_LETTER[letter]}
    if fields.get(K_NORM_EPSILON, 0) is None:
        fields[K_NORM_EPSILON] = model.norm_epsilon
    # Without query groups each head is its own group.
    fields["num_query_groups"] = model.num_query_groups or model.num_attention_heads
    window = gpt.attention.window_size
    fields["window_size"] = None if window is None else tuple(window)
    fields["window_attn_skip_freq"] = gpt.attention.windowed_layers(model)
    fields["rope_scaling"] = positions.scaling()
    layers = model.num_layers or 0
    fields["no_rope_freq"] = layers_without_rope(positions.no_rope_freq, layers)
    if gpt.latent.multi_latent_attention:
        fields["latent_norm_epsilon"] = gpt.latent.latent_norm_epsilon or model.norm_epsilon
    if positions.position_embedding_type == "learned_absolute":
        fields["max_position_embeddings"] = positions.max_position_embeddings
    if moe.num_experts is None:
        return {**fields, "num_experts": None}
    fields |= {name: getattr(moe, name) for name in MOE_SHAPE}
    fields["moe_ffn_hidden_size"] = moe.moe_ffn_hidden_size or model.ffn_hidden_size
    fields["moe_layer_freq"] = moe.expert_layers(model.num_layers or 0)
    if all(fields["moe_layer_freq"]):
        # All layers have experts, so the width of a dense MLP does not matter.
        del fields["ffn_hidden_size"]
    return fields


def differences(ours: Fields, theirs: Fields) -> list[tuple[str, Any, Any]]:
    """Return (field, our value, their value) for each common field whose values differ.

    The arguments are results of `architecture_of`.
    """
    names = [name for name in ours if name in theirs]
    return [(x, ours[x], theirs[x]) for x in names if ours[x] != theirs[x]]


def words_of(fields: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments that set the given fields; leave out defaults."""
    flags = [flag for section, kind in SECTIONS.items() for flag in flags_of(section, kind)]
    changed = [flag for flag in flags if fields.get(flag.field, flag.default) != flag.default]
    return [word for flag in changed for word in flag_line.words_of(flag, fields[flag.field])]
