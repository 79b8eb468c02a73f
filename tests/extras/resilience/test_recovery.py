"""A killed run goes on from its snapshots, and ends with the bits of an undisturbed run."""

import functools
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.files import folder_of
from megatron_ext.checkpoint.snapshot import SnapshotFile, content_of
from megatron_ext.checkpoint.state import values_of
from megatron_ext.disk.events import read_events
from megatron_ext.disk.host_folder import FOLDER_VARIABLE
from megatron_ext.extras.resilience.memory import Machines, MemoryCheckpoints
from megatron_ext.extras.resilience.peers import own_files
from megatron_ext.extras.resilience.recovery import HeldSnapshot, Recovery, choose
from megatron_ext.parallel.grid import Layout
from megatron_ext.video.task import VIDEO
from tests.checkpoint.tiny import build, manager
from tests.extras.resilience.faulty_runs import (
    host_folder_in_memory,
    killed_in_step,
    noting,
    same_end,
    start,
)
from tests.ranks import layout_of, ranks
from tests.training_runs import SMALL, without
from tests.video.streaming import runs

BASE = without(SMALL, "--train-iters", "--eval-interval", "--eval-iters", "--hidden-dropout")
BASE += "--train-iters 6 --lr-warmup-iters 2 --lr-decay-iters 6".split()
DROPOUT = "--hidden-dropout 0.1"
BASE_EVALUATED = "--eval-interval 2 --eval-iters 2 --keep-best 2 --early-stop-patience 5"
PEER = "--peer-checkpoint-interval 1 --max-restarts 1".split()
CASES = {
    "DP2, averages, evaluations": (
        2,
        f"--use-distributed-optimizer --ema-decay 0.9 {DROPOUT} {BASE_EVALUATED}",
    ),
    "DP2, bf16, sharded gradients, bf16 moments": (
        2,
        "--use-distributed-optimizer --bf16 --ema-decay 0.9 --ddp-bucket-size 5000 "
        "--data-parallel-sharding-strategy optim_grads --use-precision-aware-optimizer "
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    ),
    "DP2, bf16, sharded weights": (
        2,
        "--use-distributed-optimizer --bf16 --ema-decay 0.9 --check-invariants 1 "
        "--data-parallel-sharding-strategy optim_grads_params",
    ),
    "TP2, PP2, fp16, SGD, dropout": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        f"--fp16 --optimizer sgd --no-use-distributed-optimizer --initial-loss-scale 4e9 {DROPOUT}",
    ),
    "EP2, Muon, MTP": (
        2,
        "--expert-model-parallel-size 2 --num-experts 4 --optimizer muon --mtp-num-layers 1 "
        "--position-embedding-type rope --use-distributed-optimizer --moe-ffn-hidden-size 16 "
        "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --swiglu",
    ),
    "CP2, fp8, LoRA": (
        2,
        "--context-parallel-size 2 --fp8-format hybrid --fp8-amax-history-len 4 --bf16 "
        "--fp8-amax-compute-algo max --lora-rank 4",
    ),
    "virtual chunks, no optimizer in checkpoints, bf16": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--num-layers 4 --bf16 --no-save-rng",
    ),
}


def disturbed(
    flags: list[str], save: Path, ranks: int, **how: Any
) -> tuple[str, list[dict[str, Any]]]:
    """Kill the last rank in step 5, go on, and return from where, and the rows of all steps."""
    save.mkdir()
    with host_folder_in_memory() as folder:
        death = killed_in_step(5, ranks - 1)
        code, _ = start([*flags, *PEER], save, ranks, prepare=death, **how)
        assert code
        note = noting(save / "note")
        code, rows = start([*flags, *PEER], save, ranks, generation=1, prepare=note, **how)
        assert code == 0
        assert not [*(folder / "snapshots").iterdir()]
    return (save / "note").read_text(), rows


def losses(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(row["iteration"], row["lm loss"]) for row in rows]


QUICK = ["DP2, averages, evaluations"]


@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_a_killed_run_ends_as_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    ranks, more = CASES[name]
    flags = [*BASE, *more.split()]
    code, undisturbed = start(flags, tmp_path / "a", ranks)
    assert code == 0
    told, rows = disturbed(flags, tmp_path / "b", ranks)
    assert told == "memory 4"
    assert losses(rows) == losses(undisturbed)
    assert same_end(tmp_path / "a", tmp_path / "b", tmp_path) > 10


@contextmanager
def killed_run(flags: list[str], save: Path, ranks: int) -> Iterator[tuple[Path, Path]]:
    """Kill a run of ``ranks`` in step 5; yield its save folder and its snapshots, to be copied."""
    with host_folder_in_memory() as folder:
        code, _ = start(flags, save, ranks, prepare=killed_in_step(5, ranks - 1))
        assert code
        kept = save.parent / "host"
        shutil.copytree(folder / "snapshots", kept)
        yield save, kept


def go_on(flags: list[str], killed: tuple[Path, Path], ranks: int, name: str, damage: Any) -> Any:
    """Restart a copy of a killed run after damage to its snapshots and checkpoints."""
    save, kept = killed
    own, folder = save.parent / name, Path(os.environ[FOLDER_VARIABLE])
    shutil.copytree(save, own)
    shutil.rmtree(folder / "snapshots", ignore_errors=True)
    shutil.copytree(kept, folder / "snapshots")
    damage(folder / "snapshots", own)
    note = noting(own / "note")
    code, rows = start(flags, own, ranks, generation=1, prepare=note)
    assert code == 0 and not [*(folder / "snapshots").iterdir()]
    return (own / "note").read_text(), losses(rows)


def flip(path: Path, at: int = 5000) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def newest(snapshots: Path, kind: str) -> Path:
    """Return the newer file of rank 1 among those of a kind."""
    paths = sorted(snapshots.glob(f"{kind}_00001.*"))
    return max(paths, key=lambda path: SnapshotFile(path).read().iteration)  # type: ignore[union-attr]


def one_copy(snapshots: Path, save: Path) -> None:
    flip(newest(snapshots, "rank"))


def both_newest(snapshots: Path, save: Path) -> None:
    one_copy(snapshots, save)
    newest(snapshots, "held").unlink()


def everything(snapshots: Path, save: Path) -> None:
    for path in (*snapshots.glob("*_00001.0"), *snapshots.glob("*_00001.1")):
        flip(path)


def checkpoint_too(snapshots: Path, save: Path) -> None:
    everything(snapshots, save)
    newest_checkpoint(snapshots, save)


def newest_checkpoint(snapshots: Path, save: Path) -> None:
    flip(next(folder_of(save, 4).glob("__1_*")), -30)


def cut_too(snapshots: Path, save: Path) -> None:
    shutil.rmtree(snapshots)
    os.truncate(next(folder_of(save, 4).glob("__1_*")), 20)


@pytest.mark.slow
def test_what_is_lost_decides_from_where_a_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [*BASE, *"--save-interval 2 --use-distributed-optimizer --hidden-dropout 0".split()]
    code, rows = start(flags, tmp_path / "undisturbed", 2)
    assert code == 0
    flags += PEER
    with killed_run(flags, tmp_path / "killed", 2) as killed:
        for damage, wanted in (
            (one_copy, "peer 4"),
            (both_newest, "checkpoint 4"),
            (checkpoint_too, "checkpoint 2"),
            (cut_too, "checkpoint 2"),
        ):
            name = damage.__name__
            capfd.readouterr()
            told, found = go_on(flags, killed, 2, name, damage)
            assert told == wanted, name
            assert found == losses(rows)
            same_end(tmp_path / "undisturbed", tmp_path / name, tmp_path)
            shown = capfd.readouterr()
            assert ("does not match its checksum" in shown.err) == (damage is not cut_too)
            refused = [x for x in read_events(tmp_path / name) if x["kind"] == "checkpoint_refused"]
            assert [event["iteration"] for event in refused] == [4] * wanted.endswith("point 2")
            for event in refused:
                assert "__1_" in event["cause"] and "give `" not in event["cause"]
                assert f"> {event['path']} is passed over" in shown.out
        for ranks in (1, 4):
            told, found = go_on(flags, killed, ranks, f"with {ranks}", lambda *_: None)
            assert told == "memory 4"
            assert [x for x, _ in found] == [x for x, _ in losses(rows)]
            for (_, loss), (_, want) in zip(found, losses(rows), strict=True):
                assert math.isclose(loss, want, rel_tol=1e-6)


def test_snapshots_may_be_newer_than_the_newest_intact_checkpoint(tmp_path: Path) -> None:
    flags = [*BASE, *"--save-interval 2 --hidden-dropout 0 --max-restarts 1".split()]
    flags += ["--peer-checkpoint-interval", "3"]
    with killed_run(flags, tmp_path / "killed", 2) as killed:
        told, _ = go_on(flags, killed, 2, "again", newest_checkpoint)
    assert told == "memory 3"


def _held(layout: Layout, iteration: int, *, copies: bool = False) -> list[HeldSnapshot]:
    """Return a snapshot of each rank on a machine of its own, or its copy on the next one."""
    size = layout.world_size
    return [
        HeldSnapshot(
            f"m{(rank + copies) % size}", f"{iteration}.{rank}", rank, iteration, layout, copies
        )
        for rank in range(size)
    ]


def test_the_newest_whole_set_of_snapshots_is_chosen_whatever_the_number_of_replicas() -> None:
    mine, other = layout_of(tp=2, dp=1), layout_of(tp=2, dp=2)
    machines = ["m0", "m1"]
    older = [*_held(mine, 4), *_held(mine, 4, copies=True), *_held(other, 2)]
    newer = _held(other, 6)
    chosen = functools.partial(choose, layout=mine, machines=machines)
    assert chosen([*older, *newer], newer_than=0) == newer
    assert chosen([*newer[1:], *older], newer_than=0) == older[:2]
    # At one iteration this layout's own snapshots need no resharding.
    assert chosen([*newer, *_held(mine, 6)], newer_than=0) == _held(mine, 6)
    # A copy stands in for a snapshot that is lost.
    assert chosen([*older[1:], *newer[1:]], newer_than=0) == [older[2], older[1]]
    assert chosen([*older, *newer], newer_than=6) is None
    assert chosen(_held(layout_of(tp=1, dp=2), 8), newer_than=0) is None


@pytest.mark.slow
def test_later_snapshots_of_an_earlier_run_are_left(tmp_path: Path) -> None:
    local = ["--non-persistent-local-ckpt-dir", str(tmp_path / "local")]
    local += "--non-persistent-ckpt-type local --non-persistent-save-interval 1".split()
    flags, save = [*BASE, *local], tmp_path / "save"
    with host_folder_in_memory():
        assert start(flags, save, 1)[0] == 0
        other = [*flags, "--seed", "7"]
        assert start(other, save, 1, prepare=killed_in_step(2))[0]
        note = noting(tmp_path / "note")
        assert start(other, save, 1, generation=1, prepare=note)[0] == 0
    assert (tmp_path / "note").read_text() == "memory 1"


def test_runs_that_share_a_folder_of_local_snapshots_keep_apart(tmp_path: Path) -> None:
    """Two runs are killed in turn; each goes on from its own, and another --save from --load."""
    local = ["--non-persistent-local-ckpt-dir", str(tmp_path / "local")]
    local += "--non-persistent-ckpt-type local --non-persistent-save-interval 1".split()
    flags, note = [*BASE, *local], noting(tmp_path / "note")
    saves = [tmp_path / name / "save" for name in ("one", "other")]
    for save, step in zip(saves, (5, 3), strict=True):
        assert start(flags, save, 1, prepare=killed_in_step(step))[0]
    for load, save, wanted in (
        (saves[0], tmp_path / "moved", "memory 4"),
        (saves[1], saves[1], "memory 2"),
        (saves[0], saves[0], "memory 4"),
    ):
        assert start([*flags, "--load", str(load)], save, 1, prepare=note)[0] == 0
        assert (tmp_path / "note").read_text() == wanted


@ranks(timeout=60)
def test_a_restored_state_does_not_change_with_its_snapshot(context: Any, tmp_path: Path) -> None:
    tiny, checkpoints = build(context, precision="fp16"), manager(context, tmp_path)
    tiny.step()
    parts: dict[str, Any] = {"model": tiny.model, "optimizer": tiny.optimizer}
    parts |= {"scheduler": tiny.scheduler, "ema": None, "extra_state": None}

    def values() -> dict[str, Any]:
        return values_of(checkpoints.state_in_memory(**parts, run_config={}))

    def tensors() -> list[torch.Tensor]:
        # Random states are new tensors each time.
        return content_of({k: v for k, v in values().items() if k != "rng_state"}).tensors

    snapshot = SnapshotFile(tmp_path / "file").write(1, content_of(values()))
    checkpoints.restore(snapshot.state(), **parts)
    before = [tensor.clone() for tensor in tensors()]
    snapshot.content.zero_()
    after = tensors()
    assert len(after) == len(before) > 20
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@ranks(timeout=60)
def test_what_this_layout_cannot_use_is_discarded(context: Any, tmp_path: Path) -> None:
    store = MemoryCheckpoints(tmp_path, 1, Machines.of(tmp_path, context), context)
    for iteration in (1, 2):
        store.take(iteration, {"value": torch.ones(3)}, {}, {})
    other = {"rank": 1, "layout": {"of": "another version"}}
    own_files(tmp_path, 1).turn().write(2, content_of("state"), other)
    chosen = Recovery(store, context).newest(0)
    assert chosen is not None and [held.rank for held in chosen] == [0]
    store.discard_others(1)
    assert [path.name for path in store._paths()] == ["rank_00000.0", "rank_00000.1"]
    assert [found.iteration for _, found in store.listed()] == [1]


def test_a_killed_streaming_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    layout = "--use-distributed-optimizer --train-iters 6"
    flags = runs.flags_of(tmp_path / "data", layout, batch=2)
    code, _ = start(flags, tmp_path / "a", 2, task=VIDEO)
    assert code == 0
    told, _ = disturbed(flags, tmp_path / "b", 2, task=VIDEO)
    assert told == "memory 4"
    assert same_end(tmp_path / "a", tmp_path / "b", tmp_path) > 10
