"""Every family, in two odd settings, against transformers' own class.

``python -m pytest tests/text/convert/test_families.py -k "olmo2 and not step"`` tests one family.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_ext.checkpoint.conversion import one_rank
from megatron_ext.errors import CheckpointError, MegatronExtError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.convert.config import DESCRIBING, config_json, parse_model, read_model
from megatron_ext.text.convert.families import FAMILIES, MODULES
from megatron_ext.text.convert.family import architecture_of, differences
from megatron_ext.text.convert.huggingface import build_bare, reference_model
from megatron_ext.text.convert.reading import load_folder, without_missing_depths
from megatron_ext.text.convert.writing import write_model
from tests.text.convert.families_table import PAGE, with_table
from tests.text.convert.models import LENGTH, class_of, in_child, make_tiny, theirs, tokens
from tests.text.convert.settings import SETTINGS, mixers
from tests.text.convert.test_training import LAYOUTS, check_folder
from tests.training_runs import config_of

PLAIN = (
    "--seq-length 24 --micro-batch-size 1 --skip-train --tokenizer-type NullTokenizer "
    "--vocab-size 299"
).split()
ALONE = [name for name in MODULES if FAMILIES[name].architecture.endswith("ForCausalLM")]
"""Families whose models transformers reads alone; others are tested within multimodal ones."""
CASES = [
    pytest.param(name, number, marks=[pytest.mark.slow] if number else [])
    for name in ALONE
    for number in (0, 1)
]


def made(name: str, number: int, folder: Path) -> Path:
    return make_tiny({"model_type": name, **SETTINGS[name][number]}, folder)


def chunk_of(source: Path, context: ParallelContext) -> Any:
    """Return our model with the weights of a folder, on one rank."""
    model = read_model(source)
    chunk = build_bare(config_of(["--load-hf", str(source), *PLAIN]), context)
    assert load_folder([chunk], source, context).notes == model.notes()
    return chunk.eval()


def difference_in(chunk: Any, ids: Tensor, expected: Tensor) -> float:
    """Return how far our logits are from ``expected`` ``[b, s, v]``, relative to the largest."""
    with torch.no_grad():
        ours = chunk(ids, torch.arange(LENGTH)[None], None)[..., : expected.shape[-1]]
    return float((ours - expected).abs().max() / expected.abs().max())


def difference_of(source: Path, ids: Tensor, expected: Tensor) -> float:
    """Return how far the logits of a folder's model are from ``expected`` ``[b, s, v]``."""
    with one_rank(1) as context:
        return difference_in(chunk_of(source, context), ids, expected)


def round_trip(source: Path, back: Path) -> float:
    """Read a folder, and write it again; return how far the logits are from transformers'."""
    model = without_missing_depths(read_model(source))
    gpt = model.sections()
    with one_rank(1) as context:
        chunk = chunk_of(source, context)
        difference = difference_in(chunk, tokens(), theirs(source))
        content = config_json(gpt, vocab_size=300, dtype=torch.float32, like=model)
        layers = gpt.model.num_layers or 0
        table = model.table()
        write_model(back, [chunk], context, table, content, num_layers=layers, dtype=torch.float32)
    # A model from scratch with these sizes is written too, as this family or as one like it.
    scratch = config_json(gpt, vocab_size=300, dtype=torch.float32, like=None)
    again = parse_model(scratch, back / "config.json").sections()
    assert not differences(architecture_of(again), architecture_of(gpt))
    return difference


@pytest.mark.parametrize(("name", "number"), CASES)
def test_logits_and_the_way_back(name: str, number: int, tmp_path: Path) -> None:
    source, back = made(name, number, tmp_path / "hf"), tmp_path / "back"
    assert in_child(lambda: round_trip(source, back), tmp_path / "difference") < 1e-5
    before, after = (load_file(x / "model.safetensors") for x in (source, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    reread = json.loads((back / "config.json").read_text())
    assert reread["model_type"] == name
    assert torch.equal(theirs(back), theirs(source))
    known = FAMILIES[FAMILIES[name].known_as or name]
    assert type(class_of(back)).__name__ == known.architecture


def test_kimi_linear_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    settings = {"model_type": "kimi_linear", **SETTINGS["kimi_linear"][0]}
    source = make_tiny(settings, tmp_path / "hf", as_published=False)
    names = load_file(source / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in names
    expected = theirs(source)
    assert in_child(lambda: difference_of(source, tokens(), expected), tmp_path / "out") < 1e-5


STEPS = {"qwen3": "tp2pp2"}
"""Families of which a step is tested quickly, and its layout."""


def layout_of(source: Path) -> str:
    """Return a layout that can split the model of a folder."""
    gpt = read_model(source).sections()
    heads = gpt.model.num_attention_heads or 0
    groups = gpt.model.num_query_groups or heads
    splits = heads % 2 == 0 and groups % 2 == 0
    if gpt.moe.num_experts is not None:
        return "tp2pp2ep2" if splits else "pp2ep2"
    return "tp2pp2" if splits else "pp2dp2"


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, n, marks=[] if (n == 0 and name in STEPS) else [pytest.mark.slow])
        for name in ALONE
        for n in (0, 1)
    ],
)
def test_a_step_is_that_of_transformers(name: str, number: int, tmp_path: Path) -> None:
    source = made(name, number, tmp_path / "hf")
    check_folder(source, [layout_of(source)], tmp_path, tolerance=2e-6, steps=1)


def test_every_family_has_settings() -> None:
    assert SETTINGS.keys() == MODULES.keys()
    assert all(FAMILIES[name].model_type == name for name in MODULES)
    assert {"tp2pp2", "tp2pp2ep2", "pp2ep2", "pp2dp2"} <= LAYOUTS.keys()


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_said_twice(name: str) -> None:
    """Each field of ours, and each entry of config.json, has one declaration."""
    family = FAMILIES[name]
    fields = [field for entry in family.entries for field in entry.fields] + [*family.fixed]
    assert len(fields) == len(set(fields)), fields
    written = [{*entry.keys} for entry in family.entries] + [{*family.only}]
    assert sum(map(len, written)) == len(set().union(*written)), written


def test_code_of_a_folder_is_not_run_to_compare_logits(tmp_path: Path) -> None:
    model = read_model(made("minicpm", 0, tmp_path / "hf"))
    with pytest.raises(CheckpointError, match="whose code comes with the folder and is not run"):
        reference_model(model)


def test_the_page_has_the_families_as_they_are() -> None:
    """``python -m tests.text.convert.families_table`` writes it."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page


def others_of(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each entry of a config.json with another value, one at a time."""
    for key, value in content.items():
        if key in DESCRIBING or key in SHAPING or key.startswith("_"):
            continue
        if isinstance(value, bool):
            yield key, not value
        elif isinstance(value, int):
            yield key, value * 2
        elif isinstance(value, float):
            yield key, value * 1.5 + 0.1
        elif key == "layer_types":
            yield key, ["full_attention", "sliding_attention"][: len(value)]
        elif "act" in key and isinstance(value, str):
            yield key, "gelu" if value != "gelu" else "gelu_new"


SHAPING = ("architectures", "vocab_size", "initializer_range", "chunk_size_feed_forward")
"""Entries whose effect other tests know, or that only weights from scratch feel."""


def heard(name: str, folder: Path) -> list[str]:
    """Change each entry of a family's config.json; return those that nobody hears."""
    settings = {"model_type": name, **SETTINGS[name][0]}
    content = json.loads((make_tiny(settings, folder / "first") / "config.json").read_text())
    wrong = []
    for key, value in others_of(content):
        try:
            source = make_tiny({**settings, key: value}, folder / key)
            expected = theirs(source)
        except Exception:
            continue
        if not expected.isfinite().all():
            continue
        try:
            difference = difference_of(source, tokens(), expected)
        except MegatronExtError:
            continue
        # Heads of recurrent layers whose outputs nearly vanish raise rounding errors.
        rounding = 1e-4 if name in mixers.SETTINGS else 1e-5
        if difference > rounding and not any(key in note for note in read_model(source).notes()):
            wrong.append(f"{key} {value}: {difference:.0e}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_each_entry_is_heard_or_named_or_refused(name: str, tmp_path: Path) -> None:
    """Logits with a changed entry are those of transformers, or a sentence is about it."""
    assert in_child(lambda: heard(name, tmp_path), tmp_path / "wrong") == []
