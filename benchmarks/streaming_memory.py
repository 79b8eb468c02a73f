"""Activations of a two-phase rollout beside those of a rollout in one graph.

The causal video DiT extends a sequence by a clip and takes the gradient of the distribution
matching loss, once in two phases, where each block's exit step is run again and its backward pass
follows at once, and once with all exit steps in one graph. What autograd keeps for backward passes
is counted while it is kept, each block of memory once, parameters not. Before the clip the window
is full, so that all blocks see as many frames.

Three more columns: what two phases keep for each block (the input of its exit step), the cache,
which is the same for both, and the largest difference between the two gradients, relative to the
largest entry of each parameter's gradient.

    python benchmarks/streaming_memory.py [--blocks 3 6 12] [--size tiny] [--save]
"""

from __future__ import annotations

import argparse
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from benchmarks.streaming_setup import (
    SEED,
    build_network,
    heading,
    one_rank,
    saved_as,
    show,
    table_head,
    table_row,
)
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.cache import KVCache
from megatron_ext.video.model.window import FrameWindow
from megatron_ext.video.networks.wan.attention import VideoDiTOptions
from megatron_ext.video.networks.wan.config import SIZES, VideoDiTSizes
from megatron_ext.video.networks.wan.model import VideoDiT
from megatron_ext.video.streaming import decisions
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.loss import dmd_loss, generator_losses
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.rollout import Generator, StreamClip
from megatron_ext.video.streaming.sequence import Prompts, Replica, StreamingSequence

WINDOW = FrameWindow(block=3, window=12, sink=3)
TEXT_LENGTH = 8


class _Kept:
    """A tensor that autograd keeps; without its graph, which would keep itself alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class SavedTensors:
    """Bytes that autograd keeps for backward passes.

    Args:
        ignored: tensors whose memory is there anyway.

    Attributes:
        live: bytes kept now, each block of memory counted once.
        peak: most bytes that were kept at a time.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        self._ignored = {x.untyped_storage().data_ptr() for x in ignored}
        self._holders: Counter[int] = Counter()
        self.live = self.peak = 0

    def hooks(self) -> AbstractContextManager[object]:
        """Count what is saved inside."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept, storage = _Kept(tensor), tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if size and place not in self._ignored:
            self._holders[place] += 1
            self.live += size if self._holders[place] == 1 else 0
            self.peak = max(self.peak, self.live)
            weakref.finalize(kept, self._release, place, size).atexit = False
        return kept

    def _release(self, place: int, size: int) -> None:
        self._holders[place] -= 1
        self.live -= size if self._holders[place] == 0 else 0


@dataclass(frozen=True)
class Found:
    """The cost of a rollout and its backward pass.

    Attributes:
        peak: bytes of activations.
        exit_inputs: bytes kept from the first phase for the second; 0 in one graph.
        cache: bytes of keys and values.
        gradients: by parameter.
    """

    peak: int
    exit_inputs: int
    cache: int
    gradients: dict[str, Tensor]


def measure(
    context: ParallelContext,
    num_blocks: int,
    *,
    two_phase: bool,
    sizes: VideoDiTSizes,
    height: int = 16,
) -> Found:
    """Generate a clip of so many frame blocks and take the gradient of its loss."""
    options = VideoDiTOptions(window=WINDOW, zero_head=False)
    network = build_network(context, sizes, options, deviation=0.1)
    sequence = sequence_of(network, WINDOW.block * num_blocks, two_phase=two_phase, height=height)
    while sequence.state is None or sequence.state.current_length < WINDOW.window - WINDOW.block:
        sequence.next_clip(trains_generator=False)
    saved = SavedTensors(network.parameters())
    with saved.hooks():
        clip = sequence.next_clip(trains_generator=True)
        backward(clip, sequence)
    cache = sequence.generator.cache
    assert isinstance(cache, KVCache)
    return Found(
        peak=saved.peak,
        exit_inputs=sum(block.x.nbytes for block in clip.blocks),
        cache=cache.num_bytes,
        gradients={n: p.grad for n, p in network.named_parameters() if p.grad is not None},
    )


def sequence_of(
    network: VideoDiT, frames: int, *, two_phase: bool, height: int
) -> StreamingSequence:
    """Return a sequence that grows by so many frames a clip, long enough to fill the window."""
    sizes, weight = network.sizes, next(network.parameters())
    streaming = StreamingConfig(
        frame_block=WINDOW.block,
        chunk_frames=frames,
        min_new_frames=frames,
        max_new_frames=frames,
        sequence_lengths=(WINDOW.window + 2 * frames,),
        recache_frames=WINDOW.block,
        two_phase=two_phase,
    )

    def prompts(samples: Sequence[int]) -> Prompts:
        shape = (TEXT_LENGTH, sizes.text_width)
        return Prompts(decisions.noise(SEED, samples, shape, "prompt", like=weight.detach()))

    cache = network.new_cache(1, height, height, chunk_frames=frames)
    return StreamingSequence(
        streaming,
        Generator(network, cache, NoiseSchedule(streaming)),
        prompts=prompts,
        replica=Replica(SEED),
        like=weight.new_empty(0, 0, sizes.channels, height, height),
    )


def backward(clip: StreamClip, sequence: StreamingSequence) -> None:
    """Run the backward pass with some direction D; its numbers do not change what is kept."""
    latents = clip.latents
    shape = latents.shape[1:]
    direction = decisions.noise(SEED, clip.samples, shape, "direction", like=latents.detach())
    count = clip.mask.sum()
    if sequence.streaming.two_phase:
        for total, _, _ in generator_losses(clip, direction, sequence.generator):
            (total / count).backward()
    else:
        (dmd_loss(latents, direction=direction, mask=clip.mask)[0] / count).backward()


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest difference of gradients, relative to the largest entry in ``b``."""
    if a.keys() != b.keys():
        raise SystemExit(f"only one of the two has gradients of {sorted(a.keys() ^ b.keys())}")
    return max(float((a[n] - b[n]).abs().max() / b[n].abs().max()) for n in b)


HEAD = (
    "frame blocks",
    "one graph (MB)",
    "two phases (MB)",
    "ratio",
    "exit inputs (MB)",
    "cache (MB)",
    "gradients differ by",
)


def row(num_blocks: int, whole: Found, phases: Found) -> str:
    """Return one line of the table."""
    return table_row(
        num_blocks,
        f"{whole.peak / 1e6:.3f}",
        f"{phases.peak / 1e6:.3f}",
        f"{whole.peak / phases.peak:.2f}",
        f"{phases.exit_inputs / 1e6:.3f}",
        f"{phases.cache / 1e6:.3f}",
        f"{difference(phases.gradients, whole.gradients):.1e}",
    )


def main(argv: list[str]) -> int:
    """Print the table; with --save also write it beside this script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, nargs="+", default=[3, 6, 12])
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--height", type=int, default=16, help="and width of the latents")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args(argv)
    lines = [*heading("streaming_memory", argv), *table_head(*HEAD)]
    show(lines)
    peaks = []
    with one_rank() as context:
        for blocks in args.blocks:
            whole, phases = (
                measure(context, blocks, two_phase=x, sizes=SIZES[args.size], height=args.height)
                for x in (False, True)
            )
            peaks.append((whole.peak, phases.peak))
            lines.append(row(blocks, whole, phases))
            show(lines[-1:])
    (whole_first, phases_first), (whole_last, phases_last) = peaks[0], peaks[-1]
    lines += [
        "",
        f"From {args.blocks[0]} to {args.blocks[-1]} frame blocks ({args.size}, latents of "
        f"{args.height} x {args.height}): one graph x {whole_last / whole_first:.3f}, "
        f"two phases x {phases_last / phases_first:.3f}.",
    ]
    show(lines[-2:])
    if args.save:
        saved_as("streaming_memory", ".md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
