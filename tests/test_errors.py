"""Errors in flags are sentences that know the flags that they are about."""

import copy
import pickle
from collections.abc import Callable

import pytest

from megatron_ext.errors import (
    CheckpointError,
    ConfigError,
    FlagError,
    MegatronExtError,
    exclusive,
    flags_of,
)

LOAD = ("--load", "runs/`--lr` x", "holds no checkpoint", "leave `--load` or `--save 1` out")


@pytest.mark.parametrize(
    ("parts", "sentence", "flags"),
    [
        (
            ("--min-lr", 0.1, "must be at most `--lr` (0.01)", "use 0.001"),
            "`--min-lr` (0.1) must be at most `--lr` (0.01); use 0.001.",
            {"--min-lr", "--lr"},
        ),
        (("--lr", None, "is missing"), "`--lr` is missing.", {"--lr"}),
        (("--split", "", "is empty"), "`--split` () is empty.", {"--split"}),
        (
            ("--loss-args", "a", "is unknown", "did you mean b?"),
            "`--loss-args` (a) is unknown; did you mean b?",
            {"--loss-args"},
        ),
        (
            ("--optimizer sgd", None, "does not go with `--use-distributed-optimizer`"),
            "`--optimizer sgd` does not go with `--use-distributed-optimizer`.",
            {"--optimizer", "--use-distributed-optimizer"},
        ),
        (
            ("The number of ranks", 3, "must be divisible by `--tensor-model-parallel-size` (2)"),
            "The number of ranks (3) must be divisible by `--tensor-model-parallel-size` (2).",
            {"--tensor-model-parallel-size"},
        ),
        (
            LOAD,
            "`--load` (runs/`--lr` x) holds no checkpoint; leave `--load` or `--save 1` out.",
            {"--load", "--save"},
        ),
    ],
)
def test_a_sentence_names_flag_value_rule_and_remedy(
    parts: tuple[str, object, str, str], sentence: str, flags: set[str]
) -> None:
    error = FlagError(*parts)
    assert str(error) == sentence
    assert set(error.flags) == flags


def test_flags_that_exclude_each_other_are_named_with_the_values_given() -> None:
    error = exclusive(("--train-iters", 5), "--train-samples", remedy="give either")
    assert error == "`--train-iters` (5) and `--train-samples` exclude each other; give either."
    assert error.flags == {"--train-iters", "--train-samples"}


def test_a_plain_sentence_is_about_no_flag() -> None:
    assert flags_of("`--lr` (1) is large.") == set()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_keeps_the_parts(copied: Callable[[CheckpointError], CheckpointError]) -> None:
    error = copied(CheckpointError([FlagError(*LOAD), "Another."]))
    assert error.messages == (FlagError(*LOAD), "Another.")
    first = error.messages[0]
    assert isinstance(first, FlagError)
    assert (first.subject, first.value, first.rule, first.remedy) == ("`--load`", *LOAD[1:])
    assert first.flags == {"--load", "--save"}


def test_an_exception_about_a_flag_is_of_its_class() -> None:
    error = ConfigError.about("--lr", None, "is missing")
    assert isinstance(error, MegatronExtError)
    assert isinstance(error, ConfigError)
    assert str(error) == "`--lr` is missing."
    assert flags_of(error.messages[0]) == {"--lr"}


def test_a_note_stands_at_the_end_of_the_sentence() -> None:
    noted = FlagError(*LOAD).with_note("`--load` was given as `--resume`")
    assert noted.endswith("`--save 1` out (`--load` was given as `--resume`).")
    assert noted.value == LOAD[1]
    assert FlagError("--lr", 1, "is large").with_note("so") == "`--lr` (1) is large (so)."


def test_a_renamed_flag_is_renamed_everywhere_but_in_the_value() -> None:
    error = FlagError("--a", "`--a`", "needs `--b` and `--a-b`, not `--a`", "leave `--a` out")
    renamed = error.renamed("--a", "--c")
    assert renamed == "`--c` (`--a`) needs `--b` and `--a-b`, not `--c`; leave `--c` out."
    assert renamed.flags == {"--c", "--b", "--a-b"}
