"""The start of a run says what a person wants to know, and the save folder holds the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.train.main import main
from megatron_ext.train.reporting.start import CONFIGURATION_FILE, start_lines
from tests.training_runs import TINY, mock_data

FLAGS = [*TINY, *mock_data(), "--train-iters", "2"]


def config_of(*more: str, world_size: int = 8) -> RunConfig:
    return parse_args([*FLAGS, *more], TEXT, world_size=world_size, device="cpu").config


def test_sizes_layout_and_what_is_not_a_default_fill_less_than_a_screen() -> None:
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    lines = start_lines(config_of(*layout, "--save", "out"), {"num_layers", "swiglu"})
    assert lines[:3] == [
        "> starting 8 ranks (cpu): tensor 2 × pipeline 2 × context 1 × data 2, schedule 1f1b",
        "> 2 iterations; 16 samples in a step: 4 micro-batches × micro-batch size 2 × "
        "data-parallel size 2",
        "> model: layers 4, hidden size 64, feed-forward 172, heads 4, sequence length 64",
    ]
    assert lines[3:5] == ["> given on the command line:", ">   model: --num-layers 4 --swiglu"]
    rest = " ".join(lines[6:])
    assert lines[5] == "> derived, or from a file, a checkpoint or the task:"
    for flag in ("--pipeline-schedule 1f1b", "--kv-channels 16", "--split 90,5,5", "--lr 0.001"):
        assert flag in rest
    assert lines[-1] == f"> the whole configuration is in out/{CONFIGURATION_FILE}"
    assert len(lines) < 40
    assert max(map(len, lines)) <= 100


def test_the_whole_configuration_is_kept_and_read_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that goes on writes its own in the place of the earlier one."""
    more = ["--nproc-per-node", "1", "--save", str(tmp_path), "--load", str(tmp_path)]
    assert main(GPT, [*FLAGS, *more, "--exit-interval", "1"]) == 0
    shown = capfd.readouterr().out
    # By hand: 2 x 2048 x 64 of the vocabulary, 4 layers, and the last norm.
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 172 + 2 * 64
    total = 2 * 2048 * 64 + 4 * layer + 64
    assert f"> parameters: {total:,}; at most {total:,} on one rank\n" in shown
    assert main(GPT, [*FLAGS, *more]) == 0
    kept = yaml.safe_load((tmp_path / CONFIGURATION_FILE).read_text())
    assert (kept["training"]["exit_interval"], kept["model"]["padded_vocab_size"]) == (None, 2048)
    words = ["--config", str(tmp_path / CONFIGURATION_FILE)]
    kept["model"]["unpadded_vocab_size"] = None  # The tokenizer gives it anew.
    assert parse_args(words, TEXT, world_size=1, device="cpu").config.to_dict() == kept
