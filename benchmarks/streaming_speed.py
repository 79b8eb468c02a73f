"""Time of a frame block early and late in a long video, and a check of its frames.

The causal video DiT generates a video block by block with the rolling cache, all denoising steps
and the write-back of each block. The cache is kept every ten blocks, and generation goes on from
all these places in turn, one block at each, so that a busy machine slows all of them alike. The
ratio is the median time of the last ten blocks over that of the first ten. A second window, which
holds the whole video, shows how time grows if nothing is dropped.

Then the flow of each pass through the cache is compared with that of one forward pass over the
frames so far under the mask, without a cache: of every write-back, and of every tenth block's last
denoising step. The largest difference is given relative to the largest flow. To see that the past
matters at all, the last number is that of the same step without its past.

    python benchmarks/streaming_speed.py [--blocks 60] [--rounds 4] [--windows 12 180] [--save]
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.rollout import Generator

BLOCK, SINK, TEXT_LENGTH = 3, 3, 8


@dataclass(frozen=True)
class Pass:
    """A block's pass: inputs ``x`` and ``flow`` [b, block, c, h, w], ``timesteps`` [b, block]."""

    x: Tensor
    timesteps: Tensor
    flow: Tensor


@dataclass
class Observed:
    """A causal network that keeps its newest pass over each block, read-only and written back."""

    network: VideoDiT
    steps: dict[int, Pass] = field(default_factory=dict)
    written: dict[int, Pass] = field(default_factory=dict)

    def __call__(
        self,
        *,
        x: Tensor,
        timesteps: Tensor,
        text: Tensor,
        cache: Any = None,
        first_frame: int = 0,
        update_cache: bool = True,
    ) -> Tensor:
        """Call the network, and keep the pass."""
        flow = self.network(
            x=x,
            timesteps=timesteps,
            text=text,
            cache=cache,
            first_frame=first_frame,
            update_cache=update_cache,
        )
        passes = self.written if update_cache else self.steps
        passes[first_frame] = Pass(x, timesteps, flow)
        return flow


class Video:
    """A video that grows block by block.

    Args:
        network: causal.
        height: and width of the latents.
    """

    def __init__(self, network: VideoDiT, height: int) -> None:
        sizes, weight = network.sizes, next(network.parameters()).detach()
        self.observed = Observed(network)
        self.cache: KVCache = network.new_cache(1, height, height)
        self.text = decisions.noise(
            SEED, range(1), (TEXT_LENGTH, sizes.text_width), "prompt", like=weight
        )
        self.noise = functools.partial(
            decisions.block_noise,
            SEED,
            range(1),
            (BLOCK, sizes.channels, height, height),
            like=weight,
        )
        self.schedule = NoiseSchedule(StreamingConfig())

    def grow(self, *, observed: bool = False) -> float:
        """Generate the next block with all denoising steps; return the seconds that it took."""
        network = self.observed if observed else self.observed.network
        generator = Generator(network, self.cache, self.schedule)
        last = len(self.schedule.denoising_timesteps) - 1
        synchronize()
        start = time.perf_counter()
        generator.generate(self.cache.end, self.text, self.noise, exit_step=last, graph=False)
        synchronize()
        return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Differences:
    """Differences between the cache and the mask, and between the mask and no past at all."""

    written: float
    steps: float
    without_past: float


@torch.no_grad()
def differences(video: Video, every: int) -> Differences:
    """Return the differences for a video all of whose blocks were observed."""
    network, written, steps = video.observed.network, video.observed.written, video.observed.steps
    starts = sorted(written)
    context = [written[start] for start in starts]

    def dense(passes: Sequence[Pass]) -> Tensor:
        x, t = (torch.cat([getattr(p, n) for p in passes], dim=1) for n in ("x", "timesteps"))
        return network(x=x, timesteps=t, text=video.text)  # type: ignore[no-any-return]

    of_steps = []
    for number in range(every - 1, len(starts), every):
        step = steps[starts[number]]
        want = dense([*context[:number], step])[:, -BLOCK:]
        of_steps.append(relative(step.flow, want))
    return Differences(
        written=relative(torch.cat([p.flow for p in context], dim=1), dense(context)),
        steps=max(of_steps),
        without_past=relative(dense([step]), want),
    )


def relative(a: Tensor, b: Tensor) -> float:
    """Return the largest difference over the largest entry of ``b``."""
    return float((a - b).abs().max() / b.abs().max())


@dataclass(frozen=True)
class Found:
    """The result of a window: seconds by a stretch's first block, and the error of the frames."""

    times: Mapping[int, list[list[float]]]
    differences: Differences

    def median(self, start: int) -> float:
        """Return the median of all rounds, in seconds."""
        return statistics.median(x for times in self.times[start] for x in times)

    @property
    def ratios(self) -> list[float]:
        """Return the last stretch over the first, for each round."""
        first, last = self.times[min(self.times)], self.times[max(self.times)]
        return [
            statistics.median(b) / statistics.median(a) for a, b in zip(first, last, strict=True)
        ]

    @property
    def ratio(self) -> float:
        """Return the last stretch over the first, of all rounds."""
        return self.median(max(self.times)) / self.median(min(self.times))


def measure(
    context: ParallelContext,
    sizes: VideoDiTSizes,
    window: int,
    *,
    blocks: int,
    stretch: int,
    rounds: int,
    height: int,
) -> Found:
    """Generate a video once for the check, and its stretches but the first again for the times."""
    options = VideoDiTOptions(window=FrameWindow(BLOCK, window, SINK), zero_head=False)
    network = build_network(context, sizes, options, deviation=0.1)
    video, kept = Video(network, height), {}
    for number in range(blocks):
        if number and number % stretch == 0:
            kept[number] = copy.deepcopy(video.cache.state_dict())
        video.grow(observed=True)
    places = {start: Video(network, height) for start in kept}
    times: dict[int, list[list[float]]] = {start: [] for start in kept}
    for _ in range(rounds):
        for start, place in places.items():
            place.cache.load_state_dict(copy.deepcopy(kept[start]))
            times[start].append([])
        for turn in range(stretch):
            order = list(places) if turn % 2 else list(reversed(places))
            for start in order:
                times[start][-1].append(places[start].grow())
    return Found(times, differences(video, stretch))


def rows(window: int, found: Found, stretch: int) -> list[str]:
    """Return the lines of a window."""
    return [
        table_row(
            window,
            f"{start} to {start + stretch}",
            f"{1e3 * found.median(start):.2f}",
            f"{1e3 * min(min(times) for times in found.times[start]):.2f}",
            f"{BLOCK / found.median(start):.1f}",
        )
        for start in found.times
    ]


def summary(window: int, found: Found) -> list[str]:
    """Describe a window in a few words."""
    d = found.differences
    return [
        f"Window of {window} frames: last over first stretch {found.ratio:.3f} (by round "
        f"{min(found.ratios):.3f} to {max(found.ratios):.3f}). Largest relative difference to the "
        f"masked forward: {max(d.written, d.steps):.1e} (write-backs {d.written:.1e}, denoising "
        f"steps {d.steps:.1e}); without its past a step differs by {d.without_past:.1e}."
    ]


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--windows", type=int, nargs="+", default=[12, 180], help="frames")
    parser.add_argument("--blocks", type=int, default=60, help="frame blocks of the video")
    parser.add_argument("--stretch", type=int, default=10, help="blocks that are timed together")
    parser.add_argument("--rounds", type=int, default=4, help="times that stretches are timed")
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--height", type=int, default=16, help="and width of the latents")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args(argv)
    if args.blocks % args.stretch or args.blocks < 3 * args.stretch:
        parser.error(f"--blocks ({args.blocks}) must be 3 or more stretches of {args.stretch}")
    return args


def main(argv: list[str]) -> int:
    """Print the table; with --save also write it beside this script."""
    args = parsed(argv)
    cells = ("window", "blocks", "ms per block, median", "fastest", "latent frames/s")
    lines, words = [*heading("streaming_speed", argv), *table_head(*cells)], []
    show(lines)
    with one_rank() as context:
        for window in args.windows:
            found = measure(
                context,
                SIZES[args.size],
                window,
                blocks=args.blocks,
                stretch=args.stretch,
                rounds=args.rounds,
                height=args.height,
            )
            new = rows(window, found, args.stretch)
            show(new)
            lines += new
            words += ["", *summary(window, found)]
    show(words)
    if args.save:
        saved_as("streaming_speed", ".md").write_text("\n".join([*lines, *words]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
