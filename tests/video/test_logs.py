"""Logs of video runs: losses by time and mode, rates, and validation; and a clip overfitted."""

import dataclasses
import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.reporting.loss_plot import _plot_losses
from megatron_ext.train.run import Run
from megatron_ext.video.config.run import MODES, ConditionConfig, FlowConfig, SampleConfig
from megatron_ext.video.data.conditions import Text, draw_modes
from megatron_ext.video.data.randomness import draw_noise, draw_uniforms
from megatron_ext.video.data.setup import EVALUATION_SEED, manifest_of, null_text_of
from megatron_ext.video.loss import QUARTERS
from megatron_ext.video.sampling.solvers import Schedule
from megatron_ext.video.sampling.velocity import ParallelVelocity
from megatron_ext.video.task import FLOW
from tests.video import clips as tiny
from tests.video.sampling.problem import sampled

CONDITIONS = ConditionConfig(
    i2v_head_weight=1, i2v_tail_weight=0, i2v_loop_weight=0, v2v_head_weight=8, v2v_frames=3
)
WORDS = (
    "--i2v-head-weight 1 --i2v-tail-weight 0 --i2v-loop-weight 0 --v2v-head-weight 8 "
    "--v2v-frames 3 --seed 4 --train-iters 8"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return clips of which only the longer ones hold a piece of three frames."""
    folder = tmp_path_factory.mktemp("logs") / "clips"
    return tiny.write_clips(folder, {tiny.SHORT: 16, tiny.LONG: 16}, lengths=(1, 3))


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[tiny.Rows, Path]:
    save = tmp_path_factory.mktemp("logs") / "run"
    rows = tiny.steps(data, save, WORDS, prepare=partial(tiny.record_steps, folder=save / "steps"))
    return rows, save / "steps"


def test_losses_by_time_and_mode_sum_up_to_the_loss(run: tuple[tiny.Rows, Path]) -> None:
    rows, folder = run
    for step, batches in tiny.recorded_steps(folder).items():
        weights: dict[str, float] = defaultdict(float)
        for batch in batches:
            tokens = batch["weights"].sum(dim=1).tolist()
            for time, mode, count in zip(batch["times"], batch["modes"], tokens, strict=True):
                weights[f"loss {QUARTERS[min(int(time * 4), 3)]}"] += count
                weights[f"loss {MODES[mode]}"] += count
        row = rows[step - 1]
        if step == 2:
            continue  # Its row counts the first step once more, as Megatron-LM's log does.
        assert {name for name in row if name.startswith("loss ")} == set(weights)
        for names in (QUARTERS, MODES):
            parts = [f"loss {name}" for name in names if f"loss {name}" in weights]
            total = sum(weights[part] * row[part] for part in parts)
            mean = total / sum(weights[part] for part in parts)
            assert math.isclose(mean, row["loss"], rel_tol=1e-6), (step, names)


def test_short_clips_do_not_take_modes_from_later_ones(run: tuple[tiny.Rows, Path]) -> None:
    """Draw modes as the weights say in each step, after steps of clips too short for some."""
    rows, folder = run
    given = tiny.recorded_steps(folder)
    frames = []
    for step, row in enumerate(rows, 1):
        t = int(given[step][0]["img_ids"][..., 0].max()) + 1
        frames.append(t)
        samples = range(8 * (step - 1), 8 * step)
        drawn = draw_modes(CONDITIONS, t, draw_uniforms(4, samples, "condition"))
        assert torch.equal(torch.cat([batch["modes"] for batch in given[step]]), drawn)
        if step > 2:
            assert ("loss v2v_head" in row) == (t == 5)
    assert 5 in frames[frames.index(3) :]


def test_rates(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], run: tuple[tiny.Rows, Path]
) -> None:
    rows, _ = run
    for row in rows[2:]:
        seconds = row["seconds_per_iteration"]
        assert math.isclose(row["train/throughput"], 8 / seconds, rel_tol=1e-9)
        tokens = row["tokens_per_second"] * seconds
        assert any(math.isclose(tokens, 8 * n, rel_tol=1e-9) for n in (8 + 48, 8 + 80))
        assert row["train/loss"] == row["loss"]
    tiny.steps(data, tmp_path, f"{WORDS} --train-iters 1 --lr-warmup-iters 0")
    (line,) = (line for line in capfd.readouterr().out.splitlines() if "iteration" in line)
    assert "videos/s:" in line and "tokens/s:" in line


def _count_clips(run: Run, folder: Path) -> None:
    (source,) = run.valid_sources
    next_step = source.next_step

    def counted(num_microbatches: int, seq_length: int | None = None) -> Any:
        batches: Any = next_step(num_microbatches, seq_length)
        images = torch.cat([batch.targets.velocity.sum((1, 2)) for batch in batches])
        torch.save(images, folder / f"{len(list(folder.iterdir()))}.pt")
        return batches

    source.next_step = counted  # type: ignore[method-assign]


def test_validation_goes_through_the_whole_split_with_the_same_noise(
    clips: Path, valid: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "seen"
    folder.mkdir()
    words = (
        f"--video-valid-path {valid} --eval-iters 1 --eval-interval 2 --lr 0 --train-iters 4 "
        "--i2v-loop-weight 0.01"
    )
    rows = tiny.train(clips, tmp_path / "run", words, prepare=partial(_count_clips, folder=folder))
    found = [row for row in rows if row["kind"] == "evaluation"]
    assert [row["iteration"] for row in found] == [2, 4, 4]
    losses = [{k: v for k, v in row.items() if k.startswith("loss")} for row in found]
    assert losses[0] == losses[1] == losses[2] and 1 < losses[0]["loss"] < 4
    seen = torch.cat([torch.load(folder / f"{i}.pt") for i in range(9)]).chunk(3)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    # The last step is filled up with the first clip of its bucket, whose draws are the same.
    assert len(torch.unique(seen[0])) == 17 and len(seen[0]) == 24
    # Decisions follow from a clip's number: those of the split are 0 to 7 and 8 to 16.
    uniforms = draw_uniforms(1234 + EVALUATION_SEED, range(17), "condition")
    modes = draw_modes(ConditionConfig(i2v_loop_weight=0.01), 3, uniforms)
    reported = {name.removeprefix("loss ") for name in losses[0]} & set(MODES)
    assert reported == {MODES[mode] for mode in modes.tolist()} != set(MODES[:4])
    printed = capfd.readouterr().out
    assert "validation loss at iteration 2 | loss value:" in printed and "PPL" not in printed


def test_the_picture_shows_the_validation() -> None:
    common = {"kind": "train", "loss_scale": 1}
    train_rows = [{**common, "iteration": i, "loss": 1.0 / i} for i in (1, 2)]
    evaluations = [{"kind": "evaluation", "split": "validation", "iteration": 2, "loss": 0.7}]
    axes = Figure().subplots()
    _plot_losses(axes, train_rows, evaluations, [])
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert list(lines) == ["loss, training", "loss, validation"]
    assert list(lines["loss, validation"].get_ydata()) == [0.7]


OVERFIT = (
    "--i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0 --text-dropout 0 "
    "--pooled-dropout 0 --micro-batch-size 8 --global-batch-size 8 --train-iters 100 "
    "--log-interval 10 --lr 1e-2 --lr-warmup-iters 20 --recompute-double-blocks 0 "
    "--recompute-single-blocks 0"
)
SHAPE, SEED = (4, 3, 8, 8), 7


class SampleAtEnd(Callback):
    """Samples the clip's caption with the weights of the last step."""

    def on_train_end(self) -> None:
        run, config, one = self.run, self.run.config, tiny.clip(tiny.SHORT, 0)
        assert run.runner.engine is not None and config.checkpoint.save is not None
        velocity = ParallelVelocity(run.runner.engine, run.chunks, run.context, patch_size=2)
        null = Text(*(x[None] for x in null_text_of(config, manifest_of(config))))
        text = Text(one.text[None], one.pooled[None])
        noise = draw_noise(SEED, [0], SHAPE, "sampling noise")
        scales = SampleConfig(sample_steps=20, sample_text_scale=1.0, sample_image_scale=1.0)
        schedule = Schedule(config.section(FlowConfig), scales)
        clip = sampled(velocity.of_shape(SHAPE[1:]), text, null, noise, schedule=schedule)
        torch.save(clip[0], Path(config.checkpoint.save) / "sampled.pt")


def test_a_fixed_clip_is_learned_and_sampled(tmp_path: Path) -> None:
    """Train on the clip eight times in each step, with other noise each time."""
    data = tiny.write_clips(tmp_path / "clips", {tiny.SHORT: 8}, distinct=1)
    task = dataclasses.replace(FLOW, callbacks=(SampleAtEnd,))
    losses = [row["loss"] for row in tiny.steps(data, tmp_path / "run", OVERFIT, task=task)]
    assert losses[-1] <= 0.2 * losses[0]
    sampled = torch.load(tmp_path / "run" / "sampled.pt")
    noise = draw_noise(SEED, [0], SHAPE, "sampling noise")
    flat = [x.flatten() for x in (tiny.clip(tiny.SHORT, 0).latents, sampled, noise)]
    _, like_sample, like_noise = torch.corrcoef(torch.stack(flat))[0].tolist()
    assert like_sample > 0.9 and abs(like_noise) < 0.2
