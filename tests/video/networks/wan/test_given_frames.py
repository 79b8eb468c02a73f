"""A step of the program with given frames, in each layout, as plain torch with diffusers' class."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.initialization import shards_of
from megatron_ext.train.run import Run
from megatron_ext.video.config.run import FlowConfig
from megatron_ext.video.data.randomness import draw_noise, draw_normals, draw_uniforms
from megatron_ext.video.model.tokens import pack
from megatron_ext.video.networks.wan.config import VideoDiTConfig
from megatron_ext.video.sampling.flow import References
from megatron_ext.video.sampling.samples import velocity_of
from tests.training_runs import training_rows
from tests.video.clips import CHANNELS, IMAGE_WIDTH, SHORT, SIDE, WIDTH, clip, write_clips
from tests.video.networks.harness import Truth, check_gradients, check_weights, relative
from tests.video.networks.wan.test_kinds import TEXT_ROWS, KindProblem
from tests.video.wan_run import FRAMES, PATCH, SEED, train

IMAGE_TOKENS = 3
MODES = {"i2v": "head", "i2v-clip": "head", "flf2v-clip": "loop"}
LAYOUTS = {
    "one": (1, ""),
    "tp2sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2 dp2": (4, "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
}
QUICK = {("flf2v-clip", "tp2 dp2"), ("i2v", "cp2"), ("ti2v", "pp2")}
CASES = [
    pytest.param(
        kind, layout, marks=[] if layout == "one" or (kind, layout) in QUICK else pytest.mark.slow
    )
    for kind in ("ti2v", "i2v", "i2v-clip", "flf2v-clip")
    for layout in LAYOUTS
]


def words_of(kind: str) -> str:
    return f"--video-model video-dit --dit-condition {kind} --dit-ffn-size 96"


def problem_of(kind: str) -> KindProblem:
    sizes = VideoDiTConfig(
        dit_condition=kind, dit_ffn_size=96, dit_channels=CHANNELS, dit_text_width=WIDTH,
        dit_vision_width=IMAGE_WIDTH, dit_vision_tokens=IMAGE_TOKENS,
    ).sizes  # fmt: skip
    return KindProblem(sizes=sizes, kind=kind)


def given_frames(kind: str, samples: list[Any]) -> dict[str, Tensor]:
    """Return the inputs of `VideoDiT` for given frames."""
    if kind == "ti2v":
        return {}
    loop = MODES[kind] == "loop"
    masks = torch.zeros(len(samples), 4, FRAMES, SIDE, SIDE).double()
    masks[:, :, 0] = 1
    if loop:
        masks[:, 3, -1] = 1
    name = f"masked_{MODES[kind]}1"
    masked = torch.stack([sample.references[name] for sample in samples]).double()
    given = {"condition": torch.cat([masks, masked], dim=1).transpose(1, 2)}
    if kind != "i2v":
        sides = ("head", "tail") if loop else ("head",)
        images = [torch.cat([sample.image_embeds[side] for side in sides]) for sample in samples]
        given["vision"] = torch.stack(images).double()
    return given


def microbatch(
    kind: str, numbers: list[int], drawn: list[int]
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return inputs, velocity and which frames have a loss, by the formulas."""
    samples = [clip(SHORT, number, text=TEXT_ROWS, images=IMAGE_TOKENS) for number in numbers]
    x0 = torch.stack([sample.latents for sample in samples]).double()
    noise = draw_noise(SEED, drawn, (CHANNELS, FRAMES, SIDE, SIDE)).double()
    logistic = torch.sigmoid(draw_normals(SEED, drawn, "timestep").double())
    t = 3 * logistic / (1 + 2 * logistic)
    spread, left = t[:, None, None, None, None], FlowConfig().sigma_min
    x_t = (1 - spread) * x0 + (spread + left * (1 - spread)) * noise
    text = torch.stack([sample.text for sample in samples]).double()
    text[draw_uniforms(SEED, drawn, "text dropout") < 0.5] = 0.0
    timesteps = 1000 * t[:, None].repeat(1, FRAMES)
    has_loss = torch.ones(len(samples), FRAMES)
    # Of the two modes of ti2v, which are drawn equally often, the first gives no frame.
    heads = draw_uniforms(SEED, drawn, "condition") >= 0.5
    if kind == "ti2v":
        for row, sample in enumerate(samples):
            if heads[row]:
                x_t[row, :, :1] = sample.references["head1"].double()
                timesteps[row, 0] = has_loss[row, 0] = 0
    inputs = {"x": x_t.transpose(1, 2), "timesteps": timesteps, "text": text}
    inputs |= given_frames(kind, samples)
    return inputs, ((1 - left) * noise - x0).transpose(1, 2), has_loss


def sampling_inputs(kind: str) -> tuple[list[Tensor], References, dict[str, Tensor]]:
    """Return tokens, times, text and given frames for a sampler, and the network's inputs."""
    inputs, _, _ = microbatch(kind, [1, 2], [3, 4])
    x = inputs["x"].transpose(1, 2)
    times = torch.tensor([0.2, 0.9], dtype=torch.float64)
    references = References.none(x.float())
    inputs["timesteps"] = 1000 * times[:, None].repeat(1, FRAMES)
    if kind == "ti2v":
        latents = 2 * torch.ones_like(x)
        references = References(latents.float(), torch.tensor([[True, False, False]] * 2))
        inputs["x"] = torch.cat([latents[:, :, :1], x[:, :, 1:]], dim=2).transpose(1, 2)
        inputs["timesteps"][:, 0] = 0
    else:
        condition = inputs["condition"].transpose(1, 2).float()
        masks, masked = condition[:, :4, :, 0, 0], condition[:, 4:]
        vision = inputs["vision"].float() if "vision" in inputs else None
        references = References(references.latents, references.masks, masked, masks, vision)
    pooled = torch.zeros(2, 1)
    return [pack(x, PATCH), times, inputs["text"], pooled], references, inputs


def record(run: Run, path: Path) -> None:
    """Write down the weights that a run on one rank starts from, and the clips of its step."""
    plan: Any = run.train_source
    (chunk,) = run.chunks
    weights = {s.name: s.tensor.detach().clone() for s in shards_of(chunk.module)}
    planned = plan.video_plan.microbatches(0, 0, 0)
    steps = [(list(members), list(samples)) for _, members, samples in planned]
    torch.save({"weights": weights, "steps": steps}, path)


def check_run(run: Run, kind: str, truth: Truth, tolerance: float) -> None:
    """Let each rank compare weights and predictions before the step, and its gradients in it."""
    chunks = [chunk.module for chunk in run.chunks]
    check_weights(chunks, truth.weights)
    predictor = velocity_of(run)
    assert predictor.takes_references and predictor.keeps_references == (kind == "ti2v")
    tokens, references, _ = sampling_inputs(kind)
    predicted = predictor.of_shape((FRAMES, SIDE, SIDE))(*(x.float() for x in tokens), references)
    if kind == "ti2v":
        # What is predicted of given frames, which the sampler does not change, says nothing.
        predicted, wanted = (x.unflatten(1, (FRAMES, -1))[:, 1:] for x in (predicted, truth.output))
    else:
        wanted = truth.output
    assert relative(predicted, wanted) <= tolerance
    run.runner.observer = partial(check_gradients, chunks, truth.gradients, tolerance)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given") / "clips"
    return write_clips(folder, {SHORT: 9}, text=TEXT_ROWS, images=IMAGE_TOKENS)


@pytest.fixture(scope="module")
def truth_of(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Truth]:
    folder = tmp_path_factory.mktemp("truths")

    @cache
    def of(kind: str) -> Truth:
        path = folder / f"{kind}.pt"
        train(data, folder / kind, words_of(kind), prepare=partial(record, path=path))
        recorded = torch.load(path)
        problem, weights = problem_of(kind), recorded["weights"]
        model = problem.plain_model(weights)
        total, count = torch.zeros((), dtype=torch.float64), 0.0
        for numbers, samples in recorded["steps"]:
            inputs, velocity, has_loss = microbatch(kind, numbers, samples)
            by_frame = (model(**inputs) - velocity).square().mean(dim=(2, 3, 4))
            total = total + (by_frame * has_loss).sum()
            count += float(has_loss.sum())
        loss = total / count
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        _, _, inputs = sampling_inputs(kind)
        with torch.no_grad():
            predicted = pack(model(**inputs).transpose(1, 2), PATCH)
        wanted = problem.to_parallel(gradients, weights)
        return Truth(weights, float(loss.detach()), wanted, predicted)

    return of


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_steps_with_given_frames_are_those_of_diffusers(
    data: Path, truth_of: Callable[[str], Truth], kind: str, layout: str, tmp_path: Path
) -> None:
    ranks, words = LAYOUTS[layout]
    want = truth_of(kind)
    prepare = partial(check_run, kind=kind, truth=want, tolerance=1e-5)
    rows = train(data, tmp_path, f"{words_of(kind)} {words}", ranks=ranks, prepare=prepare)
    (row,) = training_rows(rows)
    norm = sum(float(x.double().square().sum()) for x in want.gradients.values()) ** 0.5
    assert row["loss"] == pytest.approx(want.loss, rel=2e-6)
    assert row["grad_norm"] == pytest.approx(norm, rel=2e-6)
