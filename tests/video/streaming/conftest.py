"""A run with adapters that several files look at."""

from __future__ import annotations

import pytest

from tests.video.streaming.tuned import Tuned, tune


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """See `Tuned`; read only."""
    return tune(tmp_path_factory.mktemp("tuned"))
