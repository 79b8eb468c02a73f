"""Layouts of the teacher that are refused, before any rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.teacher_config import TeacherSizes, teacher_sizes
from megatron_ext.video.task import VIDEO
from tests.video.streaming.runs import flags_of

TENSOR, STAGES = "--teacher-tensor-model-parallel-size", "--teacher-pipeline-model-parallel-size"


def parsed(words: str, ranks: int) -> RunConfig:
    """The resolved configuration of a tiny run."""
    flags = flags_of(Path(), f"--train-iters 1 --prompts-path x {words}", batch=12)
    return parse_args(flags, VIDEO, world_size=ranks, device="cpu").config


def errors(words: str, ranks: int) -> list[str]:
    """Return the sentences about a run that cannot be."""
    with pytest.raises(ConfigError) as caught:
        parsed(words, ranks)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("words", "ranks", "sentence"),
    [
        (f"{TENSOR} 0", 1, f"`{TENSOR}` (0) must be at least 1; use 1."),
        (f"{STAGES} 0", 1, f"`{STAGES}` (0) must be at least 1; 1 is the default."),
        (
            f"{TENSOR} 2",
            1,
            f"`{TENSOR}` × `{STAGES}` (2 × 1 = 2) must divide the number of ranks (1), and divide "
            "or be a multiple of the run's tensor × context parallel size (1 × 1 = 1); use sizes "
            "whose product is 1.",
        ),
        (
            f"--tensor-model-parallel-size 2 --context-parallel-size 2 {STAGES} 2 {TENSOR} 4",
            12,
            f"`{TENSOR}` × `{STAGES}` (4 × 2 = 8) must divide the number of ranks (12), and divide "
            "or be a multiple of the run's tensor × context parallel size (2 × 2 = 4); use sizes "
            "whose product is 1, 2, 4 or 12.",
        ),
        (
            f"--context-parallel-size 2 {TENSOR} 3 --teacher-size small",
            6,
            f"`{TENSOR}` × `{STAGES}` (3 × 1 = 3) must divide the number of ranks (6), and divide "
            "or be a multiple of the run's tensor × context parallel size (1 × 2 = 2); use sizes "
            "whose product is 1, 2 or 6.",
        ),
        (
            f"{TENSOR} 3",
            3,
            f"`{TENSOR}` (3) must divide the teacher's attention heads (4) and feed-forward width "
            "(128); use 1, 2 or 4.",
        ),
        (
            f"{TENSOR} 3 --teacher-size 1.3b",
            3,
            f"`{TENSOR}` (3) must divide the teacher's feed-forward width (8960); use 1, 2 or 4.",
        ),
        (
            "--tensor-model-parallel-size 4 --teacher-size small",
            4,
            "`--tensor-model-parallel-size` (4) must divide the teacher's attention heads (6); use "
            "1, 2, 3 or 6.",
        ),
        (
            "--tensor-model-parallel-size 2 --latent-size 4 6 --sequence-parallel "
            f"--teacher-size small {TENSOR} 4",
            4,
            f"`{TENSOR}` (4) must divide the teacher's attention heads (6) and tokens of a frame "
            "with `--sequence-parallel` (6); use 1, 2, 3 or 6.",
        ),
        (
            f"{STAGES} 3",
            3,
            f"`{STAGES}` (3) must be at most the number of the teacher's blocks (2); use 2 or "
            "fewer.",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_one_sentence(words: str, ranks: int, sentence: str) -> None:
    assert errors(words, ranks) == [sentence]


@pytest.mark.parametrize("words", [f"{TENSOR} 1", f"{STAGES} 2"])
def test_a_run_without_a_teacher_refuses_its_layout(words: str) -> None:
    given = f"--video-data-path x --train-iters 1 {words}".split()
    with pytest.raises(ConfigError, match=f"`{given[-2]}` has an effect only with `--task stream"):
        parse_args(given, VIDEO, world_size=2, device="cpu")


@pytest.mark.parametrize(
    ("words", "ranks", "sizes"),
    [
        ("--tensor-model-parallel-size 2", 2, None),
        (f"--tensor-model-parallel-size 2 {TENSOR} 2", 4, None),
        (f"--context-parallel-size 2 {TENSOR} 1", 2, TeacherSizes(1, 1)),
        (f"--tensor-model-parallel-size 2 {TENSOR} 1", 2, TeacherSizes(1, 1)),
        (f"--tensor-model-parallel-size 2 {STAGES} 2", 4, TeacherSizes(2, 2)),
        (f"--context-parallel-size 2 {TENSOR} 4", 12, TeacherSizes(4, 1)),
    ],
)
def test_a_teacher_lies_as_the_run_unless_a_flag_says_otherwise(
    words: str, ranks: int, sizes: TeacherSizes | None
) -> None:
    config = parsed(words, ranks)
    assert teacher_sizes(config.section(StreamingConfig), config.parallel) == sizes
