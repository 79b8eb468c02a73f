"""Long sequences of a replica, chunk by chunk."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.data.randomness import sample_numbers
from megatron_ext.video.streaming import options as draws
from megatron_ext.video.streaming.generate import History, encode_anew, num_sinks
from megatron_ext.video.streaming.options import (
    PromptSource,
    StreamingOptions,
    given_frames,
    second_prompt,
)
from megatron_ext.video.streaming.rollout import (
    BlockNoise,
    FirstFrame,
    Generator,
    Recache,
    StreamChunk,
    TrainedBlock,
    assembled,
    new_frame_mask,
)
from megatron_ext.video.streaming.state import NEVER, SequenceState, stored_state


@dataclass(frozen=True)
class Replica:
    """Which samples are a replica's.

    Attributes:
        seed: of the run.
        batch: b, sequences that it generates at a time.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
    """

    seed: int
    batch: int = 1
    dp_rank: int = 0
    dp_size: int = 1


class StreamingSequence:
    """The sequence that generator and critic steps advance together.

    All model-parallel ranks of a replica do the same with the same numbers. Sequences begin and end
    together on all replicas.

    Args:
        options: see `StreamingOptions`.
        generator: see `Generator`.
        recache: see `Recache`.
        prompts: see `PromptSource`.
        replica: see `Replica`.
        like: ``[0, 0, c, h, w]``, an empty tensor that gives sizes, dtype and device of latents.
        first_frame: encodes the first frame of chunks anew; None leaves it as it was generated.

    Attributes:
        state: None before the first sequence.
        first: number of the first sequence, and number in the run of the first of its samples; a
            run that goes on without a sequence begins where the old one ended.

    Raises:
        ConfigError: a cache that does not fit the options.
    """

    def __init__(
        self,
        options: StreamingOptions,
        generator: Generator,
        *,
        recache: Recache,
        prompts: PromptSource,
        replica: Replica,
        like: Tensor,
        first_frame: FirstFrame | None = None,
    ) -> None:
        self.options, self.generator, self.replica = options, generator, replica
        self.recache, self.prompts, self.first_frame = recache, prompts, first_frame
        self.like = like.new_empty(replica.batch, 0, *like.shape[2:])
        self.state: SequenceState | None = None
        self.first = 0, 0
        block = generator.cache.window.block
        if block != options.block:
            raise ConfigError(
                f"`block` ({options.block}) must be that of the network ({block}); use {block}."
            )
        generator.check_capacity(options.chunk_frames)

    @property
    def coming(self) -> tuple[int, int]:
        """Number of the next sequence, and number in the run of the first of its samples."""
        s, replica = self.state, self.replica
        if s is None:
            return self.first
        return s.sequence + 1, s.consumed_samples + replica.batch * replica.dp_size

    @property
    def can_generate_more(self) -> bool:
        """The current sequence may have another chunk."""
        s = self.state
        if s is None:
            return False
        return s.chunk == 0 or self.options.can_grow(s.current_length, s.max_length)

    def next_chunk(self, *, trains_generator: bool) -> StreamChunk:
        """Generate the next chunk to be trained, of a new sequence if the old one has ended.

        Args:
            trains_generator: keep what the generator's exit steps need, see `StreamChunk.blocks`.

        Raises:
            DataError: prompts that do not fit.
        """
        if not self.can_generate_more:
            self.begin()
        if not self._state.chunk and not self.options.train_first_chunk:
            self._advance(trains=False)
        return self._advance(trains=trains_generator)

    @property
    def _state(self) -> SequenceState:
        if self.state is None:
            raise ConfigError("no sequence was begun; call `begin` or `next_chunk` first.")
        return self.state

    def check_newest(self, chunk: StreamChunk) -> None:
        """See to it that the cache is as it was when a chunk had been generated.

        Raises:
            ConfigError: it is not the newest chunk.
        """
        s = self.state
        if s is None or (s.sequence, s.chunk - 1) != (chunk.sequence, chunk.number):
            now = "nowhere" if s is None else f"at chunk {s.chunk - 1} of sequence {s.sequence}"
            raise ConfigError(
                f"chunk {chunk.number} of sequence {chunk.sequence} cannot be run again, since the "
                f"cache is {now}; run its exit steps before the next chunk is generated."
            )

    def begin(self) -> None:
        """Begin the next sequence of the run, which knows nothing of the one before.

        Raises:
            DataError: prompts that do not fit.
        """
        replica, options = self.replica, self.options
        sequence, consumed = self.coming
        prompts = self.prompts(self._samples(consumed))
        switch = draws.switch_frame(options, replica.seed, sequence)
        after = second_prompt(prompts, replica.batch, switches=switch is not None)
        start = given_frames(prompts, self.like, options)
        self.generator.cache.reset()
        self.state = SequenceState(
            sequence=sequence,
            consumed_samples=consumed,
            chunk=0,
            current_length=start.size(1),
            max_length=draws.sequence_length(options, replica.seed, sequence),
            # A block is made under one prompt.
            switch_frame=NEVER if switch is None else -(-switch // options.block) * options.block,
            has_switched=0,
            previous=start,
            sink=start[:, : self._num_sinks],
            text=prompts.text,
            text_after=after,
        )
        for frame in range(0, start.size(1), options.block):
            block = start[:, frame : frame + options.block]
            self.generator.write_back(block, frame, prompts.text, self._noise())

    @property
    def _num_sinks(self) -> int:
        return num_sinks(self.generator.cache.window)

    def _samples(self, consumed: int) -> range:
        r = self.replica
        return sample_numbers(consumed, 0, r.batch, r.dp_rank, r.dp_size)

    def _noise(self) -> BlockNoise:
        return functools.partial(
            draws.block_noise,
            self.replica.seed,
            self._samples(self._state.consumed_samples),
            (self.options.block, *self.like.shape[2:]),
            like=self.like,
        )

    def _advance(self, *, trains: bool) -> StreamChunk:
        """Generate the next chunk."""
        options, s = self.options, self._state
        start = s.current_length
        growth = options.chunk_frames - start
        if s.chunk:
            growth = draws.new_frames(
                options, self.replica.seed, s.sequence, s.chunk, remaining=s.max_length - start
            )
        end = start + growth
        counted = max(start, s.switch_frame) if s.switches_before(end) else start
        new, blocks, exits = self._roll_out(start, end, counted if trains else end)
        s = self._state
        chunk, anew = assembled(
            torch.cat([s.previous, new], dim=1),
            frames=options.chunk_frames,
            first_frame=self.first_frame,
            whole_history=options.decode_history,
        )
        first_counted = counted - (end - options.chunk_frames)
        mask = new_frame_mask(
            frames=options.chunk_frames, first_counted=first_counted, encoded_anew=anew
        )
        self.state = s.extended(new, chunk_frames=options.chunk_frames, sinks=self._num_sinks)
        return StreamChunk(
            latents=chunk,
            mask=mask.to(chunk.device).expand(chunk.shape[:2]),
            text=s.text,
            blocks=blocks,
            samples=self._samples(s.consumed_samples),
            sequence=s.sequence,
            number=s.chunk,
            first_new=start,
            end=end,
            exit_step=exits[0] if options.same_exit_across_blocks else None,
        )

    def _roll_out(
        self, start: int, end: int, first_trained: int
    ) -> tuple[Tensor, tuple[TrainedBlock, ...], tuple[int, ...]]:
        """Generate frames, and say which exit steps are to be run again, and what all are."""
        options, frames = self.options, range(start, end, self.options.block)
        exits = draws.exit_steps(
            options,
            self.replica.seed,
            self._state.sequence,
            self._state.chunk,
            blocks=len(frames),
            steps=len(self.generator.schedule.denoising_timesteps),
        )
        noise, chunk_start = self._noise(), end - options.chunk_frames
        made: list[Tensor] = []
        trained = []
        for frame, exit_step in zip(frames, exits, strict=True):
            if self._state.switches_before(frame + 1):
                self._switch(frame, made)
            trains = frame >= first_trained
            x0, step = self.generator.generate(
                frame,
                self._state.text,
                noise,
                exit_step=exit_step,
                graph=trains and not options.two_phase,
            )
            made.append(x0)
            if trains and options.two_phase:
                place = slice(frame - chunk_start, frame - chunk_start + options.block)
                trained.append(TrainedBlock(step, place))
        return torch.cat(made, dim=1), tuple(trained), exits

    def _switch(self, frame: int, made: list[Tensor]) -> None:
        """Take the second prompt from a frame on, and encode the past anew under it."""
        s = self.state = replace(self._state, text=self._state.text_after, has_switched=1)
        known = torch.cat([s.previous, *(x.detach() for x in made)], dim=1)
        self._encode_anew(known, frame)

    def rebuild_cache(self) -> None:
        """Encode the past anew under the current prompt, for a cache that was not kept.

        The cache then differs a little from the one that was lost, whose frames were written one
        by one under older weights, and whose older frames had seen still older ones.
        """
        s = self._state
        if s.previous.size(1):
            self._encode_anew(s.previous, s.current_length, keep_sink=False)

    def _encode_anew(self, known: Tensor, length: int, *, keep_sink: bool | None = None) -> None:
        s, options = self._state, self.options
        sinks = s.first_frames(known, length, self._num_sinks)
        encode_anew(
            self.generator,
            self.recache,
            History(known, length, sinks),
            s.text,
            self._noise(),
            frames=options.recache_frames,
            keep_sink=options.sink_at_switch == "keep" if keep_sink is None else keep_sink,
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the sequence stands, with its cache; empty before the first sequence."""
        if self.state is None:
            return {}
        return {**self.state.state_dict(), "cache": dict(self.generator.cache.state_dict())}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Args:
            stored: without ``cache``, it is rebuilt, see `rebuild_cache`.

        Raises:
            CheckpointError: an entry is missing, or belongs to other sizes.
        """
        frames = self.options.chunk_frames
        self.state = stored_state(stored, self.like, frames) if stored else None
        if "cache" in stored:
            self.generator.cache.load_state_dict(stored["cache"])
        elif stored:
            self.generator.cache.reset()
            self.rebuild_cache()
