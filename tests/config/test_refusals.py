"""Command lines that are refused, each with the sentence that says why: ``refusals.txt``.

A section of the file names the run that the flags are added to. ``...`` in a sentence stands for
what is left out of it.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.train.exit_codes import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from megatron_ext.video.task import VIDEO
from tests.config import runs
from tests.training_runs import errors_of
from tests.video.streaming.runs import flags_of

Refuse = Callable[[str], tuple[str, ...]]
REFUSED: dict[str, Refuse] = {
    "text": lambda words: errors_of(f"{runs.SMALL} {words}"),
    "text on several ranks": lambda words: errors_of(f"{runs.SMALL} {words}", ranks=0),
    "text with conversations": lambda words: errors_of(f"{runs.SFT} {words}", ranks=0),
    "text in bf16": lambda words: errors_of(f"{runs.BF16} {words}"),
    "text on four stages": lambda words: errors_of(
        f"{runs.SMALL} --mtp-num-layers 2 --position-embedding-type rope "
        f"--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout {words}",
        ranks=4,
    ),
    "text on two GPUs": lambda words: errors_of(f"{runs.GRAPHS} {words}", ranks=2, device="cuda"),
    "text with Transformer Engine": lambda words: errors_of(
        f"{runs.BF16} --transformer-impl transformer_engine {words}",
        ranks=2 if "size 2" in words else 1,
        device="cuda",
    ),
    "streaming with adapters": lambda words: errors_of(
        f"{runs.STREAMING} --lora-rank 2 {words}", VIDEO
    ),
    "streaming samples": lambda words: errors_of(f"{runs.STREAMING} {words}", VIDEO),
}


def assert_told(errors: tuple[str, ...] | list[str], sentence: str) -> None:
    pattern = ".*".join(map(re.escape, sentence.split("...")))
    (told,) = [error for error in errors if re.search(pattern, error)]
    assert told.endswith((".", "?"))


@pytest.mark.parametrize(("section", "words", "sentence"), runs.refusals(*REFUSED))
def test_flags_that_cannot_stand_are_refused_in_a_sentence(
    section: str, words: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "Transformer Engine" in section:
        runs.with_transformer_engine(monkeypatch)
    assert_told(REFUSED[section](words), sentence)


@pytest.mark.parametrize(("_section", "words", "sentence"), runs.refusals("streaming"))
def test_a_streaming_run_that_cannot_be_is_one_sentence_before_ranks_start(
    _section: str, words: str, sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(VIDEO, flags_of(tmp_path, f"--train-iters 1 {words}")) == EXIT_CODE_USER_ERROR
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, errors
    assert_told(errors, sentence)
