"""A step of flow matching with a video DiT, by the program and in plain torch."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers.initialization import shards_of
from megatron_ext.train.run import Run
from megatron_ext.video.config.run import FlowConfig
from megatron_ext.video.data.randomness import draw_noise, draw_normals, draw_uniforms
from megatron_ext.video.model.tokens import pack, unpack
from megatron_ext.video.networks.wan.config import SIZES
from megatron_ext.video.sampling.flow import References
from megatron_ext.video.sampling.samples import velocity_of
from megatron_ext.video.task import VIDEO
from tests.video import clips
from tests.video.clips import CHANNELS, SHORT, SIDE, TEXT, WIDTH, clip
from tests.video.networks.harness import Truth, check_gradients, check_weights, relative
from tests.video.networks.wan.problem import Problem

SIZES_OF_CLIPS = dataclasses.replace(SIZES["tiny"], channels=CHANNELS, text_width=WIDTH)
FRAMES, PATCH, SEED = 3, 2, 5
FLAGS = (
    "--video-dit-size tiny --no-zero-head --train-iters 1 --lr 1e-3 --lr-warmup-iters 0 "
    f"--micro-batch-size 2 --global-batch-size 4 --log-interval 1 --num-workers 0 --seed {SEED} "
    "--text-dropout 0.5 --flow-shift 3"
).split()
WINDOWS = {"video-dit": None, "causal": (1, 2, 1), "independent": (1, 2, 1), "alone": (2, 3, 1, 1)}
KINDS = {
    "video-dit": "--video-model video-dit",
    "causal": "--video-model causal-video-dit --frame-block 1 --window-frames 2 --sink-frames 1",
}
KINDS["independent"] = KINDS["causal"] + " --independent-block-timesteps"
KINDS["alone"] = (
    "--video-model causal-video-dit --frame-block 2 --window-frames 3 --sink-frames 1 "
    "--independent-first-frame --independent-block-timesteps"
)
NO_REFERENCES = References.none(torch.zeros(2, CHANNELS, FRAMES, SIDE, SIDE))
BLOCKS = {"independent": [0, 1, 2], "alone": [0, 1, 1]}
train = partial(clips.train, flags=FLAGS, task=VIDEO)


def record(run: Run, path: Path) -> None:
    """Write down the weights that a run on one rank starts from, and the clips of its step."""
    plan: Any = run.train_source
    (chunk,) = run.chunks
    weights = {s.name: s.tensor.detach().clone() for s in shards_of(chunk.module)}
    planned = plan.video_plan.microbatches(0, 0, 0)
    steps = [(members, list(samples)) for _, members, samples in planned]
    torch.save({"weights": weights, "steps": steps}, path)


def check_run(run: Run, truth: Truth, tolerance: float) -> None:
    """Let each rank compare weights and predictions before the step, and its gradients in it."""
    chunks = [chunk.module for chunk in run.chunks]
    check_weights(chunks, truth.weights)
    velocity = velocity_of(run).of_shape((FRAMES, SIDE, SIDE))
    tokens, times, text, pooled = (x.float() for x in sampling_inputs())
    predicted = velocity(tokens, times, text, pooled, NO_REFERENCES)
    assert predicted.dtype is torch.float32 and relative(predicted, truth.output) <= tolerance
    run.runner.observer = partial(check_gradients, chunks, truth.gradients, tolerance)


def truth_of(recorded: dict[str, Any], kind: str) -> Truth:
    problem, weights = Problem(sizes=SIZES_OF_CLIPS), recorded["weights"]
    model = problem.plain_model(weights)
    rule = WINDOWS[kind]
    losses = []
    for numbers, samples in recorded["steps"]:
        inputs, velocity = microbatch(numbers, samples, BLOCKS.get(kind, [0] * FRAMES))
        losses.append((model(**inputs, rule=rule) - velocity).square().mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    x, times, text, _ = sampling_inputs()
    latents = unpack(x, (FRAMES, SIDE, SIDE), PATCH).transpose(1, 2)
    timesteps = 1000 * times[:, None].expand(-1, FRAMES)
    with torch.no_grad():
        flow = model(x=latents, timesteps=timesteps, text=text, rule=rule)
    predicted = pack(flow.transpose(1, 2), PATCH)
    return Truth(weights, float(loss.detach()), problem.to_parallel(gradients, weights), predicted)


def sampling_inputs() -> list[Tensor]:
    """Return tokens, times, text and pooled text of two clips; a video DiT ignores the last."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    tokens = normal(2, FRAMES * (SIDE // PATCH) ** 2, CHANNELS * PATCH**2)
    times = torch.tensor([0.2, 0.9], dtype=torch.float64)
    return [tokens, times, normal(2, TEXT, WIDTH), normal(2, 1)]


def microbatch(
    numbers: Sequence[int], samples: Sequence[int], blocks: Sequence[int]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs of the network and the velocity, by the formulas; frames before channels.

    ``blocks`` are the numbers of the blocks with times of their own in which the frames lie.
    """
    given = [clip(SHORT, number) for number in numbers]
    x0 = torch.stack([sample.latents for sample in given]).double()
    noise = draw_noise(SEED, samples, (CHANNELS, FRAMES, SIDE, SIDE)).double()
    u = draw_normals(SEED, samples, "timestep", 1 + max(blocks)).double()
    logistic = torch.sigmoid(u[:, blocks])
    t = 3 * logistic / (1 + 2 * logistic)
    spread, left = t[:, None, :, None, None], FlowConfig().sigma_min
    x_t = (1 - spread) * x0 + (spread + left * (1 - spread)) * noise
    dropped = draw_uniforms(SEED, samples, "text dropout") < 0.5
    text = torch.stack([sample.text for sample in given]).double()
    text[dropped] = 0.0
    inputs = {"x": x_t.transpose(1, 2), "timesteps": 1000 * t, "text": text}
    return inputs, ((1 - left) * noise - x0).transpose(1, 2)
