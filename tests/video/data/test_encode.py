"""Clips planned from their headers, and encoded with their references and captions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig
from megatron_ext.video.data.clips import Clip, read_list
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.encode import (
    ClipEncoder,
    PlannedClip,
    VideoSample,
    check_codec,
    plan_clips,
    reference_names,
    report,
)
from megatron_ext.video.data.geometry import Bucket, ClipShape, Drop, parse_plan
from tests.video.data.making import PLAN, encoder, pictures, write_folder, write_gif, write_video


def make_clips(folder: Path) -> list[Clip]:
    """One clip for each bucket and for each reason to drop one."""
    write_folder(folder / "pictures", pictures(6))
    write_gif(folder / "still.gif", pictures(1))
    write_video(folder / "short.mp4", pictures(3))
    write_gif(folder / "small.gif", pictures(6, 16, 16))
    (folder / "broken.mp4").write_bytes(b"no video")
    names = "pictures still.gif short.mp4 small.gif broken.mp4 missing.mp4".split()
    return [*(Clip(str(folder / n), "a bar") for n in names), Clip(str(folder / "pictures"), "")]


def test_every_clip_is_planned_or_dropped_with_its_reason(tmp_path: Path) -> None:
    clips, seen = make_clips(tmp_path), []
    planned, dropped = plan_clips(clips, PLAN, EncodeConfig(), workers=3, tick=seen.append)
    assert [(p.number, str(p.bucket)) for p in planned] == [
        (0, "32px 5x32x32"),
        (1, "32px 1x32x32"),
    ]
    assert [(d.number, d.reason) for d in dropped] == [
        (2, Drop.TOO_SHORT),
        (3, Drop.TOO_SMALL),
        (4, Drop.UNREADABLE),
        (5, Drop.UNREADABLE),
        (6, Drop.NO_CAPTION),
    ]
    assert sorted([*(p.number for p in planned), *(d.number for d in dropped)]) == list(range(7))
    assert seen == list(range(1, 8))
    lines = report(dropped, len(clips))
    assert lines[0].startswith("2 of 7 clips dropped: the clip cannot be read. First: The clip ")
    assert "broken.mp4 cannot be read (" in lines[0] and lines[0].endswith("take its row out.")
    assert f"has no caption. First: {clips[6].path}" in "\n".join(lines)
    assert sum(int(line.split()[0]) for line in lines) == len(dropped)
    assert report([], 7) == []


def test_the_number_of_threads_changes_nothing(tmp_path: Path) -> None:
    clips = make_clips(tmp_path)
    assert plan_clips(clips, PLAN, EncodeConfig(), workers=1) == plan_clips(
        clips, PLAN, EncodeConfig(), workers=4
    )


def test_no_clip_in_any_bucket_is_explained(tmp_path: Path) -> None:
    clips = make_clips(tmp_path)
    with pytest.raises(DataError, match=r"^None of the 7 clips has a bucket in the plan") as error:
        plan_clips(clips, parse_plan({"512px": {"5": 1}}), EncodeConfig())
    assert len(error.value.messages) == 4
    assert "4 of 7 clips dropped: the clip has too few pixels for ev" in error.value.messages[1]


def test_plans_that_the_codec_cannot_encode() -> None:
    codec = build_codec(CodecConfig(codec_spatial=4))
    check_codec(PLAN, codec, (1,))
    with pytest.raises(ConfigError, match=r"frames \(6\) must be a multiple .* choose 5"):
        check_codec(parse_plan({"32px": {"1": 1, "6": 1}}), codec)
    # A bucket that is closed needs no codec.
    check_codec(parse_plan({"32px": {"1": 1, "6": 0}}), codec)
    with pytest.raises(ConfigError, match=r"height \(32\) must be a multiple .* \(24\)"):
        check_codec(PLAN, build_codec(CodecConfig(codec_spatial=24, codec_channels=8)))


def test_references_that_no_bucket_has_are_refused() -> None:
    codec = build_codec(CodecConfig(codec_spatial=4))
    check_codec(parse_plan({"32px": {"1": 1}}), codec, (1,))
    check_codec(parse_plan({"32px": {"37": 1}}), codec, (1, 9))
    with pytest.raises(ConfigError, match=r"`reference_lengths` \(9\) .* \(9\), .* least 37 fra"):
        check_codec(parse_plan({"32px": {"33": 1}}), codec, (1, 9))


def test_lists_feed_the_plan(tmp_path: Path) -> None:
    make_clips(tmp_path)
    rows = [{"path": "pictures", "text": "a bar", "fps": 48}, {"path": "still.gif", "text": "b"}]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    planned, dropped = plan_clips(read_list(tmp_path / "l.jsonl"), PLAN, EncodeConfig())
    # At 48 frames per second every other frame is left out, and 3 of 6 fill no bucket.
    assert [d.reason for d in dropped] == [Drop.TOO_SHORT] and planned[0].number == 1


def planned(folder: Path, frames: int = 13, files: int | None = None) -> PlannedClip:
    """A folder of images at 8 frames per second as the clip of number 4."""
    shape = ClipShape(files or frames, 32, 32, 8.0)
    clip = Clip(str(folder), "a bar", 8.0, 3.6)
    return PlannedClip(4, clip, shape, Bucket("32px", frames, 32, 32))


def encoded(folder: Path, made: np.ndarray, lengths: tuple[int, ...] = (1, 2)) -> VideoSample:
    write_folder(folder, made)
    config = EncodeConfig(temporal_crop="start", reference_lengths=lengths)
    return encoder(config).sample(planned(folder, len(made)))


def test_no_later_frame_leaks_into_a_head_and_no_earlier_one_into_a_tail(tmp_path: Path) -> None:
    one, late, early = pictures(13), pictures(13), pictures(13)
    late[5:], early[:8] = 255 - late[5:], 255 - early[:8]
    first, changed_late, changed_early = (
        encoded(tmp_path / str(i), made) for i, made in enumerate((one, late, early))
    )
    for name in ("head1", "head2"):
        assert torch.equal(first.references[name], changed_late.references[name])
        assert not torch.equal(first.references[name], changed_early.references[name])
    for name in ("tail1", "tail2"):
        assert torch.equal(first.references[name], changed_early.references[name])
        assert not torch.equal(first.references[name], changed_late.references[name])
    assert torch.equal(first.latents[:, :2], changed_late.latents[:, :2])


def test_references_are_pieces_encoded_by_themselves(tmp_path: Path) -> None:
    made = pictures(13)
    sample = encoded(tmp_path / "a", made)
    codec = encoder().codec
    pixels = (torch.from_numpy(made).permute(3, 0, 1, 2) / 127.5 - 1)[None]
    assert sorted(sample.references) == sorted(reference_names((1, 2)))
    for name, piece in {
        "head1": pixels[:, :, :1], "head2": pixels[:, :, :5],
        "tail1": pixels[:, :, -1:], "tail2": pixels[:, :, -5:],
    }.items():  # fmt: skip
        wanted = codec.encode(piece)[0]
        torch.testing.assert_close(sample.references[name], wanted, msg=name)
        assert sample.references[name].shape == (24, int(name[-1]), 8, 8)
    torch.testing.assert_close(sample.latents, codec.encode(pixels)[0])


def test_clips_too_short_for_a_reference_have_none(tmp_path: Path) -> None:
    assert set(encoded(tmp_path / "a", pictures(5)).references) == {"head1", "tail1"}
    assert not encoded(tmp_path / "b", pictures(1)).references


def test_what_a_sample_says(tmp_path: Path) -> None:
    sample = encoded(tmp_path / "a", pictures(5))
    assert (sample.number, sample.fps) == (4, 8)
    assert sample.caption == "a bar 8 FPS, 4 motion score."
    text, pooled = encoder().text_encoder.encode([sample.caption])
    assert torch.equal(sample.text, text[0]) and torch.equal(sample.pooled, pooled[0])
    still = encoded(tmp_path / "b", pictures(1))
    assert (still.fps, still.caption) == (0, "a bar")


def test_crops_begin_within_the_clip_and_repeat_by_epoch(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", pictures(12))
    clip = planned(tmp_path / "a", 5, 12)
    made = encoder(EncodeConfig(clip_seed=3))
    epochs = [made.sample(clip, epoch).latents for epoch in range(6)]
    assert torch.equal(epochs[0], made.sample(clip).latents)
    assert any(not torch.equal(epochs[0], other) for other in epochs[1:])
    start = encoder(EncodeConfig(temporal_crop="start")).sample(clip).latents
    pixels = torch.from_numpy(pictures(5)).permute(3, 0, 1, 2) / 127.5 - 1
    torch.testing.assert_close(start, made.codec.encode(pixels[None])[0])


def test_fast_clips_lose_frames(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", pictures(12))
    clip = Clip(str(tmp_path / "a"), "a bar", 30.0)
    fast = PlannedClip(0, clip, ClipShape(12, 32, 32, 30.0), Bucket("32px", 5, 32, 32))
    made = encoder(EncodeConfig(fps_cap=12, temporal_crop="start"))
    with pytest.raises(DataError, match=r"only 4 of 5 frames could be decoded"):
        made.sample(fast)
    made = encoder(EncodeConfig(fps_cap=24, temporal_crop="start"))
    sample = made.sample(fast)
    assert (sample.fps, sample.caption) == (15, "a bar 15 FPS.")
    pixels = torch.from_numpy(pictures(9)[::2]).permute(3, 0, 1, 2) / 127.5 - 1
    torch.testing.assert_close(sample.latents, made.codec.encode(pixels[None])[0])


class Random:
    """A codec that tells what it was asked."""

    channels, spatial, temporal = 1, 4, 4

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, int]] = []

    @property
    def identity(self) -> dict[str, Any]:
        return {}

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return 1, (num_frames - 1) // 4 + 1, height // 4, width // 4

    def encode(self, pixels: torch.Tensor, *, number: int = 0, piece: str = "clip") -> torch.Tensor:
        self.asked.append((number, piece, pixels.size(2)))
        return torch.zeros(1, *self.latent_shape(*pixels.shape[2:]))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        raise AssertionError


def test_random_codecs_are_told_the_clip_and_the_piece(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", pictures(5))
    codec = Random()
    ClipEncoder(EncodeConfig(), codec, encoder().text_encoder).sample(planned(tmp_path / "a", 5))
    assert codec.asked == [(4, "clip", 5), (4, "head1", 1), (4, "tail1", 1)]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"fps_cap": 0}, r"`--fps-cap` \(0\) must be at least 1; 24 is the default"),
        ({"temporal_crop": "end"}, r"`temporal_crop` \(end\) must be random or start; choose one"),
        ({"clip_seed": -1}, r"`--clip-seed` \(-1\) must be at least 0"),
        ({"reference_lengths": (0,)}, r"`--reference-lengths` \(0\) must be at least 1"),
        ({"reference_lengths": (9, 9)}, r"\(\[9, 9\]\) must be different numbers of latent fram"),
    ],
)
def test_options_of_no_use(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        EncodeConfig(**wrong)
