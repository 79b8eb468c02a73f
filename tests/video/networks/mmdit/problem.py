"""A small training step of an MMDiT, on any layout and in plain torch."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.model.joint_blocks import JointOptions
from megatron_ext.video.networks.mmdit.config import SIZES
from megatron_ext.video.networks.mmdit.model import MMDiT
from tests.video.networks import harness
from tests.video.networks.harness import Tensors, reported
from tests.video.networks.mmdit.plain import PlainMMDiT, to_plain

I2V = dataclasses.replace(SIZES["tiny"], cond_embed=True, guidance_embed=True)


@dataclass(frozen=True)
class Problem(harness.Problem):
    """A step; ``mask`` says which image tokens count: all, random ones, or the last frame's."""

    sizes: JointSizes = I2V
    options: JointOptions = field(default_factory=JointOptions)
    num_text: int = 8
    frames: int = 3
    mask: str = "random"

    network, plain = MMDiT, PlainMMDiT

    def inputs(self, number: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        batch = self.microbatch(number)
        del batch["target"], batch["mask"]
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}

    def microbatch(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 + number)
        z, b, n, text = self.sizes, self.batch, 16 * self.frames, self.num_text

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        grid = torch.cartesian_prod(torch.arange(self.frames), torch.arange(4), torch.arange(4))
        mask = (torch.rand(b, n, generator=generator) < 0.7).float()
        if self.mask == "last frame":
            mask = (torch.arange(n) >= n - 16).float().expand(b, n)
        out = {
            "img": randn(b, n, z.token_width),
            "img_ids": grid.expand(b, n, 3),
            "txt": randn(b, text, z.text_width),
            "txt_ids": torch.zeros(b, text, 3, dtype=torch.int64),
            "timesteps": torch.rand(b, generator=generator),
            "y_vec": randn(b, z.pooled_width),
            "target": randn(b, n, z.token_width),
            "mask": torch.ones(b, n) if self.mask == "all" else mask,
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
            batch = {name: tensor for name, tensor in batch.items() if name.endswith("_ids")}
        return model(**batch), lambda v: loss_of(v, target[:, own], mask[:, own])

    def boundary_arguments(self, batch: dict[str, Any]) -> Sequence[Any]:
        return self.num_text, 16 * self.frames, self.batch

    def plain_losses(self, model: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for i in range(self.num_microbatches):
            batch = {k: v.double() for k, v in self.microbatch(i).items()}
            target, mask = batch.pop("target"), batch.pop("mask")
            velocity = model(**batch)
            yield loss_of(velocity, target, mask)[0], mask.sum(), velocity

    def to_plain(self, weights: Tensors) -> Tensors:
        return to_plain(weights, self.sizes)


def loss_of(velocity: Tensor, target: Tensor, mask: Tensor) -> Any:
    return reported(((velocity - target) ** 2).mean(-1).mul(mask).sum(), mask.sum())
