"""CLIP's vision model, as diffusers' pipelines take it, and sets that hold its embeddings."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import EncodeConfig, ImageEncoderConfig
from megatron_ext.video.data.cli import main
from megatron_ext.video.data.dataset import ShardedVideos, VideoBatch, collate, open_online
from megatron_ext.video.data.image_encoder import (
    ImageEncoder,
    build_image_encoder,
    image_encoder_from_manifest,
)
from megatron_ext.video.data.inspect import inspect_videos
from megatron_ext.video.data.merge import merge_videos
from megatron_ext.video.data.options import VideoPreprocessOptions
from tests.video.data.making import CODEC, FLAGS, PLAN, TEXT, pictures, write_gif


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write ``image_encoder`` and, beside it, ``image_processor``, as a pipeline has them."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    transformers.CLIPVisionModel(
        transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            image_size=16, patch_size=8,
        )
    ).save_pretrained(root / "image_encoder")  # fmt: skip
    transformers.CLIPImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    ).save_pretrained(root / "image_processor")
    return root / "image_encoder"


def test_embeddings_are_those_of_diffusers(folder: Path) -> None:
    """A frame gives what a user's picture of it gives."""
    pipelines = pytest.importorskip("diffusers.pipelines.wan.pipeline_wan_i2v")
    transformers = pytest.importorskip("transformers")
    image = pytest.importorskip("PIL.Image")
    made = pictures(2, 24, 40)
    encoder = ImageEncoder(str(folder))
    assert (encoder.tokens, encoder.width) == (5, 16)
    frames = torch.from_numpy(made).permute(0, 3, 1, 2) / 127.5 - 1
    pipeline: Any = SimpleNamespace(
        image_processor=transformers.CLIPImageProcessor.from_pretrained(
            folder.with_name("image_processor")
        ),
        image_encoder=transformers.CLIPVisionModel.from_pretrained(folder).eval(),
    )
    with torch.no_grad():
        wanted = pipelines.WanImageToVideoPipeline.encode_image(
            pipeline, [image.fromarray(x) for x in made], torch.device("cpu")
        )
    torch.testing.assert_close(encoder.encode(frames), wanted, atol=1e-5, rtol=1e-5)
    assert wanted.shape == (2, 5, 16)


def test_sets_hold_masked_clips_and_embeddings(folder: Path, tmp_path: Path) -> None:
    for i in range(3):
        write_gif(tmp_path / f"{i}.gif", pictures(5, first=i))
        (tmp_path / f"{i}.txt").write_text(f"bar {i}")
    output = tmp_path.with_name("with_images")
    extra = ["--masked-references", "head", "loop", "--image-encoder", str(folder)]
    plan = ["--buckets", '{"32px": {"5": 1.0}}']
    arguments = ["--input", str(tmp_path), "--output", str(output), *FLAGS, *plan]
    assert main([*arguments, *extra]) == 0
    assert main([*arguments, *extra]) == 0
    videos = ShardedVideos(output)
    names = ["head1", "masked_head1", "masked_loop1", "tail1"]
    assert videos.manifest["references"] == [
        "head1", "tail1", "masked_head1", "masked_loop1",
    ]  # fmt: skip
    assert videos.manifest["image_embeds"] == {"sides": ["head", "tail"], "tokens": 5, "width": 16}
    encode = EncodeConfig(masked_references=("head", "loop"))
    options = VideoPreprocessOptions(
        str(tmp_path), "", PLAN, CODEC, TEXT, encode, ImageEncoderConfig(str(folder))
    )
    online = open_online(options, flag="--input", tell=False)
    for number in range(3):
        one, other = videos[number], online[number]
        assert sorted(one.references) == sorted(other.references) == names
        assert all(torch.equal(one.references[x], other.references[x]) for x in names)
        assert sorted(one.image_embeds) == ["head", "tail"]
        for side, embeds in one.image_embeds.items():
            assert torch.equal(embeds, other.image_embeds[side]) and embeds.shape == (5, 16)
    assert (
        "images     head, tail: 5 rows of 16 numbers of CLIP"
        in inspect_videos(output, scan=False).lines
    )
    batch = collate([videos[0], videos[1]], patch=2)
    again = VideoBatch.from_tensors(batch.tensors())
    assert torch.equal(again.image_embeds["tail"], batch.image_embeds["tail"])
    assert again.references["masked_loop1"].shape == (2, 24, 2, 8, 8)
    merged = tmp_path.with_name("merged_images")
    merge_videos([output, output], merged)
    both = ShardedVideos(merged)
    assert torch.equal(both[4].image_embeds["tail"], videos[1].image_embeds["tail"])
    plain = tmp_path.with_name("without_images")
    assert main(["--input", str(tmp_path), "--output", str(plain), *FLAGS, *plan]) == 0
    with pytest.raises(ConfigError, match="has `references` .*, but .*; preprocess both alike"):
        merge_videos([output, plain], tmp_path / "none")


def test_from_a_manifest_and_folders_of_no_use(folder: Path, tmp_path: Path) -> None:
    encoder = build_image_encoder(ImageEncoderConfig(str(folder)))
    assert encoder is not None
    manifest = json.loads(json.dumps({"image_encoder": encoder.identity}))
    frame = torch.zeros(1, 3, 16, 16)
    again = image_encoder_from_manifest(manifest, str(folder))
    assert again is not None and torch.equal(again.encode(frame), encoder.encode(frame))
    assert image_encoder_from_manifest({}, None) is None
    with pytest.raises(ConfigError, match="`--image-encoder` .* has no effect: the clips were enc"):
        image_encoder_from_manifest({}, str(folder))
    with pytest.raises(ConfigError, match="so sampling needs its local folder; give it as `"):
        image_encoder_from_manifest(manifest, None)
    manifest["image_encoder"]["preprocessor"]["do_resize"] = False
    with pytest.raises(DataError, match="`do_resize` was False, but is True; give the folder that"):
        image_encoder_from_manifest(manifest, str(folder))
    shutil.copytree(folder, tmp_path / "image_encoder")
    with pytest.raises(ConfigError, match=r"must have a preprocessor_config.json, in it or in"):
        ImageEncoder(str(tmp_path / "image_encoder"))
    with pytest.raises(ConfigError, match=r"give one of the folders in it \(image_encoder\)"):
        ImageEncoder(str(tmp_path))
    with pytest.raises(ConfigError, match="is a single file, but must be a local folder with a"):
        ImageEncoder(str(folder / "model.safetensors"))
    settings = json.loads((folder / "config.json").read_text())
    (tmp_path / "image_encoder" / "config.json").write_text(
        json.dumps({**settings, "model_type": "siglip"})
    )
    with pytest.raises(ConfigError, match="holds a model of type siglip, but must hold one of"):
        ImageEncoder(str(tmp_path / "image_encoder"))
    shutil.copy(folder / "config.json", tmp_path / "image_encoder")
    shutil.copy(folder.with_name("image_processor") / "preprocessor_config.json",
                tmp_path / "image_encoder")  # fmt: skip
    (tmp_path / "image_encoder" / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="holds no model that can be loaded .*; copy the whole"):
        ImageEncoder(str(tmp_path / "image_encoder"))
