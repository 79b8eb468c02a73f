"""The losses of Megatron-LM to the last printed digit: every recorded run, through our entry.

``tests/reference/`` holds the curves, and its README.md says how they were recorded.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.text.preprocess.cli import main as preprocess
from megatron_ext.train.reporting.files import read_metrics
from tests.reference import REFERENCE, corpus
from tests.training_runs import run_python, train

CURVES = json.loads((REFERENCE / "curves.json").read_text())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    words = ["--input", str(corpus()), "--append-eod", "--workers", "1"]
    words += ["--output-prefix", str(folder / "sp_eod"), "--tokenizer-model"]
    words += [str(REFERENCE / "tokenizer.model"), "--tokenizer-type", "SentencePieceTokenizer"]
    assert preprocess(words) == 0
    return folder


def run(name: str, data: Path, save: Path) -> list[dict[str, Any]]:
    """Train as recorded and return the rows of ``metrics.jsonl``."""
    recorded = CURVES["runs"][name]
    words = [*CURVES["base_flags"], *recorded["extra_flags"]]
    flags = [word.format(data=data, reference=REFERENCE) for word in words]
    # oneDNN reads its instructions once in a process, so a run in bf16 is started as a program.
    if "--bf16" not in flags:
        return train(flags, save, recorded["ranks"])
    more = ["--save", str(save), "--nproc-per-node", str(recorded["ranks"])]
    run_python("pretrain_gpt.py", *flags, *more, ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16")
    return read_metrics(save / "metrics.jsonl")


@pytest.mark.parametrize("name", sorted(CURVES["runs"]))
def test_curve_equals_megatron_lms(name: str, data: Path, tmp_path: Path) -> None:
    """Loss within 2e-6 (bf16: 2e-4) relative, grad norm within 0.001, learning rate exact.

    In bf16 the CPU's instructions decide the norm's last digit. Runs take those of the recording,
    AVX-512 BF16; a CPU without them is off by 0.0011 to 0.0015 and gets a limit of 0.003.
    """
    recorded = CURVES["runs"][name]
    in_bf16 = "--bf16" in recorded["extra_flags"]
    tolerance = 2e-4 if in_bf16 else 2e-6
    of_norm = 3e-3 if in_bf16 and not torch.cpu._is_avx512_bf16_supported() else 1e-3
    rows = run(name, data, tmp_path / "save")
    steps = [row for row in rows if row["kind"] == "train"]
    assert len(steps) == len(recorded["iterations"])
    # Megatron-LM prints the mean of the first two losses at iteration 2; a row has its step's own.
    for key in (x for x in steps[1] if x.endswith(" loss")):
        steps[1][key] = (steps[0][key] + steps[1][key]) / 2
    for row, want in zip(steps, recorded["iterations"], strict=True):
        where = f"{name} iteration {want['iteration']}"
        assert row["iteration"] == want["iteration"], where
        assert math.isclose(row["lm loss"], want["lm_loss"], rel_tol=tolerance), where
        assert abs(row["grad_norm"] - want["grad_norm"]) <= of_norm, where
        assert f"{row['learning_rate']:.6E}" == f"{want['learning_rate']:.6E}", where
        for depth, value in enumerate(want.get("mtp", []), start=1):
            assert math.isclose(row[f"mtp_{depth} loss"], value, rel_tol=tolerance), where
    final = {row["split"]: row["lm loss"] for row in rows if row["kind"] == "evaluation"}
    for split, value in recorded["eval"].items():
        assert math.isclose(final[split], value, rel_tol=tolerance), f"{name} {split}"
