"""How many tokens a chunk of the cross-entropy has by default."""

from __future__ import annotations

MAX_ROWS = 1024
MIN_FUSED_ROWS = 4096


def default_rows(num_tokens: int) -> int:
    """An eighth of the tokens: few beside eager, enough for efficient products on a CPU."""
    return min(-(-num_tokens // 8), MAX_ROWS)


def fused_rows(num_tokens: int, hidden_size: int) -> int:
    """On a GPU, where a chunk's logits stay in 16 bits; see `fused_softmax`.

    Each chunk's part of the weight's gradient, 2 C h v operations, reads and writes that gradient,
    8 h v bytes: C / 4 operations for a byte, of which an H200 does 200 in the time of one. At C =
    2 h the chunk's logits take no more memory than that float32 gradient.
    """
    return min(-(-num_tokens // 4), max(2 * hidden_size, MIN_FUSED_ROWS))
