"""Contexts of 8-bit products and of parameters kept in 8 bits: recorded, and known to modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from transformer_engine.record import record


class FP8GlobalStateManager:
    """The contexts that are open."""

    recipes: ClassVar[list[Any]] = []
    init_recipes: ClassVar[list[Any]] = []
    keeps_initial_values = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Return whether products are inside of `fp8_autocast`."""
        return bool(cls.recipes) and cls.recipes[-1] is not None

    @classmethod
    def current(cls) -> str | None:
        """Return the recipe of the products here."""
        return cls.recipes[-1].described() if cls.is_fp8_enabled() else None


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Compute products inside in 8 bits."""
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
    """Let modules built inside keep their weights in 8 bits."""
    record("fp8_model_init", recipe=recipe.described(), keeps=preserve_high_precision_init_val)
    FP8GlobalStateManager.init_recipes.append(recipe if enabled else None)
    FP8GlobalStateManager.keeps_initial_values = preserve_high_precision_init_val
    try:
        yield
    finally:
        FP8GlobalStateManager.init_recipes.pop()
