"""Timesteps."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_ext.video.model.mmdit.inputs import timestep_sinusoid


def test_cosines_come_before_sines() -> None:
    u = torch.tensor([0.0, 0.25, 1.0])
    got = timestep_sinusoid(u)
    assert got.shape == (3, 256)
    assert got[0].tolist() == [1.0] * 128 + [0.0] * 128
    for j in (0, 1, 77, 127):
        angle = 250.0 * math.exp(-math.log(10000) * j / 128)
        assert float(got[1, j]) == pytest.approx(math.cos(angle), abs=1e-4)
        assert float(got[1, 128 + j]) == pytest.approx(math.sin(angle), abs=1e-4)


def test_timesteps_keep_float32() -> None:
    """Two timesteps that are one in bfloat16 are told apart."""
    u = torch.tensor([0.7001, 0.7011])
    assert u.bfloat16()[0] == u.bfloat16()[1]
    first, second = timestep_sinusoid(u)
    assert (first - second).abs().max() > 0.5
