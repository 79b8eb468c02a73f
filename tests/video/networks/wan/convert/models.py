"""Tiny random models of diffusers in both namings, and the outputs of their own class."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.convert.exporting import Export, export_weights
from megatron_ext.video.convert.importing import import_weights
from megatron_ext.video.networks.wan.attention import VideoDiTOptions
from megatron_ext.video.networks.wan.config import SIZES, VideoDiTSizes
from megatron_ext.video.networks.wan.convert.config import config_json
from megatron_ext.video.networks.wan.convert.conversion import CONVERSION
from megatron_ext.video.networks.wan.convert.names import Naming
from megatron_ext.video.networks.wan.model import VideoDiT
from tests.text.convert.models import in_child

STEM = "diffusion_pytorch_model"
TINY = SIZES["tiny"]
TEXT_ROWS = 512
"""The rows to which Wan pads captions with zeros, none of which it masks."""
OUTER = (
    "patch_embedding text_embedding.0 text_embedding.2 time_embedding.0 time_embedding.2 "
    "time_projection.1 head.head"
).split()
LINEARS = (
    "self_attn.q self_attn.k self_attn.v self_attn.o cross_attn.q cross_attn.k cross_attn.v "
    "cross_attn.o norm3 ffn.0 ffn.2"
).split()
NORMS = "self_attn.norm_q self_attn.norm_k cross_attn.norm_q cross_attn.norm_k".split()


VISION = "img_emb.proj.0 img_emb.proj.1 img_emb.proj.3 img_emb.proj.4".split()


def original_names(sizes: VideoDiTSizes = TINY) -> dict[str, str]:
    """Return the original's names of all tensors by those of diffusers, as diffusers converts."""
    names = ["head.modulation"]
    linears, norms, outer = LINEARS, NORMS, OUTER
    if sizes.vision_width:
        linears = [*LINEARS, "cross_attn.k_img", "cross_attn.v_img"]
        norms = [*NORMS, "cross_attn.norm_k_img"]
        outer = [*OUTER, *VISION]
    names += [f"{module}.{kind}" for module in outer for kind in ("weight", "bias")]
    for number in range(sizes.num_blocks):
        block = f"blocks.{number}"
        names += [f"{block}.{module}.{kind}" for module in linears for kind in ("weight", "bias")]
        names += [f"{block}.{module}.weight" for module in norms] + [f"{block}.modulation"]
    found = dict(convert_wan_transformer_to_diffusers({name: name for name in names}))
    if sizes.vision_positions:
        # diffusers knows this name in its script of conversion alone.
        found["condition_embedder.image_embedder.pos_embed"] = "img_emb.emb_pos"
    return found


def options_of(sizes: VideoDiTSizes) -> dict[str, int | None]:
    return {
        "num_attention_heads": sizes.num_heads, "attention_head_dim": sizes.head_dim,
        "in_channels": sizes.channels + sizes.condition_channels, "out_channels": sizes.channels,
        "image_dim": sizes.vision_width or None,
        "added_kv_proj_dim": sizes.hidden_size if sizes.vision_width else None,
        "pos_embed_seq_len": sizes.vision_positions or None,
        "text_dim": sizes.text_width, "ffn_dim": sizes.ffn_size, "num_layers": sizes.num_blocks,
    }  # fmt: skip


def network(sizes: VideoDiTSizes = TINY) -> WanTransformer3DModel:
    """Return a model of diffusers whose parameters are all random, so that none can be mixed up."""
    torch.manual_seed(3)
    model = WanTransformer3DModel(**options_of(sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = name.endswith("weight") and "norm" in name
            width = parameter[0].numel() if parameter.dim() > 1 else 1
            scale = 0.2 if parameter.dim() < 2 or "table" in name else width**-0.5
            parameter.copy_(scale * torch.randn_like(parameter) + is_scale)
    return model


def make(folder: Path, dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    network().to(dtype).save_pretrained(folder, **save)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob(f"{STEM}*.safetensors"):
        found.update(load_file(path))
    return found


def original_tensors(folder: Path) -> dict[str, Tensor]:
    names = original_names()
    found = tensors_of(folder)
    assert found.keys() == names.keys()
    return {names[name]: tensor for name, tensor in found.items()}


def make_original(folder: Path, diffusers: Path) -> Path:
    """Write a model as Wan2.1's repository publishes it, in two files."""
    folder.mkdir()
    config = {**config_json(TINY, Naming.ORIGINAL), "text_dim": TINY.text_width}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = sorted(original_tensors(diffusers).items())
    files: dict[str, str] = {}
    for number in range(2):
        name = f"{STEM}-0000{number + 1}-of-00002.safetensors"
        part = dict(tensors[number::2])
        save_file(part, folder / name)
        files |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": files}
    (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index))
    return folder


def bare(
    context: ParallelContext, sizes: VideoDiTSizes, *, sequence_parallel: bool = False
) -> VideoDiT:
    layout = context.layout
    config = StepTransformerConfig(
        **sizes.transformer_fields(),
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=sequence_parallel,
    )
    return VideoDiT.build(sizes, VideoDiTOptions(), config, context)


def imported(source: Path, target: Path, **options: Any) -> tuple[str, str]:
    write = partial(import_weights, source, target, **options)
    done = in_child(write, target.with_suffix(".result"))
    return done.sections["streaming"]["generator_size"], done.dtype


def exported(load: Path, target: Path, **options: Any) -> Path:
    export_weights(CONVERSION, Export(load=load, target=target, **options))
    return target


def inputs(
    sizes: VideoDiTSizes = TINY,
    *,
    per_frame: bool = False,
    shape: tuple[int, int, int] = (3, 4, 6),
) -> dict[str, Tensor]:
    """Return inputs of `VideoDiT`: latents (t, h, w), captions of 5 and 7 tokens, given frames."""
    generator = torch.Generator().manual_seed(11)
    t, h, w = shape
    x = torch.randn(2, t, sizes.channels, h, w, generator=generator)
    text = torch.randn(2, TEXT_ROWS, sizes.text_width, generator=generator)
    for row, length in zip(text, (5, 7), strict=True):
        row[length:] = 0
    timesteps = torch.tensor([[1000.0, 20.0, 0.0], [833.3333, 937.5, 500.0]])
    if t != timesteps.size(1):
        timesteps = 1000 * torch.rand(2, t, generator=generator)
    given = {"x": x, "text": text, "timesteps": timesteps if per_frame else timesteps[:, 0]}
    if sizes.condition_channels:
        given["condition"] = torch.randn(2, t, sizes.condition_channels, h, w, generator=generator)
    if sizes.vision_width:
        count = sizes.vision_positions or 5
        given["vision"] = torch.randn(2, count, sizes.vision_width, generator=generator)
    return given


@torch.no_grad()
def theirs(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Return the flow ``[b, t, c, h, w]`` of diffusers, whose float32 sinusoids cost 5e-6."""
    timesteps = given["timesteps"]
    if timesteps.dim() == 2:
        tokens = given["x"].shape[-2] * given["x"].shape[-1] // 4
        timesteps = timesteps.repeat_interleave(tokens, dim=1)
    x = torch.cat([given[name] for name in ("x", "condition") if name in given], dim=2)
    vision = given.get("vision")
    if vision is not None and model.config.pos_embed_seq_len:
        # It takes the tokens of a clip's two images one after the other.
        vision = vision.reshape(2 * vision.size(0), -1, vision.size(2))
    (flow,) = model(x.transpose(1, 2), timesteps, given["text"], vision, return_dict=False)
    return flow.transpose(1, 2)  # type: ignore[no-any-return]


def load_ours(context: ParallelContext, root: Path, **how: bool) -> VideoDiT:
    chunk = bare(context, TINY, **how)
    asked = CheckpointConfig(pretrained_checkpoint=str(root))
    CheckpointManager(asked, context).load(model=[chunk], optimizer=None, scheduler=None)
    return chunk
