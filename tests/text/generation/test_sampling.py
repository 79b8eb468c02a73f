"""Sampling equals transformers' own processors of logits, and draws what it should."""

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron_ext.text.generation import sampling
from megatron_ext.text.generation.sampling import Chooser, Sampling

IDS = [3, 17, 3, 40, 9]


def logits(seed: int = 0, size: int = 64) -> torch.Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_the_processors_are_those_of_transformers() -> None:
    for seed in range(20):
        penalized = sampling.penalized(logits(seed), IDS, 1.4)
        penalty = RepetitionPenaltyLogitsProcessor(1.4)
        expected = penalty(torch.tensor([IDS]), logits(seed)[None])[0]
        # Top-k hides most of the negative logits.
        torch.testing.assert_close(penalized, expected, rtol=0, atol=0)
        own = sampling.top_p_only(sampling.top_k_only(penalized / 0.7, 12), 0.8)
        theirs = LogitsProcessorList(
            [
                penalty,
                TemperatureLogitsWarper(0.7),
                TopKLogitsWarper(12),
                TopPLogitsWarper(0.8),
            ]
        )
        expected = theirs(torch.tensor([IDS]), logits(seed)[None])[0]
        torch.testing.assert_close(own, expected, rtol=0, atol=0)
        assert 1 <= own.isfinite().sum() <= 12


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    scores, number = logits(1, 8), 4000
    options = Sampling(do_sample=True, temperature=2.0)
    draws = [Chooser(options, i).choose(scores, []) for i in range(number)]
    shares = torch.bincount(torch.tensor(draws), minlength=8) / number
    # Four standard deviations of a share of 0.5.
    assert (shares - (scores / 2).softmax(-1)).abs().max() < 4 * (0.25 / number) ** 0.5


def test_rounding_of_the_logits_does_not_change_draws() -> None:
    options, noise = Sampling(do_sample=True), torch.Generator().manual_seed(2)
    for number in range(200):
        scores = logits(number)
        near = scores + 1e-6 * torch.randn(len(scores), generator=noise)
        assert Chooser(options, number).choose(scores, []) == Chooser(options, number).choose(
            near, []
        )


def test_seed_and_number_decide_the_draws() -> None:
    def drawn(seed: int, number: int) -> list[int]:
        chooser = Chooser(Sampling(do_sample=True, temperature=3.0, seed=seed), number)
        return [chooser.choose(logits(i), []) for i in range(12)]

    assert drawn(1, 0) == drawn(1, 0)
    assert len({tuple(drawn(seed, number)) for seed in (1, 2) for number in (0, 1)}) == 4
    assert drawn(1, 11) != drawn(11, 1)


@pytest.mark.parametrize("penalty", [0.8, 1.4])
@pytest.mark.parametrize("top_k", [None, 12, 1000])
@pytest.mark.parametrize("top_p", [None, 0.6])
def test_a_chooser_applies_all_options_as_transformers_does(
    penalty: float, top_k: int | None, top_p: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temperature changes which tokens belong to the nucleus."""
    drawn_from: list[torch.Tensor] = []

    def draw(_: Chooser, scores: torch.Tensor) -> int:
        drawn_from.append(scores)
        return 0

    monkeypatch.setattr(Chooser, "_draw", draw)
    options = Sampling(
        do_sample=True, temperature=2.5, top_k=top_k, top_p=top_p, repetition_penalty=penalty
    )
    theirs = [RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(2.5)]
    theirs += [] if top_k is None else [TopKLogitsWarper(top_k)]
    theirs += [] if top_p is None else [TopPLogitsWarper(top_p)]
    for seed in range(5):
        Chooser(options, 0).choose(logits(seed), IDS)
        expected = LogitsProcessorList(theirs)(torch.tensor([IDS]), logits(seed)[None])[0]
        torch.testing.assert_close(drawn_from[-1], expected, rtol=0, atol=0)
    greedy = Sampling(repetition_penalty=penalty, temperature=2.5, top_k=1)
    penalized = theirs[0](torch.tensor([IDS]), logits(7)[None])[0]
    assert Chooser(greedy, 0).choose(logits(7), IDS) == int(penalized.argmax())


def test_tokens_of_the_vocabularys_padding_get_no_penalty() -> None:
    plain = logits()
    assert torch.equal(sampling.penalized(plain, [64, 700], 1.4), plain)
    assert torch.equal(sampling.penalized(plain, [3, 64], 1.4), sampling.penalized(plain, [3], 1.4))


def test_a_nucleus_has_at_least_one_token_and_none_beyond_the_sum() -> None:
    """For four equal probabilities, the sums of 0.25, 0.5 and 0.75 are exact."""
    equal = torch.zeros(4)
    for p, count in ((1e-9, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (1.0, 4)):
        own = sampling.top_p_only(equal, p)
        assert own.isfinite().sum() == count
        theirs = TopPLogitsWarper(p)(torch.tensor([[0]]), equal[None])[0]
        torch.testing.assert_close(own, theirs, rtol=0, atol=0)
