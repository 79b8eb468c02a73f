"""The search may draw every value that can be listed, of every flag."""

from tests.combinations.options import FIXED, every_flag, name_of, settings_of
from tests.combinations.programs import PROGRAMS

DEFAULT_ALONE = {"fim_data": "its needs give the flag itself"}
"""Flags of two states of which one is drawn only where the flag is left out, and why."""


def test_each_choice_and_both_states_of_each_flag_can_be_drawn() -> None:
    options = [option for program in PROGRAMS.values() for option in program.options]
    drawn = {entry for option in options for entry in option.settings.items()}
    missing = []
    for flag in every_flag():
        if name_of(flag) in FIXED:
            continue
        if flag.type is bool:
            known = [(sign, ()) for sign in (True, False)]
        else:
            known = [(True, (str(choice),)) for choice in flag.choices or ()]
        missing += [
            f"{flag.field} {value}"
            for value in known
            if (flag.field, value) not in drawn and flag.field not in DEFAULT_ALONE
        ]
    assert missing == []


def test_recomputed_depths_with_distributed_inputs_can_be_drawn() -> None:
    words = {
        "recompute_granularity": (True, ("full",)),
        "distribute_saved_activations": (True, ()),
    }
    depths = {
        option.settings["mtp_num_layers"]
        for option in PROGRAMS["gpt"].options
        if words.items() <= option.settings.items() and "mtp_num_layers" in option.settings
    }
    assert depths == {(True, ("1",)), (True, ("2",))}
    assert settings_of(["--mtp-num-layers", "2"])["mtp_num_layers"] in depths
