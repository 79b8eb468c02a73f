"""Processor time of a training step on one core, beside transformers and bare torch.

Every step is forward, backward, clipping and AdamW on the same ids in float32. All networks start
with the same weights, and their losses are compared. They take turns in one process, so that a
busy machine slows all of them. Bare torch is what a step costs without a framework: the loop of
nanoGPT with torch's own layers.

    python benchmarks/one_core.py
    python benchmarks/one_core.py --sizes "Llama 128" --rounds 9 --save

Flags after ``--`` go to pretrain_gpt.py, for ours.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_setup import (
    Llama,
    Results,
    add_result_flags,
    built_run,
    one_rank,
    parsed_with_flags,
    table_row,
)
from benchmarks.peers import LEARNING_RATE, Peer, of_module, parameters_of, step_of
from benchmarks.torch_llama import Layer, TorchLlama, token_loss
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.convert.training import write_run
from megatron_ext.train.run import Run

OURS, PEER, BARE = "ours", "transformers", "bare torch"
HEAD = (
    "size", "tokens", "parameters", f"{PEER} (s)", f"{OURS} (s)", f"{BARE} (s)",
    f"{OURS} / {PEER}", f"{OURS} / {BARE}", "loss, first and last",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """A network and the batch that it trains on.

    Attributes:
        sizes: those of a Llama.
        batch, length: sequences of a step, and tokens of a sequence.
        experts: experts of each layer, of which a token has two; 0 for a dense MLP.
    """

    sizes: Llama
    batch: int
    length: int = 128
    experts: int = 0

    @property
    def flags(self) -> list[str]:
        """Return the flags of pretrain_gpt.py."""
        words = self.sizes.flags(self.length, self.batch)
        words[words.index("--lr") + 1] = str(LEARNING_RATE)
        if self.experts:
            words += f"--num-experts {self.experts} --moe-router-topk 2".split()
            words += ["--moe-router-load-balancing-type", "none"]
        return words

    def data(self) -> tuple[Tensor, Tensor]:
        """Draw random ids ``[b, s]``, and those that follow them."""
        shape = self.batch, self.length + 1
        ids = torch.randint(self.sizes.vocab - 1, shape, generator=torch.Generator().manual_seed(0))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


SIZES = {
    "Llama 128": Size(Llama(4, 128, 344, 4, 4, 4096), 8),
    "Llama 512": Size(Llama(4, 512, 1376, 8, 8, 4096), 8),
    "Llama 1024": Size(Llama(4, 1024, 2752, 16, 16, 4096), 4),
    "MoE 128": Size(Llama(4, 128, 344, 4, 4, 4096), 8, experts=8),
    "MoE 512": Size(Llama(2, 512, 688, 8, 8, 4096), 4, experts=8),
}
"""The sizes by name: layers, hidden, ffn, heads, groups and vocabulary, then the batch."""


def hugging_face(run: Run, context: ParallelContext) -> Any:
    """Return transformers' network with the weights of a run."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder) / "model", run.config, run.chunks, context)
        model = AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", dtype=torch.float32, attn_implementation="sdpa"
        )
        # Its files are mapped into memory, and go with the folder.
        model.load_state_dict(
            {name: x.clone() for name, x in model.state_dict().items()}, assign=True
        )
    return model.train()


class Experts(nn.Module):
    """A mixture of experts in bare torch, which computes one expert after the other."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        h, f = size.sizes.hidden, size.sizes.ffn
        self.router = nn.Linear(h, size.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(size.experts, 2 * f, h))
        self.down = nn.Parameter(torch.empty(size.experts, h, f))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        best = self.router(tokens).topk(2)
        weights = best.values.softmax(-1)
        output = torch.zeros_like(tokens)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            rows, choices = torch.where(best.indices == expert)
            gate, up = F.linear(tokens[rows], gate_up).chunk(2, dim=-1)
            narrow = F.silu(gate) * up * weights[rows, choices].unsqueeze(-1)
            output.index_add_(0, rows, F.linear(narrow, down))
        return output.view_as(x)


class ExpertLayer(Layer):
    """A decoder layer with `Experts`."""

    def __init__(self, size: Size) -> None:
        super().__init__(size.sizes)
        del self.gate_up, self.down
        self.experts = Experts(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        result: Tensor = x + self.experts(self.mlp_norm(x))
        return result


@torch.no_grad()
def bare_torch(size: Size, weights_of: nn.Module) -> nn.Module:
    """Return the network in bare torch with the weights of transformers' network."""
    model = TorchLlama(size.sizes)
    if size.experts:
        model.layers = nn.ModuleList(ExpertLayer(size) for _ in model.layers)
    theirs = weights_of.state_dict()
    names = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    for name, parameter in model.named_parameters():
        if name.startswith("layers."):
            _, number, part = name.split(".", 2)
            sources = [theirs[f"model.layers.{number}.{source}"] for source in PARTS[part]]
        else:
            sources = [theirs[f"{names[name.split('.')[0]]}.weight"]]
        parameter.copy_(torch.cat(sources))
    return model


PARTS = {
    "attention_norm.weight": ["input_layernorm.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
    "attention.qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "attention.out.weight": ["self_attn.o_proj.weight"],
    "gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down.weight": ["mlp.down_proj.weight"],
    "experts.router.weight": ["mlp.gate.weight"],
    "experts.gate_up": ["mlp.experts.gate_up_proj"],
    "experts.down": ["mlp.experts.down_proj"],
}
"""Names of transformers' tensors, by the name of the tensor in a layer of bare torch."""


def peers_of(size: Size, context: ParallelContext, flags: Sequence[str]) -> dict[str, Peer]:
    """Return each network by its name."""
    device = torch.device("cpu")
    run = built_run([*size.flags, *flags], context, device)
    model = hugging_face(run, context)
    bare = bare_torch(size, model)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = model(
            input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False
        ).loss
        return loss

    def bare_loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return token_loss(bare(tokens), labels)

    return {
        PEER: of_module(model, loss_of, device, half=False, fused=True),
        OURS: Peer(step_of(run), parameters_of(run)),
        BARE: of_module(bare, bare_loss, device, half=False, fused=True),
    }


def measured(peers: dict[str, Peer], size: Size, args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the seconds of each network's steps, and the losses of its steps."""
    data = size.data()
    losses: dict[str, list[float]] = {name: [] for name in peers}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    orders = itertools.cycle(itertools.permutations(peers))
    for number in range(args.rounds + args.warm_up):
        for name in next(orders):
            start = time.process_time()
            losses[name] += [float(peers[name].step(*data)) for _ in range(args.steps)]
            if number >= args.warm_up:
                seconds[name].append((time.process_time() - start) / args.steps)
    return seconds, losses


def row(name: str, context: ParallelContext, args: argparse.Namespace) -> str:
    """Return the line of a size.

    Raises:
        SystemExit: the networks do not have the same losses.
    """
    size = SIZES[name]
    peers = peers_of(size, context, args.flags)
    gc.collect()
    seconds, losses = measured(peers, size, args)
    for peer, own in losses.items():
        for theirs, loss in zip(losses[PEER], own, strict=True):
            if abs(loss - theirs) > args.tolerance * theirs:
                raise SystemExit(f"error: {name}: {peer} has the losses {own}, not {losses[PEER]}")
    median = {peer: statistics.median(times) for peer, times in seconds.items()}

    def ratio(peer: str) -> str:
        pairs = zip(seconds[OURS], seconds[peer], strict=True)
        return f"{statistics.median(ours / theirs for ours, theirs in pairs):.3f}"

    return table_row(
        name,
        size.batch * size.length,
        f"{peers[PEER].parameters / 1e6:.1f} M",
        *(f"{median[peer]:.4f}" for peer in (PEER, OURS, BARE)),
        ratio(PEER),
        ratio(BARE),
        f"{losses[OURS][0]:.4f}, {losses[OURS][-1]:.4f}",
    )


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=9, help="turns, whose median counts")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--warm-up", type=int, default=2, help="turns before")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of losses, relative")
    add_result_flags(parser)
    return parsed_with_flags(parser, argv)


def main(argv: Sequence[str]) -> int:
    """Print the table, and write it where ``--out`` and ``--save`` say."""
    args = parsed(argv)
    results = Results("one_core", argv, args, HEAD)
    with one_rank() as context:
        for name in args.sizes:
            results.add(row(name, context, args))
            gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
