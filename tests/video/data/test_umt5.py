"""Text as Wan's video DiTs take it: UMT5 with a mask, rows of pad tokens zero, nothing pooled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import TextEncoderConfig
from megatron_ext.video.data.dataset import ShardedVideos, collate
from megatron_ext.video.data.preprocess import main
from megatron_ext.video.data.text_encoders import (
    build_text_encoder,
    text_encoder_from_manifest,
    width_of,
)
from tests.video.data.making import PLAN, pictures
from tests.video.data.tiny_umt5 import WIDTH, write_umt5

LENGTH = 9
CAPTIONS = [
    "a red square",
    "",
    " a\tred  circle \n &amp;amp; a green&nbsp;square ",
    "a red green square circle moves left right a red",
    "purple",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_umt5(tmp_path_factory.mktemp("wan"))


def config(folder: Path) -> TextEncoderConfig:
    return TextEncoderConfig("umt5", str(folder), text_length=LENGTH)


def by_hand(folder: Path, captions: list[str]) -> Tensor:
    """The steps of `WanPipeline._get_t5_prompt_embeds`, on captions that are clean."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder.parent / "tokenizer")
    model = transformers.UMT5EncoderModel.from_pretrained(folder).eval()
    words = tokenizer(
        captions, padding="max_length", max_length=LENGTH, truncation=True,
        add_special_tokens=True, return_attention_mask=True, return_tensors="pt",
    )  # fmt: skip
    with torch.no_grad():
        hidden = model(words.input_ids, words.attention_mask).last_hidden_state
    counts = words.attention_mask.gt(0).sum(dim=1)
    pairs = zip(hidden, counts, strict=True)
    return torch.stack([torch.cat([h[:n], h.new_zeros(LENGTH - n, WIDTH)]) for h, n in pairs])


def test_umt5_is_run_as_by_hand(folder: Path) -> None:
    encoder = build_text_encoder(config(folder))
    rows, pooled = encoder.encode(CAPTIONS)
    assert (encoder.length, encoder.width, encoder.pooled_width) == (LENGTH, WIDTH, 0)
    assert width_of(config(folder)) == WIDTH
    clean = [*CAPTIONS[:2], "a red circle & a green square", *CAPTIONS[3:]]
    want = by_hand(folder, clean)
    assert pooled.shape == (5, 0) and rows.dtype == torch.float32 and not rows.requires_grad
    torch.testing.assert_close(rows, want, atol=1e-6, rtol=0)
    # Three words and the end; the end alone; seven and the end; cut; an unknown word and the end.
    assert (rows != 0).any(-1).sum(1).tolist() == [4, 1, 8, LENGTH, 2]
    assert float(rows.abs().max()) > 0.1


def test_umt5_is_what_the_pipeline_of_diffusers_computes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    wan = pytest.importorskip("diffusers.pipelines.wan.pipeline_wan")
    monkeypatch.setattr(wan, "is_ftfy_available", lambda: False)
    parts = SimpleNamespace(
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder.parent / "tokenizer"),
        text_encoder=transformers.UMT5EncoderModel.from_pretrained(folder).eval(),
    )
    with torch.no_grad():
        want = wan.WanPipeline._get_t5_prompt_embeds(
            parts, CAPTIONS, max_sequence_length=LENGTH, device=torch.device("cpu")
        )
    rows, _ = build_text_encoder(config(folder)).encode(CAPTIONS)
    torch.testing.assert_close(rows, want, atol=1e-6, rtol=0)


def test_pad_tokens_are_masked_in_the_encoder(folder: Path) -> None:
    encoder = build_text_encoder(config(folder))
    longer = TextEncoderConfig("umt5", str(folder), text_length=2 * LENGTH)
    rows = build_text_encoder(longer).encode(CAPTIONS[:1])[0]
    torch.testing.assert_close(rows[:, :LENGTH], encoder.encode(CAPTIONS[:1])[0], atol=1e-6, rtol=0)


def test_a_tokenizer_beside_the_weights_goes_first(folder: Path, tmp_path: Path) -> None:
    own = shutil.copytree(folder, tmp_path / "umt5")
    shutil.copytree(folder.parent / "tokenizer", own, dirs_exist_ok=True)
    (tmp_path / "tokenizer").mkdir()
    rows, _ = build_text_encoder(config(own)).encode(CAPTIONS)
    assert torch.equal(rows, build_text_encoder(config(folder)).encode(CAPTIONS)[0])


def test_from_a_manifest(folder: Path) -> None:
    made = build_text_encoder(config(folder))
    manifest = json.loads(json.dumps({"text_encoder": made.identity}))
    again = text_encoder_from_manifest(manifest, str(folder))
    assert torch.equal(made.encode(CAPTIONS)[0], again.encode(CAPTIONS)[0])
    with pytest.raises(ConfigError, match=r"`clip_path` \(/c\) has an effect only with"):
        text_encoder_from_manifest(manifest, str(folder), "/c")
    with pytest.raises(ConfigError, match=r"`t5_path` \(None\) must be a local folder when `text_"):
        text_encoder_from_manifest(manifest)
    manifest["text_encoder"]["umt5"]["d_ff"] = 64
    with pytest.raises(
        DataError, match=r"the models of `t5_path` \(\S+\): `d_ff` was 64, but is 32; give the fol"
    ):
        text_encoder_from_manifest(manifest, str(folder))


def test_folders_of_no_use(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "text_encoder"
    shutil.copytree(folder, other)
    with pytest.raises(ConfigError, match=r"`t5_path` .* no model and tokenizer that can be loade"):
        build_text_encoder(config(other))
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "model_type": "t5"}))
    with pytest.raises(ConfigError, match=r"a model of type t5, but must hold one of type umt5;"):
        build_text_encoder(config(other))


def test_clips_are_preprocessed_without_pooled_vectors(folder: Path, tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "clips").mkdir()
    for i, picture in enumerate(pictures(2)):
        Image.fromarray(picture).save(tmp_path / "clips" / f"{i}.png")
        (tmp_path / "clips" / f"{i}.txt").write_text("a red square")
    words = (
        f"--input {tmp_path / 'clips'} --output {tmp_path / 'out'} --codec-spatial 4 "
        f"--codec-channels 24 --text-encoder umt5 --t5-path {folder} --text-length {LENGTH}"
    ).split()
    assert main([*words, "--buckets", PLAN.as_json()]) == 0
    videos = ShardedVideos(tmp_path / "out")
    assert (videos.manifest["text_width"], videos.manifest["pooled_width"]) == (WIDTH, 0)
    encoder = text_encoder_from_manifest(videos.manifest, str(folder))
    want = encoder.encode(["a red square", ""])[0]
    batch = collate([videos[0], videos[1]], patch=2, multiple=1)
    assert batch.pooled.shape == (2, 0)
    torch.testing.assert_close(batch.text, want[:1].expand(2, -1, -1), atol=1e-6, rtol=0)
    null, pooled = videos.null_text
    assert pooled.shape == (0,)
    torch.testing.assert_close(null, want[1], atol=1e-6, rtol=0)
