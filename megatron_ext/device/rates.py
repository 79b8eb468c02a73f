"""Rates of a GPU: 8-bit products by its capability, measured matrix and copy rates.

``python -m megatron_ext.device.rates --index 0`` prints the rates of a GPU as JSON, in a process of
its own, so that a broken driver ends that process only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from megatron_ext.errors import DeviceNotSupported

Capability = tuple[int, int]

FP8: Capability = (8, 9)
"""The capability of the first GPUs with 8-bit products, Ada; Hopper and newer have them too."""

FIRST: dict[str, Capability] = {
    "delayed": FP8,
    "tensorwise": FP8,
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}
"""The first capability with the products of each recipe of Transformer Engine."""

CONSUMER_BLACKWELL: Capability = (12, 0)
"""The first capability without MXFP8 again."""


def engine_recipes(capability: Capability) -> tuple[str, ...]:
    """Return the recipes of Transformer Engine that a GPU has the products for.

    The rules are those of ``transformer_engine/pytorch/quantization.py`` 2.9: its blocks of 128
    are made for Hopper, and MXFP8 for Blackwell of data centres (10.0 and 10.3).
    """
    return tuple(
        recipe
        for recipe, first in FIRST.items()
        if first <= capability and not (recipe == "mxfp8" and capability >= CONSUMER_BLACKWELL)
    )


MATRIX = 8192
COPIED = 2**30


def seconds_of(
    work: Callable[[], object], device: torch.device, *, repeats: int = 10, warm_ups: int = 3
) -> float:
    """Return the median seconds of some work, by CUDA's events on a GPU and the clock on a CPU.

    Args:
        repeats: measured calls, each by itself.
        warm_ups: calls before them.
    """
    for _ in range(warm_ups):
        work()
    if device.type != "cuda":
        return statistics.median(_by_the_clock(work) for _ in range(repeats))
    mark = partial(torch.cuda.Event, enable_timing=True)
    marks = [(mark(), mark()) for _ in range(repeats)]
    torch.cuda.synchronize(device)
    for start, end in marks:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    milliseconds: float = statistics.median(start.elapsed_time(end) for start, end in marks)
    return milliseconds / 1e3


def _by_the_clock(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def has_fp8(device: torch.device) -> bool:
    """Tell whether the device multiplies 8-bit floats: Ada (sm_89), Hopper and newer do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8


def matrix_rate(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = MATRIX
) -> float:
    """Return the operations per second of a square product of normal random numbers.

    Zeros would flatter the device, which then takes less power and clocks higher. A product of m,
    n and k counts 2 m n k operations.

    Args:
        dtype: dtype of both factors; ``float8_e4m3fn`` goes through ``torch._scaled_mm`` with a
            scale for each factor and gives bfloat16.
        size: rows and columns of each factor.

    Raises:
        DeviceNotSupported: the device multiplies no 8-bit floats.
    """
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    if dtype != torch.float8_e4m3fn:
        a, b = a.to(dtype), b.to(dtype)
        out = torch.empty_like(a)
        return 2 * size**3 / seconds_of(lambda: torch.mm(a, b, out=out), device)
    if not has_fp8(device):
        raise DeviceNotSupported(
            f"The matrix rate of 8-bit floats was asked for, but {device} has no unit for them; it "
            "takes an NVIDIA GPU of compute capability 8.9 or newer."
        )
    eight_a, eight_b = a.to(dtype), b.to(dtype)
    one = torch.ones((), device=device)

    def multiply() -> torch.Tensor:
        # The second factor must lie column by column.
        return torch._scaled_mm(
            eight_a,
            eight_b.t(),
            scale_a=one,
            scale_b=one,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    return 2 * size**3 / seconds_of(multiply, device)


def copy_rate(device: torch.device, size: int = COPIED) -> float:
    """Return the bytes per second, read and written, of a copy within the device's memory.

    Args:
        size: bytes of the copied block, which should be far more than the caches hold.
    """
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)


def rates(
    device: torch.device, size: int = MATRIX, copied: int = COPIED
) -> dict[str, float | None]:
    """Return the rates ``bf16``, ``fp8`` (None without a unit for it) and ``copy``."""
    eight = matrix_rate(device, torch.float8_e4m3fn, size) if has_fp8(device) else None
    return {
        "bf16": matrix_rate(device, torch.bfloat16, size),
        "fp8": eight,
        "copy": copy_rate(device, copied),
    }


def main(argv: Sequence[str]) -> int:
    """Print the rates of one GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=int, required=True, help="of the GPU, as torch counts")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("torch can use no GPU here", file=sys.stderr)
        return 1
    device = torch.device("cuda", args.index)
    torch.cuda.set_device(device)
    print(json.dumps(rates(device)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
