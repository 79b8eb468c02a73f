"""A sequence, the batch of long videos that a replica generates clip by clip, and its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_ext.video.data.randomness import sample_numbers
from megatron_ext.video.streaming import decisions
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.rollout import (
    BlockNoise,
    ExitStep,
    Generator,
    History,
    StreamClip,
    num_sinks,
)

NEVER = -1
"""The value of `SequenceState.switch_frame` for a sequence that does not switch prompts."""


@dataclass(frozen=True)
class Prompts:
    """The inputs from which the samples of a sequence are generated.

    Attributes:
        text: embeddings of the prompts, ``[b, l, d]``.
        text_after: embeddings of the prompts after the switch; None if the run has no switches.
        start: clean latents of the given first frames, ``[b, t, c, h, w]``: whole blocks, but fewer
            frames than a clip has. None if no frames are given.
    """

    text: Tensor
    text_after: Tensor | None = None
    start: Tensor | None = None


PromptSource = Callable[[Sequence[int]], Prompts]
"""A function from the indices of samples, counted over the run, to their `Prompts`.

The prompts depend on nothing else, so that a resumed run gets the same ones."""

FirstFrame = Callable[[Tensor], Tensor]
"""A function that encodes the last frame of latents ``[b, t, c, h, w]`` as an image,
``[b, 1, c, h, w]``."""


@dataclass
class SequenceState:
    """The state of a replica's sequence, a batch of b long videos that is generated clip by clip.

    It needs no random state: random numbers depend only on the seed and on the indices here.

    Attributes:
        sequence: index of the sequence, counted over the run.
        consumed_samples: index of the first video of replica 0's sequence, counted over the videos
            of all replicas in the run; the same on all replicas.
        chunk: count of the clips generated so far (checkpoints call a clip a chunk).
        current_length: number of frames so far, including given ones.
        max_length: number of frames that the sequence may not exceed.
        switch_frame: first frame under the second prompt, at the start of a block, or `NEVER`.
        has_switched: 1 if the second prompt is the current one, else 0.
        previous: the newest frames, at most as many as a clip has, ``[b, t, c, h, w]``.
        sink: the first frames, to which all later frames attend, ``[b, t, c, h, w]``.
        text: embeddings of the current prompt, ``[b, l, d]``.
        text_after: embeddings of the second prompt; empty if there is none.
    """

    sequence: int
    consumed_samples: int
    chunk: int
    current_length: int
    max_length: int
    switch_frame: int
    has_switched: int
    previous: Tensor
    sink: Tensor
    text: Tensor
    text_after: Tensor

    def switches_before(self, frame: int) -> bool:
        """Tell whether a switch that has not happened yet comes before frame ``frame``."""
        return not self.has_switched and NEVER < self.switch_frame < frame

    def first_frames(self, recent: Tensor, length: int, sinks: int) -> Tensor:
        """Return the first ``sinks`` frames of the sequence, or all frames if there are fewer.

        They are taken from ``recent``, the last frames ``[b, t, c, h, w]``, if these are all
        ``length`` frames of the sequence so far, and else from ``sink``.
        """
        return recent[:, :sinks] if recent.size(1) == length else self.sink


@dataclass(frozen=True)
class Replica:
    """Replica ``dp_rank`` of ``dp_size`` replicas, which generates ``batch`` videos at a time."""

    seed: int
    batch: int = 1
    dp_rank: int = 0
    dp_size: int = 1


class StreamingSequence:
    """Generates a replica's sequence: one more clip whenever generator or critic is trained.

    All model-parallel ranks of a replica make the same calls and draw the same random numbers.
    Sequences begin and end together on all replicas.

    Args:
        generator: the generator; its cache must fit ``streaming``.
        like: empty tensor ``[0, 0, c, h, w]`` with the sizes, dtype and device of latents.
        prompts: a function that returns the prompts of a sequence's samples.
        first_frame: a function that gets frames up to a clip's first frame, and returns this frame
            encoded as an image, to replace it. None leaves the frame as generated.

    Attributes:
        state: the state; None before the first sequence.
        first: (index of the next sequence, index of its first sample) in the run, used while
            ``state`` is None. If a resumed run cannot load its old sequence, these are the indices
            that follow those of the old sequence.
    """

    def __init__(
        self,
        streaming: StreamingConfig,
        generator: Generator,
        *,
        prompts: PromptSource,
        replica: Replica,
        like: Tensor,
        first_frame: FirstFrame | None = None,
    ) -> None:
        self.streaming = streaming
        self.generator = generator
        self.replica = replica
        self.prompts = prompts
        self.first_frame = first_frame
        self.like = like.new_empty(replica.batch, 0, *like.shape[2:])
        self.state: SequenceState | None = None
        self.first = 0, 0
        self._num_sinks = num_sinks(generator.cache.window)

    @property
    def coming(self) -> tuple[int, int]:
        """Return (index of the next sequence, index of its first sample on replica 0)."""
        s = self.state
        replica = self.replica
        if s is None:
            return self.first
        return s.sequence + 1, s.consumed_samples + replica.batch * replica.dp_size

    @property
    def can_generate_more(self) -> bool:
        """Tell whether a sequence has begun and can get another clip."""
        s = self.state
        if s is None:
            return False
        return s.chunk == 0 or self.streaming.can_grow(s.current_length, s.max_length)

    def next_clip(self, *, trains_generator: bool) -> StreamClip:
        """Generate the next clip for training; begin a new sequence if the current one has ended.

        ``trains_generator`` tells whether the clip trains the generator. Otherwise the clip trains
        the critic, and is generated without gradient. With ``trains_generator`` and ``two_phase``,
        the caller must run the exit steps in `StreamClip.blocks` again before the next call,
        because they read the cache.
        """
        if not self.can_generate_more:
            self.begin()
        if not self._state.chunk and not self.streaming.train_first_chunk:
            self._advance(trains=False)
        return self._advance(trains=trains_generator)

    @property
    def _state(self) -> SequenceState:
        assert self.state is not None
        return self.state

    def begin(self) -> None:
        """Begin the next sequence: get its prompts, empty the cache, and set a new ``state``.

        If the prompts give the first frames, the generator runs on them to fill the cache.
        """
        replica = self.replica
        streaming = self.streaming
        blocks = streaming.blocks
        sequence, consumed = self.coming
        prompts = self.prompts(self._samples(consumed))
        switch = decisions.switch_frame(streaming, replica.seed, sequence)
        start = self.like if prompts.start is None else prompts.start.to(self.like)
        after = prompts.text.new_empty(0) if switch is None else prompts.text_after
        assert after is not None
        self.generator.cache.reset()
        self.state = SequenceState(
            sequence=sequence,
            consumed_samples=consumed,
            chunk=0,
            current_length=start.size(1),
            max_length=decisions.sequence_length(streaming, replica.seed, sequence),
            # The prompt can change only between blocks.
            switch_frame=NEVER if switch is None else blocks.at_or_after(switch),
            has_switched=0,
            previous=start,
            sink=start[:, : self._num_sinks],
            text=prompts.text,
            text_after=after,
        )
        for frame in blocks.blocks(0, start.size(1)):
            given = start[:, frame : frame + blocks.size_of(frame)]
            self.generator.write_back(given, frame, prompts.text, self._noise())

    def _samples(self, consumed: int) -> range:
        r = self.replica
        return sample_numbers(consumed, 0, r.batch, r.dp_rank, r.dp_size)

    def _noise(self) -> BlockNoise:
        samples = self._samples(self._state.consumed_samples)
        like = self.like

        def noise(frame: int, step: int) -> Tensor:
            shape = self.streaming.blocks.size_of(frame), *like.shape[2:]
            return decisions.block_noise(self.replica.seed, samples, shape, frame, step, like=like)

        return noise

    def _advance(self, *, trains: bool) -> StreamClip:
        streaming = self.streaming
        s = self._state
        size = self.streaming.chunk_frames
        start = s.current_length
        growth = size - start
        if s.chunk:
            growth = decisions.new_frames(
                streaming, self.replica.seed, s.sequence, s.chunk, remaining=s.max_length - start
            )
        end = start + growth
        # After a switch within the clip, only frames under the new prompt count in the loss,
        # because critic and teacher get the new prompt for the whole clip.
        counted = max(start, s.switch_frame) if s.switches_before(end) else start
        new, blocks, exits = self._roll_out(start, end, counted if trains else end)
        s = self._state
        recent = torch.cat([s.previous, new], dim=1)
        latents, is_encoded_again = self._with_first_frame(recent)
        # Relative to the clip. A first frame that was encoded again has no gradient.
        first_counted = max(counted - (end - size), int(is_encoded_again))
        mask = torch.arange(size, device=latents.device) >= first_counted
        recent = recent.detach()
        self.state = replace(
            s,
            chunk=s.chunk + 1,
            current_length=end,
            previous=recent[:, -size:].clone(),
            sink=s.first_frames(recent, end, self._num_sinks).clone(),
        )
        return StreamClip(
            latents=latents,
            mask=mask.expand(latents.shape[:2]),
            text=s.text,
            blocks=blocks,
            samples=self._samples(s.consumed_samples),
            sequence=s.sequence,
            number=s.chunk,
            first_new=start,
            end=end,
            exit_step=exits[0] if streaming.same_exit_across_blocks else None,
        )

    def _with_first_frame(self, recent: Tensor) -> tuple[Tensor, bool]:
        """Return (the last clip of ``recent``, whether its first frame was encoded again).

        Teacher and critic expect clips whose first latent frame encodes an image. Therefore, if
        frames precede the clip, its first frame is encoded again as an image, without gradient.
        With ``decode_history`` that frame is decoded together with the preceding frames.
        """
        size = self.streaming.chunk_frames
        clip = recent[:, -size:]
        if self.first_frame is None or recent.size(1) == size:
            return clip, False
        history = recent[:, : 1 - size] if self.streaming.decode_history else clip[:, :1]
        with torch.no_grad():
            image = self.first_frame(history.detach()).to(clip.dtype)
        return torch.cat([image, clip[:, 1:]], dim=1), True

    def _roll_out(
        self, start: int, end: int, first_trained: int
    ) -> tuple[Tensor, tuple[ExitStep, ...], tuple[int, ...]]:
        """Generate the frames from ``start`` up to, not including, ``end``, block by block.

        Blocks that begin at ``first_trained`` or later are trained.

        Returns (latents, exit steps to run again with gradient, last denoising step of each block).
        """
        streaming = self.streaming
        frames = [*streaming.blocks.blocks(start, end - start)]
        exits = decisions.exit_steps(
            streaming,
            self.replica.seed,
            self._state.sequence,
            self._state.chunk,
            blocks=len(frames),
            steps=len(self.generator.schedule.denoising_timesteps),
        )
        noise = self._noise()
        made = list[Tensor]()
        trained = list[ExitStep]()
        for frame, exit_step in zip(frames, exits, strict=True):
            if self._state.switches_before(frame + 1):
                self._switch(frame, made)
            trains = frame >= first_trained
            text = self._state.text
            graph = trains and not streaming.two_phase
            x0, step = self.generator.generate(frame, text, noise, exit_step=exit_step, graph=graph)
            made.append(x0)
            if trains and streaming.two_phase:
                trained.append(step)
        return torch.cat(made, dim=1), tuple(trained), exits

    def _switch(self, frame: int, made: list[Tensor]) -> None:
        """Switch to the second prompt at ``frame``, and encode past frames again under it.

        ``made`` holds the latents of each block that the current clip has so far.
        """
        s = self.state = replace(self._state, text=self._state.text_after, has_switched=1)
        recent = torch.cat([s.previous, *(x.detach() for x in made)], dim=1)
        self._encode_again(recent, frame, keep_sink=self.streaming.sink_at_switch == "keep")

    def rebuild_cache(self) -> None:
        """Refill a lost cache by encoding past frames under the current prompt.

        The new cache differs slightly from the lost one. That was computed with the weights of
        earlier steps, and its oldest blocks attended to frames that are not encoded again.
        """
        s = self._state
        if s.previous.size(1):
            self._encode_again(s.previous, s.current_length, keep_sink=False)

    def _encode_again(self, recent: Tensor, length: int, *, keep_sink: bool) -> None:
        s = self._state
        frames = self.streaming.recache_frames
        history = History(recent, length, s.first_frames(recent, length, self._num_sinks))
        self.generator.encode_again(
            history, s.text, self._noise(), frames=frames, keep_sink=keep_sink
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sequence and its cache; {} before the first sequence."""
        if self.state is None:
            return {}
        return {**vars(self.state), "cache": self.generator.cache.state_dict()}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Restore the sequence from ``stored``, the `state_dict` of a run with the same sizes.

        If ``stored`` has no ``cache``, `rebuild_cache` computes the cache from past frames. If
        ``stored`` is empty, ``state`` becomes None.
        """
        if not stored:
            self.state = None
            return
        values = {field.name: stored[field.name] for field in fields(SequenceState)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                dtype = self.like.dtype if name in ("previous", "sink") else value.dtype
                values[name] = value.to(self.like.device, dtype)
            else:
                values[name] = int(value)
        self.state = SequenceState(**values)
        if "cache" in stored:
            self.generator.cache.load_state_dict(stored["cache"])
        else:
            self.generator.cache.reset()
            self.rebuild_cache()
