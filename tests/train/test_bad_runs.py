"""Bad input to the program: one sentence each, and no rank is left hanging."""

import io
import os
import pickle
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

import megatron_ext.text.data.checked
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.text.task import GPT
from megatron_ext.train.exit_codes import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from tests.training_runs import NULL, TINY, mock_data

DATA = f"{' '.join(NULL)} --data-path FOLDER/docs"
MOCK = " ".join(mock_data())


def _flags(words: str, folder: Path | None = None) -> list[str]:
    return [*TINY, *"--train-iters 2".split(), *words.replace("FOLDER", str(folder)).split()]


def _write(prefix: Path, *more: int) -> None:
    """Write documents that fit the vocabulary, and a last one of an id for each of ``more``."""
    with IndexedWriter(str(prefix), np.dtype(np.int32)) as writer:
        for ids in [np.arange(40)] * 20 + [np.full(40, number) for number in more]:
            writer.add_document(ids, [40])


def _file(folder: Path) -> None:
    """Put a file where a folder should be; the superuser cannot write below it either."""
    (folder / "file").touch()


def _pickle_in_the_cache(folder: Path) -> None:
    """Write a pickle, which numpy would load for megatron-core."""
    _cached(folder, pickle.dumps([1]))


def _cached(folder: Path, content: bytes) -> Path:
    """Put a file into the cache of the samples' order."""
    cache = folder / "docs" / "cache" / "KeyedGPTDataset_indices"
    cache.mkdir(parents=True)
    path = cache / "0-KeyedGPTDataset-train-document_index.npy"
    path.write_bytes(content)
    return path


def _objects_in_the_cache(folder: Path) -> None:
    """Write an array of objects, whose values numpy would unpickle."""
    file = io.BytesIO()
    np.save(file, np.array([{1}], dtype=object), allow_pickle=True)
    _cached(folder, file.getvalue())


def _cut_in_the_cache(folder: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(100))
    _cached(folder, file.getvalue()[:-8])


def _link_in_the_cache(folder: Path) -> None:
    path = _cached(folder, b"")
    path.unlink()
    path.symlink_to(folder / "absent")


DAMAGED: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "truncated .bin": (DATA, ".bin is truncated: it has",
                       lambda x: os.truncate(x / "docs.bin", (x / "docs.bin").stat().st_size - 10)),
    "corrupt .idx": (DATA, "docs.idx", lambda x: (x / "docs.idx").write_bytes(b"nonsense" * 20)),
    "negative id": (DATA, "docs.bin holds the token id -3, but the vocabulary has",
                    lambda x: _write(x / "docs", -3)),
    "cache": (f"{DATA} --data-cache-path FOLDER/file", "cannot be written to", _file),
    "cache of the data": (DATA, "docs is no folder); give a folder that can",
                          lambda x: (x / "docs").touch()),
    "pickle in the cache": (DATA, "document_index.npy is no array of numpy", _pickle_in_the_cache),
    "objects in the cache": (DATA, "document_index.npy holds objects instead of numbers, and could "
                             "run code; remove it", _objects_in_the_cache),
    "cut array in the cache": (DATA, "document_index.npy is cut, as by a run", _cut_in_the_cache),
    "deep header in the cache": (DATA, "document_index.npy is no array of numpy, for its header",
                                 lambda x: _cached(x, b"\x93NUMPY\x01\x00\x00\x20" +
                                                   b"(" * 8191 + b"\n")),
    "link in the cache": (DATA, "document_index.npy is a link, through which", _link_in_the_cache),
    "save": (f"{MOCK} --save FOLDER/file/x", "/file/x) cannot be written (", _file),
    "tensorboard": (f"{MOCK} --tensorboard-dir FOLDER/file/x", "`--tensorboard-dir` (", _file),
}  # fmt: skip
BAD_RUNS = (Path(__file__).parent / "bad_runs.txt").read_text(encoding="utf-8").splitlines()
"""Flags and a part of the sentence; MOCK, FOLDER and FILE stand for made-up data and paths."""


def check_one_sentence(
    words: str, sentence: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    assert main(GPT, _flags(words, folder)) == EXIT_CODE_USER_ERROR
    (shown,) = capfd.readouterr().err.strip().splitlines()
    assert shown.startswith("error: ") and sentence in shown
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("line", BAD_RUNS)
def test_bad_input_is_one_sentence_before_any_rank_starts(
    line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words, sentence = line.split(" => ")
    _write(tmp_path / "docs")
    tokenizer = "" if "--tokenizer-type" in words else " ".join(NULL)
    words = words.replace("MOCK", MOCK).replace("FILE", __file__)
    check_one_sentence(f"{tokenizer} {words}", sentence, tmp_path, capfd)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_input_is_one_sentence_before_any_rank_starts(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words, sentence, damage = DAMAGED[name]
    _write(tmp_path / "docs")
    damage(tmp_path)
    check_one_sentence(words, sentence, tmp_path, capfd)


@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2"])
@pytest.mark.parametrize("number", [-3, 5000])
def test_a_strange_id_that_only_reading_finds_ends_all_layouts_alike(
    layout: str,
    number: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A long data set is not read to its end before training.
    monkeypatch.setattr(megatron_ext.text.data.checked, "id_range", lambda *_: (0, 39))
    _write(tmp_path / "docs", number)
    more = f"--split 1,0,0 --train-iters 30 --num-workers 1 --nproc-per-node 2 {layout}"
    assert main(GPT, _flags(f"{DATA} {more}", tmp_path)) == EXIT_CODE_USER_ERROR
    shown = capfd.readouterr().err
    assert f"docs.bin holds the token id {number}, but the vocabulary has" in shown
    assert "Traceback" not in shown


def test_a_step_may_have_more_micro_batches_than_a_process_may_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    flags = _flags(
        f"{MOCK} --num-workers 1 --nproc-per-node 2 --train-iters 1 --micro-batch-size 1 "
        "--global-batch-size 400 --num-layers 1 --seq-length 8 --hidden-size 16"
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (200 + psutil.Process().num_fds(), hard))
    try:
        assert main(GPT, flags) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_all_errors_of_a_command_line_come_together(capfd: pytest.CaptureFixture[str]) -> None:
    flags = _flags(f"{MOCK} --bf16 --fp16 --clip-grad -1 --sft --lr-typo")
    assert main(GPT, flags) == EXIT_CODE_USER_ERROR
    shown = capfd.readouterr().err
    for text in ("exclude each other", "`--clip-grad` (-1.0)", "`--sft`", "`--lr-typo`"):
        assert text in shown
    assert "Traceback" not in shown


def test_another_model_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    two = f"{MOCK} --nproc-per-node 2"
    assert main(GPT, _flags(f"{two} --save FOLDER", tmp_path)) == 0
    capfd.readouterr()
    start = time.monotonic()
    other = _flags(f"{two} --load FOLDER --ffn-hidden-size 128", tmp_path)
    assert main(GPT, other) == EXIT_CODE_USER_ERROR
    assert time.monotonic() - start < 20
    shown = capfd.readouterr().err
    assert "mlp.linear_fc1" in shown
    assert "Traceback" not in shown
