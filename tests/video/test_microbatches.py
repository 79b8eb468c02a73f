"""Micro-batches of flow matching on the ranks that share a clip, without a run."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.losses.contract import StepCounts
from megatron_ext.video.config.run import MODES
from megatron_ext.video.data.conditions import Text
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.randomness import draw_microbatch
from megatron_ext.video.loss import FlowTargets
from megatron_ext.video.model.tokens import pack
from megatron_ext.video.networks.lookup import network_of
from megatron_ext.video.step import FlowMicrobatch
from tests.video.networks.test_flags import mmdit, wan

SAMPLES, SHAPE, LENGTH, WIDTH, POOLED = (4, 9, 11), (4, 5, 4, 8), 6, 12, 10
IMAGE = 5 * 2 * 4
BATCH = VideoBatch(
    torch.randn(3, *SHAPE), torch.randn(3, LENGTH, WIDTH), torch.randn(3, POOLED),
    {name: torch.randn(3, 4, 1, 4, 8) for name in ("head1", "tail1")},
)  # fmt: skip
NULL = Text(torch.zeros(1, 2, WIDTH), torch.zeros(1, POOLED))
DROPS = "--text-dropout 0.5 --pooled-dropout 0.5"


def batch_on(
    config: RunConfig, cp_rank: int = 0, cp: int = 1, counted: int | None = None, *,
    first: bool = True, last: bool = True,
) -> FlowMicrobatch:  # fmt: skip
    group = SimpleNamespace(rank=lambda: cp_rank, size=lambda: cp)
    context: Any = SimpleNamespace(
        pgs=SimpleNamespace(cp=group), is_first_stage=first, is_last_stage=last
    )
    build = network_of(config).builder(config, context, NULL, 3, 2)
    return build(BATCH, SAMPLES, counted)


def targets_of(batch: FlowMicrobatch) -> FlowTargets:
    assert batch.targets is not None
    return batch.targets


@pytest.mark.parametrize("name", ["mmdit", "wan"])
@pytest.mark.parametrize("normalization", ["per_token", "per_sample"])
def test_ranks_that_share_clips_have_parts_of_their_targets(name: str, normalization: str) -> None:
    """Give two ranks 17 and 23 image tokens of the MMDiT, and each all tokens of Wan's network."""
    words = f"--loss-normalization {normalization}"
    config = mmdit(words) if name == "mmdit" else wan(words)
    whole = targets_of(batch_on(config))
    parts = [targets_of(batch_on(config, rank, 2)) for rank in range(2)]
    if name == "mmdit":
        assert [part.weights.size(1) for part in parts] == [17, 23]
        assert torch.equal(torch.cat([part.weights for part in parts], dim=1), whole.weights)
        assert torch.equal(torch.cat([part.velocity for part in parts], dim=1), whole.velocity)
    else:
        assert torch.equal(parts[0].weights + parts[1].weights, whole.weights)
        assert not (parts[0].weights * parts[1].weights).any()
        assert all(torch.equal(part.velocity, whole.velocity) for part in parts)
        assert all(part.weights.any(dim=1).all() for part in parts)
    # Every rank takes the average share of the ranks, whatever it holds itself.
    total = whole.weights.sum()
    assert total > 0 and float(whole.usual_weight or 0) == pytest.approx(float(total))
    for part in parts:
        assert float(part.usual_weight or 0) == pytest.approx(float(total) / 2)


@pytest.mark.parametrize("counted", [0, 1, 2, 3])
def test_only_the_first_clips_that_count_have_a_loss(counted: int) -> None:
    for config in (mmdit("--t2v-weight 1"), wan()):
        weights = targets_of(batch_on(config, counted=counted)).weights
        found = [bool(row.any()) for row in weights]
        assert found == [row < counted for row in range(3)]
        usual = targets_of(batch_on(config, counted=counted)).usual_weight
        assert float(weights.sum()) == pytest.approx(float(usual or 0))


def test_stages_get_what_they_use() -> None:
    config = mmdit()
    first, last = batch_on(config, last=False), batch_on(config, first=False)
    assert first.targets is None and last.targets is not None
    assert set(last.inputs) == {"img_ids", "txt_ids"} < set(first.inputs)
    for batch in (first, last):
        assert batch.boundary_inputs == {
            "num_text": LENGTH, "num_image": IMAGE, "micro_batch_size": 3
        }  # fmt: skip


def test_words_and_pooled_vectors_are_dropped_by_draws_of_their_own() -> None:
    config = mmdit(DROPS)
    batch = batch_on(config)
    sections = {type(section).__name__: section for section in config.sections}
    drawn = draw_microbatch(
        3, SAMPLES, SHAPE, sections["ConditionConfig"], sections["TextDropoutConfig"]
    )
    assert not torch.equal(drawn.drop_text, drawn.drop_pooled)
    text, pooled = batch.inputs["txt"], batch.inputs["y_vec"]
    assert text is not None and pooled is not None
    assert [not row.any() for row in text] == drawn.drop_text.tolist()
    assert [not row.any() for row in pooled] == drawn.drop_pooled.tolist()


def test_paths_and_weights_are_those_of_the_flags() -> None:
    """Let a quarter of the noise stay at time 0, references count, and each clip weigh the same."""
    config = mmdit("--sigma-min 0.25 --reference-loss all --loss-normalization per_sample")
    batch = batch_on(config)
    sections = {type(section).__name__: section for section in config.sections}
    noise = draw_microbatch(
        3, SAMPLES, SHAPE, sections["ConditionConfig"], sections["TextDropoutConfig"]
    ).noise
    times, image = batch.inputs["timesteps"], batch.inputs["img"]
    assert times is not None and image is not None
    t = times.view(3, 1, 1, 1, 1)
    noised = (1 - t) * BATCH.latents + (t + 0.25 * (1 - t)) * noise
    torch.testing.assert_close(image, pack(noised, 2))
    targets = targets_of(batch)
    torch.testing.assert_close(targets.velocity, pack(0.75 * noise - BATCH.latents, 2))
    assert (targets.modes > 0).any() and (targets.weights > 0).all()
    torch.testing.assert_close(targets.weights.sum(dim=1), torch.ones(3))
    # By default tokens of references have no loss, and all others the weight 1.
    usual = targets_of(batch_on(mmdit()))
    assert usual.weights.unique().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("per_token", [True, False])
def test_a_micro_batchs_share_of_a_step_is_that_of_its_average_rank(
    per_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def share(weights: Tensor, counts: Any, **options: Any) -> float:
        asked.append((weights, counts, options))
        return 0.25

    monkeypatch.setattr("megatron_ext.losses.contract.share_of_step", share)
    config = mmdit()
    training = dataclasses.replace(config.training, calculate_per_token_loss=per_token)
    network = network_of(dataclasses.replace(config, training=training))
    batch = batch_on(config, 1, 2)
    targets = targets_of(batch)
    counts = StepCounts.__new__(StepCounts)
    prediction = torch.zeros_like(targets.velocity)
    model: Any = lambda **_: prediction  # noqa: E731
    output, loss = network.forward_step(batch, model, counts)
    total, count, report = loss(output)
    wanted = (targets.velocity.square().mean(dim=2) * targets.weights).sum()
    torch.testing.assert_close(total, 0.25 * wanted)
    assert float(report["loss"][0]) == pytest.approx(float(wanted)) and int(count) > 0
    ((weights, given, options),) = asked
    assert weights is targets.weights and given is counts
    assert options == {"per_token": per_token, "usual_weight": targets.usual_weight}
    names = {name.removeprefix("loss ") for name in report} & {*MODES}
    assert names == {"t2v", "i2v_head", "i2v_tail", "i2v_loop"}
