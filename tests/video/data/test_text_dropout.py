"""The empty caption in place of captions."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.run import TextDropoutConfig
from megatron_ext.video.data.conditions import Text, drop_text, fit_length
from megatron_ext.video.data.randomness import draw_uniforms

NULL = Text(torch.randn(1, 3, 4), torch.randn(1, 6))


def captions(seed: int) -> Text:
    random = torch.Generator().manual_seed(seed)
    return Text(torch.randn(5, 8, 4, generator=random), torch.randn(5, 6, generator=random))


def test_only_what_is_dropped_is_replaced() -> None:
    text = captions(1)
    sequence = torch.tensor([True, False, True, False, False])
    pooled = torch.tensor([True, True, False, False, False])
    kept = drop_text(text, NULL, sequence, pooled)
    for i in range(5):
        want = text.sequence[i]
        if sequence[i]:
            want = torch.stack([NULL.sequence[0, min(k, 2)] for k in range(8)])
        assert torch.equal(kept.sequence[i], want)
        assert torch.equal(kept.pooled[i], NULL.pooled[0] if pooled[i] else text.pooled[i])


def test_with_probability_1_the_prompt_does_not_matter() -> None:
    model = torch.nn.Linear(4 + 6, 3)

    def output(text: Text) -> torch.Tensor:
        config = TextDropoutConfig(text_dropout=1.0, pooled_dropout=1.0)
        dropped = drop_text(
            text,
            NULL,
            draw_uniforms(1, range(5), "text dropout") < config.text_dropout,
            draw_uniforms(1, range(5), "pooled dropout") < config.pooled_dropout,
        )
        seen: torch.Tensor = model(torch.cat([dropped.sequence.mean(1), dropped.pooled], dim=1))
        return seen

    assert torch.equal(output(captions(1)), output(captions(2)))


def test_captions_keep_their_type() -> None:
    text = Text(torch.randn(1, 3, 4).bfloat16(), torch.randn(1, 6).bfloat16())
    kept = drop_text(text, NULL, torch.tensor([True]), torch.tensor([True]))
    assert kept.sequence.dtype == kept.pooled.dtype == torch.bfloat16


def test_an_empty_caption_that_is_too_long_is_refused() -> None:
    with pytest.raises(DataError, match="has 3 tokens, but the captions of the batch have 2"):
        fit_length(NULL.sequence, 2)


def test_probabilities_are_checked() -> None:
    assert TextDropoutConfig().text_dropout == pytest.approx(0.31622777)
    for value in (-0.1, 1.5, math.nan):
        with pytest.raises(ConfigError, match=r"`--pooled-dropout` .* at least 0 and at most 1"):
            TextDropoutConfig(pooled_dropout=value)
