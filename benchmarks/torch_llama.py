"""A Llama in plain torch, one of the peers that `gpu_peers.py` compares."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_setup import Llama

THETA = 500_000.0
EPSILON = 1e-5


class Attention(nn.Module):
    """Causal attention with grouped queries and rotary positions, ``[b, s, h]`` to the same."""

    def __init__(self, sizes: Llama) -> None:
        super().__init__()
        self.sizes = sizes
        h, d = sizes.hidden, sizes.head_size
        self.qkv = nn.Linear(h, (sizes.heads + 2 * sizes.groups) * d, bias=False)
        self.out = nn.Linear(sizes.heads * d, h, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        n, g, d = self.sizes.heads, self.sizes.groups, self.sizes.head_size
        heads = self.qkv(x).view(b, s, n + 2 * g, d).transpose(1, 2)
        q, k, v = heads.split([n, g, g], dim=1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=n != g)
        result: Tensor = self.out(out.transpose(1, 2).reshape(b, s, n * d))
        return result


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions by halves (arXiv:2104.09864), ``[b, n, s, d]``."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


class Layer(nn.Module):
    """A decoder layer, ``[b, s, h]`` to the same."""

    def __init__(self, sizes: Llama) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden, eps=EPSILON)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.RMSNorm(sizes.hidden, eps=EPSILON)
        self.gate_up = nn.Linear(sizes.hidden, 2 * sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        result: Tensor = x + self.down(F.silu(gate) * up)
        return result


class TorchLlama(nn.Module):
    """The model in plain torch: ids ``[b, s]`` to logits ``[b, s, v]``."""

    def __init__(self, sizes: Llama) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=EPSILON)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.frequencies: Tensor
        exponents = torch.arange(0, sizes.head_size, 2) / sizes.head_size
        self.register_buffer("frequencies", THETA**-exponents, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        angles = torch.outer(positions, self.frequencies)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        result: Tensor = self.head(self.norm(x))
        return result


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy in float32; logits ``[b, s, v]``, labels ``[b, s]``."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
