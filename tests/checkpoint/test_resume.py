"""Flags and weights that differ from those of a checkpoint are refused, or said."""

import dataclasses
import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from megatron_ext.checkpoint import compatibility as unwanted
from megatron_ext.checkpoint.compatibility import check_changes, check_unexpected, loads_random
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.state import LoadedCheckpoint
from megatron_ext.checkpoint.stored import CheckpointRef
from megatron_ext.config.flags import flag
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.task import TEXT
from megatron_ext.video.networks.wan.config import SIZES
from tests.ranks import run_on_ranks
from tests.training_runs import TINY, mock_data, train_on_ranks
from tests.video.networks.harness import build
from tests.video.networks.wan.problem import Problem
from tests.video.streaming.runs import attempt, run
from tests.video.test_starts import I2V, T2V, latents
from tests.video.test_starts import train_on_latents as train

PATH = Path("somewhere/iter_0000007")
MOE = "--num-experts 4"


@pytest.mark.parametrize(
    ("experts", "ranks", "context", "same"),
    [(2, 4, 2, True), (2, 8, 4, False), (2, 8, 2, False), (1, 8, 4, True), (1, 8, 2, False)],
)
def test_random_states_of_experts_are_those_of_all_replicas(
    experts: int, ranks: int, context: int, same: bool
) -> None:
    stored = Namespace(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=experts,
        context_parallel_size=2,
        data_parallel_size=2,
        data_parallel_random_init=True,
    )
    layout = Layout(ranks, context_parallel_size=context, expert_model_parallel_size=experts)
    said: list[str] = []
    found = CheckpointRef(PATH, 7, weights_only=False)
    assert loads_random(found, CheckpointConfig(), stored, layout, said) == same
    assert len(said) == (not same)


@dataclass(frozen=True)
class OwnFlags:
    own_cap: int = flag(1, "a cap")
    own_kind: str = flag("a", "a kind", if_changed="refuse_to_resume")
    own_trace: bool = flag(False, "print more", if_changed="allow")


def given(flags: str) -> RunConfig:
    words = [*TINY, *mock_data(), "--train-iters", "12", *flags.split()]
    return parse_args(words, TEXT.with_sections(OwnFlags), world_size=1, device="cpu").config


def notes(now: str, before: str = "", **how: bool) -> list[str]:
    stored = json.loads(json.dumps(given(before).to_dict()))
    how = {"weights_only": False, "with_optimizer": True, **how}
    return check_changes(PATH, given(now), stored, **how)


def test_the_same_flags_are_not_mentioned_nor_new_adapters() -> None:
    assert notes("") == notes(MOE, MOE) == []
    assert notes("--lora-rank 4") == notes("", "--lora-rank 4") == []


@pytest.mark.parametrize(
    ("flags", "before", "named"),
    [
        ("--num-attention-heads 8 --kv-channels 16", "", "`--num-attention-heads` (8, before 4)"),
        ("--hidden-size 128", "", "`--hidden-size` (128, before 64)"),
        ("--rotary-base 500", "", "`--rotary-base` (500.0, before 10000.0)"),
        ("--rotary-interleaved", "", "`--rotary-interleaved`"),
        ("--no-swiglu --squared-relu", "", "`--squared-relu`, `--no-swiglu`"),
        ("--normalization LayerNorm", "", "`--normalization` (LayerNorm, before RMSNorm)"),
        ("--norm-epsilon 1e-3", "", "`--norm-epsilon` (0.001, before 1e-05)"),
        (f"{MOE} --moe-router-topk 3", MOE, "`--moe-router-topk` (3, before 2)"),
        ("--lora-rank 4 --lora-alpha 3", "--lora-rank 4", "`--lora-alpha` (3.0, before 32.0)"),
    ],
)
def test_another_model_is_refused(flags: str, before: str, named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        notes(flags, before)
    assert f"{PATH} holds a model with other flags than {named}" in str(caught.value)
    assert "give the flags that it was saved with" in str(caught.value)
    with pytest.raises(CheckpointError, match="; leave out the flags of the model, which `--use"):
        notes(f"{flags} --load x --use-checkpoint-args", before)


def test_who_starts_from_weights_may_compute_with_other_settings() -> None:
    (note,) = notes("--rotary-base 500 --seed 9", weights_only=True, with_optimizer=False)
    assert note == (
        f"Flags that differ from those of {PATH}, and count from here: `--rotary-base` (500.0, "
        "before 10000.0)."
    )
    with pytest.raises(CheckpointError, match="--num-attention-heads"):
        notes("--num-attention-heads 8", weights_only=True, with_optimizer=False)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--seed 9", "`--seed` (9, before 1234)"),
        ("--split 8,1,1", "`--split` (8,1,1, before 90,5,5)"),
        ("--seq-length 32", "`--seq-length` (32, before 64)"),
        ("--attention-dropout 0.5", "`--attention-dropout` (0.5, before 0.0)"),
        ("--bf16 --clip-grad 2", "`--clip-grad` (2.0, before 1.0)"),
        ("--loss-reduction sample", "`--loss-reduction` (sample, before token)"),
    ],
)
def test_other_data_and_training_is_said(flags: str, named: str) -> None:
    (note,) = notes(flags)
    assert note.startswith(f"Flags that differ from those of {PATH}, and count from here: ")
    assert named in note


@pytest.mark.parametrize(
    "flags", ["--log-interval 5", "--micro-batch-size 1", "--train-iters 99", "--rotary-base 500"]
)
def test_what_changes_no_result_is_not_mentioned(flags: str) -> None:
    none = "--position-embedding-type none"
    assert notes(f"{flags} {none}", none) == []


def test_settings_that_the_optimizer_keeps_are_said() -> None:
    (note,) = notes("--adam-beta2 0.9")
    assert note == (
        f"The optimizer goes on with the settings of {PATH}, not with `--adam-beta2` (0.9, before "
        "0.999); `--no-load-optim` starts it anew with yours."
    )
    assert notes("--adam-beta2 0.9", with_optimizer=False) == []


PLAIN = "--no-use-distributed-optimizer --optimizer sgd"


@pytest.mark.parametrize(
    ("flags", "before", "sentence"),
    [
        (PLAIN, "", "`--optimizer` (sgd) does not go with the optimizer state of"),
        ("--decoupled-lr 1e-4", "", "`--decoupled-lr` (0.0001) does not go with"),
        ("", "--decoupled-lr 1e-4", "saved with 0.0001; use that, or give `--no-load-optim`."),
        (f"{PLAIN} --sgd-momentum 0", PLAIN, "`--sgd-momentum` (0.0) does not go with"),
    ],
)
def test_state_of_another_optimizer_is_refused(flags: str, before: str, sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        notes(flags, before)
    assert sentence in str(caught.value)
    assert notes(flags, before, with_optimizer=False) == []


def test_a_run_refuses_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = [*TINY, *mock_data(), "--train-iters", "2"]
    assert train_on_ranks(flags, save=tmp_path / "a")[0] == 0
    flags += ["--load", str(tmp_path / "a"), "--train-iters", "3", "--override-opt-param-scheduler"]
    capfd.readouterr()
    other = [*flags, "--num-attention-heads", "8", "--kv-channels", "8"]
    with pytest.raises(CheckpointError) as caught:  # before any rank starts
        train_on_ranks(other, save=tmp_path / "b")
    named = "`--kv-channels` (8, before 16), `--num-attention-heads` (8, before 4)"
    assert named in str(caught.value)
    other = [*flags, "--seed", "9", "--adam-beta2", "0.9"]
    assert train_on_ranks(other, save=tmp_path / "c")[0] == 0
    shown = capfd.readouterr()
    assert "count from here: `--seed` (9, before 1234)." in shown.out
    assert "not with `--adam-beta2` (0.9, before 0.999)" in shown.out


def test_flags_of_a_users_own_say_themselves_whether_they_may_differ() -> None:
    (note,) = notes("--own-cap 2 --own-trace")
    assert note.endswith("count from here: `--own-cap` (2, before 1).")
    (note,) = notes("--own-cap 2 --own-kind b", weights_only=True)
    assert note.endswith("count from here: `--own-kind` (b, before a).")
    with pytest.raises(CheckpointError, match="--own-kind"):
        notes("--own-kind b")


__all__ = ["latents"]


def chunks(context: ParallelContext, num_blocks: int) -> Any:
    sizes = dataclasses.replace(SIZES["tiny"], num_blocks=num_blocks)
    return build(Problem(sizes=sizes), context)[1]


def save(context: ParallelContext, folder: Path, num_blocks: int) -> None:
    CheckpointManager(CheckpointConfig(save=str(folder)), context).save(
        1, model=chunks(context, num_blocks), optimizer=None, scheduler=None, progress={},
        run_config={},
    )  # fmt: skip


def load(context: ParallelContext, folder: Path, num_blocks: int, **options: Any) -> Any:
    config = CheckpointConfig(pretrained_checkpoint=str(folder), **options)
    manager = CheckpointManager(config, context)
    return manager.load(model=chunks(context, num_blocks), optimizer=None, scheduler=None)


def refuse(context: ParallelContext, folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(context, folder, 2)
    assert str(caught.value) == (
        f"{folder}/iter_0000001 holds 4 `blocks`, but the model has only 2, so that `blocks.2` "
        "would be dropped; give the flags that it was saved with, or `--use-checkpoint-args`."
    )
    loaded = load(context, folder, 4)
    assert isinstance(loaded, LoadedCheckpoint) and loaded.notes == []
    assert load(context, folder, 2, dist_ckpt_strictness="ignore_all").notes == []
    with pytest.raises(CheckpointError, match=r"holds no `blocks.4.\S+`, which the model needs"):
        load(context, folder, 5)


@pytest.mark.parametrize("stages", [1, 2])
def test_fewer_blocks_are_refused_on_every_rank(tmp_path: Path, stages: int) -> None:
    layout = Layout(world_size=stages, pipeline_model_parallel_size=stages)
    run_on_ranks(save, Layout(world_size=1), {"folder": tmp_path, "num_blocks": 4})
    run_on_ranks(refuse, layout, {"folder": tmp_path})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_branch_that_is_left_out_is_noted_once(
    latents: Path, tmp_path: Path, ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(latents, tmp_path / "i2v", f"{I2V} --train-iters 1") == 0
    assert "does not take" not in capfd.readouterr().out
    words = f"--train-iters 1 --pretrained-checkpoint {tmp_path / 'i2v'}"
    words += f" --pipeline-model-parallel-size {ranks}"
    assert train(latents, tmp_path / "t2v", f"{T2V} {words}", ranks=ranks) == 0
    said = capfd.readouterr().out
    assert said.count("does not take") == 1
    assert (
        f"> {tmp_path}/i2v/iter_0000001 holds 2 weight(s) that the model does not take, such as "
        "`embedding.cond_in.bias`; they are left out.\n"
    ) in said
    assert train(latents, tmp_path / "i2v2", f"{I2V} {words}", ranks=ranks) == 0
    assert "does not take" not in capfd.readouterr().out


def test_a_critic_with_fewer_blocks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    deep = dataclasses.replace(SIZES["tiny"], num_blocks=3)
    monkeypatch.setitem(SIZES, "small", deep)  # type: ignore[arg-type]
    run(tmp_path, "--critic-size small --train-iters 2 --exit-interval 1")
    words = f"--train-iters 2 --load {tmp_path / 'save'}"
    assert attempt(tmp_path, words, save="other")[0] != 0
    assert (
        "iter_0000001 holds 3 `critic.blocks`, but the model has only 2, so that `critic.blocks.2` "
        "would be dropped;"
    ) in capfd.readouterr().err
    run(tmp_path, f"--critic-size small {words}", save="more")
    assert "does not take" not in capfd.readouterr().out


MODEL = ("head.weight", "blocks.0.weight", "blocks.1.weight")
"""Weights of a model, beside which a checkpoint may hold other things."""
TENSOR = TensorStorageMetadata.__new__(TensorStorageMetadata)


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ((), None),
        (("optimizer.state.exp_avg.blocks.7.weight", "chained_0.optimizer.fp32.blocks.7"), None),
        (("ema.blocks.0.weight", "ema.blocks.7.weight", "critic.blocks.7.weight"), None),
        (("critic.optimizer.state.exp_avg.blocks.7.weight", "states"), None),
        (("mtp.layers.0.w", "mtp.layers.1.w"), "2 weight(s) .* as `mtp.layers.0.w`; they are"),
        (("output_layer.weight",), "1 weight(s) .* as `output_layer.weight`; they are left"),
    ],
)
def test_what_is_not_of_the_model_is_let_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], note: str | None
) -> None:
    stored = dict.fromkeys((*MODEL, *more), TENSOR)
    stored |= {name: BytesStorageMetadata() for name in ("states", "blocks.7._extra_state/shard_0")}
    monkeypatch.setattr(unwanted, "stored_entries", lambda _: stored)
    notes = check_unexpected(tmp_path, MODEL, CheckpointConfig())
    assert len(notes) == (note is not None)
    for said in notes:
        count, name = str(note).split(" .* as ")
        assert f"{tmp_path} holds {count} that the model does not take, such as {name}" in said
    # Averages in the place of weights are these weights.
    averaged = [f"ema.{name}" for name in MODEL]
    assert check_unexpected(tmp_path, averaged, CheckpointConfig()) == notes


def test_one_of_two_heads_may_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = dict.fromkeys(("mtp.layers.0.w", "mtp.layers.1.w"), TENSOR)
    monkeypatch.setattr(unwanted, "stored_entries", lambda _: stored)
    (note,) = check_unexpected(tmp_path, ["mtp.layers.0.w"], CheckpointConfig())
    assert "holds 1 weight(s) that the model does not take, such as `mtp.layers.1.w`;" in note
