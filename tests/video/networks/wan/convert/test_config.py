"""Published configurations, names and shapes are understood; other models are refused."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.rules import SECTIONS
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.convert import exporting
from megatron_ext.video.convert.exporting import Export, export_weights
from megatron_ext.video.convert.find import (
    form_of_folder,
    holds_video_weights,
    is_streaming,
    read_config,
)
from megatron_ext.video.convert.importing import run_config
from megatron_ext.video.networks.network import STREAMING
from megatron_ext.video.networks.published import Mapped
from megatron_ext.video.networks.wan.config import SIZES, VideoDiTSizes
from megatron_ext.video.networks.wan.convert.config import config_json, read_shapes
from megatron_ext.video.networks.wan.convert.conversion import CONVERSION
from megatron_ext.video.networks.wan.convert.names import Naming, shapes
from megatron_ext.video.streaming.config import StreamingConfig
from tests.ranks import ranks
from tests.video.networks.wan.convert.models import TINY, bare, network, options_of, original_names
from tests.video.networks.wan.plain import num_parameters

PATH = Path("config.json")
ORIGINAL: dict[str, Any] = {
    "_class_name": "WanModel", "_diffusers_version": "0.30.0", "dim": 1536, "eps": 1e-06,
    "ffn_dim": 8960, "freq_dim": 256, "in_dim": 16, "model_type": "t2v", "num_heads": 12,
    "num_layers": 30, "out_dim": 16, "text_len": 512,
}  # fmt: skip
"""The config.json of Wan-AI/Wan2.1-T2V-1.3B."""
DIFFUSERS: dict[str, Any] = {
    "_class_name": "WanTransformer3DModel", "_diffusers_version": "0.33.0.dev0",
    "added_kv_proj_dim": None, "attention_head_dim": 128, "cross_attn_norm": True, "eps": 1e-06,
    "ffn_dim": 13824, "freq_dim": 256, "image_dim": None, "in_channels": 16,
    "num_attention_heads": 40, "num_layers": 40, "out_channels": 16, "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024, "text_dim": 4096,
}  # fmt: skip
"""The config.json of Wan-AI/Wan2.1-T2V-14B-Diffusers."""


def understand(content: dict[str, Any]) -> tuple[VideoDiTSizes, str]:
    """Return the sizes that a config.json describes, and the name of its form."""
    form = next(x for x in CONVERSION.forms if content["_class_name"] in x.classes)
    assert form.read_config is not None
    return form.read_config(content, PATH), form.name


def test_published_models_have_names_and_are_written_alike() -> None:
    small = SIZES["1.3b"], "original"
    assert understand(ORIGINAL) == small
    assert understand({**ORIGINAL, "_class_name": "CausalWanModel"}) == small
    assert understand(DIFFUSERS) == (SIZES["14b"], "diffusers")
    # Defaults are those of diffusers' class, and the width of the text is free.
    assert understand({"_class_name": CLASS}) == understand(DIFFUSERS)
    assert understand({**DIFFUSERS, "out_channels": None})[0] == SIZES["14b"]
    # The original's class has other defaults, a model of 2048 features that has no name.
    with pytest.raises(CheckpointError) as caught:
        understand({"_class_name": "WanModel"})
    said = str(caught.value)
    for part in ("hidden_size 2048", "num_heads 16", "ffn_size 8192", "num_blocks 32"):
        assert f"{part} instead of" in said
    wide = dataclasses.replace(SIZES["14b"], text_width=48)
    assert understand({**DIFFUSERS, "text_dim": 48})[0] == wide
    described = {"generator_size": "14b", "text_features": 48}
    assert CONVERSION.sections(wide, STREAMING) == {"streaming": described}
    assert config_json(SIZES["1.3b"], Naming.ORIGINAL) == {
        name: value for name, value in ORIGINAL.items() if name != "_diffusers_version"
    }
    written, config = config_json(TINY, Naming.DIFFUSERS), dict(network().config)
    assert {**config, **written} == {**config, "patch_size": [1, 2, 2], "_class_name": CLASS}
    assert config.keys() - written.keys() == {"rope_max_seq_len", "_use_default_values"}


CLASS = "WanTransformer3DModel"


@pytest.mark.parametrize("naming", Naming)
@pytest.mark.parametrize("name", SIZES)
def test_what_is_written_is_understood(name: str, naming: Naming) -> None:
    written = json.loads(json.dumps(config_json(SIZES[name], naming)))
    assert understand(written) == (SIZES[name], naming.value)


@pytest.mark.parametrize("naming", Naming)
@pytest.mark.parametrize("name", ["tiny", "1.3b", "14b"])
def test_shapes_tell_the_size(name: str, naming: Naming) -> None:
    form = CONVERSION.form(naming.value)
    found = Mapped.of(form, SIZES[name], shapes(SIZES[name])).shapes
    assert form.knows(found) and form.read_shapes(found, PATH) == SIZES[name]
    (other,) = (x for x in CONVERSION.forms if x is not form)
    assert not other.knows(found)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"image_dim": 1280}, "`image_dim` 1280, but the video DiT has None; use Wan 2.1 text to"),
    ({"added_kv_proj_dim": 5120}, "`added_kv_proj_dim` 5120"),
    ({"qk_norm": None}, "`qk_norm` None"),
    ({"eps": 1e-5}, "`eps` 1e-05, but the video DiT has 1e-06"),
    ({"patch_size": [2, 2, 2]}, "`patch_size` [2, 2, 2]"),
    ({"in_channels": 36}, "`out_channels` 16 and `in_channels` 36"),
    ({"num_layers": "40"}, "`num_layers` '40', which must be an integer"),
    ({"num_layers": 40.0}, "`num_layers` 40.0, which must be an integer"),
    ({"ffn_dim": None}, "`ffn_dim` None, which must be an integer"),
    ({"num_layers": 0}, "`num_blocks` (0) must be 1 or more"),
    (
        {"num_layers": 30, "ffn_dim": 14336},
        "no named size, the nearest being `14b` (ffn_size 14336 instead of 13824, num_blocks 30 "
        "instead of 40); give the weights of a named size (tiny, mini, small, base, 1.3b, 14b), or "
        "add one to SIZES in megatron_ext/video/networks/wan/config.py.",
    ),
]


@pytest.mark.parametrize(("changed", "sentence"), REFUSED)
def test_other_models_are_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        understand({**DIFFUSERS, **changed})
    assert sentence in str(caught.value)


def test_other_models_of_the_original_are_refused() -> None:
    for changed in ({"model_type": "i2v"}, {"qk_norm": False}, {"out_dim": 8}):
        with pytest.raises(CheckpointError, match=f"says `{next(iter(changed))}`"):
            understand({**ORIGINAL, **changed})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read .*; give the folder of the model"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="must hold names and values"):
        read_config(tmp_path)
    pipeline = tmp_path / "pipeline"
    (pipeline / "transformer").mkdir(parents=True)
    (pipeline / "transformer" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"whole pipeline; give .*/pipeline/transformer\."):
        read_config(pipeline)
    # A model of its own may have such a folder, too.
    (pipeline / "config.json").write_text('{"num_layers": 3}')
    assert read_config(pipeline) == {"num_layers": 3}
    with pytest.raises(CheckpointError, match=r"no `patch_embedding.weight` of 5 dimensions"):
        read_shapes({"patch_embedding.weight": (3, 4)}, PATH, naming=Naming.ORIGINAL)
    # A model narrower than one usual head has one head.
    small: dict[str, tuple[int, ...]] = {
        "patch_embedding.weight": (96, 4, 1, 2, 2), "text_embedding.0.weight": (96, 32),
        "blocks.0.ffn.0.weight": (128, 96), "blocks.1.ffn.0.weight": (128, 96),
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=r"hidden_size 96 instead of 64, num_heads 1 instead"):
        read_shapes(small, PATH, naming=Naming.ORIGINAL)


def test_a_folder_finds_its_conversion_by_its_class(tmp_path: Path) -> None:
    assert not holds_video_weights(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    assert not holds_video_weights(tmp_path)
    for name, naming in (("WanTransformer3DModel", "diffusers"), ("CausalWanModel", "original")):
        path.write_text(json.dumps({"_class_name": name}))
        assert holds_video_weights(tmp_path)
        assert form_of_folder(tmp_path) == (CONVERSION, CONVERSION.form(naming))
    for name in ("a.pt", "a.pth", "a.bin", "a.safetensors", "a.gguf"):
        (tmp_path / name).touch()
        assert holds_video_weights(tmp_path / name) == (name != "a.gguf")
    # A whole pipeline is told apart from a folder of something else.
    (tmp_path / "pipeline" / "transformer").mkdir(parents=True)
    assert not holds_video_weights(tmp_path / "pipeline")
    (tmp_path / "pipeline" / "model_index.json").touch()
    (tmp_path / "pipeline" / "transformer" / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"holds a whole pipeline; give .*/transformer"):
        holds_video_weights(tmp_path / "pipeline")
    assert is_streaming({"video": {"task": "streaming"}}) is True
    for other in ({"video": {"task": "flow"}}, {"video": None}, {}):
        assert not is_streaming(other)
    path.write_text(json.dumps({"_class_name": "CogVideoXTransformer3DModel"}))
    unknown = "'CogVideoXTransformer3DModel', which cannot be converted; use one of"
    with pytest.raises(CheckpointError, match=unknown):
        form_of_folder(tmp_path)


@ranks()
def test_shapes_are_those_of_the_model(context: ParallelContext) -> None:
    built = {name: tuple(p.shape) for name, p in bare(context, TINY).named_parameters()}
    assert built == shapes(TINY)


@pytest.mark.parametrize("name", ["tiny", "1.3b", "14b"])
def test_names_and_shapes_are_those_of_diffusers(name: str) -> None:
    sizes = SIZES[name]
    with torch.device("meta"):
        state = WanTransformer3DModel(**options_of(sizes)).state_dict()
    original = original_names(sizes.num_blocks)
    diffusers, own = (Mapped.of(x, sizes, shapes(sizes)) for x in CONVERSION.forms)
    assert [*diffusers.parts] == [*own.parts] == [*shapes(sizes)]
    for ours, parts in diffusers.parts.items():
        renamed = [original[part.tensor] for part in parts]
        assert [part.tensor for part in own.parts[ours]] == renamed
    assert diffusers.shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert sum(map(math.prod, diffusers.shapes.values())) == num_parameters(sizes)


def test_the_width_of_the_text_goes_with_imported_weights() -> None:
    """Weights of a named size may have been trained with another text encoder."""
    sizes = dataclasses.replace(SIZES["mini"], text_width=24)
    for dtype, bf16 in (("bfloat16", True), ("float32", False)):
        flags = CONVERSION.sections(sizes, STREAMING)
        config = run_config(flags, STREAMING, dtype, Path("save"))
        assert config.section(StreamingConfig).sizes() == sizes
        assert config.model.hidden_size == sizes.hidden_size and config.precision.bf16 is bf16
        assert is_streaming(config.to_dict())


def test_an_export_takes_the_network_the_step_and_the_averages_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let critic and generator have different sizes."""
    streaming = StreamingConfig(generator_size="tiny", critic_size="mini", text_features=24)
    config = RunConfig(sections=tuple(kind() for kind in SECTIONS)).with_section(
        streaming, VideoConfig(task="streaming")
    )
    asked: list[Any] = []

    def stopped(path: Any, prefix: str, mapped: Mapped) -> None:
        h, text = mapped.shapes["condition_embedder.text_embedder.linear_1.weight"]
        asked.append((path, h, text, prefix))
        raise CheckpointError("enough")

    def content(load: Path, step: int | None) -> dict[str, Any]:
        asked.append(step)
        return config.to_dict()

    monkeypatch.setattr(exporting, "read_run_config", content)
    monkeypatch.setattr(exporting, "verified_folder", lambda load, step: (load, step))
    monkeypatch.setattr(exporting, "_Weights", stopped)
    usual: dict[str, Any] = {"network": "generator", "load": PATH, "target": tmp_path / "new"}
    for changes, wanted in (
        ({}, (64, 24, "")),
        ({"ema": True}, (64, 24, "ema.")),
        ({"network": "critic", "step": 7}, (128, 24, "critic.")),
    ):
        order = Export(**{**usual, **changes})
        with pytest.raises(CheckpointError, match="enough"):
            export_weights(CONVERSION, order)
        assert asked == [order.step, ((PATH, order.step), *wanted)]
        asked.clear()
