"""A small training step of HunyuanVideo, on any layout and with diffusers' own class."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import HunyuanVideoTransformer3DModel
from torch import Tensor

from megatron_ext.video.model.joint_blocks import JointOptions
from megatron_ext.video.model.tokens import pack, unpack
from megatron_ext.video.networks.hunyuan.config import SIZES, HunyuanSizes
from megatron_ext.video.networks.hunyuan.model import HunyuanVideo
from tests.video.networks import harness
from tests.video.networks.harness import Tensors
from tests.video.networks.mmdit.problem import loss_of

I2V = dataclasses.replace(SIZES["tiny"], cond_embed=True, guidance_embed=True)


def options_of(z: HunyuanSizes) -> dict[str, Any]:
    """Return the arguments of diffusers' class for these sizes."""
    channels = z.channels * 2 + 1 if z.cond_embed else z.channels
    return {
        "in_channels": channels, "out_channels": z.channels, "num_attention_heads": z.num_heads,
        "attention_head_dim": z.head_dim, "num_layers": z.num_double_blocks,
        "num_single_layers": z.num_single_blocks, "num_refiner_layers": z.num_refiner_blocks,
        "mlp_ratio": float(z.mlp_ratio), "patch_size": z.patch_size,
        "guidance_embeds": z.guidance_embed, "text_embed_dim": z.text_width,
        "pooled_projection_dim": z.pooled_width, "rope_theta": z.rope_theta,
        "rope_axes_dim": z.axes_dim,
        "image_condition_type": "latent_concat" if z.cond_embed else None,
    }  # fmt: skip


def diffusers_model(z: HunyuanSizes) -> HunyuanVideoTransformer3DModel:
    return HunyuanVideoTransformer3DModel(**options_of(z))


def run_plain(model: Any, batch: Tensors, z: HunyuanSizes) -> Tensor:
    """Return the velocity that diffusers' class gives for the inputs of a chunk, as tokens."""
    frames, rows, columns = (int(size) + 1 for size in batch["img_ids"].amax(dim=(0, 1)))
    shape = (frames, rows * z.patch_size, columns * z.patch_size)
    latents = unpack(batch["img"], shape, z.patch_size)
    if z.cond_embed:
        mask, references = unpack(batch["cond"], shape, z.patch_size).split([1, z.channels], dim=1)
        latents = torch.cat((latents, references, mask), dim=1)
    guidance = 1000 * batch["guidance"] if z.guidance_embed else None
    velocity = model(
        latents, 1000 * batch["timesteps"], batch["txt"], batch["txt_mask"], batch["y_vec"],
        guidance, return_dict=False,
    )[0]  # fmt: skip
    return pack(velocity, z.patch_size)


@dataclass(frozen=True)
class Problem(harness.Problem):
    """A step whose clips have captions of ``lengths`` tokens; their other rows are padding."""

    sizes: HunyuanSizes = I2V
    options: JointOptions = field(default_factory=JointOptions)
    num_text: int = 8
    lengths: tuple[int, int] = (3, 8)
    frames: int = 3

    network = HunyuanVideo
    plain = staticmethod(diffusers_model)  # type: ignore[assignment]

    def prepare(self, chunk: Any) -> None:
        """Draw scales of norms, biases and the layer of references, which begin as constants."""
        for name, parameter in chunk.named_parameters():
            random = torch.Generator().manual_seed(len(name) + parameter.numel())
            if "norm" in name and name.endswith("weight"):
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=random)
            elif ("norm" in name and name.endswith("bias")) or "cond_in" in name:
                parameter.data = 0.2 * torch.randn(parameter.shape, generator=random)

    def inputs(self, number: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        batch = self.microbatch(number)
        del batch["target"], batch["mask"]
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}

    def microbatch(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(300 + number)
        z, b, n, text = self.sizes, self.batch, 16 * self.frames, self.num_text

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        grid = torch.cartesian_prod(torch.arange(self.frames), torch.arange(4), torch.arange(4))
        lengths = torch.tensor(self.lengths)[(torch.arange(b) + number) % 2]
        out = {
            "img": randn(b, n, z.token_width),
            "img_ids": grid.expand(b, n, 3),
            # Rows of padding are not zero here, so that one that took part would show.
            "txt": randn(b, text, z.text_width),
            "txt_ids": torch.zeros(b, text, 3, dtype=torch.int64),
            "txt_mask": torch.arange(text) < lengths[:, None],
            "timesteps": torch.rand(b, generator=generator),
            "y_vec": randn(b, z.pooled_width),
            "target": randn(b, n, z.token_width),
            "mask": (torch.rand(b, n, generator=generator) < 0.7).float(),
        }
        if z.cond_embed:
            out["cond"] = randn(b, n, z.cond_width)
        if z.guidance_embed:
            out["guidance"] = torch.rand(b, generator=generator)
        return out

    def forward(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        target, mask = batch.pop("target"), batch.pop("mask")
        own = model.module.image_tokens(batch["txt"].size(1), batch["img"].size(1))
        if not model.module.pre_process:
            names = ("img_ids", "txt_ids", "txt_mask")
            batch = {name: batch[name] for name in names}
        return model(**batch), lambda v: loss_of(v, target[:, own], mask[:, own])

    def boundary_arguments(self, batch: dict[str, Any]) -> Sequence[Any]:
        return self.num_text, 16 * self.frames, self.batch

    def plain_losses(self, model: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for i in range(self.num_microbatches):
            batch = {
                k: v.double() if v.is_floating_point() else v for k, v in self.microbatch(i).items()
            }
            target, mask = batch.pop("target"), batch.pop("mask")
            velocity = run_plain(model, batch, self.sizes)
            yield loss_of(velocity, target, mask)[0], mask.sum(), velocity

    def to_plain(self, weights: Tensors) -> Tensors:
        return to_plain(weights, self.sizes)


NAMES = {
    "embedding.img_in": "x_embedder.proj",
    "embedding.txt_in.linear_in": "context_embedder.proj_in",
    "embedding.txt_in.time_in": "context_embedder.time_text_embed.timestep_embedder",
    "embedding.txt_in.mean_in": "context_embedder.time_text_embed.text_embedder",
    "embedding.txt_in.blocks": "context_embedder.token_refiner.refiner_blocks",
    "embedding.time_in": "time_text_embed.timestep_embedder",
    "embedding.pooled_in": "time_text_embed.text_embedder",
    "embedding.guidance_in": "time_text_embed.guidance_embedder",
    "linear_in.": "linear_1.", "linear_out.": "linear_2.",
    "double_blocks": "transformer_blocks", "single_blocks": "single_transformer_blocks",
    "final_layer.modulation": "norm_out.linear", "final_layer.linear": "proj_out",
}  # fmt: skip
REFINER = {
    "linear_qkv": "attn.qkv", "linear_proj": "attn.to_out.0", "linear_fc1": "ff.net.0.proj",
    "linear_fc2": "ff.net.2", "modulation": "norm_out.linear",
}  # fmt: skip
IMAGE = {
    "img.modulation": "norm1.linear", "img.linear_qkv": "attn.to_{}",
    "img.norm.q_layernorm": "attn.norm_q", "img.norm.k_layernorm": "attn.norm_k",
    "img.linear_proj": "attn.to_out.0", "img.linear_fc1": "ff.net.0.proj",
    "img.linear_fc2": "ff.net.2",
}  # fmt: skip
TEXT = {
    "txt.modulation": "norm1_context.linear", "txt.linear_qkv": "attn.add_{}_proj",
    "txt.norm.q_layernorm": "attn.norm_added_q", "txt.norm.k_layernorm": "attn.norm_added_k",
    "txt.linear_proj": "attn.to_add_out", "txt.linear_fc1": "ff_context.net.0.proj",
    "txt.linear_fc2": "ff_context.net.2",
}  # fmt: skip
SINGLE = {
    "modulation": "norm.linear", "linear_qkv": "attn.to_{}", "linear_fc1": "proj_mlp",
    "norm.q_layernorm": "attn.norm_q", "norm.k_layernorm": "attn.norm_k",
}  # fmt: skip


def to_plain(parallel: Tensors, z: HunyuanSizes) -> Tensors:
    """Return weights by the names and in the shapes of diffusers' class."""
    out: Tensors = {}
    given = dict(parallel)
    cond = given.pop("embedding.cond_in.weight", None)
    for number in range(z.num_single_blocks):
        block = f"single_blocks.{number}"
        parts = [given.pop(f"{block}.{x}.weight") for x in ("linear_proj", "linear_fc2")]
        out[f"single_transformer_blocks.{number}.proj_out.weight"] = torch.cat(parts, dim=1)
        bias = given.pop(f"{block}.linear_proj.bias")
        out[f"single_transformer_blocks.{number}.proj_out.bias"] = bias
    for name, tensor in given.items():
        tables = [NAMES]
        if "double_blocks" in name:
            tables += [IMAGE, TEXT]
        elif "single_blocks" in name:
            tables += [SINGLE]
        elif ".txt_in.blocks" in name:
            tables += [REFINER]
        new = name
        for table in tables:
            for ours, theirs in table.items():
                new = new.replace(ours, theirs)
        if "{}" in new:
            heads = tensor.unflatten(0, (z.num_heads, 3, z.head_dim)).transpose(0, 1).flatten(1, 2)
            out |= {new.format(x): part for x, part in zip("qkv", heads, strict=True)}
        elif "attn.qkv" in new:
            thirds = zip("qkv", tensor.chunk(3), strict=True)
            out |= {new.replace("attn.qkv", f"attn.to_{x}"): part for x, part in thirds}
        elif new.startswith("norm_out.linear"):
            out[new] = torch.cat(tensor.chunk(2)[::-1])
        elif new == "x_embedder.proj.weight":
            p = z.patch_size
            kernel = tensor.view(-1, z.channels, 1, p, p)
            if cond is not None:
                kernel = torch.cat((kernel, cond.view(-1, z.channels + 1, 1, p, p)), dim=1)
            out[new] = kernel
        else:
            out[new] = tensor
    return out
