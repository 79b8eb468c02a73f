"""Captions as vectors: hashed words, T5 with CLIP, and UMT5 as Wan's video DiTs take it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import TextEncoderConfig
from megatron_ext.video.config.rules import SECTIONS
from megatron_ext.video.data.cli import main
from megatron_ext.video.data.conditions import text_mask
from megatron_ext.video.data.dataset import ShardedVideos, collate
from megatron_ext.video.data.manifest import folder_of_model
from megatron_ext.video.data.model_folders import public
from megatron_ext.video.data.text_encoders import (
    build_text_encoder,
    encoder_checks,
    text_encoder_from_manifest,
    widths_of,
)
from megatron_ext.video.sampling.source import source_of
from tests.video.data.making import PLAN, UMT5_WIDTH, pictures, write_umt5

HASHED = TextEncoderConfig(text_length=5, text_width=12, pooled_width=7)
WORDS = "a red green square circle moves left right".split()


def test_hashed_words() -> None:
    encoder = build_text_encoder(HASHED)
    rows, pooled = encoder.encode(["a red square", "A red, SQUARE!", "square a red", ""])
    assert rows.shape == (4, 5, 12) and pooled.shape == (4, 7)
    assert torch.equal(rows[0], rows[1]) and torch.equal(pooled[0], pooled[1])
    # The order of words is kept in the rows, and lost in the pooled vector.
    assert torch.equal(rows[2, [1, 2, 0]], rows[0, :3])
    torch.testing.assert_close(pooled[2], pooled[0])
    assert not rows[:, 3:].any() and not rows[3].any() and not pooled[3].any()
    assert set(rows[0, :3].unique().tolist()) == {-1.0, 1.0}
    assert len({tuple(row.tolist()) for row in rows[0, :3]}) == 3
    # Rows are cut at the length, what is pooled is not.
    rows, pooled = encoder.encode(["a b c d e f", "a b c d e"])
    assert torch.equal(rows[0], rows[1]) and not torch.equal(pooled[0], pooled[1])
    assert encoder.cuts("a b c d e f") and not encoder.cuts("a b c d e.")


def test_the_vectors_of_words_are_fixed() -> None:
    """Other vectors would make every stored caption useless."""
    rows, pooled = build_text_encoder(HASHED).encode(["red", "red circle", "red circle red"])
    assert rows[0, 0].tolist() == [1, 1, -1, -1, 1, 1, 1, -1, -1, -1, 1, -1]
    assert pooled[0].tolist() == [1, 1, 1, 1, 1, 1, 1]
    circle = torch.tensor([1.0, -1, 1, 1, -1, -1, -1])
    torch.testing.assert_close(pooled[1], (1 + circle) / 2**0.5)
    torch.testing.assert_close(pooled[2], (2 + circle) / 3**0.5)


def test_hashed_words_have_no_common_direction_and_are_the_same_in_every_process() -> None:
    encoder = build_text_encoder(TextEncoderConfig(text_length=200, text_width=256))
    rows = encoder.encode([" ".join(f"word{i}" for i in range(200))])[0][0]
    products = (rows @ rows.T / 256).fill_diagonal_(0)
    # Random signs: products of mean 0 and standard deviation 1/16.
    assert abs(products.mean()) < 0.01 and abs(products.std() - 1 / 16) < 0.005
    caption = "a red square 24 FPS, 4 motion score."
    code = (
        "from megatron_ext.video.data.text_encoders import *\n"
        "rows, pooled = build_text_encoder(TextEncoderConfig(text_length=5, text_width=12, "
        f"pooled_width=7)).encode([{caption!r}])\n"
        "print(rows.tolist(), pooled.tolist())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rows, pooled = build_text_encoder(HASHED).encode([caption])
    assert said.stdout.strip() == f"{rows.tolist()} {pooled.tolist()}"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("text")
    torch.manual_seed(0)
    for name, end in (("t5", "</s>"), ("clip", "<|endoftext|>")):
        # CLIP's end token has the highest number, T5's a low one.
        order = ["<pad>", "<unk>", "</s>", "<start>", *WORDS, "<|endoftext|>"]
        vocabulary = {word: i for i, word in enumerate(order)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"$A {end}" if name == "t5" else f"<start> $A {end}",
            special_tokens=[(token, vocabulary[token]) for token in (end, "<start>")],
        )
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=made, pad_token="<pad>" if name == "t5" else end,
            eos_token=end, unk_token="<unk>",
        ).save_pretrained(root / name)  # fmt: skip
    transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=13, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    ).save_pretrained(root / "t5")
    transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=13, hidden_size=20, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=9, eos_token_id=12, bos_token_id=3,
        )
    ).save_pretrained(root / "clip")  # fmt: skip
    return root / "t5", root / "clip"


def config(folders: tuple[Path, Path], length: int = 11) -> TextEncoderConfig:
    return TextEncoderConfig("t5-clip", str(folders[0]), str(folders[1]), length)


def test_t5_and_clip(folders: tuple[Path, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    encoder = build_text_encoder(config(folders))
    rows, pooled = encoder.encode(captions := ["a red square", "", "a " * 40])
    for i, caption in enumerate(captions):
        for one, many in zip(encoder.encode([caption]), (rows, pooled), strict=True):
            torch.testing.assert_close(one[0], many[i])
    assert rows.shape == (3, 11, 16) and pooled.shape == (3, 20)
    assert (encoder.length, encoder.width, encoder.pooled_width) == (11, 16, 20)
    # With the end, eleven tokens fit.
    assert not encoder.cuts("a " * 10) and encoder.cuts("a " * 11)
    # a red square: 4, 5, 7; end 2; T5 pads with 0 and attends to the padding.
    t5 = transformers.T5EncoderModel.from_pretrained(folders[0]).eval()
    ids = torch.tensor([[4, 5, 7, 2, *[0] * 7], [2, *[0] * 10], [*[4] * 10, 2]])
    with torch.no_grad():
        wanted = t5(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    torch.testing.assert_close(rows, wanted)
    # CLIP's vector is that of the first end token, whatever follows it.
    clip = transformers.CLIPTextModel.from_pretrained(folders[1]).eval()
    for row, text in zip(pooled, ([3, 4, 5, 7, 12], [3, 12], [3, *[4] * 7, 12]), strict=True):
        with torch.no_grad():
            hidden = clip(input_ids=torch.tensor([text])).last_hidden_state
        torch.testing.assert_close(row, hidden[0, -1], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write ``text_encoder``, a tiny Llama, and its tokenizer beside it, as a pipeline has them."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("hunyuan")
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<begin>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<begin>", unk_token="<unk>",
    ).save_pretrained(root / "tokenizer")  # fmt: skip
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    transformers.LlamaModel(
        transformers.LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes)
    ).save_pretrained(root / "text_encoder")
    return root / "text_encoder"


def test_llama_and_clip_are_those_of_hunyuan_video(
    folders: tuple[Path, Path], llama: Path, tmp_path: Path
) -> None:
    pipelines = pytest.importorskip("diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video")
    transformers = pytest.importorskip("transformers")
    flags = TextEncoderConfig(
        "llama-clip", clip_path=str(folders[1]), llama_path=str(llama), text_length=11
    )
    encoder = build_text_encoder(flags)
    assert widths_of(flags)[0] == 16
    rows, pooled = encoder.encode(captions := ["a red square", "", "red " * 40])
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama.with_name("tokenizer"))
    template = pipelines.DEFAULT_PROMPT_TEMPLATE["template"]
    first = tokenizer(template.format("red"))["input_ids"].index(tokenizer("red")["input_ids"][1])
    pipeline: Any = SimpleNamespace(
        tokenizer=tokenizer, text_encoder=transformers.LlamaModel.from_pretrained(llama).eval()
    )
    with torch.no_grad():
        wanted, mask = pipelines.HunyuanVideoPipeline._get_llama_prompt_embeds(
            pipeline, captions, {"template": template, "crop_start": first},
            device=torch.device("cpu"), dtype=torch.float32, max_sequence_length=11,
        )  # fmt: skip
    assert mask.sum(dim=1).tolist()[0] < 11
    torch.testing.assert_close(rows, wanted * mask[..., None])
    assert torch.equal(text_mask(rows), mask.bool())
    clip = build_text_encoder(config(folders)).encode(captions)[1]
    assert torch.equal(pooled, clip)
    assert encoder.cuts("red " * 40) and not encoder.cuts("red")
    manifest = json.loads(json.dumps({"text_encoder": encoder.identity}))
    again = text_encoder_from_manifest(manifest, clip_path=str(folders[1]), llama_path=str(llama))
    assert torch.equal(again.encode(captions)[0], rows)
    with pytest.raises(ConfigError, match=r"`--llama-path` is missing, which `--text-enc"):
        text_encoder_from_manifest(manifest, clip_path=str(folders[1]))
    # Tokenizers of chat models may pad on the left, where the template is cut off.
    shutil.copytree(llama.parent, tmp_path / "left")
    settings = tmp_path / "left" / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "padding_side": "left"}))
    left = TextEncoderConfig(
        "llama-clip", None, str(folders[1]), 11, llama_path=str(tmp_path / "left" / "text_encoder")
    )
    assert torch.equal(build_text_encoder(left).encode(captions)[0], rows)


def test_from_a_manifest(folders: tuple[Path, Path], tmp_path: Path) -> None:
    made = build_text_encoder(config(folders))
    manifest = json.loads(json.dumps({"text_encoder": made.identity}))
    again = text_encoder_from_manifest(manifest, str(folders[0]), str(folders[1]))
    for one, other in zip(made.encode(["a red"]), again.encode(["a red"]), strict=True):
        assert torch.equal(one, other)
    # What other releases of transformers note is no difference.
    incidental = ("dtype", "torch_dtype", "transformers_version", "_attn_implementation")
    assert public({"d_ff": 64, **dict.fromkeys(incidental, "x")}) == {"d_ff": 64}
    with pytest.raises(ConfigError, match=r"`--t5-path` is missing, which `--text-enc"):
        text_encoder_from_manifest(manifest)
    with pytest.raises(ConfigError, match=r"`--t5-path` \(/none\) must be a local folder with a"):
        text_encoder_from_manifest(manifest, "/none", str(folders[1]))
    manifest["text_encoder"]["t5"]["d_ff"] = 64
    with pytest.raises(DataError, match=r"not encoded with the models .*: `d_ff` was 64, but is 3"):
        text_encoder_from_manifest(manifest, str(folders[0]), str(folders[1]))
    manifest = json.loads(json.dumps({"text_encoder": made.identity}))
    manifest["text_encoder"]["clip"]["num_hidden_layers"] = 3
    with pytest.raises(
        DataError, match=r"`--t5-path` \(.*\) and `--clip-path` \(.*\): `num_hidden_lay"
    ):
        text_encoder_from_manifest(manifest, str(folders[0]), str(folders[1]))


def test_hashed_words_from_a_manifest() -> None:
    made = build_text_encoder(HASHED)
    manifest = json.loads(json.dumps({"text_encoder": made.identity}))
    again = text_encoder_from_manifest(manifest)
    assert torch.equal(again.encode(["a b"])[0], made.encode(["a b"])[0])
    assert again.encode(["a b"])[1].shape == (1, 7)
    with pytest.raises(ConfigError, match=r"`--t5-path` \(/t5\) has an effect only with"):
        text_encoder_from_manifest(manifest, "/t5")
    for wrong in ({}, {"text_encoder": "hashed"}, {"text_encoder": {"text_encoder": "bert"}}):
        with pytest.raises(DataError, match=r"The manifest must name its text encoder, but holds"):
            text_encoder_from_manifest(wrong)
    del manifest["text_encoder"]["width"]
    with pytest.raises(DataError, match=r"lacks a size \(KeyError\('width'\)\); make the data aga"):
        text_encoder_from_manifest(manifest)


def test_folders_of_no_use(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"holds a model of type clip_text_model, but must .* t5"):
        build_text_encoder(config((folders[1], folders[1])))
    with pytest.raises(ConfigError, match=r"`--clip-path` .* type t5, but .* clip or clip_text_"):
        build_text_encoder(config((folders[0], folders[0])))
    safetensors = pytest.importorskip("safetensors.torch")
    shutil.copytree(folders[0], tmp_path / "t5")
    weights = tmp_path / "t5" / "model.safetensors"
    kept = safetensors.load_file(weights)
    name = "encoder.block.1.layer.0.SelfAttention.q.weight"
    kept.pop(name)
    safetensors.save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"`--t5-path` .* lacks the weights {name}; copy"):
        build_text_encoder(config((tmp_path / "t5", folders[1])))
    weights.write_bytes(b"cut")
    with pytest.raises(ConfigError, match=r"no model and tokenizer that can be loaded .*copy the"):
        build_text_encoder(config((tmp_path / "t5", folders[1])))
    shutil.copytree(folders[1], tmp_path / "clip")
    for file in (tmp_path / "clip").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"`--clip-path` .* no model and tokenizer that can be"):
        build_text_encoder(config((folders[0], tmp_path / "clip")))
    (tmp_path / "clip" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"`--clip-path` .* has a config.json that cannot be"):
        build_text_encoder(config((folders[0], tmp_path / "clip")))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="needs the package transformers, which is not installe"):
        build_text_encoder(config(folders))


WIDTHS = {"text_width": 9, "pooled_width": 9}
UMT5, T5 = ({"text_encoder": kind, "t5_path": "/t5"} for kind in ("umt5", "t5-clip"))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"text_encoder": "bert"}, r"`--text-encoder` \(bert\) must be hashed, t5-clip, umt5 or"),
        ({"text_length": 0}, r"`--text-length` \(0\) must be at least 1"),
        ({"clip_path": "/c"}, r"`--clip-path` \(/c\) has an effect only with `--text-encoder` t5"),
        (T5, r"`--clip-path` is missing, which `--tex"),
        ({"text_encoder": "umt5"}, r"`--t5-path` is missing, which `--text-encoder umt5` needs"),
        ({**UMT5, "clip_path": "/c"}, r"has an effect only .* t5-clip or llama-clip; choose"),
        (
            {**UMT5, **WIDTHS},
            r"`--text-width` \(9\) must be left out with `--text-encoder umt5`:",
        ),
        (
            {**UMT5, "pooled_width": 9},
            r"`--pooled-width` \(9\) must be left out .* umt5`: the m",
        ),
        ({**T5, "text_width": 9}, r"`--text-width` \(9\) must be left out .* t5-clip`: th"),
    ],
)
def test_options_of_no_use(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        TextEncoderConfig(**wrong)


LENGTH = 9
CAPTIONS = [
    "a red square",
    "",
    " a\tred  circle \n &amp;amp; a green&nbsp;square ",
    "a red green square circle moves left right a red",
    "purple",
]


@pytest.fixture(scope="module")
def umt5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_umt5(tmp_path_factory.mktemp("wan"))


def umt5_config(folder: Path) -> TextEncoderConfig:
    return TextEncoderConfig("umt5", str(folder), text_length=LENGTH)


def umt5_models(folder: Path) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder.parent / "tokenizer")
    return tokenizer, transformers.UMT5EncoderModel.from_pretrained(folder).eval()


def by_hand(folder: Path, captions: list[str]) -> Tensor:
    """Follow `WanPipeline._get_t5_prompt_embeds` on captions that are clean."""
    tokenizer, model = umt5_models(folder)
    words = tokenizer(
        captions, padding="max_length", max_length=LENGTH, truncation=True,
        add_special_tokens=True, return_attention_mask=True, return_tensors="pt",
    )  # fmt: skip
    with torch.no_grad():
        hidden = model(words.input_ids, words.attention_mask).last_hidden_state
    counts = words.attention_mask.gt(0).sum(dim=1)
    pairs = zip(hidden, counts, strict=True)
    return torch.stack([torch.cat([h[:n], h.new_zeros(LENGTH - n, UMT5_WIDTH)]) for h, n in pairs])


def test_umt5_is_run_as_by_hand(umt5: Path) -> None:
    encoder = build_text_encoder(umt5_config(umt5))
    rows, pooled = encoder.encode(CAPTIONS)
    assert (encoder.length, encoder.width, encoder.pooled_width) == (LENGTH, UMT5_WIDTH, 0)
    assert widths_of(umt5_config(umt5))[0] == UMT5_WIDTH
    clean = [*CAPTIONS[:2], "a red circle & a green square", *CAPTIONS[3:]]
    want = by_hand(umt5, clean)
    assert pooled.shape == (5, 0) and rows.dtype == torch.float32 and not rows.requires_grad
    torch.testing.assert_close(rows, want, atol=1e-6, rtol=0)
    # Three words and the end; the end alone; seven and the end; cut; an unknown word and the end.
    assert (rows != 0).any(-1).sum(1).tolist() == [4, 1, 8, LENGTH, 2]
    assert float(rows.abs().max()) > 0.1
    # With the end, nine tokens fit; a caption is measured as it is encoded.
    assert not encoder.cuts("a\t" * (LENGTH - 1)) and encoder.cuts("a\t" * LENGTH)
    # Pad tokens are masked in the encoder.
    longer = TextEncoderConfig("umt5", str(umt5), text_length=2 * LENGTH)
    long = build_text_encoder(longer).encode(CAPTIONS[:1])[0]
    torch.testing.assert_close(long[:, :LENGTH], rows[:1], atol=1e-6, rtol=0)


def test_umt5_equals_diffusers(umt5: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wan = pytest.importorskip("diffusers.pipelines.wan.pipeline_wan")
    monkeypatch.setattr(wan, "is_ftfy_available", lambda: False)
    tokenizer, model = umt5_models(umt5)
    parts = SimpleNamespace(tokenizer=tokenizer, text_encoder=model)
    with torch.no_grad():
        want = wan.WanPipeline._get_t5_prompt_embeds(
            parts, CAPTIONS, max_sequence_length=LENGTH, device=torch.device("cpu")
        )
    rows, _ = build_text_encoder(umt5_config(umt5)).encode(CAPTIONS)
    torch.testing.assert_close(rows, want, atol=1e-6, rtol=0)
    own = shutil.copytree(umt5, tmp_path / "umt5")
    shutil.copytree(umt5.parent / "tokenizer", own, dirs_exist_ok=True)
    (tmp_path / "tokenizer").mkdir()
    # A tokenizer beside the weights goes first.
    assert torch.equal(build_text_encoder(umt5_config(own)).encode(CAPTIONS)[0], rows)


def test_umt5_from_a_manifest_and_folders_of_no_use(umt5: Path, tmp_path: Path) -> None:
    made = build_text_encoder(umt5_config(umt5))
    manifest = json.loads(json.dumps({"text_encoder": made.identity}))
    again = text_encoder_from_manifest(manifest, str(umt5))
    assert torch.equal(made.encode(CAPTIONS)[0], again.encode(CAPTIONS)[0])
    with pytest.raises(ConfigError, match=r"`--clip-path` \(/c\) has an effect only with"):
        text_encoder_from_manifest(manifest, str(umt5), "/c")
    with pytest.raises(ConfigError, match=r"`--t5-path` is missing, which `--text-enc"):
        text_encoder_from_manifest(manifest)
    manifest["text_encoder"]["umt5"]["d_ff"] = 64
    changed = r"the models of `--t5-path` \(\S+\): `d_ff` was 64, but is 32; give the fol"
    with pytest.raises(DataError, match=changed):
        text_encoder_from_manifest(manifest, str(umt5))
    other = shutil.copytree(umt5, tmp_path / "text_encoder")
    with pytest.raises(ConfigError, match=r"`--t5-path` .* no model and tokenizer that can be"):
        build_text_encoder(umt5_config(other))
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "model_type": "t5"}))
    with pytest.raises(ConfigError, match=r"a model of type t5, but must hold one of type umt5;"):
        build_text_encoder(umt5_config(other))


def test_clips_are_preprocessed_without_pooled_vectors(umt5: Path, tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    for i, picture in enumerate(pictures(2)):
        Image.fromarray(picture).save(tmp_path / "clips" / f"{i}.png")
        (tmp_path / "clips" / f"{i}.txt").write_text("a red square")
    words = (
        f"--input {tmp_path / 'clips'} --output {tmp_path / 'out'} --codec-spatial 4 "
        f"--codec-channels 24 --text-encoder umt5 --t5-path {umt5} --text-length {LENGTH}"
    ).split()
    assert main([*words, "--buckets", PLAN.as_json()]) == 0
    videos = ShardedVideos(tmp_path / "out")
    assert (videos.manifest["text_width"], videos.manifest["pooled_width"]) == (UMT5_WIDTH, 0)
    encoder = text_encoder_from_manifest(videos.manifest, str(umt5))
    want = encoder.encode(["a red square", ""])[0]
    batch = collate([videos[0], videos[1]], patch=2, multiple=1)
    assert batch.pooled.shape == (2, 0)
    torch.testing.assert_close(batch.text, want[:1].expand(2, -1, -1), atol=1e-6, rtol=0)
    null, pooled = videos.null_text
    assert pooled.shape == (0,)
    torch.testing.assert_close(null, want[1], atol=1e-6, rtol=0)
    # Sampling from a run on these clips finds the encoder where it was.
    assert videos.manifest["folders"] == {"t5_path": str(umt5.resolve())}
    run = RunConfig.from_dict({"video": {"video_data_path": [str(tmp_path / "out")]}}, SECTIONS)
    source = source_of(run)
    source.check_text_encoder()
    assert torch.equal(source.text_encoder().encode([""])[0][0], want[1])
    moved = tmp_path / "moved"
    shutil.copytree(umt5, moved)
    manifest = {**videos.manifest, "folders": {"t5_path": str(tmp_path / "gone")}}
    assert folder_of_model(manifest, "t5_path", None) is None
    assert folder_of_model(videos.manifest, "t5_path", str(moved)) == str(moved)


def test_the_widths_of_encoders_are_known_without_their_weights(tmp_path: Path) -> None:
    """The settings of CLIP's text model may lie in those of the whole of CLIP."""
    paths = [tmp_path / "t5", tmp_path / "clip"]
    contents = ['{"d_model": 96}', '{"text_config": {"hidden_size": 32}}']
    for path, content in zip(paths, contents, strict=True):
        path.mkdir()
        (path / "config.json").write_text(content)
    both = TextEncoderConfig("t5-clip", *map(str, paths))
    assert widths_of(both) == (96, 32)
    assert widths_of(TextEncoderConfig(text_width=7, pooled_width=5)) == (7, 5)
    (paths[0] / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ConfigError, match="whose `d_model` is None, but must be the width of the"):
        widths_of(both)


def test_both_folders_of_an_encoder_are_checked_before_a_run(tmp_path: Path) -> None:
    paths = [tmp_path / "t5", tmp_path / "clip"]
    checks = encoder_checks(TextEncoderConfig("t5-clip", *map(str, paths)))
    for check, name in zip(checks, ("--t5-path", "--clip-path"), strict=True):
        with pytest.raises(
            ConfigError, match=rf"`{name}` \(.*{name[2:-5]}\) must be a local folder"
        ):
            check()
    assert encoder_checks(HASHED) == []
