"""The part of a GPU that a compiled kernel takes: registers, spilled bytes, shared memory."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True)
class Resources:
    """The resources of one binary for one configuration of blocks.

    Attributes:
        registers: of a thread.
        spilled: bytes of a thread's stack, where registers go that do not fit. Sines and cosines
            of large arguments take 32 bytes there without any spilling.
        shared: bytes of a block.
    """

    registers: int
    spilled: int
    shared: int


def resources_of(kernel: Any) -> Resources:
    """Return the resources of a `triton.compiler.CompiledKernel`, read from its cubin."""
    registers, spilled = _usage(kernel.asm["cubin"])
    return Resources(registers, spilled, kernel.metadata.shared)


@functools.cache
def _usage(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    found = USAGE.search(text)
    assert found is not None, text
    return int(found[1]), int(found[2])
