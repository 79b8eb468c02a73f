"""Clips of a moving bar, as files of every kind, datasets of them, and tiny models that encode."""

import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig, TextEncoderConfig
from megatron_ext.video.data.clips import read_list
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.encode import ClipEncoder, PlannedClip, plan_clips
from megatron_ext.video.data.geometry import parse_plan
from megatron_ext.video.data.text_encoders import build_text_encoder

CODEC = CodecConfig(codec_spatial=4, codec_channels=24)
TEXT = TextEncoderConfig(text_length=6, text_width=16)
FLAGS = ["--codec-spatial=4", "--codec-channels=24", "--text-length=6", "--text-width=16"]
PLAN = parse_plan({"32px": {"1": [1, 2], "5": [1, 2]}})


def pictures(count: int, height: int = 32, width: int = 32, first: int = 0) -> np.ndarray:
    """Return a red bar that moves right by two pixels a frame, ``[count, height, width, 3]``."""
    made = np.full((count, height, width, 3), 30, np.uint8)
    for i in range(count):
        made[i, :, 2 * (first + i) : 2 * (first + i) + 8] = (220, 40, 60)
    return made


def write_video(
    path: Path, made: np.ndarray, *, fps: int = 8, codec: str = "libx264", crf: str = "5"
) -> Path:
    options = {"crf": crf} | ({"b": "2M"} if codec == "libvpx" else {})
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(fps), options=options)
        stream.height, stream.width = made.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for picture in made:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def write_gif(path: Path, made: np.ndarray, milliseconds: int = 100) -> Path:
    stills = [Image.fromarray(picture) for picture in made]
    stills[0].save(path, save_all=True, append_images=stills[1:], duration=milliseconds)
    return path


def write_folder(path: Path, made: np.ndarray, name: str = "{:03}.png") -> Path:
    path.mkdir(parents=True)
    for i, picture in enumerate(made):
        Image.fromarray(picture).save(path / name.format(i))
    return path


def lay_on_its_side(path: Path) -> None:
    """Make an mp4 that players turn by 90 degrees clockwise, as phones write them."""
    set_matrix(path, (0, 1, -1, 0))


def set_matrix(path: Path, matrix: tuple[int, int, int, int]) -> None:
    """Make an mp4 whose points (x, y) players show at (a x + c y, b x + d y)."""
    data = bytearray(path.read_bytes())
    begin = data.index(b"tkhd") + 44
    a, b, c, d = (65536 * value for value in matrix)
    data[begin : begin + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)


def hide_the_beginning(source: Path, target: Path, frames: int) -> Path:
    """Make an mp4 whose edit list leaves out the first frames, as cuts without encoding do."""
    disabled = {"avoid_negative_ts": "disabled"}
    with av.open(str(source)) as given, av.open(str(target), "w", options=disabled) as made:
        stream = given.streams.video[0]
        written = made.add_stream_from_template(stream)
        for packet in given.demux(stream):
            if packet.size:
                shift = round(frames / stream.average_rate / packet.time_base)
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
                packet.stream = written
                made.mux(packet)
    return target


def encoder(encode: EncodeConfig | None = None) -> ClipEncoder:
    return ClipEncoder(encode or EncodeConfig(), build_codec(CODEC), build_text_encoder(TEXT))


def planned(source: Path, encode: EncodeConfig | None = None) -> list[PlannedClip]:
    return plan_clips(read_list(source), PLAN, encode or EncodeConfig())[0]


def write_vaes(root: Path) -> dict[str, Path]:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    made = {
        "AutoencoderKLHunyuanVideo": diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1,
            norm_num_groups=4,
        ),
        "AutoencoderKLWan": diffusers.AutoencoderKLWan(
            base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
            latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.0, 2.0, 0.5, 3.0],
        ),
        "AutoencoderKL": diffusers.AutoencoderKL(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), norm_num_groups=4,
            down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
            scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        "AutoencoderDC": diffusers.AutoencoderDC(
            latent_channels=4, attention_head_dim=4, scaling_factor=0.41407,
            encoder_block_types="ResBlock", decoder_block_types="ResBlock",
            encoder_block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
            encoder_layers_per_block=(1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1),
            encoder_qkv_multiscales=((), (), (), ()), decoder_qkv_multiscales=((), (), (), ()),
        ),
    }  # fmt: skip
    for name, vae in made.items():
        vae.save_pretrained(root / name)
    return {name: root / name for name in made}


UMT5_WIDTH = 16
UMT5_WORDS = "a red green square circle moves left right &".split()


def write_umt5(root: Path, *, tokenizer: str = "tokenizer") -> Path:
    """Write ``text_encoder`` and a folder of its tokenizer of whole words; return the former."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *UMT5_WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    # White space counts as a word, as it may do to a sentencepiece model, unless it is one space.
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "removed")
    ended = {"single": "$A </s>", "special_tokens": [("</s>", 1)]}
    made.post_processor = tokenizers.processors.TemplateProcessing(**ended)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(root / tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        sizes = {"d_model": UMT5_WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        config = transformers.UMT5Config(vocab_size=len(vocabulary), **sizes)
        transformers.UMT5EncoderModel(config).save_pretrained(root / "text_encoder")
    return root / "text_encoder"
