"""Reads weights that a folder stores with few bits, as the plain values that they stand for.

A weight of 8 bits has a scale for each block of values, for each row, or for all. MXFP4 stores two
values of 4 bits in a byte, and for 32 of them an exponent. compressed-tensors also packs integers
into words of 32 bits. Sources: transformers' ``integrations/finegrained_fp8.py`` and ``mxfp4.py``,
the OCP Microscaling Formats Specification 1.0, and compressed-tensors' ``compressors/``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from megatron_ext.checkpoint.safetensors_files import DTYPES, TensorFolder
from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.quantization import (
    COMPRESSED,
    FP8_METHODS,
    MXFP4,
    PACKED_FORMAT,
    Quantization,
)
from megatron_ext.text.convert.table import Index

FP8 = ("F8_E4M3", "F8_E5M2")
SCALES = ("_scale_inv", "_scale")
"""Suffixes that turn the name of a weight of 8 bits into the name of its scales."""
OF_ACTIVATIONS = (
    "input_scale input_scale_ub activation_scale output_scale k_scale v_scale q_scale kv_scale "
    "input_zero_point k_zero_point v_zero_point"
).split()
"""The last parts of the names of tensors that only inference with quantized activations uses."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values without sign of fp4 (e2m1), by their code of three bits."""
MX_BLOCK = 32
"""How many values of MXFP4 share an exponent."""
_ROWS = 128
"""How many rows are converted at a time, since float32 takes up to eight times the memory."""


@dataclass(frozen=True)
class Stored:
    """A weight that several tensors of a folder hold together.

    ``shape`` is the weight's, as the model has it. ``flipped`` says that the tensors hold its last
    two axes in the other order.
    """

    name: str
    shape: tuple[int, ...]
    flipped: ClassVar[bool] = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors that hold the weight together."""
        raise NotImplementedError

    def values(
        self, folder: TensorFolder, lead: Sequence[int | slice], rows: slice, columns: slice
    ) -> Tensor:
        """Return values in float32, ``[rows, columns]`` in the order of the tensors.

        Args:
            lead: indices of the axes before the last two.
        """
        raise NotImplementedError

    def copy(self, folder: TensorFolder, index: Index, target: Tensor) -> None:
        """Copy the slice ``index`` of the weight to ``target``, which has the slice's shape."""
        *lead, rows, columns = index
        if self.flipped:
            rows, columns, target = columns, rows, target.t()
        assert isinstance(rows, slice)
        assert isinstance(columns, slice)
        for own, some in _pieces(rows, target.shape[0]):
            target[own] = self.values(folder, lead, some, columns)


def _pieces(rows: slice, count: int) -> Iterator[tuple[slice, slice]]:
    """Divide ``count`` rows of a tensor; yield for each piece its rows here, and in the tensor."""
    start = rows.start or 0
    step = rows.step or 1
    for first in range(0, count, _ROWS):
        last = min(first + _ROWS, count) - 1
        yield slice(first, last + 1), slice(start + first * step, start + last * step + 1, step)


@dataclass(frozen=True)
class Scaled(Stored):
    """A weight ``[..., out, in]`` in 8 bits, with one scale for each block of it.

    Attributes:
        scales: name of the scales ``[..., rows of blocks, columns of blocks]``, or of one scale.
        zeros: name of the zero points, of the same shape; None if there are none.
        block: rows and columns of a block; None if all values share one scale.
        rounded: whether the product is rounded to the dtype of the scales, as compressed-tensors
            does.
    """

    scales: str
    zeros: str | None
    block: tuple[int, int] | None
    rounded: bool

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.name, self.scales, self.zeros)))

    def values(
        self, folder: TensorFolder, lead: Sequence[int | slice], rows: slice, columns: slice
    ) -> Tensor:
        stored = folder.block(self.name, (*lead, rows, columns)).float()
        if self.zeros is not None:
            stored -= self._spread(folder, self.zeros, lead, rows, columns, stored).float()
        scales = self._spread(folder, self.scales, lead, rows, columns, stored)
        product = stored * factors(scales)
        return product.to(scales.dtype).float() if self.rounded else product

    def _spread(
        self,
        folder: TensorFolder,
        name: str,
        lead: Sequence[int | slice],
        rows: slice,
        columns: slice,
        like: Tensor,
    ) -> Tensor:
        """Return each value's entry of the tensor ``name``, ``[rows, columns]`` or ``[1]``."""
        if self.block is None:
            return folder.tensor(name).reshape(1)
        blocks, own_rows = block_numbers(rows, like.shape[0], self.block[0])
        others, own_columns = block_numbers(columns, like.shape[1], self.block[1])
        if len(folder.shape(name)) == 1:
            return folder.block(name, (blocks,))[own_rows][:, None]
        return folder.block(name, (*lead, blocks, others))[own_rows][:, own_columns]


@dataclass(frozen=True)
class Microscaled(Stored):
    """A weight ``[..., in, out]`` in MXFP4.

    Its blocks are ``[..., out, in / 32, 16]``, two values in a byte, the first in the low bits. Its
    exponents, each with 127 added, are ``[..., out, in / 32]``.
    """

    blocks: str
    scales: str
    flipped: ClassVar[bool] = True

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.blocks, self.scales

    def values(
        self, folder: TensorFolder, lead: Sequence[int | slice], rows: slice, columns: slice
    ) -> Tensor:
        size = len(range(*columns.indices(self.shape[-2])))
        groups, _ = block_numbers(columns, size, MX_BLOCK)
        codes = folder.block(self.blocks, (*lead, rows, groups, slice(0, MX_BLOCK // 2)))
        scales = factors(folder.block(self.scales, (*lead, rows, groups)))
        table = torch.tensor([*FP4, *(-value for value in FP4)])
        values = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1)
        scaled = values.flatten(-2) * scales[..., None]
        return scaled.flatten(-2)[:, _within(columns, size, MX_BLOCK)]


@dataclass(frozen=True)
class Packed(Stored):
    """A weight ``[out, in]`` of integers, several in a word of 32 bits, the first in the low bits.

    Attributes:
        words: name of the words, ``[out, words of a row]``.
        scales: name of the scales, ``[out, groups]``.
        zeros: name of the zero points, packed along the rows: ``[words of a column, groups]``.
        bits: bits of an integer.
        group: neighbouring values of a row that share a scale.
    """

    words: str
    scales: str
    zeros: str | None
    bits: int
    group: int

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.words, self.scales, f"{self.name}_shape", self.zeros)))

    def values(
        self, folder: TensorFolder, lead: Sequence[int | slice], rows: slice, columns: slice
    ) -> Tensor:
        each = 32 // self.bits
        size = len(range(*columns.indices(self.shape[-1])))
        words, _ = block_numbers(columns, size, each)
        codes = self._unpacked(folder.block(self.words, (rows, words)))
        codes = codes[:, _within(columns, size, each)]
        groups, own = block_numbers(columns, size, self.group)
        scales = folder.block(self.scales, (rows, groups))[:, own]
        # Without zero points the codes are signed integers to which half of their range was added.
        zeros: Tensor | int = 1 << self.bits - 1
        if self.zeros is not None:
            count = len(codes)
            columns_of_words, _ = block_numbers(rows, count, each)
            packed = folder.block(self.zeros, (columns_of_words, groups))
            zeros = self._unpacked(packed.t())[:, _within(rows, count, each)].t()[:, own]
        return ((codes - zeros).float() * scales.float()).to(scales.dtype).float()

    def _unpacked(self, words: Tensor) -> Tensor:
        """Return the integers in words, ``[a, b]`` to ``[a, b * integers in a word]``."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        mask = (1 << self.bits) - 1
        return (words[..., None] >> shifts).bitwise_and(mask).flatten(-2)


def factors(scales: Tensor) -> Tensor:
    """Return scales in float32; those that are stored as exponents become powers of two."""
    if scales.dtype == torch.uint8:
        return powers_of_two(scales.int() - 127)
    return scales.float()


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2 to the power of integers in float32, exactly, also where the result is subnormal."""
    return torch.ldexp(torch.ones(exponents.shape), exponents)


def block_numbers(entry: slice, size: int, block: int) -> tuple[slice, Tensor]:
    """Find which blocks hold the values that an index selects along one axis of a weight.

    Args:
        entry: the index along this axis, a slice that selects ``size`` values.
        block: number of neighbouring values that form a block.

    Returns:
        The range of block numbers that covers the selected values, as a slice; and for each value
        the number of its block, counted from the start of this range, ``[size]``.
    """
    positions = torch.arange(size) * (entry.step or 1) + (entry.start or 0)
    first = int(positions[0]) // block
    last = int(positions[-1]) // block
    return slice(first, last + 1), positions // block - first


def _within(entry: slice, size: int, block: int) -> Tensor:
    """Return where the values of an index lie, counted from the start of their first block."""
    positions = torch.arange(size) * (entry.step or 1) + (entry.start or 0)
    return positions - int(positions[0]) // block * block


class Finder:
    """Finds the weights that tensors of a quantized folder hold together.

    Raise a CheckpointError if the tensors do not fit each other, or the entry of config.json.

    Attributes:
        weights: the weights by name.
        parts: names of all tensors that belong to ``weights``.
        unused: names of tensors that only inference uses.
    """

    def __init__(self, folder: TensorFolder, quantization: Quantization) -> None:
        self._folder = folder
        self._quantization = quantization
        self._names = folder.stored_names
        self.weights: dict[str, Stored] = {}
        self.parts: set[str] = set()
        self.unused: set[str] = set()
        if not quantization.method:
            return
        for name in sorted(self._names):
            weight = self._weight(name)
            if weight is not None:
                self.parts.update(weight.tensors)
                self._check_listed(weight.name)
                self.weights[weight.name] = weight
        for name in self._names - self.parts:
            if name.rpartition(".")[2].endswith(tuple(OF_ACTIVATIONS)):
                self.unused.add(name)
        self._refuse_lonely()

    def _weight(self, name: str) -> Stored | None:
        """Return the weight whose values the tensor ``name`` holds, unless they are plain."""
        method = self._quantization.method
        if method == MXFP4 and name.endswith("_blocks"):
            return self._microscaled(name)
        if method == COMPRESSED and name.endswith(".weight_packed"):
            return self._packed(name)
        eight = self._kind(name) in FP8 or (method == COMPRESSED and self._kind(name) == "I8")
        if method in (*FP8_METHODS, COMPRESSED) and eight and not name.endswith("_zero_point"):
            return self._scaled(name)
        return None

    def _kind(self, name: str) -> str:
        return self._folder.dtype(name)

    def _microscaled(self, name: str) -> Stored:
        plain = name.removesuffix("_blocks")
        scales = self._partner(name, f"{plain}_scales", ("U8", "F8_E8M0"))
        *lead, groups, size = self._folder.shape(name)
        if self._kind(name) != "U8" or size != MX_BLOCK // 2 or not lead:
            self._refuse(name, f"as {self._kind(name)} {[*lead, groups, size]}, which must be U8 "
                         f"[..., rows, blocks, {MX_BLOCK // 2}]")  # fmt: skip
        self._check_shape(scales, [*lead, groups], name)
        shape = (*lead[:-1], groups * MX_BLOCK, lead[-1])
        return Microscaled(plain, shape, name, scales)

    def _scaled(self, name: str) -> Stored:
        scales = next((name + end for end in SCALES if name + end in self._names), None)
        if scales is None:
            self._refuse(name, f"as {self._kind(name)}, but not its scales `{name}{SCALES[0]}` or "
                         f"`{name}{SCALES[1]}`")  # fmt: skip
        compressed = self._quantization.method == COMPRESSED
        exponents = () if compressed else ("U8", "F8_E8M0")
        self._partner(name, scales, (*DTYPES.values(), *exponents))
        group = self._quantization.group_of(_module(name)) if compressed else None
        zeros = f"{name}_zero_point"
        has_zeros = zeros in self._names
        if has_zeros:
            self._check_shape(zeros, self._folder.shape(scales), scales)
        shape = self._folder.shape(name)
        block = group.block if group is not None else self._quantization.block
        return Scaled(
            name,
            shape,
            scales,
            zeros if has_zeros else None,
            self._block(name, shape, scales, block),
            rounded=compressed,
        )

    def _block(
        self, name: str, shape: Sequence[int], scales: str, given: tuple[int, int] | None
    ) -> tuple[int, int] | None:
        """Return the rows and columns of a block of the weight ``name``; None for one scale."""
        grid = self._folder.shape(scales)
        if math.prod(grid) == 1 and (len(grid) < 2 or len(shape) == 2):
            return None
        if len(shape) == 2 and grid == (shape[0],):
            return 1, shape[1]
        if len(grid) == len(shape) and grid[:-2] == tuple(shape[:-2]):
            sides = list(zip(shape[-2:], grid[-2:], strict=True))
            if given and all(-(-s // b) == g for (s, g), b in zip(sides, given, strict=True)):
                return given
            if all(g > 0 and s % g == 0 for s, g in sides):
                return sides[0][0] // sides[0][1], sides[1][0] // sides[1][1]
        blocks = f" in blocks of {' × '.join(map(str, given))}" if given else ""
        wrong = f"with shape {list(grid)}, which does not fit `{name}`, {list(shape)}{blocks}"
        return self._refuse(scales, wrong)

    def _packed(self, name: str) -> Stored:
        plain = name.removesuffix("_packed")
        group = self._quantization.group_of(_module(name))
        if group is None or group.format != PACKED_FORMAT:
            self._refuse(name, "packed, but no group of `quantization_config.config_groups` with "
                         f"the format {PACKED_FORMAT} names its module")  # fmt: skip
        scales = self._partner(name, f"{plain}_scale", tuple(DTYPES.values()))
        sizes = self._partner(name, f"{plain}_shape", ("I64", "I32"))
        shape = tuple(int(size) for size in self._folder.tensor(sizes).flatten())
        words = [shape[0], -(-shape[-1] * group.num_bits // 32)] if len(shape) == 2 else []
        found = list(self._folder.shape(name))
        if self._kind(name) != "I32" or found != words:
            self._refuse(name, f"as {self._kind(name)} {found}, which does not fit `{sizes}`, "
                         f"{list(shape)}, in {group.num_bits} bits")  # fmt: skip
        block = self._block(name, shape, scales, None) or (shape[0], shape[1])
        if block[0] != 1:
            self._refuse(scales, f"with shape {list(self._folder.shape(scales))}, but each row of "
                         f"`{name}` must have its own")  # fmt: skip
        zeros = f"{plain}_zero_point" if not group.symmetric else None
        if zeros is not None:
            self._partner(name, zeros, ("I32",))
            rows = -(-shape[0] * group.num_bits // 32)
            self._check_shape(zeros, [rows, self._folder.shape(scales)[1]], name)
        return Packed(plain, shape, name, scales, zeros, group.num_bits, block[1])

    def _partner(self, name: str, other: str, kinds: Sequence[str]) -> str:
        """Return ``other``; refuse a folder that lacks it, or holds it in another dtype."""
        if other not in self._names:
            self._refuse(name, f"but not `{other}`, without which it cannot be read")
        if self._kind(other) not in kinds:
            known = ", ".join(kinds)
            self._refuse(other, f"as {self._kind(other)}, but it must be one of {known}")
        return other

    def _check_shape(self, name: str, shape: Sequence[int], of: str) -> None:
        if list(self._folder.shape(name)) != list(shape):
            found = list(self._folder.shape(name))
            self._refuse(name, f"with shape {found}, but `{of}` implies {list(shape)}")

    def _check_listed(self, name: str) -> None:
        """Refuse a quantized weight of a module that config.json lists as not quantized."""
        if self._quantization.skips(_module(name)):
            given = self._quantization
            raise CheckpointError(
                f"{self._folder.folder} holds `{name}` quantized, although `{given.skipped_key}` "
                f"of {given.path} lists its module; mend the list or copy the model again."
            )
        if name in self._names and name not in self.parts:
            self._refuse(name, "both plain and quantized")

    def _refuse_lonely(self) -> None:
        """Refuse scales, blocks or zero points whose weight is missing, or not quantized."""
        ends = ("_scale_inv", ".weight_scale", "_blocks", "_scales", "_packed", "_zero_point")
        for name in sorted(self._names - self.parts - self.unused):
            end = next((end for end in ends if name.endswith(end)), None)
            if end is None:
                continue
            stem = name.removesuffix(end) + (".weight" if end == ".weight_scale" else "")
            kind = f"which is {self._kind(stem)}" if stem in self._names else "which is missing"
            self._refuse(name, f"without a quantized `{stem}`, {kind}")

    def _refuse(self, name: str, rule: str) -> NoReturn:
        raise CheckpointError(f"{self._folder.folder} holds `{name}` {rule}; copy the model again.")


def _module(name: str) -> str:
    """Return the name of the module to which a weight belongs, such as ``model.norm``."""
    return name.rpartition(".")[0]
