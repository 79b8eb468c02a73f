"""Layouts train alike through the whole program, MMDiTs, video DiTs, and with 8-bit products."""

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.train.run import Run
from megatron_ext.video.task import VIDEO
from tests.training_runs import training_rows
from tests.video.clips import Rows, steps
from tests.video.clips import train as train_mmdit
from tests.video.networks.harness import gradient_errors
from tests.video.wan_run import KINDS, Truth, check_run, record, train, truth_of

TP2, CP2 = "--tensor-model-parallel-size 2", "--context-parallel-size 2"
SP2, PP2 = f"{TP2} --sequence-parallel", "--pipeline-model-parallel-size 2"
WEIGHTS = "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"
LAYOUTS = {
    "tp2sp pp2": (4, f"{SP2} {PP2}"),
    "cp2 dp2": (4, f"{CP2} --use-distributed-optimizer"),
    "tp2 cp2 pp2": (8, f"{TP2} {CP2} {PP2}"),
    "weights sharded over dp2": (2, WEIGHTS),
    "weights sharded over dp2 pp2": (4, f"{PP2} {WEIGHTS} --recompute-double-blocks 1"),
}
TOLERANCE = 1e-5


def run(clips: Path, valid: Path, save: Path, words: str, **options: Any) -> Rows:
    flags = f"--seed 1 --video-valid-path {valid} --eval-iters 1 {words}"
    return train_mmdit(clips, save, flags, **options)


def check(rows: Rows, wanted: Rows, tolerance: float) -> None:
    """Compare norms and losses, also of each mode and of each quarter of the times."""
    assert [row["kind"] for row in rows] == ["train"] * 3 + ["evaluation"]
    for row, want in zip(rows, wanted, strict=True):
        names = {name for name in want if name.startswith("loss") or name == "grad_norm"}
        assert names == {name for name in row if name.startswith("loss") or name == "grad_norm"}
        for name in names:
            assert math.isclose(row[name], want[name], rel_tol=tolerance), (name, row, want)


@pytest.fixture(scope="module")
def one_rank(clips: Path, valid: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    rows = run(clips, valid, tmp_path_factory.mktemp("one"), "")
    losses = [row["loss"] for row in rows]
    assert len(set(losses)) == 4 and all(1 < loss < 4 for loss in losses)
    return rows


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree(clips: Path, valid: Path, one_rank: Rows, name: str, tmp_path: Path) -> None:
    """Leave references out of the loss, on ranks with unequal numbers of image tokens."""
    ranks, words = LAYOUTS[name]
    check(run(clips, valid, tmp_path, words, ranks=ranks), one_rank, TOLERANCE)


def test_four_batches_are_one(clips: Path, valid: Path, one_rank: Rows, tmp_path: Path) -> None:
    check(run(clips, valid, tmp_path, "--micro-batch-size 8"), one_rank, 1e-6)


@pytest.mark.slow
def test_means_are_the_same_wherever_the_text_is(clips: Path, valid: Path, tmp_path: Path) -> None:
    """Give the rank with the text fewer image tokens, or none of the images'."""
    words = "--no-calculate-per-token-loss --micro-batch-size 1"
    one = run(clips, valid, tmp_path / "one", words)
    for cp in (2, 4):
        layout = f"--context-parallel-size {cp}"
        rows = run(clips, valid, tmp_path / str(cp), f"{words} {layout}", ranks=cp)
        check(rows, one, TOLERANCE)


def compare_draws(run: Run) -> None:
    """Check that tensor-parallel ranks are given the same times of clips, and replicas are not."""
    next_step = run.train_source.next_step

    def compared(num_microbatches: int, seq_length: int | None) -> Any:
        batches: Any = next_step(num_microbatches, seq_length)
        times = torch.cat([batch.inputs["timesteps"] for batch in batches])
        everyone = [torch.empty_like(times) for _ in range(run.context.layout.world_size)]
        torch.distributed.all_gather(everyone, times)
        ranks = torch.distributed.get_process_group_ranks(run.context.pgs.tp)
        for rank, others in enumerate(everyone):
            assert torch.equal(others, times) == (rank in ranks)
        return batches

    run.train_source.next_step = compared  # type: ignore[method-assign]


MIXED = {
    "tp2sp dp2": (4, SP2),
    "pp2": (2, PP2),
    "pp2 interleaved": (2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
}


@pytest.fixture(scope="module")
def one_mixed(clips: Path, valid: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    rows = run(clips, valid, tmp_path_factory.mktemp("mixed"), "--mixed-buckets")
    sizes = {x["tokens_per_second"] * x["seconds_per_iteration"] / 8 for x in (rows[0], rows[2])}
    assert not {round(size, 3) for size in sizes} <= {24, 56, 88}
    return rows


@pytest.mark.parametrize("name", MIXED)
def test_mixed_buckets_train_alike_on_every_layout(
    clips: Path, valid: Path, one_mixed: Rows, name: str, tmp_path: Path
) -> None:
    """Give each micro-batch of a step a bucket, so that replicas and messages differ in size."""
    ranks, layout = MIXED[name]
    prepare = compare_draws if ranks == 4 else None
    words = f"--mixed-buckets {layout}"
    check(run(clips, valid, tmp_path, words, ranks=ranks, prepare=prepare), one_mixed, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ranks"),
    [("--pipeline-schedule zb-v", 2), ("", 2), (f"{WEIGHTS} --recompute-blocks 1", 4)],
)
def test_a_video_dit_mixes_buckets_on_stages(
    clips: Path, tmp_path: Path, words: str, ranks: int
) -> None:
    kind = f"{KINDS['video-dit']} --video-dit-size mini --mixed-buckets --train-iters 2"
    one, two = (
        training_rows(train(clips, tmp_path / str(count), f"{kind} {layout}", ranks=count))
        for count, layout in ((1, ""), (ranks, f"{PP2} {words}"))
    )
    for row, want in zip(two, one, strict=True):
        for key in ("loss", "grad_norm"):
            assert math.isclose(row[key], want[key], rel_tol=TOLERANCE), key


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mmdit", "video-dit"])
def test_stages_exchange_16_bits_wherever_they_lie(clips: Path, tmp_path: Path, kind: str) -> None:
    """Compare bf16 losses of a V-shaped schedule with one rank's, but for the rounding of sums."""
    words = f"--bf16 --video-model {kind} --train-iters 2"
    if kind == "video-dit":
        words = f"{words} --adaln-zero --no-zero-head --video-dit-size mini"
    else:
        words += " --num-single-blocks 4"
    options = {"task": VIDEO}
    wanted = steps(clips, tmp_path / "one", words, **options)
    layout = "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"
    rows = steps(clips, tmp_path / "two", f"{words} {layout}", ranks=2, **options)
    for row, want in zip(rows, wanted, strict=True):
        assert math.isclose(row["loss"], want["loss"], rel_tol=2e-3)


WAN_LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, TP2),
    "cp2": (2, CP2),
    "dp2": (2, ""),
    "pp2": (2, PP2),
    "tp2sp cp2 a2a": (4, f"{SP2} {CP2} --cp-comm-type a2a --recompute-blocks 1"),
}
CASES = [
    *(("video-dit", layout) for layout in WAN_LAYOUTS),
    *(("independent", layout) for layout in ("cp2", "pp2", "tp2sp cp2 a2a")),
    ("causal", "cp2"),
    ("alone", "cp2"),
    *(pytest.param("independent", x, marks=pytest.mark.slow) for x in ("tp2", "dp2")),
    pytest.param("causal", "pp2", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def truth_by_kind(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Truth]:
    """Return a function that gives one truth for all layouts, which their ranks inherit."""
    folder = tmp_path_factory.mktemp("truths")

    @cache
    def of(kind: str, words: str = "") -> Truth:
        path, save = folder / "recorded.pt", folder / f"{kind}{words}"
        train(short, save, f"{KINDS[kind]} {words}", prepare=partial(record, path=path))
        recorded = torch.load(path)
        recorded["weights"] = {name: x.float() for name, x in recorded["weights"].items()}
        return truth_of(recorded, kind)

    return of


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_layouts_train_as_plain_torch(
    short: Path, truth_by_kind: Callable[..., Truth], kind: str, layout: str, tmp_path: Path
) -> None:
    ranks, words = WAN_LAYOUTS[layout]
    want = truth_by_kind(kind)
    prepare = partial(check_run, truth=want, tolerance=TOLERANCE)
    rows = train(short, tmp_path, f"{KINDS[kind]} {words}", ranks=ranks, prepare=prepare)
    (row,) = training_rows(rows)
    assert row["loss"] == pytest.approx(want.loss, rel=TOLERANCE)


def test_the_kinds_differ(truth_by_kind: Callable[..., Truth]) -> None:
    losses = {kind: truth_by_kind(kind).loss for kind in KINDS}
    assert len({round(loss, 4) for loss in losses.values()}) == len(KINDS)


TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
DELAYED = "--bf16 --fp8-format hybrid --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
ROUNDED = 0.15
"""The error of a gradient in the L2 norm that 8 bits may make; 16 bits make less than a third."""


@pytest.fixture(scope="module")
def truth(truth_by_kind: Callable[..., Truth]) -> Truth:
    return truth_by_kind("video-dit", "--bf16")


def errors_of(data: Path, truth: Truth, folder: Path, words: str, ranks: int) -> dict[str, float]:
    """Return the largest errors over ranks of the gradients of the blocks' linear layers."""

    def note_errors(run: Run) -> None:
        chunks = [chunk.module for chunk in run.chunks]
        path = folder / f"errors.{run.context.rank}"
        run.runner.observer = lambda: torch.save(gradient_errors(chunks, truth.gradients), path)

    words = f"{KINDS['video-dit']} {words}"
    (row,) = training_rows(train(data, folder / "run", words, ranks=ranks, prepare=note_errors))
    assert row["loss"] == pytest.approx(truth.loss, rel=0.01)
    seen = [torch.load(folder / f"errors.{rank}") for rank in range(ranks)]
    names = [x for x in seen[0] if ".linear_" in x and x.endswith("weight")]
    assert len(names) > 10
    return {name: max(errors[name] for errors in seen) for name in names}


@pytest.fixture(scope="module")
def bf16(short: Path, truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return errors_of(short, truth, tmp_path_factory.mktemp("bf16"), "--bf16", 1)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, TENSORWISE),
        (2, f"{DELAYED} {SP2}"),
        pytest.param(2, f"{TENSORWISE} --context-parallel-size 2", marks=pytest.mark.slow),
    ],
)
def test_a_step_of_a_video_dit_is_near_double_precision(
    short: Path, truth: Truth, bf16: dict[str, float], ranks: int, words: str, tmp_path: Path
) -> None:
    fp8 = errors_of(short, truth, tmp_path, words, ranks)
    assert max(fp8.values()) < ROUNDED, fp8
    assert max(bf16.values()) < ROUNDED / 3
    assert all(fp8[name] > bf16[name] for name in bf16)


def note_layers(run: Run, path: Path) -> None:
    (chunk,) = run.chunks
    names = [name for name, module in chunk.named_modules() if name.endswith(".fp8")]
    path.write_text("\n".join(names))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ""),
        pytest.param(2, SP2, marks=pytest.mark.slow),
        pytest.param(2, "--context-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(2, "--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
    ],
)
def test_an_mmdit_in_fp8_is_near_bf16(clips: Path, ranks: int, layout: str, tmp_path: Path) -> None:
    """Train over several buckets; modulation, embedding and last layer stay as they are."""
    bf16 = steps(clips, tmp_path / "bf16", f"--bf16 {layout}", ranks=ranks)
    layers = tmp_path / "layers"
    options: dict[str, Any] = {}
    if ranks == 1:
        options["prepare"] = partial(note_layers, path=layers)
    fp8 = steps(clips, tmp_path / "fp8", f"{DELAYED} {layout}", ranks=ranks, **options)
    assert [row["loss"] for row in fp8] != [row["loss"] for row in bf16]
    for got, want in zip(fp8, bf16, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=0.01)
    if ranks == 1:
        names = layers.read_text().split()
        own = [name.split(".")[-2] for name in names]
        assert set(own) == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
        # Two double blocks with two streams, and two single blocks.
        assert len(names) == 4 * (2 * 2 + 2)
