"""Every compiled function becomes kernels for the target that keep their limits."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_ext.layers import compiled
from megatron_ext.layers.compiled import Compiled
from megatron_ext.layers.fp8.casting import Function
from megatron_ext.layers.fused_residual import FusedResidual
from tests.gpu_proof.cases import FP8, TEXT, Case, modules_with
from tests.gpu_proof.compiler import Graph, compiled_graphs
from tests.gpu_proof.fake_cuda import SHARED_MEMORY
from tests.gpu_proof.video_cases import MMDIT, WAN

CASES = (*TEXT, *FP8, *MMDIT, *WAN)
KINDS = (Compiled, FusedResidual, Function)
SLACK = 1.01
"""Traffic may exceed its limit by this factor, for vectors beside the matrices."""


def run(case: Case) -> tuple[list[Graph], list[Graph], Tensor]:
    """Call a case forward and backward; return the graphs of both, and its first argument."""
    arguments = case.arguments()
    with compiled_graphs() as forward:
        found = case.function(*arguments)
    outputs = [x for x in _tensors(found) if x.requires_grad]
    with compiled_graphs() as backward:
        if outputs:
            torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])
    # A function without gradients of its own is one graph more in the forward pass.
    late = [graph for graph in forward if graph.backward]
    return [g for g in forward if not g.backward], late + backward, arguments[0]


def _tensors(found: Any) -> list[Tensor]:
    several = found if isinstance(found, tuple) else (found,)
    return [x for x in several if isinstance(x, Tensor)]


def broken_limits(case: Case) -> list[str]:
    """Return a sentence for each limit that a case exceeds."""
    *ways, first = run(case)
    unit = first.numel() * first.element_size()
    broken = []
    for way, graphs, kernels, passes in zip(
        ("forward", "backward"), ways, case.kernels, case.passes, strict=True
    ):
        names = [kernel.name for graph in graphs for kernel in graph.kernels]
        traffic = sum(graph.num_bytes for graph in graphs) / unit
        print(f"{case.name} {way}: {len(names)} kernels, {traffic:.2f} passes")
        if len(names) > kernels:
            broken.append(f"{case.name} {way}: {len(names)} kernels for {kernels}: {names}")
        if traffic > passes * SLACK:
            broken.append(f"{case.name} {way}: traffic of {traffic:.2f} for {passes}")
        for graph in graphs:
            broken += misfits(case, graph)
    return broken


def misfits(case: Case, graph: Graph) -> Iterator[str]:
    """Yield a sentence for each kernel that takes too much of the GPU in every configuration."""
    for kernel in graph.kernels:
        if not any(
            binary.spilled <= case.stack and binary.shared <= SHARED_MEMORY
            for binary in kernel.binaries
        ):
            yield f"{case.name}: no configuration of {kernel.name} fits: {kernel.binaries}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("fake_tensors")
def test_compiled_functions_keep_their_limits(case: Case) -> None:
    assert broken_limits(case) == []


NORMS = [case for case in TEXT if "norm" in case.name]


@pytest.mark.parametrize("case", NORMS, ids=lambda case: case.name)
@pytest.mark.usefixtures("fake_tensors")
def test_sums_have_one_configuration_where_ranks_must_agree(case: Case) -> None:
    with mock.patch.object(compiled, "compiler", dataclasses.replace(compiled.compiler)):
        compiled.compile_alike()
        forward, backward, _ = run(case)
    kernels = [kernel for graph in (*forward, *backward) for kernel in graph.kernels]
    sums = [kernel for kernel in kernels if re.match("triton_(red|per)_", kernel.name)]
    assert sums and {len(kernel.binaries) for kernel in sums} == {1}


def compiled_functions() -> dict[int, str]:
    """Return the names of all compiled functions of the package, by their objects' ids."""
    found: dict[int, str] = {}
    for module in modules_with(r"compiled\(|@compiled|FusedResidual\(|Function\("):
        for name, value in vars(module).items():
            if isinstance(value, KINDS):
                found.setdefault(id(value), f"{module.__name__}.{name}")
    return found


def test_every_compiled_function_has_a_case() -> None:
    covered: Sequence[int] = [id(case.function) for case in CASES]
    assert sorted(name for key, name in compiled_functions().items() if key not in covered) == []
