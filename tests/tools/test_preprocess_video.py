from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from megatron_ext.errors import DataError
from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig, TextEncoderConfig
from megatron_ext.video.data.clips import Clip, decode, probe, read_list
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.dataset import OnlineVideos, ShardedVideos, collate
from megatron_ext.video.data.encode import ClipEncoder, plan_clips
from megatron_ext.video.data.geometry import parse_plan
from megatron_ext.video.data.preprocess import main
from megatron_ext.video.data.text_encoders import build_text_encoder

PLAN = '{"32px": {"1": [1, 2], "5": [1, 2]}}'
SIZES = ["--codec-spatial=4", "--codec-channels=24", "--text-length=6", "--text-width=16"]


def frames(count: int, size: int = 32) -> np.ndarray:
    pictures = np.full((count, size, size, 3), 30, np.uint8)
    for i in range(count):
        pictures[i, :, 2 * i : 2 * i + 8] = (220, 40, 60)
    return pictures


def write_mp4(path: Path, count: int) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(8), options={"crf": "5"})
        stream.height = stream.width = 32
        stream.pix_fmt = "yuv420p"
        for picture in frames(count):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Write five usable clips of every kind, and one for each reason to drop."""
    folder = tmp_path / "clips"
    (folder / "pictures").mkdir(parents=True)
    for i, picture in enumerate(frames(6)):
        Image.fromarray(picture).save(folder / "pictures" / f"{i:03}.png")
    stills = [Image.fromarray(picture) for picture in frames(6)]
    stills[0].save(folder / "a.gif", save_all=True, append_images=stills[1:], duration=100)
    stills[0].save(folder / "still.png")
    write_mp4(folder / "a.mp4", 9)
    write_mp4(folder / "short.mp4", 3)
    Image.fromarray(frames(1, 16)[0]).save(folder / "small.png")
    (folder / "broken.mp4").write_bytes(b"no video")
    names = "a.mp4 a.gif pictures still.png short.mp4 small.png broken.mp4 missing.mp4".split()
    rows = [{"path": name, "text": "a red bar moves right"} for name in names]
    rows.append({"path": "a.mp4", "text": ""})
    path = folder / "clips.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(clips: Path, output: Path, *more: str) -> int:
    return main(["--input", str(clips), "--output", str(output), "--buckets", PLAN, *SIZES, *more])


def test_clips_to_shards_and_back(
    clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run(clips, output, "--clips-per-shard=3") == 0
    said = capsys.readouterr().err
    assert "4 clips in 2 shards, 5 dropped" in said and "2 of 9 clips dropped" in said
    videos = ShardedVideos(output)
    assert len(videos) == 4 and videos.manifest["dropped"]["cannot be read"] == 2
    assert videos[0].caption == "a red bar moves right 8 FPS."
    assert videos[3].caption == "a red bar moves right" and not videos[3].references
    codec = build_codec(CodecConfig(codec_spatial=4, codec_channels=24))
    first = codec.decode(videos[2].latents[None])[0]
    truth = torch.from_numpy(frames(6)[:5]).permute(3, 0, 1, 2) / 127.5 - 1
    assert (first - truth).abs().mean() < 0.2
    text, pooled = videos.null_text
    assert text.shape == (6, 16) and not text.any() and not pooled.any()
    batch = collate([videos[0], videos[1]], patch=2, multiple=8)
    assert batch.latents.shape == (2, 24, 2, 8, 8) and batch.references["tail1"].shape[2] == 1
    assert (batch.text.size(1) + 2 * 16) % 8 == 0


def test_online_gives_what_the_shards_hold(clips: Path, tmp_path: Path) -> None:
    assert run(clips, tmp_path / "out") == 0
    sharded = ShardedVideos(tmp_path / "out")
    encoder = ClipEncoder(
        EncodeConfig(),
        build_codec(CodecConfig(codec_spatial=4, codec_channels=24)),
        build_text_encoder(TextEncoderConfig(text_length=6, text_width=16)),
    )
    plan = parse_plan(PLAN)
    planned, _ = plan_clips(read_list(clips), plan, EncodeConfig())
    online = OnlineVideos(planned, encoder, plan)
    assert online.members(1) == sharded.members(1)
    for number in range(len(sharded)):
        torch.testing.assert_close(online[number].latents, sharded[number].latents)
        torch.testing.assert_close(online[number].text, sharded[number].text)


def test_finished_shards_are_kept_and_other_data_is_not_overwritten(
    clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run(clips, output, "--clips-per-shard=2") == 0
    before = (output / "shard_00000_latents.bin").stat().st_mtime_ns
    (output / "manifest.json").unlink()
    (output / "shard_00001.json").unlink()
    with pytest.raises(DataError, match=r"manifest.json does not exist, so the data is not whole"):
        ShardedVideos(output)
    assert run(clips, output, "--clips-per-shard=2") == 0
    assert "1 of 2 shards were finished before" in capsys.readouterr().err
    assert (output / "shard_00000_latents.bin").stat().st_mtime_ns == before
    assert run(clips, output, "--clips-per-shard=2", "--clip-seed=5") == 1
    assert "holds a dataset of other clips or options" in capsys.readouterr().err


def test_empty_plan_is_refused_before_anything_is_written(
    clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(clips, tmp_path / "out", "--buckets={}") == 2
    assert run(clips, tmp_path / "out", '--buckets={"512px": {"5": [1, 1]}}') == 1
    assert "None of the 9 clips has a bucket" in capsys.readouterr().err
    assert run(clips, tmp_path / "out", '--buckets={"32px": {"4": [1, 1]}}') == 2
    assert not (tmp_path / "out").exists()


def test_frames_are_those_of_the_file(clips: Path) -> None:
    clip = Clip(str(clips.parent / "pictures"), "x", fps=10.0)
    assert probe(clip).num_frames == 6
    pixels = decode(clip, 1, 2, 2, (32, 32))
    wanted = torch.from_numpy(frames(6)[[1, 3]]).permute(3, 0, 1, 2) / 127.5 - 1
    torch.testing.assert_close(pixels, wanted)
