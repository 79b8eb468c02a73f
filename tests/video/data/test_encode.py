"""Sizes and buckets of clips, and clips encoded with their references and captions."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_ext.errors import ConfigError, DataError, MachineFault
from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig
from megatron_ext.video.config.run import MODES, ConditionConfig
from megatron_ext.video.data import encode as encode_module
from megatron_ext.video.data.clips import Clip, with_suffix
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.conditions import pixel_masks
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.encode import (
    ClipEncoder,
    Dropped,
    PlannedClip,
    VideoSample,
    _most_frames,
    _Probed,
    _scenes,
    _windows,
    caption_for,
    check_codec,
    plan_clips,
    rate_report,
    reference_names,
    report,
    sample_rate,
)
from megatron_ext.video.data.frames import fit, probe, scene_starts
from megatron_ext.video.data.geometry import (
    Bucket,
    BucketPlan,
    BucketRule,
    ClipShape,
    Drop,
    assign,
    available_frames,
    first_frame,
    parse_plan,
    pixel_budget,
    sizes,
    subsampling,
)
from megatron_ext.video.data.given_frames import masked_latents
from tests.video.data import making
from tests.video.data.making import PLAN, encoder, pictures, write_folder, write_gif, write_video


def make_clips(folder: Path) -> list[Clip]:
    write_folder(folder / "pictures", pictures(6))
    write_gif(folder / "still.gif", pictures(1))
    write_video(folder / "short.mp4", pictures(3))
    write_gif(folder / "small.gif", pictures(6, 16, 16))
    (folder / "broken.mp4").write_bytes(b"no video")
    names = "pictures still.gif short.mp4 small.gif broken.mp4 missing.mp4".split()
    return [*(Clip(str(folder / n), "a bar") for n in names), Clip(str(folder / "pictures"), "")]


def test_every_clip_is_planned_or_dropped_with_its_reason(tmp_path: Path) -> None:
    clips = make_clips(tmp_path)
    seen: list[int] = []
    # Of more clips than one process takes at a time, several processes read the headers.
    planned, dropped = plan_clips(3 * clips, PLAN, EncodeConfig(), workers=3, tick=seen.append)
    assert seen == list(range(1, 22))
    assert [(p.number, p.clip) for p in planned] == [
        (7 * i + j, clips[j]) for i in range(3) for j in (0, 1)
    ]
    assert [drop.number for drop in dropped] == [7 * i + j for i in range(3) for j in range(2, 7)]
    # A list that grows gives its rows numbers that are not their places.
    numbers, seen = [9, 8, 12, 11, 3, 1, 20], []
    _, others = plan_clips(clips, PLAN, EncodeConfig(), numbers=numbers, workers=3)
    assert [drop.number for drop in others] == numbers[2:]
    planned, dropped = plan_clips(clips, PLAN, EncodeConfig(), workers=3, tick=seen.append)
    buckets = [(p.number, str(p.bucket)) for p in planned]
    assert buckets == [(0, "32px 5x32x32"), (1, "32px 1x32x32")]
    reasons = [Drop.TOO_SHORT, Drop.TOO_SMALL, *[Drop.UNREADABLE] * 2, Drop.NO_CAPTION]
    assert [(d.number, d.reason) for d in dropped] == list(enumerate(reasons, 2))
    assert seen == list(range(1, 8))
    lines = report(dropped, len(clips))
    assert lines[0].startswith("2 of 7 clips dropped: the clip cannot be read. First: The clip ")
    assert "broken.mp4 cannot be read (" in lines[0] and lines[0].endswith("take its row out.")
    assert f"has no caption. First: {clips[6].path}" in "\n".join(lines)
    assert sum(int(line.split()[0]) for line in lines) == len(dropped)
    assert report([], 7) == []
    assert plan_clips(clips, PLAN, EncodeConfig(), workers=1) == (planned, dropped)
    with pytest.raises(DataError, match=r"^None of the 7 clips has a bucket in the plan") as error:
        plan_clips(clips, parse_plan({"512px": {"5": 1}}), EncodeConfig())
    assert len(error.value.messages) == 4
    assert "4 of 7 clips dropped: the clip has too few pixels for ev" in error.value.messages[1]


def test_reasons_are_told_by_their_frequency_with_their_first_clips() -> None:
    reasons = [Drop.TOO_SHORT, Drop.UNREADABLE, Drop.NO_CAPTION, Drop.UNREADABLE, Drop.TOO_SHORT]
    dropped = [Dropped(i, f"{i}.mp4", reason) for i, reason in enumerate(reasons)]
    dropped += [Dropped(5, "5.mp4", Drop.UNREADABLE, "the sixth.")]
    assert report(dropped, 9) == [
        "3 of 9 clips dropped: the clip cannot be read. First: 1.mp4.",
        f"2 of 9 clips dropped: the clip {Drop.TOO_SHORT.value}. First: 0.mp4.",
        "1 of 9 clips dropped: the clip has no caption. First: 2.mp4.",
    ]
    assert report(dropped[-1:], 1)[0].endswith("First: the sixth.")


def test_no_later_frame_leaks_into_a_head_and_no_earlier_one_into_a_tail(tmp_path: Path) -> None:
    one, late, early = pictures(13), pictures(13), pictures(13)
    late[5:], early[:8] = 255 - late[5:], 255 - early[:8]
    videos = {"whole": one, "late": late, "early": early}
    whole, in_late, in_early = (encoded(tmp_path / n, made) for n, made in videos.items())
    for name, piece in whole.references.items():
        assert torch.equal(piece, in_late.references[name]) == name.startswith("head")
        assert torch.equal(piece, in_early.references[name]) == name.startswith("tail")
    assert torch.equal(whole.latents[:, :2], in_late.latents[:, :2])


@pytest.mark.parametrize("last", [False, True])
def test_masked_clips_are_the_condition_of_diffusers(last: bool, tmp_path: Path) -> None:
    """Compare with the pipeline of Wan's image-to-video, for the first frame or for both ends."""
    pipelines = pytest.importorskip("diffusers.pipelines.wan.pipeline_wan_i2v")
    codec = build_codec(CodecConfig(str(making.write_vaes(tmp_path)["AutoencoderKLWan"])))
    pixels = torch.rand(1, 3, 9, 16, 24, generator=torch.Generator().manual_seed(1)) * 2 - 1
    mode = "i2v_loop" if last else "i2v_head"
    config = EncodeConfig(masked_references=("head", "loop", "middle"), middle_reference=True)
    made = ClipEncoder(config, codec, encoder().text_encoder)._references(pixels, 3, 0, "")
    pipeline: Any = SimpleNamespace(
        vae=codec.vae, config=SimpleNamespace(expand_timesteps=False), vae_scale_factor_temporal=4,
        vae_scale_factor_spatial=8,
    )  # fmt: skip
    _, wanted = pipelines.WanImageToVideoPipeline.prepare_latents(
        pipeline, pixels[:, :, 0], 1, 4, 16, 24, 9, torch.float32, torch.device("cpu"),
        last_image=pixels[:, :, -1] if last else None,
    )  # fmt: skip
    batch = VideoBatch(
        wanted[:, 4:], torch.zeros(1, 1, 1), torch.zeros(1, 0),
        {name: latents[None] for name, latents in made.items()},
    )  # fmt: skip
    drawn = torch.tensor([MODES.index(mode)])
    masks = pixel_masks(drawn, 3, ConditionConfig(), 4)[..., None, None].expand(1, 4, 3, 2, 3)
    latents = masked_latents(batch, drawn, ConditionConfig())
    torch.testing.assert_close(torch.cat([masks, latents], dim=1), wanted)
    # A middle frame is the last pixel frame of the latent frame in the middle.
    middle = torch.zeros_like(pixels)
    middle[:, :, 4] = pixels[:, :, 4]
    torch.testing.assert_close(made["masked_middle1"][None], codec.encode(middle, mean=True))
    assert torch.equal(
        made["middle1"][None], codec.encode(pixels[:, :, 4:5], number=0, piece="middle1")
    )


def test_references_are_pieces_encoded_by_themselves(tmp_path: Path) -> None:
    made = pictures(13)
    sample = encoded(tmp_path / "a", made)
    codec, pixels = encoder().codec, pixels_of(made)
    assert sorted(sample.references) == sorted(
        reference_names(EncodeConfig(reference_lengths=(1, 2)))
    )
    for name, piece in {
        "head1": pixels[:, :, :1], "head2": pixels[:, :, :5],
        "tail1": pixels[:, :, -1:], "tail2": pixels[:, :, -5:],
    }.items():  # fmt: skip
        wanted = codec.encode(piece)[0]
        torch.testing.assert_close(sample.references[name], wanted, msg=name)
        assert sample.references[name].shape == (24, int(name[-1]), 8, 8)
    torch.testing.assert_close(sample.latents, codec.encode(pixels)[0])


def test_what_a_sample_says_and_when_it_has_no_references(tmp_path: Path) -> None:
    sample = encoded(tmp_path / "a", pictures(5))
    assert (sample.number, sample.fps) == (4, 8)
    assert sample.caption == "8 FPS, 4 motion score. a bar"  # would be cut after six words
    text, pooled = encoder().text_encoder.encode([sample.caption])
    assert torch.equal(sample.text, text[0]) and torch.equal(sample.pooled, pooled[0])
    still = encoded(tmp_path / "b", pictures(1))
    assert (still.fps, still.caption) == (0, "a bar")
    assert set(sample.references) == {"head1", "tail1"} and not still.references
    assert with_suffix("a cat", 24, 3.6) == "a cat 24 FPS, 4 motion score."
    assert with_suffix("a cat", 8) == "a cat 8 FPS."
    assert with_suffix("", None, 4) == " 4 motion score."
    assert with_suffix("a cat", None, 0) == "a cat 0 motion score."
    assert with_suffix("a cat", 0) == "a cat"
    assert with_suffix("a cat", 23.976, 4) == "a cat 23.976 FPS, 4 motion score."


def test_words_of_the_rate_stand_where_a_cut_caption_keeps_them(tmp_path: Path) -> None:
    encoder_ = encoder().text_encoder  # of six words
    assert caption_for("a red bar moves", 8, None, encoder_) == "a red bar moves 8 FPS."
    long = "a red bar moves right"
    assert caption_for(long, 8, 3.6, encoder_) == "8 FPS, 4 motion score. a red bar moves right"
    assert caption_for(long, None, None, encoder_) == long
    write_folder(tmp_path / "a", pictures(5))
    made = encoder(EncodeConfig(fps_words=False))
    assert made.sample(planned_folder(tmp_path / "a", 5)).caption == "a bar 4 motion score."


def test_an_exact_rate_takes_frames_by_time_and_is_told(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", pictures(12))
    shape = ClipShape(12, 32, 32, 30.0)
    assert available_frames(shape, 24, 16) == 7 and available_frames(shape, 24) == 6
    assert subsampling(30, 24, 7.5) == (4, 7.5) and subsampling(0, 24, 7.5) == (1, 0)
    clip = Clip(str(tmp_path / "a"), "a bar", 30.0)
    chosen = PlannedClip(0, clip, shape, Bucket("32px", 5, 32, 32))
    made = encoder(EncodeConfig(video_fps=16, temporal_crop="start"))
    sample = made.sample(chosen)
    assert (sample.fps, sample.caption) == (16, "a bar 16 FPS.")
    # Frames at 0, 1.875, 3.75, 5.625 and 7.5.
    wanted = made.codec.encode(pixels_of(pictures(12)[[0, 2, 4, 6, 8]]))[0]
    torch.testing.assert_close(sample.latents, wanted)
    # A window begins at a frame at the rate of samples: 3.75, 5.625, 7.5, 9.375 and 11.25.
    windows = encoder(EncodeConfig(video_fps=16, video_windows="all"))
    sample = windows.sample(replace(chosen, window=(1, 2)))
    wanted = made.codec.encode(pixels_of(pictures(12)[[4, 6, 8, 9, 11]]))[0]
    torch.testing.assert_close(sample.latents, wanted)
    # The stored rate is rounded, that of the caption is not.
    sample = encoder(EncodeConfig(video_fps=23.976, temporal_crop="start")).sample(chosen)
    assert (sample.fps, sample.caption) == (24, "a bar 23.976 FPS.")
    made = encoder(EncodeConfig(video_fps=40, video_blend=True, temporal_crop="start"))
    sample = made.sample(chosen)
    assert sample.caption == "a bar 40 FPS."
    parts = pixels_of(pictures(12))
    mixed = torch.stack(
        [parts[:, :, 0], *(parts[:, :, i] * (1 - w) + parts[:, :, i + 1] * w
                           for i, w in ((0, 0.75), (1, 0.5), (2, 0.25))), parts[:, :, 3]], dim=2
    )  # fmt: skip
    torch.testing.assert_close(sample.latents, made.codec.encode(mixed)[0], atol=1e-5, rtol=1e-4)
    starts = {
        first_frame(ClipShape(90, 32, 32, 30.0), 17, i, seed=1, fps_cap=24, video_fps=16)
        for i in range(99)
    }
    assert len(starts) > 20 and max(starts) == 31 * 1.875


@pytest.mark.parametrize(
    ("flags", "rate"), [({"video_fps": 10.0}, 10), ({"fps_cap": 12}, 10), ({}, 15)]
)
def test_lengths_scenes_and_windows_are_counted_at_the_rate_of_samples(
    flags: dict[str, Any], rate: int, tmp_path: Path
) -> None:
    """Let a clip of 30 frames per second have 12 frames, or 90 with a new scene at frame 45."""
    write_folder(tmp_path / "a", pictures(12))
    short = Clip(str(tmp_path / "a"), "a bar", 30.0)
    planned, dropped = plan_clips([short], PLAN, EncodeConfig(**flags), may_be_empty=True)
    frames = -(-12 * rate // 30)
    assert [p.bucket.num_frames for p in planned] == ([5] if frames >= 5 else [])
    assert [d.reason for d in dropped] == ([] if frames >= 5 else [Drop.TOO_SHORT])
    shape = ClipShape(90, 32, 32, 30.0)
    long = PlannedClip(0, short, shape, Bucket("32px", 5, 32, 32))
    every = EncodeConfig(video_windows="all", **flags)
    assert len(_windows(long, every, None)) == 3 * rate // 5
    assert sample_rate(long, every) == rate
    half = -(-3 * rate // 2)
    scenes = _scenes(_Probed(shape, [0.0, 45.0]), every)
    assert scenes == [range(half), range(half, 3 * rate)]


def test_frames_are_decoded_as_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at a random crop at an exact rate, whose interval and start are no whole frames."""
    noted: list[Any] = []

    def note(*given: Any, **how: Any) -> torch.Tensor:
        noted.append((given, how))
        return torch.zeros(3, 5, 32, 48)

    monkeypatch.setattr(encode_module, "decode", note)
    clip, shape = Clip("a.mp4", "a bar"), ClipShape(90, 64, 96, 30.0)
    flags: dict[str, Any] = {
        "video_fps": 16.0, "video_blend": True, "video_background": "black", "clip_seed": 3
    }  # fmt: skip
    encoder(EncodeConfig(**flags)).sample(PlannedClip(4, clip, shape, Bucket("x", 5, 32, 48)))
    first = first_frame(shape, 5, 4, seed=3, fps_cap=24, video_fps=16.0)
    assert first % 1.875 == 0 and first > 0
    assert noted == [
        (
            (clip, first, 1.875, 5, (32, 48)),
            {"shape": shape, "blend": True, "background": "black"},
        )
    ]


def test_clips_slower_than_the_rate_are_named() -> None:
    def planned_at(fps: float) -> PlannedClip:
        shape, bucket = ClipShape(12, 32, 32, fps), Bucket("32px", 5, 32, 32)
        return PlannedClip(0, Clip(f"{fps:g}.mp4", "x"), shape, bucket)

    clips = [planned_at(fps) for fps in (16, 15.99, 12.5, 8)]
    assert rate_report(clips, EncodeConfig()) == []
    # A picture, which has no rate, is none of the slower clips.
    still = PlannedClip(1, Clip("a.png", "x"), ClipShape(1, 32, 32, 0.0), Bucket("32px", 1, 32, 32))
    assert rate_report([still, *clips], EncodeConfig(video_fps=16)) == [
        "2 of 5 clips are slower than `--video-fps` (16), so that frames repeat. First: 12.5.mp4, "
        "with 12.5."
    ]
    speeds = zip(clips, (1, 1.001, 2, 0.5), strict=True)
    quick = [replace(clip, shape=replace(clip.shape, speed=speed)) for clip, speed in speeds]
    assert rate_report(quick, EncodeConfig()) == [
        "2 of 4 clips go at the `fps` of their row, not at that of their file, so faster or slower "
        "than a player shows them. First: 12.5.mp4, with 12.5 instead of 6.25."
    ]


def test_transparent_parts_show_the_background_of_the_flags(tmp_path: Path) -> None:
    clear = np.zeros((32, 32, 4), np.uint8)
    clear[:, 16:] = (200, 40, 80, 255)
    (tmp_path / "a").mkdir()
    Image.fromarray(clear).save(tmp_path / "a" / "0.png")
    chosen = planned_folder(tmp_path / "a", 1)
    for name, colour in (("#102030", (16, 32, 48)), ("black", (0, 0, 0)), ("white", (255,) * 3)):
        shown = np.where(clear[..., 3:] > 0, clear[..., :3], np.array(colour, np.uint8))
        made = encoder(EncodeConfig(video_background=name))
        wanted = made.codec.encode(pixels_of(shown[None]))[0]
        torch.testing.assert_close(made.sample(chosen).latents, wanted)


def test_a_process_that_dies_while_it_reads_headers_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that runs out of memory kills such a process."""

    def die(clip: Clip) -> Any:
        os._exit(1)

    monkeypatch.setattr(encode_module, "probe", die)
    clips = [Clip(f"{number}.mp4", "x") for number in range(40)]
    with pytest.raises(MachineFault, match=r"A process died while it looked at clips; .* fewer"):
        plan_clips(clips, PLAN, EncodeConfig(), workers=2)


def test_crops_begin_within_the_clip_and_repeat_by_seed(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", pictures(12))
    clip = planned_folder(tmp_path / "a", 5, 12)
    made = encoder(EncodeConfig(clip_seed=3))
    seeds = [encoder(EncodeConfig(clip_seed=3 + i)).sample(clip).latents for i in range(6)]
    assert torch.equal(seeds[0], made.sample(clip).latents)
    assert any(not torch.equal(seeds[0], other) for other in seeds[1:])
    start = encoder(EncodeConfig(temporal_crop="start")).sample(clip).latents
    torch.testing.assert_close(start, made.codec.encode(pixels_of(pictures(5)))[0])
    shape = ClipShape(200, 256, 256, 24)
    starts = {first_frame(shape, 17, i, seed=1, fps_cap=24) for i in range(50)}
    assert len(starts) > 30 and max(starts) <= 183


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
    torch.testing.assert_close(sample.latents, made.codec.encode(pixels_of(pictures(9)[::2]))[0])


def pixels_of(made: np.ndarray) -> torch.Tensor:
    return (torch.from_numpy(made).permute(3, 0, 1, 2) / 127.5 - 1)[None]


def test_plans_that_the_codec_cannot_encode_are_refused() -> None:
    codec = build_codec(CodecConfig(codec_spatial=4))
    for plan, lengths in (
        (PLAN, (1,)),
        (parse_plan({"32px": {"1": 1, "6": 0}}), ()),  # a bucket that is closed needs no codec
        (parse_plan({"32px": {"1": 1}}), (1,)),
        (parse_plan({"32px": {"37": 1}}), (1, 9)),
    ):
        check_codec(plan, codec, EncodeConfig(reference_lengths=lengths))
    with pytest.raises(ConfigError, match=r"`reference_lengths` \(2\) must be .* bucket \(2\), or"):
        check_codec(PLAN, codec, EncodeConfig(reference_lengths=(1, 2)))
    with pytest.raises(ConfigError, match=r"frames \(6\) must be a multiple .* choose 5"):
        check_codec(parse_plan({"32px": {"1": 1, "6": 1}}), codec, EncodeConfig())
    with pytest.raises(ConfigError, match=r"height \(32\) must be a multiple .* \(24\)"):
        coarse = build_codec(CodecConfig(codec_spatial=24, codec_channels=8))
        check_codec(PLAN, coarse, EncodeConfig())
    with pytest.raises(ConfigError, match=r"`reference_lengths` \(9\) .* \(9\), .* least 37 fra"):
        check_codec(parse_plan({"32px": {"33": 1}}), codec, EncodeConfig(reference_lengths=(1, 9)))
    two = parse_plan({"32px": {"5": 1}})
    check_codec(two, codec, EncodeConfig(masked_references=("head", "loop", "none")))
    for config, sentence in (
        (
            EncodeConfig(masked_references=("middle",)),
            r"references` \(middle\) needs clips of 3 ",
        ),
        (
            EncodeConfig(middle_reference=True),
            r"`--middle-reference` needs clips of 3 ",
        ),
    ):
        with pytest.raises(ConfigError, match=rf"{sentence}.* bucket has 2; .* least 9 frames"):
            check_codec(two, codec, config)
    images = parse_plan({"32px": {"1": 1}})
    with pytest.raises(ConfigError, match=r"\(loop\) needs clips of 2 latent .* has 1;"):
        check_codec(images, codec, EncodeConfig(masked_references=("none", "loop")))


def planned_folder(folder: Path, frames: int = 13, files: int | None = None) -> PlannedClip:
    shape = ClipShape(files or frames, 32, 32, 8.0)
    clip = Clip(str(folder), "a bar", 8.0, 3.6)
    return PlannedClip(4, clip, shape, Bucket("32px", frames, 32, 32))


def encoded(folder: Path, made: np.ndarray, lengths: tuple[int, ...] = (1, 2)) -> VideoSample:
    write_folder(folder, made)
    config = EncodeConfig(temporal_crop="start", reference_lengths=lengths)
    return encoder(config).sample(planned_folder(folder, len(made)))


def test_codecs_are_told_clip_and_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "a", pictures(5))
    made = encoder()
    asked, encode = [], type(made.codec).encode

    def noted(codec: Any, pixels: torch.Tensor, **which: Any) -> torch.Tensor:
        asked.append((which["number"], which.get("piece", "clip"), pixels.size(2)))
        return encode(codec, pixels, **which)

    monkeypatch.setattr(type(made.codec), "encode", noted)
    chosen = planned_folder(tmp_path / "a", 5)
    made.sample(chosen)
    assert asked == [(4, "clip", 5), (4, "head1", 1), (4, "tail1", 1)]
    asked.clear()
    made.sample(replace(chosen, window=(2, 0)))
    assert asked == [
        (4, "clip of window 2", 5), (4, "head1 of window 2", 1), (4, "tail1 of window 2", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"fps_cap": 0}, r"`--fps-cap` \(0\) must be at least 1; 24 is the default"),
        ({"temporal_crop": "end"}, r"`temporal_crop` \(end\) must be random or start; choose one"),
        ({"clip_seed": -1}, r"`--clip-seed` \(-1\) must be at least 0"),
        ({"reference_lengths": (0,)}, r"`--reference-lengths` \(0\) must be at least 1"),
        ({"video_fps": 0.0}, r"`--video-fps` \(0.0\) must be above 0 and .* 1000; use the rate of"),
        (
            {"video_fps": 16, "fps_cap": 12},
            r"`--fps-cap` \(12\) has no effect with `--video-fps` \(16",
        ),
        ({"video_blend": True}, r"`--video-blend` needs `--video-fps`, .*; give the rate"),
        (
            {"video_background": "#12"},
            r"`--video-background` \(#12\) must be white, black, grey or",
        ),
        ({"reference_lengths": (9, 9)}, r"\(\[9, 9\]\) must be different numbers of latent fram"),
    ],
)
def test_options_of_no_use(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        EncodeConfig(**wrong)


def test_the_longest_bucket_that_a_clip_fills_or_why_it_has_none() -> None:
    clip = ClipShape(20, 240, 426, 24.0)
    assert assign(clip, TWO_SIZES, 3, seed=1) == Bucket("256px", 17, 192, 336)
    fast = ClipShape(20, 426, 240, 60.0)
    assert subsampling(60.0, 24) == (3, 20)
    assert assign(fast, TWO_SIZES, 3, seed=1) == Bucket("256px", 5, 336, 192)
    big = [assign(ClipShape(20, 800, 800, 24), TWO_SIZES, i, seed=1) for i in range(200)]
    assert {b.resolution for b in big if isinstance(b, Bucket)} == {"256px", "768px"}
    assert not any(isinstance(b, Drop) for b in big)
    assert assign(ClipShape(20, 100, 100, 24), TWO_SIZES, 0, seed=1) is Drop.TOO_SMALL
    assert assign(ClipShape(4, 256, 256, 24), TWO_SIZES, 0, seed=1) is Drop.TOO_SHORT
    rare = parse_plan({"256px": {"5": [0.2, 1]}})
    drawn = [assign(ClipShape(9, 256, 256, 24), rare, i, seed=1) for i in range(2000)]
    assert abs(sum(isinstance(d, Bucket) for d in drawn) / 2000 - 0.2) < 0.03
    assert {d for d in drawn if isinstance(d, Drop)} == {Drop.NOT_DRAWN}
    assert drawn == [assign(ClipShape(9, 256, 256, 24), rare, i, seed=1) for i in range(2000)]


def test_a_clip_of_four_fifths_of_the_pixels_is_enlarged_and_no_smaller_one() -> None:
    """Give a resolution of 160 x 160 pixels clips of 128 and of 127 rows."""
    plan = parse_plan({"160px": {"5": 1.0}})
    found = [assign(ClipShape(5, n, 160, 8.0), plan, 0, seed=1) for n in (128, 127)]
    assert isinstance(found[0], Bucket) and found[1] is Drop.TOO_SMALL


def test_a_larger_resolution_in_the_plan_changes_no_draw_and_the_seed_does() -> None:
    """The reason of a clip without a bucket is that of its largest resolution."""
    one = parse_plan({"64px": {"5": 0.5}})
    two = parse_plan({"64px": {"5": 0.5}, "32px": {"5": 1}, "512px": {"5": 0.5}})

    def taken(plan: BucketPlan, seed: int) -> list[bool]:
        shape = ClipShape(9, 64, 64, 24)
        found = [assign(shape, plan, number, seed=seed) for number in range(60)]
        return [isinstance(x, Bucket) and x.resolution == "64px" for x in found]

    draws = np.random.Generator(np.random.PCG64((3, 0, 7))).random(2)
    assert taken(one, 3)[7] == (draws[0] < 0.5) and taken(two, 3)[7] == (draws[1] < 0.5)
    closed = parse_plan({"512px": {"5": 0}, "64px": {"5": 0.5}})
    assert taken(closed, 3) == taken(two, 3)
    assert taken(one, 3) != taken(one, 4)
    shape = ClipShape(9, 256, 256, 24)
    for lengths, reason in (({"5": 0}, Drop.NOT_DRAWN), ({"17": 1}, Drop.TOO_SHORT)):
        plan = parse_plan({"512px": {"5": 1}, "256px": lengths, "128px": {"33": 1}})
        assert assign(shape, plan, 0, seed=1) is reason


@pytest.mark.parametrize(("name", "pixels"), [("16px", 256), ("16p", 455), ("720p", 1280 * 720)])
def test_names_of_resolutions(name: str, pixels: int) -> None:
    assert pixel_budget(name) == pixels
    with pytest.raises(
        ConfigError, match=r"The resolution \(15p\w*\) must be a number of at least 16"
    ):
        pixel_budget(name.replace("16", "15").replace("720", "15"))


@pytest.mark.parametrize("rule", [0.5, [0.5], [0.5, None]])
def test_rules_without_a_micro_batch_size(rule: Any) -> None:
    for given in ({"32px": {"5": rule}}, json.dumps({"32px": {"5": rule}})):
        plan = parse_plan(given)
        assert plan.rules["32px"][5] == BucketRule(0.5) == BucketRule(0.5, None)
        assert plan.as_dict() == {"32px": {"5": [0.5, None]}}
        assert parse_plan(plan.as_json()) == plan


TWO_SIZES = parse_plan(
    {"256px": {"1": [1, 8], "5": [1, 4], "17": [1, 2]}, "768px": {"1": [0.5, 2], "17": [0.5, 1]}}
)


def test_sizes_of_resolutions() -> None:
    table = {(256, 256), (224, 288), (208, 320), (192, 336), (176, 368), (160, 400)}
    assert set(sizes("256px")) == table | {(w, h) for h, w in table}
    assert (576, 1024) in sizes("768px")


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        *((x, "is empty: it must hold") for x in ({}, {"256px": {}}, {"256px": {"17": [0, 4]}})),
        ({"256px": [1]}, "must be JSON such as"),
        ({"256": {"1": [1, 1]}}, r"resolution \(256\) must be a number"),
        *(
            ({"32px": {frames: 1}}, "must have at least 1|must be JSON such as")
            for frames in ("0", "-4", "1.5", "many")
        ),
        *(
            ({"32px": {"5": rule}}, sentence)
            for rule, sentence in (
                ([1, 0], r"micro-batch size of a bucket \(0\) must be at least 1; set the probab"),
                ([1.5, 2], r"probability of a bucket \(1.5\) must lie between 0 and 1; 1 takes ev"),
                ([1, 2.5], r"\(2.5 is no whole number\); correct it"),
                ([1, True], r"\(True is no whole number\)"),
                ([1, float("inf")], "it holds Infinity|inf is no whole number"),
                ([1, 2, 3], r"\(\[1, 2, 3\] holds more than a probability and a micro-batch siz"),
                ([], "must be JSON such as"),
                ("1.0", "the probability '1.0' is no number"),
                ([True, 2], "the probability True is no number"),
                (None, "must be JSON such as"),
            )
        ),
    ],
)
def test_plans_of_another_form_are_refused(plan: Any, sentence: str) -> None:
    for given in (plan, json.dumps(plan)):
        with pytest.raises(ConfigError, match=sentence):
            parse_plan(given)


@pytest.mark.parametrize(
    ("windows", "begins"),
    [
        (EncodeConfig(video_windows="first"), [0]),
        (EncodeConfig(video_windows="all"), [0, 5, 10, 15]),
        (EncodeConfig(video_windows="all", video_window_stride=7), [0, 7, 14]),
        (EncodeConfig(video_windows="all", video_window_stride=2, video_window_count=3), [0, 2, 4]),
        (EncodeConfig(video_windows="uniform", video_window_count=3), [0, 9, 18]),
        (EncodeConfig(video_windows="uniform", video_window_count=1), [0]),
        # No more than lie side by side.
        (EncodeConfig(video_windows="uniform", video_window_count=9), [0, 6, 12, 18]),
        (EncodeConfig(video_windows="all", video_window_frames=4), []),
    ],
)
def test_windows_of_a_long_clip(tmp_path: Path, windows: EncodeConfig, begins: list[int]) -> None:
    """Each window has the frames of its place, and the fourth has other latents than the first."""
    made = pictures(23, 32, 96)
    write_gif(tmp_path / "long.gif", made)
    (tmp_path / "long.txt").write_text("a bar")
    write_gif(tmp_path / "still.gif", pictures(1))
    (tmp_path / "still.txt").write_text("a still")
    samples = making.planned(tmp_path, windows)
    assert [x.window for x in samples[:-1]] == [*enumerate(begins)]
    assert samples[-1].window is None and samples[-1].key("row") == "row"
    for sample in samples[:-1]:
        assert sample.number == 0 and sample.key("row") == f"row.{sample.window[0]}"
        begin = sample.window[1]
        size = (sample.bucket.height, sample.bucket.width)
        truth = fit(torch.from_numpy(made[begin : begin + 5]), size)[None]
        encoded = encoder(windows).sample(sample)
        assert encoded.latents.equal(build_codec(making.CODEC).encode(truth)[0])


def test_windows_are_limited_by_the_longest_scene_and_by_default() -> None:
    """A clip whose scenes have one frame each is no picture."""
    scenes = [range(3), range(3, 12), range(12, 14)]
    config = EncodeConfig(video_windows="scenes")
    assert _most_frames(config, scenes) == 9
    assert _most_frames(config, [range(1), range(1, 2), range(2, 3)]) == 2
    assert _most_frames(config, [range(1), range(1, 2)]) == 2
    assert _most_frames(config, [range(1)]) is None
    assert _most_frames(EncodeConfig(), None) is None
    for frames, least in ((5, 5), (20, 9)):
        limited = replace(config, video_window_frames=frames)
        assert _most_frames(limited, scenes) == least
    shape = ClipShape(200, 32, 32, 24.0)
    chosen = PlannedClip(0, Clip("a.mp4", "x"), shape, Bucket("32px", 5, 32, 32))
    uniform = _windows(chosen, EncodeConfig(video_windows="uniform"), None)
    assert [sample.window for sample in uniform] == [(0, 0), (1, 65), (2, 130), (3, 195)]
    assert len(_windows(chosen, EncodeConfig(video_windows="all"), None)) == 40
    many = [range(start, start + 6) for start in range(0, 60, 6)]
    assert len(_windows(chosen, config, many)) == 10


def test_scenes_give_a_window_each(tmp_path: Path) -> None:
    """Each scene of at least 5 frames gives a window: three of those of 12, 3, 7 and 6 frames."""
    lengths, random = (12, 3, 7, 6), np.random.default_rng(0)
    backgrounds = random.integers(0, 256, (4, 4, 4, 3)).astype(np.uint8)
    made = pictures(sum(lengths), 64, 64)
    for frame, scene in enumerate(np.repeat(np.arange(4), lengths)):
        made[frame, :, 24:] = np.kron(backgrounds[scene], np.ones((16, 16, 1)))[:, 24:]
    making.write_video(tmp_path / "long.mp4", made)
    making.write_video(tmp_path / "one.mp4", made[:12])
    for name in ("long", "one"):
        (tmp_path / f"{name}.txt").write_text("a bar")
    scenes = EncodeConfig(video_windows="scenes")
    *of_long, of_one = making.planned(tmp_path, scenes)
    assert [x.window for x in of_long] == [(0, 0), (1, 15), (2, 22)] and of_one.window == (0, 0)
    for sample in of_long:
        begin = sample.window[1]
        truth = fit(torch.from_numpy(made[begin : begin + 5]), (32, 32))[None]
        latents = encoder(scenes).sample(sample).latents
        assert (latents - build_codec(making.CODEC).encode(truth)[0]).abs().max() < 0.5
    # At 4 of 8 frames a second the third scene begins at the eighth frame, and none but the first
    # has five.
    assert [x.window for x in making.planned(tmp_path, replace(scenes, video_fps=4))] == [
        (0, 0), (0, 0),
    ]  # fmt: skip
    few = replace(scenes, video_window_count=2)
    assert [x.window for x in making.planned(tmp_path, few)] == [(0, 0), (1, 15), (0, 0)]
    # The rate of a row changes how fast the clip is, and not at which frames its scenes begin.
    # A recording does not begin at 0, and a raw stream has no times.
    (tmp_path / "more").mkdir()
    for kind in ("ts", "h264"):
        making.write_video(tmp_path / "more" / f"long.{kind}", made)
    path = str(tmp_path / "long.mp4")
    others = [Clip(str(path), "x") for path in sorted((tmp_path / "more").iterdir())]
    for clip in (*others, Clip(path, "x"), Clip(path, "x", fps=4.0)):
        starts = scene_starts(clip, probe(clip), 0.3)
        assert starts == pytest.approx([0, 12, 15, 22], abs=1e-6)
    # Above a threshold of 0, some frames of the moving bar begin scenes too.
    every = replace(scenes, video_scene_threshold=0.0)
    assert len(scene_starts(clip, probe(clip), 0.0)) > 4
    assert [x.window for x in making.planned(tmp_path, every)][:2] != [(0, 0), (1, 15)]
    # Where nothing counts as a change, the clip is one scene.
    blind = replace(scenes, video_scene_threshold=1.0)
    assert [x.window for x in making.planned(tmp_path, blind)] == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"video_windows": "some"},
            r"`--video-windows` \(some\) must be first, uniform, all or scenes; cho",
        ),
        (
            {"video_window_frames": 5},
            r"`--video-window-frames` \(5\) needs `--video-windows` first o",
        ),
        (
            {"video_windows": "first", "video_window_stride": 5},
            r"`--video-window-stride` \(5\) needs `--video-windows` all; give it, or leave it out",
        ),
        (
            {"video_windows": "first", "video_window_count": 5},
            r"`--video-window-count` \(5\) needs `--video-windows` uniform or all or sce",
        ),
        (
            {"video_windows": "all", "temporal_crop": "start"},
            r"`--temporal-crop` \(start\) has no effect with `--video-windows` \(all\), which says",
        ),
    ],
)
def test_flags_of_windows_that_would_have_no_effect(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        EncodeConfig(**flags)


@pytest.mark.parametrize("windows", ["first", "uniform", "all", "scenes"])
def test_flags_of_windows_are_taken_where_they_have_an_effect(windows: str) -> None:
    """Limit any window, and the number of all but the first; a time lapse has a low rate."""
    counts = {"video_window_count": 2} if windows != "first" else {}
    found = EncodeConfig(video_windows=windows, video_window_frames=5, video_fps=0.25, **counts)
    assert (found.video_window_frames, found.video_window_count) == (5, (counts and 2) or None)
