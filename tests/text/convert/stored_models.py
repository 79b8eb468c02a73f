"""Tiny folders whose weights are stored with few bits, and the plain values of those weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

E4M3 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]
NO_QUANTIZER: Any = None
LINEAR = {"targets": ["Linear"]}


def random_codes(shape: tuple[int, ...], top: int) -> Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(sum(shape)))


def random_scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    seeded = torch.Generator().manual_seed(1 + sum(shape))
    return (torch.rand(shape, generator=seeded) * 0.02 + 0.001).to(dtype)


def fp8(*shape: int) -> Tensor:
    seeded = torch.Generator().manual_seed(2 + sum(shape))
    return (torch.randn(shape, generator=seeded) * 100).clamp(-448, 448).to(E4M3)


def by_transformers(weight: Tensor, scales: Tensor) -> Tensor:
    """Return what transformers makes of an fp8 weight and the scales of its blocks."""
    return Fp8Dequantize(NO_QUANTIZER)._dequantize_one(weight, scales, torch.float32)


def mxfp4(*lead: int, rows: int, columns: int) -> tuple[Tensors, Tensor]:
    """Return blocks and exponents of a weight, and what transformers makes of them."""
    codes = random_codes((*lead, rows, columns // 32, 16), 256).to(torch.uint8)
    exponents = (random_codes((*lead, rows, columns // 32), 12) + 118).to(torch.uint8)
    return (
        {"m.w_blocks": codes, "m.w_scales": exponents},
        convert_moe_packed_tensors(codes, exponents, dtype=torch.float32),
    )


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes without sign along the last axis, in plain Python arithmetic."""
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * place) for place, code in enumerate(row))
        words = -(-len(row) * bits // 32)
        rows.append([number >> (32 * word) & 0xFFFFFFFF for word in range(words)])
    values = torch.tensor(rows, dtype=torch.int64)
    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)


def packed(bits: int, group: int, *, symmetric: bool) -> tuple[Tensors, Tensor, dict[str, Any]]:
    """Return an integer weight of compressed-tensors, its plain values, and the entry."""
    shape = (20, 48)
    codes = random_codes(shape, 1 << bits)
    scales = random_scales(20, 48 // group, dtype=torch.bfloat16)
    tensors = {
        "m.weight_packed": pack(codes, bits),
        "m.weight_scale": scales,
        "m.weight_shape": torch.tensor(shape),
    }
    zeros = torch.full((20, 48 // group), 1 << bits - 1)
    if not symmetric:
        zeros = random_codes((20, 48 // group), 1 << bits)
        tensors["m.weight_zero_point"] = pack(zeros.t(), bits).t().contiguous()
    spread = scales.repeat_interleave(group, 1)
    truth = (codes - zeros.repeat_interleave(group, 1)).bfloat16() * spread
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group}
    entry = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {**LINEAR, "weights": weights}},
    }
    return tensors, truth.float(), entry


def compressed(weights: dict[str, Any], kind: str = "float-quantized") -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {**LINEAR, "weights": weights}},
    }


def cases() -> dict[str, tuple[Tensors, str, Tensor, dict[str, Any]]]:
    """Return, by format, the tensors of a weight, its name, its plain values and the entry."""
    weight = fp8(300, 48)
    rows = random_scales(300, 1)
    grid = random_scales(19, 3)
    narrow = random_scales(300, 6)
    bytes_ = (random_codes((300, 6), 12) + 118).to(torch.uint8)
    stack = fp8(3, 32, 48)
    blocks = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    plain = {"quant_method": "fp8", "activation_scheme": "static"}
    of_row = {"num_bits": 8, "type": "float", "strategy": "channel"}
    codes = random_codes((300, 48), 255).sub(127).to(torch.int8)
    points = random_codes((300, 1), 7).to(torch.int8)
    half = rows.bfloat16()
    spread = grid.repeat_interleave(16, 0)[:300].repeat_interleave(16, 1)
    experts, of_experts = mxfp4(3, rows=40, columns=96)
    found: dict[str, tuple[Tensors, str, Tensor, dict[str, Any]]] = {
        "fp8 blocks": ({"m.weight": weight, "m.weight_scale_inv": grid}, "m.weight",
                       weight.float() * spread, blocks),
        "fp8 other blocks": ({"m.weight": weight, "m.weight_scale_inv": narrow}, "m.weight",
                             by_transformers(weight, narrow), blocks),
        "fp8 exponents": ({"m.weight": weight, "m.weight_scale_inv": bytes_}, "m.weight",
                          by_transformers(weight, bytes_), {**blocks, "scale_fmt": "ue8m0"}),
        "fp8 exponents as e8m0": (
            {"m.weight": weight, "m.weight_scale_inv": bytes_.view(torch.float8_e8m0fnu)},
            "m.weight", by_transformers(weight, bytes_), {**blocks, "scale_fmt": "ue8m0"}),
        "fp8 tensor": ({"m.weight": weight, "m.weight_scale": torch.tensor(0.01)}, "m.weight",
                       weight.float() * torch.tensor(0.01), plain),
        "fp8 tensor in a list": ({"m.weight": weight, "m.weight_scale": torch.tensor([0.01])},
                                 "m.weight", weight.float() * torch.tensor(0.01), plain),
        "fp8 rows": ({"m.weight": weight, "m.weight_scale": rows}, "m.weight",
                     weight.float() * rows, {"quant_method": "fbgemm_fp8"}),
        "fp8 rows in a list": ({"m.weight": weight, "m.weight_scale": rows.flatten()}, "m.weight",
                               weight.float() * rows, plain),
        "fp8 stacked": ({"m.w": stack, "m.w_scale_inv": random_scales(3, 2, 3)}, "m.w",
                        by_transformers(stack, random_scales(3, 2, 3)), blocks),
        "compressed rows": ({"m.weight": weight, "m.weight_scale": half}, "m.weight",
                            (weight.bfloat16() * half).float(), compressed(of_row)),
        "compressed blocks": (
            {"m.weight": weight, "m.weight_scale": grid}, "m.weight", weight.float() * spread,
            compressed({**of_row, "strategy": "block", "block_structure": [16, 16]})),
        "compressed int8": (
            {"m.weight": codes, "m.weight_scale": rows, "m.weight_zero_point": points}, "m.weight",
            (codes.float() - points.float()) * rows,
            compressed({**of_row, "type": "int", "symmetric": False}, "int-quantized")),
        "mxfp4": (experts, "m.w", of_experts, {"quant_method": "mxfp4"}),
    }  # fmt: skip
    for bits, group, symmetric in ((4, 16, True), (4, 48, False), (8, 24, True)):
        tensors, truth, entry = packed(bits, group, symmetric=symmetric)
        name = f"packed {bits} {group} {'symmetric' if symmetric else 'asymmetric'}"
        found[name] = (tensors, "m.weight", truth, entry)
    return found


def store_as(folder: Path, change: Callable[[Tensors], Tensors], entry: dict[str, Any]) -> Path:
    """Change the tensors of a folder in place, and put the entry into its config.json."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = entry
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_mxfp4(folder: Path) -> Path:
    """Store the experts of a folder of gpt-oss in MXFP4, and put the plain values in ``plain``."""
    path = folder / "model.safetensors"
    target = folder.with_name("plain")
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    plain: Tensors = {}

    def change(tensors: Tensors) -> Tensors:
        changed = dict(tensors)
        for name, weight in tensors.items():
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, columns, rows = weight.shape
                stored, plain[name] = mxfp4(experts, rows=rows, columns=columns)
                changed |= {f"{name}_{x.rpartition('_')[2]}": y for x, y in stored.items()}
                del changed[name]
        save_file({**tensors, **plain}, target / path.name, metadata={"format": "pt"})
        return changed

    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    return store_as(folder, change, {"quant_method": "mxfp4", "modules_to_not_convert": skipped})
