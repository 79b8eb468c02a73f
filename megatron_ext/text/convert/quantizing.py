"""Stores weights in fp8 or MXFP4 for inference, in the form that transformers and vLLM read.

fp8 has a scale for each block of a matrix, as DeepSeek publishes it. MXFP4 is for experts that are
stacked in one tensor, as OpenAI publishes gpt-oss. Weights that were read from such a folder and
have not changed become the same values again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.family import Gpt
from megatron_ext.text.convert.quantization import MXFP4, entry_of, read_quantization
from megatron_ext.text.convert.stored import FP4, MX_BLOCK, powers_of_two
from megatron_ext.text.convert.table import Run, Table, parse

FP8 = "fp8"
METHODS = (FP8, MXFP4)
"""The values of `quant_method` that can be written."""
USUAL_BLOCK = (128, 128)
LARGEST = 448.0
"""The largest value of fp8 (e4m3)."""
_ROWS = 128
_LIST_OF_MXFP4 = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]
"""The modules that OpenAI's config.json of gpt-oss lists as not quantized."""


@dataclass(frozen=True)
class Quantizer:
    """Turns the weights of linear layers into the tensors of a quantized folder.

    Attributes:
        method: the format to write.
        block: rows and columns of a block of fp8 that share a scale.
        powers: whether the scales of fp8 are powers of two.
    """

    method: str
    block: tuple[int, int] = USUAL_BLOCK
    powers: bool = False

    @classmethod
    def of(cls, method: str, like: Mapping[str, Any] | None) -> Quantizer:
        """Return the quantizer for a format.

        ``like`` is the config.json of the model from which the weights come; if it was stored in
        fp8, its blocks and its kind of scales are kept.
        """
        entry = entry_of(like or {}) or {}
        if method != FP8 or entry.get("quant_method") != FP8:
            return cls(method)
        given = read_quantization(like or {}, Path("config.json"))
        return cls(method, given.block or USUAL_BLOCK, entry.get("scale_fmt") == "ue8m0")

    def error(self, gpt: Gpt, table: Table) -> tuple[str, str] | None:
        """Return why a model's weights cannot be written in this format, and what to do instead.

        Return None if they can.
        """
        parts = [
            part
            for name, parts in table.layer.items()
            if is_linear(f"decoder.layers.0.{name}")
            for part in parts
        ]
        has_stacks = any(part.stacked and part.transposed for part in parts)
        if self.method == FP8:
            if not any(part.stacked or part.transposed for part in parts):
                return None
            other = ", or give mxfp4" if has_stacks else ""
            return (
                "stores a matrix `[out, in]` for each linear layer, but this model's files hold "
                "some of them in another form",
                f"leave it out{other}",
            )
        if not has_stacks:
            return "is for stacked experts, which gpt_oss alone has", "give fp8"
        width = gpt.moe.moe_ffn_hidden_size or gpt.model.ffn_hidden_size or 0
        for flag, size in (("--hidden-size", gpt.model.hidden_size or 0),
                           ("--moe-ffn-hidden-size", width)):  # fmt: skip
            if size % MX_BLOCK:
                return f"stores {MX_BLOCK} values together, but `{flag}` is {size}", "leave it out"
        return None

    def quantizes(self, name: str, runs: Sequence[Run]) -> bool:
        """Tell whether our parameter ``name``, made of these runs, is stored quantized."""
        is_stacked = all(run.expert is not None and run.transposed for run in runs)
        return is_linear(name) and is_stacked == (self.method == MXFP4)

    def described(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors that store a weight, by name, on the meta device."""
        if self.method == FP8:
            rows, columns = (-(-s // b) for s, b in zip(weight.shape, self.block, strict=True))
            stored = weight.to(torch.float8_e4m3fn)
            return {name: stored, f"{name}_scale_inv": weight.new_empty((rows, columns)).float()}
        *lead, columns, rows = weight.shape
        exponents = weight.new_empty((*lead, rows, columns // MX_BLOCK), dtype=torch.uint8)
        blocks = exponents.new_empty((*exponents.shape, MX_BLOCK // 2))
        return {f"{name}_blocks": blocks, f"{name}_scales": exponents}

    def stored(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors that store a weight, by name.

        Raise a CheckpointError for values that the format does not have.
        """
        described = self.described(name, weight.to("meta"))
        found = {x: torch.empty(like.shape, dtype=like.dtype) for x, like in described.items()}
        first, second = found.values()
        # A check of the whole weight at once would take as much memory as the weight.
        pieces = torch.split(weight.flatten(0, -2), _ROWS)
        if not all(bool(piece.isfinite().all()) for piece in pieces):
            raise CheckpointError(
                f"`{name}` holds values that are not finite, which {self.method} does not have; "
                "export an earlier checkpoint."
            )
        if self.method == FP8:
            height = self.block[0]
            for number, part in enumerate(torch.split(weight, height)):
                own = slice(number * height, number * height + len(part))
                first[own], second[number] = self._in_fp8(part)
            return found
        for expert, matrix in enumerate(weight):
            for start in range(0, matrix.shape[1], _ROWS):
                own = slice(start, start + _ROWS)
                first[expert, own], second[expert, own] = in_mxfp4(matrix[:, own].t())
        return found

    def _in_fp8(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return a row of blocks in fp8, and the scale of each block, ``[blocks]``."""
        width = self.block[1]
        blocks = torch.unflatten(pad(rows, (0, -rows.shape[1] % width)), 1, (-1, width))
        largest = blocks.abs().amax((0, 2)).float()
        scales = torch.where(largest > 0, largest / LARGEST, 1.0)
        if self.powers:
            scales = torch.exp2(scales.log2().ceil())
        stored = (blocks.float() / scales[:, None]).clamp(-LARGEST, LARGEST)
        stored = stored.to(torch.float8_e4m3fn)
        if not self.powers:
            scales = exact_scales(blocks, stored.float(), scales)
        return stored.flatten(1)[:, : rows.shape[1]], scales

    def entry(self, plain: Sequence[str]) -> dict[str, Any]:
        """Return the entry `quantization_config` of config.json.

        ``plain`` names the modules whose matrices are not quantized.
        """
        if self.method == MXFP4:
            return {"quant_method": MXFP4, "modules_to_not_convert": _LIST_OF_MXFP4}
        scales = {"scale_fmt": "ue8m0"} if self.powers else {}
        return {
            "quant_method": FP8,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            "modules_to_not_convert": list(plain),
            **scales,
        }


def is_linear(name: str) -> bool:
    """Tell whether our parameter ``name`` is the matrix of a linear layer in a transformer layer.

    Routers, gates of shared experts and the projection of an MTP depth are none, as in published
    folders.
    """
    own = parse(name)
    if own is None or own.block == "depth":
        return False
    layer, _, kind = own.rest.rpartition(".")
    return kind == "weight" and layer.rpartition(".")[2].startswith("linear_")


def in_mxfp4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks ``[rows, groups, 16]`` and exponents ``[rows, groups]`` of a matrix.

    As in transformers' `quantize_to_mxfp4`, the exponent is the least with which no value is cut
    off, and values halfway between two are rounded away from zero.
    """
    groups = torch.unflatten(rows.float(), 1, (-1, MX_BLOCK))
    largest = groups.abs().amax(2) / FP4[-1]
    # The bits of a float32 above its mantissa are the exponent of a power of two that it reaches.
    exponents = (largest.view(torch.int32) + 0x7FFFFF) >> 23
    scaled = groups.abs() / powers_of_two(exponents - 127)[..., None]
    between = torch.tensor([(low + high) / 2 for low, high in zip(FP4, FP4[1:], strict=False)])
    codes = torch.bucketize(scaled.contiguous(), between, right=True) + 8 * groups.signbit()
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, exponents.to(torch.uint8)


def exact_scales(blocks: Tensor, stored: Tensor, scales: Tensor) -> Tensor:
    """Return scales with which the stored values become exactly those of each block, if there are.

    A weight that was read from fp8 was rounded to its dtype, so the scale that follows from its
    largest value differs a little from the scale that it had. Any scale between the bounds that the
    rounding of each value leaves gives the same values again. A block without such a scale keeps
    the one in ``scales``.

    Args:
        blocks: the values, ``[rows, blocks, columns]``.
        stored: the same divided by ``scales`` and rounded, in float32.
        scales: the scale of each block, ``[blocks]``.
    """
    integers = torch.int32 if blocks.dtype == torch.float32 else torch.int16
    values = blocks.abs().contiguous()
    places = values.view(integers)
    wide = values.double()
    above = (wide + (places + 1).view(values.dtype).double()) / 2
    below = (wide + (places - 1).clamp(min=0).view(values.dtype).double()) / 2
    sizes = stored.abs().double()
    counts = sizes > 0
    most = torch.where(counts, above / sizes, torch.inf).amin((0, 2))
    least = torch.where(counts, below / sizes, 0.0).amax((0, 2))
    middle = torch.where(least <= most, (least + most) / 2, scales.double()).float()
    same = ((stored * middle[:, None]).to(blocks.dtype) == blocks).all(2).all(0)
    return torch.where(same & middle.isfinite(), middle, scales)
