"""Packing, micro-batch size and layout leave gradients of fine-tuning as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.text.sft import tiny
from tests.text.sft.test_runs import MODEL
from tools.parity import main

PACKED = "[--sft-batching token-budget]"
LAYOUTS = f"mbs4,dp2,dp1{PACKED},cp2{PACKED},pp2dp2{PACKED},tp2sp{PACKED}"


@pytest.mark.parametrize(
    "reduction", ["token", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sample", "square"))]
)
def test_packing_changes_no_gradient(
    reduction: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The truth is one conversation in each row on one rank; gradients agree within 1e-6."""
    chats = tiny.write_jsonl(tmp_path / "chats.jsonl", tiny.chats(24, turns=2, words=3))
    words = [
        *MODEL,
        *("--sft", "--data-path", str(chats), "--split", "90,10,0", "--sft-batching", "padded"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--global-batch-size", "8"),
        *("--tokenizer-model", str(tiny.save(tmp_path / "tokenizer"))),
        *("--make-vocab-size-divisible-by", "192", "--mtp-num-layers", "1"),
        *("--loss-reduction", reduction),
    ]
    limits = "--steps 1 --loss-tolerance 1e-6 --gradient-tolerance 1e-6".split()
    code = main(["--layouts", LAYOUTS, *limits, "--", *words])
    assert code == 0, "".join(capfd.readouterr())
