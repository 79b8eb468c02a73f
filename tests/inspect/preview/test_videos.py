"""Clips of a video run's steps as tools/preview_batch.py shows them."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_ext.video.data.dataset import ShardedVideos
from megatron_ext.video.data.preprocess import main as preprocess
from tests.video.clips import FLAGS
from tests.video.data import making
from tools.preview_batch import main


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encode nine clips and a picture with the lossless patch codec."""
    root = tmp_path_factory.mktemp("preview")
    rows = []
    for i in range(10):
        making.write_gif(root / f"{i}.gif", making.pictures(1 if i == 9 else 5, first=i))
        rows.append({"path": f"{i}.gif", "text": f"a <bar> {'of many words ' * (i % 2)}{i}"})
    (root / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = '{"32px": {"1": 1, "5": 1}}'
    words = f"--input {root}/l.jsonl --output {root}/out --codec-spatial 4 --text-length 6"
    assert preprocess([*words.split(), "--buckets", plan]) == 0
    return root / "out"


def words_of(data: Path, *more: str) -> list[str]:
    return ["--", *FLAGS, "--video-data-path", str(data), "--patch-size", "1", *more]


def test_the_page_shows_what_is_trained(data: Path, tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    flags = ["--html", str(html), "--max-rows", "8"]
    own = words_of(data, "--t2v-weight", "0", "--i2v-loop-weight", "1", "--i2v-head-weight", "0")
    assert main([*flags, *own]) == 0
    page = html.read_text()
    sections = page.split('<section class="clip">')[1:]
    assert len(sections) == 8
    videos = ShardedVideos(data)
    for section in sections:
        number = int(re.search(r"clip (\d+), sample", section)[1])
        pictures = [
            np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
            for content in re.findall(r"base64,([^\"]+)", section)
        ]
        truth = making.pictures(5, first=int(videos[number].caption.split()[-3]))[[0, 2, 4]]
        assert len(pictures) == 3 and pictures[0].shape == (32, 32, 3)
        # A gif has a palette, and nothing else is lost.
        assert (
            max(np.abs(a.astype(int) - b).max() for a, b in zip(pictures, truth, strict=True)) < 3
        )
        caption = videos[number].caption
        assert caption.replace("<", "&lt;").replace(">", "&gt;") in section
        assert ("so that the end of the caption may be cut" in section) == ("many" in caption)
