"""The gated delta rule over whole sequences, chunk by chunk, with its own backward pass.

Sequences and heads are computed in blocks, and each block in segments of a few chunks, so that what
a segment needs stays in a CPU's cache. Between the passes only the inputs and the states before
segments are kept. The backward pass goes through the segments in reverse and computes each of them
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.layers.mixers.delta_chunks import (
    ChannelDecayChunks,
    Chunks,
    Gradients,
    HeadDecayChunks,
    Masks,
)


@dataclass(frozen=True)
class Sizes:
    """How a sequence is cut.

    Attributes:
        chunk: number of tokens of a chunk, a power of two.
        segment: number of chunks of a segment.
        heads: number of heads, over all sequences, that are computed together, at least.
    """

    chunk: int
    segment: int
    heads: int


def sizes_for(length: int, key_size: int, device: torch.device) -> Sizes:
    """Return the sizes with which sequences of a length are computed fast on a device."""
    covering = 1 << (length - 1).bit_length()
    if device.type == "cpu":
        return Sizes(min(32, covering), segment=8, heads=max(8, 1024 // key_size))
    return Sizes(min(64, covering), segment=8, heads=1 << 30)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which states are computed for inputs of a dtype."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class _Block:
    """Some sequences, and some of their heads: those of keys, and those of values."""

    batch: slice
    key_heads: slice
    value_heads: slice


class _Inputs:
    """The inputs of `Scan`, read and written piece by piece."""

    def __init__(
        self,
        queries: Tensor | None,
        keys: Tensor,
        values: Tensor,
        decays: Tensor,
        beta: Tensor,
        segments: Tensor | None,
        sizes: Sizes,
    ) -> None:
        self.queries = queries
        self.keys = keys
        self.values = values
        self.decays = decays
        self.beta = beta
        self.segments = segments
        self.sizes = sizes
        self.by_channel = decays.dim() == 4
        self.batch, self.length, self.key_heads, self.key_size = keys.shape
        self.heads = values.size(2)
        self.group = self.heads // self.key_heads
        self.dtype = working_dtype(keys.dtype)
        self.scale = self.key_size**-0.5

    def blocks(self) -> Iterator[_Block]:
        """Yield blocks that together are all heads of all sequences."""
        key_heads = max(1, min(self.key_heads, self.sizes.heads // self.group))
        batch = max(1, self.sizes.heads // (key_heads * self.group))
        for row in range(0, self.batch, batch):
            for head in range(0, self.key_heads, key_heads):
                own = slice(head, min(head + key_heads, self.key_heads))
                values = slice(own.start * self.group, own.stop * self.group)
                yield _Block(slice(row, min(row + batch, self.batch)), own, values)

    def spans(self) -> list[slice]:
        """Return the tokens of each segment."""
        size = self.sizes.chunk * self.sizes.segment
        starts = range(0, self.length, size)
        return [slice(start, min(start + size, self.length)) for start in starts]

    def read(self, x: Tensor, span: slice, batch: slice, heads: slice) -> Tensor:
        """Return the part ``[c, m, l, d]`` of ``[b, s, n, d]``, with zeros after the last token."""
        part = x[batch, span, heads]
        missing = -part.size(1) % self.sizes.chunk
        if missing:
            part = F.pad(part, (0, 0, 0, 0, 0, missing))
        chunks = torch.unflatten(part, 1, (-1, self.sizes.chunk)).permute(1, 0, 3, 2, 4)
        copied = torch.empty(chunks.shape, dtype=self.dtype, device=x.device)
        return copied.copy_(chunks).flatten(1, 2)

    def write(self, x: Tensor, part: Tensor, span: slice, batch: slice, heads: slice) -> None:
        """Write what `read` returns back to its place in ``[b, s, n, d]``."""
        target = x[batch, span, heads]
        chunks = torch.unflatten(part, 1, (target.size(0), -1)).permute(1, 0, 3, 2, 4)
        if target.size(1) % self.sizes.chunk:
            target.copy_(chunks.flatten(1, 2)[:, : target.size(1)])
        else:
            torch.unflatten(target, 1, (-1, self.sizes.chunk)).copy_(chunks)

    def masks(self, span: slice, block: _Block) -> Masks | None:
        """Return the masks of a segment; None if there is one document."""
        if self.segments is None:
            return None
        own = self.segments[block.batch, span]
        missing = -own.size(1) % self.sizes.chunk
        if missing:
            own = torch.cat((own, own[:, -1:].expand(-1, missing)), dim=1)
        chunks = torch.unflatten(own, 1, (-1, self.sizes.chunk)).transpose(0, 1)
        before = torch.zeros_like(chunks[:, :, :1])
        before[1:] = chunks[:-1, :, -1:]
        if span.start:
            before[0] = self.segments[block.batch, span.start - 1, None]
        return Masks(chunks, before, block.value_heads.stop - block.value_heads.start, self.dtype)

    def chunks(self, span: slice, block: _Block) -> Chunks:
        """Return the matrices of the chunks of a segment."""
        by_channel = self.by_channel
        heads = block.value_heads
        queries = None
        if self.queries is not None:
            queries = self._of_key_heads(self.queries, span, block) * self.scale
        keys = self._of_key_heads(self.keys, span, block)
        decays = self.decays if by_channel else self.decays[..., None]
        kind = ChannelDecayChunks if by_channel else HeadDecayChunks
        decay = self.read(decays, span, block.batch, heads)
        beta = self.read(self.beta[..., None], span, block.batch, heads)[..., 0]
        masks = self.masks(span, block)
        return kind(queries, keys, decay if by_channel else decay[..., 0], beta, masks)

    def _of_key_heads(self, x: Tensor, span: slice, block: _Block) -> Tensor:
        """Return queries or keys; under decays by channel, those of each value head."""
        part = self.read(x, span, block.batch, block.key_heads)
        if self.by_channel and self.group > 1:
            part = part.repeat_interleave(self.group, dim=1)
        return part

    def write_of_key_heads(self, x: Tensor, part: Tensor, span: slice, block: _Block) -> None:
        """Write a gradient of what ``_of_key_heads`` returns."""
        if self.by_channel and self.group > 1:
            part = torch.unflatten(part, 1, (-1, self.group)).sum(2)
        self.write(x, part, span, block.batch, block.key_heads)


class _Segment:
    """The recurrence over the chunks of one segment of one block, with m heads.

    Args:
        values: ``[c, m, l, v]``.
        state: the state before the segment, ``[m, k, v]``.
    """

    def __init__(self, chunks: Chunks, values: Tensor, state: Tensor) -> None:
        self.chunks = chunks
        self.values = values
        self.state = state
        self.states = [state]
        self.remaining: list[Tensor] = []
        self.written: list[Tensor] = []

    def run(self, outputs: Tensor | None) -> Tensor:
        """Return the state after the segment, and fill its outputs ``[c, m, l, v]``.

        The state before each chunk, V - K_read S and U are kept for `backward`.
        """
        chunks = self.chunks
        inverse = chunks.inverse * chunks.beta[..., None, :]
        for index, values in enumerate(self.values):
            state = self.states[-1]
            remaining = torch.baddbmm(values, chunks.keys_read[index], state, alpha=-1)
            written = inverse[index] @ remaining
            if outputs is not None:
                assert chunks.queries is not None and chunks.scores is not None
                torch.bmm(chunks.queries[index], state, out=outputs[index])
                outputs[index].baddbmm_(chunks.scores[index], written)
            keys = chunks.keys_written[index].transpose(-1, -2)
            self.states.append((state * chunks.kept[index]).baddbmm_(keys, written))
            self.remaining.append(remaining)
            self.written.append(written)
        return self.states[-1]

    def backward(self, outputs: Tensor | None, state: Tensor) -> tuple[Gradients, Tensor, Tensor]:
        """Return the gradients of the chunks, of the values and of the state before the segment.

        Args:
            outputs: gradient of the outputs, ``[c, m, l, v]``; None if it is zero.
            state: gradient of the state after the segment, ``[m, k, v]``.
        """
        chunks = self.chunks
        kept = torch.empty_like(chunks.kept)
        keys_written = torch.empty_like(chunks.keys_written)
        values = torch.empty_like(self.values)
        solved = torch.empty_like(self.values)
        for index in reversed(range(len(self.values))):
            written = chunks.keys_written[index] @ state
            if outputs is not None:
                assert chunks.scores is not None
                written.baddbmm_(chunks.scores[index].transpose(-1, -2), outputs[index])
            torch.bmm(chunks.inverse[index].transpose(-1, -2), written, out=solved[index])
            torch.mul(solved[index], chunks.beta[index, ..., None], out=values[index])
            gained = (self.states[index] * state).sum(-1, keepdim=True)
            kept[index] = gained if kept.size(-2) > 1 else gained.sum(-2, keepdim=True)
            torch.bmm(self.written[index], state.transpose(-1, -2), out=keys_written[index])
            state = state * chunks.kept[index]
            state.baddbmm_(chunks.keys_read[index].transpose(-1, -2), values[index], alpha=-1)
            if outputs is not None:
                assert chunks.queries is not None
                state.baddbmm_(chunks.queries[index].transpose(-1, -2), outputs[index])
        before = torch.stack(self.states[:-1]).transpose(-1, -2)
        written = torch.stack(self.written).transpose(-1, -2)
        gradients = Gradients(
            queries=None if outputs is None else outputs @ before,
            keys_read=(values @ before).neg_(),
            keys_written=keys_written,
            kept=kept,
            scores=None if outputs is None else outputs @ written,
            system=(solved @ written).neg_(),
            beta=(solved * torch.stack(self.remaining)).sum(-1),
        )
        return gradients, values, state


class Scan(torch.autograd.Function):
    """The outputs of the rule and the states after each sequence.

    ``apply(queries, keys, values, decays, beta, state, segments, sizes)`` returns outputs ``[b, s,
    h, v]`` in the dtype of the values, or None if ``queries`` is None, and the state after each
    sequence, ``[b, h, k, w]``. The state before it, ``state``, is ``[b, h, k, w]``; if w > v, the
    values are followed by w - v zeros. See `delta_rule.DeltaRule` for the other arguments.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor | None,
        keys: Tensor,
        values: Tensor,
        decays: Tensor,
        beta: Tensor,
        state: Tensor,
        segments: Tensor | None,
        sizes: Sizes,
    ) -> tuple[Tensor | None, Tensor]:
        inputs = _Inputs(queries, keys, values, decays, beta, segments, sizes)
        spans = inputs.spans()
        keeps = any(ctx.needs_input_grad)
        starts = state.new_empty(len(spans) if keeps else 0, *state.shape)
        final = torch.empty_like(state)
        outputs = None if queries is None else torch.empty_like(values)
        for block in inputs.blocks():
            place = block.batch, block.value_heads
            current = state[place].flatten(0, 1)
            for index, span in enumerate(spans):
                if keeps:
                    starts[index][place] = current.view_as(starts[index][place])
                part = _values(inputs, span, block, state.size(-1))
                segment = _Segment(inputs.chunks(span, block), part, current)
                out = None if outputs is None else torch.empty_like(part)
                current = segment.run(out)
                if out is not None and outputs is not None:
                    inputs.write(outputs, out, span, *place)
            final[place] = current.view_as(final[place])
        ctx.save_for_backward(queries, keys, values, decays, beta, segments, starts)
        ctx.sizes = sizes
        ctx.set_materialize_grads(False)
        return outputs, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outputs: Tensor | None, final: Tensor | None) -> Any:
        queries, keys, values, decays, beta, segments, starts = ctx.saved_tensors
        if outputs is None:
            queries = None
        inputs = _Inputs(queries, keys, values, decays, beta, segments, ctx.sizes)
        spans = inputs.spans()
        # From here on, the names stand for the gradients.
        queries = None if queries is None else torch.empty_like(queries)
        keys, values, decays, beta = (torch.empty_like(x) for x in (keys, values, decays, beta))
        state = starts.new_empty(starts.shape[1:])
        for block in inputs.blocks():
            place = block.batch, block.value_heads
            shape = state[place].shape
            change = starts.new_zeros(shape) if final is None else final[place].to(starts.dtype)
            current = change.flatten(0, 1)
            for span, start in reversed(list(zip(spans, starts, strict=True))):
                chunks = inputs.chunks(span, block)
                part = _values(inputs, span, block, state.size(-1))
                segment = _Segment(chunks, part, start[place].flatten(0, 1))
                segment.run(None)
                of_outputs = None if outputs is None else inputs.read(outputs, span, *place)
                gradients, of_values, current = segment.backward(of_outputs, current)
                of_queries, of_keys, of_decays, of_beta = chunks.backward(gradients)
                if queries is not None and of_queries is not None:
                    of_queries *= inputs.scale
                    inputs.write_of_key_heads(queries, of_queries, span, block)
                inputs.write_of_key_heads(keys, of_keys, span, block)
                inputs.write(values, of_values[..., : values.size(-1)], span, *place)
                if inputs.by_channel:
                    inputs.write(decays, of_decays, span, *place)
                else:
                    inputs.write(decays[..., None], of_decays[..., None], span, *place)
                inputs.write(beta[..., None], of_beta[..., None], span, *place)
            state[place] = current.view(shape)
        return queries, keys, values, decays, beta, state, None, None


def _values(inputs: _Inputs, span: slice, block: _Block, width: int) -> Tensor:
    """Return the values of a segment, ``[c, m, l, width]``, followed by zeros up to a width."""
    part = inputs.read(inputs.values, span, block.batch, block.value_heads)
    missing = width - part.size(-1)
    return F.pad(part, (0, missing)) if missing else part
