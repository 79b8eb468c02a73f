"""Flags of small runs that the tests of the configuration add theirs to."""

from pathlib import Path

import pytest

from megatron_ext.config import finalize
from megatron_ext.config.rules import te_version, transformer_engine

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 16 --train-iters 12 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)
BF16 = f"{SMALL} --bf16"
GRAPHS = f"{SMALL} --attention-dropout 0"
SFT = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --lr 1e-3 --train-iters 2 "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t --data-path f"
)
STREAMING = (
    "--task streaming --prompts-path p.txt --micro-batch-size 1 --global-batch-size 1 "
    "--train-iters 1"
)


def refusals(*sections: str) -> list[tuple[str, str, str]]:
    """Return section, flags and sentence of the lines of some sections."""
    found, section = [], ""
    text = (Path(__file__).parent / "refusals.txt").read_text(encoding="utf-8")
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            section = line[1:-1]
        elif section in sections:
            found.append((section, *line.split(" => ")))
    return found


def with_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rules see Transformer Engine 2.9.0 on a GPU, and nothing of it in the environment."""
    monkeypatch.setattr(
        finalize, "_has_transformer_engine", lambda model, device, planning: device == "cuda"
    )
    monkeypatch.setattr(te_version, "found_version", lambda: "2.9.0")
    monkeypatch.setattr(transformer_engine, "find_spec", lambda name: object())
    for name in (*transformer_engine.SWITCHES, "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.delenv(name, raising=False)
