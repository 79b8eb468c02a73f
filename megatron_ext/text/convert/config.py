"""Translates the config.json of a transformers model into our flags, and back.

Sources: the configuration classes and ``modeling_rope_utils.py`` of transformers, and the
RotaryEmbedding of megatron-core.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_ext.checkpoint.safetensors_files import TensorFolder
from megatron_ext.errors import CheckpointError, ConfigError, FlagError, MegatronExtError
from megatron_ext.text.convert.entries import Choice
from megatron_ext.text.convert.families import FAMILIES, LACKING, MULTIMODAL
from megatron_ext.text.convert.family import (
    Family,
    Fields,
    Gpt,
    Settings,
    architecture_of,
    differences,
)
from megatron_ext.text.convert.multimodal import Multimodal, other_files, text_config
from megatron_ext.text.convert.quantization import ENTRY, read_quantization
from megatron_ext.text.convert.settings import SETTINGS, read_settings
from megatron_ext.text.convert.table import Shapes, Table


@dataclass(frozen=True)
class Wrapping:
    """The multimodal model around a text model.

    Attributes:
        kind: what kind of model it is.
        text: the text model, as if it stood alone.
        folder: the folder with its tensors; None if only its config.json is known.
    """

    kind: Multimodal
    text: HuggingFaceModel
    folder: Path | None


@dataclass(frozen=True)
class HuggingFaceModel:
    """A Hugging Face model as its config.json describes it, and the same values as our flags.

    Attributes:
        family: the family of models to which it belongs.
        raw: the entries of config.json.
        fields: our configuration fields that describe the same model, by name.
        path: the path of config.json, for messages.
        ignored: entries that have no effect here, although they differ from transformers' defaults.
        wrapping: the multimodal model of which this is the text part; None if there is none.
    """

    family: Family
    raw: dict[str, Any]
    fields: Fields
    vocab_size: int
    path: Path
    ignored: tuple[str, ...] = ()
    wrapping: Wrapping | None = None

    def notes(self) -> list[str]:
        """Return a note on the ignored entries of config.json, and one if only a part is used."""
        notes = []
        if self.wrapping is not None:
            notes.append(
                f"{self.path} describes a {self.wrapping.kind.model_type} model, of which the text "
                "part is used; what is written has the folder's other tensors as they are"
            )
        if self.ignored:
            names = ", ".join(f"`{name}`" for name in self.ignored)
            notes.append(f"{self.path}: these entries have no effect here: {names}")
        return notes

    def alone(self) -> HuggingFaceModel:
        """Return the text model alone if the folder with the other parts is not known."""
        if self.wrapping is None or self.wrapping.folder is not None:
            return self
        return self.wrapping.text

    @property
    def initializer_range(self) -> float:
        """Return the standard deviation with which transformers draws new weights."""
        text = self if self.wrapping is None else self.wrapping.text
        return float(getattr(_configuration(text.raw), "initializer_range", 0.02))

    def with_vocabulary(self, size: int) -> HuggingFaceModel:
        """Return the model with a vocabulary of ``size`` entries."""
        if self.wrapping is None:
            return replace(self, vocab_size=size, raw={**self.raw, "vocab_size": size})
        text = self.wrapping.text.with_vocabulary(size)
        key = self.wrapping.kind.key
        raw = {**self.raw, key: {**(self.raw.get(key) or {}), "vocab_size": size}}
        return replace(self, vocab_size=size, raw=raw, wrapping=replace(self.wrapping, text=text))

    def sections(self) -> Gpt:
        """Return our configuration sections that describe this model."""
        return Gpt.of_fields(self.fields)

    def table(self, shapes: Shapes | None = None) -> Table:
        """Return the table that maps our weights to the model's tensors.

        ``shapes`` are those of the tensors in the model's folder; None takes the form in which such
        a model is written.
        """
        return self.table_of(self.sections(), self.vocab_size, shapes)

    def table_of(self, gpt: Gpt, vocab_size: int, shapes: Shapes | None = None) -> Table:
        """Return the `table` for a run's configuration, which may differ in its MTP depths.

        The text part of a multimodal model is written in the form that its folder has.
        """
        wrapping = self.wrapping
        if wrapping is None:
            return self.family.table(gpt, vocab_size, shapes)
        if shapes is None and wrapping.folder is not None:
            with TensorFolder(wrapping.folder) as folder:
                shapes = {name: folder.shape(name) for name in folder.stored_names}
        form = wrapping.kind.form(shapes or {})
        return self.family.table(gpt, vocab_size, shapes, lambda weights: weights.but(renamed=form))


def read_model(folder: Path) -> HuggingFaceModel:
    """Read the config.json in a folder; raise a CheckpointError if it is unusable."""
    return parse_model(read_settings(folder), folder / SETTINGS, folder)


def parse_model(raw: dict[str, Any], path: Path, folder: Path | None = None) -> HuggingFaceModel:
    """Return the model that ``raw``, the content of the config.json at ``path``, describes.

    ``folder`` holds the model's tensors; None means that they are not known. Raise a
    CheckpointError if our flags cannot describe the model.
    """
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in MULTIMODAL:
        return _parse_text_part(MULTIMODAL[kind], raw, path, folder)
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(_unknown(raw, path))
    _check_sizes(raw, path)
    try:
        return _parsed(raw, path)
    except MegatronExtError:
        raise
    # Versions of transformers differ in the error that they raise for a bad entry.
    except Exception as error:
        raise _unreadable(raw, path, error) from error


def _parse_text_part(
    kind: Multimodal, raw: dict[str, Any], path: Path, folder: Path | None
) -> HuggingFaceModel:
    """Return the text part of the multimodal model that ``raw`` describes."""
    classes = raw.get("architectures") or [kind.architecture]
    if classes not in [[name] for name in (kind.architecture, *kind.also_named)]:
        raise CheckpointError(
            f"{path} says `architectures` {raw['architectures']!r}, but of {kind.model_type} only "
            f"{kind.architecture} can be converted; use a model of this class."
        )
    try:
        whole = _configuration(raw)
    except MegatronExtError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({' '.join(str(error).split())[:300].rstrip('.')}); copy it "
            "again."
        ) from error
    text = parse_model(text_config(kind, raw, whole, path), path)
    ignored = tuple(f"{kind.key}.{name}" for name in text.ignored)
    wrapping = Wrapping(kind, text, folder)
    return replace(text, raw=raw, ignored=ignored, wrapping=wrapping)


def _check_sizes(raw: Mapping[str, Any], path: Path) -> None:
    """Raise a CheckpointError for a number in config.json that would exhaust the memory."""
    for name, value in raw.items():
        most = _MOST_LAYERS if name == "num_hidden_layers" else _LARGEST_ENTRY
        if isinstance(value, int) and not -most <= value <= most:
            raise CheckpointError(
                f"{path} gives `{name}` as {value}, but {most:,} is the most; copy it again."
            )


def _parsed(raw: dict[str, Any], path: Path) -> HuggingFaceModel:
    """Return the model that ``raw``, the content of a config.json, describes.

    A bad entry may raise an exception of any class, since transformers reads the entries too.
    """
    family = FAMILIES[raw["model_type"]]
    config = _configuration(raw)
    settings = Settings(path, config.to_dict(), raw)
    _refuse_unsupported(settings, raw, family)
    fields = family.fields(settings)
    vocab_size = int(settings["vocab_size"])
    ignored = _without_effect(raw, settings, config)
    return HuggingFaceModel(family, raw, fields, vocab_size, path, ignored)


def _unreadable(raw: dict[str, Any], path: Path, error: Exception) -> CheckpointError:
    """Return the error about a config.json that transformers or a family could not read.

    The exception ``error`` seldom names the wrong entry. So config.json is read again without each
    entry in turn; the message names those without which it can be read. If ``error`` is about a
    None, the message also names the missing entries with which it can be read.
    """
    reason = " ".join(str(error).split())[:300].rstrip(".:") or type(error).__name__
    if "rope_parameters" not in raw:
        reason = reason.replace("rope_parameters", "rope_scaling")
    wrong = []
    for key in raw.keys() - {"model_type"}:
        rest = {name: value for name, value in raw.items() if name != key}
        with suppress(Exception):
            # What it says may still be refused.
            with suppress(MegatronExtError):
                _parsed(rest, path)
            wrong.append(f"`{key}` {raw[key]!r}")
    mend = " or ".join(sorted(wrong)) or "it"
    if "NoneType" in reason:
        missing = []
        with suppress(Exception):
            nothing = [key for key, value in _configuration(raw).to_dict().items() if value is None]
            for key in nothing:
                with suppress(Exception):
                    _parsed({**raw, key: 1}, path)
                    missing.append(f"`{key}`")
        mend += f", or give {' or '.join(sorted(missing))}" if missing else ""
    if "factor" in reason and "length" in reason:
        # The lists of a rotary scaling have one factor for each pair of rotated channels of a head,
        # so the size of a head may be wrong instead of the lists.
        given = ((key, raw.get(key)) for key in _OF_HEADS)
        sizes = ", ".join(f"`{key}` {'missing' if x is None else x}" for key, x in given)
        mend += f", or the size of a head ({sizes})"
    return CheckpointError(f"{path} cannot be read ({reason}); mend {mend}.")


_OF_HEADS = ("hidden_size", "num_attention_heads")


def _without_effect(raw: dict[str, Any], settings: Settings, config: Any) -> tuple[str, ...]:
    """Return the names of entries that have no effect here, except those with the default value.

    ``config`` is transformers' configuration object for ``raw``, the content of config.json.
    """
    # An entry may have two names, such as `hidden_size` and GPT-2's `n_embd`.
    aliases: Mapping[str, str] = config.attribute_map
    usual = type(config)().to_dict()
    twice = {x for pair in aliases.items() if raw.keys() >= {*pair} for x in pair}
    ignored = list(settings.ignored)
    for key, value in raw.items():
        name = aliases.get(key, key)
        if key in DESCRIBING or (key == "rope_scaling" and _is_taken_over(value, settings)):
            continue
        if key in _OF_WINDOWS and raw.get("use_sliding_window") is False:
            continue
        # All layers see the whole sequence, as they do without the entry.
        is_list = key == "layer_types" and isinstance(value, list)
        if is_list and all(kind == "full_attention" for kind in value):
            continue
        # A switch that transformers does not know, and that is off, asks for nothing.
        if key not in usual and value in (None, False):
            continue
        # If the file gives both names of an entry, transformers drops one of the values.
        lost = key in twice and settings.values.get(name) != value
        if lost or (name not in settings.read and usual.get(name, _NOTHING) != value):
            ignored.append(key)
    inner = raw.get("rope_parameters") or {}
    ignored += [key for key in ("rope_theta",) if {key} <= raw.keys() & inner.keys()]
    ignored += [f"{ENTRY}.{key}" for key in read_quantization(raw, settings.path).unused]
    return tuple(ignored)


def _is_taken_over(scaling: Any, settings: Settings) -> bool:
    """Tell whether every value of a config.json's entry `rope_scaling` is in ``settings`` too.

    Args:
        scaling: the entry, as transformers 4 writes it.
        settings: the entries as transformers has read them. transformers 5 moves the values of
            `rope_scaling` to `rope_parameters`.
    """
    read = settings.values.get("rope_parameters") or settings.values.get("rope_scaling") or {}
    given = dict(scaling or {})
    kind = given.pop("type", given.get("rope_type"))
    return kind == given.get("rope_type", kind) and all(read.get(x) == given[x] for x in given)


_NOTHING = object()
DESCRIBING = tuple(
    "model_type architectures quantization_config transformers_version torch_dtype dtype "
    "transformers.js_config is_llama_config task_specific_params use_cache cache_implementation "
    "n_ctx bos_token_id eos_token_id pad_token_id".split()
)
"""Entries of config.json that are never reported as ignored.

They are read elsewhere, describe the file, or are settings of transformers' own programs. The
number format of a run and its special tokens come from its flags and its tokenizer.
"""
_OF_WINDOWS = ("sliding_window", "max_window_layers")


def _unknown(raw: dict[str, Any], path: Path) -> str:
    """Return the error message for an unknown `model_type`; it names the most similar family."""
    kind = raw.get("model_type")
    said = f"{path} says `model_type` {kind!r}, which cannot be converted"
    if isinstance(kind, str) and kind in LACKING:
        said += f", since its models have {LACKING[kind]}"
    said += f"; use one of the {len(FAMILIES)} families in docs/huggingface.md"
    samples = {name: _sample(family) for name, family in FAMILIES.items()}
    shared = {name: len(raw.keys() & keys) for name, keys in samples.items()}
    nearest = max(shared, key=lambda name: (shared[name], -len(samples[name])))
    if shared[nearest] < 4:
        return f"{said}."
    own = sorted(raw.keys() - samples[nearest] - _UNIMPORTANT)
    lacks = sorted(samples[nearest] - raw.keys() - _UNIMPORTANT)
    parts = []
    if own:
        parts.append(f"has {', '.join(f'`{key}`' for key in own)} besides")
    if lacks:
        parts.append(f"lacks {', '.join(f'`{key}`' for key in lacks)}")
    differs = " and ".join(parts) or "has another name for the same settings"
    return f"{said} (the nearest is {nearest}, from which it differs: it {differs})."


_UNIMPORTANT = set(
    "_name_or_path architectures auto_map bos_token_id dtype eos_token_id initializer_range "
    "model_type pad_token_id torch_dtype transformers_version use_cache rope_scaling rope_theta "
    "rope_parameters tie_word_embeddings attention_dropout max_position_embeddings vocab_size "
    "pretraining_tp head_dim".split()
)
"""Entries of config.json that do not distinguish one family from another."""


def _sample(family: Family) -> set[str]:
    """Return the names of the entries in the config.json that a family writes for a small model.

    They are compared with those of an unknown config.json to find the most similar family.
    """
    return set(family.settings(Gpt.of_fields(_SAMPLE | dict(family.fixed))))


_SAMPLE = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "num_experts": 1,
    "moe_ffn_hidden_size": 8,
}


def _configuration(raw: dict[str, Any]) -> Any:
    """Return transformers' configuration object, with defaults for entries that ``raw`` lacks."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(
            "Hugging Face models need transformers; install `megatron-ext[hf]`."
        ) from error
    given = {key: value for key, value in raw.items() if key != "quantization_config"}
    family = FAMILIES.get(raw.get("model_type", ""))
    if family is not None and family.known_as is not None:
        given = {**family.defaults, **given, "model_type": family.known_as}
    with warnings.catch_warnings():
        # Users cannot change the file of a published model, so hide advice about its old entries.
        warnings.simplefilter("ignore", FutureWarning)
        # Copy, since transformers changes its arguments.
        return AutoConfig.for_model(**_with_infinite(copy.deepcopy(given)))


def _with_infinite(content: Any) -> Any:
    """Return entries of a config.json with the numbers that transformers writes as objects.

    It writes infinity as ``{"__float__": "Infinity"}``, and reads it only from a file.
    """
    if isinstance(content, list):
        return [_with_infinite(value) for value in content]
    if not isinstance(content, dict):
        return content
    if content.keys() == {_FLOAT}:
        return float(content[_FLOAT])
    return {key: _with_infinite(value) for key, value in content.items()}


_FLOAT = "__float__"


def _refuse_unsupported(settings: Settings, raw: dict[str, Any], family: Family) -> None:
    """Raise a CheckpointError for weights of another class, or ones that cannot be read."""
    read_quantization(raw, settings.path)
    architectures = raw.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        settings.refuse(
            "architectures", architectures, f"use a model of class {family.architecture}"
        )


_MOST_LAYERS = 10_000
_LARGEST_ENTRY = 1 << 48


TOKENIZER_FILES = (
    "tokenizer* *.model vocab* merges.txt added_tokens.json special_tokens_map.json "
    "chat_template* generation_config.json "
    "configuration_*.py modeling_*.py tokenization_*.py"
).split()
"""Name patterns of the files that define a tokenizer or generation defaults.

Some models bring code of their own, which the entry `auto_map` of their files names.
"""


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a Hugging Face folder that define its tokenizer or generation defaults.

    `TOKENIZER_FILES` has the patterns of their names.
    """
    paths = {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}
    return sorted(path for path in paths if path.is_file())


def files_to_copy(model: HuggingFaceModel) -> list[Path]:
    """Return the files of a model's folder that an export copies.

    These are its tokenizer's files, and all files of a multimodal model that hold no weights.
    """
    if model.wrapping is not None and model.wrapping.folder is not None:
        return other_files(model.wrapping.folder)
    return tokenizer_files(model.path.parent)


def config_json(
    gpt: Gpt,
    *,
    vocab_size: int,
    dtype: torch.dtype,
    like: HuggingFaceModel | None,
    special_tokens: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the content of the config.json that describes our model.

    Entries that our flags do not determine are taken from ``like``; if it is None,
    ``special_tokens`` gives ids such as ``bos_token_id``. Raise a CheckpointError if the model fits
    none of `FAMILIES`, or differs from ``like``.
    """
    own = {"vocab_size": vocab_size, "torch_dtype": str(dtype).removeprefix("torch.")}
    if like is not None and like.wrapping is not None:
        text = like.wrapping.text
        inner = config_json(gpt, vocab_size=vocab_size, dtype=dtype, like=text)
        return like.wrapping.kind.content(like.raw, inner)
    if like is not None:
        _check_like(gpt, like)
        base = dict(like.raw)
        # Our own entries replace these: rope_theta, which all versions of transformers read, and
        # torch_dtype. Weights are never written quantized.
        for name in ("rope_parameters", "dtype", "quantization_config"):
            base.pop(name, None)
        kept = {
            entry.key: like.raw[entry.key]
            for entry in like.family.entries
            if isinstance(entry, Choice) and entry.fits(like.raw.get(entry.key), gpt)
        }
        content = {**base, **like.family.settings(gpt), **kept, **own}
        longest = like.fields["max_position_embeddings"]
        key = like.family.key_of("max_position_embeddings")
        return {**content, key: max(gpt.positions.max_position_embeddings or 0, longest)}
    # Without these entries transformers would assume the token ids of the first Llama.
    own |= {**_NO_TOKENS, **(special_tokens or {})}
    return {**own, **_fitting(gpt)[1]}


def fitting_family(gpt: Gpt) -> Family:
    """Return the first of `FAMILIES` whose config.json can describe the model ``gpt``.

    Raise a CheckpointError if none can.
    """
    return _fitting(gpt)[0]


_NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def _fitting(gpt: Gpt) -> tuple[Family, dict[str, Any]]:
    best: tuple[str, list[tuple[str, Any, Any]]] | None = None
    # transformers warns of special tokens beyond the vocabulary, as its defaults would be.
    tokens = {"vocab_size": 1, **_NO_TOKENS}
    ours = architecture_of(gpt)
    for name, family in FAMILIES.items():
        # transformers need not be asked about a family that differs too much in any case.
        fewest = sum(ours.get(field, value) != value for field, value in family.fixed.items())
        if fewest and best is not None and fewest >= len(best[1]):
            continue
        content = family.settings(gpt)
        try:
            again = parse_model({**content, **tokens}, Path("config.json"))
        except CheckpointError:
            continue
        mismatches = differences(ours, architecture_of(again.sections()))
        depths = gpt.model.mtp_num_layers
        if not mismatches and depths not in (None, again.fields.get("mtp_num_layers")):
            mismatches = [("mtp_num_layers", depths, None)]
        if not mismatches:
            return family, content
        if best is None or len(mismatches) < len(best[1]):
            best = name, mismatches
    assert best is not None
    nearest, mismatches = best
    said = " and ".join(
        f"{_flag(name)} is {given!r}, not {theirs!r}" for name, given, theirs in mismatches
    )
    raise CheckpointError(
        f"The checkpoint's model is none of Hugging Face's {len(FAMILIES)} in "
        "docs/huggingface.md; the nearest is "
        f"{nearest}, but {said}, so it cannot be exported."
    )


def _flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def _check_like(gpt: Gpt, like: HuggingFaceModel) -> None:
    """Raise a CheckpointError if our model has another architecture than ``like``."""
    theirs = architecture_of(like.sections())
    for name, ours, other in differences(architecture_of(gpt), theirs):
        raise CheckpointError(
            f"The checkpoint's {_flag(name)} is {ours!r}, but `--hf-like` is a model with "
            f"{other!r}; give the folder that the checkpoint began with."
        )


def _begin_alike(ours: Any, theirs: Any) -> bool:
    """Return whether both are lists, of which one is the beginning of the other."""
    both_lists = isinstance(ours, list) and isinstance(theirs, list)
    return both_lists and all(a == b for a, b in zip(ours, theirs, strict=False))


def disagreements(given: Gpt, model: HuggingFaceModel) -> list[FlagError]:
    """Return an error for each flag that contradicts the config.json of the initial weights.

    Args:
        given: the configuration of the run.
        model: the model that the config.json describes.
    """
    theirs = architecture_of(model.sections())
    found = differences(architecture_of(given), theirs)
    if any(name == "num_layers" for name, *_ in found):
        # Lists with an entry for each layer then differ in length alone.
        found = [each for each in found if not _begin_alike(*each[1:])]
    return [
        FlagError(
            _flag(name),
            None,
            f"is {ours!r}, but {model.path} says {other!r}, with which its weights were trained",
            "leave the flag out",
        )
        for name, ours, other in found
    ]
