"""A Triton kernel that updates all weights of a parameter group by AdamW.

The kernel finds the tensors through a table of addresses, so one launch updates hundreds of
parameters. Most addresses are multiples of 16 bytes. Parameters with such addresses have a separate
launch, in which each thread moves 16 bytes at a time.

This file needs Triton, so it is imported only where the kernel is used.
"""

# ruff: noqa: N803 – Triton's constants are in capitals.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.device.streams import to_device
from megatron_ext.optim.fused_adam import Entry, Settings

BLOCK = 1024
"""Number of elements that a Triton program updates at once."""
CHUNK = 16 * BLOCK
"""Number of elements that a Triton program updates in total, all of one parameter."""
NUM_WARPS = 4
COLUMNS = 6
"""Columns of a launch's table of parameters: five addresses and the number of elements."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit  # type: ignore[untyped-decorator]
def _pointer(  # type: ignore[no-untyped-def]
    row, column: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Load an address from the table of tensors, and return it as a pointer to ``DTYPE``.

    ``row`` points to a parameter's row of the table, and ``column`` selects the tensor. ``ALIGNED``
    tells the compiler that the address is a multiple of 16 bytes.
    """
    pointer = tl.load(row + column).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit  # type: ignore[untyped-decorator]
def _update_block(  # type: ignore[no-untyped-def]
    gradients, weights, exp_avgs, exp_avg_sqs, copies, offsets, mask, divisor, step_size, root,
    decay, beta1, rest1, beta2, rest2, eps, HAS_COPY: tl.constexpr,
):  # fmt: skip
    """Update one block of elements, in the order of operations of torch's fused AdamW.

    Args:
        gradients, weights, exp_avgs, exp_avg_sqs, copies: pointers to the start of the chunk.
        offsets, mask: the block's elements in the chunk, and which of them exist (None: all).
        divisor, step_size, root: the last three of `Settings.scalars`, in this order.
        decay, rest1, rest2: learning rate times weight decay, 1 - beta1 and 1 - beta2.
        HAS_COPY: whether there is a 16-bit weight to write, at ``copies``.
    """
    gradient = tl.load(gradients + offsets, mask=mask) / divisor
    weight = tl.load(weights + offsets, mask=mask)
    exp_avg = tl.load(exp_avgs + offsets, mask=mask).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sqs + offsets, mask=mask).to(tl.float32)
    weight -= decay * weight
    exp_avg = beta1 * exp_avg + rest1 * gradient
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * gradient * gradient
    weight -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) / root + eps)
    tl.store(weights + offsets, weight, mask=mask)
    tl.store(exp_avgs + offsets, exp_avg.to(exp_avgs.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sqs + offsets, exp_avg_sq.to(exp_avg_sqs.dtype.element_ty), mask=mask)
    if HAS_COPY:
        tl.store(copies + offsets, weight.to(copies.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def adam_kernel(  # type: ignore[no-untyped-def]
    addresses, chunks, scalars, decay, beta1, rest1, beta2, rest2, eps,
    EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, COPY: tl.constexpr, HAS_COPY: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Update a chunk of one parameter, unless the gradients of the step are not finite.

    Args:
        addresses: table with one row for each parameter: the addresses of the tensors, in the order
            of `Entry.tensors`, and the number of elements.
        chunks: for each program of the launch, (row of the parameter, index of its chunk).
        scalars: `Settings.scalars`; for ``decay``, ``rest1`` and ``rest2`` see `_update_block`.
        EXP_AVG, EXP_AVG_SQ, COPY: dtypes of the moments and of the 16-bit weight.
        HAS_COPY: whether there is a 16-bit weight; for ``ALIGNED`` see `_pointer`.
    """
    if tl.load(scalars) != 0.0:
        return
    divisor = tl.load(scalars + 1)
    step_size = tl.load(scalars + 2)
    root = tl.load(scalars + 3)
    program = tl.program_id(0)
    row = addresses + tl.load(chunks + 2 * program) * COLUMNS
    first = tl.load(chunks + 2 * program + 1) * CHUNK
    count = tl.minimum(tl.load(row + 5) - first, CHUNK).to(tl.int32)
    gradients = _pointer(row, 0, tl.float32, ALIGNED) + first
    weights = _pointer(row, 1, tl.float32, ALIGNED) + first
    exp_avgs = _pointer(row, 2, EXP_AVG, ALIGNED) + first
    exp_avg_sqs = _pointer(row, 3, EXP_AVG_SQ, ALIGNED) + first
    copies = _pointer(row, 4, COPY, ALIGNED) + first
    lanes = tl.arange(0, BLOCK)
    whole = count // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        _update_block(
            gradients, weights, exp_avgs, exp_avg_sqs, copies, start + lanes, None, divisor,
            step_size, root, decay, beta1, rest1, beta2, rest2, eps, HAS_COPY,
        )  # fmt: skip
    if whole < count:
        offsets = whole + lanes
        _update_block(
            gradients, weights, exp_avgs, exp_avg_sqs, copies, offsets, offsets < count, divisor,
            step_size, root, decay, beta1, rest1, beta2, rest2, eps, HAS_COPY,
        )  # fmt: skip


class GroupUpdate:
    """A `fused_adam.Kernel` that updates a parameter group by one launch for each `Entry.kind`.

    The kernel finds its tensors in a table of addresses on the device. The table is sent before the
    first update, and again if any address has changed. This happens in every update if gradients
    are summed in 16 bits and then cast to new tensors. Only addresses are kept, so the gradients
    can be freed after the update.
    """

    def __init__(self) -> None:
        self._addresses: tuple[int, ...] = ()
        self._launches: list[_Launch] = []

    def __call__(self, entries: Sequence[Entry], settings: Settings) -> None:
        """Update weights, moments and 16-bit weights, unless the gradients are not finite."""
        addresses = tuple(tensor.data_ptr() for entry in entries for tensor in entry.tensors)
        if addresses != self._addresses:
            self._addresses = addresses
            self._launches = _launches(entries)
        numbers = (
            settings.lr * settings.weight_decay,
            settings.beta1,
            1.0 - settings.beta1,
            settings.beta2,
            1.0 - settings.beta2,
            settings.eps,
        )
        for chosen, table, chunks in self._launches:
            adam_kernel[(chunks.size(0),)](
                table, chunks, settings.scalars, *numbers, **chosen, num_warps=NUM_WARPS
            )


_Launch = tuple[dict[str, Any], Tensor, Tensor]
"""Compile-time arguments, the table ``[parameters, 6]`` and the chunks ``[n, 2]`` of a launch."""


def _launches(entries: Sequence[Entry]) -> list[_Launch]:
    """Return the launches of the kernel that together update all of ``entries``."""
    kinds: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        assert all(tensor.is_contiguous() for tensor in entry.tensors)
        if entry.weight.numel():
            kinds.setdefault(entry.kind, []).append(entry)
    return [_table(alike) for alike in kinds.values()]


def _table(entries: Sequence[Entry]) -> _Launch:
    """Return the arguments of one launch, for parameters that are all of one `Entry.kind`.

    The table of addresses and the list of chunks are copied to the device asynchronously.
    """
    rows = []
    for entry in entries:
        addresses = [tensor.data_ptr() for tensor in entry.tensors]
        rows.append([*addresses, *[0] * (COLUMNS - 1 - len(addresses)), entry.weight.numel()])
    table = torch.tensor(rows, dtype=torch.int64)
    counts = (table[:, -1] + CHUNK - 1) // CHUNK
    indices = torch.repeat_interleave(counts)
    numbers = torch.arange(len(indices)) - (counts.cumsum(0) - counts)[indices]
    chunks = torch.stack([indices, numbers], dim=1)
    device = entries[0].weight.device
    return constants(entries[0]), to_device(table, device), to_device(chunks, device)


def constants(example: Entry) -> dict[str, Any]:
    """Return the compile-time arguments of the kernel for parameters of ``example``'s kind."""
    copy = example.copy
    return _constants(
        example.exp_avg.dtype, example.exp_avg_sq.dtype, copy if copy is None else copy.dtype,
        aligned=example.aligned,
    )  # fmt: skip


def _constants(
    exp_avg: torch.dtype, exp_avg_sq: torch.dtype, copy: torch.dtype | None, *, aligned: bool
) -> dict[str, Any]:
    return {
        "EXP_AVG": TYPES[exp_avg],
        "EXP_AVG_SQ": TYPES[exp_avg_sq],
        "COPY": TYPES[copy or torch.bfloat16],
        "HAS_COPY": copy is not None,
        "ALIGNED": aligned,
        "BLOCK": BLOCK,
        "CHUNK": CHUNK,
        "COLUMNS": COLUMNS,
    }


TYPES_OF_ARGUMENTS = {
    **dict.fromkeys(("addresses", "chunks"), "*i64"),
    "scalars": "*fp32",
    **dict.fromkeys(("decay", "beta1", "rest1", "beta2", "rest2", "eps"), "fp32"),
}
"""Types of the kernel's arguments at run time, as Triton's compiler names them."""


Signature = tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]
"""Kernel, types of its arguments, compile-time arguments, and options of the compiler."""


def signatures() -> list[Signature]:
    """Return the signature of each variant of the kernel that a run may launch.

    With these the kernel can be compiled on a machine without a GPU.
    """
    half = torch.bfloat16
    single = torch.float32
    return [
        (adam_kernel, TYPES_OF_ARGUMENTS, chosen, {"num_warps": NUM_WARPS})
        for aligned in (True, False)
        for moments in ((single, single), (half, single), (single, half), (half, half))
        for copy in (None, half, torch.float16)
        for chosen in (_constants(*moments, copy, aligned=aligned),)
    ]
