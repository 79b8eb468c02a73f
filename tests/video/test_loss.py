"""Times, paths and losses of flow matching against plain arithmetic."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.losses.contract import StepCounts, checked, share_of_step
from megatron_ext.video.config.run import MODES, ConditionConfig, FlowConfig
from megatron_ext.video.data.conditions import frame_masks, loss_mask
from megatron_ext.video.loss import (
    QUARTERS,
    FlowTargets,
    flow_matching_loss,
    noised,
    shift,
    shift_factor,
    timesteps,
    token_losses,
    token_weights,
)

FLOW = FlowConfig()
B, FRAMES, TOKENS, D = 4, 5, 6, 16
N = FRAMES * TOKENS
NAMES = ("i2v_head", "t2v", "i2v_loop", "i2v_tail")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def modes(*names: str) -> Tensor:
    return torch.tensor([MODES.index(name) for name in names])


def mask_of(*names: str) -> Tensor:
    return loss_mask(frame_masks(modes(*names), FRAMES, ConditionConfig()), TOKENS, "masked")


def targets(mask: Tensor, normalization: str = "per_token") -> FlowTargets:
    return FlowTargets(
        velocity=random(B, N, D, seed=1), weights=token_weights(mask, normalization),
        times=torch.tensor([0.1, 0.3, 0.9, 1.0]), modes=modes(*NAMES),
    )  # fmt: skip


FACTORS = {
    (1, 256, 256): 1.0, (1, 1024, 1024): 3.0, (33, 576, 1024): 11.872, (1, 576, 1024): 2.067,
    (1, 192, 336): 0.998, (5, 192, 336): 2.231, (33, 192, 336): 5.733,
}  # fmt: skip


def test_shifts_of_sizes_and_lengths_and_medians_of_drawn_times() -> None:
    for (frames, height, width), factor in FACTORS.items():
        found = shift_factor(FLOW, (frames, height // 8, width // 8), 2)
        assert found == pytest.approx(factor, abs=1e-3), (frames, height, width)
    normals = random(100_000, seed=11)
    for factor, median, mean in ((1.0, 0.5, 0.5), (5.733, 0.852, 0.813), (11.872, 0.922, 0.892)):
        t = timesteps(FLOW, normals, factor)
        assert float(t.median()) == pytest.approx(factor / (1 + factor), abs=0.01)
        assert float(t.median()) == pytest.approx(median, abs=0.01)
        assert float(t.mean()) == pytest.approx(mean, abs=0.005)


def test_shifts_and_the_mean_and_spread_of_times_are_used() -> None:
    s = torch.linspace(0, 1, 11)
    assert torch.equal(shift(s, 1.0), s)
    assert shift(torch.tensor([0.0, 1.0]), 11.872).tolist() == [0.0, 1.0]
    assert float(shift(torch.tensor(0.5), 3.0)) == pytest.approx(0.75)
    config = FlowConfig(timestep_mean=-1.0, timestep_std=0.5, flow_shift=2.0, shift_by_length=False)
    s = 1 / (1 + math.exp(0.25))
    u = torch.tensor([1.5])
    assert float(timesteps(config, u, 2.0)) == pytest.approx(2 * s / (1 + s), rel=1e-6)
    assert shift_factor(config, (33, 72, 128), 2) == 2.0
    assert shift_factor(FlowConfig(shift_by_length=False), (33, 32, 32), 2) == 1.0


def test_ends_of_the_path_and_frames_with_times_of_their_own() -> None:
    x0, x1 = random(2, 4, 3, 8, 8), random(2, 4, 3, 8, 8, seed=1)
    start, _ = noised(x0, x1, torch.zeros(2), 1e-5)
    assert torch.equal(start, x0 + 1e-5 * x1)
    end, _ = noised(x0, x1, torch.ones(2), 1e-5)
    assert torch.equal(end, x1)
    x0, x1, times = random(2, 3, 4, 5, 5), random(2, 3, 4, 5, 5), torch.rand(2, 4)
    x_t, velocity = noised(x0, x1, times, 1e-5)
    for clip in range(2):
        for frame in range(4):
            alone = x0[clip, :, frame][None], x1[clip, :, frame][None]
            want = noised(*alone, times[clip, frame][None], 1e-5)
            assert torch.equal(x_t[clip, :, frame], want[0][0])
            assert torch.equal(velocity[clip, :, frame], want[1][0])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_velocity_is_the_derivative(dtype: torch.dtype, tolerance: float) -> None:
    step = 2**-8
    x0, x1 = random(3, 4, 6, dtype=dtype), random(3, 4, 6, seed=1, dtype=dtype)
    t = torch.tensor([0.25, 0.5, 0.875], dtype=dtype)
    after, v = noised(x0, x1, t + step, 1e-5)
    before, _ = noised(x0, x1, t - step, 1e-5)
    assert v.dtype == dtype
    difference = (after - before) / (2 * step)
    assert torch.allclose(difference, v, rtol=0, atol=tolerance)
    assert torch.allclose(v, (1 - 1e-5) * x1 - x0, rtol=0, atol=1e-6)


def test_times_and_paths_are_float32_for_16_bit_latents() -> None:
    x0, x1 = torch.zeros(2, 3, 4).bfloat16(), torch.ones(2, 3, 4)
    t = timesteps(FLOW, torch.tensor([0.0, 2.0]).bfloat16(), 5.733)
    assert t.dtype == torch.float32
    # In bfloat16 both would be 1000 * 0.9766.
    near = timesteps(FLOW, torch.tensor([2.0, 2.001]), 5.733)
    assert float(near[0]) != float(near[1])
    x_t, v = noised(x0, x1, torch.tensor([0.0, 0.5]), 1e-5)
    assert x_t.dtype == v.dtype == torch.float32
    assert float(x_t[0, 0, 0]) == pytest.approx(1e-5)
    assert float(v[0, 0, 0]) == pytest.approx(1 - 1e-5, abs=1e-7)


def test_the_masked_loss_is_the_mean_over_tokens_that_count() -> None:
    prediction, mask = random(B, N, D), mask_of(*NAMES)
    wanted = targets(mask)
    total, count, report = checked(lambda x: flow_matching_loss(x, targets=wanted))(prediction)
    errors = []
    for i, frames in enumerate(([1, 2, 3, 4], [0, 1, 2, 3, 4], [1, 2, 3], [0, 1, 2, 3])):
        for frame in frames:
            here = slice(frame * TOKENS, (frame + 1) * TOKENS)
            errors.append((prediction[i, here] - wanted.velocity[i, here]).double().square())
    assert int(count) == (4 + 5 + 3 + 4) * TOKENS
    assert not count.is_floating_point()
    mean = torch.cat(errors).mean()
    assert float(total / count) == pytest.approx(mean.item(), rel=1e-6)
    assert report["loss"].tolist() == [float(total), float(count)]
    wanted = targets(torch.ones(B, N))
    total, count, _ = flow_matching_loss(prediction, targets=wanted)
    plain = torch.nn.functional.mse_loss(prediction.double(), wanted.velocity.double())
    assert int(count) == B * N
    assert float(total / count) == pytest.approx(float(plain), rel=1e-6)


@pytest.mark.parametrize("normalization", ["per_token", "per_sample"])
def test_nothing_to_learn_gives_0(normalization: str) -> None:
    prediction = random(B, N, D).requires_grad_()
    wanted = targets(torch.zeros(B, N), normalization)
    counts = StepCounts(torch.zeros(()), torch.zeros(()), torch.zeros(0), 1)
    share = share_of_step(wanted.weights, counts, per_token=True)
    total, count, report = flow_matching_loss(prediction, targets=wanted, share=share)
    total.backward()  # type: ignore[no-untyped-call]
    assert total.item() == 0 and int(count) == 0 and report["loss"].tolist() == [0.0, 0.0]
    assert prediction.grad is not None and not prediction.grad.any()


@pytest.mark.parametrize("normalization", ["per_token", "per_sample"])
@pytest.mark.parametrize("change", [5.0, math.inf, math.nan])
def test_masked_tokens_change_nothing(normalization: str, change: float) -> None:
    mask = mask_of(*NAMES)
    wanted, found = targets(mask, normalization), []
    for added in (0.0, change):
        base = random(B, N, D)
        prediction = torch.where(mask[:, :, None] == 0, base + added, base).requires_grad_()
        total, _, _ = flow_matching_loss(prediction, targets=wanted)
        total.backward()  # type: ignore[no-untyped-call]
        assert prediction.grad is not None
        assert not prediction.grad[mask == 0].any()
        assert (prediction.grad[mask == 1] != 0).all()
        found.append((total.detach(), prediction.grad[mask == 1]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("kind", ["masked", "trimmed"])
@pytest.mark.parametrize("normalization", ["per_token", "per_sample"])
def test_two_frames_in_a_loop_are_finite(kind: str, normalization: str) -> None:
    masks = frame_masks(modes("i2v_loop", "i2v_head"), 2, ConditionConfig())
    weights = token_weights(loss_mask(masks, TOKENS, kind), normalization)  # type: ignore[arg-type]
    prediction = random(2, 2 * TOKENS, D).requires_grad_()
    velocity = random(2, 2 * TOKENS, D, seed=1)
    wanted = FlowTargets(velocity, weights, torch.tensor([0.2, 0.3]), modes("i2v_loop", "i2v_head"))
    total, count, _ = flow_matching_loss(prediction, targets=wanted)
    total.backward()  # type: ignore[no-untyped-call]
    assert int(count) == TOKENS
    assert prediction.grad is not None and bool(prediction.grad.isfinite().all())
    half = slice(TOKENS, 2 * TOKENS)
    mean = (prediction[1, half] - velocity[1, half]).square().mean()
    assert (total / weights.sum()).item() == pytest.approx(mean.item(), rel=1e-6)


def mean_of_clips(prediction: Tensor, velocity: Tensor, mask: Tensor) -> Tensor:
    clips = zip(prediction, velocity, mask, strict=True)
    return torch.stack([mean_of_tokens(*clip) for clip in clips]).mean()


def mean_of_tokens(prediction: Tensor, velocity: Tensor, mask: Tensor) -> Tensor:
    return (prediction[mask == 1] - velocity[mask == 1]).square().mean()


@pytest.mark.parametrize("normalization", ["per_token", "per_sample"])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_accumulation_is_one_large_batch(normalization: str, cp_size: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(D, 8), torch.nn.SiLU(), torch.nn.Linear(8, D))
    x, mask = random(B, N, D, seed=2), mask_of(*NAMES)
    wanted = targets(mask, normalization)
    mean = mean_of_tokens if normalization == "per_token" else mean_of_clips
    whole = mean(model(x), wanted.velocity, mask)
    expected = torch.autograd.grad(whole, list(model.parameters()))

    counts = StepCounts(mask.sum(), wanted.weights.sum(), torch.zeros(0), B)
    totals, tokens = torch.zeros(()), 0
    for i in range(B):
        for rank in range(cp_size):
            here = slice(rank * N // cp_size, (rank + 1) * N // cp_size)
            part = FlowTargets(
                wanted.velocity[i : i + 1, here], wanted.weights[i : i + 1, here],
                wanted.times[i : i + 1], wanted.modes[i : i + 1],
            )  # fmt: skip
            share = share_of_step(part.weights, counts, per_token=True)
            predicted = model(x[i : i + 1, here])
            loss, count, _ = flow_matching_loss(predicted, targets=part, share=share)
            totals, tokens = totals + loss, tokens + int(count)
    assert tokens == int(mask.sum())
    assert (totals / tokens).item() == pytest.approx(whole.item(), rel=1e-6)
    found = torch.autograd.grad(totals / tokens, list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))


@pytest.mark.parametrize("normalization", ["per_token", "per_sample"])
def test_a_mean_of_means_does_not_depend_on_where_the_image_tokens_are(normalization: str) -> None:
    """Average the losses of two ranks, of which one holds most of a clip's image tokens."""
    prediction, mask = random(B, N, D, seed=2), mask_of(*NAMES)
    wanted = targets(mask, normalization)
    counts = StepCounts(mask.sum(), wanted.weights.sum(), torch.zeros(0), B)
    for cut in (7, N // 2, N):
        for i in range(B):
            means = []
            for here in (slice(0, cut), slice(cut, N)):
                part = FlowTargets(
                    wanted.velocity[i : i + 1, here], wanted.weights[i : i + 1, here],
                    wanted.times[i : i + 1], wanted.modes[i : i + 1],
                    usual_weight=wanted.weights[i].sum() / 2,
                )  # fmt: skip
                share = share_of_step(
                    part.weights, counts, per_token=False, usual_weight=part.usual_weight
                )
                predicted = prediction[i : i + 1, here]
                loss, count, _ = flow_matching_loss(predicted, targets=part, share=share)
                means.append(float(loss) / max(1, int(count)))
            want = mean_of_tokens(prediction[i], wanted.velocity[i], mask[i])
            assert sum(means) / 2 == pytest.approx(float(want), rel=1e-5), (cut, i)


def test_reports_by_quarter_and_mode_add_up_also_where_tokens_have_times() -> None:
    prediction, wanted = random(B, N, D), targets(mask_of(*NAMES))
    names = ("t2v", "i2v_head", "i2v_tail", "i2v_loop")
    _, _, report = flow_matching_loss(prediction, targets=wanted, reported_modes=names)
    assert set(report) == {"loss", *(f"loss {name}" for name in (*QUARTERS, *names))}
    each = token_losses(prediction, wanted.velocity, wanted.weights).sum(dim=1)
    counts = wanted.weights.sum(dim=1)
    members = {
        "t_q1": [0], "t_q2": [1], "t_q3": [], "t_q4": [2, 3],
        "t2v": [1], "i2v_head": [0], "i2v_tail": [3], "i2v_loop": [2],
    }  # fmt: skip
    for name, clips in members.items():
        want = torch.stack([each[clips].sum(), counts[clips].sum()])
        assert torch.allclose(report[f"loss {name}"], want, rtol=1e-6)
    for group in (QUARTERS, names):
        together = torch.stack([report[f"loss {name}"] for name in group]).sum(dim=0)
        assert torch.allclose(together, report["loss"], rtol=1e-6)
    prediction, wanted = random(B, N, D), targets(mask_of(*NAMES))
    times = torch.arange(B * N).view(B, N) * 7 % 11 / 11
    wanted = dataclasses.replace(wanted, times=times)
    _, _, report = flow_matching_loss(prediction, targets=wanted)
    each = token_losses(prediction, wanted.velocity, wanted.weights) * wanted.weights
    for i, name in enumerate(QUARTERS):
        inside = (times >= i / 4) & (times < (i + 1) / 4)
        want = torch.stack([each[inside].sum(), wanted.weights[inside].sum()])
        assert want[1] > 0 and torch.allclose(report[f"loss {name}"], want, rtol=1e-5)


def test_16_bit_predictions_are_compared_in_float32_and_other_shapes_refused() -> None:
    prediction = torch.full((1, 2, 3), 1.0).bfloat16()
    velocity = torch.full((1, 2, 3), 1.001)
    losses = token_losses(prediction, velocity)
    assert losses.dtype == torch.float32
    assert torch.allclose(losses, torch.full((1, 2), 1e-6), rtol=1e-3)
    with pytest.raises(ConfigError, match=r"predicted \(4, 30, 1\), but .* \(4, 30, 16\)"):
        flow_matching_loss(random(B, N, 1), targets=targets(torch.ones(B, N)))


WRONG = [
    ("sigma_min", 1.0), ("timestep_mean", math.nan), ("timestep_std", 0.0), ("shift_max", 0.5),
    ("shift_base_tokens", -1), ("shift_max", 100.0), ("flow_shift", 0.0),
    ("loss_normalization", "per_element"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_values_out_of_range_are_refused(name: str, value: float | str) -> None:
    flag = name.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"`--{flag}` \({value}\) must be .*; .*\."):
        FlowConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bounds", "mean", "factor"),
    [((0.875, 1.0), 0.0, 3.0), ((0.0, 0.875), 0.0, 3.0), ((0.4, 0.5), 1.0, 1.0)],
)
def test_times_in_a_range_are_the_usual_ones_of_this_range(
    bounds: tuple[float, float], mean: float, factor: float
) -> None:
    """Compare quantiles with those of the usual times in the range, a fixed set of numbers."""
    shares = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    normals = torch.special.ndtri(shares)
    usual = timesteps(FlowConfig(timestep_mean=mean), normals, factor)
    low, high = bounds
    kept = usual[(usual >= low) & (usual <= high)]
    found = timesteps(FlowConfig(timestep_mean=mean, timestep_range=bounds), normals, factor)
    assert found.dtype is torch.float32 and len(kept) > 500
    assert low <= float(found.min()) and float(found.max()) <= high
    at = torch.linspace(0.02, 0.98, 25)
    torch.testing.assert_close(found.quantile(at), kept.quantile(at), rtol=0, atol=1e-3)
    # A larger number is a later time, in the range too.
    assert bool((found.diff() >= 0).all())


@pytest.mark.parametrize("bounds", [(0.999, 1.0), (0.0, 0.001)])
def test_times_are_drawn_in_a_range_that_is_hardly_ever_reached(
    bounds: tuple[float, float],
) -> None:
    config = FlowConfig(timestep_mean=-3.0 if bounds[0] else 4.0, timestep_range=bounds)
    found = timesteps(config, torch.linspace(-3, 3, 50), 1.0)
    assert len(found.unique()) == 50
    assert bounds[0] <= float(found.min()) and float(found.max()) <= bounds[1]
