"""The same Llama trained by this project and by others, one after the other in one process.

Every step is forward, backward, clipping and AdamW on the same ids. MFU is the share of the matrix
rate that is measured in this same run. The peers are in `peers.py`, which says how each computes;
ours comes last, so that it can be held against the best of them.

Target G1: ours reaches an MFU of 60% and 1.10 times the tokens per second of the best peer.

    python benchmarks/gpu_peers.py --size 3b --seq-length 4096 --out out/peers.md
    python benchmarks/gpu_peers.py --device cpu --tiny

With ``--speeds FILE`` peers can be measured in calls of their own: each adds its tokens per second
to the file, and ours is held against all that are in it.

Flags after ``--`` go to pretrain_gpt.py, for ours.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from benchmarks.gpu_setup import (
    LLAMAS,
    Llama,
    Results,
    add_device_flags,
    ceiling,
    device_of,
    freed,
    one_rank,
    outcome_of,
    parsed_with_flags,
    peak_memory,
    table_row,
)
from benchmarks.peers import OURS, PEERS, Place, version_of_peer
from benchmarks.targets import MFU, OVER_PEERS, verdict
from megatron_ext.device.rates import seconds_of
from megatron_ext.errors import MegatronExtError

HEAD = (
    "step of", "version", "parameters", "ms", "tokens/s", "TFLOP/s", "MFU of measured",
    "of datasheet", "peak memory (GiB)", "loss, first and last", "verdict",
)  # fmt: skip


def make_data(sizes: Llama, length: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw random ids ``[b, s]``, and those that follow them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes.vocab - 1, (batch, length + 1), generator=generator).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Comparison:
    """Measures peers one after the other, and remembers their speed.

    Args:
        args: the flags.
        place: device and sizes of all peers.
    """

    def __init__(self, args: argparse.Namespace, place: Place) -> None:
        self.args, self.place, self.sizes = args, place, LLAMAS[args.size]
        self._tokens: dict[str, float] = {}
        if args.speeds is not None and args.speeds.is_file():
            self._tokens.update(json.loads(args.speeds.read_text(encoding="utf-8")))

    def _remember(self, name: str, tokens: float) -> None:
        """Keep a peer's tokens per second, in the file of ``--speeds`` too."""
        self._tokens[name] = tokens
        if self.args.speeds is not None:
            self.args.speeds.parent.mkdir(parents=True, exist_ok=True)
            self.args.speeds.write_text(json.dumps(self._tokens), encoding="utf-8")

    def row(self, name: str) -> str:
        """Return the line of a peer."""
        version = version_of_peer(name)
        if version is None:
            return table_row(name, "not installed")

        def cells() -> list[str]:
            try:
                return self._measured(name)
            except (MegatronExtError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                # Of a version that this script does not know, for one; ours must not fail.
                if name == OURS:
                    raise
                said = str(error).strip().splitlines()
                return [f"failed: {type(error).__name__}: {said[0] if said else ''}"]

        with freed(self.place.device):
            return table_row(name, version, *outcome_of(cells))

    def _measured(self, name: str) -> list[str]:
        """Return the cells of a peer after its name and version."""
        place, args = self.place, self.args
        peer = PEERS[name](self.sizes, place)
        data = make_data(self.sizes, place.length, place.batch, place.device)
        first = float(peer.step(*data))
        seconds = seconds_of(
            lambda: peer.step(*data), place.device, repeats=args.repeats, warm_ups=args.warm_up
        )
        tokens = place.batch * place.length / seconds
        self._remember(name, tokens)
        flops = tokens * self.sizes.flops_per_token(place.length)
        top = ceiling(place.device, torch.bfloat16, tiny=args.tiny)
        return [
            f"{peer.parameters:,}",
            f"{1e3 * seconds:.1f}",
            f"{tokens:,.0f}",
            f"{flops / 1e12:.4g}",
            *top.shares(flops),
            peak_memory(place.device),
            f"{first:.3f}, {float(peer.step(*data)):.3f}",
            self._verdict(name, flops / top.measured),
        ]

    def _verdict(self, name: str, mfu: float) -> str:
        if name != OURS:
            return "no target"
        best = max((speed for peer, speed in self._tokens.items() if peer != OURS), default=None)
        ratio = None if best is None else self._tokens[OURS] / best
        return verdict(self.args, [(MFU, mfu), (OVER_PEERS, ratio)])


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=tuple(LLAMAS), default="3b")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=15, help="steps, whose median counts")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before, which compile")
    parser.add_argument("--speeds", type=Path, help="file of peers' speeds, to read and add to")
    parser.add_argument("--no-compile", action="store_true", help="leave the peers uncompiled")
    add_device_flags(parser)
    args = parsed_with_flags(parser, argv)
    if args.tiny:
        args.size, args.seq_length, args.batch = "tiny", 32, 2
        args.repeats, args.warm_up, args.no_compile = 2, 1, True
    return args


def main(argv: Sequence[str]) -> int:
    """Print the table, and write it where ``--out`` and ``--save`` say."""
    args = parsed(argv)
    device = device_of(args)
    results = Results("gpu_peers", argv, args, HEAD)
    with one_rank() as context:
        place = Place(context, device, not args.no_compile, args.seq_length, args.batch, args.flags)
        comparison = Comparison(args, place)
        for name in sorted(args.peers, key=lambda peer: peer == OURS):
            results.add(comparison.row(name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
