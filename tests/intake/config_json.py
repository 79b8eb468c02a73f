"""Leaves of config.json of each family of Hugging Face models."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers

from megatron_ext.text.convert.config import DESCRIBING, read_model
from tests.intake.judge import Heard
from tests.text.convert.models import MODELS, SIZES

PUBLISHED: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": True,
    "initializer_range": 0.03,
    "rope_scaling": None,
}
"""Entries that published folders have beside those that describe the network."""


# Its warnings are no answer of ours, and would bury the search's own lines.
transformers.logging.set_verbosity_error()


def bases() -> Iterator[tuple[str, Any]]:
    for name, model in MODELS.items():
        yield name, {**PUBLISHED, **SIZES, **model}


def hear(content: Any, folder: Path) -> Heard:
    """Return what the project makes of a config.json."""
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    model = read_model(folder)
    # Each published folder has such entries, which do not describe the network. The number format
    # and the special tokens of a run are those of its flags and its tokenizer.
    describing = {key: value for key, value in content.items() if key in DESCRIBING}
    return Heard((model.fields, model.vocab_size, describing), "\n".join(model.notes()))
