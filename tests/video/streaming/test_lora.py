"""Adapters in streaming runs: what is trained, what a checkpoint holds, and going on from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_ext.video.task import VIDEO
from tests.checkpoint.tiny import whole_tensors
from tests.training_runs import train_on_ranks
from tests.video.streaming.runs import flags_of, run
from tests.video.streaming.tuned import ADAPTERS, NETWORKS, PREFIXES, SAVED, STEPS, Tuned

KEYS = ("loss", "grad_norm", "learning_rate", "consumed_samples")
LAYERS = 2 * 7
"""Linear layers in the blocks of a tiny network."""


def names_in(checkpoint: Path) -> list[str]:
    return list(FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata)


def test_only_adapters_are_trained(tuned: Tuned) -> None:
    for network in NETWORKS:
        before, after = tuned.seen["before"][network], tuned.seen["after"][network]
        adapters = {name for name in before if ".lora." in name}
        assert len(adapters) == 2 * LAYERS
        for name, weight in before.items():
            assert torch.equal(after[name], weight) == (name not in adapters), name
        assert tuned.seen["optimized"][network] == sum(before[name].numel() for name in adapters)
    assert len(tuned.seen["averaged"]) == 2 * LAYERS
    assert not any(".lora." in name for name in tuned.seen["teacher"])


def test_adapters_change_nothing_at_the_start(tuned: Tuned, tmp_path: Path) -> None:
    (plain,) = run(tmp_path, f"{tuned.words} --train-iters 1")
    first = tuned.rows[0]
    # The steps of the run that made the weights do not count.
    assert first["iteration"] == 1
    names = [name for name in plain if name.endswith("loss")]
    assert {"generator loss", "critic loss"} <= set(names)
    assert {name: first[name] for name in names} == {name: plain[name] for name in names}
    base = whole_tensors(tuned.base / "iter_0000001", tmp_path / "base.pt")
    for network in NETWORKS:
        prefix = PREFIXES[network]
        for name, weight in tuned.seen["before"][network].items():
            assert ".lora." in name or torch.equal(weight, base[f"{prefix}{name}"]), name


def test_a_checkpoint_holds_adapters_and_not_what_is_under_them(tuned: Tuned) -> None:
    names = names_in(tuned.checkpoint())
    for prefix in ("", "critic.", "ema.", "optimizer.state.exp_avg.", "critic.optimizer.state."):
        here = [name for name in names if name.startswith(f"{prefix}blocks.")]
        assert len(here) == 2 * LAYERS or "optimizer" in prefix, prefix
    about_weights = [n for n in names if "blocks." in n or "head." in n or "embedder." in n]
    assert about_weights and all(".lora." in name for name in about_weights)
    assert {name.split("/")[0] for name in names} >= {"streaming_sequence", "streaming_cache"}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ""),
        pytest.param(2, "--tensor-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(2, "--use-distributed-optimizer --bf16", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_bit_for_bit(tuned: Tuned, tmp_path: Path, ranks: int, layout: str) -> None:
    batch = 2 if "distributed" in layout else 1
    words = f"{tuned.words} {ADAPTERS} {layout} --train-iters {STEPS} --save-interval {SAVED}"
    whole, saved = tuned.rows, tuned.saved
    if layout:
        saved = tmp_path / "save"
        whole = run(tmp_path, words, ranks=ranks, batch=batch)
    again = tmp_path / "again"
    shutil.copytree(saved / f"iter_{SAVED:07d}", again / f"iter_{SAVED:07d}")
    (again / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    rows = run(tmp_path, f"{words} --load {again}", ranks=ranks, batch=batch, save="again")
    assert [row["iteration"] for row in rows] == list(range(SAVED + 1, STEPS + 1))
    for row, want in zip(rows, whole[SAVED:], strict=True):
        losses = {k: v for k, v in want.items() if k in KEYS or "loss" in k or "norm" in k}
        assert losses == {k: row[k] for k in losses}
    last = f"iter_{STEPS:07d}"
    found = whole_tensors(again / last, tmp_path / "found.pt")
    wanted = whole_tensors(saved / last, tmp_path / "wanted.pt")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


SGD = "--optimizer sgd --weight-decay 0 --clip-grad 0 --critic-clip-grad 0 --lr 5 --critic-lr 2"


def trained(tuned: Tuned, folder: Path, layout: str, ranks: int) -> dict[str, Tensor]:
    """Return how far updates that are linear in their gradients move the adapters."""
    run(folder, f"{tuned.words} {ADAPTERS} {SGD} --train-iters 3 {layout}", ranks=ranks)
    found = whole_tensors(folder / "save" / "iter_0000003", folder / "whole.pt")
    before = tuned.seen["before"]
    return {
        f"{prefix}{name}": found[f"{prefix}{name}"] - weight
        for network, prefix in (("generator", ""), ("critic", "critic."))
        for name, weight in before[network].items()
        if ".lora." in name
    }


@pytest.fixture(scope="module")
def one_rank(tuned: Tuned, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return trained(tuned, tmp_path_factory.mktemp("one"), "", 1)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("--tensor-model-parallel-size 2", 2),
        pytest.param(
            "--tensor-model-parallel-size 2 --sequence-parallel", 2, marks=pytest.mark.slow
        ),
        pytest.param("--context-parallel-size 2", 2, marks=pytest.mark.slow),
        ("--recompute-blocks 2", 1),
        pytest.param("--no-two-phase", 1, marks=pytest.mark.slow),
    ],
)
def test_layouts_and_recomputation_train_as_one_rank(
    tuned: Tuned, one_rank: dict[str, Tensor], tmp_path: Path, layout: str, ranks: int
) -> None:
    found = trained(tuned, tmp_path, layout, ranks)
    assert found.keys() == one_rank.keys() and len(found) == 2 * 2 * LAYERS
    for name, change in found.items():
        want = one_rank[name]
        size = float(want.abs().max())
        assert size > 1e-4, name
        # A, of up to 0.25, is rounded with each update.
        assert float((change - want).abs().max()) <= 1e-5 * size + 3e-8, name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--critic-checkpoint {base} --load {saved}",
            "`--pretrained-checkpoint` (not given; seed 7) must be the weights under the adapters "
            "in {saved}/iter_0000006, which were those of {base}/iter_0000001 (",
        ),
        (
            "--pretrained-checkpoint {base} --load {saved}",
            "`--critic-checkpoint` (not given; seed 7) must be the weights under the adapters",
        ),
        (
            "--pretrained-checkpoint {saved}",
            "holds adapters without the weights under them, so that no run can start from it; "
            "merge them first with `tools/lora.py merge`.",
        ),
    ],
)
def test_adapters_do_not_go_on_without_their_weights(
    tuned: Tuned, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    where = {"base": tuned.base, "saved": tuned.saved}
    words = f"{ADAPTERS} --train-iters 9 --global-batch-size 1 {words.format(**where)}"
    flags = flags_of(tmp_path, words)
    code, _ = train_on_ranks(flags, save=tmp_path / "save", task=VIDEO)
    assert code != 0
    assert message.format(**where) in capfd.readouterr().err


def test_random_weights_under_adapters_are_known_by_their_seed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = f"{ADAPTERS} --train-iters 2"
    run(tmp_path, f"{words} --exit-interval 1")
    words += f" --load {tmp_path / 'save'}"
    (row,) = run(tmp_path, words, save="more")
    assert row["iteration"] == 2
    flags = flags_of(tmp_path, f"{words} --seed 8")
    code, _ = train_on_ranks(flags, save=tmp_path / "other", task=VIDEO)
    assert code != 0
    assert "which were random ones of seed 7; leave it out." in capfd.readouterr().err
