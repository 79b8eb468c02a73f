"""Recipes: each is the published model, fits in each of its layouts, and the tiny ones train."""

import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from megatron_ext.config.layers import read_pattern
from megatron_ext.config.parser import ParsedArgs
from megatron_ext.config.run import RunConfig
from megatron_ext.planning.hardware import gpu_named
from megatron_ext.planning.memory import worst_case
from megatron_ext.planning.report import active_parameters, model_parameters
from megatron_ext.planning.step_time import estimate
from megatron_ext.text.convert.config import parse_model
from megatron_ext.text.hybrid import read_pattern as read_kinds
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import preflight
from megatron_ext.video.task import VIDEO
from tests.training_runs import ROOT, parsed, train_steps
from tests.video.clips import LONG, write_clips

RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.yaml"))}
TINY = {name for name in RECIPES if name.startswith("tiny_")}
BILLIONS = {
    "llama3_8b": (8.03, 8.03),
    "llama3_70b": (70.55, 70.55),
    "qwen3_8b": (8.19, 8.19),
    "qwen3_30b_a3b": (30.53, 3.35),
    # 671 without multi-token prediction, whose layer and projection have 11.5.
    "deepseek_v3": (682.55, 38.24),
    "qwen3_next_80b_a3b": (79.67, 3.87),
    "nemotron_h_56b": (56.32, 56.32),
    # The model card counts the 3.6 billion that a token uses without the embedding's 0.58.
    "gpt_oss_20b": (20.91, 4.19),
    "wan_1.3b": (1.42, 1.42),
    "wan_14b": (14.29, 14.29),
    "open_sora_2": (11.89, 11.89),
    "open_sora_2_768px": (11.89, 11.89),
}
"""Parameters of each model, and those that a token uses, in billions."""
PUBLISHED = json.loads((Path(__file__).parent / "recipes.json").read_text(encoding="utf-8"))
"""The sizes and kinds in the config.json of each text model, as its authors publish it."""


def content_of(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(RECIPES[name].read_text(encoding="utf-8"))
    return content


def layouts() -> list[tuple[str, str]]:
    return [(name, layout) for name in RECIPES for layout in content_of(name)["layouts"]]


def planning_flags(name: str) -> list[str]:
    """Return the flags by which a recipe's first comment says that it is planned."""
    text = RECIPES[name].read_text(encoding="utf-8")
    shown = re.search(r"^#   (--dry-run (?:.*\\\n)*.*)$", text, re.MULTILINE)
    return shlex.split(shown[1].replace("\\\n#", " ")) if shown else ["--dry-run"]


@functools.cache
def planned(name: str, layout: str) -> tuple[ParsedArgs, RunConfig]:
    is_video = "video_model" in content_of(name)
    words = ["--config", str(RECIPES[name]), "--layout", layout, *planning_flags(name)]
    found = parsed(words, VIDEO if is_video else TEXT, ranks=0)
    return found, preflight(found.config, found.task.preflight)[0]


def test_each_recipe_is_tested() -> None:
    assert set(RECIPES) == {*BILLIONS, *TINY}
    assert set(PUBLISHED) == {name for name in BILLIONS if "video_model" not in content_of(name)}


def test_the_manual_lists_each_recipe_and_its_layouts() -> None:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w[\w.]*)\.yaml` \| .* \| (.*) \|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == [*BILLIONS, *sorted(TINY)]
    for name, listed in rows:
        assert listed.split(", ") == list(content_of(name)["layouts"])


@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name, layout in layouts() if name not in TINY]
)
def test_a_model_has_its_published_size_and_fits(name: str, layout: str) -> None:
    found, config = planned(name, layout)
    assert found.notes == []
    count, gpu = layout.split("x")
    assert (config.parallel.world_size, config.planning.dry_run_gpu) == (int(count), gpu)
    assert config.parallel.nproc_per_node == 8
    network, ranks = worst_case(found.task.cost.cases(config))
    sizes = model_parameters(ranks), active_parameters(ranks, network)
    for size, billions in zip(sizes, BILLIONS[name], strict=True):
        assert size / 1e9 == pytest.approx(billions, rel=1e-3, abs=0.006)
    estimated = estimate(network, gpu_named(gpu))
    assert estimated.fits, (estimated.peak, estimated.reserve)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_text_model_is_its_published_configuration(name: str) -> None:
    """The recipe says what `--load-hf` reads in the authors' file."""
    layout = next(iter(content_of(name)["layouts"]))
    _, config = planned(name, layout)
    ours = {k: v for section in config.by_name().values() for k, v in vars(section).items()}
    theirs = parse_model(PUBLISHED[name], Path(name)).fields
    assert ours["padded_vocab_size"] == PUBLISHED[name]["vocab_size"]
    for field, value in theirs.items():
        own = ours[field]
        if field == "hybrid_layer_pattern":
            own, value = list(ours["layer_kinds"]), read_kinds(value).kinds
        elif field in ("moe_layer_freq", "window_attn_skip_freq"):
            own, value = (_pattern(x, content_of(name)["num_layers"]) for x in (own, value))
        elif field == "rope_scaling" and value is not None:
            own, value = json.loads(own), json.loads(value)
        elif field == "max_position_embeddings" and name == "deepseek_v3":
            continue  # It was extended to 163,840 after pretraining.
        assert own == value or (isinstance(own, tuple | list) and list(own) == list(value)), field


def _pattern(text: str, num_layers: int) -> list[int]:
    value = read_pattern(text)
    return [1] * num_layers if value == 1 else list(cast("list[int]", value))


@pytest.mark.parametrize("layout", content_of("tiny_gpt")["layouts"])
@pytest.mark.slow
def test_the_tiny_gpt_learns(layout: str, tmp_path: Path) -> None:
    words = f"--config {RECIPES['tiny_gpt']} --layout {layout} --mock-data "
    rows = train_steps(
        f"{words} --tokenizer-type NullTokenizer --vocab-size 255", tmp_path,
        ranks=int(layout.split("x")[0]),
    )  # fmt: skip
    assert len(rows) == 20
    assert rows[-1]["lm loss"] < rows[0]["lm loss"] - 0.5


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout_of_its_recipe(tmp_path: Path) -> None:
    words = f"--config {RECIPES['tiny_gpt']} --train-iters 6 --mock-data --save-interval 3 "
    words += "--tokenizer-type NullTokenizer --vocab-size 255 --padded-vocab-size 256"
    whole = train_steps(f"{words} --layout 1xCPU", tmp_path / "whole")
    save = tmp_path / "run"
    train_steps(f"{words} --layout 2xCPU --exit-interval 3", save, ranks=2)
    rows = train_steps(f"{words} --layout 1xCPU --load {save}", tmp_path / "again")
    assert [row["iteration"] for row in rows] == [4, 5, 6]
    for row, wanted in zip(rows, whole[3:], strict=True):
        assert row["lm loss"] == pytest.approx(wanted["lm loss"], rel=1e-4)


@pytest.mark.parametrize("layout", content_of("tiny_video")["layouts"])
@pytest.mark.slow
def test_the_tiny_video_model_trains(layout: str, tmp_path: Path) -> None:
    data = write_clips(tmp_path / "data", {LONG: 16})
    words = f"--config {RECIPES['tiny_video']} --layout {layout} --video-data-path {data}"
    few = "--train-iters 4 --lr-warmup-iters 0 --micro-batch-size 2 --global-batch-size 8"
    rows = train_steps(
        f"{words} {few} --log-interval 1", tmp_path / "out", ranks=int(layout.split("x")[0]),
        task=VIDEO,
    )  # fmt: skip
    assert len(rows) == 4
