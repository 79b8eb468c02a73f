"""Copies of tasks, and which flags a choice of tasks leaves out."""

import dataclasses
import gc
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_ext.config.inapplicable import Inapplicable
from megatron_ext.text.step import gpt_forward_step
from megatron_ext.text.task import GPT
from megatron_ext.train.task import STEP_FLAGS, Task, TaskChoice, definition_of, later


def entry(flags: str) -> Inapplicable:
    return Inapplicable(flags, remedy="leave it out", says="does nothing here")


@dataclass(frozen=True)
class Own:
    """A section of flags of one's own."""


def test_other_datasets_have_other_inputs() -> None:
    assert GPT.inputs is not Task.inputs
    datasets: Any = object()
    assert GPT.replace(datasets=datasets).inputs is Task.inputs
    own: Any = object()
    both = GPT.replace(datasets=datasets, inputs=own)
    assert (both.datasets, both.inputs) == (datasets, own)
    assert GPT.replace(sample_name="images").inputs is GPT.inputs


def test_a_checkpoint_gives_sections_beside_those_of_the_model() -> None:
    task = dataclasses.replace(
        GPT, sections=(), stored_model=lambda stored, given: {"model": stored["model"]}
    )
    more = task.with_sections(Own)
    assert more.sections == (Own,)
    (name,) = set(more.stored_model({"model": 1}, None)) - {"model"}  # type: ignore[arg-type]
    stored = {"model": 1, name: {"size": 2}}
    assert more.stored_model(stored, None) == stored  # type: ignore[arg-type]
    assert GPT.with_sections(Own).sections == (*GPT.sections, Own)


def test_a_choice_leaves_out_what_all_its_tasks_leave_out() -> None:
    one, two, three = entry("lr"), entry("min-lr"), entry("seed")
    tasks = [
        dataclasses.replace(GPT, inapplicable=entries)
        for entries in ((one, two), (two, one, three), (three, two))
    ]
    choice = TaskChoice(tuple(tasks), lambda config: tasks[0])
    assert choice.inapplicable == (two,)


def test_a_changed_choice_still_picks_one_of_its_own_tasks() -> None:
    other = dataclasses.replace(GPT, sample_name="other")
    choice = TaskChoice((GPT, other), lambda config: (GPT, other)[config])  # type: ignore[call-overload]
    changed = choice.replace(perplexity=False)
    for index in (0, 1):
        assert changed.choose(index) is changed.tasks[index]  # type: ignore[arg-type]
    assert [task.sample_name for task in changed.tasks] == [GPT.sample_name, "other"]
    assert not any(task.perplexity for task in changed.tasks)
    assert changed.with_sections(Own).sections[-1] is Own


def test_an_import_waits_for_the_first_call() -> None:
    assert later("no.such:name") is not None
    assert later("math:prod")([2, 3], start=7) == 42


def test_a_function_that_is_named_counts_as_itself() -> None:
    """A task may have GPT's step by its name or as the function, with the flags of both."""
    assert definition_of(GPT.forward_step) == definition_of(gpt_forward_step)  # type: ignore[arg-type]
    loaded = GPT.loaded()
    assert loaded.forward_step is gpt_forward_step
    assert loaded.loaded().forward_step is gpt_forward_step
    for task in (GPT, loaded, GPT.replace(forward_step=gpt_forward_step)):
        refused = {name for entry in task.answers() for name in entry.flags.split()}
        assert refused.isdisjoint(STEP_FLAGS.split())


def test_imports_leave_the_collector_of_garbage_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for enabled in (True, False):
        monkeypatch.delitem(sys.modules, "colorsys", raising=False)
        (gc.enable if enabled else gc.disable)()
        try:
            assert later("colorsys:rgb_to_yiq").load()(0, 0, 0) == (0, 0, 0)
            assert gc.isenabled() is enabled
        finally:
            gc.enable()
