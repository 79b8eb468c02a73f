"""Shapes, random states, optimizers and schedules that fit a checkpoint, and those that do not."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from megatron_ext.checkpoint import adapters, compatibility
from megatron_ext.checkpoint.adapters import FrozenBase, adapters_among, check_adapters
from megatron_ext.checkpoint.compatibility import (
    check_changes,
    check_model,
    check_optimizer,
    check_resume,
    loads_optimizer,
    loads_random,
)
from megatron_ext.checkpoint.manifest import MANIFEST
from megatron_ext.checkpoint.stored import CheckpointRef
from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.fp8.scaling import HISTORY
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.task import TEXT
from tests.training_runs import TINY, mock_data, without

PATH = Path("somewhere/iter_0000007")
ONE = Layout(1)
TP2 = Layout(2, tensor_model_parallel_size=2)


def entry(*size: int) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(), torch.Size(size), [])


def check(
    monkeypatch: pytest.MonkeyPatch,
    theirs: tuple[int, ...],
    ours: tuple[int, ...],
    layout: Layout = ONE,
    **arguments: int,
) -> None:
    monkeypatch.setattr(compatibility, "stored_entries", lambda _: {"words": entry(*theirs)})
    tensor = ShardedTensor.from_rank_offsets("words", torch.zeros(ours), allow_shape_mismatch=True)
    check_model(PATH, {"words": tensor}, Namespace(**arguments), layout, CheckpointConfig())


@pytest.mark.parametrize(
    ("rows", "own", "layout", "arguments"),
    [
        (256, 129, Layout(1), {}),
        (129, 256, Layout(1), {}),
        (64, 33, Layout(1), {"make_vocab_size_divisible_by": 32}),
        (128, 65, Layout(1), {"make_vocab_size_divisible_by": 32, "tensor_model_parallel_size": 2}),
        (65, 128, TP2, {"make_vocab_size_divisible_by": 32}),
    ],
)
def test_a_vocabulary_may_be_padded_by_less_than_a_unit(
    rows: int, own: int, layout: Layout, arguments: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unit is the larger one of the two runs; 128 is Megatron-LM's default."""
    check(monkeypatch, (rows, 8), (own, 8), layout, **arguments)
    further = own - 1 if own < rows else own + 1
    with pytest.raises(CheckpointError, match=rf"with shape \[{rows}, 8\], but the model's has"):
        check(monkeypatch, (rows, 8), (further, 8), layout, **arguments)
    with pytest.raises(CheckpointError, match=rf"but the model's has shape \[{own}, 4\]"):
        check(monkeypatch, (rows, 8), (own, 4), layout, **arguments)


def given(flags: str, base: list[str] = TINY) -> RunConfig:
    words = [*base, *mock_data(), *flags.split()]
    return parse_args(words, TEXT, world_size=1, device="cpu").config


def changes(now: str, before: str, base: list[str] = TINY, **how: bool) -> list[str]:
    stored = given(before, base).to_dict()
    how = {"weights_only": False, "with_optimizer": True, **how}
    return check_changes(PATH, given(now, base), stored, **how)


ENDLESS = without(without(TINY, "--lr-decay-iters"), "--lr-warmup-iters")
GROWING = "--start-weight-decay 0 --end-weight-decay {} --weight-decay-incr-style linear"


@pytest.mark.parametrize(
    ("now", "before", "named"),
    [
        ("--train-iters 24 --lr 2e-3", "--train-iters 12", "`--lr` (0.002, before 0.001)"),
        ("--train-iters 24", "--train-iters 12", "`--train-iters` (24, before 12)"),
        (
            "--train-samples 320 --lr-warmup-samples 32",
            "--train-samples 160 --lr-warmup-samples 32",
            "`--train-samples` (320, before 160)",
        ),
        (
            f"--train-iters 12 {GROWING.format(0.2)}",
            f"--train-iters 12 {GROWING.format(0.1)}",
            "`--end-weight-decay` (0.2, before 0.1)",
        ),
        (
            f"--train-iters 24 --lr-decay-iters 12 {GROWING.format(0.1)}",
            f"--train-iters 12 --lr-decay-iters 12 {GROWING.format(0.1)}",
            "`--train-iters` (24, before 12)",
        ),
        (
            "--train-iters 24 --lr-decay-iters 24 --global-batch-size 32",
            "--train-iters 24 --lr-decay-iters 24",
            "`--global-batch-size` (32, before 16)",
        ),
        (
            "--train-iters 12 --lr-warmup-iters 2",
            "--train-iters 12",
            "`--lr-warmup-iters` (2, before ",
        ),
    ],
)
def test_another_schedule_is_refused_by_the_flags_that_changed(
    now: str, before: str, named: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        changes(now, before, ENDLESS)
    assert named in str(caught.value)
    (note,) = changes(now, before, ENDLESS, with_optimizer=False)
    assert named in note.partition("count from here: ")[2]
    (note,) = changes(f"{now} --override-opt-param-scheduler", before, ENDLESS)
    assert named in note.partition("count from here: ")[2]
    kept = changes(f"{now} --use-checkpoint-opt-param-scheduler", before, ENDLESS)[0]
    assert named in kept.partition("not with ")[2] and "goes on with the settings of" in kept


def test_a_rate_that_has_come_to_its_end_cannot_go_on(tmp_path: Path) -> None:
    for iteration, advice in (
        (12, "and would stay there, `--finetune` for"),
        (11, "to go on from"),
    ):
        path = tmp_path / f"iter_{iteration:07d}"
        path.mkdir()
        stored = given("--train-iters 12", ENDLESS).to_dict()
        how = {"weights_only": False, "with_optimizer": True}
        with pytest.raises(CheckpointError, match=advice):
            check_changes(path, given("--train-iters 24", ENDLESS), stored, **how)


@pytest.mark.parametrize(
    ("now", "before"),
    [
        ("--train-iters 24 --lr-decay-iters 12", "--train-iters 12 --lr-decay-iters 12"),
        (
            "--train-samples 320 --lr-decay-samples 160 --lr-warmup-samples 32",
            "--train-samples 160 --lr-decay-samples 160 --lr-warmup-samples 32",
        ),
    ],
)
def test_a_longer_run_with_the_same_decay_has_the_same_schedule(now: str, before: str) -> None:
    changes(now, before, ENDLESS)
    # So its length is not named among the flags that change the schedule.
    unit = "samples" if "samples" in now else "iters"
    warmup = f" --lr-warmup-{unit} 8"
    with pytest.raises(CheckpointError) as caught:
        changes(f"{now}{warmup}", before, ENDLESS)
    assert f"`--lr-warmup-{unit}` (8, before" in str(caught.value)
    assert "--train-" not in str(caught.value)


def test_checkpoints_without_a_length_have_no_schedule_to_compare() -> None:
    stored = given("--train-iters 12").to_dict()
    stored["training"] |= {"train_iters": None, "train_samples": None}
    how = {"weights_only": False, "with_optimizer": True}
    check_changes(PATH, given("--train-iters 12 --lr 2e-3"), stored, **how)


def test_a_constant_rates_usual_warm_up_may_follow_the_length_of_the_run() -> None:
    def config(words: str) -> RunConfig:
        flags = [*ENDLESS, *mock_data(), *f"--lr-decay-style constant {words}".split()]
        defaults = {"usual_warmup_iters": 1000}
        return parse_args(flags, TEXT, world_size=1, device="cpu", defaults=defaults).config

    def compare(now: str, before: str) -> None:
        check_changes(
            PATH, config(now), config(before).to_dict(), weights_only=False, with_optimizer=True
        )

    compare("--train-iters 400", "--train-iters 40")
    for now, before in (
        ("--train-iters 400 --lr-warmup-iters 5", "--train-iters 40"),
        ("--train-iters 400", "--train-iters 40 --lr-warmup-iters 5"),
    ):
        with pytest.raises(CheckpointError, match="--lr-warmup-iters"):
            compare(now, before)


def test_numbers_that_earlier_versions_stored_in_another_form_are_the_same() -> None:
    words = "--train-iters 12 --no-rope-freq 2"
    stored = given(words).to_dict()
    how = {"weights_only": False, "with_optimizer": True}
    for name, form in (("rotary_base", 10000), ("no_rope_freq", 2)):
        section = next(section for section, values in stored.items() if name in values)
        other = {**stored, section: {**stored[section], name: form}}
        assert check_changes(PATH, given(words), other, **how) == []
    other = {**stored, section: {**stored[section], "no_rope_freq": 3}}
    with pytest.raises(CheckpointError, match=r"`--no-rope-freq` \(2, before 3\)"):
        check_changes(PATH, given(words), other, **how)


def test_only_having_a_momentum_or_none_is_another_state() -> None:
    sgd = "--no-use-distributed-optimizer --optimizer sgd --train-iters 12"
    changes(f"{sgd} --sgd-momentum 0.8", f"{sgd} --sgd-momentum 0.9")
    with pytest.raises(CheckpointError, match="--sgd-momentum"):
        changes(f"{sgd} --sgd-momentum 0.9", f"{sgd} --sgd-momentum 0")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_whole_state_of_16_bits_needs_weights_in_32_bits(precision: str) -> None:
    how: dict[str, Any] = {"distributed": False}
    arguments = Namespace(**{precision: True})
    check_optimizer(PATH, {}, arguments, Layout(1), has_main_weights=True, **how)
    with pytest.raises(CheckpointError, match="was saved in bf16 or fp16"):
        check_optimizer(PATH, {}, arguments, Layout(1), has_main_weights=False, **how)


LORA = "decoder.layers.0.linear_qkv.lora.a.weight"


def test_adapters_are_matrices_and_not_their_averages_or_moments() -> None:
    names = [LORA, f"ema.{LORA}", f"optimizer.state.exp_avg.{LORA}", "decoder.layers.0.weight"]
    assert adapters_among([*reversed(names), "a.lora.b"]) == ["a.lora.b", LORA]


def test_a_stage_judges_the_adapters_of_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    other = LORA.replace("layers.0", "layers.1")
    monkeypatch.setattr(adapters, "stored_entries", lambda _: dict.fromkeys((LORA, other)))

    def judge(*names: str, strictness: str = "") -> None:
        state = {"model": {name: Namespace(key=name) for name in names}}
        check_adapters(PATH, state, ["model"], strictness)

    base = "decoder.layers.0.linear_qkv.weight"
    judge(base, LORA)
    with pytest.raises(CheckpointError, match=f"holds the adapter `{LORA}`, which the model would"):
        judge(base)
    judge(base, strictness="log_all")
    with pytest.raises(CheckpointError, match="holds no adapter `x.lora.a.weight`, which"):
        judge(base, LORA, "x.lora.a.weight")
    judge("embedding.weight")


def test_frozen_weights_are_known_by_their_digest_and_not_by_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
        (folder / ".metadata").write_text("the same names and shapes")
    (folders[0] / MANIFEST).write_text("checksums")
    (folders[1] / MANIFEST).write_text("checksums")
    (folders[2] / MANIFEST).write_text("other checksums")
    averaged = list[Path]()
    monkeypatch.setattr(adapters, "holds_averages", lambda path: path in averaged)
    first, moved, other = (FrozenBase.at(folder) for folder in folders)
    first.check(PATH, moved, "--pretrained-checkpoint")
    with pytest.raises(CheckpointError, match=r"must be the weights under the adapters in .*give"):
        first.check(PATH, other, "--pretrained-checkpoint")
    # Without averages in the checkpoint its weights are taken, whatever the flag says.
    assert FrozenBase.at(folders[0], average=True) == first
    averaged.append(folders[0])
    assert FrozenBase.at(folders[0]) == first
    assert FrozenBase.at(folders[0], average=True).identity == f"{first.identity} averaged"


@pytest.mark.parametrize(
    ("rank", "alone", "known"), [(4, True, True), (4, False, False), (None, True, False)]
)
def test_random_weights_are_known_by_their_seed_where_they_are_not_saved(
    rank: int | None, alone: bool, known: bool
) -> None:
    lora = LoraConfig(lora_rank=rank)
    found = FrozenBase.of_run(_saving(lora, alone), 17)
    assert found == (FrozenBase(None, "seed 17") if known else None)


def _saving(lora: LoraConfig, alone: bool) -> Any:
    return Namespace(lora_rank=lora.lora_rank, saves_adapters_only=alone)


def test_a_run_is_compared_with_its_checkpoint_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that only evaluates goes on with no optimizer, so it may have another one."""
    before = given("--train-iters 12")
    checkpoint = CheckpointRef(Path("run"), 7, weights_only=False)
    progress: Any = {}
    common = {"args": Namespace(), "content_metadata": {}}

    def find_intact(_: Any, own: Any) -> CheckpointRef:
        checked = own({name: {} for name in ("common.pt", "run_config.json", "__0_0.distcp")})
        assert checked == {"common.pt", "run_config.json"}  # What is read here is verified.
        return checkpoint

    for name, value in {
        "find_intact": find_intact,
        "common_state_of": lambda _: common,
        "read_settings": lambda _: before.to_dict(),
        "read_progress": lambda _: progress["iteration"],
    }.items():
        monkeypatch.setattr(compatibility, name, value)
    with pytest.raises(KeyError):  # The counters are read, too.
        check_resume(before)
    progress["iteration"] = 7
    plain = "--no-use-distributed-optimizer --train-iters 12"
    check_resume(given(plain))
    with pytest.raises(CheckpointError, match="--use-distributed-optimizer"):
        check_resume(before)
    sgd = f"{plain} --optimizer sgd"
    with pytest.raises(CheckpointError, match="--optimizer"):
        check_resume(given(sgd))
    for flag in ("--skip-train", "--no-load-optim"):
        check_resume(given(f"{sgd} {flag}"))
    for precision in ("bf16", "fp16"):
        common["args"] = Namespace(**{precision: True})
        check_resume(given(f"{plain} --{precision}"))
        with pytest.raises(CheckpointError, match="was saved in bf16 or fp16"):
            check_resume(given(plain))


def test_new_weights_keep_their_names_on_a_rank_where_layers_count_from_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later pipeline stage calls its first layer 0, and the checkpoint calls it 2."""
    stored = dict.fromkeys(("layers.2.weight", "layers.3.lora.a.weight"))
    monkeypatch.setattr(adapters, "stored_entries", lambda _: stored)
    names = ("0.weight", "0.lora.a.weight", "1.lora.a.weight", "1.gate")
    values = {name: torch.zeros(2) for name in names}
    values["1.gate"].new_branch = True  # type: ignore[attr-defined]
    state = {
        f"layers.{name}": ShardedTensor.from_rank_offsets(
            f"layers.{int(name[0]) + 2}{name[1:]}", value
        )
        for name, value in values.items()
    }
    new = adapters.leave_out_new(PATH, {"model1": state, "optimizer": {}}, ["model0", "model1"])
    assert new.keys() == {"model1"}
    assert new["model1"].keys() == {"layers.0.lora.a.weight", "layers.1.gate"}
    assert new["model1"]["layers.1.gate"] is values["1.gate"]
    assert state.keys() == {"layers.0.weight", "layers.1.lora.a.weight"}


def test_new_branches_and_new_scales_are_told_each_once() -> None:
    def marked() -> torch.Tensor:
        value = torch.zeros(1)
        value.new_branch = True  # type: ignore[attr-defined]
        return value

    branch = f"{PATH} holds no `gate`, so it starts at zero."
    scales = f"{PATH} holds no scales of 8-bit products, so their history starts anew."
    history = {f"{name}.{HISTORY}": marked() for name in "ab"}
    assert adapters.new_branches(PATH, {"model": {"x.lora.a.weight": torch.zeros(1)}}) == []
    assert adapters.new_branches(PATH, {"model": {"gate": marked()}}) == [branch]
    assert adapters.new_branches(PATH, {"model": history}) == [scales]
    both = {"model0": history, "model1": {"gate": marked()}}
    assert adapters.new_branches(PATH, both) == [branch, scales]


def test_the_adapters_of_a_second_network_are_verified_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def verify(checkpoint: CheckpointRef, _: Any) -> None:
        raise CheckpointError(f"{checkpoint.iteration} is damaged")

    monkeypatch.setattr(adapters, "verify", verify)
    checkpoint = CheckpointRef(Path("run"), 7, weights_only=False)
    none: Any = None
    with pytest.raises(CheckpointError, match="7 is damaged"):
        adapters.load_adapters(checkpoint, FrozenBase(None, "x"), [], "critic", none, none)


def test_sizes_that_a_checkpoint_does_not_name_are_one() -> None:
    same = compatibility.same_model_ranks
    assert same(Namespace(), ONE) and not same(Namespace(), TP2)
    assert same(Namespace(tensor_model_parallel_size=2), TP2)
    for axis in ("pipeline", "expert"):
        assert not same(Namespace(**{f"{axis}_model_parallel_size": 2}), ONE)


def test_state_that_is_wanted_and_not_stored_is_told() -> None:
    resumes = CheckpointRef(Path("run"), 7, weights_only=False)
    starts = CheckpointRef(Path("run"), 7, weights_only=True)
    bare = Namespace(no_save_optim=True, no_save_rng=True)
    leaves_out = CheckpointConfig(no_load_optim=True, no_load_rng=True)
    for checkpoint, config, arguments, loaded, num_notes in (
        (resumes, CheckpointConfig(), Namespace(), True, 0),
        (resumes, CheckpointConfig(), bare, False, 1),
        (resumes, leaves_out, Namespace(), False, 0),
        (starts, CheckpointConfig(), bare, False, 0),
    ):
        notes = list[str]()
        assert loads_optimizer(checkpoint, config, arguments, notes) == loaded
        assert len(notes) == num_notes
        assert loads_random(checkpoint, config, arguments, ONE, notes) == loaded
        assert len(notes) == 2 * num_notes
        assert all("run/iter_0000007 holds no " in note for note in notes)
