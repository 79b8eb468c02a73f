"""The data of a video run before any step: which clips are trained, what is said, and refused."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.data.randomness import draw_noise
from megatron_ext.video.data.setup import (
    EVALUATION_SEED,
    VideoSource,
    _on_all_ranks,
    bucket_table,
    open_split,
    planned_clips,
)
from megatron_ext.video.data.shards import write_null
from megatron_ext.video.flow import cases
from megatron_ext.video.task import VIDEO
from tests.ranks import ranks
from tests.training_runs import prepared
from tests.video.clips import FLAGS, IMAGE, LONG, POOLED, SHORT, TEXT, WIDTH, write_clips

PP2 = "--pipeline-model-parallel-size 2 --nproc-per-node 2"
TABLE = "> buckets{mixed}, {steps} steps an epoch:"


def said_of(
    folder: Path, capfd: pytest.CaptureFixture[str], counts: Mapping[Bucket, int], words: str = ""
) -> list[str]:
    """Return what a run on such clips says of its buckets, but for the lines of the table."""
    data = folder / "clips"
    if not data.exists():
        write_clips(data, counts)
    capfd.readouterr()
    prepared([*FLAGS, "--video-data-path", str(data), *words.split()], VIDEO)
    return [line for line in capfd.readouterr().out.splitlines() if line.startswith("> ")]


def test_a_bucket_that_fills_no_step_is_mixed_with_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A step takes 4 micro-batches of 2 clips; stages change nothing about that."""
    counts = {IMAGE: 5, SHORT: 9}
    for words in ("", PP2):
        said = said_of(tmp_path, capfd, counts, words)
        assert said == [TABLE.format(mixed=", mixed within steps", steps=1)]
    table, warning = said_of(tmp_path, capfd, counts, "--no-mixed-buckets")
    assert table == TABLE.format(mixed="", steps=1)
    assert warning == (
        "> warning: 64px 1x64x64 has 5 clip(s), which are never trained: a step of one bucket "
        "takes 8; leave out `--no-mixed-buckets`, or give a smaller `--global-batch-size`"
    )
    # What is never trained costs nothing.
    flags = [*FLAGS, "--video-data-path", str(tmp_path / "clips"), "--no-mixed-buckets"]
    (clip,) = planned_clips(prepared(flags, VIDEO)[1])
    assert (clip.name, clip.share) == (str(SHORT), 1.0)


def test_a_bucket_that_fills_no_micro_batch_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    counts = {IMAGE: 1, SHORT: 8, LONG: 2}
    table, warning = said_of(tmp_path, capfd, counts)
    assert table == TABLE.format(mixed=", mixed within steps", steps=1)
    assert warning == (
        "> warning: 64px 1x64x64 has 1 clip(s), which are never trained: a micro-batch takes 2; "
        "give the bucket smaller micro-batches in `--video-buckets`, or more clips"
    )
    smaller = '{"64px":{"1":[1.0,1],"9":[1.0,2],"17":[1.0,2]}}'
    said = said_of(tmp_path, capfd, counts, f"--video-buckets {smaller}")
    assert said == [TABLE.format(mixed=", mixed within steps", steps=1)]


def test_the_default_depends_on_the_clips_alone(tmp_path: Path) -> None:
    """Full buckets keep steps of one bucket, as runs before had them; validation is mixed."""
    data = write_clips(tmp_path / "clips", {IMAGE: 8, SHORT: 9})
    flags = [*FLAGS, "--video-data-path", str(data), "--video-valid-path", str(data)]
    for words, mixed in (
        ("", False), (PP2, False), ("--mixed-buckets", True), ("--no-mixed-buckets", False)
    ):  # fmt: skip
        config = prepared([*flags, "--eval-iters", "1", *words.split()], VIDEO)[1]
        train, valid = open_split(config), open_split(config, validates=True)
        assert (train.plan.steps.mixed, valid.plan.steps.mixed) == (mixed, True)
        assert train.plan.steps.left_out == {IMAGE: 0, SHORT: 1}
        assert valid.plan.steps.left_out == {IMAGE: 0, SHORT: 0}


def test_what_decides_about_the_clips_of_a_step_decides_about_its_identity(tmp_path: Path) -> None:
    """A run goes on only where it would take the same clips; its layout may change."""
    counts = {IMAGE: 8, SHORT: 9}
    data = write_clips(tmp_path / "clips", counts)
    other = write_clips(tmp_path / "other", counts, fps=8)
    flags = ["--video-data-path", str(data)]

    def identity(*words: str) -> str:
        return open_split(prepared([*FLAGS, *words], VIDEO)[1]).plan.identity

    found = [
        identity(*flags),
        identity(*flags, "--seed", "7"),
        identity(*flags, "--global-batch-size", "4"),
        identity(*flags, "--mixed-buckets"),
        identity("--video-data-path", str(other)),
        identity("--video-data-path", str(data), str(other)),
    ]
    assert len(set(found)) == len(found)
    assert identity(*flags, *PP2.split()) == identity(*flags, "--nproc-per-node", "2") == found[0]


def test_buckets_are_counted_in_the_table_and_in_the_costs(tmp_path: Path) -> None:
    """A step of pictures takes 4 clips, one of videos 8; so 12 and 4 micro-batches are trained."""
    data = write_clips(tmp_path / "clips", {IMAGE: 13, SHORT: 9}, {IMAGE: 1})
    flags = [*FLAGS, "--video-data-path", str(data)]
    config = prepared(flags, VIDEO)[1]
    rest = "left out of each epoch, sequences of"
    assert bucket_table(open_split(config)).splitlines() == [
        TABLE.format(mixed="", steps=4),
        f"  {IMAGE!s:28}       13 clips, micro-batches of 1, 1 {rest} 24 tokens",
        f"  {SHORT!s:28}        9 clips, micro-batches of 2, 1 {rest} 56 tokens",
    ]
    image, short = planned_clips(config)
    assert (image.share, short.share) == (0.75, 0.25)
    assert (image.micro_batch_size, short.micro_batch_size) == (1, 2)
    assert (image.num_text + image.num_image, short.num_text + short.num_image) == (24, 56)
    assert [case.columns for case in cases(config)] == [
        {"clips at a time": "1", "text + image tokens": "8 + 16"},
        {"clips at a time": "2", "text + image tokens": "8 + 48"},
    ]
    assert [case.share for case in cases(config)] == [0.75, 0.25]
    assert config.model.seq_length == 56
    assert config.training.micro_batch_range == (1, 2)
    valid = ["--video-valid-path", str(data), "--eval-iters"]
    for words, iterations in (([], 0), ([*valid, "0"], 0), ([*valid, "3"], 3)):
        training = prepared([*flags, *words], VIDEO)[1].training
        assert training.full_validation is (iterations > 0)
        assert (training.eval_iters > 0) is (iterations > 0)


def test_the_first_rank_of_all_nodes_tells_the_buckets(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, local_rank, lines in (("0", "0", 1), ("8", "0", 0), ("0", "1", 1)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert len(said_of(tmp_path, capfd, {SHORT: 8})) == lines


def refusal(data: Path, valid: Path, words: str = "") -> str:
    flags = [*FLAGS, "--video-data-path", str(data), "--video-valid-path", str(valid)]
    with pytest.raises((ConfigError, DataError)) as error:
        prepared([*flags, "--eval-iters", "1", *words.split()], VIDEO)
    return str(error.value)


def test_faults_of_the_validation_set_name_it(clips: Path, tmp_path: Path) -> None:
    empty = write_clips(tmp_path / "empty", {SHORT: 0})
    named = f"The validation set (`--video-valid-path` {empty})"
    said = f"{named} holds no clips; give one at least, or leave the set out."
    assert refusal(clips, empty) == said
    long = write_clips(tmp_path / "long", {LONG: 1}, lengths=())
    buckets = '--video-buckets {"64px":{"1":[1.0,2],"9":[1.0,2],"17":[1.0,2]}}'
    assert refusal(clips, long, buckets) == (
        "`--i2v-head-weight` (5.0) needs `head1` of clips, but the validation set has none; "
        "preprocess it with `--reference-lengths 1`, or set the weight to 0."
    )
    # A picture, which gets no reference, hides nothing of the clips beside it.
    beside = write_clips(tmp_path / "beside", {IMAGE: 1, LONG: 1}, lengths=())
    assert "but the validation set has none" in refusal(clips, beside, buckets)
    short = write_clips(tmp_path / "short", {SHORT: 8})
    few = '--video-buckets {"64px":{"9":[1.0,2]}}'
    assert refusal(short, long, few).startswith(
        f"The validation set (`--video-valid-path` {long}) holds clips of 64px 17x64x64, but the "
        "bucket plan has no 64px of 17 frames ("
    )


def test_each_step_begins_after_the_samples_of_the_steps_before_it() -> None:
    """Steps of 2, 5 and 3 clips; the run had 10 samples before."""
    seen: list[tuple[int, int, int]] = []
    source: Any = object.__new__(VideoSource)
    source._context = SimpleNamespace(dp_rank=1)
    source._coming, source._consumed = 0, 10
    source.video_plan = SimpleNamespace(
        steps=SimpleNamespace(num_samples=[2, 5, 3].__getitem__),
        microbatches=lambda *asked: seen.append(asked) or [],
    )
    assert [source.next_step(1) for _ in range(3)] == [[], [], []]
    assert seen == [(0, 1, 10), (1, 1, 12), (2, 1, 17)] and source.coming == 3


@ranks(tp=2)
def test_a_batch_reaches_all_tensor_parallel_ranks_bit_for_bit(context: ParallelContext) -> None:
    """Read tensors of several types, one of which is a view, on the first rank alone."""
    latents = torch.arange(48.0).view(2, 2, 3, 2, 2).bfloat16() / 7
    text, pooled = torch.arange(12.0).view(3, 2, 2).transpose(0, 1), torch.ones(2, 1).half()
    wanted = VideoBatch(latents, text, pooled, {"head1": latents[:, :, :1] + 1})
    given = wanted if context.tp_rank == 0 else None
    found = _on_all_ranks(given, torch.device("cpu"), context.pgs.tp)
    assert found.references.keys() == wanted.references.keys()
    for name, tensor in wanted.tensors().items():
        own = found.tensors()[name]
        assert own.dtype == tensor.dtype and torch.equal(own, tensor), name


def test_validation_has_none_of_the_noise_of_training() -> None:
    """Take two seeds, of which the larger is not that of the other's validation."""
    training, validation = (
        {float(draw_noise(seed + more, [3], (1,))) for seed in (1, 1234)}
        for more in (0, EVALUATION_SEED)
    )
    assert len(training | validation) == 4


def test_the_shares_of_sets_are_told_before_the_buckets(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [str(write_clips(tmp_path / name, {SHORT: 8})) for name in "ab"]
    prepared([*FLAGS, "--video-data-path", "1", paths[0], "3", paths[1]], VIDEO)
    lines = capfd.readouterr().out.splitlines()
    assert lines[:3] == [
        "> sets of clips:",
        f"  {paths[0]}: 8 clips, 1 times an epoch, 25.0% of the samples",
        f"  {paths[1]}: 8 clips, 3 times an epoch, 75.0% of the samples",
    ]
    assert lines[3].startswith("> buckets, ")


def test_captions_are_dropped_for_the_empty_caption_of_the_data(tmp_path: Path) -> None:
    data = write_clips(tmp_path / "clips", {SHORT: 8})
    null, pooled = torch.randn(TEXT, WIDTH), torch.randn(POOLED)
    write_null(data, null, pooled, "float32")
    words = f"--video-data-path {data} --text-dropout 1 --pooled-dropout 1"
    config = prepared([*FLAGS, *words.split()], VIDEO)[1]
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    context = SimpleNamespace(
        tp_rank=0, dp_rank=0, is_first_stage=True, is_last_stage=True,
        pgs=SimpleNamespace(tp=alone, cp=alone),
    )  # fmt: skip
    run: Any = SimpleNamespace(
        config=config, context=context, device=torch.device("cpu"),
        progress=SimpleNamespace(iteration=0),
    )  # fmt: skip
    source = VideoSource(run, open_split(config), None, consumed_samples=0, full_epoch=False)
    batches = source.next_step(4)
    assert len(batches) == 4
    for batch in batches:
        words_of, vectors = batch.inputs["txt"], batch.inputs["y_vec"]
        assert words_of is not None and torch.equal(words_of, null.expand(2, -1, -1))
        assert vectors is not None and torch.equal(vectors, pooled.expand(2, -1))
