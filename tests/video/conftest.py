"""One folder of clips for all tests of video runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.video.clips import IMAGE, LONG, SHORT, write_clips


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three buckets, of which none gives whole steps only."""
    folder = tmp_path_factory.mktemp("video") / "clips"
    return write_clips(folder, {IMAGE: 9, SHORT: 19, LONG: 17})


@pytest.fixture(scope="session")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two whole steps of validation clips, and one clip that no step takes."""
    return write_clips(tmp_path_factory.mktemp("video") / "valid", {SHORT: 8, LONG: 9})
