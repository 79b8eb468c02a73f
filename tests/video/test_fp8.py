"""Flow matching with 8-bit products: near plain torch in double precision, on several layouts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config.parser import parse_args
from megatron_ext.errors import ConfigError
from megatron_ext.layers.initialization import shards_of
from megatron_ext.train.run import Run
from megatron_ext.video.task import VIDEO
from tests.video.clips import SHORT, steps, write_clips
from tests.video.wan_run import KINDS, Truth, record, train, truth_of

TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
DELAYED = "--bf16 --fp8-format hybrid --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
ROUNDED = 0.15
"""The error of a gradient in the L2 norm that 8 bits may make; 16 bits make less than a third."""


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of three latent frames."""
    return write_clips(tmp_path_factory.mktemp("fp8") / "clips", {SHORT: 9})


@pytest.fixture(scope="module")
def truth(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A step in double precision from the weights in bf16."""
    folder = tmp_path_factory.mktemp("truth")
    path = folder / "recorded.pt"
    words = f"{KINDS['video-dit']} --bf16"
    train(short, folder / "run", words, prepare=partial(record, path=path))
    recorded = torch.load(path)
    recorded["weights"] = {name: x.float() for name, x in recorded["weights"].items()}
    return truth_of(recorded, "video-dit")


def note_errors(run: Run, truth: Truth, path: Path) -> None:
    """Write down how far the gradients of the blocks' linear layers are from the truth."""

    def compare() -> None:
        errors = {}
        for chunk in run.chunks:
            for shard in shards_of(chunk.module, lambda p: p.main_grad):
                if ".linear_" in shard.name and shard.name.endswith("weight"):
                    want = shard.cut(truth.gradients[shard.name])
                    apart = float((shard.tensor.double() - want).norm())
                    errors[shard.name] = apart / float(want.norm())
        torch.save(errors, f"{path}.{run.context.rank}")

    run.runner.observer = compare


def errors_of(data: Path, truth: Truth, folder: Path, words: str, ranks: int) -> dict[str, float]:
    """Return the errors of a step's gradients, the largest over the ranks; check its loss too."""
    prepare = partial(note_errors, truth=truth, path=folder / "errors")
    words = f"{KINDS['video-dit']} {words}"
    (row,) = (
        row
        for row in train(data, folder / "run", words, ranks=ranks, prepare=prepare)
        if row["kind"] == "train"
    )
    assert row["loss"] == pytest.approx(truth.loss, rel=0.01)
    found: dict[str, float] = {}
    for rank in range(ranks):
        for name, error in torch.load(folder / f"errors.{rank}").items():
            found[name] = max(error, found.get(name, 0.0))
    assert len(found) > 10
    return found


@pytest.fixture(scope="module")
def in_bf16(
    short: Path, truth: Truth, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, float]:
    """Errors of the same step without 8 bits."""
    return errors_of(short, truth, tmp_path_factory.mktemp("bf16"), "--bf16", 1)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, TENSORWISE),
        (2, f"{DELAYED} {TP2}"),
        pytest.param(2, f"{TENSORWISE} --context-parallel-size 2", marks=pytest.mark.slow),
    ],
)
def test_a_step_of_a_video_dit_is_near_double_precision(
    short: Path,
    truth: Truth,
    in_bf16: dict[str, float],
    ranks: int,
    words: str,
    tmp_path: Path,
) -> None:
    fp8 = errors_of(short, truth, tmp_path, words, ranks)
    assert max(fp8.values()) < ROUNDED, fp8
    assert max(in_bf16.values()) < ROUNDED / 3
    assert all(fp8[name] > in_bf16[name] for name in in_bf16)


def note_layers(run: Run, path: Path) -> None:
    """Write down the names of the layers with 8-bit products."""
    (chunk,) = run.chunks
    names = [name for name, module in chunk.named_modules() if name.endswith(".fp8")]
    path.write_text("\n".join(names))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ""),
        pytest.param(2, TP2, marks=pytest.mark.slow),
        pytest.param(2, "--context-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(2, "--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
    ],
)
def test_an_mmdit_is_near_bf16(clips: Path, ranks: int, layout: str, tmp_path: Path) -> None:
    """Over buckets of several sizes; its modulation, embedding and last layer stay as they are."""
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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (f"{TENSORWISE} --first-last-layers-bf16", "does not go with `--first-last-layers-bf16`"),
        (f"--task streaming {TENSORWISE}", "`--fp8-format` (hybrid) does not go with `--task str"),
    ],
)
def test_what_a_video_run_cannot_have(words: str, sentence: str) -> None:
    flags = f"--video-data-path x --train-iters 1 --micro-batch-size 1 {words}".split()
    with pytest.raises(ConfigError) as caught:
        parse_args(flags, VIDEO, world_size=1, device="cpu")
    assert sentence in str(caught.value)
