"""The gated delta rule token by token: the truth of the tests of its mixers."""

from __future__ import annotations

import torch
from torch import Tensor


def recurrence(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    beta: Tensor,
    *,
    state: Tensor,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs ``[b, s, h, v]`` and the final state; arguments are those of `DeltaRule`.

    ``state`` is the initial state ``[b, h, k, v]``.
    """
    group = values.size(2) // keys.size(2)
    queries = queries.repeat_interleave(group, dim=2) / keys.size(-1) ** 0.5
    keys = keys.repeat_interleave(group, dim=2)
    outputs = []
    for token in range(keys.size(1)):
        factors = decays[:, token].exp()
        state = state * (factors[..., None] if factors.dim() == 3 else factors[..., None, None])
        if segments is not None:
            before = segments[:, token - 1] if token else torch.zeros_like(segments[:, 0])
            state = state * (segments[:, token] == before)[:, None, None, None]
        key = keys[:, token]
        held = torch.einsum("bhk,bhkv->bhv", key, state)
        change = beta[:, token, :, None] * (values[:, token] - held)
        state = state + torch.einsum("bhk,bhv->bhkv", key, change)
        outputs.append(torch.einsum("bhk,bhkv->bhv", queries[:, token], state))
    return torch.stack(outputs, dim=1), state


def drawn(
    sequences: int,
    length: int,
    key_heads: int,
    heads: int,
    key_size: int,
    value_size: int,
    *,
    by_channel: bool,
    strength: float = 1.0,
    seed: int = 1,
) -> list[Tensor]:
    """Draw queries, keys, values, log decays, beta and a state in float32.

    Strong decays, of a ``strength`` above 5, are seldom: two of three log decays are zero.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(sequences, *shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(sequences, *shape, generator=generator)

    channels = [key_size] * by_channel
    decays = -strength * uniform(length, heads, *channels)
    if strength > 5:
        decays = decays * (uniform(length, heads, *channels) < 1 / 3)
    unit = torch.nn.functional.normalize
    return [
        unit(normal(length, key_heads, key_size), dim=-1),
        unit(normal(length, key_heads, key_size), dim=-1),
        normal(length, heads, value_size),
        decays,
        uniform(length, heads),
        normal(heads, key_size, value_size),
    ]


def relative(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, relative to the largest absolute value."""
    scale = want.abs().max().item()
    return (got.double() - want).abs().max().item() / (scale or 1.0)
