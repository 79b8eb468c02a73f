"""Folders of clips, and a run with adapters, that several files only read."""

from pathlib import Path

import pytest

from tests.video.clips import IMAGE, LONG, SHORT, write_clips
from tests.video.streaming.runs import Tuned, tune


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return three buckets, of which none gives whole steps only."""
    folder = tmp_path_factory.mktemp("video") / "clips"
    return write_clips(folder, {IMAGE: 9, SHORT: 19, LONG: 17})


@pytest.fixture(scope="session")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two whole steps of validation clips, and one clip more."""
    return write_clips(tmp_path_factory.mktemp("video") / "valid", {SHORT: 8, LONG: 9})


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    return tune(tmp_path_factory.mktemp("tuned"))


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return clips of three latent frames."""
    return write_clips(tmp_path_factory.mktemp("short") / "clips", {SHORT: 9})
