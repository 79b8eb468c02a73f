"""Triton kernels of the engine compile ahead of time, and no register of theirs is spilled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import triton
from triton.compiler import ASTSource

from tests.gpu_proof.cases import modules_with
from tests.gpu_proof.fake_cuda import SHARED_MEMORY, TARGET
from tests.gpu_proof.resources import Resources, resources_of

KERNEL = r"@triton\.jit"


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    alignment: int,
) -> Resources:
    """Compile a kernel for the target, with addresses that are multiples of ``alignment`` bytes."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (position,): [["tt.divisibility", alignment]]
        for position, name in enumerate(kernel.arg_names)
        if alignment > 1 and signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, dict(constants), aligned)
    return resources_of(triton.compile(source, target=TARGET, options=dict(options)))


def signatures() -> list[Any]:
    """Return a pytest parameter for each entry of each module's ``signatures()``."""
    found = []
    for module in modules_with(KERNEL):
        for kernel, types, constants, options in module.signatures():
            words = [kernel.__name__, *types.values()]
            words += [f"{k}={v}" for k, v in constants.items() if k.isupper()]
            name = "-".join(map(str, words))
            found.append(pytest.param(kernel, types, constants, options, id=name))
    return found


@pytest.mark.parametrize("alignment", [16, 1])
@pytest.mark.parametrize(("kernel", "types", "constants", "options"), signatures())
def test_triton_kernels_fit(
    kernel: Any, types: Any, constants: Any, options: Any, alignment: int
) -> None:
    found = compiled(kernel, types, constants, options, alignment=alignment)
    print(f"{kernel.__name__}: {found}")
    assert found.spilled == 0 and found.shared <= SHARED_MEMORY, found


@pytest.mark.parametrize("module", modules_with(KERNEL), ids=lambda module: module.__name__)
def test_every_kernel_has_a_signature(module: Any) -> None:
    kernels = {
        key
        for key, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and value.__module__ == module.__name__
    }
    called = {
        key
        for key in kernels
        for other in kernels - {key}
        if re.search(rf"\b{key}\(", getattr(module, other).src)
    }
    listed = {kernel.__name__ for kernel, *_ in module.signatures()}
    assert kernels - called <= listed
