"""Training in the direct order: equal on every layout, and on from any kill or change."""

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ext.checkpoint.files import TRACKER
from megatron_ext.errors import ConfigError
from megatron_ext.extras.ledger.counts import uses
from megatron_ext.extras.ledger.ledger import Ledger
from megatron_ext.inspect.preview.collect import collect
from megatron_ext.train.reporting.files import read_metrics
from tests.training_runs import (
    NULL,
    ROOT,
    SAME_WEIGHTS,
    Rows,
    documents,
    prepared,
    train,
    train_steps,
    training_rows,
    without,
)

WORDS = [
    *without(SAME_WEIGHTS, "--num-layers"),
    *NULL,
    *"--num-layers 2 --padded-vocab-size 128".split(),
]
DIRECT = [*WORDS, *"--data-order direct --train-iters 6".split()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return weights and prefixes of two datasets of 300 and 200 documents."""
    folder = tmp_path_factory.mktemp("data")
    return ["0.7", documents(folder / "a", 300), "0.3", documents(folder / "b", 200)]


def _losses(rows: Rows) -> list[float]:
    return [row["lm loss"] for row in rows]


def _schedule(path: Path, data: Sequence[str], lengths: Sequence[int], more: str = "") -> list[str]:
    _, a, _, b = data
    stages = [
        f"  - {{samples: 40, seq_length: {length}, weights: {{{a}: {number + 1}, {b}: 1}}}}"
        for number, length in enumerate(lengths)
    ]
    path.write_text("stages:\n" + "\n".join(stages) + f"\n{more}\n")
    return ["--data-schedule", str(path)]


LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "dp2": "--num-workers 1",
}


def test_losses_are_equal_on_every_layout(data: list[str], tmp_path: Path) -> None:
    """Validation is part of it; rounding alone differs."""
    words = [*DIRECT, "--data-path", *data, "--eval-interval", "3", "--reset-attention-mask"]
    words = [*without(words, "--eval-iters"), *"--eval-iters 1 --split 80,20,0".split()]
    wanted = train(words, tmp_path / "one")
    for name, layout in LAYOUTS.items():
        own = without(words, "--num-workers") if "--num-workers" in layout else words
        rows = train([*own, *layout.split()], tmp_path / name, 2)
        assert [row["kind"] for row in rows] == [row["kind"] for row in wanted]
        for row, want in zip(rows, wanted, strict=True):
            assert math.isclose(row["lm loss"], want["lm loss"], rel_tol=1e-6), (name, row)


@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_lengths_that_change_are_equal_on_every_layout(
    layout: str, data: list[str], tmp_path: Path
) -> None:
    """Samples have 32, 64 and 16 tokens; each change waits for the end of a step."""
    words = [*DIRECT, *_schedule(tmp_path / "mixture.yaml", data, [32, 64, 16])]
    wanted = train_steps([*words, "--train-iters", "9"], tmp_path / "one")
    rows = train_steps(
        [*words, "--train-iters", "9", *LAYOUTS[layout].split()], tmp_path / "other", 2
    )
    for row, want in zip(rows, wanted, strict=True):
        assert math.isclose(row["lm loss"], want["lm loss"], rel_tol=1e-6)
    progress = json.loads((tmp_path / "one" / "iter_0000009" / "progress.json").read_text())
    stages = progress["data_order"]["stages"]
    assert [(x["start"], x["seq_length"]) for x in stages] == [(0, 32), (48, 64), (96, 16)]


def test_a_single_length_below_the_longest_is_known_to_pipeline_stages(
    data: list[str], tmp_path: Path
) -> None:
    flags = [*without(DIRECT, "--train-iters"), "--train-iters", "2"]
    flags += _schedule(tmp_path / "mixture.yaml", data, [32])
    wanted = train_steps(flags, tmp_path / "one")
    rows = train_steps([*flags, *LAYOUTS["pp2"].split()], tmp_path / "two", 2)
    for row, want in zip(rows, wanted, strict=True):
        assert math.isclose(row["lm loss"], want["lm loss"], rel_tol=1e-6)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(data: list[str], tmp_path: Path) -> None:
    words = [*DIRECT, *_schedule(tmp_path / "mixture.yaml", data, [64, 32])]
    whole = train_steps(words, tmp_path / "whole")
    save = tmp_path / "save"
    train_steps([*words, "--exit-interval", "2"], save)
    for layout in ("", "--exit-interval 4 --micro-batch-size 4"):
        extra = [*layout.split(), "--load", str(save)]
        own = without(words, "--micro-batch-size") if "micro" in layout else words
        rows = train_steps([*own, *extra], save)
        if "--exit-interval" not in layout:
            assert _losses(rows) == _losses(whole)
            break


def test_a_run_goes_on_with_other_weights_and_then_with_the_old(
    data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "save"
    load = ["--load", str(save)]
    train_steps([*DIRECT, "--data-path", *data, "--exit-interval", "2"], save)
    other = ["1", data[3]]
    train_steps([*DIRECT, "--data-path", *other, *load, "--exit-interval", "4"], save)
    assert f"> the mixture changes at sample 32: {data[3]} 1\n" in capfd.readouterr().out
    train_steps([*DIRECT, "--data-path", *data, *load], save)
    progress = json.loads((save / "iter_0000006" / "progress.json").read_text())
    stages = [(x["start"], x["weights"]) for x in progress["data_order"]["stages"]]
    first = {data[1]: "7/10", data[3]: "3/10"}
    assert stages == [(0, first), (32, {data[3]: "1"}), (64, first)]


def test_a_limit_ends_the_run_and_the_dry_run_says_so(
    data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A tenth of the second source, 180 x 70 tokens, is 19 samples, of which one in four is."""
    limit = f"max_epochs: {{{data[3]}: 0.1}}\nwhen_exhausted: stop"
    flags = _schedule(tmp_path / "mixture.yaml", data, [64], limit)
    path = Path(flags[1])
    path.write_text(path.read_text().replace("samples: 40, ", "").replace(": 1, ", ": 3, "))
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *DIRECT, *flags, "--dry-run"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert f"> {data[3]} reaches its limit of epochs at sample 79" in done.stdout
    assert "> the run ends after 4 of 6 steps, where its data ends" in done.stdout
    assert "data of 79 samples" in done.stdout and "0.097" in done.stdout
    rows = train_steps([*DIRECT, *flags], tmp_path / "save")
    assert rows[-1]["iteration"] == 4
    capfd.readouterr()


@pytest.mark.parametrize("seconds", [pytest.param(0.0, marks=pytest.mark.slow), 0.35])
def test_a_killed_run_reads_the_same_samples_again(
    seconds: float, data: list[str], tmp_path: Path
) -> None:
    """The kill comes at some moment after the first checkpoint; workers read ahead of the steps."""
    words = [*without(DIRECT, "--train-iters", "--num-workers"), "--data-path", *data]
    words += "--train-iters 10 --save-interval 2 --num-workers 2".split()
    whole = train_steps(words, tmp_path / "whole")
    save = tmp_path / "save"
    command = [sys.executable, "pretrain_gpt.py", *words, "--save", str(save)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while not (save / TRACKER).is_file() and time.monotonic() < end and run.poll() is None:
        time.sleep(0.02)
    time.sleep(seconds)
    run.send_signal(signal.SIGKILL)
    run.wait()
    train_steps([*words, "--load", str(save)], save)
    rows = {row["iteration"]: row for row in training_rows(read_metrics(save / "metrics.jsonl"))}
    assert _losses([rows[step] for step in range(1, 11)]) == _losses(whole)


def test_a_run_in_megatrons_order_goes_on_in_the_direct_one(
    data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save, words = tmp_path / "save", [*WORDS, "--train-iters", "3", "--data-path", *data]
    train_steps([*words, "--exit-interval", "1", "--data-cache-path", str(tmp_path)], save)
    train_steps([*words, "--data-order", "direct", "--load", str(save)], save)
    shown = capfd.readouterr().out
    assert "> the samples so far were in another order; the direct one takes its place" in shown
    assert "`--data-order` (direct, before megatron)" in shown


def test_steps_in_megatrons_order_between_direct_ones_are_not_known_to_the_ledger(
    data: list[str], tmp_path: Path
) -> None:
    save = tmp_path / "save"
    words = [*WORDS, *f"--train-iters 3 --data-cache-path {tmp_path} --data-path".split(), *data]
    direct = [*without(words, "--data-cache-path"), "--data-order", "direct"]
    train_steps([*direct, "--exit-interval", "1"], save)
    train_steps([*words, "--load", str(save), "--exit-interval", "2"], save)
    train_steps([*direct, "--load", str(save)], save)
    ledger = Ledger(save)
    assert [(x.iteration + 1, x.done) for x in ledger.unknown(with_lost=True)] == [(2, 2)]
    assert sum(use.counted for use in uses(ledger)) == 32
    with pytest.raises(ConfigError, match="Steps 2 to 2 were in another order than the direct"):
        ledger.step(2)


def test_lengths_that_ranks_cannot_share_are_refused(data: list[str], tmp_path: Path) -> None:
    flags = _schedule(tmp_path / "mixture.yaml", data, [64, 2])
    words = [*DIRECT, *flags, "--context-parallel-size", "2"]
    with pytest.raises(ConfigError, match=r"`--seq-length` \(2\) must be divisible by 2 × `--con"):
        prepared([*words, "--nproc-per-node", "2"])


def test_the_preview_names_the_file_of_each_sample(data: list[str], tmp_path: Path) -> None:
    task, config, tokenizer = prepared([*DIRECT, "--data-path", *data])
    (step,) = collect(config, task, tokenizer, first=2, count=1)
    sources = [row.provenance.source for row in step.rows if row.provenance is not None]
    assert len(sources) == 16 and set(sources) == {data[1], data[3]}
