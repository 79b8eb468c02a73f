"""Bad input through the program's own entry: one sentence each, and no rank is left hanging."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.indexed import optimal_dtype
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.training.launch import EXIT_CODE_USER_ERROR
from megatron_ext.training.pretrain import main
from pretrain_gpt import GPT
from tests.training_runs import TINY, mock_data

NULL = "--tokenizer-type NullTokenizer --vocab-size 90".split()


def _data(folder: Path) -> str:
    prefix = str(folder / "docs")
    with IndexedWriter(prefix, optimal_dtype(90)) as writer:
        for _ in range(20):
            writer.add_document(np.arange(40), [40])
    return prefix


def _flags(*more: str) -> list[str]:
    return [*TINY, "--train-iters", "2", *more]


def _truncated(folder: Path) -> list[str]:
    prefix = _data(folder)
    data = Path(prefix + ".bin")
    data.write_bytes(data.read_bytes()[:-10])
    return _flags(*NULL, "--data-path", prefix)


def _corrupt_index(folder: Path) -> list[str]:
    prefix = _data(folder)
    Path(prefix + ".idx").write_bytes(b"nonsense" * 20)
    return _flags(*NULL, "--data-path", prefix)


def _no_index(folder: Path) -> list[str]:
    return _flags(*NULL, "--data-path", str(folder / "nowhere"))


def _small_vocabulary(folder: Path) -> list[str]:
    size = "--tokenizer-type NullTokenizer --vocab-size 20 --padded-vocab-size 32".split()
    return _flags(*size, "--data-path", _data(folder))


def _empty_split(folder: Path) -> list[str]:
    flags = [flag for flag in _flags(*NULL) if flag not in ("--split", "90,5,5")]
    flags[flags.index("--eval-iters") + 1] = "1"
    return [*flags, "--data-path", _data(folder), "--split", "99.9,0.1,0"]


def _mixed_blend(folder: Path) -> list[str]:
    prefix = _data(folder)
    return _flags(*NULL, "--data-path", "0.5", prefix, prefix, prefix)


def _no_data(folder: Path) -> list[str]:
    return _flags(*NULL)


def _no_tokenizer(folder: Path) -> list[str]:
    words = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model"]
    return _flags("--mock-data", *words, str(folder / "no.model"))


def _missing_list(folder: Path) -> list[str]:
    return _flags(*NULL, "--data-args-path", str(folder / "list.txt"))


def _no_checkpoint_for_shape(folder: Path) -> list[str]:
    return _flags(*mock_data(), "--use-checkpoint-args", "--load", str(folder / "none"))


CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "truncated .bin": (_truncated, ".bin is truncated: it has"),
    "corrupt .idx": (_corrupt_index, "docs.idx"),
    "no dataset": (_no_index, "nowhere.idx"),
    "vocabulary": (_small_vocabulary, "holds the token id 39, but the vocabulary has 32 entries"),
    "empty split": (_empty_split, "The valid split of"),
    "mixed blend": (_mixed_blend, "`--data-path`"),
    "no data": (_no_data, "No training data is given; use `--data-path` PREFIX"),
    "no tokenizer": (_no_tokenizer, "no.model"),
    "no list": (_missing_list, "`--data-args-path`"),
    "no checkpoint": (_no_checkpoint_for_shape, "is no folder"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_sentence_before_any_rank_starts(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make, text = CASES[name]
    start = time.monotonic()
    assert main(GPT, make(tmp_path)) == EXIT_CODE_USER_ERROR
    shown = capfd.readouterr().err.strip().splitlines()
    assert len(shown) == 1, shown
    assert text in shown[0]
    assert shown[0].startswith("error: ")
    assert time.monotonic() - start < 20


def test_all_errors_of_a_command_line_come_together(capfd: pytest.CaptureFixture[str]) -> None:
    flags = _flags(*mock_data(), "--bf16", "--fp16", "--clip-grad", "-1", "--sft", "--lr-typo")
    assert main(GPT, flags) == EXIT_CODE_USER_ERROR
    shown = capfd.readouterr().err
    for text in ("exclude each other", "`--clip-grad` (-1.0)", "`--sft`", "`--lr-typo`"):
        assert text in shown
    assert "Traceback" not in shown


def test_a_checkpoint_of_another_model_ends_all_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "save"
    two = [*mock_data(), "--nproc-per-node", "2"]
    assert main(GPT, [*_flags(*two), "--save", str(save)]) == 0
    capfd.readouterr()
    other = [*_flags(*two), "--load", str(save), "--ffn-hidden-size", "128"]
    start = time.monotonic()
    assert main(GPT, other) == EXIT_CODE_USER_ERROR
    assert time.monotonic() - start < 20
    shown = capfd.readouterr().err
    assert "mlp.linear_fc1" in shown
    assert "Traceback" not in shown
    shutil.rmtree(save)
