"""Samples, tokens and operations that the log counts for a step."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.text.cost.flops import flops_per_sample
from megatron_ext.text.step import text_step_stats
from tests.training_runs import SMALL, config_of


@pytest.mark.parametrize("rows_of_padding", [0, 2])
def test_a_step_counts_its_rows_at_the_length_of_the_step(rows_of_padding: int) -> None:
    """A step with fewer samples than rows computes the others too; shorter sequences cost less."""
    size = SimpleNamespace(samples_per_microbatch=3, global_batch_size=12 - rows_of_padding)
    run: Any = SimpleNamespace(config=config_of(SMALL), batch_size=size, flops_of_samples={})
    for length in (16, 32, 16):
        run.seq_length = length
        stats = text_step_stats(run, num_microbatches=4)
        alone = config_of([*SMALL, "--seq-length", str(length)])
        assert stats.samples == 12 - rows_of_padding
        assert stats.tokens == 12 * length
        assert stats.flops == pytest.approx(12 * flops_per_sample(alone))
    assert sorted(run.flops_of_samples) == [16, 32]
