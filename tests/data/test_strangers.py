"""Data, tokenizers, encoders and settings of strangers run no code and lead out of no folder."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_ext.checkpoint.safetensors_files import TensorFolder
from megatron_ext.errors import CheckpointError, ConfigError, DataError
from megatron_ext.text.preprocess.parts import PartMarker, marker_path, read_marker
from megatron_ext.text.tokenizers.huggingface import load_pretrained
from megatron_ext.video.config.encoding import CodecConfig
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.manifest import read_manifest
from megatron_ext.video.data.shards import write_json
from megatron_ext.video.data.text_encoders import load_model
from tests.checkpoint.test_unpickling import Trap
from tests.text.sft.tiny import tokenizer
from tests.text.tiny import hf_folder
from tests.training_runs import TINY, config_of, mock_data
from tests.video.data.making import write_umt5, write_vaes
from tests.video.data.test_shards import MANIFEST


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


def _with_code(folder: Path, marker: Path) -> Path:
    """Write a tokenizer whose class lies in its folder, as on a hub."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((hf_folder() / "tokenizer.json").read_bytes())
    places = {"AutoTokenizer": ["strange.Strange", None]}
    config = json.dumps({"tokenizer_class": "Strange", "auto_map": places})
    (folder / "tokenizer_config.json").write_text(config)
    (folder / "strange.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Strange(PreTrainedTokenizerFast):\n    pass\n"
    )
    return folder


def test_code_of_a_tokenizer_runs_by_trust_remote_code_alone(tmp_path: Path, marker: Path) -> None:
    pytest.importorskip("transformers")
    folder = _with_code(tmp_path / "tokenizer", marker)
    with pytest.raises(DataError, match="code of its own, which is not run; give `--trust-remote"):
        load_pretrained(folder, trust_remote_code=False)
    assert not marker.exists()
    load_pretrained(folder, trust_remote_code=True)
    assert marker.exists()


def test_a_chat_template_reaches_nothing_of_python() -> None:
    strange = tokenizer("chatml", template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(Exception, match="unsafe"):
        strange.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)


def test_a_text_encoder_neither_unpickles_nor_asks(tmp_path: Path, marker: Path) -> None:
    """Without an answer transformers would ask the terminal, and wait for it."""
    pytest.importorskip("transformers")
    folder = write_umt5(tmp_path, tokenizer="words")
    strange = _with_code(tmp_path / "tokenizer", marker)
    arguments = ("umt5", "UMT5EncoderModel", "--t5-path", str(folder), ["umt5"])
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_model(*arguments)
    strange.rename(tmp_path / "strange")
    (tmp_path / "words").rename(strange)
    weights = load_file(folder / "model.safetensors")
    torch.save({**weights, "trap": Trap(marker)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="`--t5-path` .* holds no model and tokenizer that can"):
        load_model(*arguments)
    assert not marker.exists()


def test_a_codec_does_not_unpickle(tmp_path: Path, marker: Path) -> None:
    folder = write_vaes(tmp_path)["AutoencoderKLWan"]
    weights = folder / "diffusion_pytorch_model.safetensors"
    content = {**load_file(weights), "trap": Trap(marker)}
    weights.unlink()
    torch.save(content, weights.with_suffix(".bin"))
    with pytest.raises(ConfigError, match="holds an AutoencoderKLWan whose weights cannot be"):
        build_codec(CodecConfig(str(folder)), seed=1)
    assert not marker.exists()


def test_settings_in_yaml_make_no_objects(tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"seed: !!python/object/apply:builtins.open ['{marker}', 'w']\n")
    with pytest.raises(ConfigError, match=r"`--config` \(.*\) cannot be read"):
        config_of([*TINY, *mock_data(), "--config", str(path)])
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/shard", "a/b"])
def test_the_manifest_of_a_video_data_set_names_its_files(name: str, tmp_path: Path) -> None:
    for changed in ({"references": [name]}, {"shards": [{"name": name, "clips": 1}]}):
        write_json(tmp_path / "manifest.json", {**MANIFEST, **changed})
        with pytest.raises(DataError, match=f"names {name}, which leads out of the folder"):
            read_manifest(tmp_path)


def test_a_marker_of_a_part_names_files_of_its_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"1234")
    folder = tmp_path / "parts"
    folder.mkdir()
    counts = {"lines": 1, "documents": 1, "tokens": 1, "rejected": 0, "skipped": 0}
    about = {"sizes": {}, "host": "a", "seconds": 1.0, "ended": 2.0}
    done = PartMarker("p000000.1", "key", **counts, **about)  # type: ignore[arg-type]
    marker_path(folder, "key", 0).write_text(json.dumps(dataclasses.asdict(done)))
    assert read_marker(folder, "key", 0) == done
    assert read_marker(folder, "other", 0) is None
    for changed in ({"stem": "../secret"}, {"sizes": {"../secret.bin": 4}}):
        strange = dataclasses.replace(done, **changed)  # type: ignore[arg-type]
        marker_path(folder, "key", 0).write_text(json.dumps(dataclasses.asdict(strange)))
        assert read_marker(folder, "key", 0) is None


def test_the_index_of_safetensors_names_files_of_its_folder(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    index = {"weight_map": {"a": os.path.join("..", "secret.safetensors")}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names \.\./secret.safetensors, which does not lie"):
        TensorFolder(inside)
