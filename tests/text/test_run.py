"""The padded vocabulary, checks before a run, and callbacks of certain ranks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.text import run as module
from megatron_ext.text.config.hugging_face import HuggingFaceConfig
from megatron_ext.text.evaluation.config import TaskEvaluationConfig
from megatron_ext.text.inputs import tokenizer_inputs
from megatron_ext.text.run import (
    data_ledger,
    padded_to_ranks,
    padding_note,
    storage_notes,
    with_tokenizer,
)
from megatron_ext.text.tokenizers import TokenizerConfig
from tests.config.runs import SMALL
from tests.training_runs import config_of


def test_padding_that_differs_from_that_of_one_rank_is_told() -> None:
    given = replace(config_of(SMALL).model, make_vocab_size_divisible_by=32)
    for ranks, entries in ((1, 32), (2, 64), (4, 128)):
        parallel = ParallelConfig(tensor_model_parallel_size=ranks)
        # 32 entries for each rank hold 31 ids and the end of a document.
        padded = padded_to_ranks(given, parallel, 32)
        assert padded.padded_vocab_size == entries
        note = padding_note(given, padded, ranks)
        if ranks == 1:
            assert note is None
            continue
        assert note is not None
        assert f"padded to {entries} entries" in note and "but to 32 on one rank" in note
        assert note.endswith(f"`--padded-vocab-size {entries}` makes layouts the same.")
        same = replace(given, padded_vocab_size=entries)
        assert padding_note(same, padded_to_ranks(same, parallel, 32), ranks) is None


def test_a_given_padded_vocabulary_holds_at_least_the_entries() -> None:
    model = replace(config_of(SMALL).model, padded_vocab_size=32)
    assert padded_to_ranks(model, ParallelConfig(), 32).padded_vocab_size == 32
    with pytest.raises(ConfigError, match=r"\(32\) must be at least the 33 entries of the"):
        padded_to_ranks(model, ParallelConfig(), 33)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_tells_of_padding(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    words = f"{SMALL} --tensor-model-parallel-size 2"
    config, tokenizer = with_tokenizer(config_of(words, ranks=2))
    assert config.model.unpadded_vocab_size == tokenizer.vocab_size
    told = capsys.readouterr().out
    assert told.startswith("> The vocabulary is padded to") if rank == "0" else not told


@pytest.mark.parametrize(
    ("folder", "settings", "count"),
    [
        (None, TokenizerConfig(), 1),
        (None, TokenizerConfig("NullTokenizer"), 1),
        ("hf", TokenizerConfig(), 1),
        ("hf", TokenizerConfig("NullTokenizer"), 2),
    ],
)
def test_a_folders_own_tokenizer_is_checked_with_the_folder(
    folder: str | None, settings: TokenizerConfig, count: int
) -> None:
    """A type of tokenizer that is given as a flag is checked for itself."""
    sections = HuggingFaceConfig(load_hf=folder), settings
    assert len(tokenizer_inputs(config_of(SMALL).with_section(*sections))) == count


def test_only_rank_0_records_the_samples_of_a_run_that_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = SimpleNamespace(DataLedger=lambda run: "ledger")
    monkeypatch.setattr(module.extras, "part", lambda *_: part)

    def of(rank: int, save: str | None, order: Any) -> Any:
        run: Any = SimpleNamespace(
            context=SimpleNamespace(rank=rank),
            config=SimpleNamespace(checkpoint=SimpleNamespace(save=save)),
            progress=SimpleNamespace(data_order=order),
        )
        return data_ledger(run)

    assert of(0, "x", {"a": 1}) == "ledger"
    assert of(1, "x", {"a": 1}) is of(0, None, {"a": 1}) is of(0, "x", None) is None


def test_storage_is_reported_in_the_direct_order_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "later", lambda name: lambda run: name)
    config = config_of(SMALL)
    run: Any = SimpleNamespace(config=config)
    assert storage_notes(run) is None
    data = config.section(module.DataConfig)
    run.config = config.with_section(replace(data, data_order="direct"))
    assert storage_notes(run) == "megatron_ext.text.data.storage:storage_notes"


@pytest.mark.parametrize(
    ("data", "checks"),
    [
        ({"mock_data": True}, ["mock"]),
        ({"mock_data": False}, ["megatron_ext.text.data.checked:check_files"]),
        (
            {"mock_data": False, "data_order": "direct"},
            ["megatron_ext.text.data.splits:prepare_direct"],
        ),
    ],
)
def test_data_and_tasks_are_checked_before_the_model_is_built(
    data: dict[str, Any], checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def later(name: str) -> Any:
        def run(config: Any, *_: Any) -> Any:
            done.append(name)
            return config

        return run

    monkeypatch.setattr(module, "later", later)
    monkeypatch.setattr(module, "check_mock_data", lambda *_: done.append("mock"))
    config = config_of(SMALL)
    config = config.with_section(
        replace(config.section(module.DataConfig), **data),
        TaskEvaluationConfig(eval_tasks=["a"], eval_tasks_interval=1),
    )
    prepared, tokenizer = module.prepare_gpt(config)
    assert done == [*checks, "megatron_ext.text.evaluation.scores:check_training"]
    assert prepared.model.unpadded_vocab_size == tokenizer.vocab_size
