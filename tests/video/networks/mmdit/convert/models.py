"""Tiny random models of FLUX.1 and Open-Sora 2.0, and the outputs of diffusers' class."""

import math
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.convert.exporting import public_tensor
from megatron_ext.video.networks.mmdit.convert.conversion import CONVERSION
from megatron_ext.video.networks.mmdit.convert.table import parameters
from megatron_ext.video.networks.published import Mapped, seen_as

Tensors = dict[str, Tensor]


def options_of(sizes: JointSizes) -> dict[str, Any]:
    return {
        "in_channels": sizes.token_width, "num_layers": sizes.num_double_blocks,
        "num_single_layers": sizes.num_single_blocks, "attention_head_dim": sizes.head_dim,
        "num_attention_heads": sizes.num_heads, "joint_attention_dim": sizes.text_width,
        "pooled_projection_dim": sizes.pooled_width, "guidance_embeds": sizes.guidance_embed,
        "axes_dims_rope": sizes.axes_dim,
    }  # fmt: skip


def flux(sizes: JointSizes) -> FluxTransformer2DModel:
    """Return a model of diffusers whose parameters are all random, so that none can be mixed up."""
    torch.manual_seed(3)
    model = FluxTransformer2DModel(**options_of(sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            width = parameter[0].numel() if parameter.dim() > 1 else 25
            is_scale = parameter.dim() == 1 and "norm_" in name and ".linear." not in name
            parameter.copy_(width**-0.5 * torch.randn_like(parameter) + is_scale)
    return model


def ours_of(public: Tensors, sizes: JointSizes, naming: str | None = None) -> Tensors:
    mapped = Mapped.of(CONVERSION.form(naming), sizes, parameters(sizes))
    assert mapped.shapes == {name: tuple(tensor.shape) for name, tensor in public.items()}
    kind = next(iter(public.values())).dtype
    weights = {}
    for name, parts in mapped.parts.items():
        shape = mapped.parameters[name]
        weights[name] = torch.full(shape, torch.nan, dtype=kind)
        for part in parts:
            tensor = public[part.tensor]
            seen = tensor.view(seen_as(tensor.shape, part, shape))
            rows = seen[part.start :: part.step][: part.count]
            columns = slice(part.column, part.column + math.prod(shape[1:]))
            own = rows[:, columns] if len(shape) > 1 else rows
            weights[name][part.row : part.row + part.count] = own
    assert not any(tensor.isnan().any() for tensor in weights.values())
    return weights


def public_of(weights: Tensors, sizes: JointSizes, naming: str | None = None) -> Tensors:
    mapped = Mapped.of(CONVERSION.form(naming), sizes, parameters(sizes))
    kind = next(iter(weights.values())).dtype
    return {name: public_tensor(mapped, name, kind, weights.__getitem__) for name in mapped.shapes}


def theirs(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Return the velocity that diffusers' class predicts, given arguments of `MMDiT.forward`."""
    velocity: Tensor = model(
        hidden_states=given["img"],
        encoder_hidden_states=given["txt"],
        pooled_projections=given["y_vec"],
        timestep=given["timesteps"],
        img_ids=given["img_ids"][0],
        txt_ids=given["txt_ids"][0],
        guidance=given.get("guidance"),
        return_dict=False,
    )[0]
    return velocity
