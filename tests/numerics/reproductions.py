"""Check the defects of the installed megatron-core against a table over its releases."""

from collections.abc import Mapping

import megatron.core
import pytest

from megatron_ext.extras.audit.reproduced import Reproduced, Reproduction

RELEASE = ".".join(megatron.core.__version__.split(".")[:2])
"""The release of the installed megatron-core, such as ``0.16``."""


def check_ratio(
    reproduce: Reproduction, ratios: Mapping[str, float], *, rel: float = 1e-4
) -> Reproduced:
    """Check the figure of megatron-core over the right one; return both.

    Args:
        ratios: the ratio in each release, such as ``{"0.16": 4.0, "0.19": 1.0}``; 1 where the
            defect is fixed, NaN where megatron-core raises an error or runs for ever.
        rel: how far the ratio may be off.
    """
    found = reproduce()
    assert found.ratio == pytest.approx(ratios[RELEASE], rel=rel, nan_ok=True), found
    return found
