"""Flags of streaming runs: files of prompts, sampled videos and the teacher's layout."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ext.train.exit_codes import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.streaming.config import StreamingConfig, StreamingSampleConfig
from megatron_ext.video.streaming.rules import TeacherSizes, teacher_sizes
from megatron_ext.video.task import VIDEO
from tests.config.runs import STREAMING
from tests.training_runs import check_refused, config_of
from tests.video.streaming.runs import FLAGS, flags_of, write_prompts

STARTED = 99


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is not refused ends with a code of its own."""
    monkeypatch.setattr("megatron_ext.train.main.launch", lambda *_, **__: STARTED)


@dataclass
class Printed:
    capfd: pytest.CaptureFixture[str]
    folder: Path

    def __call__(self, words: str, code: int = EXIT_CODE_USER_ERROR) -> list[str]:
        flags = flags_of(self.folder, f"--train-iters 1 {words}")
        assert main(VIDEO, flags) == code
        printed = self.capfd.readouterr().err.splitlines()
        return [line.removeprefix("error: ") for line in printed if line.startswith("error: ")]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Printed:
    return Printed(capfd, tmp_path)


@pytest.mark.parametrize("flag", ["teacher-checkpoint", "critic-checkpoint", "load --finetune"])
def test_weights_must_be_there_first(refused: Printed, tmp_path: Path, flag: str) -> None:
    name, *more = flag.split()
    (error,) = refused(f"--{name} {tmp_path / 'none'} {' '.join(more)}")
    assert error.startswith(f"`--{name}` ({tmp_path / 'none'}) holds no checkpoint")


def test_a_run_that_is_whole_starts_and_has_no_epochs(refused: Printed) -> None:
    assert refused("", code=STARTED) == []
    errors = refused("--train-epochs 2")
    assert errors[0].startswith("`--train-epochs` (2) does not go with `--task streaming`: prompts")


def test_prompts_must_be_there_and_in_pairs(refused: Printed, tmp_path: Path) -> None:
    words = [*FLAGS, "--train-iters", "1"]
    assert main(VIDEO, words) == EXIT_CODE_USER_ERROR
    assert "`--prompts-path` is missing" in refused.capfd.readouterr().err
    (error,) = refused(f"--prompts-path {tmp_path / 'nowhere'}")
    assert error.startswith(f"`--prompts-path` ({tmp_path}/nowhere) cannot be read")
    write_prompts(tmp_path)
    one = tmp_path / "one.txt"
    one.write_text("a\n")
    first = f"--prompts-path {tmp_path / 'prompts.txt'}"
    (error,) = refused(f"{first} --second-prompts-path {one}")
    said = f"`--second-prompts-path` ({one}) has 1 prompts, but must have 5, one for each of `--p"
    assert error.startswith(said)
    one.write_text(" \n\n")
    (error,) = refused(f"--prompts-path {one}")
    assert error == f"`--prompts-path` ({one}) holds no prompt; write one a line."
    one.write_bytes(b"\xff\xfe\xff")
    (error,) = refused(f"--prompts-path {one}")
    assert "cannot be read" in error
    (error,) = refused(f"{first} --save s --sample-interval 5 --sample-prompts {tmp_path / 'no'}")
    assert error.startswith(f"The file of prompts {tmp_path / 'no'} cannot be read")
    (error,) = refused(f"{first} --switch-frames 9")
    assert error.startswith("`--switch-frames` ((9,)) needs prompts after a switch")
    (error,) = refused(f"{first} --sink-at-switch keep")
    assert error.startswith("`--sink-at-switch` (keep) needs prompts after a switch")
    assert refused(first, code=STARTED) == []


ROWS = {
    "is no JSON": "{",
    "has no `text`": json.dumps({"second_text": "b"}),
    "has ['txt'], but may have": json.dumps({"text": "a", "txt": "b"}),
    "has `image` 3, which is no text": json.dumps({"text": "a", "image": 3}),
    "has an `image` and a `video`": json.dumps({"text": "a", "image": "x", "video": "y"}),
    "nowhere.png, which does not exist": json.dumps({"text": "a", "image": "nowhere.png"}),
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_of_a_jsonl_must_be_whole(refused: Printed, tmp_path: Path, what: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{json.dumps({'text': 'a'})}\n\n{ROWS[what]}\n")
    (error,) = refused(f"--prompts-path {path}")
    assert error.startswith(f"{path} line 3 ") and what in error


def test_all_rows_of_a_jsonl_must_be_alike(refused: Printed, tmp_path: Path) -> None:
    path, second = tmp_path / "prompts.jsonl", tmp_path / "second.txt"
    path.write_text('{"text": "a", "second_text": "b"}\n\n{"text": "a"}\n')
    (error,) = refused(f"--prompts-path {path}")
    assert error.startswith(f"{path} line 3 has not a `second_text`, as others have")
    path.write_text('{"text": "a", "second_text": "b"}\n')
    second.write_text("c\n")
    (error,) = refused(f"--prompts-path {path} --second-prompts-path {second}")
    assert "leave the second texts in one of them" in error
    assert refused(f"--prompts-path {path}", code=STARTED) == []


def test_coverage_is_said_once(refused: Printed, caplog: pytest.LogCaptureFixture) -> None:
    """4 chunks and 3 passes in 2 steps have no divisor in common, 4 and 2 have."""
    refused("", code=STARTED)
    assert not [r for r in caplog.records if "generator_interval" in r.message]
    flags = flags_of(refused.folder, "--train-iters 1", interval=1)
    assert main(VIDEO, flags) == STARTED
    printed = refused.capfd.readouterr().out
    coverage = "> the generator is trained in one of 1 steps, on 2 of the 4 trained chunks of a "
    assert printed.count(coverage) == 1
    # Two replicas take one sequence each, so a step has as many clips as that of one.
    flags = flags_of(refused.folder, "--train-iters 1 --nproc-per-node 2", batch=2)
    assert main(VIDEO, flags) == STARTED
    assert "on 4 of the 4 trained chunks" in refused.capfd.readouterr().out
    (warning,) = [r for r in caplog.records if "make the generator see only" in r.message]
    assert "make the generator see only chunks 0, 2 of each" in warning.message


def test_other_ranks_of_torchrun_are_silent(
    refused: Printed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = flags_of(refused.folder, "--train-iters 1", batch=2, interval=1)
    assert main(VIDEO, flags) == STARTED
    assert "the generator is trained" not in refused.capfd.readouterr().out
    assert not [r for r in caplog.records if "make the generator" in r.message]


VIEWED = f"{STREAMING} --save out --sample-interval 5 --sample-texts cat dog"


def test_lengths_follow_the_training_unless_flags_say_otherwise() -> None:
    config = config_of(f"{VIEWED} --sequence-lengths 21 40 --sample-second-texts a b", VIDEO)
    own, streaming = config.section(StreamingSampleConfig), config.section(StreamingConfig)
    assert (own.num_frames(streaming), own.switch_frame(streaming)) == (39, 21)
    words = "--sequence-lengths 21 42 --sample-second-texts a b --independent-first-frame"
    config = config_of(f"{VIEWED} {words}", VIDEO)
    own, streaming = config.section(StreamingSampleConfig), config.section(StreamingConfig)
    assert (own.num_frames(streaming), own.switch_frame(streaming)) == (40, 22)
    config = config_of(f"{VIEWED} --sample-latent-frames 24", VIDEO)
    assert config.section(StreamingSampleConfig).num_frames(config.section(StreamingConfig)) == 24
    words = "--sample-latent-frames 24 --sample-second-texts a b --sample-switch-frame 20"
    config = config_of(f"{VIEWED} {words}", VIDEO)
    assert config.section(StreamingSampleConfig).switch_frame(config.section(StreamingConfig)) == 20


def test_all_other_sample_flags_of_a_streaming_run_are_its_own() -> None:
    words = "--sample-seed 3 --sample-fps 8 --sample-batch-size 1 --no-sample-ema --sample-dir d"
    sample = config_of(f"{VIEWED} {words}", VIDEO).section(SampleConfig)
    assert (sample.sample_seed, sample.sample_fps, sample.sample_batch_size) == (3, 8, 1)
    assert not sample.sample_ema


@pytest.mark.parametrize(
    "flag", ["--sample-latent-frames 9", "--sample-second-texts a", "--sample-switch-frame 3"]
)
def test_other_runs_refuse_the_flags_of_long_videos(flag: str, tmp_path: Path) -> None:
    sentence = f"`{flag.split()[0]}` has an effect only with `--task streaming`"
    check_refused(f"--video-data-path {tmp_path} {flag}", sentence, VIDEO)


TENSOR, STAGES = "--teacher-tensor-model-parallel-size", "--teacher-pipeline-model-parallel-size"


@pytest.mark.parametrize("words", [f"{TENSOR} 1", f"{STAGES} 2"])
def test_a_run_without_a_teacher_refuses_its_layout(words: str) -> None:
    sentence = f"`{words.split()[0]}` has an effect only with `--task streaming`"
    check_refused(f"--video-data-path x --train-iters 1 {words}", sentence, VIDEO, ranks=2)


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
def test_a_teacher_lies_as_the_run(words: str, ranks: int, sizes: TeacherSizes | None) -> None:
    flags = flags_of(Path(), f"--train-iters 1 --prompts-path x {words}", batch=12)
    config = config_of(flags, VIDEO, ranks=ranks)
    assert teacher_sizes(config.section(StreamingConfig), config.parallel) == sizes
