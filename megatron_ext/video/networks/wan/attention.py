"""Options of a Wan network, and self-attention of frame blocks over cached and new frames.

All queries of a frame block attend to the same frames, so the keys of these frames are selected,
and no mask is needed. Keys are rotated by their absolute frame before they are cached, so the order
of cached frames does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers import sdpa
from megatron_ext.layers.attention import GATHER
from megatron_ext.layers.context_parallel import heads_to_sequence, sequence_to_heads
from megatron_ext.video.config.window import WindowConfig
from megatron_ext.video.model.cache import KeyValue
from megatron_ext.video.model.tokens import frames_first, parts_first
from megatron_ext.video.model.window import FrameWindow, window_of


@dataclass(frozen=True)
class AttentionPlan:
    """The key frames to which each block of new frames attends.

    Key frames are the cached frames, in the order of ``past``, followed by the new frames.

    Attributes:
        past: numbers of the cached frames in the video.
        blocks: for each block, (its slice of the new frames, slices of the key frames to which it
            attends). The slices count new frames, and key frames, from 0.
    """

    past: tuple[int, ...]
    blocks: tuple[tuple[slice, tuple[slice, ...]], ...]

    @classmethod
    def bidirectional(cls, num_frames: int) -> AttentionPlan:
        """Return the plan in which ``num_frames`` new frames see each other, without a cache."""
        return cls((), ((slice(0, num_frames), (slice(0, num_frames),)),))

    @classmethod
    def causal(
        cls, window: FrameWindow, first_frame: int, num_frames: int, past: Sequence[int]
    ) -> AttentionPlan:
        """Return the plan in which each block attends to the key frames in its window.

        New frames start at frame ``first_frame`` of the video. Key frames are the cached frames,
        whose ascending numbers are ``past``, and the new frames.
        """
        new = range(first_frame, first_frame + num_frames)
        position = {frame: index for index, frame in enumerate((*past, *new))}
        blocks = []
        for start in window.blocks(first_frame, num_frames):
            seen = (frame for part in window.visible(start) for frame in part if frame in position)
            queries = slice(start - first_frame, start - first_frame + window.size_of(start))
            blocks.append((queries, _slices(position[frame] for frame in seen)))
        return cls(tuple(past), tuple(blocks))


def _slices(indices: Iterable[int]) -> tuple[slice, ...]:
    """Return ascending indices as slices, one for each run of adjacent indices."""
    slices: list[slice] = []
    for index in indices:
        if slices and slices[-1].stop == index:
            slices[-1] = slice(slices[-1].start, index + 1)
        else:
            slices.append(slice(index, index + 1))
    return tuple(slices)


class FrameAttention:
    """Attention of each block of frames to all tokens of the frames that it sees.

    Call `exchange` first, cache the keys and values that it returns, and pass its results to
    `__call__`. With ``trades_heads`` each context-parallel rank caches some heads of all tokens,
    and attends with these heads. Otherwise it caches all heads of its own tokens, and gathers the
    keys and values of all tokens to attend.
    """

    def __init__(self, cp_group: ProcessGroup, *, trades_heads: bool) -> None:
        self.cp_group = cp_group
        self.trades_heads = trades_heads

    def exchange(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Trade all heads of the rank's tokens for some heads of all tokens, if ``trades_heads``.

        Here ``[t, m, b, n, d]``, m tokens of each frame, becomes ``[t, m * cp, b, n / cp, d]``.
        Without ``trades_heads`` the arguments are returned unchanged.
        """
        if not self.trades_heads:
            return query, key, value
        t = query.size(0)
        cp = self.cp_group.size()
        stacked = torch.stack((query, key, value), dim=4).flatten(0, 1)
        traded = frames_first(heads_to_sequence(stacked, self.cp_group, zigzag=False), cp, t)
        query, key, value = traded.unbind(4)
        return query, key, value

    def __call__(
        self, query: Tensor, new: KeyValue, past: Sequence[KeyValue], plan: AttentionPlan
    ) -> Tensor:
        """Return the attention's output, in the shape that queries had before `exchange`.

        ``query``, and the keys and values ``new``, are results of `exchange`. ``past`` holds the
        keys and values of each frame in ``plan.past``, cached results of earlier exchanges.
        """
        key, value = self._keys(new, past)
        outputs = [_attend(_selected(query, [own]), key, value, seen) for own, seen in plan.blocks]
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if not self.trades_heads:
            return attended
        parts = parts_first(attended, self.cp_group.size())
        rows = sequence_to_heads(parts, self.cp_group, zigzag=False)
        return torch.unflatten(rows, 0, (query.size(0), -1))

    def _keys(self, new: KeyValue, past: Sequence[KeyValue]) -> KeyValue:
        """Return keys and values of past, then of new frames: ``[f, tokens, b, heads, d]``."""
        collects = self.cp_group.size() > 1 and not self.trades_heads
        if not past:
            return self._collected(new) if collects else new
        before = torch.cat([k for k, _ in past]), torch.cat([v for _, v in past])
        if collects and torch.is_grad_enabled():
            # Apart, so that the backward pass sums the gradients of the new frames alone.
            new = self._collected(new)
            collects = False
            with torch.no_grad():
                before = self._collected(before)
        both = torch.cat((before[0], new[0])), torch.cat((before[1], new[1]))
        return self._collected(both) if collects else both

    def _collected(self, pair: KeyValue) -> KeyValue:
        """Gather keys and values of all tokens from the context-parallel ranks.

        In the backward pass each rank gets the gradients of its own tokens, summed over the ranks.
        """
        stacked = torch.stack(pair, dim=2).flatten(0, 1)
        gathered = gather_from_sequence_parallel_region(
            stacked, tensor_parallel_output_grad=True, group=self.cp_group
        )
        key, value = frames_first(gathered, self.cp_group.size(), pair[0].size(0)).unbind(2)
        return key, value


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Sequence[slice]) -> Tensor:
    """Return ``softmax(q k / sqrt(d)) v`` over the frames in ``seen``, shaped like ``query``."""
    q, k, v = (
        x.permute(2, 3, 0, 1, 4).flatten(2, 3)
        for x in (query, _selected(key, seen), _selected(value, seen))
    )
    out = sdpa.attend(q, k, v)
    return torch.unflatten(out, 2, query.shape[:2]).permute(2, 3, 0, 1, 4)


def _selected(x: Tensor, seen: Sequence[slice]) -> Tensor:
    """Return the frames of ``[f, ...]`` that the slices ``seen`` select, concatenated."""
    if len(seen) == 1:
        # A slice of all would give its gradient a copy of its own.
        return x if seen[0] == slice(0, x.size(0)) else x[seen[0]]
    return torch.cat([x[part] for part in seen])


@dataclass(frozen=True)
class VideoDiTOptions:
    """Options of a Wan network that do not change the shape of any parameter.

    Attributes:
        window: window of causal attention, or None for bidirectional attention.
        zero_head: whether the last layer starts at zero, so that the untrained model predicts zero.
        recompute_blocks: how many blocks, from the first on, save only their inputs in passes with
            gradient, and are recomputed in the backward pass.
        cp_comm_type: how context-parallel ranks attend to all tokens of the frames: ``all_gather``
            (or ``p2p``) splits the cache by tokens and collects all keys and values in every pass;
            ``a2a`` splits the cache by heads and exchanges only the new frames.

    Raises:
        ConfigError: a value is out of its range.
    """

    window: FrameWindow | None = None
    zero_head: bool = True
    recompute_blocks: int = 0
    cp_comm_type: str = "all_gather"

    def __post_init__(self) -> None:
        if self.recompute_blocks < 0:
            raise ConfigError(
                f"`recompute_blocks` ({self.recompute_blocks}) must be 0 or more; 0 recomputes "
                "nothing."
            )
        if self.cp_comm_type not in (*GATHER, "a2a"):
            raise ConfigError(
                f"`cp_comm_type` ({self.cp_comm_type}) must be p2p, all_gather or a2a."
            )


def wan_options(
    flags: WindowConfig, parallel: ParallelConfig, *, causal: bool = True
) -> VideoDiTOptions:
    """Return the options that the flags set; raise ConfigError if one is out of range.

    Without ``causal``, attention is bidirectional, and the flags of the window are not used.
    """
    window = window_of(flags) if causal else None
    attends = parallel.cp_comm_type[0]
    return VideoDiTOptions(window, flags.zero_head, flags.recompute_blocks, attends)
