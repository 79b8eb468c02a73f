"""Measures the rates of a device: matrix products and copies within its memory.

``python -m megatron_ext.device.rates --index 0`` prints the measured rates of a GPU as JSON. It
runs in a separate process, so that a broken driver kills only that one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import timeit
from collections.abc import Callable, Sequence
from functools import partial

import torch

from megatron_ext.device.gpus import FP8
from megatron_ext.errors import DeviceNotSupported

MATRIX = 8192
COPIED = 2**30


def seconds_of(
    work: Callable[[], object], device: torch.device, *, repeats: int = 10, warm_ups: int = 3
) -> float:
    """Return the median time of one call of ``work``, in seconds.

    ``repeats`` calls are timed after ``warm_ups`` others, by CUDA events on a GPU and by a clock on
    a CPU.
    """
    for _ in range(warm_ups):
        work()
    if device.type != "cuda":
        return statistics.median(timeit.repeat(work, number=1, repeat=repeats))
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


def has_fp8(device: torch.device) -> bool:
    """Return whether the device multiplies 8-bit floats: Ada (sm_89), Hopper and newer do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8


def matrix_rate(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = MATRIX
) -> float:
    """Measure the operations per second of a product of two ``[size, size]`` matrices of ``dtype``.

    A product counts as 2 size^3 operations. The entries are normal random numbers: zeros would take
    less power and let the device clock higher. The product of matrices in ``float8_e4m3fn`` is
    computed with scale factors of 1, and is in bfloat16.

    Raises:
        DeviceNotSupported: ``dtype`` is ``float8_e4m3fn``, which the device does not multiply.
    """
    eight = dtype == torch.float8_e4m3fn
    if eight and not has_fp8(device):
        raise DeviceNotSupported(
            f"The matrix rate of 8-bit floats was asked for, but {device} has no unit for them; it "
            "takes an NVIDIA GPU of compute capability 8.9 or newer."
        )
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16).to(dtype)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16).to(dtype)
    if eight:
        one = torch.ones((), device=device)
        scaled = partial(torch._scaled_mm, scale_a=one, scale_b=one, use_fast_accum=True)
        # cuBLAS needs the second fp8 factor in column-major order.
        seconds = seconds_of(lambda: scaled(a, b.t(), out_dtype=torch.bfloat16), device)
    else:
        out = torch.empty_like(a)
        seconds = seconds_of(lambda: torch.mm(a, b, out=out), device)
    return 2 * size**3 / seconds


def copy_rate(device: torch.device, size: int = COPIED) -> float:
    """Measure a copy of ``size`` bytes within the device's memory; return bytes per second.

    Each byte counts twice: it is read and written.
    """
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)


def rates(
    device: torch.device, size: int = MATRIX, copied: int = COPIED
) -> dict[str, float | None]:
    """Measure a device; return the rates ``bf16``, ``fp8`` (None if unsupported) and ``copy``.

    ``size`` is the argument of `matrix_rate`, ``copied`` the size of `copy_rate` in bytes.
    """
    eight = matrix_rate(device, torch.float8_e4m3fn, size) if has_fp8(device) else None
    half = matrix_rate(device, torch.bfloat16, size)
    return {"bf16": half, "fp8": eight, "copy": copy_rate(device, copied)}


def main(argv: Sequence[str]) -> int:
    """Print the `rates` of the GPU ``--index`` as JSON; return the exit code, 1 without a GPU."""
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
