"""Streaming runs that go on in the middle of a sequence bit for bit, that fail, or that start."""

import copy
import math
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.files import read_tracker
from megatron_ext.errors import CheckpointError
from megatron_ext.train.reporting.files import read_metrics
from megatron_ext.train.run import Run
from megatron_ext.video.streaming.rollout import StreamClip
from tests.checkpoint.tiny import whole_tensors
from tests.video.streaming import runs

DP2 = (2, 2, "--use-distributed-optimizer")
TP2 = (2, 1, "--tensor-model-parallel-size 2")
CP2 = (2, 1, "--context-parallel-size 2")
LENGTH = f"--train-iters {runs.STEPS} --save-interval {runs.SAVED}"


def in_the_middle(run: Run) -> None:
    """Check that the loaded sequence has some of its clips, and the cache some of its frames."""
    runner = runs.runner_of(run)
    state = runner.sequence.state
    assert runner.extra_state.steps == runs.SAVED
    assert state is not None and 0 < state.chunk < runs.CLIPS
    assert runner.sequence.generator.cache.state_dict()["end"] == state.current_length


def cut_back(save: Path, again: Path) -> Path:
    saved = f"iter_{runs.SAVED:07d}"
    shutil.copytree(save / saved, again / saved)
    (again / "latest_checkpointed_iteration.txt").write_text(str(runs.SAVED))
    return again


def check_same_run(rows: runs.Rows, whole: runs.Rows, found: Path, wanted: Path) -> None:
    assert [row["iteration"] for row in rows] == list(range(runs.SAVED + 1, runs.STEPS + 1))
    for row, want in zip(rows, whole[runs.SAVED :], strict=True):
        keys = [*runs.losses_of(want), "learning_rate", "consumed_samples"]
        assert {k: row[k] for k in keys} == {k: want[k] for k in keys}, row["iteration"]
    last = f"iter_{runs.STEPS:07d}"
    stored, expected = (whole_tensors(x / last, x / "whole.pt") for x in (found, wanted))
    assert stored.keys() == expected.keys()
    for prefix in ("ema.", "critic.blocks", "critic.optimizer", "optimizer.", "blocks."):
        assert any(name.startswith(prefix) for name in expected), prefix
    assert not any("teacher" in name for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor), name


@pytest.mark.parametrize(
    ("ranks", "batch", "layout"),
    [
        (1, 1, ""),
        (1, 1, "--independent-first-frame --chunk-frames 10"),
        DP2,
        pytest.param(*TP2, marks=pytest.mark.slow),
        pytest.param(*CP2, marks=pytest.mark.slow),
        pytest.param(2, 1, f"{CP2[2]} --cp-comm-type a2a", marks=pytest.mark.slow),
        pytest.param(1, 1, "--bf16", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, ranks: int, batch: int, layout: str) -> None:
    words = f"{LENGTH} {layout}"
    whole = runs.run(tmp_path, words, ranks=ranks, batch=batch)
    again = cut_back(tmp_path / "save", tmp_path / "again")
    words += f" --load {again}"
    rows = runs.run(tmp_path, words, ranks=ranks, batch=batch, save="again", prepare=in_the_middle)
    check_same_run(rows, whole, again, tmp_path / "save")


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ""),
        pytest.param(2, "--tensor-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(2, "--use-distributed-optimizer --bf16", marks=pytest.mark.slow),
    ],
)
def test_adapters_go_on_exactly(tuned: runs.Tuned, tmp_path: Path, ranks: int, layout: str) -> None:
    batch = 2 if "distributed" in layout else 1
    words = f"{tuned.words} {runs.ADAPTERS} {layout} {LENGTH}"
    whole, saved = tuned.rows, tuned.saved
    if layout:
        saved = tmp_path / "save"
        whole = runs.run(tmp_path, words, ranks=ranks, batch=batch)
    again = cut_back(saved, tmp_path / "again")
    rows = runs.run(tmp_path, f"{words} --load {again}", ranks=ranks, batch=batch, save="again")
    check_same_run(rows, whole, again, saved)


def _linger(run: Run) -> None:
    runner = runs.runner_of(run)
    train = runner.train

    def slow(*args: Any) -> Any:
        if runner.extra_state.steps > runs.SAVED:
            time.sleep(60)
        return train(*args)

    runner.train = slow  # type: ignore[method-assign]


def _launch(folder: Path, words: str) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            runs.attempt(folder, words, ranks=2, batch=2, prepare=_linger)
        finally:
            os._exit(1)
    return pid


@pytest.mark.slow
def test_a_killed_launcher_leaves_a_run_that_goes_on_bit_for_bit(tmp_path: Path) -> None:
    words = f"{LENGTH} --use-distributed-optimizer"
    whole = runs.run(tmp_path / "whole", words, ranks=2, batch=2)
    save = tmp_path / "killed" / "save"
    launcher = _launch(tmp_path / "killed", words)
    end = time.monotonic() + 60
    while len(read_metrics(save / "metrics.jsonl")) <= runs.SAVED and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert len(read_metrics(save / "metrics.jsonl")) == runs.SAVED + 1
    assert read_tracker(save) == runs.SAVED
    words += f" --load {save}"
    rows = runs.run(tmp_path / "killed", words, ranks=2, batch=2, prepare=in_the_middle)
    check_same_run(rows[runs.SAVED :], whole, save, tmp_path / "whole" / "save")


def _kept(run: Run) -> dict[str, Any]:
    """Note where the sequence stands, and which clip comes next."""
    sequence = runs.runner_of(run).sequence
    slots = dict(sequence.generator.cache.state_dict()["slots"])
    content = {"state": copy.deepcopy(sequence.state), "slots": slots}

    def note(clip: StreamClip, _: bool) -> None:
        content.setdefault("next", (clip.sequence, clip.number, clip.samples.start))

    runs.on_each_clip(run, note)
    return content


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, runs.Rows]:
    folder = tmp_path_factory.mktemp("one")
    return folder, runs.run(folder, LENGTH, micro=2, batch=2)


def resumed(
    one_rank: tuple[Path, runs.Rows], folder: Path, words: str, ranks: int = 1, micro: int = 2
) -> tuple[runs.Rows, Any]:
    again = cut_back(one_rank[0] / "save", folder / "again")
    words = f"--train-iters {runs.STEPS} {words} --load {again}"
    sizes = {"ranks": ranks, "batch": 2, "micro": micro, "save": "again"}
    rows, noted = runs.observed(folder, words, _kept, **sizes)
    assert [row["iteration"] for row in rows] == list(range(runs.SAVED + 1, runs.STEPS + 1))
    return rows, noted[0]


@pytest.mark.parametrize(
    "words",
    [
        "--tensor-model-parallel-size 2",
        pytest.param("--context-parallel-size 2 --cp-comm-type a2a", marks=pytest.mark.slow),
    ],
)
def test_another_layout_makes_the_cache_anew(
    one_rank: tuple[Path, runs.Rows], tmp_path: Path, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Let frames, prompts and numbers go on; keys and values differ by what weights have moved."""
    rows, kept = resumed(one_rank, tmp_path, words, ranks=2)
    assert "so that the cache of past frames is made anew" in capfd.readouterr().out
    assert kept["state"].sequence == 1 and 0 < kept["state"].chunk < runs.CLIPS
    assert kept["next"] == (1, kept["state"].chunk, 2)
    # The sinks, and the frames that the next block sees.
    assert set(range(3)) <= kept["slots"].keys() and len(kept["slots"]) > 3
    for row, want in zip(rows, one_rank[1][runs.SAVED :], strict=True):
        assert math.isclose(row["critic loss"], want["critic loss"], rel_tol=0.05)
        assert row["learning_rate"] == want["learning_rate"]


@pytest.mark.parametrize(
    ("words", "ranks", "micro", "note"),
    [
        ("", 1, 1, "`--micro-batch-size` was 2 and is 1, so that new video sequence"),
        ("", 2, 1, "The number of data-parallel replicas has changed, so that new video sequences"),
        pytest.param(
            "--sink-frames 0", 1, 2, "`--sink-frames` was 3 and is 0, so that the cache of past",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--independent-first-frame --chunk-frames 10", 1, 2, "`--independent-first-frame` was "
            "False and is True, `--chunk-frames` was 9 and is 10, so that new video sequences",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_other_flags_say_what_begins_anew(
    one_rank: tuple[Path, runs.Rows], tmp_path: Path, words: str, ranks: int, micro: int, note: str,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    _, kept = resumed(one_rank, tmp_path, words, ranks, micro)
    assert note in capfd.readouterr().out
    if ranks == 2:
        # Two sequences of two videos were begun before.
        assert kept["state"] is None and kept["next"] == (2, 0, 4)


def test_state_of_one_layout_is_refused_in_another_before_any_rank_starts(tmp_path: Path) -> None:
    words = "--use-distributed-optimizer --no-dist-ckpt-optim-fully-reshardable --train-iters 2"
    runs.run(tmp_path, f"{words} {CP2[2]}", ranks=2)
    words += f" --exit-interval 3 --load {tmp_path / 'save'} {TP2[2]} --sequence-parallel"
    with pytest.raises(CheckpointError, match="use those, or give `--no-load-optim`"):
        runs.attempt(tmp_path, words, ranks=2, save="other")


def _fail(run: Run, where: str) -> None:
    """Let one rank of two fail in the second step, in the pass of a network."""
    runner = runs.runner_of(run)
    if run.context.rank != 1:
        return
    if where == "prompts":
        encoder = runner.sequence.prompts._encoder  # type: ignore[attr-defined]
        encode = encoder.encode
        asked = list[str]()

        def encode_once(captions: list[str]) -> Any:
            asked.extend(captions)
            if len(asked) > 2:
                raise RuntimeError("out of memory")
            return encode(captions)

        encoder.encode = encode_once
        return
    inner = runner._pass

    def failing(kind: str, accumulation: int) -> Any:
        if runner.extra_state.steps == 1 and kind == where:
            raise RuntimeError("out of memory")
        return inner(kind, accumulation)  # type: ignore[arg-type]

    runner._pass = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("where", ["critic", "prompts"])
def test_one_rank_ends_all(tmp_path: Path, where: str, capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    fail = partial(_fail, where=where)
    code, rows = runs.attempt(tmp_path, "--train-iters 9", ranks=2, batch=2, prepare=fail)
    assert code == (1 if where == "critic" else 2)
    assert time.monotonic() - started < 40
    assert len(rows) < 9
    printed = capfd.readouterr().err
    assert "out of memory" in printed
    if where == "prompts":
        # The other rank ends too, and knows why.
        assert "[rank 0] Encoding the prompts failed (RuntimeError('out of memory'))" in printed
        assert "see the traceback of rank 1." in printed


def _start(run: Run) -> dict[str, Any]:
    runner = runs.runner_of(run)
    return {
        "iteration": run.progress.iteration,
        "steps": runner.extra_state.steps,
        "sequence": runner.sequence.state,
        "weights": runs.by_network(run, lambda x: runs.weights(x.network)),
    }


def test_the_steps_of_a_base_checkpoint_are_not_taken_over(tmp_path: Path) -> None:
    """Start each network from what it was in the run that the checkpoint is of."""
    runs.run(tmp_path, "--train-iters 3", save="base")
    words = f"--train-iters 2 --pretrained-checkpoint {tmp_path / 'base'} --seed 8"
    words += f" --critic-checkpoint {tmp_path / 'base'}"
    rows, (found,) = runs.observed(tmp_path, words, _start, start=200)
    assert [row["iteration"] for row in rows] == [1, 2]
    # Step 1 is one of the generator, as in any run; the average has not begun.
    assert "generator loss" in rows[0]
    assert (found["iteration"], found["steps"], found["sequence"]) == (0, 0, None)
    base = whole_tensors(tmp_path / "base" / "iter_0000003", tmp_path / "base.pt")
    for network, prefix in runs.PREFIXES.items():
        for name, tensor in found["weights"][network].items():
            assert torch.equal(tensor, base[f"{prefix}{name}"]), (network, name)
    assert runs.differ(*found["weights"].values())


def test_weights_of_critic_and_teacher_do_not_come_from_the_run_itself(tmp_path: Path) -> None:
    """Resume a run, which finds its own folder before any other."""
    runs.run(tmp_path, "--train-iters 1 --seed 8", save="other")
    words = f"--train-iters 2 --resume-mode auto --teacher-checkpoint {tmp_path / 'other'}"
    assert len(runs.run(tmp_path, f"{words} --exit-interval 1")) == 1
    rows, (teacher,) = runs.observed(
        tmp_path, words, lambda run: runs.weights(runs.runner_of(run).teacher)
    )
    assert [row["iteration"] for row in rows] == [1, 2]
    other = whole_tensors(tmp_path / "other" / "iter_0000001", tmp_path / "other.pt")
    assert teacher and not runs.differ(teacher, other)


def test_another_kind_of_run_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def hide_critic(run: Run) -> None:
        save = run.checkpoints.save
        run.checkpoints.save = lambda *args, **parts: save(  # type: ignore[method-assign]
            *args, **{**parts, "extra_state": None}
        )

    runs.run(tmp_path, "--train-iters 1", save="plain", prepare=hide_critic)
    words = f"--train-iters 2 --override-opt-param-scheduler --load {tmp_path / 'plain'}"
    code, _ = runs.attempt(tmp_path, words)
    assert code == 2
    said = "holds no critic, so it is not of a run with `--task streaming`; give it as "
    assert said in capfd.readouterr().err
