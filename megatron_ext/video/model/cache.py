"""A cache of the keys and values of earlier latent frames and of the text, for later passes.

A slot holds one frame, and the cache records the number in the video of the frame in each slot. So
a new frame can take the slot of the oldest one, the others stay in place, and slots that were never
written are not read. The cached tensors never belong to an autograd graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_ext.errors import CheckpointError, ConfigError, DataError
from megatron_ext.video.model.chunk import VideoChunk
from megatron_ext.video.model.window import FrameWindow

KeyValue = tuple[Tensor, Tensor]
"""A pair of tensors: keys and values of the same tokens."""


@dataclass(frozen=True)
class CacheShape:
    """The sizes of a cache on this rank, per frame.

    Attributes:
        num_blocks: number of transformer blocks.
        tokens: tokens of a frame on this rank.
        batch: number of videos.
        num_heads: attention heads of this rank.
    """

    num_blocks: int
    tokens: int
    batch: int
    num_heads: int
    head_dim: int


class KVCache:
    """Cached keys and values of a batch's frames on one rank.

    Build it with the method `new_cache` of a causal network.

    A full cache drops its oldest frames, except for the sinks, the first frames of the video.
    Another pass over a cached frame overwrites that frame in place.

    Args:
        window: which frames each block of frames attends to.
        capacity_frames: number of frames that the cache holds.
        chunk_frames: number of newest frames that may be run again.

    Attributes:
        keys, values: a tensor for each transformer block, ``[slots, tokens, b, heads, d]``; rotary
            positions are already applied to the keys.
        end: number of the frame after the newest written frame, or the frame given to `skip_to`.
        memo: keys and values of the text.

    Raises:
        ConfigError: ``capacity_frames`` or ``chunk_frames`` does not fit the window.
    """

    def __init__(
        self,
        window: FrameWindow,
        shape: CacheShape,
        *,
        capacity_frames: int,
        chunk_frames: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        whole = chunk_frames % window.block == 0 or window.begins(chunk_frames)
        if chunk_frames < window.block or not whole:
            raise ConfigError(
                f"`chunk_frames` ({chunk_frames}) must be a positive multiple of the frame block "
                f"({window.block}){', or 1 more' if window.first_alone else ''}."
            )
        needed = window.capacity_for(chunk_frames)
        if capacity_frames < needed:
            raise ConfigError(
                f"`capacity_frames` ({capacity_frames}) must be {needed} or more: window "
                f"({window.window}) + chunk ({chunk_frames}) - block ({window.block}), or the "
                f"first block of a chunk cannot be run again at its end; use {needed}."
            )
        self.window = window
        self.shape = shape
        self.capacity_frames = capacity_frames
        size = (capacity_frames, shape.tokens, shape.batch, shape.num_heads, shape.head_dim)
        self.keys, self.values = (
            [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_blocks)]
            for _ in range(2)
        )
        self.memo = TextMemo(shape.num_blocks)
        self._held: dict[int, tuple[int, int]] = {}
        """The slot of each cached frame, and the number of the write that last changed it."""
        self._writes = 0
        self.reset()

    def reset(self, *, keep_sink: bool = False) -> None:
        """Drop the cached text and all cached frames; with ``keep_sink`` keep the sink frames."""
        last_kept = self.window.sink if keep_sink else 0
        self._held = {f: entry for f, entry in self._held.items() if f < last_kept}
        self._absent_before = 0
        self.end = max(self._held, default=-1) + 1
        self.memo.clear()

    def skip_to(self, frame: int) -> None:
        """Drop all frames except the sinks, and let the next pass begin at ``frame``.

        Raises:
            ConfigError: ``frame`` comes before `end`.
        """
        if frame < self.end:
            raise ConfigError(
                f"the cache stands at frame {self.end} and cannot skip back to frame {frame}; "
                "`reset` it first."
            )
        self._held = {f: entry for f, entry in self._held.items() if f < self.window.sink}
        self._absent_before = self.end = frame

    @property
    def frames(self) -> tuple[int, ...]:
        """Return the absolute numbers of the cached frames, ascending."""
        return tuple(sorted(self._held))

    def slot_of(self, frame: int) -> int:
        """Return the slot of a cached frame in `keys` and `values`."""
        return self._held[frame][0]

    @property
    def num_bytes(self) -> int:
        """Return the memory of keys and values in bytes."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    def past_of(self, first_frame: int, num_frames: int) -> tuple[int, ...]:
        """Return the cached frames to which new frames attend, ascending.

        The new frames are ``num_frames`` frames from ``first_frame`` on.

        Raises:
            DataError: the new frames are not whole blocks of frames, as the window cuts the video,
                or the frames before them were not run.
            ConfigError: a frame that is needed was dropped from the cache.
        """
        new = range(first_frame, first_frame + num_frames)
        if first_frame > self.end:
            raise DataError(
                f"`first_frame` ({first_frame}) must not exceed the frame at which the cache "
                f"stands ({self.end}); run the frames in order, or `skip_to` it."
            )
        starts = self.window.blocks(first_frame, num_frames)
        seen = {f for start in starts for part in self.window.visible(start) for f in part}
        past = sorted(f for f in seen.difference(new) if not self._is_absent(f))
        for needed in (past, [f for f in new if f < self.end]):
            missing = [f for f in needed if f not in self._held]
            if missing:
                self._refuse(first_frame, missing)
        return tuple(past)

    def _is_absent(self, frame: int) -> bool:
        return self.window.sink <= frame < self._absent_before

    def _refuse(self, first_frame: int, missing: Sequence[int]) -> NoReturn:
        if missing[-1] >= self.end or missing[0] < self.window.sink:
            raise DataError(
                f"frame {first_frame} sees frame {missing[-1]}, which is not in the cache; it "
                f"stands at frame {self.end} and holds {_ranges(self.frames)}, so run the frames "
                "in order."
            )
        if self._is_absent(missing[0]):
            raise DataError(
                f"frame {missing[0]} lies before frame {self._absent_before}, from which on the "
                "cache was filled anew; `reset` it to go back."
            )
        needed = self.window.capacity_for(self.end - first_frame)
        raise ConfigError(
            f"`capacity_frames` ({self.capacity_frames}) must be {needed} or more to run frame "
            f"{first_frame} again after frame {self.end - 1}, since frame {missing[0]} was dropped."
        )

    def slices(self, block: int, frames: Iterable[int]) -> list[KeyValue]:
        """Return one transformer block's cached keys and values of each of ``frames``.

        They are views of the cache, ``[1, tokens, b, heads, d]`` each.
        """
        keys = self.keys[block]
        values = self.values[block]
        slots = [self.slot_of(f) for f in frames]
        return [(keys[s : s + 1], values[s : s + 1]) for s in slots]

    def stamps_of(self, frames: Iterable[int]) -> list[tuple[int, int] | None]:
        """Return (slot, number of the last write) of each frame, None for one that is not cached.

        A frame whose stamp has changed since an earlier call was overwritten or dropped.
        """
        return [self._held.get(f) for f in frames]

    def write(self, first_frame: int, new: Mapping[int, KeyValue]) -> None:
        """Store keys and values of t frames from ``first_frame`` on.

        ``new`` maps each block number to keys and values, ``[t, tokens, b, heads, d]`` each.
        """
        frames = range(first_frame, first_frame + new[0][0].size(0))
        frames_by_age = sorted({*self._held, *frames})
        sinks = [f for f in frames_by_age if f < self.window.sink]
        local = frames_by_age[len(sinks) :]
        room = self.capacity_frames - len(sinks)
        kept = {*sinks, *local[max(0, len(local) - room) :]}
        self._held = {f: entry for f, entry in self._held.items() if f in kept}
        taken = {slot for slot, _ in self._held.values()}
        free = iter(sorted(set(range(self.capacity_frames)) - taken))
        self._writes += 1
        for index, frame in enumerate(frames):
            if frame not in kept:
                continue
            slot = self.slot_of(frame) if frame in self._held else next(free)
            self._held[frame] = slot, self._writes
            for block, (key, value) in new.items():
                self.keys[block][slot].copy_(key[index])
                self.values[block][slot].copy_(value[index])
        self.end = max(self.end, frames.stop)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole cache of this rank; tensors are not copied."""
        return {
            "keys": self.keys,
            "values": self.values,
            "slots": {frame: slot for frame, (slot, _) in self._held.items()},
            "end": self.end,
            "absent_before": self._absent_before,
            "memo": self.memo.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the cache from the result of `state_dict`.

        CheckpointError is raised if shapes differ.
        """
        own = [*self.keys, *self.values]
        given = [*state["keys"], *state["values"]]
        if [x.shape for x in own] != [x.shape for x in given]:
            raise CheckpointError(
                f"the stored cache holds {len(given) // 2} blocks of {list(given[0].shape)}, but "
                f"this one {len(own) // 2} of {list(own[0].shape)}; resume with the sizes and the "
                "layout that it was saved with, or begin a new sequence."
            )
        for mine, theirs in zip(own, given, strict=True):
            mine.copy_(theirs)
        self._writes += 1
        self._held = {frame: (slot, self._writes) for frame, slot in state["slots"].items()}
        self._absent_before = state["absent_before"]
        self.end = state["end"]
        self.memo.load_state_dict(state["memo"])


class CachePass:
    """One forward pass over ``num_frames`` new frames from ``first_frame`` on that uses a cache.

    Every transformer block reads `past_key_values` and passes the keys and values of the new frames
    to `record`. After all blocks the caller calls `finish`, which writes these to the cache if
    ``updates`` is set. A transformer block that is recomputed in the backward pass reads the same
    past frames again and writes nothing.
    """

    def __init__(self, cache: KVCache, first_frame: int, num_frames: int, *, updates: bool) -> None:
        self.past = cache.past_of(first_frame, num_frames)
        self._cache = cache
        self._first_frame = first_frame
        self._open = updates
        self._stamps = cache.stamps_of(self.past)
        self._new: dict[int, KeyValue] = {}

    def past_key_values(self, block: int) -> list[KeyValue]:
        """Return the cached keys and values of each past frame to which the new frames attend.

        ``block`` is the number of the transformer block that needs them.

        Raises:
            ConfigError: a frame was overwritten or dropped before the backward pass read it again.
        """
        if self._cache.stamps_of(self.past) != self._stamps:
            raise ConfigError(
                f"frames {_ranges(self.past)} of the cache were overwritten or dropped before the "
                f"backward pass recomputed frame {self._first_frame}; run the backward pass "
                "before them, or give the cache a larger `capacity_frames` "
                f"({self._cache.capacity_frames})."
            )
        return self._cache.slices(block, self.past)

    def record(self, block: int, key: Tensor, value: Tensor) -> None:
        """Keep the keys and values of the new frames for `finish`, if the pass updates the cache.

        ``block`` is the number of the transformer block that computed them.
        """
        if self._open:
            self._new[block] = key.detach(), value.detach()

    def finish(self) -> None:
        """Write the recorded keys and values to the cache, if the pass updates it."""
        if self._open:
            self._open = False
            self._cache.write(self._first_frame, self._new)
            self._new = {}


def _ranges(frames: Sequence[int]) -> str:
    """Return ascending numbers as text, for example ``0-2, 9-14``."""
    parts: list[list[int]] = []
    for frame in frames:
        if parts and parts[-1][1] == frame - 1:
            parts[-1][1] = frame
        else:
            parts.append([frame, frame])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in parts) or "nothing"


class TextMemo:
    """A store of the keys and values that the transformer blocks compute from one text.

    When `begin` is called with a different text, the store is cleared.

    Attributes:
        text: a copy of the text, ``[b, l, text_width]``; None at first.
        key_values: keys and values of the text, ``[l, b, n, d]`` each, by block number.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.clear()

    @property
    def is_filled(self) -> bool:
        """Return whether the keys and values of every block are stored."""
        return len(self.key_values) == self.num_blocks

    def clear(self) -> None:
        """Drop the text, its keys and values, as for a new sequence or after a weight update."""
        self.text: Tensor | None = None
        self.key_values: dict[int, KeyValue] = {}
        self._source: tuple[weakref.ref[Tensor], int] | None = None

    def begin(self, text: Tensor) -> bool:
        """Prepare for a forward pass with ``text``, ``[b, l, text_width]``.

        Return True if the store holds the keys and values of this text. Otherwise clear the store
        and return False; during the pass, each block must then put the keys and values that it
        computes into `key_values`.
        """
        if self.is_filled and self._is_of(text):
            return True
        self.clear()
        self.text = text.detach().clone()
        self._source = weakref.ref(text), _version(text)
        return False

    def _is_of(self, text: Tensor) -> bool:
        """Return whether ``text`` equals the stored text.

        Values are not compared if ``text`` is the very tensor that was stored, and has not been
        written to since.
        """
        if self._source is not None:
            source, version = self._source
            if source() is text and version == _version(text) >= 0:
                return True
        copy = self.text
        assert copy is not None
        return copy.shape == text.shape and torch.equal(copy, text.to(copy))

    def state_dict(self) -> dict[str, Any]:
        """Return the text with its keys and values.

        Keys and values are saved, since later weights might not reproduce them.
        """
        return {"text": self.text, "key_values": dict(self.key_values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore text, keys and values from the result of `state_dict`."""
        self.clear()
        self.text = state["text"]
        self.key_values = dict(state["key_values"])


def _version(text: Tensor) -> int:
    """Return the number of writes to a tensor; -1 for an inference tensor, which has no count."""
    return -1 if text.is_inference() else text._version


@torch.no_grad()
def recache(
    model: VideoChunk,
    cache: KVCache,
    *,
    latents: Tensor,
    first_frame: int,
    timestep: float,
    text: Tensor,
    sink_latents: Tensor | None = None,
    keep_sink: bool = False,
) -> None:
    """Replace the cached keys and values of generated frames by those under a new prompt.

    The cache is cleared, and the model runs again on ``latents``, block after block of frames. The
    sinks (the first frames, which all later frames see) are run again from ``sink_latents``, or
    kept. Generation can then go on at the frame after the last of ``latents``.

    Args:
        model: a causal model without wrappers.
        latents: clean frames from ``first_frame`` up to the newest, ``[b, t, c, h, w]``.
        timestep: timestep given to the model for these clean frames (the context noise).
        text: the new prompt, ``[b, l, text_width]``.
        sink_latents: clean frames from frame 0 on, ``[b, t, c, h, w]``: every block that holds a
            sink before ``first_frame``. None if there is none, or with ``keep_sink``.
        keep_sink: keep the sinks' keys and values from the old prompt, as LongLive's sampling does;
            ``first_frame`` must then come after the sinks.

    Raises:
        ConfigError: sinks are neither given nor kept, are both given and kept, or are too few.
        DataError: the frames are not whole blocks.
    """
    window = cache.window
    num_sinks = _checked_sinks(cache, first_frame, sink_latents, keep_sink)
    pieces = [(first_frame, latents)]
    if num_sinks and sink_latents is not None:
        pieces.insert(0, (0, sink_latents[:, :num_sinks]))
    # All frames are checked before the cache is touched.
    starts = [list(window.blocks(start, frames.size(1))) for start, frames in pieces]
    cache.reset(keep_sink=keep_sink)
    for (start, frames), blocks in zip(pieces, starts, strict=True):
        if start:
            cache.skip_to(start)
        for block in blocks:
            x = frames[:, block - start : block - start + window.size_of(block)]
            t = torch.full(x.shape[:2], timestep, dtype=torch.float32, device=x.device)
            model(x=x, timesteps=t, text=text, cache=cache, first_frame=block)


def _checked_sinks(
    cache: KVCache, first_frame: int, sink_latents: Tensor | None, keep_sink: bool
) -> int:
    """Check the arguments of `recache`; return how many frames of ``sink_latents`` it runs on.

    These are the blocks of frames that hold a sink before ``first_frame``.
    """
    window = cache.window
    num_sinks = min(cache.window.sink, first_frame)
    if keep_sink and first_frame < window.sink:
        raise ConfigError(
            f"`keep_sink` keeps frames 0 to {window.sink - 1}, but `latents` begin at frame "
            f"{first_frame} and would overwrite them; begin at frame {window.sink} or later."
        )
    given = 0 if sink_latents is None else sink_latents.size(1)
    if keep_sink and given:
        raise ConfigError("`sink_latents` were given, but `keep_sink` ignores them; drop one.")
    if keep_sink and num_sinks and not set(range(num_sinks)) <= set(cache.frames):
        raise ConfigError(
            f"`keep_sink` needs the sink frames (0 to {num_sinks - 1}) in the cache; give "
            "`sink_latents` instead."
        )
    blocks = window.at_or_after(num_sinks)
    if not keep_sink and given < blocks:
        raise ConfigError(
            f"`sink_latents` ({given} frames) must hold the first {blocks} frames, or no frame "
            "after the switch would see a sink; keep them from the start of the sequence, or set "
            "`keep_sink`."
        )
    return blocks
