"""Bad input through the program's own entry: one sentence each, and no rank is left hanging."""

from __future__ import annotations

import pickle
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import megatron_ext.text.data.gpt
from megatron_ext.data.indexed import optimal_dtype
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.train.launch import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
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


def _unwritable(flag: str) -> Callable[[Path], list[str]]:
    """A folder below a file, where the superuser cannot write either."""

    def flags(folder: Path) -> list[str]:
        (folder / "file").touch()
        return _flags(*mock_data(), flag, str(folder / "file" / "x"))

    return flags


def _unwritable_cache(folder: Path) -> list[str]:
    (folder / "file").touch()
    return _flags(*NULL, "--data-path", _data(folder), "--data-cache-path", str(folder / "file"))


def _cache_beside_the_data(folder: Path) -> list[str]:
    (folder / "docs").touch()
    return _flags(*NULL, "--data-path", _data(folder))


def _pickle_in_the_cache(folder: Path) -> list[str]:
    """What numpy would unpickle for megatron-core."""
    cache = folder / "docs" / "cache" / "KeyedGPTDataset_indices"
    cache.mkdir(parents=True)
    (cache / "0-KeyedGPTDataset-train-document_index.npy").write_bytes(pickle.dumps([1]))
    return _flags(*NULL, "--data-path", _data(folder))


def _far_id(folder: Path, number: int) -> str:
    """Write data whose first document fits the vocabulary, and whose last has a strange id."""
    prefix = str(folder / "far")
    with IndexedWriter(prefix, np.dtype(np.int32)) as writer:
        for _ in range(20):
            writer.add_document(np.arange(40), [40])
        writer.add_document(np.full(40, number), [40])
    return prefix


def _negative_id(folder: Path) -> list[str]:
    return _flags(*NULL, "--data-path", _far_id(folder, -3))


def _weights(words: str) -> Callable[[Path], list[str]]:
    return lambda folder: _flags(*NULL, "--data-path", *words.replace("X", _data(folder)).split())


def _beside_data(flag: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        return [*_flags(*NULL), "--data-path", _data(folder), flag, str(folder / "nowhere")]

    return make


def _mock(*words: str) -> Callable[[Path], list[str]]:
    return lambda folder: _flags(
        *mock_data(), *(word.replace("FOLDER", str(folder)) for word in words)
    )


def _focal(argument: str) -> Callable[[Path], list[str]]:
    loss = "examples/custom_loss/focal.py:FocalLossConfig"
    return _mock("--loss", loss, "--loss-args", argument)


CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "truncated .bin": (_truncated, ".bin is truncated: it has"),
    "corrupt .idx": (_corrupt_index, "docs.idx"),
    "no dataset": (_no_index, "nowhere.idx"),
    "vocabulary": (_small_vocabulary, "holds the token id 39, but the vocabulary has 32 entries"),
    "negative id": (_negative_id, "far.bin holds the token id -3, but the vocabulary has"),
    "weight nan": (_weights("nan X"), "has the weights [nan]; they must be finite"),
    "weight inf": (_weights("inf X 1 X"), "has the weights [inf, 1.0]; they must be finite"),
    "validation beside a blend": (_beside_data("--valid-data-path"), "exclude each other"),
    "test beside a blend": (_beside_data("--test-data-path"), "exclude each other"),
    "validation beside mock data": (
        _mock("--valid-data-path", "nowhere"),
        "`--mock-data` and `--valid-data-path` exclude each other",
    ),
    "no lengths": (
        _beside_data("--per-dataset-sequences-path"),
        "nowhere) cannot be read (No such file or directory)",
    ),
    "no pretrained": (
        _mock("--pretrained-checkpoint", "FOLDER/none"),
        "none) holds no checkpoint; give a folder that does",
    ),
    "a file for checkpoints": (_mock("--load", __file__), "is a file, but checkpoints are folders"),
    "uninitialized": (_mock("--no-initialization"), "leaves the weights to a checkpoint"),
    "a signal that ends a process": (_mock("--exit-signal", "SIGKILL"), "a process can catch"),
    "an option that is no number": (_focal("gamma=abc"), "must give `gamma` as float"),
    "an option that is not finite": (_focal("gamma=.nan"), "numbers must be finite"),
    "more memory than there is": (
        _mock("--hidden-size", "100000", "--num-attention-heads", "10"),
        "GB on this machine for 1 rank(s), but it has",
    ),
    "more positions than memory": (
        _mock("--seq-length", "2000000000", "--max-position-embeddings", "2000000000"),
        "GB on this machine for 1 rank(s), but it has",
    ),
    "evaluation without end": (
        _mock("--eval-iters", "2000000000"),
        "The samples of the run (train 32, valid 32000000000, test 32000000000) need indices of",
    ),
    "training without end": (
        lambda folder: [*_weights("1 X")(folder), "--train-iters", "2000000000"],
        "GB; lower `--train-iters`, `--train-samples`, `--eval-iters` or `--global-batch-size`",
    ),
    "small vocabulary": (_mock("--padded-vocab-size", "1"), "must be at least the"),
    "odd head": (
        _mock("--position-embedding-type", "rope", "--kv-channels", "9"),
        "`--kv-channels` (9) must be even",
    ),
    "nothing rotated": (
        _mock("--position-embedding-type", "rope", "--rotary-percent", "0.01"),
        "leaves no channel of a head of 16 to rotate",
    ),
    "split nan": (_mock("--split", "nan,1,0"), "must be one to three shares that are finite"),
    "stages before replicas": (
        _mock(
            *"--use-tp-pp-dp-mapping --pipeline-model-parallel-size 2".split(),
            *"--context-parallel-size 2 --nproc-per-node 4".split(),
        ),
        "tensor × context parallel size is 1 × 2 and expert-tensor × expert parallel size is 1 × 1",
    ),
    "too few micro-batches": (
        _mock(
            *"--pipeline-schedule core-interleaved --pipeline-model-parallel-size 2".split(),
            *"--num-virtual-stages-per-pipeline-rank 2 --nproc-per-node 2".split(),
            *"--micro-batch-size 4 --global-batch-size 12".split(),
        ),
        "groups of 2 with none or at least 2 left over, but one has 3; use interleaved",
    ),
    "layout without end": (
        _mock("--pipeline-model-parallel-layout", "Et*99999999999|L"),
        "may hold only E, t, m, L",
    ),
    "experts without end": (
        _mock("--num-experts", "2", "--moe-layer-freq", "([1]*99999999999)"),
        "must be a number or a list of 0 and 1",
    ),
    "batches without end": (
        _mock("--step-batch-size-schedule", "0:4 inf:8"),
        "must list TOKENS:BATCH_SIZE",
    ),
    "empty split": (_empty_split, "The valid split of"),
    "mixed blend": (_mixed_blend, "`--data-path`"),
    "no data": (_no_data, "No training data is given; use `--data-path` PREFIX"),
    "no tokenizer": (_no_tokenizer, "no.model"),
    "save": (_unwritable("--save"), "/file/x) cannot be written ("),
    "tensorboard": (_unwritable("--tensorboard-dir"), "`--tensorboard-dir` ("),
    "cache": (_unwritable_cache, "cannot be written to"),
    "cache of the data": (_cache_beside_the_data, "docs is no folder); give a folder that can"),
    "pickle in the cache": (_pickle_in_the_cache, "document_index.npy is no array of numpy"),
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


@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2"])
@pytest.mark.parametrize("number", [-3, 5000])
def test_a_strange_id_that_only_reading_finds_ends_all_layouts_alike(
    layout: str,
    number: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in a data set that is longer than what is looked at before training.
    monkeypatch.setattr(megatron_ext.text.data.gpt, "id_range", lambda *_: (0, 39))
    flags = _flags(*NULL, "--data-path", _far_id(tmp_path, number), "--split", "1,0,0")
    flags[flags.index("--train-iters") + 1] = "30"
    assert (
        main(GPT, [*flags, "--num-workers", "1", "--nproc-per-node", "2", *layout.split()])
        == EXIT_CODE_USER_ERROR
    )
    shown = capfd.readouterr().err
    assert f"far.bin holds the token id {number}, but the vocabulary has" in shown
    assert "Traceback" not in shown


def test_a_step_may_have_more_micro_batches_than_a_process_may_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    flags = [*_flags(*mock_data()), "--num-workers", "1", "--nproc-per-node", "2"]
    flags[flags.index("--train-iters") + 1] = "1"
    flags[flags.index("--micro-batch-size") + 1] = "1"
    flags[flags.index("--global-batch-size") + 1] = "400"
    shape = "--num-layers 1 --seq-length 8 --hidden-size 16".split()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert main(GPT, [*flags, *shape]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
