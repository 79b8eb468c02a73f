"""tools/parity.py end to end: layouts that agree pass, differences are named."""

from __future__ import annotations

import pytest

from tests.training_runs import TINY, mock_data
from tools.parity import main

FLAGS = [*(word for word in TINY if word != "--use-cpu-initialization"), *mock_data()]
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 "
    "--moe-token-dispatcher-type alltoall"
)
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 --deterministic-dropout"
MANY = "tp2sp,pp2vpp2,pp2zbh1,cp2,cp2a2a,cp4,dp4,mbs4,tp2sppp2vpp2,pp2vpp2cp2,tp2cp2dp2,pp4zbh1dp2"


def run(layouts: str, words: str, steps: int = 3) -> int:
    return main(["--layouts", layouts, "--steps", str(steps), "--", *FLAGS, *words.split()])


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        (f"{MANY},pp2zbv,pp2zbvtp2spdp2", "--eod-mask-loss"),
        ("tp2sp,pp2vpp2,tp2spcp2", "--eod-mask-loss --mtp-num-layers 2"),
        pytest.param(
            "tp2sp,pp2zbh1,pp2zbv,cp2,ep2,ep2pp2vpp2dp2,tp2spcp2,ep4pp2zbh1dp4",
            EXPERTS,
            marks=pytest.mark.slow,
        ),
        (
            "tp2spep2etp1,cp2",
            f"--num-experts 4 {DROPOUT} --moe-input-jitter-eps 0.1 "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
        ),
        ("tp2spetp1,tp2spetp1ep2,ep2etp2dp4,tp2spcp2etp1do", "--num-experts 4"),
        pytest.param("tp2sp,pp2vpp2,cp2a2a,dp2,mbs4,tp2sppp2cp2", DROPOUT, marks=pytest.mark.slow),
        ("pp2zbh1,pp2tp2sp,cp2dp2", "--mtp-num-layers 1 --no-untie-embeddings-and-output-weights"),
    ],
    ids=["dense", "mtp", "experts", "jitter", "whole and cut experts", "dropout", "tied mtp"],
)
def test_layouts_agree_from_initialization(
    layouts: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = run(layouts, words)
    shown = capfd.readouterr().out
    assert code == 0, shown
    assert shown.count(": PASS") == layouts.count(",") + 1


def test_weights_that_depend_on_the_layout_fail_and_are_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Megatron-LM's own initialization draws each pipeline stage from its own seed."""
    assert run("pp2", "--use-cpu-initialization", steps=2) == 1
    shown = capfd.readouterr().out
    assert "pp2: FAIL" in shown
    assert "step 1: " in shown


@pytest.mark.parametrize(
    ("layouts", "words", "sentence"),
    [
        ("tp2xx", "", "whose part `xx` is not known"),
        ("tp2", "--save /tmp/x", "dp1: `--save` is given, but a parity run keeps nothing"),
        ("tp2", "--num-layers 0", "dp1: "),
    ],
)
def test_bad_flags_end_with_a_sentence(
    layouts: str, words: str, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(layouts, words) == 2
    assert sentence in capfd.readouterr().err


def test_a_layout_that_cannot_be_run_fails_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("tp4,dp2", "", steps=1) == 1
    shown = capfd.readouterr().out
    assert "tp4: FAIL" in shown and "dp2: PASS" in shown
    assert "must be divisible by" in shown
