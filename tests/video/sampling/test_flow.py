"""Sampling with models whose flow is known."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megatron_ext.video.config.run import MODES, ConditionConfig, FlowConfig, SampleConfig
from megatron_ext.video.data.conditions import Text, condition, frame_masks
from megatron_ext.video.data.randomness import draw_noise
from megatron_ext.video.loss import noised, shift_factor, timesteps
from megatron_ext.video.model.tokens import pack
from megatron_ext.video.sampling.flow import References
from megatron_ext.video.sampling.guidance import Guidance, guided
from megatron_ext.video.sampling.solvers import Schedule, times
from tests.video.sampling.problem import sampled

B, C, T, H, W = 2, 4, 3, 8, 8
SHAPES = [((5, 8, 8), 1, 64), ((5, 24, 42), 2, 252)]
FLOW = FlowConfig()
PLAIN = SampleConfig(
    sample_text_scale=1.0, sample_image_scale=1.0, sample_oscillation=False,
    sample_scale_by_frame=False,
)  # fmt: skip
USUAL = SampleConfig()
Model = Callable[[Tensor, Tensor, Tensor, Tensor, References], Tensor]


def text(seed: int = 0) -> Text:
    random = torch.Generator().manual_seed(seed)
    return Text(torch.randn(B, 8, 6, generator=random), torch.randn(B, 5, generator=random))


def noise_of(seed: int, num_clips: int, shape: Sequence[int]) -> Tensor:
    return draw_noise(seed, range(num_clips), shape)


NULL = Text(torch.zeros(1, 1, 6), torch.zeros(1, 5))
NOISE = noise_of(3, B, (C, T, H, W))


def references(mode: str) -> References:
    masks = frame_masks(torch.tensor([MODES.index(mode)] * B), T, ConditionConfig())
    return References(torch.randn(B, C, T, H, W), masks)


def run(
    velocity: Model, sampling: SampleConfig = PLAIN, num_steps: int = 6, noise: Tensor = NOISE,
    given: References | None = None, prompts: Text | None = None,
) -> Tensor:  # fmt: skip
    sampling = dataclasses.replace(sampling, sample_steps=num_steps)
    options = {"schedule": Schedule(FLOW, sampling), "references": given}
    return sampled(velocity, text() if prompts is None else prompts, NULL, noise, **options)


def tokens_of(given: References) -> Tensor:
    return pack(condition(given.latents, given.masks), 2)


def toy(x: Tensor, t: Tensor, words: Tensor, pooled: Tensor, given: References) -> Tensor:
    """Return a smooth function of all inputs; the references of some frames count in all frames."""
    of_text = words.mean(dim=(1, 2))[:, None, None] + pooled.mean(dim=1)[:, None, None]
    scale = t[:, None, None] + of_text
    cond = tokens_of(given)
    of_references = cond.square().mean(dim=1, keepdim=True) + 0.3 * cond
    return torch.sin(scale * x) + of_references[:, :, : x.size(2)]


@pytest.mark.parametrize("num_steps", [1, 2, 7, 50])
def test_a_constant_velocity_is_followed_to_its_end(num_steps: int) -> None:
    x0 = torch.randn(B, C, T, H, W, generator=torch.Generator().manual_seed(5))
    _, v = noised(x0, NOISE, torch.ones(B), FLOW.sigma_min)

    def exact(x: Tensor, t: Tensor, words: Tensor, pooled: Tensor, given: References) -> Tensor:
        return pack(v, 2).repeat(len(x) // B, 1, 1)

    found = run(exact, USUAL, num_steps)
    assert torch.allclose(found, x0 + FLOW.sigma_min * NOISE, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("shape", "patch_size", "tokens"), SHAPES)
def test_times_shift_alike(shape: tuple[int, int, int], patch_size: int, tokens: int) -> None:
    """Compare a uniform step s of the sampler with a training draw with sigmoid(u) = s."""
    factor = (1 + (tokens - 256) * 2 / 3840) * math.sqrt(5)
    sampled = times(8, shift_factor(FLOW, shape, patch_size))
    for i in range(1, 8):
        s = 1 - i / 8
        assert float(sampled[i]) == pytest.approx(factor * s / (1 + (factor - 1) * s), rel=1e-5)
        u = torch.tensor([math.log(s / (1 - s))])
        trained = timesteps(FLOW, u, shift_factor(FLOW, shape, patch_size))
        assert float(trained) == pytest.approx(float(sampled[i]), rel=1e-5)
    assert float(sampled[0]) == 1 and float(sampled[-1]) == 0
    fixed = times(2, 3.0)
    assert fixed.tolist() == pytest.approx([1.0, 0.75, 0.0])


def test_the_model_gets_exact_times_and_sampling_is_reproducible() -> None:
    seen: list[Tensor] = []

    def watching(x: Tensor, t: Tensor, words: Tensor, pooled: Tensor, given: References) -> Tensor:
        assert x.dtype == t.dtype == torch.float32
        seen.append(t)
        return torch.zeros_like(x).bfloat16()

    found = run(watching, num_steps=5, noise=NOISE.bfloat16())
    assert found.dtype == torch.float32
    wanted = times(5, shift_factor(FLOW, (T, H, W), 2))[:-1]
    assert torch.equal(torch.stack([t[0] for t in seen]), wanted)
    first = run(toy, USUAL)
    torch.rand(3)
    assert torch.equal(run(toy, USUAL, noise=noise_of(3, B, (C, T, H, W))), first)
    assert not torch.allclose(run(toy, USUAL, noise=noise_of(4, B, (C, T, H, W))), first)
    assert torch.equal(noise_of(3, 1, (C, T, H, W))[0], NOISE[0])
    assert not torch.equal(NOISE[0], NOISE[1])


@pytest.mark.parametrize("mode", ["t2v", "i2v_head"])
def test_scales_of_1_follow_the_conditional_prediction(mode: str) -> None:
    given, prompts = references(mode), text()
    x = pack(NOISE, 2)
    steps = times(6, shift_factor(FLOW, (T, H, W), 2)).tolist()
    for now, after in zip(steps, steps[1:], strict=False):
        t = torch.full((B,), now)
        x = x + (after - now) * toy(x, t, prompts.sequence, prompts.pooled, given)
    found = pack(run(toy, given=given), 2)
    free = pack(~given.masks[:, None, :, None, None].expand(NOISE.shape), 2)
    assert torch.equal(found[free], x[free])


@pytest.mark.parametrize("mode", ["i2v_head", "i2v_tail", "i2v_loop"])
def test_reference_frames_are_the_given_ones(mode: str) -> None:
    given = references(mode)
    given.latents[~given.masks[:, None, :, None, None].expand_as(given.latents)] = math.nan
    found = run(toy, USUAL, given=given)
    for frame in range(T):
        same = torch.equal(found[:, :, frame], given.latents[:, :, frame])
        assert same == bool(given.masks[0, frame])
    assert bool(found.isfinite().all())


def test_every_input_and_scale_counts() -> None:
    given = references("i2v_loop")
    base = SampleConfig(sample_oscillation=False, sample_scale_by_frame=False)
    first = run(toy, base, 12, given=given)
    changes = {"text_scale": 5.0, "image_scale": 2.0, "oscillation": True, "scale_by_frame": True}
    free = ~given.masks[0]
    for name, value in changes.items():
        other = dataclasses.replace(base, **{f"sample_{name}": value})
        found = run(toy, other, 12, given=given)
        assert not torch.allclose(found[:, :, free], first[:, :, free], atol=1e-4), name
    assert not torch.allclose(run(toy, base, 12, given=given, prompts=text(1)), first)


def test_guidance_is_by_frame_text_and_references() -> None:
    given, prompts = references("i2v_head"), text()
    guidance = SampleConfig(sample_text_scale=2.0, sample_image_scale=3.0)
    tokens, n = pack(NOISE, 2), T * H * W // 4
    one = torch.ones(B)
    empty, pooled = torch.zeros(B, 8, 6), torch.zeros(B, 5)
    c = toy(tokens, one, prompts.sequence, prompts.pooled, given)
    u = toy(tokens, one, empty, pooled, given)
    u2 = toy(tokens, one, empty, pooled, References.none(NOISE))
    by_frame = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(n // T)[:, None]
    want = tokens - (u2 + by_frame * (u - u2) + 2.0 * (c - u))
    found = pack(run(toy, guidance, 1, given=given), 2)
    later = slice(n // T, n)
    assert torch.allclose(found[:, later], want[:, later], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("mode", "parts"), [(None, 2), ("t2v", 2), ("i2v_head", 3)])
def test_predictions_that_are_alike_are_made_once(mode: str | None, parts: int) -> None:
    def counting(x: Tensor, t: Tensor, words: Tensor, pooled: Tensor, given: References) -> Tensor:
        assert len(x) == len(t) == len(words) == len(pooled) == len(given.masks) == parts * B
        assert len(given.latents) == parts * B
        return x

    run(counting, USUAL, given=None if mode is None else references(mode))


def test_the_three_predictions_are_joined() -> None:
    c, u, u2 = torch.randn(3, 2, 6, 4, dtype=torch.float64)
    for scale in (3.0, torch.rand(6, 1, dtype=torch.float64)):
        want = u2 + scale * (u - u2) + 7.5 * (c - u)
        assert torch.allclose(guided(c, u, u2, 7.5, scale), want, rtol=1e-12)


def test_scales_rest_in_odd_steps_and_change_over_frames_and_steps() -> None:
    steady = SampleConfig(sample_oscillation=False, sample_scale_by_frame=False)
    resting = SampleConfig(sample_scale_by_frame=False)
    for step in range(50):
        rests = step in range(11, 50, 2)
        assert Guidance(resting).text_scale(step, 0.5) == (1.0 if rests else 7.5)
        assert Guidance(resting).image_scale(step, 0.5, 3).tolist() == [1.0 if rests else 3.0] * 3
        assert Guidance(steady).text_scale(step, 0.5) == 7.5
        assert Guidance(steady).image_scale(step, 0.5, 3).tolist() == [3.0] * 3
    changing = SampleConfig(sample_oscillation=False, sample_steps=20)
    for step in (0, 1, 7, 19):
        end = torch.linspace(3.0, 1.0, 21)[step]
        want = torch.linspace(1.0, float(end), 5)
        assert torch.allclose(Guidance(changing).image_scale(step, 0.5, 5), want, rtol=1e-6)
    assert Guidance(USUAL).image_scale(11, 0.5, 5).tolist() == [1.0] * 5
    weak = Guidance(SampleConfig(sample_image_scale=0.5))
    assert weak.image_scale(0, 0.5, 2).tolist() == [0.5, 0.5]
