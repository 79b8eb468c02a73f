"""One fixed clip is learned by heart, and sampled again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.video.config.run import FlowConfig, SampleConfig
from megatron_ext.video.data.conditions import Text
from megatron_ext.video.data.randomness import draw_noise
from megatron_ext.video.data.setup import null_text_of
from megatron_ext.video.sampling.flow import sample
from megatron_ext.video.sampling.velocity import ParallelVelocity
from megatron_ext.video.task import FLOW
from tests.video.clips import SHORT, clip, steps, write_clips

FLAGS = (
    "--i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0 --text-dropout 0 "
    "--pooled-dropout 0 --micro-batch-size 8 --global-batch-size 8 --train-iters 100 "
    "--log-interval 10 --lr 1e-2 --lr-warmup-iters 20 --recompute-double-blocks 0 "
    "--recompute-single-blocks 0"
)

SHAPE, SEED = (4, 3, 8, 8), 7


class SampleAtEnd(Callback):
    """Samples the clip's caption with the weights of the last step."""

    def on_train_end(self) -> None:
        run, config, one = self.run, self.run.config, clip(SHORT, 0)
        assert run.runner.engine is not None and config.checkpoint.save is not None
        velocity = ParallelVelocity(run.runner.engine, run.chunks, run.context, patch_size=2)
        null = null_text_of(config)
        sampled = sample(
            velocity.of_shape(SHAPE[1:]),
            Text(one.text[None], one.pooled[None]),
            Text(null[0][None], null[1][None]),
            draw_noise(SEED, [0], SHAPE, "sampling noise"),
            patch_size=2,
            flow=config.section(FlowConfig),
            sampling=SampleConfig(sample_steps=20, sample_text_scale=1.0, sample_image_scale=1.0),
        )
        torch.save(sampled[0], Path(config.checkpoint.save) / "sampled.pt")


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_a_fixed_clip_is_learned_and_sampled(tmp_path: Path) -> None:
    """The clip eight times in each step, with other noise each time."""
    data = write_clips(tmp_path / "clips", {SHORT: 8}, distinct=1)
    task = dataclasses.replace(FLOW, callbacks=(SampleAtEnd,))
    losses = [row["loss"] for row in steps(data, tmp_path / "run", FLAGS, task=task)]
    assert losses[-1] <= 0.2 * losses[0]
    sampled, wanted = torch.load(tmp_path / "run" / "sampled.pt"), clip(SHORT, 0).latents
    assert correlation(sampled, wanted) > 0.9
    assert abs(correlation(draw_noise(SEED, [0], SHAPE, "sampling noise"), wanted)) < 0.2
