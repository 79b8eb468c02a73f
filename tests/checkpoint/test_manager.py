"""A state that is saved in one layout loads in another with the same tensors, bit for bit."""

import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_ext.checkpoint import manager as manager_module
from megatron_ext.checkpoint.adapters import FrozenBase
from megatron_ext.checkpoint.files import TRACKER, folder_of, published, root_of
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.stored import candidates, find, read_run_config
from megatron_ext.checkpoint.unpickling import stored_entries
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.optim.ema import ShardedEMA
from megatron_ext.parallel.context import seed_everything
from megatron_ext.parallel.grid import Layout
from tests.checkpoint.tiny import RUN_CONFIG, build, load, manager, save, whole_tensors
from tests.ranks import SEED, ranks, run_on_ranks

LAYOUTS = {
    "one rank": Layout(1),
    "TP2": Layout(2, tensor_model_parallel_size=2),
    "CP2 DP1": Layout(2, context_parallel_size=2),
    "DP2": Layout(2),
    "PP2 VPP2": Layout(2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "TP2 PP2": Layout(4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "CP2 DP2": Layout(4, context_parallel_size=2),
}


def stepped(context: Any, **options: Any) -> Any:
    tiny = build(context, **options)
    tiny.step()
    return tiny


def train_and_save(context: Any, folder: Path, options: dict[str, Any]) -> None:
    tiny = build(context, **options)
    for _ in range(3):
        tiny.step()
    save(manager(context, folder), tiny, 3, context)


def load_and_save(context: Any, source: Path, target: Path, options: dict[str, Any]) -> None:
    tiny = build(context, **options)
    tiny.spoil()
    loaded = load(manager(context, source), tiny)
    assert loaded.iteration == 3
    assert loaded.progress["consumed_train_samples"] == 24
    assert tiny.scheduler.num_steps == 3
    save(manager(context, target), tiny, 3, context)
    # The next step needs the optimizer to be usable.
    tiny.step()


def travel(tmp_path: Path, first: Layout, second: Layout, **options: Any) -> int:
    """Save, load elsewhere, save again; return the number of tensors compared."""
    run_on_ranks(train_and_save, first, {"folder": tmp_path / "a", "options": options})
    run_on_ranks(
        load_and_save,
        second,
        {"source": tmp_path / "a", "target": tmp_path / "b", "options": options},
    )
    before = whole_tensors(folder_of(tmp_path / "a", 3), tmp_path / "a.pt")
    after = whole_tensors(folder_of(tmp_path / "b", 3), tmp_path / "b.pt")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert any("exp_avg_sq" in name and before[name].abs().max() > 0 for name in before)
    return len(before)


@pytest.mark.parametrize("target", [name for name in LAYOUTS if name != "TP2 PP2"])
def test_every_layout_loads_what_tp2_pp2_saved(tmp_path: Path, target: str) -> None:
    assert travel(tmp_path, LAYOUTS["TP2 PP2"], LAYOUTS[target]) > 20


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_keeps_its_fp32_weights(tmp_path: Path, precision: str) -> None:
    travel(tmp_path, LAYOUTS["DP2"], LAYOUTS["TP2"], precision=precision)
    tensors = whole_tensors(folder_of(tmp_path / "a", 3), tmp_path / "c.pt")
    assert tensors["embedding.word_embeddings.weight"].dtype != torch.float32
    masters = [t for n, t in tensors.items() if n.startswith("optimizer.") and "param" in n]
    assert masters, [n for n in tensors if "embed" in n]
    assert all(t.dtype == torch.float32 for t in masters)


def test_the_plain_optimizer_travels(tmp_path: Path) -> None:
    travel(tmp_path, LAYOUTS["TP2"], LAYOUTS["PP2 VPP2"], distributed=False)


def draws() -> tuple[float, ...]:
    """Draw from each generator; the last one differs between tensor-parallel ranks."""
    with get_cuda_rng_tracker().fork():
        own = torch.rand(1).item()
    return random.random(), np.random.rand(), torch.rand(1).item(), own


@ranks(tp=2, dp=2)
def test_random_states_continue_in_the_same_layout(context: Any, tmp_path: Path) -> None:
    """Each rank goes on with its own, also where those of replicas differ."""
    seed_everything(context, SEED, data_parallel_random_init=True)
    tiny = stepped(context)
    checkpoints = manager(context, tmp_path)
    with mock.patch.dict(RUN_CONFIG["training"], data_parallel_random_init=True):
        save(checkpoints, tiny, 1, context)
    expected = draws()
    loaded = load(checkpoints, tiny)
    assert draws() == expected
    assert loaded.notes == []
    of_all: list[Any] = [None] * 4
    torch.distributed.all_gather_object(of_all, expected)
    assert [len(set(numbers)) for numbers in zip(*of_all, strict=True)] == [2, 2, 2, 4]


@ranks()
def test_a_loaded_schedule_decides_the_next_step(context: Any, tmp_path: Path) -> None:
    """Take the checkpoint's weight decay, which megatron-core reads after it has set its own."""
    tiny = stepped(context)
    save(manager(context, tmp_path), tiny, 1, context)
    settings = [(group["lr"], group["weight_decay"]) for group in tiny.optimizer.param_groups]
    assert max(decay for _, decay in settings) == 0.1
    scheduler: Any = tiny.scheduler
    scheduler.num_steps = 0
    scheduler.start_wd = scheduler.end_wd = 0.5
    scheduler.override_opt_param_scheduler = False
    scheduler.use_checkpoint_opt_param_scheduler = True
    load(manager(context, tmp_path), tiny)
    loaded = [(group["lr"], group["weight_decay"]) for group in tiny.optimizer.param_groups]
    assert loaded == settings


@ranks()
def test_what_is_stored_beside_the_tensors(context: Any, tmp_path: Path) -> None:
    path = save(manager(context, tmp_path), stepped(context), 7, context)
    assert path == tmp_path / "iter_0000007"
    assert (tmp_path / TRACKER).read_text() == "7"
    assert read_run_config(tmp_path)["model"] == RUN_CONFIG["model"]
    common = load_common_state_dict(str(path))
    assert common["iteration"] == 7
    assert common["checkpoint_version"] == 3.0
    assert common["args"].consumed_train_samples == 56
    assert common["args"].num_layers == 4


@ranks()
def test_finetune_takes_the_weights_alone(context: Any, tmp_path: Path) -> None:
    tiny = stepped(context)
    save(manager(context, tmp_path), tiny, 5, context)
    other = build(context)
    other.spoil()
    loaded = load(manager(context, tmp_path, finetune=True), other)
    assert (loaded.iteration, loaded.progress) == (0, {})
    assert other.scheduler.num_steps == 0
    for ours, theirs in zip(other.model[0].parameters(), tiny.model[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@ranks()
def test_retention_and_leftovers(context: Any, tmp_path: Path) -> None:
    tiny = stepped(context)
    (tmp_path / "iter_0000001.tmp").mkdir()
    checkpoints = manager(context, tmp_path, keep_last=2)
    for iteration in (2, 4, 6, 6):
        save(checkpoints, tiny, iteration, context)
    assert published(tmp_path) == [4, 6]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000004", "iter_0000006", TRACKER]


def refused(context: Any, root: Path, **options: Any) -> str:
    size = {k: options.pop(k) for k in SIZES if k in options}
    with pytest.raises(CheckpointError) as caught:
        load(manager(context, root, **options), build(context, **size))
    return str(caught.value)


SIZES = ("hidden", "vocabulary", "layers", "distributed")


@ranks(dp=2)
def test_what_does_not_fit_or_is_damaged_is_refused(context: Any, tmp_path: Path) -> None:
    tiny = stepped(context)
    checkpoints = manager(context, tmp_path)
    for iteration in (2, 4):
        save(checkpoints, tiny, iteration, context)
    text = refused(context, tmp_path, hidden=32)
    assert "but the model's has shape [64, 32]" in text and "--use-checkpoint-args" in text
    none = str(tmp_path / "none")
    options: list[tuple[dict[str, Any], str]] = [
        ({"vocabulary": 640}, "with shape [64, 16], but the model's has shape [640, 16]"),
        ({"layers": 2}, "with shape [4, 16]"),
        ({"distributed": False}, "was saved with `--use-distributed-optimizer`, but this run is "
         "without it"),
        ({"ckpt_step": 3}, "The checkpoint of iteration 3 cannot be loaded: "
         f"{tmp_path}/iter_0000003 does not exist; give `--ckpt-step 4` for the newest whole one."),
        ({"load": none, "exit_on_missing_checkpoint": True},
         "holds no checkpoint, but `--exit-on-missing-checkpoint` is given"),
        ({"load": None, "pretrained_checkpoint": none}, "`--pretrained-checkpoint`"),
    ]  # fmt: skip
    for changes, sentence in options:
        assert sentence in refused(context, tmp_path, **changes)
    shard = folder_of(tmp_path, 4) / "__1_0.distcp"
    content = shard.read_bytes()
    torch.distributed.barrier()
    damages = [
        (content[:-1], f"{shard} has {len(content) - 1} bytes instead of {len(content)}"),
        (content[:-1] + bytes([content[-1] ^ 1]), f"{shard} does not match its checksum"),
        (None, f"{shard} is missing"),
    ]
    for damaged, sentence in damages:
        if context.rank == 0:
            shard.unlink()
            if damaged is not None:
                shard.write_bytes(damaged)
        torch.distributed.barrier()
        assert refused(context, tmp_path) == (
            f"The checkpoint of iteration 4 cannot be loaded: {sentence}; give `--ckpt-step 2` "
            "for the newest whole one."
        )
        torch.distributed.barrier()
    assert load(manager(context, tmp_path, ckpt_step=2), tiny).iteration == 2
    if context.rank == 0:
        (tmp_path / TRACKER).write_text("four")
    torch.distributed.barrier()
    assert "holds 'four', but must hold the number of an iteration" in refused(context, tmp_path)


def write(root: Path, *iterations: int) -> None:
    """Write checkpoints that look whole to all that does not load them."""
    for iteration in iterations:
        folder = root / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        for name in ("metadata.json", ".metadata", "common.pt"):
            (folder / name).write_text(str(iteration))
    (root / TRACKER).write_text(str(iterations[-1]))


def test_one_checkpoint_of_several(tmp_path: Path) -> None:
    write(tmp_path / "run", 3, 5)
    for asked, want in (("run", 5), ("run/iter_0000005", 5), ("run/iter_0000003", 3)):
        found = find(CheckpointConfig(pretrained_checkpoint=str(tmp_path / asked)))
        assert found is not None and found.weights_only
        assert (found.root, found.iteration) == (tmp_path / "run", want)
        assert found.path == tmp_path / "run" / f"iter_{want:07d}"
    with pytest.raises(CheckpointError, match=r"iter_0000004\) holds no checkpoint; give a folder"):
        find(CheckpointConfig(pretrained_checkpoint=str(tmp_path / "run" / "iter_0000004")))


def test_a_damaged_checkpoint_is_passed_over_to_an_older_one(tmp_path: Path) -> None:
    """Steps after the chosen checkpoint may be those that somebody wants to do otherwise."""
    write(tmp_path, 2, 4, 6, 8)
    (folder_of(tmp_path, 6) / "common.pt").unlink()
    damaged = {folder_of(tmp_path, 4): "does not match its checksum"}
    found = find(CheckpointConfig(load=str(tmp_path), ckpt_step=6), damaged)
    assert found is not None and found.iteration == 2
    assert list(damaged) == [folder_of(tmp_path, 4), folder_of(tmp_path, 6)]
    found = find(CheckpointConfig(load=str(tmp_path), ckpt_step=8), damaged)
    assert found is not None and found.iteration == 8


def test_folders_of_other_names_are_roots(tmp_path: Path) -> None:
    for name in ("iter_12", "iter_0000012.replaced", "iter_0000012x", "run"):
        (tmp_path / name).mkdir()
        assert root_of(tmp_path / name) == (tmp_path / name, None)
    assert root_of(tmp_path / "iter_0000012") == (tmp_path / "iter_0000012", None)
    (tmp_path / "iter_0000012").mkdir()
    assert root_of(tmp_path / "iter_0000012") == (tmp_path, 12)


class Extra:
    """State of a task, which notes what becomes of it."""

    def __init__(self) -> None:
        self.calls = list[str]()

    def state_to_save(self, metadata: dict[str, Any], *, with_optimizer: bool) -> dict[str, Any]:
        self.calls.append(f"save {with_optimizer}")
        return {"extra": 7}

    def state_to_load(
        self, path: Path, metadata: dict[str, Any], *, with_optimizer: bool
    ) -> dict[str, Any]:
        self.calls.append(f"ask {with_optimizer}")
        return {}

    def load(self, loaded: dict[str, Any], *, with_optimizer: bool, notes: list[str]) -> None:
        self.calls.append(f"load {loaded['extra']} {with_optimizer}")


def weights(tiny: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in tiny.model[0].parameters()]


def averages_of(tiny: Any, ema: ShardedEMA) -> list[torch.Tensor]:
    found = {parameter: average.clone() for parameter, average in ema.gathered()}
    return [found[parameter] for parameter in tiny.model[0].parameters()]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def save_all(checkpoints: Any, tiny: Any, iteration: int, **more: Any) -> None:
    checkpoints.save(
        iteration,
        model=tiny.model,
        optimizer=tiny.optimizer,
        scheduler=tiny.scheduler,
        progress={"iteration": iteration, "average_updates": 9, "average_start": 0.5},
        run_config=RUN_CONFIG,
        **more,
    )


@ranks()
def test_averages_take_the_place_of_weights_only_where_a_run_starts_from_them(
    context: Any, tmp_path: Path
) -> None:
    tiny = stepped(context)
    ema = ShardedEMA(tiny.model, tiny.optimizer, decay=0.5)
    for part in ema.parts:
        part.average.add_(1.0)
    trained, averages = weights(tiny), averages_of(tiny, ema)
    extra = Extra()
    save_all(manager(context, tmp_path / "both"), tiny, 4, ema=ema, extra_state=extra)
    save_all(manager(context, tmp_path / "plain"), tiny, 4)

    def start(name: str, **how: Any) -> tuple[Any, Any, list[torch.Tensor], Extra]:
        other, extra = build(context), Extra()
        other.spoil()
        own = ShardedEMA(other.model, other.optimizer, decay=0.5)
        loaded = manager(context, tmp_path / name, pretrained_average=True, **how).load(
            model=other.model,
            optimizer=other.optimizer,
            scheduler=other.scheduler,
            ema=own,
            extra_state=extra if name == "both" else None,
        )
        return loaded, weights(other), averages_of(other, own), extra

    loaded, found, own, extra = start("both")
    assert same(found, trained) and same(own, averages) and loaded.notes == []
    assert loaded.progress["average_updates"] == 9
    assert extra.calls == ["ask True", "load 7 True"]
    loaded, found, own, extra = start("both", finetune=True)
    assert same(found, averages) and same(own, averages)
    assert loaded.progress == {"average_updates": 0, "average_start": 1.0}
    assert extra.calls == []
    loaded, found, own, _ = start("plain")
    assert same(found, trained) and same(own, trained)
    assert "holds no averaged weights, so they start from the loaded ones" in loaded.notes[0]
    assert (loaded.progress["average_updates"], loaded.progress["average_start"]) == (0, 1.0)
    loaded, found, _, _ = start("plain", finetune=True)
    assert same(found, trained)
    assert any("so its weights are taken" in note for note in loaded.notes)


@ranks()
def test_what_flags_leave_out_is_neither_saved_nor_loaded(context: Any, tmp_path: Path) -> None:
    tiny = stepped(context)
    extra = Extra()
    bare = manager(context, tmp_path / "bare", no_save_optim=True, no_save_rng=True)
    save_all(bare, tiny, 4, extra_state=extra)
    assert extra.calls == ["save False"]
    entries = stored_entries(folder_of(tmp_path / "bare", 4))
    assert entries and not any(name.startswith(("optimizer", "rng_state")) for name in entries)
    common = load_common_state_dict(str(folder_of(tmp_path / "bare", 4)))
    assert "opt_param_scheduler" not in common and "optimizer" not in common
    # A snapshot has all of it, whatever checkpoints leave out.
    state = bare.state_in_memory(
        model=tiny.model,
        optimizer=tiny.optimizer,
        scheduler=tiny.scheduler,
        run_config=RUN_CONFIG,
        ema=None,
        extra_state=None,
    )
    assert {"optimizer", "rng_state", "opt_param_scheduler", "model"} <= state.keys()
    save_all(manager(context, tmp_path / "all"), tiny, 4)
    expected = draws()
    own = load(manager(context, tmp_path / "all", no_load_rng=True, no_load_optim=True), tiny)
    assert own.iteration == 4 and draws() != expected
    leaves_out = manager(context, tmp_path / "all", no_load_rng=True, no_load_optim=True)
    other = build(context)
    leaves_out.load(
        model=other.model, optimizer=other.optimizer, scheduler=other.scheduler, whole=True
    )
    assert draws() == expected and other.scheduler.num_steps == 1


def test_weights_under_adapters_are_not_looked_for_where_the_adapters_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run with `--resume-mode auto` finds its own checkpoint first, which lacks them."""
    looked = list[Any]()
    base = FrozenBase("base", "digest")
    monkeypatch.setattr(
        CheckpointManager, "load", lambda self, **_: looked.append(candidates(self._config))
    )
    monkeypatch.setattr(FrozenBase, "given", lambda root, *, average: base)
    monkeypatch.setattr(manager_module, "on_first_rank", lambda work, _: work())
    config = CheckpointConfig(
        save="run", load="other", resume_mode="auto", pretrained_checkpoint="base"
    )
    none: Any = None
    CheckpointManager(config, none)._restore_base(Path("run"), base, none)
    assert looked == [[("base", None, True)]]


def test_a_second_network_takes_its_own_weights_before_averages_of_the_first() -> None:
    none: Any = None
    for average, section, names in (
        (False, None, []),
        (True, None, ["ema."]),
        (False, "critic", ["critic."]),
        (True, "critic", ["critic.", "ema."]),
    ):
        config = CheckpointConfig(pretrained_average=average)
        assert CheckpointManager(config, none, section=section)._names == names
