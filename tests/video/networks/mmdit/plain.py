"""An MMDiT in plain torch on one process, after FLUX and Open-Sora: the truth of these tests.

Nothing of the package is used but the sizes. Names and shapes are those of FLUX: one ``qkv`` with
queries, keys and values one behind the other, ``linear1`` and ``linear2`` in one piece.
"""

import math

import torch
from torch import Tensor, nn

from megatron_ext.video.config.joint import JointSizes


def sinusoid(u: Tensor) -> Tensor:
    """Compute in float32, as the format prescribes, which rounds an angle of 1000 by up to 3e-5."""
    frequencies = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128)
    angles = torch.outer(1000 * u.float(), frequencies)
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=1)


def turn(x: Tensor, ids: Tensor, axes: tuple[int, ...], theta: float) -> Tensor:
    """Rotate each pair (2j, 2j+1) of ``[b, n, s, d]`` as a complex number."""
    angles = torch.cat(
        [
            ids[..., i, None].double() * theta ** (-torch.arange(0, w, 2).double() / w)
            for i, w in enumerate(axes)
        ],
        dim=-1,
    )
    phases = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * phases).flatten(-2)


class Embedder(nn.Module):
    def __init__(self, width: int, h: int) -> None:
        super().__init__()
        self.in_layer, self.out_layer = nn.Linear(width, h), nn.Linear(h, h)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out_layer(nn.functional.silu(self.in_layer(x)))
        return y


class Stream(nn.Module):
    def __init__(self, z: JointSizes) -> None:
        super().__init__()
        h = z.hidden_size
        self.mod = nn.Linear(h, 6 * h)
        self.qkv = nn.Linear(h, 3 * h, bias=z.qkv_bias)
        self.query_norm, self.key_norm = Rms(z.head_dim), Rms(z.head_dim)
        self.proj = nn.Linear(h, h)
        self.mlp_in, self.mlp_out = nn.Linear(h, z.mlp_size), nn.Linear(z.mlp_size, h)


def norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-6)


def mod(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return (1 + scale[:, None]) * norm(x) + shift[:, None]


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class PlainMMDiT(nn.Module):
    def __init__(self, z: JointSizes) -> None:
        super().__init__()
        self.z = z
        h, m = z.hidden_size, z.mlp_size
        self.img_in, self.txt_in = nn.Linear(z.token_width, h), nn.Linear(z.text_width, h)
        if z.cond_embed:
            self.cond_in = nn.Linear(z.cond_width, h)
        self.time_in, self.vector_in = Embedder(256, h), Embedder(z.pooled_width, h)
        if z.guidance_embed:
            self.guidance_in = Embedder(256, h)
        self.double_blocks, self.single_blocks = nn.ModuleList(), nn.ModuleList()
        for _ in range(z.num_double_blocks):
            self.double_blocks.append(nn.ModuleDict({"txt": Stream(z), "img": Stream(z)}))
        for _ in range(z.num_single_blocks):
            block = nn.Module()
            block.mod = nn.Linear(h, 3 * h)
            block.linear1, block.linear2 = nn.Linear(h, 3 * h + m), nn.Linear(h + m, h)
            block.query_norm, block.key_norm = Rms(z.head_dim), Rms(z.head_dim)
            self.single_blocks.append(block)
        self.final_mod, self.final_linear = nn.Linear(h, 2 * h), nn.Linear(h, z.token_width)

    def heads(self, qkv: Tensor, stream: nn.Module) -> list[Tensor]:
        """Return normed queries, keys and values, ``[b, n, s, d]``."""
        parts = [part.unflatten(-1, (self.z.num_heads, -1)) for part in qkv.chunk(3, -1)]
        q, k, v = (part.transpose(1, 2) for part in parts)
        return [stream.query_norm(q), stream.key_norm(k), v]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        q, k = (turn(x, ids, self.z.axes_dim, self.z.rope_theta) for x in (q, k))
        scores = torch.einsum("bnqd,bnkd->bnqk", q, k) / math.sqrt(self.z.head_dim)
        out = torch.einsum("bnqk,bnkd->bnqd", scores.softmax(-1), v)
        return out.transpose(1, 2).flatten(2)

    def run_double(
        self, block: nn.ModuleDict, txt: Tensor, img: Tensor, vec: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        silu = nn.functional.silu(vec)
        mods = {name: block[name].mod(silu).chunk(6, -1) for name in ("txt", "img")}
        x = {"txt": txt, "img": img}
        qkv = {name: block[name].qkv(mod(x[name], *mods[name][:2])) for name in x}
        parts = {name: self.heads(qkv[name], block[name]) for name in x}
        joint = [torch.cat(pair, dim=2) for pair in zip(parts["txt"], parts["img"], strict=True)]
        out = self.attend(*joint, ids)
        outs = {"txt": out[:, : txt.size(1)], "img": out[:, txt.size(1) :]}
        for name, s in block.items():
            _, _, gate1, shift2, scale2, gate2 = mods[name]
            x[name] = x[name] + gate1[:, None] * s.proj(outs[name])
            hidden = gelu(s.mlp_in(mod(x[name], shift2, scale2)))
            x[name] = x[name] + gate2[:, None] * s.mlp_out(hidden)
        return x["txt"], x["img"]

    def run_single(self, block: nn.Module, x: Tensor, vec: Tensor, ids: Tensor) -> Tensor:
        shift, scale, gate = block.mod(nn.functional.silu(vec)).chunk(3, -1)
        h = self.z.hidden_size
        qkv, mlp = block.linear1(mod(x, shift, scale)).split([3 * h, self.z.mlp_size], dim=-1)
        out = self.attend(*self.heads(qkv, block), ids)
        return x + gate[:, None] * block.linear2(torch.cat([out, gelu(mlp)], dim=-1))

    def forward(
        self, img: Tensor, img_ids: Tensor, txt: Tensor, txt_ids: Tensor, timesteps: Tensor,
        y_vec: Tensor, guidance: Tensor | None = None, cond: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        x, text = self.img_in(img), self.txt_in(txt)
        if cond is not None:
            x = x + self.cond_in(cond)
        vec = self.time_in(sinusoid(timesteps).to(img)) + self.vector_in(y_vec)
        if guidance is not None:
            vec = vec + self.guidance_in(sinusoid(guidance).to(img))
        ids = torch.cat([txt_ids, img_ids], dim=1)
        for double in self.double_blocks:
            text, x = self.run_double(double, text, x, vec, ids)
        joint = torch.cat([text, x], dim=1)
        for single in self.single_blocks:
            joint = self.run_single(single, joint, vec, ids)
        shift, scale = self.final_mod(nn.functional.silu(vec)).chunk(2, -1)
        out: Tensor = self.final_linear(mod(joint[:, text.size(1) :], shift, scale))
        return out


class Rms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


NAMES = {
    "embedding.": "", "pooled_in": "vector_in", "linear_in.": "in_layer.",
    "linear_out": "out_layer", "modulation": "mod", "final_layer.mod": "final_mod",
    "final_layer.linear": "final_linear",
    "norm.q_layernorm": "query_norm", "norm.k_layernorm": "key_norm", "linear_qkv": "qkv",
    "linear_proj": "proj", "linear_fc1": "mlp_in", "linear_fc2": "mlp_out",
}  # fmt: skip
"""Parts of the parallel network's names, and of the plain one's."""


def to_plain(parallel: dict[str, Tensor], z: JointSizes) -> dict[str, Tensor]:
    """Return weights by the plain names, fused as FLUX does, with parts before heads."""
    out = {}
    for name, tensor in parallel.items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if ".qkv." in name:
            tensor = tensor.unflatten(0, (z.num_heads, 3, z.head_dim)).transpose(0, 1).flatten(0, 2)
        out[name] = tensor
    for i in range(z.num_single_blocks):

        def taken(*names: str, at: str = f"single_blocks.{i}") -> list[Tensor]:
            return [out.pop(f"{at}.{name}") for name in names]

        for kind in ("weight", "bias"):
            first = taken(f"qkv.{kind}", f"mlp_in.{kind}")
            out[f"single_blocks.{i}.linear1.{kind}"] = torch.cat(first)
        second = taken("proj.weight", "mlp_out.weight")
        out[f"single_blocks.{i}.linear2.weight"] = torch.cat(second, dim=1)
        (out[f"single_blocks.{i}.linear2.bias"],) = taken("proj.bias")
    return out
