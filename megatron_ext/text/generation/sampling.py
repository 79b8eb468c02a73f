"""Chooses the next token: greedily, or at random after temperature, top-k and top-p.

Options have the same names and meanings as in transformers' `generate`, and are applied in the same
order. Random choices depend only on the seed and on the number of the request, not on the layout,
the batch or other requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to choose the tokens of one text, and where to end the text.

    Attributes:
        max_new_tokens: end after this many new tokens.
        do_sample: whether to draw tokens at random; if False, take the likeliest.
        temperature: divides the logits.
        top_k: draw only from this many of the likeliest tokens; None draws from all.
        top_p: draw only from the smallest set of likeliest tokens whose probabilities sum to this
            or more; None draws from all.
        repetition_penalty: divides positive, and multiplies negative, logits of tokens that are in
            the prompt or the text already (Keskar et al., CTRL, arXiv:1909.05858, section 4.1).
        stop_strings: end before the first of these strings in the text.
        seed: seed of the random choices.
    """

    max_new_tokens: int = 128
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()
    seed: int = 1234


class Chooser:
    """Chooses the tokens of one text, one after another.

    Args:
        number: index of the request; together with the seed it determines all random choices.
    """

    def __init__(self, sampling: Sampling, number: int) -> None:
        self.sampling = sampling
        digest = hashlib.sha256(f"{sampling.seed} {number}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def choose(self, logits: Tensor, ids: Sequence[int]) -> int:
        """Return the token that follows the tokens ``ids``, chosen by the logits ``[v]`` for it."""
        options = self.sampling
        if options.repetition_penalty != 1.0:
            logits = penalized(logits, ids, options.repetition_penalty)
        if not options.do_sample:
            return int(logits.argmax())
        logits = logits / options.temperature
        if options.top_k is not None:
            logits = top_k_only(logits, options.top_k)
        if options.top_p is not None:
            logits = top_p_only(logits, options.top_p)
        return self._draw(logits)

    def _draw(self, logits: Tensor) -> int:
        """Draw a token by inverting the cumulative distribution at one uniform random number.

        Tokens are sorted from the likeliest down. Logits of different layouts differ by rounding,
        which changes the drawn token only if the random number is within rounding error of a
        boundary between two tokens.
        """
        uniform = torch.rand((), generator=self._generator, dtype=torch.float64)
        likeliest, order = logits.double().softmax(-1).sort(descending=True, stable=True)
        sums = likeliest.cumsum(-1)
        share = (uniform.to(sums.device) * sums[-1]).unsqueeze(0)
        index = torch.searchsorted(sums, share, right=True)
        return int(order[index.clamp(max=len(order) - 1)])


def penalized(logits: Tensor, ids: Sequence[int], penalty: float) -> Tensor:
    """Return logits ``[v]`` with the repetition penalty applied to each token in ``ids``."""
    # Prompts may hold ids of the vocabulary's padding, which has no logits here.
    used = torch.tensor(sorted({i for i in ids if i < len(logits)}), device=logits.device)
    if not len(used):
        return logits
    before = logits[used]
    after = torch.where(before < 0, before * penalty, before / penalty)
    return logits.scatter(0, used, after)


def top_k_only(logits: Tensor, k: int) -> Tensor:
    """Return the logits ``[v]`` with all below the k-th largest set to -inf."""
    least = logits.topk(min(k, len(logits))).values[-1]
    return logits.masked_fill(logits < least, -torch.inf)


def top_p_only(logits: Tensor, p: float) -> Tensor:
    """Return the logits ``[v]`` with all tokens outside of the nucleus set to -inf.

    The nucleus is the smallest set of likeliest tokens whose probabilities sum to p or more
    (arXiv:1904.09751, section 3.1).
    """
    ascending, order = logits.sort(stable=True)
    outside = ascending.softmax(-1).cumsum(-1) <= 1 - p
    outside[-1] = False
    return logits.masked_fill(torch.zeros_like(outside).scatter(0, order, outside), -torch.inf)
