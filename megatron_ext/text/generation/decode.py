"""Writes texts token by token; one that ends gives its place in the cache to the next request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from megatron_ext.layers.kv_cache import Segment
from megatron_ext.text.generation.forward import NewTokens, PackedForward
from megatron_ext.text.generation.sampling import Chooser, Sampling
from megatron_ext.text.tokenizers.base import Tokenizer

PROMPT_TOKENS = 8192
"""Prompts enter a forward pass until they have this many tokens, but at least one does."""
CONTEXT = 8
"""Tokens of the prompt before the text that are decoded with it, since spaces depend on them."""
UNFINISHED = "\ufffd"
"""A decoder writes it for the bytes of a character that later tokens complete."""


@dataclass(frozen=True)
class Request:
    """A prompt's tokens and how to continue it; ``number`` is its place among all requests."""

    number: int
    ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """The text that a model has written for a request.

    Attributes:
        ids: all new tokens, also those of a stop string and the end token.
        finish_reason: ``"eos"``, ``"stop"`` (a stop string) or ``"length"``.
    """

    number: int
    text: str
    ids: tuple[int, ...]
    finish_reason: str


OnText = Callable[[int, str], None]
"""Takes the number of a request and a further piece of its text."""


class Writing:
    """The text of one request, as the rank that chooses its tokens keeps it."""

    def __init__(self, request: Request, tokenizer: Tokenizer, end_ids: Collection[int]) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._chooser = Chooser(request.sampling, request.number)
        self._before = list(request.ids[-CONTEXT:])
        self._before_text = tokenizer.detokenize(self._before)
        self.text, self._told, self.reason = "", 0, ""

    def choose(self, logits: torch.Tensor, ids: Sequence[int]) -> int:
        """Choose the token after ``ids``, which begin with the prompt; update text and reason."""
        token = self._chooser.choose(logits, ids)
        sampling = self.request.sampling
        new = [*ids[len(self.request.ids) :], token]
        if token in self._end_ids:
            self.reason = "eos"
            return token
        self.text = self._decoded(new)
        offsets = [at for stop in sampling.stop_strings if (at := self.text.find(stop)) >= 0]
        if offsets:
            self.text = self.text[: min(offsets)]
            self.reason = "stop"
        elif len(new) >= sampling.max_new_tokens:
            self.reason = "length"
        return token

    def _decoded(self, new: Sequence[int]) -> str:
        whole = self._tokenizer.detokenize([*self._before, *new])
        if whole.startswith(self._before_text):
            return whole[len(self._before_text) :]
        # The prompt ended within a character.
        return self._tokenizer.detokenize(new)

    def further_text(self) -> str:
        """Return the text since the last call that no later token changes."""
        end = len(self.text)
        if not self.reason:
            end -= len(self.text) - len(self.text.rstrip(UNFINISHED))
            end = min(end, *(self._held(stop) for stop in self.request.sampling.stop_strings), end)
        piece = self.text[self._told : end]
        self._told = max(end, self._told)
        return piece

    def _held(self, stop: str) -> int:
        """Return where the longest ending of the text begins that ``stop`` begins with."""
        lengths = range(min(len(stop) - 1, len(self.text)), 0, -1)
        return len(self.text) - next((n for n in lengths if self.text.endswith(stop[:n])), 0)


@dataclass
class _Text:
    """One text as every rank of the replica knows it."""

    request: Request
    slot: int
    ids: list[int]
    cached: int = 0
    writing: Writing | None = field(default=None)

    def new_tokens(self, short_length: int | None) -> NewTokens:
        """Return the tokens that are not cached; see `PackedForward.short_length`."""
        if short_length is not None and self.cached <= short_length < len(self.ids):
            self.cached = 0
        segment = Segment(self.slot, self.cached, len(self.ids) - self.cached)
        return NewTokens(segment, self.ids[self.cached :])


class Decoder:
    """Continues prompts with the ranks of one replica, which call `complete` together.

    Args:
        end_ids: tokens that end a text.
        batch_size: texts that are written at once.
    """

    def __init__(
        self,
        forward: PackedForward,
        tokenizer: Tokenizer,
        end_ids: Collection[int],
        *,
        batch_size: int,
    ) -> None:
        self._forward = forward
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._batch_size = batch_size

    def complete(
        self, requests: Sequence[Request], on_text: OnText = lambda number, piece: None
    ) -> list[Completion]:
        """Return the completions of this replica's requests, on the rank that decides; else [].

        A text ends where it has as many tokens as the model has positions. ``on_text`` is called
        with pieces of the texts while they are written, on the rank that decides.
        """
        forward = self._forward
        most = self._forward.max_length
        longest = [min(len(x.ids) + x.sampling.max_new_tokens, most) for x in requests]
        waiting = deque(requests)
        active = list[_Text]()
        slots = list(range(min(self._batch_size, len(requests))))
        completions: list[Completion] = []
        with forward.ready(max(1, len(slots)), max(longest, default=1)):
            while forward.any_left(bool(waiting or active)):
                active += self._admitted(waiting, slots)
                logits = forward.next_logits(
                    [text.new_tokens(forward.short_length) for text in active]
                )
                choices = self._choices(active, logits)
                for text, (token, ended) in zip(active, choices, strict=True):
                    text.cached = len(text.ids)
                    text.ids.append(token)
                    if text.writing is not None:
                        on_text(text.request.number, text.writing.further_text())
                    if ended:
                        slots.append(text.slot)
                        completions += _completion(text)
                active = [x for x, (_, ended) in zip(active, choices, strict=True) if not ended]
                active.sort(key=lambda text: text.slot)
        return completions

    def _admitted(self, waiting: deque[Request], slots: list[int]) -> list[_Text]:
        """Take requests that wait, and free slots for them, as far as one pass holds them."""
        admitted = list[_Text]()
        total = 0
        slots.sort(reverse=True)
        while waiting and slots and (not admitted or total + len(waiting[0].ids) <= PROMPT_TOKENS):
            request = waiting.popleft()
            total += len(request.ids)
            writing = None
            if self._forward.decides:
                writing = Writing(request, self._tokenizer, self._end_ids)
            admitted.append(_Text(request, slots.pop(), list(request.ids), writing=writing))
        return admitted

    def _choices(
        self, active: Sequence[_Text], logits: dict[int, torch.Tensor]
    ) -> list[tuple[int, bool]]:
        """Return on every rank of the replica each text's next token, and whether it ends it."""
        forward = self._forward
        rows = torch.zeros(len(active), 2, dtype=torch.int64, device=forward.device)
        if forward.decides and active:
            chosen = []
            for text in active:
                assert text.writing is not None
                token = text.writing.choose(logits[text.slot], text.ids)
                if not text.writing.reason and len(text.ids) + 1 >= forward.max_length:
                    text.writing.reason = "length"
                chosen.append([token, bool(text.writing.reason)])
            rows = torch.tensor(chosen, dtype=torch.int64, device=forward.device)
        groups = forward.context.pgs
        if groups.mp.size() > 1 and active:
            torch.distributed.broadcast(rows, src=forward.deciding_rank, group=groups.mp)
        return [(token, bool(ended)) for token, ended in rows.tolist()]


def _completion(text: _Text) -> list[Completion]:
    """Return the completion of a text that has ended, on the rank that decides; else []."""
    if text.writing is None:
        return []
    new = tuple(text.ids[len(text.request.ids) :])
    writing = text.writing
    return [Completion(text.request.number, writing.text, new, writing.reason)]
