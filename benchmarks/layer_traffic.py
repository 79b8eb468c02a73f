"""Kernels and bytes of one layer's forward and backward pass, eager and compiled.

Runs anywhere, and times nothing: see `benchmarks.traffic` for what is counted. In the eager column
not even megatron-core's own functions are compiled. The unit is one hidden state ``[s, b, h]`` in
bfloat16. Where compiled code copies gradients of queries, keys and values (``copy_``, up to 6
units), a GPU does not: its attention gives them in the layout that it was given.

    python benchmarks/layer_traffic.py [--sequence 1024] [--micro-batch 1] [--hidden 1024]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.streaming_setup import one_rank, show, table_head, table_row
from benchmarks.traffic import KINDS, Traffic, compiled_traffic, eager_traffic
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.specs import torch_layer_spec
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.model.attention import frame_rotary_table as frame_table
from megatron_ext.video.model.attention import rotary_table
from megatron_ext.video.model.chunk import Blueprint
from megatron_ext.video.model.joint_blocks import DoubleBlock, JointOptions, SingleBlock
from megatron_ext.video.model.tokens import LocalTokens, TokenRange
from megatron_ext.video.model.window import FrameWindow
from megatron_ext.video.networks.wan.attention import AttentionPlan, VideoDiTOptions
from megatron_ext.video.networks.wan.blocks import Block, Conditioning, Run
from megatron_ext.video.networks.wan.config import VideoDiTSizes

Step = Callable[[], None]
DTYPE = torch.bfloat16
HEAD = 128
FRAMES = 4

LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
}
GPTS: dict[str, dict[str, Any]] = {
    "Llama": LLAMA,
    "Llama with QK norm (Qwen 3)": {**LLAMA, "qk_layernorm": True},
    "GPT, biases, GELU, dropout": {"hidden_dropout": 0.1},
}


class Sdpa(DotProductAttention):
    """Attention as on a GPU: one kernel, in half precision too."""

    def _follows_core(self, query: Tensor) -> bool:
        return False


def training_step(block: torch.nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Step:
    """Run one forward and backward pass of a block."""
    block.to(device=hidden.device, dtype=DTYPE).train()
    upstream = torch.randn_like(hidden)

    def step() -> None:
        block.zero_grad(set_to_none=True)
        x = hidden.detach().requires_grad_()
        out = block(x, *args, **kwargs)
        (out[0] if isinstance(out, tuple) else out).backward(upstream)

    return step


def gpt_step(context: ParallelContext, changes: dict[str, Any], hidden: Tensor) -> Step:
    """Build a layer of a GPT: rotary positions, a key for every four queries."""
    s, _, h = hidden.shape
    gated = changes.get("gated_linear_unit", False)
    config = StepTransformerConfig(
        num_layers=1,
        hidden_size=h,
        ffn_hidden_size=int(3.5 * h) if gated else 4 * h,
        num_attention_heads=h // HEAD,
        num_query_groups=max(1, h // HEAD // 4),
        attention_dropout=0.0,
        params_dtype=DTYPE,
        bf16=True,
        bias_dropout_fusion=True,
        **changes,
    )
    spec = torch_layer_spec(config, "*-")
    layer = build_module(spec, config=config, layer_number=1, pg_collection=context.pgs)
    layer.self_attention.core_attention.__class__ = Sdpa
    angles = torch.randn(s, 1, 1, HEAD // 2).repeat(1, 1, 1, 2)
    return training_step(layer, hidden, attention_mask=None, rotary_pos_emb=angles)


def mmdit_step(context: ParallelContext, kind: type, hidden: Tensor) -> Step:
    """Build a block of an MMDiT, an eighth of whose tokens are text."""
    s, b, h = hidden.shape
    sizes = JointSizes(h, h // HEAD, (16, 56, 56), 1, 1)
    config = StepTransformerConfig(**sizes.transformer_fields(), params_dtype=DTYPE, bf16=True)
    block = kind(Blueprint(config, sizes, JointOptions(), context.pgs))
    tokens = TokenRange.whole(s // 8, s - s // 8)
    table = rotary_table(torch.randint(0, 32, (b, s, 3)), sizes.axes_dim, HEAD, 1e4)
    vec = torch.randn(b, h, dtype=DTYPE, requires_grad=True)
    return training_step(block, hidden, vec, table, LocalTokens(tokens, tokens))


def video_block(
    context: ParallelContext,
    sizes: VideoDiTSizes,
    hidden: Tensor,
    num_frames: int,
    window: FrameWindow | None = None,
) -> tuple[Block, Conditioning, Run]:
    """Build a block of the video DiT, and what it gets beside ``hidden``.

    Each frame has a timestep of its own; there is a token of text for eight of the video. Frames
    see each other or, with a window, those before them.
    """
    s, b, h = hidden.shape
    config = StepTransformerConfig(**sizes.transformer_fields(), params_dtype=DTYPE, bf16=True)
    block = Block(Blueprint(config, sizes, VideoDiTOptions(window), context.pgs), 0)
    positions = torch.randint(0, 32, (num_frames, s // num_frames, 3), device=hidden.device)
    table = frame_table(positions, sizes.axes_dim, 1e4, DTYPE)
    plan = AttentionPlan.bidirectional(num_frames)
    if window is not None:
        plan = AttentionPlan.causal(window, 0, num_frames, ())
    modulation = hidden.new_empty(num_frames, b, 6 * h).normal_().requires_grad_()
    text = hidden.new_empty(s // 8, b, h).normal_()
    run = Run(num_frames, 1, table, plan, None, None)
    return block, Conditioning(modulation, modulation, text), run


def video_step(context: ParallelContext, hidden: Tensor) -> Step:
    """Build a block of the video DiT with four frames."""
    h = hidden.size(-1)
    sizes = VideoDiTSizes(h, h // HEAD, 4 * h, 1)
    block, *given = video_block(context, sizes, hidden, FRAMES)
    return training_step(block, hidden, *given)


def steps(context: ParallelContext, hidden: Tensor) -> Iterator[tuple[str, Step]]:
    """Return every kind of layer by name."""
    for name, changes in GPTS.items():
        yield name, gpt_step(context, changes, hidden)
    yield "MMDiT, double block", mmdit_step(context, DoubleBlock, hidden)
    yield "MMDiT, single block", mmdit_step(context, SingleBlock, hidden)
    yield "video DiT block", video_step(context, hidden)


def row(name: str, unit: int, eager: Traffic, compiled: Traffic) -> str:
    """Return a line of the table."""
    cells = [
        f"{traffic.count(kind)}: {traffic.num_bytes(kind) / unit:.1f}"
        for kind in KINDS
        for traffic in (eager, compiled)
    ]
    ratio = compiled.num_bytes("pointwise") / eager.num_bytes("pointwise")
    return table_row(name, *cells, f"{ratio:.2f}")


def details(traffic: Traffic, unit: int) -> list[str]:
    """Return every pointwise kernel of a layer."""
    return [
        f"    {kernel.num_bytes / unit:6.2f}  {kernel.name}"
        for kernel in traffic.kernels
        if kernel.kind == "pointwise"
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequence", type=int, default=1024, help="tokens s")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences b")
    parser.add_argument("--hidden", type=int, default=1024, help="width h, a multiple of 512")
    parser.add_argument("--details", action="store_true", help="list the pointwise kernels")
    args = parser.parse_args(argv)
    heads = [f"{kind}, {which}" for kind in KINDS for which in ("eager", "compiled")]
    show(["Kernels: bytes read and written, in hidden states; forward and backward.", ""])
    show(table_head("layer", *heads, "pointwise bytes, compiled / eager"))
    with one_rank() as context:
        hidden = torch.randn(args.sequence, args.micro_batch, args.hidden, dtype=DTYPE)
        unit = hidden.numel() * hidden.element_size()
        for name, step in steps(context, hidden):
            eager, compiled = eager_traffic(step), compiled_traffic(step)
            show([row(name, unit, eager, compiled)])
            if args.details:
                show(["eager", *details(eager, unit), "compiled", *details(compiled, unit)])


if __name__ == "__main__":
    main()
