"""Prompts from files, and given frames that sequences begin with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_ext.config.parser import parse_args
from megatron_ext.errors import DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.main import preflight
from megatron_ext.train.run import Run
from megatron_ext.video.config.encoding import CodecConfig, TextEncoderConfig
from megatron_ext.video.data.codec import PatchCodec
from megatron_ext.video.data.randomness import generator
from megatron_ext.video.data.text_encoders import HashedWords
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.prompts import (
    FilePrompts,
    PromptRow,
    first_frame_latent,
    given_block,
)
from megatron_ext.video.task import VIDEO
from tests.ranks import ranks
from tests.video.streaming.runs import flags_of, observed, on_each_clip


def write_images(folder: Path, *greys: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, grey in enumerate(greys):
        Image.fromarray(np.full((8, 8, 3), grey, np.uint8)).save(folder / f"{i:02d}.png")


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--prompts-path {path}"


def configured(folder: Path, words: str) -> Any:
    flags = flags_of(folder, f"--train-iters 1 {words}")
    parsed = parse_args(flags, VIDEO, world_size=1, device="cpu").config
    return preflight(parsed, VIDEO.choose(parsed).preflight)[0]


@ranks(tp=2)
def test_one_rank_of_a_replica_encodes_for_all(context: ParallelContext, tmp_path: Path) -> None:
    config = configured(tmp_path / str(context.rank), "")
    prompts = FilePrompts(config, context, torch.device("cpu"))
    assert (prompts._encoder is None) == (prompts.codec is None) == (context.tp_rank > 0)
    found = prompts(range(5, 10))
    encoder = HashedWords(config.section(TextEncoderConfig))
    # An epoch has each prompt once, with its own second one.
    first = [encoder.encode([f"prompts a {i} disc"])[0][0] for i in range(5)]
    second = [encoder.encode([f"second_prompts a {i} disc"])[0][0] for i in range(5)]
    assert found.text_after is not None and found.start is None
    seen = [next(i for i in range(5) if torch.equal(x, first[i])) for x in found.text]
    # The run's seed orders them, and the epoch, which is the second one.
    order = generator(config.training.seed, 1, "streaming prompts").permutation(5)
    assert config.training.seed == 7 and seen == order.tolist()
    assert all(torch.equal(x, second[i]) for x, i in zip(found.text_after, seen, strict=True))
    assert torch.equal(prompts(range(7, 8)).text, found.text[2:3])


CODEC = PatchCodec(CodecConfig(codec_spatial=2, codec_channels=4))


def test_images_fill_the_first_block_of_a_sequence(tmp_path: Path) -> None:
    write_images(tmp_path, 40, 100, 160)
    rows = [{"text": f"a {i}", "second_text": f"b {i}", "image": f"0{i}.png"} for i in range(3)]

    def first_clip(run: Run) -> list[Any]:
        clips: list[Any] = []
        on_each_clip(run, lambda clip, _: clips.append((clip.latents, clip.mask, clip.first_new)))
        return clips

    _, (clips,) = observed(tmp_path, f"--train-iters 3 {jsonl(tmp_path, rows)}", first_clip)
    latents, mask, first_new = clips[0]
    assert first_new == 3 and mask.tolist() == [[False] * 3 + [True] * 6]
    stills = [torch.full((1, 3, 9, 8, 8), grey / 127.5 - 1) for grey in (40, 100, 160)]
    wanted = [CODEC.encode(still).transpose(1, 2) for still in stills]
    assert wanted[0].shape == (1, 3, 4, 4, 4)
    assert any(torch.allclose(latents[:, :3], x, atol=1e-6) for x in wanted)


def test_a_video_gives_its_first_frames(tmp_path: Path) -> None:
    write_images(tmp_path / "clip", *range(0, 240, 20))
    config = configured(tmp_path, jsonl(tmp_path, [{"text": "a", "video": "clip"}]))
    streaming = config.section(StreamingConfig)
    assert streaming.given_frames == 3 and not streaming.switches

    @ranks()
    def body(context: ParallelContext) -> None:
        (start,) = FilePrompts(config, context, torch.device("cpu"))([0]).start  # type: ignore[misc]
        pixels = torch.arange(9).view(1, 1, 9, 1, 1).expand(1, 3, 9, 8, 8) * 20 / 127.5 - 1
        torch.testing.assert_close(start, CODEC.encode(pixels)[0].transpose(0, 1))

    body()


def test_given_frames_are_not_square_and_a_video_may_be_just_long_enough(tmp_path: Path) -> None:
    """Let the lower half of each picture be black."""
    pixels = torch.full((1, 3, 9, 8, 12), -1.0)
    pixels[:, :, :, :4] = torch.arange(9).view(1, 1, 9, 1, 1) * 20 / 127.5 - 1
    frames = ((pixels[0].permute(1, 2, 3, 0) + 1) * 127.5).round().to(torch.uint8).numpy()
    (tmp_path / "clip").mkdir()
    for i, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / "clip" / f"{i:02d}.png")
    found = given_block(CODEC, str(tmp_path / "clip"), 3, (4, 6), torch.device("cpu"))
    torch.testing.assert_close(found, CODEC.encode(pixels).transpose(1, 2), rtol=0, atol=0.02)
    (tmp_path / "clip" / "08.png").unlink()
    with pytest.raises(DataError, match="has 8 frames, .* of 3 latent frames, which are 9"):
        given_block(CODEC, str(tmp_path / "clip"), 3, (4, 6), torch.device("cpu"))


def test_each_epoch_has_an_order_of_its_own() -> None:
    def orders(seed: int) -> list[list[str]]:
        prompts = FilePrompts.__new__(FilePrompts)
        prompts._seed, prompts._rows = seed, [PromptRow(text) for text in "abcdefgh"]
        texts = [prompts._row(sample).text for sample in range(24)]
        return [texts[:8], texts[8:16], texts[16:]]

    found = orders(3)
    assert all(sorted(epoch) == list("abcdefgh") for epoch in found)
    assert found[0] != found[1] != found[2] != found[0] and found == orders(3) != orders(4)


@pytest.mark.parametrize("name", ["clip/00.png", "clip"])
def test_an_image_or_a_video_gives_a_first_frame_alone(tmp_path: Path, name: str) -> None:
    """Encode the picture as an image, and of the video its first frame only."""
    write_images(tmp_path / "clip", *range(40, 240, 20))
    rows = [{"text": "a", "image" if "png" in name else "video": name}]
    alone = "--independent-first-frame --chunk-frames 10"
    if name == "clip":
        # Given frames need the codec even where it makes no first frames of chunks.
        alone += " --no-encode-first-frame --codec-spatial 2 --codec-channels 4"
    config = configured(tmp_path, f"{jsonl(tmp_path, rows)} {alone}")
    assert config.section(StreamingConfig).given_frames == 1

    @ranks()
    def body(context: ParallelContext) -> None:
        start = FilePrompts(config, context, torch.device("cpu"))([0]).start
        image = CODEC.encode(torch.full((1, 3, 1, 8, 8), 40 / 127.5 - 1))
        assert start is not None and start.shape == (1, 1, 4, 4, 4)
        torch.testing.assert_close(start, image.transpose(1, 2))

    body()


@ranks(dp=2)
def test_a_short_video_is_refused_on_all_ranks(context: ParallelContext, tmp_path: Path) -> None:
    own = tmp_path / str(context.rank)
    write_images(own / "clip", *[0] * (5 if context.rank else 9))
    config = configured(own, jsonl(own, [{"text": "a", "video": "clip"}]))
    prompts = FilePrompts(config, context, torch.device("cpu"))
    with pytest.raises(DataError, match=r"has 5 frames, but a sequence begins with a block of 3"):
        prompts([0])


LARGE_CODEC = PatchCodec(CodecConfig(codec_spatial=2, codec_temporal=2))


def test_a_first_frame_is_the_latent_of_the_last_pixel_frame() -> None:
    pixels = torch.rand(2, 3, 9, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = LARGE_CODEC.encode(pixels).transpose(1, 2)
    assert latents.shape[:2] == (2, 5)
    image = LARGE_CODEC.encode(pixels[:, :, -1:]).transpose(1, 2)
    got = first_frame_latent(LARGE_CODEC, latents.requires_grad_())
    assert got.shape == (2, 1, *latents.shape[2:]) and not got.requires_grad
    torch.testing.assert_close(got, image, rtol=0, atol=1e-5)
    # It is another latent than that of the frame in the video.
    assert not torch.allclose(got[:, 0], latents[:, -1], atol=0.1)
    assert first_frame_latent(LARGE_CODEC, latents.bfloat16()).dtype == torch.bfloat16
