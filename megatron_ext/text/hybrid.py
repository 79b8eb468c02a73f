"""``--hybrid-layer-pattern``: the kinds of a GPT's layers, written as Megatron-LM writes them.

A pattern has a letter for each module that adds to the residual stream (see `config.layers`); ``|``
ends a pipeline stage, and each ``/`` begins a depth of multi-token prediction. Megatron-LM counts
each letter as a layer. Here a sequence mixer and the MLP or experts after it, in the same stage,
are one layer, as in a GPT: ``M-M*-`` are the three layers ``M-``, ``M`` and ``*-``. The residual
stream is the same. So ``*-*E`` is a plain GPT, whose flags the pattern stands for.

``--experimental-attention-variant`` and ``--hybrid-attention-ratio`` are other ways to say the
kinds of layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from megatron_ext.config.flags import spelling_of
from megatron_ext.config.layers import (
    ATTENTION,
    EXPERTS,
    MIXERS,
    MLPS,
    mixer_of,
    mlp_of,
    pattern_errors,
)
from megatron_ext.config.layers import read_pattern as read_layers
from megatron_ext.config.parallel import STAGES
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError, exclusive
from megatron_ext.text.config.attention import LatentAttentionConfig
from megatron_ext.text.config.hybrid import HybridConfig
from megatron_ext.text.config.moe import MoEConfig

Section = TypeVar("Section")

LATENT = "+"
"""Megatron-LM's letter for multi-latent attention, which is ``*`` in a kind of layer."""
PLAIN = "*-", "*E"
"""The kinds of the layers of a plain GPT."""
VARIANTS = {"gated_delta_net": "G", "dsa": "D"}
"""Values of ``--experimental-attention-variant``, and the letters of their mixers."""

_FLAG = "--hybrid-layer-pattern"
_VARIANT = "--experimental-attention-variant"
_CUTS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
)
"""Fields that set a stage's number of layers; they cannot be given together with a pattern."""
_CUTS_WITHOUT_STAGES = (
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields that cut the model into stages; a pattern with ``|`` does so itself, and excludes them."""


@dataclass(frozen=True)
class Pattern:
    """The layers that ``--hybrid-layer-pattern`` names.

    Attributes:
        stages: the kinds of the layers of each pipeline stage. A pattern without ``|`` has one
            stage.
        depths: for each MTP depth, the kind of its layer.
    """

    stages: tuple[tuple[str, ...], ...]
    depths: tuple[str, ...]

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of all layers of the decoder."""
        return [kind for stage in self.stages for kind in stage]

    def layout(self) -> str | None:
        """Return the ``--pipeline-model-parallel-layout`` that cuts the GPT as the pattern does.

        Return None if the pattern has no ``|`` and so does not cut the GPT into pipeline stages.
        """
        if len(self.stages) == 1:
            return None
        stages = ["t" * len(stage) for stage in self.stages]
        stages[0] = "E" + stages[0]
        stages[-1] += "m" * len(self.depths) + "L"
        return "|".join(stages)

    def moe_layer_freq(self) -> str | None:
        """Return the value of ``--moe-layer-freq`` for the layers; None if all are of one kind."""
        experts = [int(mlp_of(kind) == EXPERTS) for kind in self.kinds]
        return None if len(set(experts)) < 2 else str(experts).replace(" ", "")

    def fields(self) -> dict[str, Any]:
        """Return the fields of a configuration that describe the layers, by name."""
        kinds = self.kinds
        fields: dict[str, Any] = {"num_layers": len(kinds)}
        if self.depths:
            fields["mtp_num_layers"] = len(self.depths)
        if frequency := self.moe_layer_freq():
            fields["moe_layer_freq"] = frequency
        if any(kind not in PLAIN for kind in (*kinds, *self.depths)):
            fields["layer_kinds"] = tuple(kinds)
            fields["depth_kind"] = self.depths[0] if self.depths else None
        return fields


def _layers(letters: str) -> tuple[str, ...]:
    """Return the kinds of the layers of a stage, or of a depth, from its letters."""
    kinds: list[str] = []
    for letter in letters.replace(LATENT, ATTENTION):
        if letter in MLPS and kinds and kinds[-1] in MIXERS:
            kinds[-1] += letter
        else:
            kinds.append(letter)
    return tuple(kinds)


def read_pattern(text: str) -> Pattern:
    """Parse a pattern; return the layers that it names.

    If the pattern is wrong, raise a ValueError with two arguments: the broken rule, and a remedy.
    """
    main, *depths = text.split("/")
    letters = [*MIXERS, LATENT, *MLPS]
    for letter in text.replace("/", "").replace("|", ""):
        if letter not in letters:
            raise ValueError(f"has {letter}, which is no layer", f"use {' '.join(letters)} | and /")
    pattern = Pattern(
        tuple(_layers(stage) for stage in main.split("|")),
        tuple(kind for depth in depths for kind in _layers(depth) or ("",)),
    )
    if not pattern.kinds:
        raise ValueError("must have at least one layer", "write *-*-")
    if "|" in "".join(depths):
        raise ValueError("must have its | before the first /", "move it there")
    alike = len(pattern.depths) == len(depths) and len(set(pattern.depths)) < 2
    if not alike or not all(map(mixer_of, pattern.depths)):
        raise ValueError(
            "must have the same layer, with a mixer, in each depth of multi-token prediction",
            "write /*- for each",
        )
    return pattern


def pattern_of_ratios(num_layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """Return the pattern of ``--hybrid-attention-ratio`` and ``--hybrid-mlp-ratio``.

    As in Megatron-LM, attention is spread evenly, with Mamba-2 first and last. The MLPs are then
    spread evenly over the layers that are left.
    """
    letters = ["M"] * num_layers
    attention = round(num_layers * attention_ratio)
    _spread(letters, ATTENTION, (num_layers - attention) / (attention + 1))
    mlps = round(num_layers * mlp_ratio)
    if mlps:
        _spread(letters, "-", (num_layers - attention - mlps) / mlps)
    return "".join(letters)


def _spread(letters: list[str], letter: str, distance: float) -> None:
    """Put ``letter`` in the place of Mamba-2 once in each ``distance`` other layers."""
    left = distance
    for place, present in enumerate(letters):
        if present != "M":
            continue
        if left < 0.5:
            letters[place] = letter
            left += distance
        else:
            left -= 1


def _pattern_of(config: RunConfig) -> Pattern:
    """Return the layers that the flags of a `HybridConfig` name.

    Raises:
        ValueError: the flags are wrong; see `read_pattern`.
    """
    hybrid = config.section(HybridConfig)
    num_layers = config.model.num_layers or 0
    if hybrid.hybrid_layer_pattern is not None:
        pattern = read_pattern(hybrid.hybrid_layer_pattern)
        # A pattern that comes with weights may have depths that a run leaves out.
        leaves_out = config.model.mtp_num_layers == 0
        return dataclasses.replace(pattern, depths=()) if leaves_out else pattern
    variant = hybrid.experimental_attention_variant
    if variant is None:
        ratios = hybrid.hybrid_attention_ratio, hybrid.hybrid_mlp_ratio
        return read_pattern(pattern_of_ratios(num_layers, *ratios))
    moe = config.section(MoEConfig)
    return pattern_of_variant(
        variant,
        moe.expert_layers(num_layers),
        hybrid.linear_attention_freq,
        config.model.mtp_num_layers or 0,
    )


def pattern_of_variant(
    variant: str, experts: Sequence[bool], frequency: str | None, num_depths: int
) -> Pattern:
    """Return the layers of ``--experimental-attention-variant``.

    Args:
        experts: for each decoder layer, whether it has experts.
        frequency: ``--linear-attention-freq``.
        num_depths: number of depths of multi-token prediction.
    """
    mixers = [VARIANTS[variant]] * len(experts)
    if variant == "gated_delta_net":
        keeps = _attention_layers(frequency, len(experts))
        mixers = [ATTENTION if kept else "G" for kept in keeps]
    mlps = [EXPERTS if each else "-" for each in experts]
    kinds = tuple(mixer + mlp for mixer, mlp in zip(mixers, mlps, strict=True))
    return Pattern((kinds,), kinds[-1:] * num_depths)


def _attention_layers(frequency: str | None, num_layers: int) -> list[bool]:
    """Return, for each layer, whether ``--linear-attention-freq`` leaves its attention in place."""
    pattern = read_layers(frequency or "")
    if isinstance(pattern, int):
        return [number % pattern == 0 for number in range(1, num_layers + 1)]
    if len(pattern) != num_layers:
        raise ValueError(frequency)
    return [not linear for linear in pattern]


def resolve_hybrid(config: RunConfig) -> RunConfig:
    """Return the configuration with the values that the flags of a `HybridConfig` stand for."""
    hybrid = config.section(HybridConfig)
    model = config.model
    try:
        pattern = _pattern_of(config)
    except (ValueError, ZeroDivisionError):
        # The rule is said once; without a number of layers, another would follow from it.
        model = dataclasses.replace(model, num_layers=model.num_layers or 1)
        return dataclasses.replace(config, model=model)
    ratios = hybrid.hybrid_attention_ratio, hybrid.hybrid_mlp_ratio
    if sum(ratios) > 0:
        # Afterwards `num_layers` counts mixers with their MLPs, and no longer single letters.
        text = pattern_of_ratios(model.num_layers or 0, *ratios)
        hybrid = dataclasses.replace(
            hybrid, hybrid_layer_pattern=text, hybrid_attention_ratio=0.0, hybrid_mlp_ratio=0.0
        )
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size
    layout = pattern.layout()
    if layout is not None and stages > 1 and len(pattern.stages) % stages == 0:
        parallel = dataclasses.replace(
            parallel,
            pipeline_model_parallel_layout=layout,
            account_for_embedding_in_pipeline_split=False,
            account_for_loss_in_pipeline_split=False,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            num_layers_per_virtual_pipeline_stage=None,
            num_virtual_stages_per_pipeline_rank=None,
        )
    fields = pattern.fields()
    model = with_fields(model, fields)
    moe = with_fields(config.section(MoEConfig), fields)
    hybrid = with_fields(hybrid, fields)
    return dataclasses.replace(config, model=model, parallel=parallel).with_section(moe, hybrid)


def with_fields(section: Section, fields: Mapping[str, Any]) -> Section:
    """Return a section with the values of ``fields`` for those that it has."""
    own = {name: value for name, value in fields.items() if hasattr(section, name)}
    return dataclasses.replace(section, **own)  # type: ignore[type-var]


def hybrid_errors(given: RunConfig, run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault of the kinds of layers, and each flag that contradicts them."""
    hybrid = given.section(HybridConfig)
    text = hybrid.hybrid_layer_pattern
    if text is None:
        yield from _variant_errors(hybrid, given)
    else:
        refused = partial(FlagError, _FLAG, text)
        try:
            pattern = read_pattern(text)
        except ValueError as error:
            yield refused(*error.args)
            return
        yield from _rival_errors(hybrid)
        yield from _size_errors(refused, pattern, given)
        yield from _stage_errors(refused, pattern, given)
        latent = given.section(LatentAttentionConfig).multi_latent_attention
        if LATENT in text and not latent:
            yield refused(
                f"has {LATENT}, which needs `--multi-latent-attention`",
                f"give it, or write {ATTENTION}",
            )
    kinds = run.section(HybridConfig).layer_kinds
    if kinds is not None:
        from megatron_ext.text.config.mixer_rules import mixer_errors

        yield from mixer_errors(kinds, run)


def _rival_errors(hybrid: HybridConfig) -> Iterator[FlagError]:
    """Yield an error for each other flag that says the kinds of layers beside the pattern."""
    rivals = {
        _VARIANT: hybrid.experimental_attention_variant,
        "--hybrid-attention-ratio": hybrid.hybrid_attention_ratio,
        "--hybrid-mlp-ratio": hybrid.hybrid_mlp_ratio,
    }
    for name, value in rivals.items():
        if value:
            yield exclusive(_FLAG, name)


def _variant_errors(hybrid: HybridConfig, given: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault of the flags that say the kinds of layers without a pattern."""
    variant = hybrid.experimental_attention_variant
    ratios = hybrid.hybrid_attention_ratio, hybrid.hybrid_mlp_ratio
    if sum(ratios) > 1:
        yield FlagError(
            "--hybrid-mlp-ratio",
            ratios[1],
            f"and `--hybrid-attention-ratio` ({ratios[0]}) must add up to at most 1",
            "use smaller shares",
        )
    if variant is not None and sum(ratios) > 0:
        yield exclusive(_VARIANT, "--hybrid-attention-ratio")
    if variant != "gated_delta_net":
        return
    name = "--linear-attention-freq"
    if hybrid.linear_attention_freq is None:
        yield FlagError(
            _VARIANT,
            variant,
            f"needs `{name}`, which says which layers keep their attention",
            "give 4 for every fourth layer",
        )
    else:
        yield from pattern_errors(name, hybrid.linear_attention_freq, given.model.num_layers or 0)


Refused = Callable[[str, str], FlagError]
"""A function that makes an error about ``--hybrid-layer-pattern``.

Its arguments are words on what is wrong with the pattern, and on how to mend it."""


def _size_errors(refused: Refused, pattern: Pattern, given: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each of the ``given`` flags that contradicts the layers of the pattern.

    ``refused`` makes an error from a broken rule and a remedy.
    """
    kinds = pattern.kinds
    letters = sum(map(len, kinds))
    model = given.model
    moe = given.section(MoEConfig)
    if model.num_layers not in (None, len(kinds), letters):
        yield refused(
            f"has {letters} layers, or {len(kinds)} with mixer and MLP as one, but "
            f"`--num-layers` is {model.num_layers}",
            "leave it out",
        )
    depths = len(pattern.depths)
    if (model.mtp_num_layers or 0) not in (0, depths):
        yield refused(
            f"has {depths} depth{'s' * (depths != 1)} of multi-token prediction, but "
            f"`--mtp-num-layers` is {model.mtp_num_layers}",
            f"write /{kinds[-1]} for each",
        )
    experts = any(mlp_of(kind) == EXPERTS for kind in (*kinds, *pattern.depths))
    if experts != (moe.num_experts is not None):
        yield refused(
            f"has {'' if experts else 'no '}layers of experts (E), and `--num-experts` is "
            f"{'missing' if experts else moe.num_experts}",
            "give both or neither",
        )
    if moe.moe_layer_freq not in ("1", pattern.moe_layer_freq() or "1"):
        yield refused(
            "says which layers hold experts, and so does `--moe-layer-freq` "
            f"({moe.moe_layer_freq})",
            "leave it out",
        )


def _stage_errors(refused: Refused, pattern: Pattern, given: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in how the pattern is cut into pipeline stages.

    ``refused`` makes an error from a broken rule and a remedy; ``given`` has the user's flags.
    """
    parallel = given.parallel
    count = len(pattern.stages)
    size = parallel.pipeline_model_parallel_size
    for field in _CUTS:
        if getattr(parallel, field) is not None:
            other = spelling_of(parallel, field)
            yield refused(f"is cut into stages by |, not by `{other}`", "leave it out")
    if count == 1:
        return
    for field in _CUTS_WITHOUT_STAGES:
        if getattr(parallel, field) not in (None, False, pattern.layout()):
            other = spelling_of(parallel, field)
            yield refused(
                f"is cut into stages by |, and also by `{other}`", "leave out one of them"
            )
    if size < 2:
        yield refused(
            f"has {count} stages, but `{STAGES}` is {size}", f"use {count}, or leave out |"
        )
    elif count % size:
        yield refused(
            f"has {count} stages, which must be a multiple of `{STAGES}` ({size})",
            f"write {-(-count // size) * size}",
        )
