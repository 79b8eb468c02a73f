"""Prompts from files, their references, and where the captions of long videos switch."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig, TextEncoderConfig
from megatron_ext.video.config.run import ConditionConfig, SampleConfig
from megatron_ext.video.config.window import FrameBlocks
from megatron_ext.video.data.clips import Clip, with_suffix
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.conditions import Text
from megatron_ext.video.data.frames import decode
from megatron_ext.video.data.text_encoders import build_text_encoder
from megatron_ext.video.sampling.encoding import EncodedRequests, encode_requests
from megatron_ext.video.sampling.groups import SampleShape
from megatron_ext.video.sampling.mp4 import Mp4Writer
from megatron_ext.video.sampling.requests import (
    ClipRequest,
    read_requests,
)
from megatron_ext.video.streaming.config import StreamingConfig, StreamingSampleConfig
from megatron_ext.video.streaming.prompts import (
    Switch,
    VideoPrompt,
    at_block_starts,
    read_video_prompts,
    video_prompts,
)

SHAPE = SampleShape(num_frames=13, height=16, width=32, fps=8)
CODEC = build_codec(CodecConfig(codec_spatial=4, codec_channels=6))
ENCODER = build_text_encoder(TextEncoderConfig(text_length=12, text_width=8, pooled_width=4))
CONDITIONS = ConditionConfig(v2v_frames=2)
STREAMING, OWN = StreamingConfig(), StreamingSampleConfig()


def prompts(folder: Path, *rows: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def encode(*asked: ClipRequest, shape: SampleShape = SHAPE) -> EncodedRequests:
    return encode_requests(asked, shape, CODEC, ENCODER, conditions=CONDITIONS)


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of twenty frames, 16 per second, each of a grey of its own."""
    path = tmp_path_factory.mktemp("video") / "greys.mp4"
    greys = np.arange(20, dtype=np.uint8)[:, None, None, None] * 10 + 30
    with closing(Mp4Writer(path, 16)) as writer:
        writer.append(np.broadcast_to(greys, (20, 16, 32, 3)))
    return path


def test_a_text_file_has_a_caption_in_each_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a red square\n\n  ein grüner Ring \n", "utf-8")
    captions = ["a red square", "ein grüner Ring"]
    assert read_requests(path) == [ClipRequest(text) for text in captions]
    assert read_video_prompts(path) == [VideoPrompt(text) for text in captions]


def test_rows_of_a_jsonl_have_references_or_switch_often(tmp_path: Path) -> None:
    two = {"text": "two", "reference": "a.png"}
    three = {"text": "three", "reference": "/b.mp4", "mode": "i2v_loop", "motion": 4}
    path = prompts(tmp_path, {"text": " one "}, "", two, three)
    assert read_requests(path) == [
        ClipRequest("one"),
        ClipRequest("two", str(tmp_path / "a.png"), "i2v_head"),
        ClipRequest("three", "/b.mp4", "i2v_loop", 4.0),
    ]
    four = {"text": "four", "image": "a.png", "negative_prompt": "blur", "seed": 0, "steps": 1}
    five = {"text": "five", "video": "b.mp4", "size": [1, 32], "seed": None, "mode": None}
    five |= {"image": None, "reference": None, "motion": None, "steps": None}
    assert read_requests(prompts(tmp_path, four, five)) == [
        ClipRequest(
            "four", str(tmp_path / "a.png"), "i2v_head", negative_prompt="blur", seed=0, steps=1
        ),
        ClipRequest("five", str(tmp_path / "b.mp4"), "v2v_head", size=(1, 32)),
    ]
    switches = [{"frame": 60, "text": "a dog "}, {"frame": 120, "text": "a bird"}]
    path = prompts(tmp_path, {"text": "a cat", "switches": switches}, {"text": "a fish"})
    found = read_video_prompts(path)
    assert found[0] == VideoPrompt("a cat", (Switch(60, "a dog"), Switch(120, "a bird")))
    assert found[0].title == "a cat > a dog > a bird" and found[0].frames == (60, 120)
    assert found[1] == VideoPrompt("a fish")
    path = prompts(tmp_path, {"text": "a fox", "seed": 4, "image": "fox.png"})
    start = str(tmp_path / "fox.png")
    assert read_video_prompts(path) == [VideoPrompt("a fox", (), 4, start)]
    with pytest.raises(
        DataError, match=r"The prompt 'a fox' begins with \S+/fox.png, which does no"
    ):
        video_prompts(SampleConfig(sample_prompts=str(path)), OWN, STREAMING)
    paths = {"sample_texts": ["a", "b"], "sample_video": [str(tmp_path)]}
    (one, two) = video_prompts(SampleConfig(**paths), OWN, STREAMING)  # type: ignore[arg-type]
    assert one == VideoPrompt("a", start=str(tmp_path)) and two.start == str(tmp_path)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 1 is no JSON"),
        ({"caption": "a"}, "line 1 has no `text`"),
        ({"text": "a", "refrence": "b.png"}, r"line 1 has \['refrence'\], but may have"),
        ({"text": "a", "reference": 3}, "line 1 has `reference` 3, which is no text"),
        ({"text": "a", "mode": "i2v_head"}, "line 1 is refused .*all other modes need one"),
        ({"text": "a", "reference": "b", "mode": "t2v"}, "t2v takes no reference"),
        ({"text": "a", "reference": "b", "mode": "i2v"}, r"The mode \(i2v\) .* must be one of"),
        ({"text": "a", "motion": "fast"}, "line 1 is refused .*'fast'"),
        ({"text": "a", "motion": float("inf")}, "no finite number"),
        ({"text": "a", "seed": -1}, "`seed` -1 must be a whole number of at least 0"),
        ({"text": "a", "steps": 0}, "`steps` 0 must be a whole number of at least 1"),
        ({"text": "a", "seed": True}, "`seed` True must be a whole number"),
        ({"text": "a", "steps": 2.5}, "`steps` 2.5 must be a whole number of at least 1"),
        ({"text": "a", "size": "16x32"}, r"`size` '16x32' must be \[height, width\] in pixels"),
        ({"text": "a", "size": [0, 8]}, r"`size` \[0, 8\] must be"),
        ({"text": "a", "image": "b", "video": "c"}, "`image` and `video`, which exclude each"),
        ({"text": "a", "image": 3}, "line 1 has `image` 3, which is no text"),
        ({"text": "a", "negative_prompt": ["b"]}, "which is no text"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_requests(prompts(tmp_path, row))


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.txt cannot be read"):
        read_requests(tmp_path / "none.txt")
    with pytest.raises(DataError, match=r"prompts\.jsonl holds no prompt; write one a line"):
        read_requests(prompts(tmp_path, ""))
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot be read"):
        read_requests(tmp_path / "latin")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"switches": []}, r"line 1 has no `text`; mend the row"),
        ({"text": "a", "reference": "a.png"}, r"has \['reference'\], but may have \['text', 's"),
        ({"text": "a", "steps": 4}, r"has \['steps'\], but may have \['text', 'switches', 'seed'"),
        ({"text": "a", "seed": 1.5}, r"is refused \(`seed` 1.5 must be a whole number"),
        ({"text": "a", "switches": {"frame": 3}}, r"is refused \(`switches` .* is no list\)"),
        ({"text": "a", "switches": [{"frame": 3}]}, r"a switch must have `frame` and `text`, but"),
        ({"text": "a", "switches": [{"frame": "3", "text": "b"}]}, r"needs an integer and a text"),
        ({"text": "a", "switches": [{"frame": True, "text": "b"}]}, r"needs an integer and a"),
        ({"text": "a", "switches": [{"frame": 0, "text": "b"}]}, r"at frames 0, but must be above"),
        (
            {"text": "a", "switches": [{"frame": 6, "text": "b"}, {"frame": 3, "text": "c"}]},
            r"are at frames 6, 3, but must be above 0 and rising; sort them",
        ),
    ],
)
def test_bad_switches_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_video_prompts(prompts(tmp_path, row))


def test_switches_move_to_the_next_block() -> None:
    asked = [VideoPrompt("a", (Switch(1, "b"), Switch(6, "c"), Switch(7, "d")))]
    (moved,) = at_block_starts(asked, blocks=FrameBlocks(3), num_frames=12)
    assert moved.frames == (3, 6, 9) and moved.title == asked[0].title
    later = [VideoPrompt("a", (Switch(1, "b"), Switch(3, "c"), Switch(7, "d")))]
    (moved,) = at_block_starts(later, blocks=FrameBlocks(3, first_alone=True), num_frames=10)
    assert moved.frames == (1, 4, 7)
    with pytest.raises(DataError, match=r"'a' switches at latent frame 7, but the last .* at 6"):
        at_block_starts(asked, blocks=FrameBlocks(3), num_frames=9)
    last = [VideoPrompt("a", (Switch(9, "b"),))]
    assert at_block_starts(last, blocks=FrameBlocks(3), num_frames=12) == last
    with pytest.raises(DataError, match=r"switches at latent frame 10, but the last .* at 9"):
        at_block_starts(
            [VideoPrompt("a", (Switch(10, "b"),))], blocks=FrameBlocks(3), num_frames=12
        )
    with pytest.raises(ConfigError, match="above 0 and rising"):
        VideoPrompt("a", (Switch(3, "b"), Switch(3, "c")))
    twice = [VideoPrompt("a", (Switch(4, "b"), Switch(5, "c")))]
    with pytest.raises(DataError, match=r"frames 4, 5, two of them in one block of 3 frames"):
        at_block_starts(twice, blocks=FrameBlocks(3), num_frames=12)


def test_a_reference_is_turned_and_over_the_background_of_training(tmp_path: Path) -> None:
    made = np.zeros((32, 16, 4), np.uint8)
    made[:16] = (200, 40, 80, 255)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(made).save(tmp_path / "phone.png", exif=exif)
    shape = replace(SHAPE, encode=EncodeConfig(video_background="black"))
    request = ClipRequest("a", str(tmp_path / "phone.png"), "i2v_head")
    references = encode(request, shape=shape).references
    assert references is not None
    # Turned clockwise: what was above is at the right.
    wanted = np.zeros((16, 32, 3), np.float32)
    wanted[:, 16:] = (200, 40, 80)
    pixels = torch.from_numpy(wanted).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    torch.testing.assert_close(references.latents[0, :, :1], CODEC.encode(pixels)[0])


def test_references_are_taken_at_the_exact_rate_of_training(video: Path) -> None:
    shape = replace(SHAPE, fps=12, encode=EncodeConfig(video_fps=12))
    references = encode(ClipRequest("a", str(video), "v2v_head"), shape=shape).references
    assert references is not None
    # Of 16 frames a second those at 0, 1.33, 2.67, 4 and 5.33.
    greys = torch.tensor([30, 40, 60, 70, 80]) / 127.5 - 1
    wanted = CODEC.encode(greys[None, None, :, None, None].expand(1, 3, 5, 16, 32))
    assert (references.latents[:, :, :2] - wanted).abs().max() < 0.1 * wanted.abs().max()
    changed = CODEC.encode(greys.roll(1)[None, None, :, None, None].expand(1, 3, 5, 16, 32))
    assert (references.latents[:, :, :2] - changed).abs().max() > 0.1 * wanted.abs().max()


def test_captions_have_the_suffix_of_training() -> None:
    encoded = encode(ClipRequest("a red square"), ClipRequest("a ring", motion=4.2))
    captions = [with_suffix("a red square", 8), with_suffix("a ring", 8, 4.2)]
    rows, pooled = ENCODER.encode(captions)
    assert torch.equal(encoded.text.sequence, rows) and torch.equal(encoded.text.pooled, pooled)
    assert len(encoded) == 2 and encoded.references is None
    assert encoded.latent_shape == (6, 4, 4, 8)
    assert torch.equal(encoded.null.sequence, ENCODER.encode([""])[0])
    wordless = replace(SHAPE, encode=EncodeConfig(fps_words=False))
    assert torch.equal(
        encode(ClipRequest("a ring"), shape=wordless).text.sequence, ENCODER.encode(["a ring"])[0]
    )
    image = encode(ClipRequest("a ring", motion=4.2), shape=SampleShape(1, 16, 32))
    assert torch.equal(image.text.sequence, ENCODER.encode(["a ring"])[0])
    # The empty caption of training is taken.
    null = Text(torch.ones(1, 3, 8), torch.ones(1, 4))
    found = encode_requests([ClipRequest("a")], SHAPE, CODEC, ENCODER, null=null).null
    assert torch.equal(found.sequence, null.sequence)
    assert torch.equal(found.pooled, null.pooled)


@pytest.mark.parametrize(
    ("mode", "frames"),
    [
        ("i2v_head", {0: [0]}),
        ("i2v_tail", {3: [19]}),
        ("i2v_loop", {0: [0], 3: [19]}),
        # Every other frame of 16 per second: 5 frames of the codec are 2 latent frames.
        ("v2v_head", {0: [0, 2, 4, 6, 8]}),
        ("v2v_tail", {2: [11, 13, 15, 17, 19]}),
    ],
)
def test_references_are_encoded_alone(mode: str, frames: dict[int, list[int]], video: Path) -> None:
    encoded = encode(ClipRequest("a"), ClipRequest("b", str(video), mode))
    given = encoded.references
    assert given is not None and given.latents.shape == (2, *encoded.latent_shape)
    assert not given.masks[0].any() and not given.latents[0].any()
    whole = decode(Clip(str(video), ""), 0, 1, 20, (16, 32))
    wanted_mask = torch.zeros(4, dtype=torch.bool)
    for start, numbers in frames.items():
        latents = CODEC.encode(whole[None, :, numbers])[0]
        length = latents.size(1)
        wanted_mask[start : start + length] = True
        assert torch.equal(given.latents[1][:, start : start + length], latents)
    assert torch.equal(given.masks[1], wanted_mask)


def test_an_image_is_scaled_and_cut_to_the_clip(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(np.full((50, 20, 3), 200, np.uint8)).save(path)
    given = encode(ClipRequest("a", str(path), "i2v_loop")).references
    assert given is not None
    pixels = CODEC.decode(given.latents[:, :, :1])
    assert torch.allclose(pixels, torch.full((1, 3, 1, 16, 32), 200 / 127.5 - 1), atol=1e-5)
    assert torch.equal(given.latents[:, :, 0], given.latents[:, :, 3])


def test_references_and_shapes_that_do_not_fit_are_refused(tmp_path: Path, video: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        encode(ClipRequest("a", str(tmp_path / "none.mp4"), "i2v_head"))
    longer = ConditionConfig(v2v_frames=3)
    shape = SampleShape(17, 16, 32, fps=2)
    asked = [ClipRequest("a", str(video), "v2v_head")]
    with pytest.raises(DataError, match="has 20 frame.* but the mode v2v_head needs 65"):
        encode_requests(asked, shape, CODEC, ENCODER, conditions=longer)
    # A frame less than the mode needs is too few.
    exact = ConditionConfig(v2v_frames=6)
    with pytest.raises(DataError, match="has 20 frame.* but the mode v2v_head needs 21"):
        encode_requests(asked, SampleShape(29, 16, 32, fps=16), CODEC, ENCODER, conditions=exact)
    with pytest.raises(DataError, match="i2v_head was asked for a clip of 1 latent frame"):
        encode(ClipRequest("a", str(video), "i2v_head"), shape=SampleShape(1, 16, 32))
    with pytest.raises(ConfigError, match=r"number of frames \(12\)"):
        encode(ClipRequest("a"), shape=SampleShape(12, 16, 32))
