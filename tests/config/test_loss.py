"""Refusals of the flags of the loss."""

from __future__ import annotations

import pytest

from megatron_ext.config.parser import parse_args
from megatron_ext.errors import ConfigError
from megatron_ext.text.task import TEXT
from tests.training_runs import TINY, mock_data


def test_a_negative_label_to_ignore_is_refused_but_for_none() -> None:
    words = [*TINY, *mock_data(), "--train-iters", "1", "--ignore-index"]
    for given in ("-100", "0", "7"):
        config = parse_args([*words, given], TEXT, world_size=1, device="cpu").config
        assert config.loss.ignore_index == int(given)
    with pytest.raises(ConfigError) as caught:
        parse_args([*words, "-5"], TEXT, world_size=1, device="cpu")
    assert str(caught.value) == (
        "`--ignore-index` (-5) must be a token id, 0 or more, or -100 for none; give the id whose "
        "labels are to weigh nothing."
    )
