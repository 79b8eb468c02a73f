"""Whole runs survive what is done to them, and end with the weights of an undisturbed run."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.extras.chaos.campaign import Campaign
from megatron_ext.extras.chaos.inject import Fault
from megatron_ext.extras.chaos.outcome import Result
from megatron_ext.extras.chaos.plan import TWELVE, Case, draw
from megatron_ext.extras.chaos.table import problems
from megatron_ext.inspect.layouts import parse_layout
from megatron_ext.text.task import TEXT
from megatron_ext.train.task import TaskChoice
from megatron_ext.video.task import VIDEO
from tests.text.sft import tiny
from tests.training_runs import SMALL, without
from tests.video import clips

WORDS = [*without(SMALL, "--train-iters", "--eval-interval", "--eval-iters"), "--eval-iters", "0"]
"""The smallest GPT-2, whose steps the cases count."""
LAYOUTS = "dp2 tp2 pp2 cp2 tp2pp2 pp2dp2".split()


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(TEXT, WORDS, tmp_path_factory.mktemp("chaos"))


def survive(campaign: Campaign, kinds: Sequence[str], layout: str, seed: int = 0) -> Result:
    """Run a case of these faults, and check that nothing is wrong with it."""
    plain = draw(kinds, parse_layout(layout), seed)
    step = campaign.truth(plain).step_seconds
    result = campaign.run(draw(kinds, plain.layout, seed, step_seconds=step))
    assert problems([result]) == []
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "layout"), list(enumerate(LAYOUTS)))
def test_twelve_faults_in_a_row_are_survived(campaign: Campaign, seed: int, layout: str) -> None:
    result = survive(campaign, TWELVE, layout, seed)
    assert result.different is None
    assert [outcome.fault.kind for outcome in result.outcomes] == list(TWELVE)


@pytest.mark.slow
def test_kills_in_a_save_and_in_the_restarts_after_it_are_survived(campaign: Campaign) -> None:
    layout = parse_layout("dp2")
    faults = (
        Fault("SIGKILL", 6, rank=0, at="save", seconds=0.01, generation=None),
        Fault("SIGKILL", 0, rank=1, at="start", seconds=0.1, generation=1),
        Fault("SIGKILL", 0, rank=0, at="start", seconds=0.2, generation=2),
    )
    case = Case(layout, 0, faults, steps=12)
    assert problems([campaign.run(case)]) == []


def test_a_folder_of_earlier_runs_is_refused(tmp_path: Path) -> None:
    case = Case(parse_layout("dp2"), 0, (), steps=3)
    (tmp_path / "dp2_3_undisturbed").mkdir()
    with pytest.raises(ConfigError, match="holds a run of an earlier call; give another"):
        Campaign(TEXT, WORDS, tmp_path).truth(case)


FEATURES = {
    "distributed optimizer": ("dp2do", "--ema-decay 0.9"),
    "virtual chunks": ("pp2vpp2", "--num-layers 4"),
    "zero bubble": ("pp2zbh1", "--mtp-num-layers 1 --position-embedding-type rope"),
    "experts": ("ep2", "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"),
    "bf16": ("tp2sp", "--bf16"),
}
FEW = ("SIGKILL", "NaN gradient", "bit flip", "corrupt checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_other_features_survive(tmp_path: Path, feature: str) -> None:
    layout, flags = FEATURES[feature]
    survive(Campaign(TEXT, [*WORDS, *flags.split()], tmp_path), FEW, layout)


def sft(folder: Path) -> list[str]:
    data = tiny.write_jsonl(folder / "train.jsonl", tiny.chats(60, turns=2, words=3))
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    kept = without([w for w in WORDS if w != "--mock-data"], "--tokenizer-type", "--vocab-size")
    kept = without(kept, "--split", "--seq-length", "--max-position-embeddings")
    lengths = "--seq-length 128 --max-position-embeddings 128 --sft-batching packed".split()
    own = ["--sft", "--train-data-path", str(data), *tokenizer, str(tiny.save(folder / "tok"))]
    return [*kept, *lengths, *own]


def video(folder: Path) -> list[str]:
    data = clips.write_clips(folder / "clips", {clips.IMAGE: 13, clips.SHORT: 12})
    return [*without(clips.FLAGS, "--train-iters"), "--video-data-path", str(data)]


TASKS: dict[str, tuple[TaskChoice, Callable[[Path], list[str]]]] = {
    "fine-tuning": (TEXT, sft),
    "video": (VIDEO, video),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_other_tasks_survive(tmp_path: Path, task: str) -> None:
    program, flags = TASKS[task]
    survive(Campaign(program, flags(tmp_path), tmp_path), FEW, "dp2")
