"""Clips of a video run's steps as tools/preview_batch.py shows them."""

import base64
import io
import json
import re
import shutil
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
        caption = videos[number].caption
        first = int(re.search(r"(\d+)( 10 FPS\.)?$", caption)[1])
        truth = making.pictures(5, first=first)[[0, 2, 4]]
        assert len(pictures) == 3 and pictures[0].shape == (32, 32, 3)
        # A gif has a palette, and nothing else is lost.
        assert (
            max(np.abs(a.astype(int) - b).max() for a, b in zip(pictures, truth, strict=True)) < 3
        )
        assert caption.replace("<", "&lt;").replace(">", "&gt;") in section
        assert ("so that the end of the caption may be cut" in section) == ("many" in caption)
        assert "5x32x32, 10 FPS, latents 192x2x8x8, i2v_" in section
        # Of two latent frames the given ones do not count in the loss.
        strips = {
            "i2v_loop": ["given", "given"], "i2v_tail": ["counts", "given"],
        }  # fmt: skip
        mode = re.search(r"i2v_\w+", section)[0]
        assert re.findall(r'<span class="(\w+)">', section) == strips[mode]
    assert "1 of 1 clips of 32px 1x32x32 are left out of an epoch, all of them in each" in page


def test_frames_of_the_files_where_the_codec_is_missing(data: Path, tmp_path: Path) -> None:
    """A VAE's folder is not given, so that nothing decodes the latents."""
    copied = shutil.copytree(data, tmp_path / "data")
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["codec"] = {"codec": "AutoencoderKLWan"}
    (copied / "manifest.json").write_text(json.dumps(manifest))
    html = tmp_path / "page.html"
    assert main(["--html", str(html), "--max-rows", "2", *words_of(copied)]) == 0
    page = html.read_text()
    assert "frames are those of the clips&#x27; files, not of the latents: " in page
    (section, _) = page.split('<section class="clip">')[1:]
    number = int(re.search(r"(\d+)( 10 FPS\.)?</p>", section)[1])
    shown = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
        for content in re.findall(r"base64,([^\"]+)", section)
    ]
    for picture, truth in zip(shown, making.pictures(5, first=number)[[0, 2, 4]], strict=True):
        assert np.abs(picture.astype(int) - truth).max() < 3
    other = shutil.copytree(copied, tmp_path / "other")
    (other / "clips.jsonl").unlink()
    main(["--html", str(html), *words_of(other)])
    assert "the dataset does not say which file the clip was" in html.read_text()


def test_a_rank_and_a_task_without_clips_are_refused(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--rank", "3", *words_of(data)]) == 2
    assert (
        "`--rank` (3) must be one of the 1 data-parallel ranks of the la" in capsys.readouterr().err
    )
    assert main(["--html", "/none/page.html", *words_of(data)]) == 2
    assert "`--html` (/none/page.html) cannot be written (" in capsys.readouterr().err
