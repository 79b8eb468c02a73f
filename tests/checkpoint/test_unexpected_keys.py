"""Weights that the model does not take are noted, or refused where they are whole blocks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from megatron_ext.checkpoint import compatibility as unwanted
from megatron_ext.checkpoint.compatibility import check_unexpected
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.state import LoadedCheckpoint
from megatron_ext.config.checkpoint import CheckpointConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from megatron_ext.video.config.wan import SIZES
from tests.ranks import run_on_ranks
from tests.video.model.wan.problem import Problem
from tests.video.networks import build
from tests.video.streaming.runs import attempt, run
from tests.video.test_new_branches import I2V, T2V, latents
from tests.video.test_new_branches import run as train

__all__ = ["latents"]


def chunks(context: ParallelContext, num_blocks: int) -> Any:
    sizes = dataclasses.replace(SIZES["tiny"], num_blocks=num_blocks)
    return build(Problem(sizes=sizes), context)[1]


def save(context: ParallelContext, folder: Path, num_blocks: int) -> None:
    CheckpointManager(CheckpointConfig(save=str(folder)), context).save(
        1, model=chunks(context, num_blocks), optimizer=None, scheduler=None, progress={},
        run_config={},
    )  # fmt: skip


def load(context: ParallelContext, folder: Path, num_blocks: int, **options: Any) -> Any:
    config = CheckpointConfig(pretrained_checkpoint=str(folder), **options)
    manager = CheckpointManager(config, context)
    return manager.load(model=chunks(context, num_blocks), optimizer=None, scheduler=None)


def refuse(context: ParallelContext, folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(context, folder, 2)
    assert str(caught.value) == (
        f"{folder}/iter_0000001 holds 4 `blocks`, but the model has only 2, so that `blocks.2` "
        "would be dropped; give the flags that it was saved with, or `--use-checkpoint-args`."
    )
    loaded = load(context, folder, 4)
    assert isinstance(loaded, LoadedCheckpoint) and loaded.notes == []
    assert load(context, folder, 2, dist_ckpt_strictness="ignore_all").notes == []
    with pytest.raises(CheckpointError, match=r"holds no `blocks.4.\S+`, which the model needs"):
        load(context, folder, 5)


@pytest.mark.parametrize("stages", [1, 2])
def test_fewer_blocks_are_refused_on_every_rank(tmp_path: Path, stages: int) -> None:
    """Check it where each stage has only some of the model's blocks."""
    layout = Layout(world_size=stages, pipeline_model_parallel_size=stages)
    run_on_ranks(save, Layout(world_size=1), {"folder": tmp_path, "num_blocks": 4})
    run_on_ranks(refuse, layout, {"folder": tmp_path})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_branch_that_is_left_out_is_noted_once(
    latents: Path,
    tmp_path: Path,
    ranks: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert train(latents, tmp_path / "i2v", f"{I2V} --train-iters 1") == 0
    assert "does not take" not in capfd.readouterr().out
    words = f"--train-iters 1 --pretrained-checkpoint {tmp_path / 'i2v'}"
    words += f" --pipeline-model-parallel-size {ranks}"
    assert train(latents, tmp_path / "t2v", f"{T2V} {words}", ranks=ranks) == 0
    said = capfd.readouterr().out
    assert said.count("does not take") == 1
    assert (
        f"> {tmp_path}/i2v/iter_0000001 holds 2 weight(s) that the model does not take, such as "
        "`embedding.cond_in.bias`; they are left out.\n"
    ) in said
    assert train(latents, tmp_path / "i2v2", f"{I2V} {words}", ranks=ranks) == 0
    assert "does not take" not in capfd.readouterr().out


def test_a_critic_with_fewer_blocks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    deep = dataclasses.replace(SIZES["tiny"], num_blocks=3)
    monkeypatch.setitem(SIZES, "small", deep)  # type: ignore[arg-type]
    run(tmp_path, "--critic-size small --train-iters 2 --exit-interval 1")
    words = f"--train-iters 2 --load {tmp_path / 'save'}"
    assert attempt(tmp_path, words, save="other")[0] != 0
    assert (
        "iter_0000001 holds 3 `critic.blocks`, but the model has only 2, so that `critic.blocks.2` "
        "would be dropped;"
    ) in capfd.readouterr().err
    run(tmp_path, f"--critic-size small {words}", save="more")
    assert "does not take" not in capfd.readouterr().out


MODEL = ("head.weight", "blocks.0.weight", "blocks.1.weight")
"""Weights of a model, beside which a checkpoint may hold other things."""
TENSOR = TensorStorageMetadata.__new__(TensorStorageMetadata)


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ((), None),
        (("optimizer.state.exp_avg.blocks.7.weight", "chained_0.optimizer.fp32.blocks.7"), None),
        (("ema.blocks.0.weight", "ema.blocks.7.weight", "critic.blocks.7.weight"), None),
        (("critic.optimizer.state.exp_avg.blocks.7.weight", "states"), None),
        (("mtp.layers.0.w", "mtp.layers.1.w"), "2 weight(s) .* as `mtp.layers.0.w`; they are"),
        (("output_layer.weight",), "1 weight(s) .* as `output_layer.weight`; they are left"),
    ],
)
def test_what_is_not_of_the_model_is_let_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], note: str | None
) -> None:
    stored = dict.fromkeys((*MODEL, *more), TENSOR)
    stored |= {name: BytesStorageMetadata() for name in ("states", "blocks.7._extra_state/shard_0")}
    monkeypatch.setattr(unwanted, "stored_entries", lambda _: stored)
    notes = check_unexpected(tmp_path, MODEL, "assume_ok_unexpected")
    assert len(notes) == (note is not None)
    for said in notes:
        count, name = str(note).split(" .* as ")
        assert f"{tmp_path} holds {count} that the model does not take, such as {name}" in said
    # Averages in the place of weights are these weights.
    averaged = [f"ema.{name}" for name in MODEL]
    assert check_unexpected(tmp_path, averaged, "assume_ok_unexpected") == notes


def test_one_of_two_heads_may_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = dict.fromkeys(("mtp.layers.0.w", "mtp.layers.1.w"), TENSOR)
    monkeypatch.setattr(unwanted, "stored_entries", lambda _: stored)
    (note,) = check_unexpected(tmp_path, ["mtp.layers.0.w"], "assume_ok_unexpected")
    assert "holds 1 weight(s) that the model does not take, such as `mtp.layers.1.w`;" in note
