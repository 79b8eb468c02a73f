"""One fixed clip is learned by heart, and sampled again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.data.video.text_dropout import Text
from megatron_ext.models.mmdit.tokens import position_ids
from megatron_ext.sampling.flow import SamplingConfig, initial_noise, sample
from megatron_ext.sampling.guidance import GuidanceConfig
from megatron_ext.training.setup import Run
from megatron_ext.training.video.data import open_videos
from pretrain_video import FLOW
from tests.training.video.clips import SHORT, clip, steps, write_clips

FLAGS = (
    "--i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0 --text-dropout 0 "
    "--pooled-dropout 0 --micro-batch-size 8 --global-batch-size 8 --train-iters 100 "
    "--log-interval 10 --lr 1e-2 --lr-warmup-iters 20 --recompute-double-blocks 0 "
    "--recompute-single-blocks 0"
)


def sample_at_end(run: Run) -> None:
    """After the last step, sample the clip's caption with the weights of the last step."""
    if run.progress.iteration < run.num_iterations:
        return
    config, chunk, one = run.config, run.chunks[0].eval(), clip(SHORT, 0)
    assert config.video.video_data_path is not None and config.checkpoint.save is not None
    null = open_videos(config.video.video_data_path, None).null_text
    shape = (4, 3, 8, 8)

    def velocity(x: Tensor, t: Tensor, text: Tensor, pooled: Tensor, cond: Tensor) -> Tensor:
        ids = position_ids(shape[1:], 2, x.device).expand(len(x), -1, -1)
        nowhere = ids.new_zeros(*text.shape[:2], 3)
        out: Tensor = chunk(
            img=x, timesteps=t, txt=text, y_vec=pooled, img_ids=ids, txt_ids=nowhere
        )
        return out

    sampled = sample(
        velocity,
        Text(one.text[None], one.pooled[None]),
        Text(null[0][None], null[1][None]),
        initial_noise(7, 1, shape),
        patch_size=2,
        flow=config.flow,
        sampling=SamplingConfig(20, GuidanceConfig(text_scale=1.0, image_scale=1.0)),
    )
    torch.save(sampled[0], Path(config.checkpoint.save) / "sampled.pt")


def test_criterion_14_a_fixed_clip_is_learned_and_sampled(tmp_path: Path) -> None:
    """The clip eight times in each step, with other noise each time."""
    data = write_clips(tmp_path / "clips", {SHORT: 8}, distinct=1)
    task = dataclasses.replace(FLOW, after_step=sample_at_end)
    losses = [row["loss"] for row in steps(data, tmp_path / "run", FLAGS, task=task)]
    assert losses[-1] <= 0.2 * losses[0]
    sampled, wanted = torch.load(tmp_path / "run" / "sampled.pt"), clip(SHORT, 0).latents
    assert float(torch.corrcoef(torch.stack([sampled.flatten(), wanted.flatten()]))[0, 1]) > 0.9
    before = torch.corrcoef(
        torch.stack([initial_noise(7, 1, (4, 3, 8, 8)).flatten(), wanted.flatten()])
    )
    assert abs(float(before[0, 1])) < 0.2
