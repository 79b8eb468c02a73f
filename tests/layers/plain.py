"""Attention and transformer layers in plain single-process torch: the truth of these tests.

`fill` gives a megatron-core module the shards of weights that depend on nothing but their names,
so that every layout holds the same model.
"""

import math
import re
import zlib
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.parallel.context import ParallelContext


def attention(
    query: Tensor, key: Tensor, value: Tensor, forbidden: Tensor, scale: float | None = None
) -> Tensor:
    """Attend: ``[s, b, n, d]`` and twice ``[s, b, g, d]`` give ``[s, b, n * d]``."""
    repeats = query.size(2) // key.size(2)
    heads = [
        [
            torch.softmax(
                (
                    query[:, b, n] @ key[:, b, n // repeats].T * (scale or query.size(3) ** -0.5)
                ).masked_fill(forbidden[b], -math.inf),
                dim=-1,
            )
            @ value[:, b, n // repeats]
            for n in range(query.size(2))
        ]
        for b in range(query.size(1))
    ]
    return torch.stack([torch.cat(row, dim=-1) for row in heads], dim=1)


def causal(length: int, batch: int) -> Tensor:
    """Return ``[b, s, s]``, True at the future."""
    return torch.ones(length, length, dtype=torch.bool).triu(1).expand(batch, -1, -1)


def document_indices(length: int, ends: list[list[int]]) -> Tensor:
    """Return the index of each position's document, ``[b, s]`` int32; one begins at each end."""
    rows = torch.zeros(len(ends), length, dtype=torch.int32)
    for number, row in zip(rows, ends, strict=True):
        for end in row:
            number[end:] += 1
    return rows


def documents(length: int, ends: list[list[int]]) -> Tensor:
    """Return ``[b, s, s]``, True at the future and across documents that end before ``ends``."""
    document = document_indices(length, ends)
    return causal(length, len(ends)) | (document[:, :, None] != document[:, None, :])


def zigzag(tensor: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
    """Return the part of a sequence that a context-parallel rank holds."""
    chunks = tensor.chunk(2 * size, dim=dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=dim)


def drawn(*shape: int, seed: int = 3) -> Tensor:
    """Return normal numbers of a fixed seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def local(x: Tensor, context: ParallelContext, *, sequence_parallel: bool) -> Tensor:
    """Return this rank's part of ``[s, ...]``."""
    cp = context.pgs.cp
    tp = context.pgs.tp
    part = x if cp.size() == 1 else zigzag(x, cp.rank(), cp.size())
    return part.chunk(tp.size())[tp.rank()].clone() if sequence_parallel else part.clone()


def full_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a weight that follows from its name; norms are near one."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    is_gain = "norm" in name and name.endswith("weight")
    return 1 + 0.1 * values if is_gain else 0.3 * values


def global_name(name: str, context: ParallelContext, num_experts: int) -> str:
    local = num_experts // context.pgs.ep.size()
    first = context.pgs.ep.rank() * local
    return re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{first + int(m[1])}", name)


@dataclass(frozen=True)
class Shard:
    name: str
    shape: tuple[int, ...]
    dim: int
    rank: int
    size: int

    def of(self, full: Tensor) -> Tensor:
        return full.chunk(self.size, dim=self.dim)[self.rank]


def shard_of(name: str, parameter: Tensor, context: ParallelContext, num_experts: int = 0) -> Shard:
    """Read a parameter's place from the attributes that megatron-core gives it."""
    is_expert = "local_experts" in name
    group = context.pgs.expt_tp if is_expert else context.pgs.tp
    if is_expert:
        name = global_name(name, context, num_experts)
    shape = list(parameter.shape)
    dim = getattr(parameter, "partition_dim", -1)
    if not getattr(parameter, "tensor_model_parallel", False) or dim < 0:
        return Shard(name, tuple(shape), 0, 0, 1)
    shape[dim] *= group.size()
    return Shard(name, tuple(shape), dim, group.rank(), group.size())


def fill(module: torch.nn.Module, context: ParallelContext, num_experts: int = 0) -> None:
    """Give every parameter its part of `full_weight`."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            shard = shard_of(name, parameter, context, num_experts)
            parameter.copy_(shard.of(full_weight(shard.name, shard.shape)))


@dataclass
class PlainBlock:
    """A stack of pre-norm layers and a final norm, without tensor or any other parallelism.

    Attributes:
        topk: experts of each token in the layers that have them.
        weights: filled on first use, so that their gradients can be looked up by name.
    """

    hidden: int
    heads: int
    groups: int
    ffn: int
    layers: int
    rms: bool = True
    experts: int = 0
    topk: int = 2
    shared_ffn: int = 0
    dtype: torch.dtype = torch.float64
    weights: dict[str, Tensor] = field(default_factory=dict)

    def weight(self, name: str, *shape: int) -> Tensor:
        if name not in self.weights:
            # Rounded to single first: that is what the model under test holds.
            value = full_weight(name, shape).float().to(self.dtype)
            self.weights[name] = value.requires_grad_()
        return self.weights[name]

    def __call__(self, hidden: Tensor, forbidden: Tensor) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``."""
        for layer in range(self.layers):
            prefix = f"layers.{layer}."
            normed = self.norm(f"{prefix}input_layernorm", hidden)
            hidden = hidden + self.attend(f"{prefix}self_attention.", normed, forbidden)
            normed = self.norm(f"{prefix}pre_mlp_layernorm", hidden)
            mlp = self.moe if self.experts else self.mlp
            hidden = hidden + mlp(f"{prefix}mlp.", normed)
        return self.norm("final_layernorm", hidden)

    def norm(self, name: str, x: Tensor) -> Tensor:
        gain = self.weight(f"{name}.weight", self.hidden)
        if self.rms:
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return normed * gain + self.weight(f"{name}.bias", self.hidden)

    def attend(self, prefix: str, x: Tensor, forbidden: Tensor) -> Tensor:
        s, b, h = x.shape
        d, per_group = h // self.heads, self.heads // self.groups
        rows = self.groups * (per_group + 2) * d
        qkv = x @ self.weight(f"{prefix}linear_qkv.weight", rows, h).T
        qkv = qkv.view(s, b, self.groups, per_group + 2, d)
        query = qkv[:, :, :, :per_group].reshape(s, b, self.heads, d)
        context = attention(query, qkv[:, :, :, -2], qkv[:, :, :, -1], forbidden)
        return context @ self.weight(f"{prefix}linear_proj.weight", h, h).T

    def mlp(self, prefix: str, x: Tensor, ffn: int | None = None) -> Tensor:
        ffn = ffn or self.ffn
        inner = F.gelu(x @ self.weight(f"{prefix}linear_fc1.weight", ffn, self.hidden).T)
        return inner @ self.weight(f"{prefix}linear_fc2.weight", self.hidden, ffn).T

    def moe(self, prefix: str, x: Tensor) -> Tensor:
        logits = x @ self.weight(f"{prefix}router.weight", self.experts, self.hidden).T
        top, index = logits.topk(self.topk, dim=-1)
        share = torch.zeros_like(logits).scatter(-1, index, top.softmax(-1))
        output = torch.stack(
            [
                share[..., e : e + 1] * self.mlp(f"{prefix}experts.local_experts.{e}.", x)
                for e in range(self.experts)
            ]
        ).sum(0)
        if self.shared_ffn:
            output = output + self.mlp(f"{prefix}shared_experts.", x, self.shared_ffn)
        return output
