from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_ext.errors import DataError
from megatron_ext.video.config.encoding import EncodeConfig
from megatron_ext.video.data.dataset import OnlineVideos, ShardedVideos, collate, pad_text
from megatron_ext.video.data.encode import VideoSample
from megatron_ext.video.data.geometry import Bucket, parse_plan
from megatron_ext.video.data.preprocess import main
from megatron_ext.video.data.sampler import BucketSteps, Members
from tests.video.data.making import FLAGS, PLAN, encoder, pictures, planned, write_folder, write_gif

VIDEO, IMAGE = Bucket("32px", 5, 32, 32), Bucket("32px", 1, 32, 32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six videos longer than their bucket and three images, in turn."""
    folder = tmp_path_factory.mktemp("clips")
    rows = []
    for i in range(9):
        if i % 3 == 2:
            write_gif(folder / f"{i}.gif", pictures(1, first=i))
            rows.append({"path": f"{i}.gif", "text": f"still {i}"})
        else:
            write_folder(folder / str(i), pictures(9, first=i))
            rows.append({"path": str(i), "text": f"a bar {i}", "fps": 8, "motion": i})
    (folder / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "l.jsonl"


def shards(source: Path, output: Path, *more: str, plan: str = PLAN.as_json()) -> ShardedVideos:
    flags = ["--input", str(source), "--output", str(output), "--buckets", plan, *FLAGS]
    assert main([*flags, *more]) == 0
    return ShardedVideos(output)


def equal(one: VideoSample, other: VideoSample) -> None:
    for field in dataclasses.fields(VideoSample):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b), field.name
        elif isinstance(a, dict):
            assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), field.name
        else:
            assert a == b, field.name


def test_online_encoding_gives_bit_for_bit_what_shards_hold(source: Path, tmp_path: Path) -> None:
    sharded = shards(source, tmp_path / "out", "--clips-per-shard=4")
    online = OnlineVideos(planned(source), encoder(), PLAN)
    assert len(sharded) == len(online) == 9 and online.members(3) == sharded.members(3)
    for number in range(9):
        equal(online[number], sharded[number])
    for one, other in zip(online.null_text, sharded.null_text, strict=True):
        assert torch.equal(one, other)
    for videos in (sharded, online):
        for number in (-1, 9):
            with pytest.raises(IndexError):
                videos[number]


def test_micro_batch_sizes_of_buckets_and_of_the_run(source: Path, tmp_path: Path) -> None:
    plan = '{"32px": {"1": 1.0, "5": [1.0, 2]}}'
    sharded = shards(source, tmp_path / "out", plan=plan)
    assert [entry["micro_batch_size"] for entry in sharded.manifest["buckets"]] == [None, 2]
    wanted = {VIDEO: Members([0, 1, 3, 4, 6, 7], 2), IMAGE: Members([2, 5, 8], 6)}
    assert sharded.members(6) == wanted
    online = OnlineVideos(planned(source), encoder(), parse_plan(plan))
    assert online.members(6) == wanted
    # A run may have a plan of its own.
    mine = ShardedVideos(tmp_path / "out", parse_plan({"32px": {"1": [1, 3], "5": 1}}))
    assert {b: m.micro_batch_size for b, m in mine.members(4).items()} == {VIDEO: 4, IMAGE: 3}
    other = parse_plan({"32px": {"1": 1}})
    for videos in (
        ShardedVideos(tmp_path / "out", other),
        OnlineVideos(planned(source), encoder(), other),
    ):
        with pytest.raises(DataError, match=r"holds clips of 32px 5x32x32, but .* no 32px of 5 fr"):
            videos.members(4)


def test_loader_processes_read_both_alike(source: Path, tmp_path: Path) -> None:
    sharded = shards(source, tmp_path / "out", "--storage=bfloat16")
    steps = BucketSteps(sharded.members(3), 1, 1, 0)
    batches_of_clips = [clips for step in range(2) for _, clips in steps.microbatches(step, 0)]
    for videos in (sharded, OnlineVideos(planned(source), encoder(), PLAN)):
        found = []
        for workers in (0, 1):
            loader = DataLoader(
                videos, batch_sampler=batches_of_clips, num_workers=workers,
                collate_fn=lambda samples: collate(samples, patch=2),
                multiprocessing_context="fork" if workers else None,
            )  # fmt: skip
            found.append(list(loader))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one.latents, other.latents) and one.latents.size(0) == 2
            assert torch.equal(one.numbers, other.numbers)


def test_damaged_clips_give_their_place_to_the_next_of_their_bucket(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clips = planned(source)
    bad = dataclasses.replace(clips[7], clip=dataclasses.replace(clips[7].clip, path="/gone"))
    online = OnlineVideos([*clips[:7], bad, clips[8]], encoder(), PLAN)
    # 7 is the last video: the first follows it.
    equal(online[7], online[0])
    assert "Clip 7 is replaced by the next of its bucket: The clip /gone cannot be" in caplog.text
    equal(online[8], OnlineVideos(clips, encoder(), PLAN)[8])
    only = OnlineVideos([bad], encoder(), PLAN)
    with pytest.raises(DataError, match=r"None of the 1 clips of 32px 5x32x32 can be decoded; the"):
        only[0]


def sample(frames: int = 3, **other: Any) -> VideoSample:
    made = VideoSample(
        latents=torch.randn(4, frames, 4, 6), text=torch.randn(8, 5), pooled=torch.randn(3),
        references={"head1": torch.randn(4, 1, 4, 6)}, fps=8, number=frames, caption="x",
    )  # fmt: skip
    return dataclasses.replace(made, **other)


@pytest.mark.parametrize("multiple", [1, 2, 4, 7, 16])
def test_text_is_padded_until_the_sequence_divides(multiple: int) -> None:
    samples = [sample(), sample()]
    batch = collate(samples, patch=2, multiple=multiple)
    assert (batch.text.size(1) + 3 * 2 * 3) % multiple == 0
    assert 0 <= batch.text.size(1) - 8 < multiple
    for i, one in enumerate(samples):
        assert torch.equal(batch.text[i, :8], one.text)
        assert torch.equal(batch.text[i, 8:], one.text[-1:].expand(batch.text.size(1) - 8, 5))


def test_pad_text_of_one_caption() -> None:
    text = torch.arange(6.0).reshape(3, 2)
    assert pad_text(text, 5, 4) is not None and pad_text(text, 5, 4).shape == (3, 2)
    padded = pad_text(text, 4, 5)
    assert padded.shape == (6, 2) and torch.equal(padded[3:], text[2:].expand(3, 2))


def test_batches() -> None:
    samples = [sample(fps=8, number=5), sample(fps=12, number=2)]
    batch = collate(samples, patch=1)
    assert torch.equal(batch.latents, torch.stack([s.latents for s in samples]))
    assert torch.equal(batch.pooled, torch.stack([s.pooled for s in samples]))
    assert batch.references["head1"].shape == (2, 4, 1, 4, 6)
    assert batch.fps.tolist() == [8, 12] and batch.numbers.tolist() == [5, 2]


@pytest.mark.parametrize(
    ("samples", "patch", "sentence"),
    [
        (
            [sample(3), sample(5)],
            2,
            r"have the shapes \[\(4, 3, 4, 6\), \(4, 5, 4, 6\)\], but must",
        ),
        ([sample()], 4, r"Latents of 4 × 6 do not divide into patches of 4 × 4; choose another"),
        (
            [sample(), sample(references={})],
            2,
            r"the same references, but have .*head1.* and \[\];",
        ),
        ([sample(), sample(text=torch.zeros(7, 5))], 2, r"the same text embeddings, .*\(7, 5\)"),
        ([sample(), sample(pooled=torch.zeros(2))], 2, r"the same text embeddings, .*\(2,\)"),
    ],
)
def test_clips_that_make_no_batch(samples: list[VideoSample], patch: int, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        collate(samples, patch=patch)


def test_crops_of_another_seed_differ(source: Path) -> None:
    videos = [
        OnlineVideos(planned(source, config), encoder(config), PLAN)
        for config in (EncodeConfig(), EncodeConfig(clip_seed=5))
    ]
    differing = [not torch.equal(videos[0][i].latents, videos[1][i].latents) for i in (0, 1, 3, 4)]
    assert any(differing) and torch.equal(videos[0][2].latents, videos[1][2].latents)
