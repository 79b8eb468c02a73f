"""A run with adapters that several files read."""

from __future__ import annotations

import pytest

from tests.video.streaming.tuned import Tuned, tune


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """Return a finished run with adapters, which tests only read; see `Tuned`."""
    return tune(tmp_path_factory.mktemp("tuned"))
