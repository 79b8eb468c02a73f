"""Bad input to the program: one sentence each, and no rank is left hanging."""

from __future__ import annotations

import os
import pickle
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

import megatron_ext.text.data.gpt
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.text.task import GPT
from megatron_ext.train.launch import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from tests.training_runs import NULL, TINY, mock_data

DATA = f"{' '.join(NULL)} --data-path FOLDER/docs"
MOCK = " ".join(mock_data())
FOCAL = f"{MOCK} --loss examples/custom_loss/focal.py:FocalLossConfig --loss-args"
ROPE = f"{MOCK} --position-embedding-type rope"
PP2 = f"{MOCK} --pipeline-model-parallel-size 2"


def _flags(words: str, folder: Path | None = None) -> list[str]:
    """Return the flags of a short run, with the name of a folder in them."""
    return [*TINY, *"--train-iters 2".split(), *words.replace("FOLDER", str(folder)).split()]


def _write(prefix: Path, *more: int) -> None:
    """Write documents that fit the vocabulary, and a last one of an id for each of ``more``."""
    with IndexedWriter(str(prefix), np.dtype(np.int32)) as writer:
        for ids in [np.arange(40)] * 20 + [np.full(40, number) for number in more]:
            writer.add_document(ids, [40])


def _truncated(folder: Path) -> None:
    os.truncate(folder / "docs.bin", (folder / "docs.bin").stat().st_size - 10)


def _corrupt_index(folder: Path) -> None:
    (folder / "docs.idx").write_bytes(b"nonsense" * 20)


def _negative_id(folder: Path) -> None:
    _write(folder / "docs", -3)


def _file(folder: Path) -> None:
    """Put a file where a folder should be; the superuser cannot write below it either."""
    (folder / "file").touch()


def _file_for_the_cache(folder: Path) -> None:
    (folder / "docs").touch()


def _pickle_in_the_cache(folder: Path) -> None:
    """Write a pickle, which numpy would load for megatron-core."""
    cache = folder / "docs" / "cache" / "KeyedGPTDataset_indices"
    cache.mkdir(parents=True)
    (cache / "0-KeyedGPTDataset-train-document_index.npy").write_bytes(pickle.dumps([1]))


CASES: dict[str, tuple[str, str, Callable[[Path], None] | None]] = {
    "truncated .bin": (DATA, ".bin is truncated: it has", _truncated),
    "corrupt .idx": (DATA, "docs.idx", _corrupt_index),
    "negative id": (DATA, "docs.bin holds the token id -3, but the vocabulary has", _negative_id),
    "cache": (f"{DATA} --data-cache-path FOLDER/file", "cannot be written to", _file),
    "cache of the data": (
        DATA,
        "docs is no folder); give a folder that can",
        _file_for_the_cache,
    ),
    "pickle in the cache": (
        DATA,
        "document_index.npy is no array of numpy",
        _pickle_in_the_cache,
    ),
    "save": (f"{MOCK} --save FOLDER/file/x", "/file/x) cannot be written (", _file),
    "tensorboard": (f"{MOCK} --tensorboard-dir FOLDER/file/x", "`--tensorboard-dir` (", _file),
}
CASES |= {
    name: (words, sentence, None)
    for name, words, sentence in (
        ("no dataset", f"{DATA}/nowhere", "nowhere.idx"),
        (
            "vocabulary",
            f"{DATA} --vocab-size 20 --padded-vocab-size 32",
            "holds the token id 39, but the vocabulary has 32 entries",
        ),
        ("weight nan", DATA.replace("FOLDER", "nan FOLDER"), "the weights [nan]; they must be fin"),
        (
            "weight inf",
            DATA.replace("FOLDER/docs", "inf FOLDER/docs 1 FOLDER/docs"),
            "has the weights [inf, 1.0]; they must be finite",
        ),
        (
            "mixed blend",
            DATA.replace("FOLDER/docs", "0.5 FOLDER/docs FOLDER/docs FOLDER/docs"),
            "`--data-path`",
        ),
        ("validation beside a blend", f"{DATA} --valid-data-path FOLDER/x", "exclude each other"),
        ("test beside a blend", f"{DATA} --test-data-path FOLDER/x", "exclude each other"),
        (
            "validation beside mock data",
            f"{MOCK} --valid-data-path nowhere",
            "`--mock-data` and `--valid-data-path` exclude each other",
        ),
        (
            "no lengths",
            f"{DATA} --per-dataset-sequences-path FOLDER/nowhere",
            "nowhere) cannot be read (No such file or directory)",
        ),
        ("empty split", f"{DATA} --eval-iters 1 --split 99.9,0.1,0", "The valid split of"),
        ("no data", " ".join(NULL), "No training data is given; use `--data-path` PREFIX"),
        ("no list", f"{' '.join(NULL)} --data-args-path FOLDER/list.txt", "`--data-args-path`"),
        (
            "no tokenizer",
            "--mock-data --tokenizer-type SentencePieceTokenizer --tokenizer-model FOLDER/no.model",
            "no.model",
        ),
        (
            "no pretrained",
            f"{MOCK} --pretrained-checkpoint FOLDER/none",
            "none) holds no checkpoint; give a folder that does",
        ),
        ("no checkpoint", f"{MOCK} --use-checkpoint-args --load FOLDER/none", "is no folder"),
        (
            "a file for checkpoints",
            f"{MOCK} --load {__file__}",
            "is a file, but checkpoints are folders",
        ),
        ("uninitialized", f"{MOCK} --no-initialization", "leaves the weights to a checkpoint"),
        ("a deadly signal", f"{MOCK} --exit-signal SIGKILL", "a process can catch"),
        ("an option that is no number", f"{FOCAL} gamma=abc", "must give `gamma` as float"),
        ("an option that is not finite", f"{FOCAL} gamma=.nan", "numbers must be finite"),
        (
            "more memory than there is",
            f"{MOCK} --hidden-size 100000 --num-attention-heads 10",
            "GB on this machine for 1 rank(s), but it has",
        ),
        (
            "more positions than memory",
            f"{MOCK} --seq-length 2000000000 --max-position-embeddings 2000000000",
            "GB on this machine for 1 rank(s), but it has",
        ),
        (
            "evaluation without end",
            f"{MOCK} --eval-iters 2000000000",
            "The samples of the run (train 32, valid 32000000000, test 32000000000) need indices",
        ),
        (
            "training without end",
            f"{DATA.replace('FOLDER', '1 FOLDER')} --train-iters 2000000000",
            "GB; lower `--train-iters`, `--train-samples`, `--eval-iters` or `--global-batch-size`",
        ),
        ("small vocabulary", f"{MOCK} --padded-vocab-size 1", "must be at least the"),
        ("odd head", f"{ROPE} --kv-channels 9", "`--kv-channels` (9) must be even"),
        (
            "nothing rotated",
            f"{ROPE} --rotary-percent 0.01",
            "leaves no channel of a head of 16 to rotate",
        ),
        ("split nan", f"{MOCK} --split nan,1,0", "must be one to three shares that are finite"),
        (
            "stages before replicas",
            f"{PP2} --use-tp-pp-dp-mapping --context-parallel-size 2 --nproc-per-node 4",
            "tensor × context parallel size is 1 × 2 and expert-tensor × expert parallel size is "
            "1 × 1",
        ),
        (
            "too few micro-batches",
            f"{PP2} --pipeline-schedule core-interleaved --num-virtual-stages-per-pipeline-rank 2 "
            "--nproc-per-node 2 --micro-batch-size 4 --global-batch-size 12",
            "groups of 2 with none or at least 2 left over, but one has 3; use interleaved",
        ),
        (
            "layout without end",
            f"{MOCK} --pipeline-model-parallel-layout Et*99999999999|L",
            "may hold only E, t, m, L",
        ),
        (
            "batches without end",
            f"{MOCK} --step-batch-size-schedule 0:4,inf:8",
            "must list TOKENS:BATCH_SIZE",
        ),
        (
            "experts without end",
            f"{MOCK} --num-experts 2 --moe-layer-freq ([1]*99999999999)",
            "must be a number or a list of 0 and 1",
        ),
    )
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_sentence_before_any_rank_starts(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words, sentence, damage = CASES[name]
    _write(tmp_path / "docs")
    if damage is not None:
        damage(tmp_path)
    start = time.monotonic()
    assert main(GPT, _flags(words, tmp_path)) == EXIT_CODE_USER_ERROR
    shown = capfd.readouterr().err.strip().splitlines()
    assert len(shown) == 1, shown
    assert sentence in shown[0]
    assert shown[0].startswith("error: ")
    assert time.monotonic() - start < 20


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
    monkeypatch.setattr(megatron_ext.text.data.gpt, "id_range", lambda *_: (0, 39))
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


def test_a_checkpoint_of_another_model_ends_all_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
