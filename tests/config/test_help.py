"""``--help``: an index of sections, one section, one flag, and searches for words."""

import dataclasses
import re

import pytest

from megatron_ext.config.flags import flag
from megatron_ext.config.help import SHORT, answer
from megatron_ext.config.inapplicable import of_program
from megatron_ext.config.parser import read_words
from megatron_ext.config.run import TaskFlags
from megatron_ext.config.sections import (
    TRAINER_NAMES,
    all_flags,
    help_question,
    sections_of,
    spellings,
)
from megatron_ext.text.config.inapplicable import TEXT_FLAGS
from megatron_ext.text.config.rules import SECTIONS
from megatron_ext.text.task import TEXT
from megatron_ext.video.config.rules import SECTIONS as VIDEO_SECTIONS


class Program(TaskFlags):
    """A program of one task, with the flags of pretrain_gpt.py."""

    def choose(self, _: object) -> TaskFlags:
        return self


PROGRAM = Program(sections=SECTIONS, inapplicable=TEXT_FLAGS)


@pytest.fixture(autouse=True)
def _as_wide_as_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def asked(capsys: pytest.CaptureFixture[str], question: str, program: Program = PROGRAM) -> str:
    assert answer(program, question) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "question"),
    [
        ("--num-layers 2", None),
        ("--num-layers 2 --help", ""),
        ("--help lr", "lr"),
        ("-h lr", "lr"),
        ("--help=lr", "lr"),
        ("--help --lr", "--lr"),
        ("--help --lr 0.1", "--lr"),
        ("--help --lr=0.1", "--lr"),
        ("--help sequence parallel --lr 0.1", "sequence parallel"),
    ],
)
def test_a_question_ends_at_the_next_flag(line: str, question: str | None) -> None:
    assert help_question(line.split()) == question


def test_a_long_help_starts_with_an_index_of_its_sections(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = asked(capsys, "")
    assert len(shown.splitlines()) <= SHORT
    assert "--help --FLAG" in shown and "--config FILE.yaml" in shown
    assert "  fp8                14 8-bit matrix products, on with `--fp8-format`\n" in shown
    assert "-h " not in shown and "\n--" not in shown
    sections = {flag.section for flag in all_flags(PROGRAM)}
    assert sections == {name for name in sections_of(PROGRAM) if f"\n  {name} " in shown}


def test_all_flags_are_printed_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    shown = asked(capsys, "all")
    assert all(f"  {flag.shown}" in shown for flag in all_flags(PROGRAM))


@pytest.mark.parametrize("columns", [50, 90, 300])
def test_lines_fit_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    questions = ("", "all", "fp8", "moe", "--lr", "--fp8", "tensor", "batch")
    lines = [line for word in questions for line in asked(capsys, word).splitlines()]
    assert 0.9 * min(columns, 100) < max(map(len, lines)) <= min(columns, 100)


def test_a_section_is_found_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    shown = asked(capsys, "Latent-Attention")
    assert shown.startswith("latent_attention:\n  --multi-latent-attention\n")
    members = [each for each in all_flags(PROGRAM) if each.section == "latent_attention"]
    assert len(members) > 9 and all(f"  {each.shown}" in shown for each in members)


@pytest.mark.parametrize(
    "question", ["lr-warmup-init", "--lr-warmup-init", "LR_warmup_init", "lr warmup init"]
)
def test_a_flag_is_found_however_it_is_spelled(
    question: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = asked(capsys, question)
    assert shown.startswith("  --lr-warmup-init X\n        learning rate at the start")
    assert "    values            a number, at least 0 and at most 1000\n" in shown
    assert "    section           optimizer; see `--help optimizer`\n" in shown


def test_all_that_is_known_about_a_flag_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "    replaces          --fp8, " in asked(capsys, "--fp8-format")
    assert "    also              --no-bf16\n" in asked(capsys, "--bf16")
    assert "It has no effect without `--optimizer muon`." in asked(capsys, "--muon-momentum")
    assert "resuming          a run that resumes must give" in asked(capsys, "--window-size")
    assert "one or more, each a text" in asked(capsys, "--recompute-modules")
    assert "--min-lr, " in asked(capsys, "--lr").partition("Similar names: ")[2]


@pytest.mark.parametrize("question", ["tp", "--tp", "TP"])
def test_usual_abbreviations_are_known(question: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = asked(capsys, question)
    assert shown.startswith("  --tensor-model-parallel-size RANKS\n")
    assert "--tp-comm-overlap" in shown


def test_an_abbreviation_on_the_command_line_is_spelled_out() -> None:
    (error,) = read_words(["--tp", "2"], PROGRAM).errors
    assert error == (
        "`--tp` is not a flag of this program; did you mean `--tensor-model-parallel-size`?"
    )


def test_names_of_other_trainers_lead_to_flags_that_exist() -> None:
    known = spellings(all_flags(TEXT)).keys()
    assert set(TRAINER_NAMES.values()) <= known
    assert not {f"--{name}" for name in TRAINER_NAMES} & known
    (error,) = read_words(["--learning_rate", "2"], PROGRAM).errors
    assert error == "`--learning_rate` is not a flag of this program; did you mean `--lr`?"
    others = {"training.local_batch_size": "micro-batch-size", "model.optim.lr": "lr"}
    for name, meant in others.items():
        (error,) = read_words([f"--{name}", "2"], PROGRAM).errors
        assert error.endswith(f"did you mean `--{meant}`?")


@pytest.mark.parametrize(
    ("question", "found"),
    [
        ("--fp8", "`--fp8` is spelled `--fp8-format` now.\n\n  --fp8-format {e4m3,hybrid}"),
        ("use-flash-attn", "`--use-flash-attn` has no effect: attention uses a flash kernel"),
        ("--fp4-format", "`--fp4-format` is known from Megatron-LM but refused here: it computes"),
        ("--no-gpu-sniff-test-interval", "`--no-gpu-sniff-test-interval` has no effect: "),
    ],
)
def test_flags_of_megatron_lm_have_their_answer(
    question: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(capsys, question).startswith(found)


def test_a_word_is_searched_in_names_choices_and_texts(capsys: pytest.CaptureFixture[str]) -> None:
    shown = asked(capsys, "recompute")
    assert (
        "  --recompute-granularity {full,selective}" in shown and "--moe-layer-recompute" in shown
    )
    assert "`--recompute-activations` is spelled `--recompute-granularity selective`" in shown
    assert "  --attention-backend {auto,flash," in asked(capsys, "flash")
    assert "  --sequence-parallel" in asked(capsys, "parallel sequence")
    shown = asked(capsys, "entropy")
    assert "Mentioned by: " in shown
    only_in_texts = asked(capsys, "low-rank")
    assert "Sections:\n  lora " in only_in_texts


def test_a_short_word_is_not_found_inside_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    shown = asked(capsys, "lr")
    assert "  --min-lr X" in shown and "already" not in shown
    assert "--squared-relu" not in asked(capsys, "are")


def test_many_results_are_named_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\nparallel: --tensor-model-parallel-size, " in "\n" + asked(capsys, "size")


def test_flags_without_effect_are_shortened_where_they_are_many(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = asked(capsys, "moe")
    assert "`--moe-use-upcycling` is known from Megatron-LM but refused here" in shown
    _, listed = shown.split("Accepted without effect (`--help --NAME` says why): ")
    assert re.fullmatch(r"(--[\w-]+,\s+){9}--[\w-]+ and \d+ more.\n", listed)
    assert "Likewise --flash-attention-version." in asked(capsys, "flash")


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ("recompte", "No flag has `recompte` in its name or text; did you mean `recompute`"),
        ("--lerning-rate", "No flag has `--lerning-rate` in its name or text; did you mean "
         "`learning rate`?"),
        ("mikro-batch-size", "No flag has `mikro-batch-size` in its name or text; did you mean "
         "`micro-batch-size`"),
        ("Xyzzy", "No flag has `Xyzzy` in its name or text; `--help` lists the sections."),
        ("--", "No flag has `--` in its name or text; `--help` lists the sections."),
    ],
)  # fmt: skip
def test_a_word_that_nothing_has_is_an_error(
    question: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(PROGRAM, question) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {sentence}") and err.count("\n") == 1


def test_a_flag_of_another_program_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    entries = [of_program("pretrain_video.py", VIDEO_SECTIONS)]
    assert answer(PROGRAM, "--video-data-path", lambda: entries) == 0
    said = "`--video-data-path` is a flag of pretrain_video.py, not of this program; leave it out."
    assert capsys.readouterr().out == f"{said}\n"


@dataclasses.dataclass(frozen=True)
class Bare:
    first_of_two: int = flag(1, "the first")
    second_of_two: int = flag(2, "the second")


def test_a_section_without_a_docstring_is_described_by_its_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = Program(sections=(*SECTIONS, Bare), inapplicable=TEXT_FLAGS)
    shown = asked(capsys, "", program)
    assert "  bare                2 --first-of-two, --second-of-two\n" in shown
