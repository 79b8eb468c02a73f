"""Writes the model card of a Hugging Face folder: what a model is, and what it was trained on.

A card is made to be published. So it has the numbers, switches and choices of a run, and the last
part of the names of its data; it has no path, address, name or text that a user gave.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext import extras
from megatron_ext.config import flag_line
from megatron_ext.config.flags import Flag, flags_of
from megatron_ext.config.run import engine_sections, named
from megatron_ext.disk.reading import UnreadableFile, read_text
from megatron_ext.errors import MegatronExtError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.convert.config import HuggingFaceModel
from megatron_ext.text.data.config import DataConfig

FILE = "README.md"
MARK = "<!-- written by megatron_ext; a card without this line is kept -->"
Values = Mapping[str, Mapping[str, Any]]
"""Values of a configuration: name of the section -> name of the field -> value."""
_SECTIONS = "training optimizer precision fp8 lora freeze loss ema data sft parallel".split()
"""The sections whose settings a card lists; those of the model are in config.json."""
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Training:
    """The training of a model, as a card tells of it.

    Attributes:
        values: the configuration of the run.
        iteration: number of its steps.
        samples: number of its samples.
        save: its save folder, which may hold a ledger of its data; None if there is none.
        like: the model whose weights it began with; None if it began from random ones.
    """

    values: Values
    iteration: int
    samples: int
    save: Path | None
    like: HuggingFaceModel | None


def model_card(name: str, model_type: str, training: Training, quantization: str | None) -> str:
    """Return the text of the model card of a model with the given name.

    ``quantization`` is the number format of its linear layers, or None.
    """
    lines = [
        "---",
        *_front_matter(model_type, training),
        "---",
        MARK,
        "",
        f"# {name}",
        "",
        f"A `{model_type}` model, written by megatron_ext{_after(training)}.",
    ]
    if quantization is not None:
        lines.append(f"Its linear layers are stored in {quantization}.")
    lines += ["", "## Trained on", "", *_trained_on(training)]
    settings = [" ".join(words) for words in _settings(training.values)]
    if settings and training.iteration:
        lines += ["", "## Settings", "", "```", *settings, "```"]
    return "\n".join(lines) + "\n"


def _after(training: Training) -> str:
    return f" after {training.iteration:,} steps" if training.iteration else ""


def _front_matter(model_type: str, training: Training) -> Iterator[str]:
    """Yield the lines of YAML that the Hugging Face hub reads."""
    yield "library_name: transformers"
    yield "pipeline_tag: text-generation"
    base = None if training.like is None else training.like.raw.get("_name_or_path")
    if isinstance(base, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", base):
        yield f"base_model: {base}"
    like = training.like
    license_name = None
    if like is not None and like.path.is_file():
        license_name = _license(like.path.parent)
    if license_name is not None:
        # Weights that were trained further stay under the license of those they began with.
        yield f"license: {license_name}"
    yield "tags:"
    yield f"- {model_type}"
    yield "- megatron_ext"


def _license(folder: Path) -> str | None:
    """Return the license that the card in a folder names; None if it names none."""
    card = read_card(folder / FILE)
    head = re.match(r"---\n(.*?)\n---", card or "", re.DOTALL)
    found = re.search(r"^license: *([\w.-]+) *$", head[1], re.MULTILINE) if head else None
    return found[1] if found else None


def read_card(path: Path) -> str | None:
    """Return the text of a card; None if there is none, or it is no text or too long."""
    if not path.is_file() or path.stat().st_size > _LONGEST:
        return None
    try:
        return read_text(path)
    except UnreadableFile:
        return None


def _trained_on(training: Training) -> Iterator[str]:
    sequence = training.values.get("model", {}).get("seq_length") or 0
    began = "random weights"
    if training.like is not None:
        began = f"the weights of {_published(training.like.path.parent.name) or 'a public model'}"
    yield f"- It began with {began}."
    if not training.iteration:
        yield "- It was converted, and not trained here."
        return
    tokens = f", at most {training.samples * sequence:,} tokens" if sequence else ""
    yield f"- It saw {training.samples:,} samples{tokens}."
    if training.values.get("sft", {}).get("sft"):
        yield "- The samples are conversations; answers are trained."
    used = _from_ledger(training)
    if used is not None:
        yield "- The ledger of the run tells which data its weights come from:"
        yield ""
        yield from used
        return
    names = sorted(set(_data_names(training.values.get("data", {}))))
    if names:
        yield f"- Its data: {', '.join(names)}. The run kept no ledger of what it read."


def _from_ledger(training: Training) -> list[str] | None:
    """Return a table of the data that a run has read; None if it has no ledger of its steps."""
    counts = extras.part("ledger", "counts")
    if counts is None or training.save is None:
        return None
    try:
        ledger = extras.part("ledger", "ledger").Ledger(training.save, training.iteration)
        uses = counts.uses(ledger)
    except (MegatronExtError, OSError):
        return None
    total = sum(use.counted * use.seq_length for use in uses)
    if not total:
        return None
    lines = ["| data | samples | tokens | share | epochs |", "|---|---|---|---|---|"]
    for source in dict.fromkeys(use.source for use in uses):
        own = [use for use in uses if use.source == source]
        samples = sum(use.counted for use in own)
        tokens = sum(use.counted * use.seq_length for use in own)
        shown = _published(source.rpartition("/")[2]) or "(unnamed)"
        epochs = tokens / own[0].tokens
        lines.append(
            f"| {shown} | {samples:,} | {tokens:,} | {tokens / total:.1%} | {epochs:.2f} |"
        )
    return lines


def _data_names(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the last parts of the paths of a run's data, without the weights between them."""
    if values.get("mock_data"):
        yield "mock data"
    for field in ("data_path", "train_data_path"):
        given = values.get(field) or []
        for word in [given] if isinstance(given, str) else given:
            name = _published(str(word).rstrip("/").rpartition("/")[2])
            if name is not None and not re.fullmatch(r"[\d.eE+-]+", name):
                yield name


def _published(name: str) -> str | None:
    """Return a name of data or of a model if it has letters, digits, dots and dashes alone."""
    return name if re.fullmatch(r"[\w.-]{1,100}", name) else None


def _settings(values: Values) -> Iterator[Sequence[str]]:
    """Yield the flags that set a run's numbers, switches and choices to others than the usual."""
    kinds = engine_sections() | named((DataConfig, SftConfig))
    for section in _SECTIONS:
        for flag in flags_of(section, kinds[section]):
            value = values.get(section, {}).get(flag.field, flag.default)
            if value != flag.default and _is_plain(flag, value):
                yield flag_line.words_of(flag, value)


def _is_plain(flag: Flag, value: Any) -> bool:
    """Tell whether a value is a number, a switch or one of the flag's choices."""
    if flag.choices is not None:
        return value in flag.choices
    return isinstance(value, bool | int | float)
