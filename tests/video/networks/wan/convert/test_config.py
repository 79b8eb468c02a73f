"""Published configurations, names and shapes are understood; other models are refused."""

import dataclasses
import json
import math
import re
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
    is_streaming,
    read_config,
)
from megatron_ext.video.convert.importing import run_config
from megatron_ext.video.networks.network import STREAMING
from megatron_ext.video.networks.published import Form, Mapped
from megatron_ext.video.networks.wan.config import SIZES, VideoDiTConfig, VideoDiTSizes
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
    unnamed = VideoDiTSizes(2048, 16, 8192, 32)
    assert understand({"_class_name": "WanModel"})[0] == unnamed
    assert CONVERSION.kinds(unnamed) == ("video-dit", "causal-video-dit", STREAMING)
    flags = {"dit_hidden_size": 2048, "dit_num_heads": 16, "dit_ffn_size": 8192}
    usual = {"video_dit_size": "tiny", "dit_channels": 16, "dit_text_width": 4096}
    described = {"video_dit": {**usual, **flags, "dit_num_blocks": 32}}
    assert CONVERSION.sections(unnamed, "video-dit") == described
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


I2V = dataclasses.replace(SIZES["14b"], condition_channels=20)
KINDS = {
    "i2v-2.2": I2V,
    "i2v-2.1": dataclasses.replace(I2V, vision_width=1280),
    "flf2v": dataclasses.replace(I2V, vision_width=1280, vision_positions=514),
    "unnamed": VideoDiTSizes(640, 5, 1000, 3, text_width=48),
}
ALL = SIZES | KINDS


def completed(form: Form, sizes: VideoDiTSizes, found: Any) -> VideoDiTSizes:
    assert form.completed is not None
    return form.completed(sizes, found)  # type: ignore[no-any-return]


@pytest.mark.parametrize("naming", Naming)
@pytest.mark.parametrize("name", ALL)
def test_what_is_written_is_understood(name: str, naming: Naming) -> None:
    """The original's config.json says nothing of vision tokens, but the tensors' shapes do."""
    sizes, form = ALL[name], CONVERSION.form(naming.value)
    written = json.loads(json.dumps(config_json(sizes, naming)))
    read, _ = understand(written)
    if naming is Naming.DIFFUSERS:
        assert read == sizes
    found = Mapped.of(form, sizes, shapes(sizes)).shapes
    assert completed(form, read, found) == sizes


@pytest.mark.parametrize("naming", Naming)
@pytest.mark.parametrize("name", ["tiny", "1.3b", "5b", "14b", *KINDS])
def test_shapes_tell_the_size(name: str, naming: Naming) -> None:
    form = CONVERSION.form(naming.value)
    found = Mapped.of(form, ALL[name], shapes(ALL[name])).shapes
    assert form.knows(found) and form.read_shapes(found, PATH) == ALL[name]
    (other,) = (x for x in CONVERSION.forms if x is not form)
    assert not other.knows(found)


@pytest.mark.parametrize("name", ALL)
def test_flags_of_a_run_give_the_sizes(name: str) -> None:
    sizes = ALL[name]
    for kind in CONVERSION.kinds(sizes):
        flags = CONVERSION.sections(sizes, kind)
        if kind == STREAMING:
            assert StreamingConfig(**flags["streaming"]).sizes() == sizes
        else:
            assert VideoDiTConfig(**flags["video_dit"]).sizes == sizes
    if sizes.condition_channels:
        with pytest.raises(CheckpointError, match="is given frames, but `causal-video-dit` trains"):
            CONVERSION.sections(sizes, "causal-video-dit")


PUBLISHED: dict[str, tuple[dict[str, Any], VideoDiTSizes]] = {
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": (
        {**DIFFUSERS, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
        KINDS["i2v-2.1"],
    ),
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": (
        {**DIFFUSERS, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120,
         "pos_embed_seq_len": 514},
        KINDS["flf2v"],
    ),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": ({**DIFFUSERS, "in_channels": 36}, I2V),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (
        {**DIFFUSERS, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48,
         "num_attention_heads": 24, "num_layers": 30},
        SIZES["5b"],
    ),
    "Wan-AI/Wan2.2-TI2V-5B": (
        {"_class_name": "WanModel", "dim": 3072, "eps": 1e-06, "ffn_dim": 14336, "freq_dim": 256,
         "in_dim": 48, "model_type": "ti2v", "num_heads": 24, "num_layers": 30, "out_dim": 48,
         "text_len": 512},
        SIZES["5b"],
    ),
    "Wan-AI/Wan2.2-I2V-A14B": (
        {"_class_name": "WanModel", "dim": 5120, "eps": 1e-06, "ffn_dim": 13824, "freq_dim": 256,
         "in_dim": 36, "model_type": "i2v", "num_heads": 40, "num_layers": 40, "out_dim": 16,
         "text_len": 512},
        I2V,
    ),
}  # fmt: skip
"""The config.json of published models, with their sizes."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_of_published_models_are_understood(name: str) -> None:
    content, sizes = PUBLISHED[name]
    assert understand(content)[0] == sizes


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"image_dim": 1280},
        "`added_kv_proj_dim` None and `image_dim` 1280; a video DiT has the hidden size (5120) as "
        "the first, or null as both.",
    ),
    ({"added_kv_proj_dim": 5120}, "`added_kv_proj_dim` 5120 and `image_dim` None"),
    ({"image_dim": "1280"}, "`image_dim` '1280', which must be an integer"),
    ({"pos_embed_seq_len": 514}, "`vision_positions` (514) needs `vision_width`"),
    ({"qk_norm": None}, "`qk_norm` None"),
    ({"eps": 1e-5}, "`eps` 1e-05, but the video DiT has 1e-06"),
    ({"patch_size": [2, 2, 2]}, "`patch_size` [2, 2, 2]"),
    (
        {"in_channels": 48},
        "`in_channels` 48 and 16 output channels; a video DiT takes 16, or 36 with given frames, "
        "so this may be Wan Fun Control; use Wan 2.1 or 2.2.",
    ),
    ({"num_layers": "40"}, "`num_layers` '40', which must be an integer"),
    ({"num_layers": 40.0}, "`num_layers` 40.0, which must be an integer"),
    ({"ffn_dim": None}, "`ffn_dim` None, which must be an integer"),
    ({"num_layers": 0}, "`num_blocks` (0) must be 1 or more"),
    (
        {"attention_bias": False},
        "`attention_bias` False, which WanTransformer3DModel does not",
    ),
]


@pytest.mark.parametrize(("changed", "sentence"), REFUSED)
def test_other_models_are_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        understand({**DIFFUSERS, **changed})
    assert sentence in str(caught.value)


def test_other_models_of_the_original_are_refused() -> None:
    for changed, said in (
        ({"model_type": "vace"}, "`model_type` 'vace', but only t2v, i2v, flf2v, ti2v can be conv"),
        ({"qk_norm": False}, "`qk_norm` False"),
        ({"window_size": [7, 7]}, r"`window_size` \[7, 7\], but the video DiT has \(-1, -1\)"),
        ({"add_ref_conv": True}, "`add_ref_conv` True, but"),
        ({"out_dim": 8}, "`in_dim` 16 and 8 output channels"),
    ):
        with pytest.raises(CheckpointError, match=f"says {said}"):
            understand({**ORIGINAL, **changed})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read .*; give the folder of the model"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="must hold names and values"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"no `patch_embedding.weight` of 5 dimensions"):
        read_shapes({"patch_embedding.weight": (3, 4)}, PATH, naming=Naming.ORIGINAL)
    small: dict[str, tuple[int, ...]] = {
        "patch_embedding.weight": (96, 4, 1, 2, 2), "text_embedding.0.weight": (96, 32),
        "blocks.0.ffn.0.weight": (128, 96), "blocks.1.ffn.0.weight": (128, 96),
        "head.head.weight": (16, 96),
    }  # fmt: skip
    said = "has hidden size 96, which is not divisible by 128, the size of a head in Wan's models"
    with pytest.raises(CheckpointError, match=said):
        read_shapes(small, PATH, naming=Naming.ORIGINAL)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("vace_blocks.0.after_proj.bias", "Wan VACE, which has control blocks"),
        ("face_adapter.fuser_blocks.0.linear1_kv.weight", "Wan Animate, which is given faces"),
        ("casual_audio_encoder.weights", "Wan S2V, which is given sound"),
        ("control_adapter.conv.weight", "Wan Fun Control, which is given a camera or control"),
    ],
)
def test_files_of_other_models_of_wan_are_refused_by_name(name: str, title: str) -> None:
    found = Mapped.of(CONVERSION.forms[1], TINY, shapes(TINY)).shapes
    with pytest.raises(CheckpointError, match=f"holds `{re.escape(name)}`, so it is {title}"):
        read_shapes({**found, name: (3,)}, PATH, naming=Naming.ORIGINAL)


def test_folders_of_other_models_of_wan_are_refused_by_name(tmp_path: Path) -> None:
    for name, title in CONVERSION.refused.items():
        (tmp_path / "config.json").write_text(json.dumps({"_class_name": name}))
        with pytest.raises(CheckpointError, match=f"{title}, and cannot be converted; give Wan 2"):
            form_of_folder(tmp_path)


def test_a_checkpoint_of_streaming_is_known() -> None:
    assert is_streaming({"video": {"task": "streaming"}}) is True
    for other in ({"video": {"task": "flow"}}, {"video": None}, {}):
        assert not is_streaming(other)


SEEING = dataclasses.replace(TINY, condition_channels=8, vision_width=20, vision_positions=6)


@ranks()
def test_shapes_are_those_of_the_model(context: ParallelContext) -> None:
    for sizes in (TINY, SEEING):
        built = {name: tuple(p.shape) for name, p in bare(context, sizes).named_parameters()}
        assert list(built.items()) == list(shapes(sizes).items())


@pytest.mark.parametrize("name", ["tiny", "1.3b", "14b", *KINDS])
def test_names_and_shapes_are_those_of_diffusers(name: str) -> None:
    sizes = ALL[name]
    with torch.device("meta"):
        state = WanTransformer3DModel(**options_of(sizes)).state_dict()
    original = original_names(sizes)
    diffusers, own = (Mapped.of(x, sizes, shapes(sizes)) for x in CONVERSION.forms)
    assert [*diffusers.parts] == [*own.parts] == [*shapes(sizes)]
    for ours, parts in diffusers.parts.items():
        renamed = [original[part.tensor] for part in parts]
        assert [part.tensor for part in own.parts[ours]] == renamed
    assert diffusers.shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    if not sizes.condition_channels:
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
