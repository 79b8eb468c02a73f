"""Scores of texts: which tokens are read, how texts are grouped, and how ranks share the work."""

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.layers.kv_cache import PackedTokens
from megatron_ext.text.evaluation import service
from megatron_ext.text.evaluation.service import ModelService, Score, ScoreRequest
from megatron_ext.text.generation.decode import Completion, Request
from megatron_ext.text.generation.forward import Hidden, NewTokens
from megatron_ext.text.generation.sampling import Sampling
from tests.ranks import ParallelContext, ranks


def test_a_continuation_is_scored_after_as_much_context_as_fits() -> None:
    """The last token of a text is scored but not read, so it needs no position."""
    for context, continuation, ids, first in (
        ([1, 2], [3, 4], (1, 2, 3, 4), 2),
        ([1, 2, 3], [4, 5], (1, 2, 3, 4, 5), 3),
        ([1, 2, 3, 4], [5, 6], (2, 3, 4, 5, 6), 3),
        ([1], [2, 3, 4, 5], (1, 2, 3, 4, 5), 1),
        # The first token of a text has nothing before it that could tell it.
        ([1], [2, 3, 4, 5, 6], (2, 3, 4, 5, 6), 1),
    ):
        request = ScoreRequest.of_continuation(context, continuation, max_length=4)
        assert (request.ids, request.first) == (ids, first)


VOCABULARY = 11
LONGEST = 6


def logits_after(token: int) -> Tensor:
    """Return the logits that follow a token, whatever stands before it."""
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(token))


def truth(row: ScoreRequest) -> tuple[float, bool]:
    """Return the log-probability of a text's scored tokens, one by one, and whether all lead."""
    total, leads = 0.0, True
    for index in range(row.first, len(row.ids)):
        logits = logits_after(row.ids[index - 1])
        total += float(logits.log_softmax(-1)[row.ids[index]])
        leads = leads and int(logits.argmax()) == row.ids[index]
    return total, leads


class Following:
    """Forward passes of a model whose hidden state is the token itself.

    Attributes:
        passes: number of texts in each pass.
    """

    model_vocab_size = VOCABULARY
    device = torch.device("cpu")

    def __init__(self, context: Any) -> None:
        self.context = context
        self.decides = context.tp_rank == context.layout.tensor_model_parallel_size - 1
        self.passes: list[int] = []

    def ready(self, _slots: int, longest: int) -> Any:
        assert longest == LONGEST
        return nullcontext()

    def any_left(self, has_texts: bool) -> bool:
        return has_texts

    def run(self, texts: Sequence[NewTokens]) -> list[Hidden]:
        self.passes.append(len(texts))
        tokens = PackedTokens([text.segment for text in texts], 64, self.device)
        ids = {text.segment.slot: text.ids for text in texts}
        states = [float(x) for segment in tokens.segments for x in ids[segment.slot]]
        return [Hidden(tokens, torch.tensor(states)[:, None, None])]

    def logits(self, states: Tensor, size: int) -> Tensor:
        assert size == VOCABULARY
        return torch.stack([logits_after(int(state)) for state in states.flatten()])


class Echo:
    """Writes the tokens of a prompt as its text, on the rank that decides."""

    def __init__(self, decides: bool) -> None:
        self.decides = decides

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        found = [Completion(x.number, str(x.ids), (), "eos") for x in requests]
        return found if self.decides else []


def rows() -> list[ScoreRequest]:
    """Return texts of which the likeliest continuation is scored now and then."""
    greedy = [int(logits_after(3).argmax())]
    greedy += [int(logits_after(greedy[0]).argmax())]
    texts = [((1, 2), 1), ((3, *greedy), 1), ((9, 8, 7, 6, 5, 4), 2), ((3, greedy[0], 2), 1)]
    texts += [((5, 3, *greedy), 2), ((4, 4, 4), 2), ((2, 9, 1, 1), 1)]
    return [ScoreRequest(*text) for text in texts]


def alone() -> Any:
    layout = SimpleNamespace(data_parallel_size=1, world_size=1, tensor_model_parallel_size=1)
    return SimpleNamespace(rank=0, tp_rank=0, dp_rank=0, layout=layout)


def test_scores_are_those_of_each_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longest texts come first; a pass has as many as fit exactly, or one that is longer."""
    monkeypatch.setattr(service, "_from_rank_0", lambda order: order)
    monkeypatch.setattr(service, "BLOCK", 3)
    passes_of = {100: [7], 10: [2, 3, 2], 8: [1, 2, 2, 2], 5: [1, 1, 1, 1, 1, 2]}
    for limit, passes in passes_of.items():
        monkeypatch.setattr(service, "PROMPT_TOKENS", limit)
        forward: Any = Following(alone())
        found = ModelService(forward, Echo(True)).score(rows())  # type: ignore[arg-type]
        assert [score.number for score in found] == list(range(len(rows())))
        for score, row in zip(found, rows(), strict=True):
            total, leads = truth(row)
            assert (score.log_prob, score.is_greedy) == (pytest.approx(total, rel=1e-5), leads)
        assert forward.passes == passes
    assert {score.is_greedy for score in found} == {True, False}


@ranks(tp=2, dp=2)
def test_rank_0_leads_all_ranks_and_its_errors_are_theirs(context: ParallelContext) -> None:
    forward: Any = Following(context)
    leading = ModelService(forward, Echo(forward.decides))  # type: ignore[arg-type]
    requests = [Request(number, (number + 5,), Sampling()) for number in range(3)]

    def work() -> tuple[list[Score], list[str], list[Score]]:
        first = leading.score(rows())
        texts = [completion.text for completion in leading.write(requests)]
        return first, texts, leading.score(rows()[2:3])

    found = leading.lead(work, "Scoring")
    if context.rank == 0:
        assert found is not None
        scores, texts, again = found
        assert [score.log_prob for score in scores] == [
            pytest.approx(truth(row)[0], rel=1e-5) for row in rows()
        ]
        assert texts == ["(5,)", "(6,)", "(7,)"]
        assert [score.number for score in again] == [0]
    else:
        assert found is None

    def refuse() -> None:
        raise ConfigError("`--x` is wrong.")

    def fail() -> None:
        raise ZeroDivisionError("oh")

    with pytest.raises(ConfigError, match="`--x` is wrong."):
        leading.lead(refuse, "Scoring")
    with pytest.raises(DataError, match=r"Scoring failed \(ZeroDivisionError\('oh'\)\); see the"):
        leading.lead(fail, "Scoring")
