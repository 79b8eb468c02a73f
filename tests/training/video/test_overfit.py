"""A few fixed clips are learned by heart, and sampled again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.data.video.text_dropout import Text
from megatron_ext.sampling.flow import SamplingConfig, initial_noise, sample
from megatron_ext.sampling.guidance import GuidanceConfig
from megatron_ext.training.setup import Run
from megatron_ext.training.video.data import open_videos
from megatron_ext.models.mmdit.tokens import position_ids
from pretrain_video import FLOW
from tests.training.video.clips import SHORT, clip, steps, write_clips


def sample_at_end(run: Run) -> None:
    """After the last step, sample the caption of the clip with the weights in memory."""
    if run.progress.iteration < run.num_iterations:
        return
    config, chunk = run.config, run.chunks[0].eval()
    one = clip(SHORT, 0)
    text = Text(one.text[None], one.pooled[None])
    data = open_videos(str(config.video.video_data_path), None)
    null = Text(*(part[None] for part in data.null_text))
    noise = initial_noise(7, 1, tuple(one.latents.shape))
    ids = position_ids(noise.shape[2:], 2, noise.device)

    def velocity(x: Tensor, t: Tensor, text: Tensor, pooled: Tensor, cond: Tensor) -> Tensor:
        b = len(x)
        out = chunk(
            img=x, timesteps=t, txt=text, y_vec=pooled,
            img_ids=ids.expand(b, -1, -1), txt_ids=ids.new_zeros(b, text.size(1), 3),
        )
        return out

    found = sample(
        velocity, text, null, noise, patch_size=2, flow=config.flow,
        sampling=SamplingConfig(20, GuidanceConfig(text_scale=1.0, image_scale=1.0)),
    )
    torch.save(found[0], Path(str(config.checkpoint.save)) / "sampled.pt")


def test_criterion_14(tmp_path: Path) -> None:
    data = write_clips(tmp_path / "clips", {SHORT: 1})
    words = (
        "--t2v-weight 1 --i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0 "
        "--text-dropout 0 --pooled-dropout 0 --micro-batch-size 1 --global-batch-size 1 "
        "--train-iters 300 --log-interval 20 --lr 3e-3 --lr-warmup-iters 20 --recompute-double-blocks 0 --recompute-single-blocks 0"
    )
    rows = steps(data, tmp_path / "run", words, task=dataclasses.replace(FLOW, after_step=sample_at_end))
    print([r["loss"] for r in rows], [r["grad_norm"] for r in rows])
    x = torch.load(tmp_path / "run/sampled.pt")
    print(torch.corrcoef(torch.stack([x.flatten(), clip(SHORT, 0).latents.flatten()])))
    assert 0
