"""Criteria 1, 2 and 7 of the losses' specification, by their numbers: gradients of every parameter
and their norm on many layouts against one rank, from initialization."""

from __future__ import annotations

import pytest

from tests.training_runs import TINY, mock_data
from tools.parity import main

FLAGS = [*(word for word in TINY if word != "--use-cpu-initialization"), *mock_data()]
LAYOUTS = "mbs1,mbs4,dp2,pp2,pp2dp2,tp2,tp2sp,cp2,cp2pp2,pp2vpp2"
OWN_STAGE = "pp4[--pipeline-model-parallel-layout Ett|tt|mm|L]"
TIED = "--no-untie-embeddings-and-output-weights"


def agree(layouts: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    """No gradient of two steps differs by more than 1e-5, nor does the norm."""
    limits = "--steps 2 --loss-tolerance 1e-5 --gradient-tolerance 1e-5".split()
    code = main(["--layouts", layouts, *limits, "--", *FLAGS, "--eod-mask-loss", *words.split()])
    assert code == 0, capfd.readouterr().out


def test_criterion_1_main_loss_with_ragged_masks(capfd: pytest.CaptureFixture[str]) -> None:
    agree(LAYOUTS, "", capfd)


@pytest.mark.parametrize("words", ["", TIED], ids=["untied", "tied"])
def test_criterion_2_multi_token_prediction(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    agree(f"{OWN_STAGE},mbs4,pp2vpp2,tp2sp,cp2pp2", f"--mtp-num-layers 2 {words}", capfd)


def test_criterion_7_virtual_chunks_on_two_stages(capfd: pytest.CaptureFixture[str]) -> None:
    """Also with megatron-core's own schedule, whose batched messages are never used."""
    agree("pp2vpp2,pp2vpp2coreint,pp2vpp2dp2[--overlap-grad-reduce]", "", capfd)
