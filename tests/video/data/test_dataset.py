"""Datasets of shards and of clips encoded online, their batches, and the steps of buckets."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_ext.errors import DataError
from megatron_ext.video.config.encoding import EncodeConfig
from megatron_ext.video.data.cli import main
from megatron_ext.video.data.dataset import (
    OnlineVideos,
    ShardedVideos,
    VideoBatch,
    collate,
    open_online,
    pad_text,
)
from megatron_ext.video.data.encode import VideoSample
from megatron_ext.video.data.geometry import Bucket, parse_plan
from megatron_ext.video.data.options import VideoPreprocessOptions
from megatron_ext.video.data.sampler import (
    BucketSteps,
    Geometry,
    Members,
    VideoPlan,
    must_mix,
)
from tests.video.data.making import (
    CODEC,
    FLAGS,
    PLAN,
    TEXT,
    encoder,
    pictures,
    planned,
    write_folder,
    write_gif,
)

VIDEO, IMAGE = Bucket("32px", 5, 32, 32), Bucket("32px", 1, 32, 32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
            assert torch.equal(one.latents, other.latents)


def test_damaged_clips_are_replaced(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    clips = planned(source)
    bad = dataclasses.replace(clips[7], clip=dataclasses.replace(clips[7].clip, path="/gone"))
    online = OnlineVideos([*clips[:7], bad, clips[8]], encoder(), PLAN)
    # 7 is the last video: the first follows it.
    equal(online[7], online[0])
    assert "Clip 7 is replaced by the next of its bucket: The clip /gone cannot be" in caplog.text
    equal(online[8], OnlineVideos(clips, encoder(), PLAN)[8])
    # Each clip that fails is named.
    worse = dataclasses.replace(bad, clip=dataclasses.replace(bad.clip, path="/lost"))
    equal(OnlineVideos([worse, bad, clips[0]], encoder(), PLAN)[0], online[0])
    assert "Clip 0 is replaced by the next of its bucket: The clip /lost" in caplog.text
    assert "Clip 1 is replaced by the next of its bucket: The clip /gone" in caplog.text
    only = OnlineVideos([bad], encoder(), PLAN)
    with pytest.raises(DataError, match=r"None of the 1 clips of 32px 5x32x32 can be decoded; the"):
        only[0]


def test_a_list_is_opened_as_it_would_be_preprocessed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fingerprint tells datasets apart, also by their windows; what is left out is told."""
    flags = EncodeConfig(video_windows="all", video_window_frames=5, video_fps=16.0)
    rows = [json.loads(row) for row in source.read_text().splitlines()]
    for row in rows:
        row["path"] = str(source.parent / row["path"])
    rows[4]["text"] = ""
    path = tmp_path / "l.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = "--video-windows=all --video-window-frames=5 --video-fps=16".split()
    sharded = shards(path, tmp_path / "out", *more)
    said = capsys.readouterr().err.splitlines()[:-1]
    options = VideoPreprocessOptions(str(path), "", PLAN, CODEC, TEXT, flags)
    online = open_online(options, flag="--input", tell=True)
    told = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("> ") for line in told] == said[-2:]
    assert "1 of 9 clips dropped: the clip has no caption" in told[0]
    assert "are slower than `--video-fps` (16)" in told[1]
    assert len(online) == len(sharded) > 8
    for number in range(len(online)):
        equal(online[number], sharded[number])
        assert online.latent_shape(number) == sharded.latent_shape(number)
        assert online.file_of(number) == sharded.file_of(number)
    kept = ("fps", "buckets", "references", "text_width", "pooled_width", "encode", "fingerprint")
    stored = json.loads(json.dumps(online.manifest))
    assert {name: stored[name] for name in kept} == {name: sharded.manifest[name] for name in kept}
    open_online(options, flag="--input", tell=False)
    assert capsys.readouterr().err == ""


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


def test_batches_of_clips_and_captions_by_themselves() -> None:
    samples = [sample(fps=8, number=5), sample(fps=12, number=2)]
    batch = collate(samples, patch=1)
    assert torch.equal(batch.latents, torch.stack([s.latents for s in samples]))
    assert torch.equal(batch.pooled, torch.stack([s.pooled for s in samples]))
    pieces = torch.stack([s.references["head1"] for s in samples])
    assert torch.equal(batch.references["head1"], pieces)
    again = VideoBatch.from_tensors(batch.tensors())
    assert torch.equal(again.references["head1"], pieces) and torch.equal(again.text, batch.text)
    text = torch.arange(6.0).reshape(3, 2)
    assert pad_text(text, 5, 4) is not None and pad_text(text, 5, 4).shape == (3, 2)
    padded = pad_text(text, 4, 5)
    assert padded.shape == (6, 2) and torch.equal(padded[3:], text[2:].expand(3, 2))


@pytest.mark.parametrize(
    ("change", "patch", "sentence"),
    [
        ({"latents": torch.zeros(4, 5, 4, 6)}, 2, r"shapes \[.*, \(4, 5, 4, 6\)\], but must"),
        ({}, 4, r"Latents of 4 × 6 do not divide into patches of 4 × 4; choose another"),
        ({}, 3, r"Latents of 4 × 6 do not divide into patches of 3 × 3; choose another"),
        ({"references": {}}, 2, r"the same references, but have .*head1.* and \[\];"),
        ({"text": torch.zeros(7, 5)}, 2, r"the same text embeddings, .*\(7, 5\)"),
        ({"pooled": torch.zeros(2)}, 2, r"the same text embeddings, .*\(2,\)"),
    ],
)
def test_clips_that_make_no_batch(change: dict[str, Any], patch: int, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        collate([sample(), sample(**change)], patch=patch)


def test_crops_of_another_seed_differ(source: Path) -> None:
    configs = (EncodeConfig(), EncodeConfig(clip_seed=5))
    videos = [OnlineVideos(planned(source, x), encoder(x), PLAN) for x in configs]
    differing = [not torch.equal(videos[0][i].latents, videos[1][i].latents) for i in (0, 1, 3, 4)]
    assert any(differing) and torch.equal(videos[0][2].latents, videos[1][2].latents)


SMALL, LONG = Bucket("256px", 1, 256, 256), Bucket("256px", 17, 192, 336)


def steps(mixed: bool = False) -> BucketSteps:
    members = {SMALL: Members(range(50), 4), LONG: Members(range(50, 77), 2)}
    return BucketSteps(members, 2, 3, 7, mixed)


def test_one_bucket_for_each_global_step_and_the_rest_is_counted() -> None:
    plan = steps()
    assert plan.microbatches(0, 0) != plan.microbatches(plan.steps_per_epoch, 0)
    for step in range(2 * plan.steps_per_epoch):
        assert len({b for r in (0, 1) for b, _ in plan.microbatches(step, r)}) == 1
    assert plan.steps_per_epoch == 50 // 24 + 27 // 12
    assert plan.left_out == {SMALL: 2, LONG: 3}
    assert {plan.num_samples(step) for step in range(plan.steps_per_epoch)} == {24, 12}
    sizes = {b: {len(c)} for step in range(9) for b, c in plan.microbatches(step, 0)}
    assert sizes == {SMALL: {4}, LONG: {2}}
    mixed = [steps(mixed=True).microbatches(step, rank) for step in range(3) for rank in (0, 1)]
    assert {b: {len(c)} for rank in mixed for b, c in rank} == {SMALL: {4}, LONG: {2}}
    assert len({b for b, _ in mixed[0] + mixed[1]}) == 2
    assert all(plan.num_samples(step) in (24, 12) for step in range(9))


@pytest.mark.parametrize("mixed", [False, True])
def test_samples_of_a_step_are_numbered_by_micro_batch_and_then_by_rank(mixed: bool) -> None:
    """Micro-batches of a mixed step differ in their sizes; every clip counts on every rank."""
    sizes = {SMALL: Geometry((4, 1, 2, 2), 3, 4), LONG: Geometry((4, 5, 2, 3), 3, 30)}
    plan = VideoPlan(steps(mixed), sizes, "identity")
    assert (sizes[LONG].num_tokens, plan.num_microbatches(0), plan.steps_per_epoch) == (33, 3, 4)
    for step in range(6):
        given = [plan.microbatches(step, rank, 100) for rank in (0, 1)]
        first = 100
        for number in range(3):
            for rank in (0, 1):
                bucket, clips, samples = given[rank][number]
                assert (bucket, clips) == plan.steps.microbatches(step, rank)[number]
                assert samples == range(first, first + len(clips))
                first = samples.stop
        assert first == 100 + plan.steps.num_samples(step)
        counts = Counter(bucket for of_rank in given for bucket, clips, _ in of_rank for _ in clips)
        found = Counter(plan.sequences(step))
        assert found == {sizes[bucket]: count for bucket, count in counts.items()}


def test_too_few_clips_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"^The data has too few clips for one step \(256px 1.*: 5\)"
    ):
        BucketSteps({SMALL: Members(range(5), 4)}, 2, 1, 0)
    with pytest.raises(DataError, match=r"^The validation set holds no clips; give one at least, "):
        BucketSteps({}, 2, 1, None, mixed=True, whole=True, name="The validation set")


@pytest.mark.parametrize(("counts", "mixed"), [((4, 9), False), ((3, 9), True), ((0, 9), False)])
def test_buckets_are_mixed_where_one_would_starve(counts: tuple[int, int], mixed: bool) -> None:
    """A step takes 4 micro-batches; a bucket without a whole one is no better off mixed."""
    members = {SMALL: Members(range(4 * counts[0] + 3), 4), LONG: Members(range(counts[1]), 1)}
    assert must_mix(members, 4) == mixed
    never = BucketSteps(members, 2, 2, 7).never_taken
    assert never == ({SMALL: 16} if counts[0] < 4 else {})
    assert BucketSteps(members, 2, 2, 7, mixed=True).never_taken == (
        {} if counts[0] else {SMALL: 4}
    )


@pytest.mark.parametrize("counts", [(1, 0), (2, 0), (7, 3), (10, 1), (24, 12)])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_whole_epoch_takes_every_clip_in_order(counts: tuple[int, int], mixed: bool) -> None:
    """Fill micro-batches up with the bucket's first clip, which does not count again."""
    small, long = counts
    members = {SMALL: Members(range(small), 4), LONG: Members(range(small, small + long), 2)}
    orders = set()
    for ranks, num_microbatches in ((1, 4), (2, 2), (4, 1)):
        plan = BucketSteps(members, ranks, num_microbatches, None, mixed, whole=True)
        assert plan.left_out == {SMALL: 0, LONG: 0}
        order = list[int]()
        for step in range(plan.steps_per_epoch):
            given = [plan.microbatches(step, rank) for rank in range(ranks)]
            for number in range(num_microbatches):
                for bucket, clips in (of_rank[number] for of_rank in given):
                    filled = plan.filled(bucket, clips)
                    assert len(filled) == members[bucket].micro_batch_size
                    assert filled[len(clips) :] == [members[bucket].clips[0]] * (
                        len(filled) - len(clips)
                    )
                    order += clips
            if not mixed:
                assert len({bucket for of_rank in given for bucket, _ in of_rank}) == 1
        assert plan.steps_per_epoch <= 2 + small // 16 + long // 8
        orders.add(tuple(order))
    assert orders == {tuple(range(small + long))}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (1, 3), (2, 2), (4, 1)])
def test_an_epoch_sees_every_clip_once(num_ranks: int, num_microbatches: int, mixed: bool) -> None:
    members = {SMALL: Members(range(50), 4), LONG: Members(range(50, 77), 2)}
    plan = BucketSteps(members, num_ranks, num_microbatches, 3, mixed)
    for epoch in range(3):
        seen: list[int] = []
        for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
            for rank in range(num_ranks):
                microbatches = plan.microbatches(step, rank)
                assert len(microbatches) == num_microbatches
                for bucket, clips in microbatches:
                    assert len(clips) == members[bucket].micro_batch_size
                    assert set(clips) <= set(members[bucket].clips)
                    seen += clips
        assert len(set(seen)) == len(seen)
        # Mixed steps also leave out whole micro-batches that fill no step.
        whole_left_out = 77 - len(seen) - sum(plan.left_out.values())
        assert 0 <= whole_left_out < (num_ranks * num_microbatches * 4 if mixed else 1)


def test_epochs_leave_out_other_clips_and_seeds_and_order_of_buckets_differ() -> None:
    plan = BucketSteps({SMALL: Members(range(10), 4)}, 1, 1, 3)
    left = set()
    for epoch in range(20):
        ((_, first),), ((_, second),) = (plan.microbatches(2 * epoch + i, 0) for i in (0, 1))
        left |= set(range(10)) - {*first, *second}
    assert plan.left_out == {SMALL: 2} and left == set(range(10))
    members = {SMALL: Members(range(400), 2), LONG: Members(range(400, 800), 2)}
    plan, other = (BucketSteps(members, 2, 1, seed) for seed in (1, 2))
    assert plan.microbatches(0, 0) != other.microbatches(0, 0)
    kinds = [plan.microbatches(step, 0)[0][0] for step in range(plan.steps_per_epoch)]
    assert len(kinds) == 200 and kinds.count(SMALL) == 100
    changes = sum(a != b for a, b in zip(kinds, kinds[1:], strict=False))
    # A shuffle of 100 of each changes about 100 times, with a standard deviation of 7.
    assert 70 < changes < 130
    members = {SMALL: Members(range(50), 4), LONG: Members(range(50, 77), 2)}
    turned = BucketSteps(dict(reversed(members.items())), 2, 3, 7)
    assert all(turned.microbatches(s, 0) == steps().microbatches(s, 0) for s in range(10))


def test_the_order_of_a_run_is_fixed() -> None:
    """A run that is resumed by another version goes on with the clips that are due."""
    members = {LONG: Members(range(7, 12), 2), SMALL: Members(range(7), 2)}
    plan = BucketSteps(members, 1, 1, 7)
    assert plan.steps_per_epoch == 5
    # Also in an epoch before one that was asked for.
    order = [plan.microbatches(step, 0) for step in (*range(5, 10), *range(5))]
    assert [clips for ((_, clips),) in order] == [
        [4, 1], [9, 11], [5, 0], [10, 8], [2, 6], [7, 10], [8, 11], [5, 1], [4, 0], [2, 6],
    ]  # fmt: skip
    for ((bucket, clips),) in order:
        assert set(clips) <= set(members[bucket].clips)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("first", [0, 1, 3, 4, 9, 25])
def test_resumes_at_any_step_in_a_new_process(first: int, mixed: bool) -> None:
    """Draw on from the number of steps alone, also in the middle of a later epoch."""
    whole = [steps(mixed).microbatches(step, 1) for step in range(30)]
    fresh = steps(mixed)
    assert [fresh.microbatches(step, 1) for step in range(first, 30)] == whole[first:]
