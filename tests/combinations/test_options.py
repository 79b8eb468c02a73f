"""Every documented flag of every program is combined, or stands in a list with the reason."""

from __future__ import annotations

import random

from tests.combinations import layouts
from tests.combinations.draw import Case, Draws
from tests.combinations.options import every_flag, joined, name_of, settings_of, values_of
from tests.combinations.programs import GPT, PROGRAMS
from tests.combinations.values import FIXED, NEEDS, VALUES


def test_every_flag_is_an_option_of_a_program_or_has_a_reason() -> None:
    combined = {
        name
        for program in PROGRAMS.values()
        for option in program.options
        for name in option.settings
    }
    sections = {s for program in PROGRAMS.values() for s in (*program.sections, *program.others)}
    missing = [
        flag.positive[0]
        for flag in every_flag()
        if flag.section in sections and flag.field not in combined and name_of(flag) not in FIXED
    ]
    assert missing == []


def test_every_boolean_is_on_and_off_and_every_choice_is_taken() -> None:
    texts = " ".join(f"{option.text} " for option in GPT.options)
    for flag in every_flag():
        if flag.section not in GPT.sections or name_of(flag) in FIXED:
            continue
        for value in values_of(flag) or []:
            assert value.split()[0] in texts, value


def test_tables_name_flags_that_exist() -> None:
    names = {name_of(flag) for flag in every_flag()}
    assert [name for name in (*VALUES, *NEEDS, *FIXED) if name not in names] == []


def test_a_later_flag_wins_over_an_earlier_one_by_any_of_its_spellings() -> None:
    words = joined([["--lr", "1", "--disable-bias-linear"], ["--add-bias-linear", "--lr", "2"]])
    assert words == ["--lr", "2", "--add-bias-linear"]
    assert settings_of(words)["add_bias_linear"] == (True, ())


def test_a_seed_decides_the_cases_and_options_do_not_contradict_each_other() -> None:
    def cases() -> list[Case]:
        draws = Draws(GPT, random.Random(3))
        return [draws.case(number) for number in range(40)]

    assert cases() == cases()
    for case in cases():
        words = case.words("/data")
        fields = [name for text in case.options for name in settings_of(text.split())]
        assert set(fields) <= set(settings_of(words))


def test_layouts_take_their_ranks() -> None:
    dice = random.Random(0)
    for _ in range(200):
        layout = layouts.draw(dice, experts=dice.random() < 0.5)
        settings = settings_of(layout.words)
        sizes = [
            int(settings.get(f"{name}_parallel_size", (True, ("1",)))[1][0])
            for name in ("tensor_model", "pipeline_model", "context")
        ]
        product = sizes[0] * sizes[1] * sizes[2]
        assert layout.ranks % product == 0 and layout.ranks <= 8
