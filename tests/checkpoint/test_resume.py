"""Flags that differ from those of a checkpoint are refused, or said."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ext.checkpoint.resume import check_changes
from megatron_ext.config.flags import flag
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.text.task import TEXT
from tests.training_runs import TINY, mock_data, train_on_ranks

PATH = Path("somewhere/iter_0000007")
MOE = "--num-experts 4"


@dataclass(frozen=True)
class OwnFlags:
    """Flags of a user's task."""

    own_cap: int = flag(1, "a cap")
    own_kind: str = flag("a", "a kind", if_changed="refuse_to_resume")
    own_trace: bool = flag(False, "print more", if_changed="allow")


def run(flags: str) -> RunConfig:
    words = [*TINY, *mock_data(), "--train-iters", "12", *flags.split()]
    return parse_args(words, TEXT.with_sections(OwnFlags), world_size=1, device="cpu").config


def notes(now: str, before: str = "", **how: bool) -> list[str]:
    stored = json.loads(json.dumps(run(before).to_dict()))
    how = {"weights_only": False, "with_optimizer": True, **how}
    return check_changes(PATH, run(now), stored, **how)


def test_the_same_flags_are_not_mentioned() -> None:
    assert notes("") == notes(MOE, MOE) == []


def test_new_adapters_are_not_compared_with_none() -> None:
    assert notes("--lora-rank 4") == notes("", "--lora-rank 4") == []


@pytest.mark.parametrize(
    ("flags", "before", "named"),
    [
        ("--num-attention-heads 8 --kv-channels 16", "", "`--num-attention-heads` (8, before 4)"),
        ("--rotary-base 500", "", "`--rotary-base` (500, before 10000)"),
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


def test_who_starts_from_weights_may_compute_with_other_settings() -> None:
    (note,) = notes("--rotary-base 500 --seed 9", weights_only=True, with_optimizer=False)
    assert note == (
        f"Flags that differ from those of {PATH}, and count from here: `--rotary-base` (500, "
        "before 10000)."
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
    """Check it also of the rotary base of a model without rotary positions."""
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
