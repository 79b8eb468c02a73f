"""The losses of Megatron-LM to the last printed digit: every recorded run, through our entry.

The curves and the corpus lie beside the checkout in ``shared/reference``; without them there is
nothing to compare with, and the tests are skipped by name.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.train.reporting.files import read_metrics
from tests.training_runs import train

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = Path(os.environ.get("MEGATRON_REFERENCE", ROOT.parent / "shared" / "reference"))

RECORDED = REFERENCE / "curves.json"
CURVES = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"runs": {}}
pytestmark = pytest.mark.skipif(not RECORDED.exists(), reason=f"no recorded curves in {REFERENCE}")
OF_THE_PROGRAM = "llama_tp2"
"""The run that is started as a program; the others call its functions."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py")]
    command += ["--input", str(REFERENCE / "corpus.jsonl")]
    command += ["--output-prefix", str(folder / "sp_eod"), "--append-eod", "--workers", "1"]
    command += ["--tokenizer-type", "SentencePieceTokenizer"]
    command += ["--tokenizer-model", str(REFERENCE / "tokenizer.model")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder


def run(name: str, data: Path, save: Path) -> list[dict[str, Any]]:
    """Train as recorded and return the rows of ``metrics.jsonl``."""
    recorded = CURVES["runs"][name]
    words = [*CURVES["base_flags"], *recorded["extra_flags"]]
    flags = [word.format(data=data, reference=REFERENCE) for word in words]
    if name != OF_THE_PROGRAM:
        return train(flags, save, recorded["ranks"])
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, "--save", str(save)]
    command += ["--nproc-per-node", str(recorded["ranks"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return read_metrics(save / "metrics.jsonl")


@pytest.mark.parametrize("name", sorted(CURVES["runs"]))
def test_curve_equals_megatron_lms(name: str, data: Path, tmp_path: Path) -> None:
    """Loss within 2e-6 (bf16: 2e-4) relative, grad norm within 0.001, learning rate exact."""
    recorded = CURVES["runs"][name]
    tolerance = 2e-4 if "--bf16" in recorded["extra_flags"] else 2e-6
    rows = run(name, data, tmp_path / "save")
    steps = [row for row in rows if row["kind"] == "train"]
    assert len(steps) == len(recorded["iterations"])
    for row, want in zip(steps, recorded["iterations"], strict=True):
        where = f"{name} iteration {want['iteration']}"
        assert row["iteration"] == want["iteration"], where
        assert math.isclose(row["lm loss"], want["lm_loss"], rel_tol=tolerance), where
        assert abs(row["grad_norm"] - want["grad_norm"]) <= 1e-3, where
        assert f"{row['learning_rate']:.6E}" == f"{want['learning_rate']:.6E}", where
        for depth, value in enumerate(want.get("mtp", []), start=1):
            assert math.isclose(row[f"mtp_{depth} loss"], value, rel_tol=tolerance), where
    final = {row["split"]: row["lm loss"] for row in rows if row["kind"] == "evaluation"}
    for split, value in recorded["eval"].items():
        assert math.isclose(final[split], value, rel_tol=tolerance), f"{name} {split}"
