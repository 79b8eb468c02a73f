"""A folder's tensors are accounted for one by one, and the first layer that differs is named."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.programs import convert_checkpoint
from megatron_ext.text.convert import huggingface, verifying
from megatron_ext.text.convert.verifying import Verification, Verify, verify_folder
from tests.text.convert.models import imported, in_child, make
from tests.text.convert.stored_models import Tensors, fp8, in_mxfp4, store_as


def verified(source: Path, **options: Any) -> Verification:
    order = Verify(source, **options)
    found: Verification = in_child(lambda: verify_folder(order), source.with_suffix(".result"))
    return found


def changed(source: Path, change: Callable[[Tensors], Any]) -> Path:
    path = source / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return source


def statuses(found: Verification) -> dict[str, str]:
    return {row.name: row.status for row in found.rows if row.status != "used"}


def test_each_tensor_is_accounted_for(tmp_path: Path) -> None:
    source = make("llama 3.1 tied", tmp_path / "hf")
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"

    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[frequencies] = torch.ones(8)

    found = verified(changed(source, add))
    assert statuses(found) == {"lm_head.weight": "tied", frequencies: "skipped"}
    assert len(found.rows) == len(load_file(source / "model.safetensors"))
    assert found.is_right and found.comparison is not None and found.comparison.first is None
    assert list(found.comparison.places) == ["embedding", "layer 0", "layer 1, norm", "logits"]
    assert found.comparison.logits < 1e-5
    lines = "\n".join(found.lines())
    assert "  tied        1\n    lm_head.weight: a copy of `model.embed_tokens.weight`" in lines
    assert "logits differ from those of transformers by " in lines

    def spoil(tensors: Tensors) -> None:
        tensors["lm_head.weight"] += 1
        tensors |= {"model.layers.7.extra": torch.ones(2), "extra.weight": torch.ones(2)}
        tensors["model.norm.weight"] = torch.ones(3)
        del tensors["model.layers.1.mlp.up_proj.weight"]

    found = verified(changed(source, spoil))
    assert statuses(found) == {
        frequencies: "skipped",
        "extra.weight": "unexpected",
        "lm_head.weight": "unexpected",
        "model.layers.1.mlp.up_proj.weight": "missing",
        "model.layers.7.extra": "unexpected",
        "model.norm.weight": "unreadable",
    }
    assert not found.is_right and found.comparison is None
    lines = "\n".join(found.lines())
    assert "model.norm.weight: its shape is [3], not [64]" in lines
    assert "> nothing was computed, since the tensors are not those of the model" in lines


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_checkpoint_is_compared_tensor_by_tensor(
    dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that the import rounded are the same; a weight that differs shows in its layer."""
    source = make("qwen3", tmp_path / "hf")
    ours = tmp_path / "ours"
    imported(source, ours, dtype=dtype)
    if dtype is None:
        found = verified(source, load=ours)
        assert found.is_right and found.comparison is not None, list(found.lines())
    else:
        # The folder's own float32 gives other logits than a checkpoint in bfloat16.
        found = verified(source, load=ours, logits=False)
        assert found.is_right and found.comparison is None
    name = "model.layers.1.mlp.down_proj.weight"
    changed(source, lambda tensors: tensors[name].add_(0.5))
    found = verified(source, load=ours)
    assert statuses(found) == {name: "differs"}
    assert "by up to " in next(row.reason for row in found.rows if row.name == name)
    assert found.comparison is not None and not found.is_right
    assert dtype or found.comparison.first == "layer 1, norm"
    assert f"after: {found.comparison.first}" in "\n".join(found.lines())


def test_exit_codes_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make("gpt2", tmp_path / "hf")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    orders: list[Verify] = []
    row = verifying.TensorRow("a", "used")

    def answer(order: Verify) -> Verification:
        orders.append(order)
        status = "used" if order.load is None else "differs"
        return Verification(order.source, [row, verifying.TensorRow("b", status, "why")])

    monkeypatch.setattr(convert_checkpoint, "verify_folder", answer)
    report = tmp_path / "report.json"
    main = convert_checkpoint.main
    assert main(["verify", str(source), "--json", str(report)]) == 0
    assert json.loads(report.read_text())["right"] is True
    assert main(["verify", str(source), "--load", "x", "--ckpt-step", "3", "--no-logits"]) == 1
    assert orders[1] == Verify(source, Path("x"), 3, logits=False)
    assert "    b: why" in capsys.readouterr().out
    assert main(["verify", str(source), "--json", "/proc/x/y"]) == 2
    assert "`--json` (/proc/x/y) cannot be written" in capsys.readouterr().err


def test_logits_that_cannot_be_compared_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make("gpt2", tmp_path / "hf")

    def lacks(model: Any) -> Any:
        raise ImportError("no package\nof that name")

    monkeypatch.setattr(huggingface, "reference_model", lacks)
    found = verified(source)
    assert found.is_right and found.comparison is None
    assert found.notes[-1].endswith("transformers cannot load the folder (no package of that name)")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1))
    assert "two models in float32 take 0.0 GiB, and 0.0 GiB of" in verified(source).notes[-1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_quantized_folders_are_verified(method: str, tmp_path: Path) -> None:
    """Every stored tensor has a row, and transformers computes with the same values."""
    if method == "mxfp4":
        source = in_mxfp4(make("gpt_oss", tmp_path / "hf", changed={"intermediate_size": 64}))
    else:

        def change(tensors: Tensors) -> Tensors:
            for name in [name for name in tensors if "proj" in name]:
                tensors[f"{name}_scale_inv"] = torch.full((4, 4), 0.001)
                tensors[name] = fp8(*tensors[name].shape)
            tensors["model.layers.0.self_attn.q_proj.input_scale"] = torch.tensor(1.0)
            return tensors

        entry = {"quant_method": "fp8", "weight_block_size": [16, 16]}
        sizes = {"intermediate_size": 64, "num_key_value_heads": 4}
        source = store_as(make("llama", tmp_path / "hf", changed=sizes), change, entry)
    found = verified(source)
    assert found.is_right and found.comparison is not None, list(found.lines())
    assert {row.name for row in found.rows} == {*load_file(source / "model.safetensors")}
    skipped = {"model.layers.0.self_attn.q_proj.input_scale": "skipped"} if method == "fp8" else {}
    assert statuses(found) == skipped


@pytest.mark.slow
def test_tensors_are_accounted_for_in_little_memory(tmp_path: Path) -> None:
    source = make("llama", tmp_path / "hf", changed={"hidden_size": 512, "intermediate_size": 8192})

    def measured() -> int:
        before = psutil.Process().memory_full_info().uss
        verify_folder(Verify(source, logits=False))
        return int(psutil.Process().memory_full_info().uss - before)

    size = (source / "model.safetensors").stat().st_size
    assert in_child(measured, tmp_path / "measured") < size / 2
