"""The video DiT in plain torch on one process, after Wan and LongLive: the truth of these tests.

Nothing of the package is used but the sizes. Attention is dense, under a mask that the formula of
the window gives, frame by frame.
"""

import math
import re

import torch
from torch import Tensor, nn

from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.networks.wan.config import VideoDiTSizes
from tests.video.networks.mmdit.plain import PlainMMDiT, Rms, gelu, norm, turn

Rule = tuple[int, ...]
"""Frame block, window and sink, and perhaps 1 if the first frame is a block of its own."""


def blocks_of(frames: Tensor, rule: Rule) -> Tensor:
    """Return the number of each frame's block."""
    block, _, _, *alone = rule
    return (frames + (block - 1 if any(alone) else 0)) // block


def frame_mask(frames: range, rule: Rule | None) -> Tensor:
    if rule is None:
        return torch.ones(len(frames), len(frames), dtype=torch.bool)
    _, window, sink, *_ = rule
    rows = []
    every = torch.arange(frames.stop + rule[0])
    numbers = blocks_of(every, rule)
    for query in frames:
        end = 1 + int(every[numbers == numbers[query]].max())
        first = max(sink, end - (window - sink))
        rows.append([k < min(sink, end) or first <= k < end for k in frames])
    return torch.tensor(rows)


def sinusoid(t: Tensor) -> Tensor:
    frequencies = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float64) / 128)
    angles = t.double()[..., None] * frequencies
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


class Attention(nn.Module):
    def __init__(self, z: VideoDiTSizes) -> None:
        super().__init__()
        h = z.hidden_size
        self.z = z
        self.q, self.k, self.v, self.o = (nn.Linear(h, h) for _ in range(4))
        self.norm_q, self.norm_k = Rms(h), Rms(h)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.z.num_heads, -1)).transpose(1, 2)

    def qkv(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.norm_q(self.q(x)), self.norm_k(self.k(y))
        return self.heads(q), self.heads(k), self.heads(self.v(y))

    def out(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.o((weights @ v).transpose(1, 2).flatten(2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(self.z.head_dim)


class SelfAttention(Attention):
    def forward(self, x: Tensor, ids: Tensor, mask: Tensor, cut: Tensor | None) -> Tensor:
        """Attend; ``cut`` says for which query (row) a key (column) passes no gradient."""
        q, k, v = self.qkv(x, x)
        q, k = (turn(y, ids[None], self.z.axes_dim, self.z.rope_theta) for y in (q, k))
        scores = self.scores(q, k)
        if cut is None:
            return self.out(scores.masked_fill(~mask, -math.inf).softmax(-1), v)
        scores = torch.where(cut, self.scores(q, k.detach()), scores)
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        mixed = (weights * cut) @ v.detach() + (weights * ~cut) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class CrossAttention(Attention):
    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        q, k, v = self.qkv(x, text)
        return self.out(self.scores(q, k).softmax(-1), v)


class Block(nn.Module):
    def __init__(self, z: VideoDiTSizes) -> None:
        super().__init__()
        h = z.hidden_size
        self.modulation = nn.Parameter(torch.zeros(6, h))
        self.self_attn, self.cross_attn = SelfAttention(z), CrossAttention(z)
        self.norm3 = nn.LayerNorm(h, eps=1e-6)
        self.ffn_in, self.ffn_out = nn.Linear(h, z.ffn_size), nn.Linear(z.ffn_size, h)


class PlainVideoDiT(nn.Module):
    def __init__(self, z: VideoDiTSizes) -> None:
        super().__init__()
        self.z = z
        h = z.hidden_size
        self.patch_embedding = nn.Linear(z.token_width, h)
        self.text_embedding = nn.Sequential(
            nn.Linear(z.text_width, h), nn.GELU(approximate="tanh"), nn.Linear(h, h)
        )
        self.time_embedding = nn.Sequential(nn.Linear(256, h), nn.SiLU(), nn.Linear(h, h))
        self.time_projection = nn.Linear(h, 6 * h)
        self.blocks = nn.ModuleList(Block(z) for _ in range(z.num_blocks))
        self.head_modulation = nn.Parameter(torch.zeros(2, h))
        self.head = nn.Linear(h, z.token_width)

    def forward(
        self, x: Tensor, timesteps: Tensor, text: Tensor, rule: Rule | None = None,
        first_frame: int = 0, cut_blocks: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the flow; ``cut_blocks`` lets no gradient pass from a frame block to another."""
        b, t, c, height, width = x.shape
        p = self.z.patch_size
        rows, columns = height // p, width // p
        n = rows * columns
        frames = range(first_frame, first_frame + t)
        ids = torch.tensor([[f, r, k] for f in frames for r in range(rows) for k in range(columns)])
        mask = frame_mask(frames, rule).repeat_interleave(n, 0).repeat_interleave(n, 1)
        of = blocks_of(ids[:, 0], rule) if rule and cut_blocks else None
        cut = None if of is None else of[:, None] != of[None]
        patches = x.unflatten(3, (rows, p)).unflatten(5, (columns, p))
        tokens = patches.permute(0, 1, 3, 5, 2, 4, 6).reshape(b, t * n, c * p * p)
        y = self.patch_embedding(tokens)
        words = self.text_embedding(text)
        e = self.time_embedding(sinusoid(timesteps).to(x))
        if e.dim() == 2:
            e = e[:, None].expand(b, t, -1)
        e0 = self.time_projection(nn.functional.silu(e)).unflatten(-1, (6, -1))

        def spread(part: Tensor) -> Tensor:
            return part.repeat_interleave(n, 1)

        for block in self.blocks:
            m = [spread(part) for part in (block.modulation + e0).unbind(2)]
            out = block.self_attn(norm(y) * (1 + m[1]) + m[0], ids, mask, cut)
            y = y + out * m[2]
            y = y + block.cross_attn(block.norm3(y), words)
            wide = gelu(block.ffn_in(norm(y) * (1 + m[4]) + m[3]))
            y = y + block.ffn_out(wide) * m[5]
        shift, scale = (self.head_modulation + e[:, :, None]).unbind(2)
        flat = self.head(norm(y) * (1 + spread(scale)) + spread(shift))
        out = flat.view(b, t, rows, columns, c, p, p).permute(0, 1, 4, 2, 5, 3, 6)
        return out.reshape(x.shape)


NAMES = {
    "embedder.": "", "patch_in": "patch_embedding", "text_in": "text_embedding.0",
    "text_out": "text_embedding.2", "time_in.linear_in": "time_embedding.0",
    "time_in.linear_out": "time_embedding.2", "head.linear": "head", "attention": "attn",
    "linear_proj": "o", "linear_q.": "q.", "cross_norm": "norm3", "linear_fc1": "ffn_in",
    "linear_fc2": "ffn_out", "q_norm": "norm_q", "k_norm": "norm_k",
    "modulation.weight": "modulation", "head.modulation": "head_modulation",
}  # fmt: skip
"""Parts of the parallel network's names, and of the plain one's."""


def to_plain(parallel: dict[str, Tensor], z: VideoDiTSizes) -> dict[str, Tensor]:
    """Return weights by the plain names, those of queries, keys and values apart."""
    out = {}
    for name, tensor in parallel.items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        fused = re.search(r"linear_(q?kv)\.", name)
        if fused is None:
            out[name] = tensor
            continue
        heads = tensor.unflatten(0, (z.num_heads, len(fused[1]), z.head_dim))
        for part, rows in zip(fused[1], heads.unbind(1), strict=True):
            out[name.replace(fused[0], f"{part}.")] = rows.flatten(0, 1)
    return out


def num_parameters(sizes: JointSizes | VideoDiTSizes) -> int:
    with torch.device("meta"):
        whole = isinstance(sizes, JointSizes)
        model = PlainMMDiT(sizes) if whole else PlainVideoDiT(sizes)  # type: ignore[arg-type]
    return sum(p.numel() for p in model.parameters())
