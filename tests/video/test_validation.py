"""Validation of flow matching takes every clip, whatever their number and the layout."""

import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

from megatron_ext.train.callbacks.evaluation import evaluate
from megatron_ext.train.run import Run
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.data.dataset import collate
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.data.setup import EVALUATION_SEED, VideoSource, VideoSplit, open_split
from megatron_ext.video.networks.lookup import network_of
from megatron_ext.video.task import FLOW, VIDEO
from tests.video import wan_run
from tests.video.clips import IMAGE, LONG, SHORT, train, write_clips

SETS: Mapping[str, Mapping[Bucket, int]] = {
    "1": {SHORT: 1},
    "2": {SHORT: 2},
    "7": {SHORT: 7},
    "10": {SHORT: 10},
    "buckets": {IMAGE: 3, SHORT: 9, LONG: 1},
}
NAMES = (*SETS, "2 7")
"""Sets to validate on; the last name is two of them together."""
LAYOUTS = {
    "dp2": (2, ""),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2 dp2": (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
}
NO_REFERENCES = "--i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validation")
    for name, counts in SETS.items():
        write_clips(folder / name, counts)
    return folder


def split_of(run: Run, sets: Path, names: str) -> VideoSplit:
    paths = [str(sets / name) for name in names.split()]
    video = dataclasses.replace(run.config.section(VideoConfig), video_valid_path=paths)
    return open_split(run.config.with_section(video), validates=True)


def note_losses(run: Run, sets: Path, note: Path) -> None:
    """Write down the validation loss of each set, in the first and in the second pass through it.

    On one rank, also write down the plain mean of the squared errors over its clips, of which each
    is computed alone.
    """
    found = {}
    for name in NAMES:
        split = split_of(run, sets, name)
        state = torch.get_rng_state()
        source = VideoSource(run, split, None, 0, True)
        # Ranks without a loader must not get out of step with those that have one.
        assert torch.equal(torch.get_rng_state(), state)
        count = split.plan.steps.num_microbatches
        for passed in ("first", "second"):
            losses, _ = evaluate(run.runner, source, split.plan.steps_per_epoch, count)
            found[f"{name} {passed}"] = losses.get("loss")
        if run.context.layout.world_size == 1:
            found[f"{name} plain"] = plain_mean(run, split, source)
    if run.context.is_reporting_rank:
        note.write_text(json.dumps(found))


@torch.no_grad()
def plain_mean(run: Run, split: VideoSplit, source: VideoSource) -> float:
    network, errors, sizes = network_of(run.config), [], []
    seed = run.config.training.seed + EVALUATION_SEED
    null = source._build._null
    build = network.builder(run.config, run.context, null, seed, network.patch_size)
    for number in range(len(split.clips)):
        batch = build(collate([split.clips[number]], patch=network.patch_size), [number])
        assert batch.targets is not None
        velocity = network.velocity(run.chunks[0](**batch.inputs)).double()
        errors.append(mse_loss(velocity, batch.targets.velocity.double(), reduction="sum"))
        sizes.append(velocity.numel())
    return float(sum(errors)) / sum(sizes)


def losses_of(
    sets: Path, folder: Path, words: str, ranks: int, video_model: str
) -> dict[str, float]:
    prepare = partial(note_losses, sets=sets, note=folder / "losses.json")
    data = write_clips(folder / "clips", {SHORT: 8})
    if video_model == "mmdit":
        words = f"{words} {NO_REFERENCES} --train-iters 1 --lr-warmup-iters 0 --seed 1"
        train(data, folder / "run", words, ranks=ranks, prepare=prepare, task=FLOW)
    else:
        words = f"{words} {wan_run.KINDS['video-dit']}"
        flags = wan_run.FLAGS
        train(data, folder / "run", words, ranks=ranks, prepare=prepare, task=VIDEO, flags=flags)
    found: dict[str, float] = json.loads((folder / "losses.json").read_text())
    return found


@pytest.fixture(scope="module")
def one_rank(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return losses_of(sets, tmp_path_factory.mktemp("one"), "", 1, "mmdit")


def test_the_loss_is_the_plain_mean_over_all_clips(one_rank: dict[str, float]) -> None:
    """Clips of one bucket count alike; a token of several buckets counts as any other."""
    assert len({one_rank[f"{name} first"] for name in NAMES}) == len(NAMES)
    for name in NAMES:
        assert one_rank[f"{name} first"] == pytest.approx(one_rank[f"{name} plain"], rel=1e-6)
        assert one_rank[f"{name} second"] == one_rank[f"{name} first"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_that_loss(
    sets: Path, one_rank: dict[str, float], layout: str, tmp_path: Path
) -> None:
    ranks, words = LAYOUTS[layout]
    found = losses_of(sets, tmp_path, words, ranks, "mmdit")
    for name in NAMES:
        assert found[f"{name} first"] == pytest.approx(one_rank[f"{name} first"], rel=1e-6)
        assert found[f"{name} second"] == found[f"{name} first"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "cp2"])
def test_a_video_dit_takes_every_clip(sets: Path, layout: str, tmp_path: Path) -> None:
    one = losses_of(sets, tmp_path / "one", "", 1, "video-dit")
    ranks, words = LAYOUTS[layout]
    found = losses_of(sets, tmp_path / "layout", words, ranks, "video-dit")
    for name in NAMES:
        assert one[f"{name} first"] == pytest.approx(one[f"{name} plain"], rel=1e-6)
        assert found[f"{name} first"] == pytest.approx(one[f"{name} first"], rel=1e-6)
