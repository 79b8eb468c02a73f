"""Refusals of streaming runs before any rank starts, and their sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.train.launch import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from megatron_ext.video.task import VIDEO
from tests.video.streaming.runs import FLAGS, flags_of, write_prompts

STARTED = 99


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is not refused ends with a code of its own."""
    monkeypatch.setattr("megatron_ext.train.main.launch", lambda *_, **__: STARTED)


class Printed:
    """Errors of a command line, one a line, without the word before them."""

    def __init__(self, capfd: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capfd, self.folder = capfd, folder

    def __call__(self, words: str, code: int = EXIT_CODE_USER_ERROR) -> list[str]:
        flags = flags_of(self.folder, f"--train-iters 1 {words}")
        assert main(VIDEO, flags) == code
        printed = self.capfd.readouterr().err.splitlines()
        return [line.removeprefix("error: ") for line in printed if line.startswith("error: ")]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Printed:
    return Printed(capfd, tmp_path)


def test_a_run_that_is_whole_starts(refused: Printed) -> None:
    assert refused("", code=STARTED) == []


WRONG = {
    "--frame-block 0": "`--frame-block` (0) must be at least 1",
    "--frame-block -3": "`--frame-block` (-3) must be at least 1",
    "--frame-block 4": "`--chunk-frames` (9) must be a positive multiple of block (4)",
    "--window-frames 5": "`--window-frames` (5) must be at least `--sink-frames` + `--frame-block`",
    "--window-frames -1": "`--window-frames` (-1) must be at least",
    "--sink-frames -1": "`--sink-frames` (-1) must be at least 0",
    "--chunk-frames 10": "`--chunk-frames` (10) must be a positive multiple",
    "--chunk-frames -9": "`--chunk-frames` (-9) must be at least 1",
    "--chunk-frames 1": "`--chunk-frames` (1) leaves no frame to train",
    "--min-new-frames 0": "`--min-new-frames` (0) must be at least 1",
    "--min-new-frames 9": "`--max-new-frames` (6) must be 9 (min_new_frames) to 9",
    "--max-new-frames 12": "`--max-new-frames` (12) must be 6 (min_new_frames) to 9",
    "--max-new-frames 7": "`--max-new-frames` (7) must be a positive multiple",
    "--sequence-lengths 27 8": "`--sequence-lengths` ((27, 8)) must be one or more of at least",
    "--sequence-lengths 9": "no sequence of `--sequence-lengths` (9) is long enough to switch",
    "--switch-frames 30": "no sequence of `--sequence-lengths` (27) is long enough to switch at 30",
    "--switch-frames 26": "no sequence of `--sequence-lengths` (27) is long enough to switch at 26",
    "--switch-frames 0": "`--switch-frames` (0) must be at least 1",
    "--recache-frames 0": "`--recache-frames` (0) must be at least 1",
    "--recache-frames 12": "`--recache-frames` (12) must be at most chunk_frames (9)",
    "--sink-at-switch drop": "--sink-at-switch",
    "--generator-interval 0": "`--generator-interval` (0) must be at least 1",
    "--apply-wd-to-qk-layernorm": "(True) does not go with `--task streaming`: the norms of its",
    "--generator-size huge": "--generator-size",
    "--critic-size huge": "--critic-size",
    "--teacher-size huge": "--teacher-size",
    "--recompute-blocks -1": "`--recompute-blocks` (-1) must be at least 0",
    "--latent-size 3 4": "`--latent-size` (3 4) must be positive multiples of the patch size (2)",
    "--latent-size 0 4": "`--latent-size` (0 4) must be at least 1",
    "--latent-size -2 4": "`--latent-size` (-2 4) must be at least 1",
    "--timestep-shift 0": "`--timestep-shift` (0.0) must be above 0",
    "--timestep-shift nan": "`--timestep-shift` (nan) must be a finite number",
    "--denoising-steps 250 500": "`--denoising-steps` ((250, 500)) must be falling numbers",
    "--denoising-steps 1001": "`--denoising-steps` (1001) must be at least 1 and at most 1000",
    "--denoising-steps 0": "`--denoising-steps` (0) must be at least 1",
    "--min-timestep 0": "`--min-timestep` (0.0) must be above 0",
    "--min-timestep nan": "`--min-timestep` (nan) must be a finite number",
    "--max-timestep nan": "`--max-timestep` (nan) must be a finite number",
    "--max-timestep 1001": "`--max-timestep` (1001.0) must be above 0 and at most",
    "--max-timestep 10": "`--min-timestep` (20.0) must be above 0 and at most max_timestep",
    "--context-noise -1": "`--context-noise` (-1.0) must be at least 0",
    "--context-noise 1000": "`--context-noise` (1000.0) must be at least 0 and below 1000",
    "--context-noise inf": "`--context-noise` (inf) must be a finite number",
    "--guidance-scale nan": "`--guidance-scale` (nan) must be a finite number",
    "--critic-lr 0": "`--critic-lr` (0.0) must be above 0",
    "--critic-lr nan": "`--critic-lr` (nan) must be a finite number",
    "--critic-clip-grad -1": "`--critic-clip-grad` (-1.0) must be at least 0",
    "--critic-clip-grad inf": "`--critic-clip-grad` (inf) must be a finite number",
    "--no-train-first-chunk --sequence-lengths 9 27": "`--train-first-chunk` (False) must be on",
    "--no-decode-history --no-encode-first-frame": "`--no-decode-history` has no effect with",
    "--no-encode-first-frame --codec-channels 4": "`--no-encode-first-frame` leaves nothing",
    "--last-step-only --no-same-exit-across-blocks": "`--no-same-exit-across-blocks` has no",
    "--guidance-scale 1 --negative-prompt bad": "`--negative-prompt` has no effect with",
    "--sid-alpha 2": "`--sid-alpha` has no effect with `--distribution-loss dmd`; leave one of",
    "--sid-alpha nan --distribution-loss sid": "`--sid-alpha` (nan) must be a finite number",
    "--ts-schedule --no-same-exit-across-blocks": "`--ts-schedule` has no effect with",
    "--distribution-loss kl": "--distribution-loss",
    "--distribution-loss sid --teacher-tensor-model-parallel-size 1":
        "`--distribution-loss sid` needs gradients through the teacher, which has none in a layout",
    "--num-workers 1": "`--num-workers` (1) does not go with `--task streaming`: no clips",
    "--pooled-width 8": "`--pooled-width` (8) does not go with `--task streaming`: its networks",
    "--pipeline-model-parallel-size 2 --nproc-per-node 2": "`--pipeline-model-parallel-size` (2)",
    "--fp16": "`--fp16` (True) does not go with",
    "--overlap-grad-reduce": "`--overlap-grad-reduce` (True) does not go with",
    "--eval-iters 1": "`--eval-iters` (1) does not go with",
    "--skip-train": "`--skip-train` (True) does not go with",
    "--hidden-size 128": "`--hidden-size` has no effect",
    "--flow-shift 3": "`--flow-shift` has no effect with `--task streaming`",
    "--codec-channels 8": "`--codec` has 8 latent channels, but `--generator-size tiny` has 4",
    "--context-parallel-size 8 --nproc-per-node 8": "`--latent-size` (4 4) gives a frame 4 tokens",
    "--cp-comm-type a2a --context-parallel-size 4 --tensor-model-parallel-size 2 "
    "--nproc-per-node 8": "`--cp-comm-type a2a` trades the 4 heads of `--generator-size tiny`",
    "--cp-comm-type a2a --context-parallel-size 4 --teacher-size small --nproc-per-node 4":
        "`--cp-comm-type a2a` trades the 6 heads of `--teacher-size small`, which",
    "--tensor-model-parallel-size 4 --critic-size small --nproc-per-node 4":
        "`--critic-size small` has 6 heads, which `--tensor-model-parallel-size` (4) does not",
    "--global-batch-size 3 --nproc-per-node 2": "`--global-batch-size` (3) must be divisible",
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_value_is_refused_in_a_sentence(refused: Printed, words: str) -> None:
    errors = refused(words)
    assert len(errors) == 1 and WRONG[words] in errors[0], errors
    assert errors[0].endswith(".")


@pytest.mark.parametrize("flag", ["teacher-checkpoint", "critic-checkpoint", "load --finetune"])
def test_weights_must_be_there_before_ranks_start(
    refused: Printed, tmp_path: Path, flag: str
) -> None:
    name, *more = flag.split()
    (error,) = refused(f"--{name} {tmp_path / 'none'} {' '.join(more)}")
    assert error.startswith(f"`--{name}` ({tmp_path / 'none'}) holds no checkpoint")


def test_a_run_has_no_epochs(refused: Printed) -> None:
    errors = refused("--train-epochs 2")
    assert errors[0].startswith("`--train-epochs` (2) does not go with `--task streaming`: prompts")


def test_prompts_must_be_there_and_in_pairs(refused: Printed, tmp_path: Path) -> None:
    words = [*FLAGS, "--train-iters", "1"]
    assert main(VIDEO, words) == EXIT_CODE_USER_ERROR
    assert "`--prompts-path` is missing" in refused.capfd.readouterr().err
    (error,) = refused(f"--prompts-path {tmp_path / 'nowhere'}")
    assert error.startswith(f"`--prompts-path` ({tmp_path}/nowhere) must be a text file")
    write_prompts(tmp_path)
    one = tmp_path / "one.txt"
    one.write_text("a\n")
    first = f"--prompts-path {tmp_path / 'prompts.txt'}"
    (error,) = refused(f"{first} --second-prompts-path {one}")
    assert error == (
        f"`--second-prompts-path` ({one}) has 1 prompts, but must have 5, one for each of "
        "`--prompts-path`."
    )
    one.write_text(" \n\n")
    (error,) = refused(f"--prompts-path {one}")
    assert error == f"`--prompts-path` ({one}) holds no prompt; write one a line."
    one.write_bytes(b"\xff\xfe\xff")
    (error,) = refused(f"--prompts-path {one}")
    assert "cannot be read" in error
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
    path.write_text('{"text": "a", "second_text": "b"}\n{"text": "a"}\n')
    (error,) = refused(f"--prompts-path {path}")
    assert error.startswith(f"{path} line 2 has not a `second_text`, as others have")
    path.write_text('{"text": "a", "second_text": "b"}\n')
    second.write_text("c\n")
    (error,) = refused(f"--prompts-path {path} --second-prompts-path {second}")
    assert "leave the second texts in one of them" in error
    assert refused(f"--prompts-path {path}", code=STARTED) == []


def test_coverage_and_aliasing_are_said_once(
    refused: Printed, caplog: pytest.LogCaptureFixture
) -> None:
    """Criterion 16: 4 chunks and 3 passes in 2 steps have no divisor in common, 4 and 2 have."""
    refused("", code=STARTED)
    assert not [r for r in caplog.records if "generator_interval" in r.message]
    flags = flags_of(refused.folder, "--train-iters 1", interval=1)
    assert main(VIDEO, flags) == STARTED
    printed = refused.capfd.readouterr().out
    coverage = "> the generator is trained in one of 1 steps, on 2 of the 4 trained chunks of a "
    assert printed.count(coverage) == 1
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
