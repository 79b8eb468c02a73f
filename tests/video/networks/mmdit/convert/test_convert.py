"""Weights of FLUX.1 and Open-Sora 2.0: the same velocity as diffusers' class, names and orders."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers.loaders.single_file_utils import (
    convert_flux_transformer_checkpoint_to_diffusers as to_diffusers,
)
from torch import Tensor

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.convert.reading import form_of_names
from megatron_ext.video.model.tokens import position_ids
from megatron_ext.video.networks.mmdit.config import SIZES
from megatron_ext.video.networks.mmdit.convert.conversion import CONVERSION
from megatron_ext.video.networks.mmdit.convert.table import parameters
from megatron_ext.video.networks.published import Mapped, Part
from tests.ranks import ranks
from tests.video.networks.harness import Tensors, largest, one, relative
from tests.video.networks.mmdit.convert.models import flux, ours_of, public_of, theirs
from tests.video.networks.mmdit.plain import PlainMMDiT
from tests.video.networks.mmdit.problem import Problem

TINY = SIZES["tiny"]
WIDE = dataclasses.replace(
    TINY, num_heads=2, hidden_size=128, axes_dim=(16, 24, 24), num_double_blocks=1,
    num_single_blocks=3, mlp_ratio=4, channels=2,
)  # fmt: skip
SHAPES = ((1, 8, 8), (1, 4, 12), (3, 8, 4))
"""The latents are those of a square image, of a wide one, and of a video."""


def inputs(sizes: JointSizes, shape: tuple[int, int, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ids = position_ids(shape, sizes.patch_size).expand(2, -1, -1)
    given = {
        "img": randn(2, ids.size(1), sizes.token_width),
        "img_ids": ids,
        "txt": randn(2, 5, sizes.text_width),
        "txt_ids": ids.new_zeros(2, 5, 3),
        "timesteps": torch.tensor([0.013, 0.97]),
        "y_vec": randn(2, sizes.pooled_width),
    }
    if sizes.guidance_embed:
        given["guidance"] = torch.tensor([3.5, 1.0])
    return given


@ranks()
def test_diffusers_predicts_the_same(context: ParallelContext) -> None:
    """Compare models with guidance, as FLUX.1 [dev], and without, on images and a video."""
    for sizes in (TINY, dataclasses.replace(WIDE, guidance_embed=True)):
        model = flux(sizes)
        chunk = one(Problem(sizes=sizes), context)
        chunk.load_state_dict(ours_of(model.state_dict(), sizes), strict=False)
        with torch.no_grad():
            for shape in SHAPES:
                given = inputs(sizes, shape)
                assert largest(chunk(**given), theirs(model, given)) <= 1e-5


BIG = dataclasses.replace(SIZES["11b"], num_double_blocks=1, num_single_blocks=1)


def test_names_and_orders_are_those_of_diffusers_own_converter() -> None:
    """Give it numbers of rows for values, since it knows the sizes of FLUX.1 alone."""
    sizes = dataclasses.replace(BIG, guidance_embed=True)
    original, diffusers = (
        Mapped.of(CONVERSION.form(naming), sizes, parameters(sizes))
        for naming in ("original", "diffusers")
    )
    rows = {n: torch.arange(s[0]) + 10**6 * i for i, (n, s) in enumerate(original.shapes.items())}
    converted = to_diffusers(dict(rows))
    assert converted.keys() == diffusers.shapes.keys()

    def taken(parts: Sequence[Part], tensors: dict[str, Tensor]) -> tuple[Tensor, set[int]]:
        found = [tensors[p.tensor][p.start :: p.step][: p.count] for p in parts]
        return torch.cat(found), {p.column for p in parts}

    for name in parameters(sizes):
        wanted, column = taken(original.parts[name], rows)
        found, other = taken(diffusers.parts[name], converted)
        assert torch.equal(found, wanted) and column == other, name


def in_halves(tensor: Tensor, d: int) -> Tensor:
    """Return rows ``[n, d]`` with the even ones of each head first."""
    heads = tensor.unflatten(0, (-1, d))
    return torch.cat((heads[:, ::2], heads[:, 1::2]), dim=1).flatten(0, 1)


def open_sora_of(original: Tensors, sizes: JointSizes) -> Tensors:
    """Return FLUX's tensors as Open-Sora publishes them for Liger's rotary kernel."""
    h, d = sizes.hidden_size, sizes.head_dim
    found = {}
    for name, tensor in original.items():
        kind = name.rpartition(".")[2]
        if ".qkv." in name or ".linear1." in name:
            block = name.removesuffix(f"qkv.{kind}").removesuffix(f"linear1.{kind}")
            q, k, v, *mlp = tensor.split([h, h, h, *([len(tensor) - 3 * h] * ("linear1" in name))])
            found[f"{block}q_proj.{kind}"] = in_halves(q, d)
            found[f"{block}k_proj.{kind}"] = in_halves(k, d)
            found[f"{block}{'v_mlp' if mlp else 'v_proj'}.{kind}"] = torch.cat((v, *mlp))
        else:
            found[name] = in_halves(tensor, d) if name.endswith("scale") else tensor
    return found


class OpenSora(PlainMMDiT):
    """The plain network with features j and d / 2 + j of a head rotated together."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        angles = torch.cat(
            [
                ids[..., i, None].double() * 10_000 ** (-torch.arange(0, w, 2).double() / w)
                for i, w in enumerate(self.z.axes_dim)
            ],
            dim=-1,
        )[:, None]

        def turned(x: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            parts = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
            return torch.cat(parts, dim=-1)

        # The plain network would rotate once more; at position 0 it does not.
        return super().attend(turned(q), turned(k), v, torch.zeros_like(ids))


@ranks()
def test_open_soras_weights_rotate_halves(context: ParallelContext) -> None:
    """Read names with a branch for reference frames; each form gives back every tensor."""
    sizes = dataclasses.replace(TINY, cond_embed=True)
    problem = Problem(sizes=sizes)
    chunk = one(problem, context)
    weights = {name: torch.randn_like(p) for name, p in chunk.named_parameters()}
    assert {name: tuple(p.shape) for name, p in weights.items()} == parameters(sizes)
    assert [*weights] == [*parameters(sizes)]
    original = public_of(weights, sizes, "original")
    public = open_sora_of(original, sizes)
    comfyui = {re.sub(r"_norm\.scale$", "_norm.weight", n): x for n, x in original.items()}
    forms = {"original": original, "open-sora": public, "comfyui": comfyui}
    for form, tensors in forms.items():
        assert form_of_names({*tensors}, Path("x"))[1].name == form
        back = ours_of(tensors, sizes, form)
        assert all(torch.equal(back[name], weights[name]) for name in weights)
        again = public_of(back, sizes, form)
        assert again.keys() == tensors.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    chunk.load_state_dict(weights, strict=False)
    plain = OpenSora(sizes).double()
    plain.load_state_dict({n: x.double() for n, x in plain_names(public).items()})
    given = problem.inputs()
    with torch.no_grad():
        wanted = plain(**{name: x.double() for name, x in given.items()})
        assert relative(chunk(**given), wanted) <= 1e-5


def plain_names(public: Tensors) -> Tensors:
    """Return Open-Sora's tensors by the names of the plain network, with fused projections."""
    found = dict(public)
    for name in public:
        if ".q_proj." not in name:
            continue
        last = "v_mlp" if "single" in name else "v_proj"
        names = [name, name.replace("q_proj", "k_proj"), name.replace("q_proj", last)]
        fused = "linear1" if "single" in name else "qkv"
        found[name.replace("q_proj", fused)] = torch.cat([found.pop(x) for x in names])
    spelled = {}
    for name, tensor in found.items():
        for pattern, plain in PLAIN.items():
            name = re.sub(pattern, plain, name)
        spelled[name] = tensor
    return spelled


PLAIN = {
    r"(txt|img)_mod\.lin": r"\1.mod", r"(txt|img)_attn\.(norm\.)?": r"\1.",
    r"(txt|img)_mlp\.0": r"\1.mlp_in", r"(txt|img)_mlp\.2": r"\1.mlp_out",
    r"modulation\.lin": "mod", r"\.norm\.": ".", r"_norm\.scale": "_norm.weight",
    r"final_layer\.linear": "final_linear", r"final_layer\.adaLN_modulation\.1": "final_mod",
}  # fmt: skip
"""Parts of Open-Sora's names, and what the plain network has in their place."""
