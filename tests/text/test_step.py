"""A forward step of a GPT gets every flag of its loss; the log counts samples and tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.data.batch import Batch
from megatron_ext.losses.contract import StepCounts
from megatron_ext.text import step
from megatron_ext.text.cost.products import flops_per_sample
from megatron_ext.text.step import gpt_forward_step, prepare_batches, text_step_stats
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


def batch_of(value: float) -> Batch:
    zeros = torch.zeros(1, 4, dtype=torch.long)
    return Batch(zeros, zeros, torch.full((1, 4), value), zeros)


def test_a_custom_loss_sees_all_micro_batches_and_sets_their_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = [batch_of(1), batch_of(2)]
    config = config_of(SMALL)
    context: Any = object()
    assert prepare_batches(config, batches, context) is batches
    inputs = [SimpleNamespace(weights=torch.full((1, 4), x)) for x in (7.0, 9.0)]

    def build(given: Any, where: Any) -> Any:
        assert (given, where) == (batches, context)
        return inputs

    monkeypatch.setattr(step, "custom_loss", lambda loss: SimpleNamespace(build=build))
    prepared = prepare_batches(config, batches, context)
    assert [batch.loss_inputs for batch in prepared] == inputs
    assert [float(batch.loss_weights[0, 0]) for batch in prepared] == [7, 9]
    assert prepared[0].tokens is batches[0].tokens


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("half", ["", "--bf16", "--fp16"])
def test_a_chunked_loss_gets_its_flags_in_training_alone(
    trains: bool, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation reports the plain loss, by which runs with other regularization compare."""
    flags = "--cross-entropy-impl chunked --cross-entropy-chunk-size 3 --label-smoothing 0.25 "
    config = config_of([*SMALL, *f"{flags} --z-loss-coeff 0.5 {half}".split()])
    given: dict[str, Any] = {}
    asked: dict[str, Any] = {}

    def loss(hidden: Any, head: Any, batch: Batch, **options: Any) -> str:
        given.update(options, hidden=hidden, head=head, batch=batch)
        return "loss"

    def model(*inputs: Any, **options: Any) -> str:
        asked.update(options, inputs=inputs)
        return "hidden"

    one = torch.ones(())
    counts = StepCounts(8 * one, one, one[None], num_microbatches=2) if trains else None
    monkeypatch.setattr(step, "hidden_states_loss", loss)
    monkeypatch.setattr(step, "output_head", lambda own: ("head", own))
    monkeypatch.setattr(step, "custom_loss", lambda own: ("custom", own))
    batch = batch_of(1)
    network: Any = model
    hidden, function = gpt_forward_step(config, batch, network, counts)
    assert hidden == "hidden" and function(hidden) == "loss"  # type: ignore[comparison-overlap]
    assert asked["inputs"] == (batch.tokens, batch.position_ids, None)
    assert asked["hidden_states_only"] and asked.get("fp32_output", True) is (not half)
    assert (given["hidden"], given["head"], given["batch"]) == ("hidden", ("head", model), batch)
    assert (given["block_size"], given["custom"]) == (3, ("custom", config.loss))
    regular = {name: given.get(name) for name in ("label_smoothing", "z_loss_coefficient")}
    assert regular == (
        {"label_smoothing": 0.25, "z_loss_coefficient": 0.5}
        if trains
        else {"label_smoothing": None, "z_loss_coefficient": None}
    )
