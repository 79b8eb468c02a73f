"""Lets lm-eval, which runs on rank 0 only, use all ranks to score and to continue texts.

lm-eval calls `ModelService.score` and `write` on rank 0; the other ranks wait for these calls and
take part in them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_ext.errors import DataError, MegatronExtError
from megatron_ext.layers.kv_cache import Segment
from megatron_ext.parallel.collectives import to_one_rank
from megatron_ext.text.generation.decode import PROMPT_TOKENS, Completion, Decoder, Request
from megatron_ext.text.generation.forward import Hidden, NewTokens, PackedForward

T = TypeVar("T")

BLOCK = 512
"""The number of tokens whose logits are computed at once, which bounds the memory of logits."""


@dataclass(frozen=True)
class ScoreRequest:
    """A request for the log-probabilities of a text's tokens from index ``first`` on.

    ``ids`` has all tokens of the text. ``first`` is at least 1.
    """

    ids: tuple[int, ...]
    first: int

    @classmethod
    def of_continuation(
        cls, context: Sequence[int], continuation: Sequence[int], max_length: int
    ) -> ScoreRequest:
        """Return the request that scores ``continuation`` as it follows ``context``.

        Text of more than ``max_length + 1`` tokens loses its beginning. ``max_length`` is the
        model's number of positions; one token more fits, since the last token is never an input.
        """
        ids = tuple([*context, *continuation][-(max_length + 1) :])
        return cls(ids, max(1, len(ids) - len(continuation)))


@dataclass(frozen=True)
class Score:
    """The score of the request with index ``number``.

    Attributes:
        log_prob: the sum of the log-probabilities of the scored tokens.
        is_greedy: whether each scored token is the likeliest at its position.
    """

    number: int
    log_prob: float
    is_greedy: bool


class ModelService:
    """Lets a program that runs on rank 0 score and continue texts with the model on all ranks.

    All ranks call `lead`. Rank 0 runs the program there, which calls `score` and `write`; the other
    ranks wait for these calls and take part in them.
    """

    def __init__(self, forward: PackedForward, decoder: Decoder) -> None:
        self.forward = forward
        self._decoder = decoder
        self.rank = forward.context.rank

    def lead(self, work: Callable[[], T], what: str) -> T | None:
        """Run ``work`` on rank 0 and return its result; all ranks call this together.

        ``work`` may call `score` and `write`. The other ranks take part in these calls until
        ``work`` ends, and return None.

        Raises:
            MegatronExtError: on every rank, if ``work`` raises one on rank 0. If it raises another
                error, rank 0 prints the traceback, and every rank raises a DataError that begins
                with ``what``.
        """
        if self.rank != 0:
            while (order := _from_rank_0(None)) is not None:
                if isinstance(order, MegatronExtError):
                    raise order
                getattr(self, order[0])(order[1])
            return None
        try:
            result = work()
        except Exception as error:
            fault = error
            if not isinstance(error, MegatronExtError):
                traceback.print_exc()
                fault = DataError(f"{what} failed ({error!r}); see the traceback of rank 0.")
            _from_rank_0(fault)
            raise fault from None
        _from_rank_0(None)
        return result

    def score(self, rows: Sequence[ScoreRequest]) -> list[Score]:
        """Score texts, divided among the replicas; return the scores in the order of ``rows``.

        Call this on rank 0, within `lead`.
        """
        _from_rank_0(("_score", rows))
        return self._score(rows)

    def write(self, requests: Sequence[Request]) -> list[Completion]:
        """Continue prompts, divided among the replicas; return completions by `Request.number`.

        The smallest number comes first. Call this on rank 0, within `lead`.
        """
        _from_rank_0(("_write", requests))
        return self._write(requests)

    def _write(self, requests: Sequence[Request]) -> list[Completion]:
        return self._on_rank_0(self._decoder.complete(self._share(requests)))

    def _score(self, rows: Sequence[ScoreRequest]) -> list[Score]:
        numbered = sorted(enumerate(rows), key=lambda entry: -len(entry[1].ids))
        batches = _batches(self._share(numbered))
        scores: list[Score] = []
        longest = max((len(row.ids) for row in rows), default=1)
        with self.forward.ready(0, longest):
            while self.forward.any_left(bool(batches)):
                scores += self._score_batch(batches.pop(0) if batches else [])
        return self._on_rank_0(scores)

    def _score_batch(self, batch: Sequence[tuple[int, ScoreRequest]]) -> list[Score]:
        """Score texts in one forward pass; ``batch`` has (index of the request, request) pairs.

        Return the scores on the rank that chooses this replica's tokens (`PackedForward.decides`);
        the replica's other ranks return [].
        """
        texts = [
            NewTokens(Segment(number, 0, len(row.ids) - 1), row.ids[:-1]) for number, row in batch
        ]
        rows = dict(batch)
        scores = []
        for hidden in self.forward.run(texts):
            if hidden.tokens.segments:
                scores += self._scores(hidden, rows)
        return scores if self.forward.decides else []

    def _scores(self, hidden: Hidden, rows: dict[int, ScoreRequest]) -> list[Score]:
        """Return the scores of the texts in a micro-batch.

        ``rows`` has the requests by their index, which is also the cache slot of the text.
        """
        places = list[int]()
        targets = list[int]()
        counts = list[int]()
        begin = 0
        for segment in hidden.tokens.segments:
            row = rows[segment.slot]
            places += range(begin + row.first - 1, begin + segment.length)
            targets += row.ids[row.first :]
            counts.append(len(row.ids) - row.first)
            begin += segment.length
        target_ids = torch.tensor(targets, device=hidden.states.device)
        states = hidden.states[torch.tensor(places, device=target_ids.device)]
        parts = [
            self._token_scores(*part)
            for part in zip(torch.split(states, BLOCK), torch.split(target_ids, BLOCK), strict=True)
        ]
        log_probs, likeliest = (
            torch.split(torch.cat(values).cpu(), counts) for values in zip(*parts, strict=True)
        )
        return [
            Score(segment.slot, float(own.double().sum()), bool(greedy.all()))
            for segment, own, greedy in zip(
                hidden.tokens.segments, log_probs, likeliest, strict=True
            )
        ]

    def _token_scores(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return each target's log-probability ``[n]`` and whether it is the likeliest token.

        Args:
            states: the hidden states ``[n, 1, h]`` from which the model predicts the targets.
            targets: token ids ``[n]``.
        """
        logits = self.forward.logits(states, self.forward.model_vocab_size)
        at_target = logits.gather(1, targets[:, None])[:, 0]
        return at_target - logits.logsumexp(-1), logits.argmax(-1) == targets

    def _share(self, entries: Sequence[T]) -> list[T]:
        """Return this data-parallel replica's entries; each of dp replicas gets every dp-th."""
        context = self.forward.context
        return list(entries[context.dp_rank :: context.layout.data_parallel_size])

    def _on_rank_0(self, results: list[Any]) -> list[Any]:
        """Gather the results of all ranks; return them sorted by number on rank 0, elsewhere []."""
        parts = [results]
        if self.forward.context.layout.world_size > 1:
            parts = to_one_rank(results, 0)
        return sorted((each for part in parts for each in part), key=lambda each: each.number)


def _batches(rows: Sequence[tuple[int, ScoreRequest]]) -> list[list[tuple[int, ScoreRequest]]]:
    """Group (index, request) pairs, in their order, into batches of at most `PROMPT_TOKENS` tokens.

    A text with more tokens is a batch by itself.
    """
    batches = list[list[tuple[int, ScoreRequest]]]()
    total = 0
    for entry in rows:
        length = len(entry[1].ids)
        if not batches or total + length > PROMPT_TOKENS:
            batches.append([])
            total = 0
        batches[-1].append(entry)
        total += length
    return batches


def _from_rank_0(order: Any) -> Any:
    """Broadcast rank 0's ``order`` and return it on every rank; other ranks pass None.

    An order is (name of a method, argument), which the other ranks call; an error, which they
    raise; or None, which ends their wait.
    """
    objects = [order]
    torch.distributed.broadcast_object_list(objects, src=0)
    return objects[0]
