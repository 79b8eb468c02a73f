"""Tiny pipelines of diffusers with random weights, and the clips that they make."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import tokenizers
import torch
import transformers
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video
from diffusers.pipelines.wan import pipeline_wan_i2v
from PIL import Image
from torch import Tensor

from megatron_ext.video.data.randomness import draw_noise
from megatron_ext.video.networks.wan.config import SIZES
from tests.video.data.making import UMT5_WIDTH, UMT5_WORDS, write_umt5
from tests.video.networks.wan.convert.models import options_of

SIZES_OF_WAN = dataclasses.replace(SIZES["tiny"], text_width=UMT5_WIDTH)
SIDE, FRAMES, STEPS, SEED = 32, 5, 4, 7
VISION, POOLED = 8, 20
"""Features of a vision token, and of the pooled vector of a text."""
LATENT = (4, 2, 4, 4)
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SCHEDULERS: dict[str, Any] = {
    "euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "unipc": lambda: diffusers.UniPCMultistepScheduler(**FLOW, flow_shift=3.0),
    "dpm++": lambda: diffusers.DPMSolverMultistepScheduler(**FLOW, flow_shift=3.0),
}


def filled(model: torch.nn.Module, seed: int) -> Any:
    """Fill a model with random weights under which all inputs count, and return it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = name.endswith("weight") and "norm" in name
            width = parameter[0].numel() if parameter.dim() > 1 else 1
            scale = 0.2 if parameter.dim() < 2 or "table" in name else width**-0.5
            # Let captions count for more than other weights do.
            scale *= 4 if "attn2.to_out" in name else 1
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(scale * drawn + is_scale)
    return model.eval()


def wan_vae() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return diffusers.AutoencoderKLWan(
            base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
            latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.0, 2.0, 0.5, 3.0],
        ).eval()  # fmt: skip


def text_models(root: Path) -> dict[str, Any]:
    encoder = write_umt5(root)
    return {
        "tokenizer": transformers.AutoTokenizer.from_pretrained(root / "tokenizer"),
        "text_encoder": transformers.UMT5EncoderModel.from_pretrained(encoder).eval(),
    }


def wan(root: Path, scheduler: str = "unipc", *, experts: bool = False, **changes: Any) -> Any:
    """Write the folder of a WanPipeline, of two experts if asked for, and return the pipeline."""
    options = {**options_of(SIZES_OF_WAN), **changes}
    networks = [filled(diffusers.WanTransformer3DModel(**options), seed) for seed in (1, 2)]
    pipeline = diffusers.WanPipeline(
        **text_models(root), vae=wan_vae(), scheduler=SCHEDULERS[scheduler](),
        transformer=networks[0], transformer_2=networks[1] if experts else None,
        boundary_ratio=0.8 if experts else None,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(root)
    return pipeline


def image_models() -> dict[str, Any]:
    sizes = {"image_size": 16, "patch_size": 8, "hidden_size": VISION, "num_attention_heads": 2}
    config = transformers.CLIPVisionConfig(**sizes, intermediate_size=16, num_hidden_layers=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = transformers.CLIPVisionModel(config).eval()
    side = {"height": 16, "width": 16}
    processor = transformers.CLIPImageProcessor(size=side, crop_size=side)
    return {"image_encoder": model, "image_processor": processor}


def wan_of_images(root: Path, kind: str) -> Any:
    """Write the folder of a WanImageToVideoPipeline of a kind, and return the pipeline."""
    if not hasattr(pipeline_wan_i2v, "ftfy"):
        # The pipeline uses this optional package without asking whether it is there.
        pipeline_wan_i2v.ftfy = SimpleNamespace(fix_text=str)
    options = options_of(SIZES_OF_WAN)
    channels = options["in_channels"]
    images = kind in ("2.1", "flf2v")
    if kind != "ti2v":
        options["in_channels"] = 2 * channels + 4
    if images:
        tokens = 5
        options |= {"image_dim": VISION, "added_kv_proj_dim": SIZES_OF_WAN.hidden_size}
        options["pos_embed_seq_len"] = 2 * tokens if kind == "flf2v" else None
    networks = [filled(diffusers.WanTransformer3DModel(**options), seed) for seed in (1, 2)]
    experts = kind == "a14b"
    pipeline = diffusers.WanImageToVideoPipeline(
        **text_models(root), **(image_models() if images else {}), vae=wan_vae(),
        scheduler=SCHEDULERS["unipc"](), transformer=networks[0],
        transformer_2=networks[1] if experts else None, boundary_ratio=0.8 if experts else None,
        expand_timesteps=kind == "ti2v",
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(root)
    return pipeline


def word_tokenizer(end: str | None, start: str | None, length: int) -> Any:
    """Return a tokenizer of whole words, whose end token, if any, has the highest number."""
    order = ["<pad>", "<unk>", *filter(None, [start]), *UMT5_WORDS, *filter(None, [end])]
    vocabulary = {word: i for i, word in enumerate(order)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    marks = [token for token in (end, start) if token]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=" ".join(filter(None, [start, "$A", end])),
        special_tokens=[(x, vocabulary[x]) for x in marks],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=end if start and end else "<pad>", eos_token=end,
        unk_token="<unk>", model_max_length=length,
    )  # fmt: skip


def clip_of_text(length: int = 9) -> tuple[Any, Any]:
    """Return CLIP's text model and its tokenizer."""
    tokenizer = word_tokenizer("<|endoftext|>", "<start>", length)
    last = len(tokenizer) - 1
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=POOLED, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=length, eos_token_id=last, bos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return transformers.CLIPTextModel(config).eval(), tokenizer


def hunyuan(root: Path) -> Any:
    """Write the folder of a HunyuanVideoPipeline, and return the pipeline."""
    clip, clip_words = clip_of_text(77)
    words = word_tokenizer(None, "<begin>", 256)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        llama = transformers.LlamaModel(
            transformers.LlamaConfig(
                vocab_size=len(words), num_attention_heads=2, hidden_size=UMT5_WIDTH,
                intermediate_size=32, num_hidden_layers=4,
            )
        ).eval()  # fmt: skip
        vae = diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1,
            norm_num_groups=4,
        ).eval()  # fmt: skip
    network = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=16, num_layers=2,
        num_single_layers=2, num_refiner_layers=2, guidance_embeds=True, text_embed_dim=UMT5_WIDTH,
        pooled_projection_dim=POOLED, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    pipeline = diffusers.HunyuanVideoPipeline(
        text_encoder=llama, tokenizer=words, transformer=filled(network, 1), vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0), text_encoder_2=clip,
        tokenizer_2=clip_words,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(root)
    return pipeline


def template_of_hunyuan(pipeline: Any) -> dict[str, Any]:
    """Return the template of captions, to be cut where this tokenizer has the caption's first word.

    The pipeline's own number is that of its public tokenizer.
    """
    template = pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE["template"]
    ids = pipeline.tokenizer(template.format("red"))["input_ids"]
    return {
        "template": template,
        "crop_start": ids.index(pipeline.tokenizer("red")["input_ids"][1]),
    }


def flux(root: Path, *, guidance: bool) -> Any:
    """Write the folder of a FluxPipeline, told its guidance or not, and return the pipeline."""
    clip, clip_words = clip_of_text()
    words = word_tokenizer("</s>", None, 512)
    sizes = {"d_model": UMT5_WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        t5 = transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=len(words), **sizes)
        ).eval()
        vae = diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
            block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4, scaling_factor=0.4,
            shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False,
        ).eval()  # fmt: skip
    network = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=UMT5_WIDTH, pooled_projection_dim=POOLED,
        guidance_embeds=guidance, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        shift=3.0 if guidance else 1.0, use_dynamic_shifting=guidance, max_image_seq_len=1024
    )
    pipeline = diffusers.FluxPipeline(
        scheduler=scheduler, vae=vae, text_encoder=clip, tokenizer=clip_words, text_encoder_2=t5,
        tokenizer_2=words, transformer=filled(network, 1),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(root)
    return pipeline


def pictures_of_flux(pipeline: Any, prompt: str, **options: Any) -> Tensor:
    """Return the picture ``[1, H, W, 3]`` that a FluxPipeline makes, from 0 to 255."""
    start = draw_noise(SEED, [0], (4, 1, 16, 16), purpose="sampling noise")[:, :, 0]
    packed = pipeline._pack_latents(start, 1, 4, 16, 16)
    image = pipeline(
        prompt=prompt, height=SIDE, width=SIDE, num_inference_steps=STEPS, latents=packed,
        output_type="pt", **options,
    ).images  # fmt: skip
    whole: Tensor = (255 * image.permute(0, 2, 3, 1)).round()
    return whole


def picture(path: Path, seed: int) -> Any:
    """Write and return a picture of the size of the clips."""
    random = np.random.default_rng(seed)
    low = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(low).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    image.save(path)
    return image


def noise(number: int = 0) -> Tensor:
    return draw_noise(SEED, [number], LATENT, purpose="sampling noise")


def sampled(pipeline: Any, prompt: str, number: int = 0, **options: Any) -> Tensor:
    """Return the frames ``[f, H, W, 3]`` that a pipeline makes, as numbers from 0 to 255."""
    frames = pipeline(
        prompt=prompt, height=SIDE, width=SIDE, num_frames=FRAMES, num_inference_steps=STEPS,
        latents=noise(number), output_type="pt", **{"max_sequence_length": 512, **options},
    ).frames  # fmt: skip
    whole: Tensor = (255 * frames[0].permute(0, 2, 3, 1)).round()
    return whole
