"""Compares the Triton kernel of AdamW, run by Triton's interpreter, with torch's AdamW.

It runs as a program of its own, since the interpreter must be chosen before Triton is imported, and
prints the largest differences.
"""

import json
import math
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from megatron_ext.optim import adam_kernel
from megatron_ext.optim.adam_kernel import GroupUpdate
from megatron_ext.optim.fused_adam import FusedAdam

adam_kernel.BLOCK, adam_kernel.CHUNK = 64, 128  # The interpreter runs program after program.
SIZES = (1, 63, 64, 128, 129, 256, 1000)
"""Numbers of elements below, at and above blocks and chunks."""
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
STEPS = 4
SKIPPED = 1
"""Step whose gradients are not finite."""


def _weights(*, odd: bool) -> list[Tensor]:
    """Return weights of many sizes; ``odd`` ones begin four bytes after a multiple of sixteen."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n + odd, generator=generator)[odd:] for n in SIZES]


def _gradients(step: int, divisor: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    found = [torch.randn(n, generator=generator) * divisor for n in SIZES]
    if step == SKIPPED:
        found[2][5] = math.inf
    return found


def compare(
    decay: float, moments: tuple[torch.dtype, torch.dtype], *, odd: bool, divisor: float = 3.0
) -> dict[str, float]:
    """Take four steps, one skipped; return the largest differences from torch's AdamW in float64.

    That of the 16-bit weights is relative to the kernel's float32 weights. ``torch`` is that of the
    weights of torch's fused AdamW in float32.
    """
    settings: dict[str, Any] = {**OPTIONS, "weight_decay": decay}
    mine = _weights(odd=odd)
    truth, theirs = [w.double() for w in mine], [w.clone() for w in mine]
    adam = FusedAdam([torch.empty(0)], moments=moments, make_kernel=GroupUpdate, **settings)
    adam.param_groups[0]["params"] = mine
    adam.copies = {w: torch.zeros(w.numel(), dtype=torch.bfloat16) for w in mine}
    plain, fused = (torch.optim.AdamW(w, **settings, fused=f) for w, f in ((truth, 0), (theirs, 1)))
    for step in range(STEPS):
        gradients = _gradients(step, divisor)
        for group, scale in ((mine, 1.0), (truth, divisor), (theirs, divisor)):
            for weight, gradient in zip(group, gradients, strict=True):
                weight.grad = gradient.to(weight.dtype) / scale
        adam.found_inf = torch.tensor(float(step == SKIPPED))
        adam.grad_scale = torch.tensor(divisor)
        before = [weight.clone() for weight in mine]
        adam.step()
        if step == SKIPPED:
            assert all(torch.equal(a, b) for a, b in zip(before, mine, strict=True))
        else:
            plain.step()
            fused.step()
    assert {float(state["step"]) for state in adam.state.values()} == {STEPS - 1.0}
    found = dict.fromkeys(("weight", "torch", "exp_avg", "exp_avg_sq", "copy"), 0.0)
    for weight, exact, single in zip(mine, truth, theirs, strict=True):
        state, expected = adam.state[weight], plain.state[exact]
        pairs = {"weight": (weight, exact), "torch": (single, exact)}
        pairs |= {name: (state[name], expected[name]) for name in ("exp_avg", "exp_avg_sq")}
        pairs["copy"] = (adam.copies[weight] / weight, torch.ones(()))
        for name, (x, y) in pairs.items():
            found[name] = max(found[name], float((x.double() - y.double()).abs().max()))
    return found


if __name__ == "__main__":
    half, single = torch.bfloat16, torch.float32
    cases = {
        "plain": compare(0.0, (single, single), odd=False),
        "decay": compare(0.1, (single, single), odd=False),
        "unaligned": compare(0.1, (single, single), odd=True),
        "moments in bf16": compare(0.1, (half, half), odd=False),
    }
    json.dump(cases, sys.stdout)
