"""Weights that are stored with few bits are read as the values that they stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.config import read_model
from megatron_ext.text.convert.quantization import Quantization, read_quantization
from megatron_ext.text.convert.reading import WeightFolder
from tests.text.convert.models import SIZES
from tests.text.convert.stored_models import (
    Tensors,
    cases,
    compressed,
    fp8,
    mxfp4,
    packed,
    random_scales,
)

CASES = cases()


def folder_of(folder: Path, tensors: Tensors, entry: Any) -> WeightFolder:
    content = {"model_type": "llama", **SIZES, "quantization_config": entry}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return WeightFolder(read_model(folder))


@pytest.mark.parametrize("case", CASES)
def test_slices_are_those_of_the_plain_weight(case: str, tmp_path: Path) -> None:
    """Slices begin within blocks, skip rows, and have more rows than are converted at a time."""
    tensors, name, truth, entry = CASES[case]
    *lead, rows, columns = truth.shape
    with folder_of(tmp_path, tensors, entry) as source:
        assert source.names == {name}
        assert source.shapes() == {name: tuple(truth.shape)}
        for own in (slice(0, rows), slice(7, rows - 1), slice(3, rows - 3, 4)):
            for other in (slice(0, columns), slice(5, columns - 2), slice(2, columns, 3)):
                index = (*(1 for _ in lead), own, other)
                want = truth[index]
                for transposed in (False, True):
                    for dtype in (torch.float32, torch.bfloat16):
                        target = torch.empty(want.t().shape if transposed else want.shape).to(dtype)
                        source.copy(name, index, target, transposed=transposed)
                        assert torch.equal(target.t() if transposed else target, want.to(dtype))
        assert torch.equal(source.whole(name), truth.bfloat16())


def test_scales_of_activations_are_named(tmp_path: Path) -> None:
    tensors = {
        "m.weight": fp8(16, 16),
        "m.weight_scale": torch.tensor(0.5),
        "m.input_scale": torch.tensor(0.1),
        "a.k_scale": torch.tensor(0.1),
    }
    entry = {"quant_method": "fp8", "activation_scheme": "static"}
    with folder_of(tmp_path, tensors, entry) as source:
        assert source.names == {"m.weight"}
        (note,) = source.notes()
    assert "holds 2 tensors for quantized activations (`input_scale`, `k_scale`), which" in note
    assert read_model(tmp_path).ignored == ("quantization_config.activation_scheme",)


BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 16]}
EXPERTS = mxfp4(2, rows=8, columns=64)[0]
WORDS, _, OF_WORDS = packed(4, 16, symmetric=True)
WEIGHT = {"m.weight": fp8(32, 32), "m.weight_scale_inv": random_scales(2, 2)}
OF_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
BAD: dict[str, tuple[Tensors, Any, str]] = {
    "blocks without scales": (
        {"m.w_blocks": EXPERTS["m.w_blocks"]}, {"quant_method": "mxfp4"},
        "holds `m.w_blocks` but not `m.w_scales`, without which it cannot be read"),
    "scales without blocks": (
        {"m.w_scales": EXPERTS["m.w_scales"]}, {"quant_method": "mxfp4"},
        "holds `m.w_scales` without a quantized `m.w`, which is missing"),
    "truncated blocks": (
        {**EXPERTS, "m.w_blocks": EXPERTS["m.w_blocks"][:, :, :1].contiguous()},
        {"quant_method": "mxfp4"}, "with shape [2, 8, 2], but `m.w_blocks` implies [2, 8, 1]"),
    "half blocks": (
        {**EXPERTS, "m.w_blocks": EXPERTS["m.w_blocks"][..., :8].contiguous()},
        {"quant_method": "mxfp4"}, "which must be U8 [..., rows, blocks, 16]"),
    "blocks of another dtype": (
        {**EXPERTS, "m.w_blocks": EXPERTS["m.w_blocks"].int()}, {"quant_method": "mxfp4"},
        "as I32 [2, 8, 2, 16], which must be U8"),
    "exponents of another dtype": (
        {**EXPERTS, "m.w_scales": EXPERTS["m.w_scales"].float()}, {"quant_method": "mxfp4"},
        "holds `m.w_scales` as float32, but it must be one of U8, F8_E8M0"),
    "plain and quantized": (
        {**EXPERTS, "m.w": torch.ones(2, 64, 8)}, {"quant_method": "mxfp4"},
        "holds `m.w` both plain and quantized"),
    "fp8 without scales": (
        {"m.weight": fp8(32, 32)}, BLOCKS,
        "as F8_E4M3, but not its scales `m.weight_scale_inv` or `m.weight_scale`"),
    "scales of a plain weight": (
        {**WEIGHT, "m.weight": torch.ones(32, 32)}, BLOCKS,
        "holds `m.weight_scale_inv` without a quantized `m.weight`, which is float32"),
    "scales of another shape": (
        {**WEIGHT, "m.weight_scale_inv": random_scales(3, 2)}, BLOCKS,
        "with shape [3, 2], which does not fit `m.weight`, [32, 32] in blocks of 16 × 16"),
    "scales of another dtype": (
        {**WEIGHT, "m.weight_scale_inv": torch.ones(2, 2).int()}, BLOCKS,
        "holds `m.weight_scale_inv` as I32, but it must be one of float32, bfloat16, float16"),
    "a listed module": (
        WEIGHT, {**BLOCKS, "modules_to_not_convert": ["lm_head", "m"]},
        "holds `m.weight` quantized, although `modules_to_not_convert` of"),
    "an ignored module": (
        {"m.weight": fp8(32, 32), "m.weight_scale": random_scales(32, 1)},
        {**compressed(OF_ROWS), "ignore": ["re:.*head", "re:m$"]},
        "holds `m.weight` quantized, although `ignore` of"),
    "words of another length": (
        {**WORDS, "m.weight_packed": WORDS["m.weight_packed"][:, :5].contiguous()}, OF_WORDS,
        "as I32 [20, 5], which does not fit `m.weight_shape`, [20, 48], in 4 bits"),
    "words without their shape": (
        {x: y for x, y in WORDS.items() if "shape" not in x}, OF_WORDS,
        "holds `m.weight_packed` but not `m.weight_shape`"),
    "words without zero points": (
        WORDS, packed(4, 16, symmetric=False)[2], "but not `m.weight_zero_point`, without which"),
    "words of no group": (
        WORDS, compressed(OF_ROWS), "names its module"),
    "rows that share a scale": (
        {**WORDS, "m.weight_scale": random_scales(10, 3)}, OF_WORDS,
        "holds `m.weight_scale` with shape [10, 3], but each row of `m.weight_packed` must have"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_tensors_that_do_not_fit_each_other_are_refused(case: str, tmp_path: Path) -> None:
    tensors, entry, said = BAD[case]
    with pytest.raises(CheckpointError) as caught, folder_of(tmp_path, tensors, entry):
        pass
    assert said in str(caught.value), str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fp8_needs_an_entry_that_says_how_to_read_it(tmp_path: Path) -> None:
    said = "config.json has no `quantization_config`"
    with folder_of(tmp_path, WEIGHT, None) as source, pytest.raises(CheckpointError, match=said):
        source.check_kind("m.weight")


ENTRIES: list[tuple[Any, str]] = [
    ("fp8", "`quantization_config` 'fp8', which must be an object"),
    ({"bits": 4}, "`quantization_config.quant_method` None, which cannot be read: it can read fp8"),
    ({"quant_method": "awq", "bits": 4}, "AWQ's weights of 4 bits were rounded for inference; use"),
    ({"quant_method": "gptq"}, "GPTQ's weights were rounded for inference; use the folder of the"),
    ({"quant_method": "bitsandbytes"}, "save the result of transformers' `model.dequantize()`"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "`quantization_config.quant_algo` 'NVF"),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, "`quantization_config.expert_dtype` 'fp4'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "[128], which must be two numbers"),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "[128, 0], which must be two numbers"),
    ({"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}, "must be a list of names"),
    ({"quant_method": "compressed-tensors"}, "`quantization_config.config_groups` None, which"),
    (compressed({"num_bits": 4}), "group_0.weights.num_bits` 4, which must be 8"),
    (compressed({"num_bits": 3}, "pack-quantized"), "num_bits` 3, which must be 4 or 8"),
    (compressed({"num_bits": 4}, "nvfp4-pack-quantized"), "group_0.format` 'nvfp4-pack-quan"),
    (compressed({"num_bits": 4, "actorder": "group"}, "pack-quantized"), "actorder` 'group'"),
    ({**compressed({}), "config_groups": {"a": 1}}, "config_groups.a.weights` None, which"),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "said"), ENTRIES)
def test_entries_that_cannot_be_read_are_refused(entry: Any, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_quantization({"quantization_config": entry}, Path("config.json"))
    assert said in str(caught.value), str(caught.value)
    assert str(caught.value).startswith("config.json says `")


def test_modules_are_listed_by_name_beginning_end_or_pattern() -> None:
    def skips(method: str, entry: str, module: str) -> bool:
        return Quantization(method, Path(), skipped=(entry,)).skips(module)

    experts = "model.layers.11.mlp.experts"
    for entry, want in (
        ("lm_head", False), ("experts", True), ("model.layers.11", True), ("model.layers.1", False),
        ("model.layers.*.mlp", True), ("model.layers.*.self_attn", False), ("(", False),
    ):  # fmt: skip
        assert skips("fp8", entry, experts) is want, entry
    for entry, want in ((experts, True), ("experts", False), ("re:.*experts$", True)):
        assert skips("compressed-tensors", entry, experts) is want, entry
    entry = compressed({"num_bits": 8})
    entry["config_groups"]["group_1"] = {"targets": ["re:.*experts.*"], "weights": {"num_bits": 8}}
    given = read_quantization({"quantization_config": entry}, Path())
    assert given.group_of(f"{experts}.0.up_proj") is given.groups[1]
    assert given.group_of("model.layers.0.self_attn.q_proj") is given.groups[0]
    # Some multimodal models have the entry in the part for the text model.
    assert read_quantization({"text_config": {"quantization_config": entry}}, Path()) == given


def test_a_plain_folder_is_read_as_it_is(tmp_path: Path) -> None:
    tensors = {"m.w_scales": torch.ones(3), "m.weight": torch.ones(2, 2)}
    with folder_of(tmp_path, tensors, None) as source:
        assert source.names == tensors.keys()
        assert not source.quantized and not source.notes()
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()
