"""Fixtures of the tests of reports."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every disk seem full, as it is where a write has just failed."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=9, used=9, free=0))
