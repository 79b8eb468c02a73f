"""Recipes of 8-bit products: plain records of their options."""

from collections.abc import Callable
from enum import Enum
from typing import Any


class Format(Enum):
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    def __init__(self, **options: Any) -> None:
        self.options = options

    def described(self) -> str:
        return f"{type(self).__name__}:{self.options['fp8_format'].value}"


class DelayedScaling(Recipe):
    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1024,
        amax_compute_algo: str = "max",
        scaling_factor_compute_algo: Callable[..., Any] | None = None,
        reduce_amax: bool = True,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        **ignored: Any,
    ) -> None:
        super().__init__(
            margin=margin,
            fp8_format=fp8_format,
            amax_history_len=amax_history_len,
            amax_compute_algo=amax_compute_algo,
        )


class Float8CurrentScaling(Recipe):
    def __init__(self, fp8_format: Format = Format.HYBRID, fp8_dpa: bool = False) -> None:
        super().__init__(fp8_format=fp8_format)


class Float8BlockScaling(Recipe):
    def __init__(self, fp8_format: Format = Format.E4M3) -> None:
        super().__init__(fp8_format=fp8_format)


class MXFP8BlockScaling(Recipe):
    def __init__(self, fp8_format: Format = Format.E4M3) -> None:
        super().__init__(fp8_format=fp8_format)


class CustomRecipe(Recipe):
    def __init__(self, qfactory: Callable[..., Any]) -> None:
        super().__init__(fp8_format=Format.E4M3, qfactory=qfactory)
