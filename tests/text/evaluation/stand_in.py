"""The module megatron_ext.text.evaluation.lm, with stand-ins for lm-eval where it is not installed.

A stand-in does what the docstrings of lm-eval 0.4 say of the few functions that the module uses.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest import mock


class TemplateLM:
    """The base of model classes, which holds nothing that our class uses."""


class TaskManager:
    """Refuses to be made: tests put their own in its place."""

    def __init__(self, **_: Any) -> None:
        raise NotImplementedError


def simple_evaluate(*_: Any, **__: Any) -> None:
    """Refuse to evaluate: tests put their own in its place."""
    raise NotImplementedError


def normalize_gen_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a text with lm-eval's defaults."""
    until = given.get("until", [])
    options = {"max_gen_toks": 256, "do_sample": given.get("temperature", 0) > 0, **given}
    return {**options, "until": until if isinstance(until, list) else [until]}


def get_rolling_token_windows(
    token_list: Sequence[int], prefix_token: int, max_seq_len: int, context_len: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (inputs, targets) of windows, in which each token is a target once."""
    whole = [prefix_token, *token_list]
    done = 0
    while done < len(token_list):
        share = max_seq_len if done == 0 else max_seq_len - context_len + 1
        end = min(done + share, len(token_list))
        yield whole[max(0, end - max_seq_len) : end], list(token_list[done:end])
        done = end


def make_disjoint_window(window: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    """Return a window whose inputs are those before its first target."""
    inputs, targets = window
    return inputs[: len(inputs) - len(targets) + 1], targets


MODULES: dict[str, tuple[Any, ...]] = {
    "lm_eval": (simple_evaluate,),
    "lm_eval.api": (),
    "lm_eval.api.model": (TemplateLM,),
    "lm_eval.models": (),
    "lm_eval.models.utils": (normalize_gen_kwargs,),
    "lm_eval.tasks": (TaskManager,),
    "lm_eval.utils": (get_rolling_token_windows, make_disjoint_window),
}


def module_lm() -> Any:
    """Return the module; neither it nor the stand-ins stay among the imported modules."""
    name = "megatron_ext.text.evaluation.lm"
    if find_spec("lm_eval") is not None:
        return importlib.import_module(name)
    modules = {}
    for each, members in MODULES.items():
        modules[each] = ModuleType(each)
        for member in members:
            setattr(modules[each], member.__name__, member)
    with mock.patch.dict(sys.modules, modules):
        return importlib.import_module(name)
