"""Runs on text of UMT5, which has no pooled vectors: video DiTs and streaming, not the MMDiT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config.parser import parse_args
from megatron_ext.errors import ConfigError
from megatron_ext.train.preflight import preflight
from megatron_ext.train.run import Run
from megatron_ext.video.config.encoding import TextEncoderConfig
from megatron_ext.video.data.text_encoders import build_text_encoder
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.task import FLOW, VIDEO
from tests.video import clips
from tests.video.clips import SHORT, TEXT, write_clips
from tests.video.data.tiny_umt5 import WIDTH, write_umt5
from tests.video.streaming.runs import FLAGS as STREAMING_FLAGS
from tests.video.streaming.runs import run as stream
from tests.video.streaming.runs import runner_of
from tests.video.wan_run import KINDS, train


@pytest.fixture(scope="module")
def umt5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_umt5(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, umt5: Path) -> Path:
    """Clips as they are after preprocessing with UMT5."""
    encoder = build_text_encoder(TextEncoderConfig("umt5", str(umt5), text_length=TEXT))
    folder = tmp_path_factory.mktemp("umt5") / "clips"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clips, "POOLED", 0)
        patch.setattr(clips, "WIDTH", WIDTH)
        return write_clips(folder, {SHORT: 9}, text_encoder=encoder.identity, fps=8)


def test_a_video_dit_trains_and_samples(data: Path, umt5: Path, tmp_path: Path) -> None:
    words = (
        f"{KINDS['video-dit']} --sample-interval 1 --sample-texts left --sample-steps 2 "
        f"--sample-dir {tmp_path / 'samples'} --text-encoder umt5 --t5-path {umt5} "
        f"--text-length {TEXT}"
    )
    rows = train(data, tmp_path / "save", words)
    assert rows[-1]["iteration"] == 1
    assert list((tmp_path / "samples").rglob("*.mp4"))


def test_streaming_is_given_its_embeddings(umt5: Path, tmp_path: Path) -> None:
    words = " ".join(STREAMING_FLAGS).replace("--text-width 32", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.video.streaming.runs.FLAGS", words.split())

        def check(run: Run) -> None:
            encoder = build_text_encoder(TextEncoderConfig("umt5", str(umt5), text_length=8))
            assert run.config.section(StreamingConfig).text_features == WIDTH
            negative = runner_of(run).scores.negative_text
            torch.testing.assert_close(negative, encoder.encode(["circle"])[0])

        flags = f"--train-iters 1 --text-encoder umt5 --t5-path {umt5} --negative-prompt circle"
        (row,) = stream(tmp_path, flags, prepare=check)
    assert row["iteration"] == 1


def test_the_mmdit_refuses_captions_without_pooled_vectors(data: Path, umt5: Path) -> None:
    def configured(*words: str) -> Any:
        flags = [*clips.FLAGS, "--video-data-path", str(data), *words]
        return parse_args(flags, VIDEO, world_size=1, device="cpu").config

    with pytest.raises(ConfigError, match=r"\(\S+/clips\) holds captions without pooled vectors,"):
        preflight(configured(), FLOW.preflight)
    online = ["--online-encoding", "--video-buckets", '{"64px": {"9": [1, 1]}}']
    with pytest.raises(
        ConfigError, match=r"`--text-encoder` \(umt5\) gives no pooled vectors, which the MMDiT"
    ):
        configured(*online, "--text-encoder", "umt5", "--t5-path", str(umt5))
