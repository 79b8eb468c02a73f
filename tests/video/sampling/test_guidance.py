"""Scales of the guidance against the rows of Open-Sora's sampler."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.video.sampling.flow import GuidanceConfig, guided, image_scale, text_scale

PLAIN = GuidanceConfig(oscillate_text=False, oscillate_image=False, scale_image_by_frame=False)


def test_the_three_predictions_are_joined() -> None:
    c, u, u2 = torch.randn(3, 2, 6, 4, dtype=torch.float64)
    want = u2 + 3.0 * (u - u2) + 7.5 * (c - u)
    assert torch.allclose(guided(c, u, u2, 7.5, 3.0), want, rtol=1e-12)
    per_token = torch.rand(6, 1, dtype=torch.float64)
    want = u2 + per_token * (u - u2) + 7.5 * (c - u)
    assert torch.allclose(guided(c, u, u2, 7.5, per_token), want, rtol=1e-12)


def test_scales_of_1_give_the_conditional_prediction() -> None:
    c, u, u2 = torch.randn(3, 2, 6, 4)
    assert torch.equal(guided(c, u, u2, 1.0, 1.0), c)


def test_odd_steps_rest_from_the_tenth_on() -> None:
    config = GuidanceConfig(scale_image_by_frame=False)
    for step in range(50):
        rests = step in range(11, 50, 2)
        assert text_scale(config, step) == (1.0 if rests else 7.5)
        assert image_scale(config, step, 50, 3).tolist() == [1.0 if rests else 3.0] * 3
        assert text_scale(PLAIN, step) == 7.5
        assert image_scale(PLAIN, step, 50, 3).tolist() == [3.0] * 3
    text_only = GuidanceConfig(oscillate_image=False, scale_image_by_frame=False)
    assert text_scale(text_only, 11) == 1.0
    assert image_scale(text_only, 11, 50, 1).tolist() == [3.0]
    assert text_scale(GuidanceConfig(oscillation_start=0), 1) == 1.0


def test_the_image_scale_rises_over_the_frames_and_falls_over_the_steps() -> None:
    config = GuidanceConfig(oscillate_image=False)
    for step in (0, 1, 7, 19):
        end = torch.linspace(3.0, 1.0, 21)[step]
        want = torch.linspace(1.0, float(end), 5)
        assert torch.allclose(image_scale(config, step, 20, 5), want, rtol=1e-6)
    resting = GuidanceConfig()
    assert image_scale(resting, 11, 20, 5).tolist() == [1.0] * 5
    below = GuidanceConfig(image_scale=0.5)
    assert image_scale(below, 0, 20, 2).tolist() == [0.5, 0.5]


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`text_scale` \(inf\) must be finite"):
        GuidanceConfig(text_scale=math.inf)
    with pytest.raises(ConfigError, match=r"`oscillation_start` \(-1\) must be 0 or more"):
        GuidanceConfig(oscillation_start=-1)
