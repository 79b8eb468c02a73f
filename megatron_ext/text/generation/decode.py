"""Continues prompts token by token, several at once.

When a text ends, the next prompt takes its slot in the key-value cache.
"""

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
"""The largest number of tokens of new prompts, or of texts to score, in one forward pass.

A single longer one is admitted too."""
CONTEXT = 8
"""The number of a prompt's last tokens that are decoded to text together with the new tokens.

Without them, the space before the first new word could be lost."""
UNFINISHED = "\ufffd"
"""The character that decoding gives in place of one whose last bytes are still to be written."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        number: index of this request among all requests.
        ids: the tokens of the prompt.
        sampling: how to choose the tokens, and where to end.
    """

    number: int
    ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """The text that a model has written for a request.

    Attributes:
        ids: all new tokens, including those of a stop string and the end token.
        finish_reason: ``"eos"``, ``"stop"`` (a stop string) or ``"length"``.
    """

    number: int
    text: str
    ids: tuple[int, ...]
    finish_reason: str


OnText = Callable[[int, str], None]
"""A callback; its arguments are the number of a request and the next piece of its text."""


class PartialText:
    """The text written so far for one request; only the rank that chooses tokens holds it.

    Attributes:
        reason: "" until the text has ended, then as in `Completion.finish_reason`.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, end_ids: Collection[int]) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._chooser = Chooser(request.sampling, request.number)
        self._before = list(request.ids[-CONTEXT:])
        self._before_text = tokenizer.detokenize(self._before)
        self._tokens: Sequence[int] = ()
        self._text: str | None = ""
        self.reason = ""
        self._num_shown = 0

    @property
    def text(self) -> str:
        """Return the text, which ends before an end token or a stop string.

        Tokens are decoded only when the text is read.
        """
        if self._text is None:
            self._text = self._decoded(self._tokens)
        return self._text

    def choose(self, logits: torch.Tensor, ids: Sequence[int]) -> int:
        """Choose and return the next token.

        This changes `text`; if the text ends, set `reason`.

        Args:
            logits: the logits ``[v]`` of the next token.
            ids: the tokens of the prompt and of the text so far.
        """
        token = self._chooser.choose(logits, ids)
        sampling = self.request.sampling
        new = [*ids[len(self.request.ids) :], token]
        if token in self._end_ids:
            self.reason = "eos"
            return token
        self._tokens = new
        self._text = None
        positions = [self.text.find(stop) for stop in sampling.stop_strings]
        offsets = [position for position in positions if position >= 0]
        if offsets:
            self._text = self.text[: min(offsets)]
            self.reason = "stop"
        elif len(new) >= sampling.max_new_tokens:
            self.reason = "length"
        return token

    def _decoded(self, new: Sequence[int]) -> str:
        whole = self._tokenizer.detokenize([*self._before, *new])
        if whole.startswith(self._before_text):
            return whole[len(self._before_text) :]
        # The prompt ended within a character, so its own text has changed.
        return self._tokenizer.detokenize(new)

    def further_text(self) -> str:
        """Return the part of the text that is new since the last call and can no longer change.

        An incomplete character, or the beginning of a stop string, is held back.
        """
        end = len(self.text)
        if not self.reason:
            end -= len(self.text) - len(self.text.rstrip(UNFINISHED))
            stops = self.request.sampling.stop_strings
            end = min([end, *(self._start_of_partial(stop) for stop in stops)])
        piece = self.text[self._num_shown : end]
        self._num_shown = max(end, self._num_shown)
        return piece

    def _start_of_partial(self, stop: str) -> int:
        """Find the longest suffix of the text that is a proper prefix of ``stop``.

        Return the offset at which the suffix starts; without such a suffix, the text's length.
        """
        lengths = range(min(len(stop) - 1, len(self.text)), 0, -1)
        return len(self.text) - next((n for n in lengths if self.text.endswith(stop[:n])), 0)


@dataclass
class _Text:
    """The state of a request that is being completed; every rank of the replica has a copy.

    Attributes:
        slot: the request's slot in the key-value cache.
        ids: the tokens of the prompt and of the text so far.
        cached: number of tokens whose keys and values are cached.
        writing: the object that chooses the tokens and decodes them to text; None on ranks that do
            not choose.
    """

    request: Request
    slot: int
    ids: list[int]
    cached: int = 0
    writing: PartialText | None = field(default=None)

    def new_tokens(self, short_length: int | None) -> NewTokens:
        """Return the tokens that the model must run next: those without cached keys and values.

        Return all tokens when the text has just become longer than ``short_length``, because
        LongRoPE then rotates all positions differently and the cached keys are wrong.
        ``short_length`` is None for models without LongRoPE.
        """
        if short_length is not None and self.cached <= short_length < len(self.ids):
            self.cached = 0
        segment = Segment(self.slot, self.cached, len(self.ids) - self.cached)
        return NewTokens(segment, self.ids[self.cached :])


class Decoder:
    """Continues prompts on one replica, whose ranks call `complete` together.

    Args:
        end_ids: tokens that end a text.
        batch_size: number of texts that are written at once.
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
        self, requests: Sequence[Request], on_text: OnText | None = None
    ) -> list[Completion]:
        """Complete this replica's requests; return the completions in the order in which they end.

        Only the rank that chooses tokens has them, other ranks return []; it also calls
        ``on_text``, if given, with each piece of text as soon as it is written. A text ends at the
        latest when prompt and text fill the model's positions.
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
                    if text.writing is not None and on_text is not None:
                        on_text(text.request.number, text.writing.further_text())
                    if ended:
                        slots.append(text.slot)
                        completions += _completion(text)
                active = [x for x, (_, ended) in zip(active, choices, strict=True) if not ended]
                # If slots are adjacent and in order, the cache reads them as a slice, not a copy.
                active.sort(key=lambda text: text.slot)
        return completions

    def _admitted(self, waiting: deque[Request], slots: list[int]) -> list[_Text]:
        """Start as many requests as free slots and one forward pass can take; return their texts.

        Remove the started requests from ``waiting``, and the slots that they occupy from ``slots``.
        """
        admitted = list[_Text]()
        total = 0
        slots.sort(reverse=True)
        while waiting and slots and (not admitted or total + len(waiting[0].ids) <= PROMPT_TOKENS):
            request = waiting.popleft()
            total += len(request.ids)
            writing = None
            if self._forward.decides:
                writing = PartialText(request, self._tokenizer, self._end_ids)
            admitted.append(_Text(request, slots.pop(), list(request.ids), writing=writing))
        return admitted

    def _choices(
        self, active: Sequence[_Text], logits: dict[int, torch.Tensor]
    ) -> list[tuple[int, bool]]:
        """Choose a token for each text; return (token, whether the text ends) on all ranks.

        ``logits`` has the logits ``[v]`` for each text, by cache slot, on the rank that chooses
        tokens; on other ranks it is ignored.
        """
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
    """Return the completion of a text that has ended, in a list.

    The list is empty on ranks that do not choose tokens.
    """
    if text.writing is None:
        return []
    new = tuple(text.ids[len(text.request.ids) :])
    writing = text.writing
    return [Completion(text.request.number, writing.text, new, writing.reason)]
