"""Contexts of 8-bit products and of parameters kept in 8 bits: recorded, and known to modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from transformer_engine.record import record


class FP8GlobalStateManager:
    recipes: ClassVar[list[Any]] = []
    init_recipes: ClassVar[list[Any]] = []
    keeps_initial_values = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return bool(cls.recipes) and cls.recipes[-1] is not None

    @classmethod
    def current(cls) -> str | None:
        return cls.recipes[-1].described() if cls.is_fp8_enabled() else None


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    recipe = fp8_recipe if enabled else None
    options = {} if recipe is None else recipe.options
    group = None if fp8_group is None else fp8_group.size()
    record("fp8_autocast", recipe=recipe and recipe.described(), options=options, group=group)
    FP8GlobalStateManager.recipes.append(recipe)
    try:
        yield
    finally:
        FP8GlobalStateManager.recipes.pop()


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    record("fp8_model_init", recipe=recipe.described(), keeps=preserve_high_precision_init_val)
    FP8GlobalStateManager.init_recipes.append(recipe if enabled else None)
    FP8GlobalStateManager.keeps_initial_values = preserve_high_precision_init_val
    try:
        yield
    finally:
        FP8GlobalStateManager.init_recipes.pop()
