"""Names of the parts of a model that ``--freeze`` and ``--freeze-all-but`` take.

A name is one or more words joined by dots, each narrower than the one before it: ``mlp``,
``layers.0-3``, ``layers.0-3.attention``, ``mtp.attention``. It names every parameter in whose own
name the words stand in this order, with others between them or not. A word is one of `WORDS`, or a
module's name, such as those of `config.lora_targets` (``linear_qkv``). Numbers of layers and
blocks, counted from 0 along the whole model, follow their list: ``layers.2``, ``blocks.0-3``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.config.optimizer import FreezeConfig
from megatron_ext.errors import FlagError, did_you_mean

ATTENTION = (
    "self_attention", "cross_attention", "linear_qkv", "linear_q", "linear_kv", "linear_vision_kv",
    "linear_proj",
)  # fmt: skip
"""Modules of attention: the whole of it, or its layers where they lie in the block itself."""

WORDS: dict[str, Callable[[str], bool]] = {
    "embeddings": lambda module: module == "embedding",
    "output": lambda module: module in ("output_layer", "final_layer", "head"),
    "attention": lambda module: module in ATTENTION,
    "mlp": lambda module: module in ("mlp", "linear_fc1", "linear_fc2"),
    "norms": lambda module: "norm" in module,
    "layers": lambda module: module in ("layers", "blocks"),
}
"""Words for parts that other models name differently, and which modules each stands for."""

LISTS = ("layers", "blocks", "double_blocks", "single_blocks")
"""Modules that are lists of layers or blocks, after which numbers may stand."""

LISTED = ("embeddings", "output", "attention", "mlp", "norms", "layers")
"""Names that an error offers beside those of the model's own modules."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?$")
_NUMBERED_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(?=\.)")
_NORM_OF_ENGINE = re.compile(r"(self_attention|mlp)\.linear_\w+\.layer_norm_(?=\w+$)")
_NORMS = {"self_attention": "input_layernorm.", "mlp": "pre_mlp_layernorm."}


@dataclass(frozen=True)
class _Step:
    """One word of a name; with ``first`` and ``last``, the numbers that follow it."""

    word: str
    first: int | None = None
    last: int | None = None


@dataclass(frozen=True)
class Part:
    """A part of a model, by the name ``text`` that a flag gave it."""

    text: str
    steps: tuple[_Step, ...]

    @classmethod
    def of(cls, text: str) -> Part | None:
        """Return the part that ``text`` names; None if it is no name of a part."""
        steps: list[_Step] = []
        for word in text.split("."):
            numbers = _RANGE.match(word)
            if numbers is None:
                if not re.fullmatch(r"[A-Za-z_]\w*", word):
                    return None
                steps.append(_Step(word))
                continue
            first = int(numbers[1])
            last = int(numbers[2] or numbers[1])
            if not steps or steps[-1].word not in LISTS or steps[-1].first is not None:
                return None
            if last < first:
                return None
            steps[-1] = _Step(steps[-1].word, first, last)
        return cls(text, tuple(steps))

    def holds(self, parameter: str) -> bool:
        """Return whether a parameter, by its name in the whole model (`in_model`), is in it."""
        return _stand_in_order(self.steps, parameter.split("."))

    def ends(self) -> Iterator[Part]:
        """Yield the first and the last layer of each range, which the model must have."""
        for index, step in enumerate(self.steps):
            for number in {step.first, step.last} - {None}:
                before = self.steps[:index]
                yield Part(f"{step.word}.{number}", (*before, _Step(step.word, number, number)))


def _stand_in_order(steps: Sequence[_Step], modules: Sequence[str]) -> bool:
    if not steps:
        return True
    step = steps[0]
    stands_for = WORDS.get(step.word, step.word.__eq__)
    for index, module in enumerate(modules):
        if step.word == "layers" and module == "mtp":
            return False  # the layers of multi-token prediction are those of ``mtp.layers``
        if not stands_for(module):
            continue
        rest = modules[index + 1 :]
        if step.first is not None and step.last is not None:
            if not (rest and rest[0].isdigit() and step.first <= int(rest[0]) <= step.last):
                continue
        if _stand_in_order(steps[1:], rest):
            return True
    return False


def in_model(name: str, number: int | None = None, *, tied: bool = False) -> str:
    """Return a parameter's name in the whole model, by its name in a pipeline stage.

    Norms in Transformer Engine's linear layers get the names of norms beside these.

    Args:
        number: the number of the parameter's layer in the model, from 0; None keeps the stage's.
        tied: whether an output layer is the word embedding.
    """
    if number is not None:
        name = _NUMBERED_LAYER.sub(rf"\g<1>{number}", name)
    if tied and name == "output_layer.weight":
        name = "embedding.word_embeddings.weight"
    return _NORM_OF_ENGINE.sub(lambda found: _NORMS[found[1]], name)


class FrozenParts:
    """The parts that the flags freeze; a name that is none is in no part (see `name_errors`)."""

    def __init__(self, config: FreezeConfig) -> None:
        self._frozen = _parts(config.freeze or ())
        self._alone = _parts(config.trained_alone)
        self._has_alone = bool(config.trained_alone)
        self.looked_for = [
            x for part in (*self._frozen, *self._alone) for x in (part, *part.ends())
        ]
        """The parts that the model must have: those of the flags, and the ends of their ranges."""

    def freeze(self, parameter: str) -> bool:
        """Return whether a parameter, by its name in the whole model, is not trained."""
        alone = not self._has_alone or any(part.holds(parameter) for part in self._alone)
        return not alone or any(part.holds(parameter) for part in self._frozen)

    def ranges_with(self, number: int) -> list[bool]:
        """Return, for each range of layers in the names, whether it has this number."""
        return [
            step.first <= number <= step.last
            for part in (*self._frozen, *self._alone)
            for step in part.steps
            if step.first is not None and step.last is not None
        ]

    def found(self, parameters: Iterable[str]) -> list[bool]:
        """Return whether each part of `looked_for` is there, and last whether any is trained."""
        names = list(parameters)
        here = [any(part.holds(name) for name in names) for part in self.looked_for]
        return [*here, any(not self.freeze(name) for name in names)]


def _parts(texts: Iterable[str]) -> list[Part]:
    return [part for part in map(Part.of, texts) if part is not None]


def _given(config: FreezeConfig) -> Iterator[tuple[str, str]]:
    """Yield each flag with a name that it was given."""
    for text in config.freeze or ():
        yield "--freeze", text
    base = config.freeze_base_for_mtp
    for text in config.trained_alone:
        yield ("--freeze-base-for-mtp" if base else "--freeze-all-but"), text


def name_errors(config: FreezeConfig) -> Iterator[FlagError]:
    """Yield an error for each text that can be no name of a part."""
    for flag, text in _given(config):
        if Part.of(text) is None:
            yield FlagError(
                flag,
                text,
                "must be words joined by dots, with numbers after a list of layers",
                "use a name such as attention, layers.0-3 or layers.2.mlp",
            )


def part_errors(
    config: FreezeConfig, found: Sequence[bool], modules: Iterable[str], *, tied: bool
) -> Iterator[FlagError]:
    """Yield an error for each name that names nothing in a model, or if nothing is trained.

    Args:
        found: the result of `FrozenParts.found` for the whole model.
        modules: the parameters' names, from which a similar name is suggested.
        tied: whether the model's output layer is its word embedding.
    """
    there = dict(zip(FrozenParts(config).looked_for, found, strict=False))
    known = dict.fromkeys([*LISTED, *(w for name in modules for w in name.split(".")[:-1])])
    words = [word for word in known if not word.isdigit()]
    wrong = False
    for flag, text in _given(config):
        part = Part.of(text)
        if part is None:
            continue
        beyond = [x.text for x in part.ends() if not there[x]]
        if there[part] and not beyond:
            continue
        wrong = True
        if text == "output" and tied:
            yield FlagError(
                flag, text, "is the word embedding of this model, which is tied", "use embeddings"
            )
        elif beyond:
            yield FlagError(
                flag, text, f"names layers that this model lacks ({', '.join(beyond)})",
                "numbers begin at 0",
            )  # fmt: skip
        else:
            others = [w.word for w in part.steps if w.word not in words]
            advice = did_you_mean(others[0], words) if others else ""
            usual = ", ".join(x for x in (*LISTED, "experts", "router", "mtp") if x in known)
            yield FlagError(flag, text, "names no part of this model", advice or f"use {usual}")
    if not wrong and not found[-1]:
        flags = list(dict.fromkeys(flag for flag, _ in _given(config)))
        yield FlagError(
            flags[0],
            " ".join(text for flag, text in _given(config) if flag == flags[0]),
            "freezes all of this model, and nothing would be trained",
            "name fewer parts, or evaluate with `--skip-train`",
        )


def freeze_errors(config: FreezeConfig, *, adapters: bool) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags themselves, whatever the model.

    ``adapters`` says whether the run trains LoRA adapters.
    """
    yield from name_errors(config)
    if config.freeze_base_for_mtp and config.freeze_all_but:
        yield FlagError(
            "--freeze-base-for-mtp",
            None,
            "is `--freeze-all-but mtp`, and does not go with another `--freeze-all-but`",
            "give one",
        )
    if adapters:
        yield FlagError(
            next(flag for flag, _ in _given(config)),
            None,
            "does not go with `--lora-rank`, which freezes all but the adapters",
            "choose the layers that get adapters by `--lora-target-modules`",
        )
