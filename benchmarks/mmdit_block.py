"""One block of a video transformer (MMDiT) on one GPU: forward and backward at long sequences.

Both kinds of block of `video.model.joint_blocks` at the width of Open-Sora 2.0's 11b, for one clip
of so many video tokens and its text. FLOP are those of the matrix products, all pairs of tokens are
counted; recomputation, of which there is none, would not count. MFU is the share of the
matrix rate that is measured in this same run.

Target G5: an MFU of 55% at 8 k and 76 k video tokens.

    python benchmarks/mmdit_block.py --out out/mmdit_block.md
    python benchmarks/mmdit_block.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from benchmarks.gpu_setup import (
    Results,
    add_device_flags,
    ceiling,
    device_of,
    freed,
    one_rank,
    outcome_of,
    peak_memory,
    table_row,
)
from benchmarks.targets import VIDEO_MFU, verdict
from megatron_ext.device.rates import seconds_of
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.planning.products import FORWARD_AND_BACKWARD, MULTIPLY_AND_ADD
from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.model.attention import rotary_table
from megatron_ext.video.model.chunk import Blueprint
from megatron_ext.video.model.joint_blocks import DoubleBlock, JointOptions, SingleBlock
from megatron_ext.video.model.tokens import LocalTokens, TokenRange
from megatron_ext.video.networks.mmdit.config import SIZES

BLOCKS = {"double": DoubleBlock, "single": SingleBlock}
MODULATIONS = {"double": 12, "single": 3}
VIDEO_TOKENS = (8192, 76_800)
TEXT_TOKENS = 512
ROW_TOKENS = 64
"""Tokens of a row of a frame; only the rotary angles depend on it."""
HEAD = (
    "block", "hidden", "video tokens", "text tokens", "ms", "tokens/s", "TFLOP/s",
    "MFU of measured", "of datasheet", "peak memory (GiB)", "verdict",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kind of block, its sizes, and the tokens of a clip."""

    kind: str
    sizes: JointSizes
    num_image: int
    num_text: int

    @property
    def num_tokens(self) -> int:
        return self.num_text + self.num_image

    @property
    def flops(self) -> float:
        """Count a forward and a backward pass as `flops_of_clip` does, without the embedders."""
        h, m, s = self.sizes.hidden_size, self.sizes.mlp_size, self.num_tokens
        products = s * (4 * h * h + 2 * h * m + 2 * s * h) + MODULATIONS[self.kind] * h * h
        return float(FORWARD_AND_BACKWARD * MULTIPLY_AND_ADD * products)


def build(case: Case, context: ParallelContext, device: torch.device) -> torch.nn.Module:
    """Build the block in bfloat16, its weights drawn on the device."""
    config = StepTransformerConfig(
        **case.sizes.transformer_fields(), params_dtype=torch.bfloat16, bf16=True
    )
    block = BLOCKS[case.kind](Blueprint(config, case.sizes, JointOptions(), context.pgs))
    block = block.to(device=device, dtype=torch.bfloat16)
    torch.manual_seed(0)
    for parameter in block.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return block


def work_of(case: Case, context: ParallelContext, device: torch.device) -> Callable[[], Tensor]:
    """Run forward and backward of one clip; return the output ``[s, 1, h]``."""
    block, sizes = build(case, context, device), case.sizes
    like = {"device": device, "dtype": torch.bfloat16}
    hidden = torch.randn(case.num_tokens, 1, sizes.hidden_size, **like).requires_grad_()  # type: ignore[arg-type]
    vec = torch.randn(1, sizes.hidden_size, **like).requires_grad_()  # type: ignore[arg-type]
    gradient = torch.randn_like(hidden)
    numbers = torch.arange(case.num_image, device=device)
    frame, rest = numbers // ROW_TOKENS**2, numbers % ROW_TOKENS**2
    video = torch.stack([frame, rest // ROW_TOKENS, rest % ROW_TOKENS], dim=-1)
    ids = torch.cat([torch.zeros(case.num_text, 3, device=device, dtype=video.dtype), video])
    table = rotary_table(ids[None], sizes.axes_dim, sizes.head_dim, sizes.rope_theta)
    whole = TokenRange.whole(case.num_text, case.num_image)
    leaves = [hidden, vec, *block.parameters()]

    def work() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        out: Tensor = block(hidden, vec, table, LocalTokens(whole, whole))
        out.backward(gradient)  # type: ignore[no-untyped-call]
        return out.detach()

    return work


def measure(
    case: Case, context: ParallelContext, device: torch.device, args: argparse.Namespace
) -> list[str]:
    """Return the cells of a case after its names."""
    work = work_of(case, context, device)
    seconds = seconds_of(work, device, repeats=args.repeats, warm_ups=min(3, args.repeats))
    flops = case.flops / seconds
    top = ceiling(device, torch.bfloat16, tiny=args.tiny)
    return [
        f"{1e3 * seconds:.2f}",
        f"{case.num_tokens / seconds:,.0f}",
        f"{flops / 1e12:.4g}",
        *top.shares(flops),
        peak_memory(device),
        verdict(args, [(VIDEO_MFU, flops / top.measured)]),
    ]


def main(argv: Sequence[str]) -> int:
    """Print the table, and write it where ``--out`` and ``--save`` say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=tuple(SIZES), default="11b")
    parser.add_argument("--video-tokens", type=int, nargs="+", default=list(VIDEO_TOKENS))
    parser.add_argument("--text-tokens", type=int, default=TEXT_TOKENS)
    parser.add_argument("--repeats", type=int, default=10, help="whose median counts")
    add_device_flags(parser)
    args = parser.parse_args(argv)
    if args.tiny:
        args.size, args.video_tokens, args.text_tokens, args.repeats = "tiny", [64], 8, 2
    device, sizes = device_of(args), SIZES[args.size]
    results = Results("mmdit_block", argv, args, HEAD)
    with one_rank() as context:
        for tokens in args.video_tokens:
            for kind in BLOCKS:
                case = Case(kind, sizes, tokens, args.text_tokens)

                def cells(case: Case = case) -> list[str]:
                    return measure(case, context, device, args)

                with freed(device):
                    names = kind, sizes.hidden_size, tokens, args.text_tokens
                    results.add(table_row(*names, *outcome_of(cells)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
