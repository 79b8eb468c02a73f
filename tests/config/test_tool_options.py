"""A tool's own options end at ``--``, and an error says so where the dashes are missing."""

import argparse

import pytest

from megatron_ext.config.tool_options import own_options


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(prog="plan.py")
    own.add_argument("--search", action="store_true")
    return own


def test_own_options_end_at_the_dashes() -> None:
    options, words = own_options(parser(), ["--search", "--", "--lr", "1", "--", "2"])
    assert options.search and words == ["--lr", "1", "--", "2"]
    assert own_options(parser(), [])[1] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--num-layers 3 --lr 1", "error: `--num-layers` is no option of plan.py; flags of a run "
         "follow `--`: plan.py OPTIONS -- --num-layers 3.\n"),
        ("--serch", "error: `--serch` is no option of plan.py; did you mean `--search`?\n"),
        ("--lr 1 -- --num-layers 3", "plan.py: error: unrecognized arguments: --lr 1\n"),
    ],
)  # fmt: skip
def test_another_word_before_the_dashes_is_refused(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        own_options(parser(), words.split())
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(sentence)


def test_help_with_a_word_shows_the_options_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    own = parser()
    own.add_argument("--count", help="layouts to list")
    for words, code, out, err in (
        ("--help layouts --", 0, "--count COUNT  layouts to list\n", ""),
        ("--help --search", 0, "--search\n", ""),
        ("--help recompute", 2, "", "error: `--help` (recompute) is in no option of plan.py; "
         "ask the program that trains about flags of a run, by `--help recompute`.\n"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            own_options(own, words.split())
        assert (end.value.code, *capsys.readouterr()) == (code, out, err)
