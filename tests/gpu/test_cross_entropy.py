"""Chunked cross-entropy on a GPU: float64's numbers, and less memory and time than whole logits."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from benchmarks.cross_entropy import GPU_SIZE, WAYS, Inputs, Setting, make_inputs, one_pass
from megatron_ext.layers.compiled import compiles
from megatron_ext.layers.weight_gradients import adds_in_float32
from tests.gpu.runs import one_gpu
from tests.losses.dense_cross_entropy import ALONE, dense, leaves, weighted

pytestmark = pytest.mark.gpu

BYTES_OF_EAGER = 70 * 2**30
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-3)])
def test_fused_blocks_equal_float64(kind: torch.dtype, tolerance: float) -> None:
    if not compiles(torch.zeros(1, device=DEVICE)):
        pytest.skip("Triton is not installed")
    generator = torch.Generator(DEVICE).manual_seed(0)
    values = leaves(
        (
            torch.randn(300, 1, 64, generator=generator, device=DEVICE),
            torch.randn(5000, 64, generator=generator, device=DEVICE) * 0.1,
            torch.randint(0, 5000, (1, 300), generator=generator, device=DEVICE),
            torch.rand(1, 300, generator=generator, device=DEVICE) + 0.5,
        ),
        kind,
    )
    options = {"label_smoothing": 0.1, "z_loss_coefficient": 1e-2}
    for given in ({}, options):
        truth = dense(values, **given)
        found = weighted(leaves(values, kind), block_size=128, **given, **ALONE)
        for one, true in zip(found, truth, strict=True):
            assert one is not None and true is not None
            assert float((one.double() - true).norm() / true.norm()) < tolerance


def test_products_are_added_in_float32() -> None:
    assert adds_in_float32(DEVICE, torch.bfloat16)


def costs(name: str, inputs: Inputs, setting: Setting) -> tuple[float, float]:
    """Return extra bytes, and median seconds after a first pass."""
    one_pass(WAYS[name], inputs, setting)
    inputs[0].grad = inputs[1].grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = median(one_pass(WAYS[name], inputs, setting)[0] for _ in range(5))
    return torch.cuda.max_memory_allocated() - before, seconds


def test_g3_a_seventh_of_eagers_memory_in_less_time() -> None:
    if torch.cuda.get_device_properties(DEVICE).total_memory < BYTES_OF_EAGER:
        pytest.skip("whole logits do not fit")
    with one_gpu() as context:
        inputs = make_inputs(*GPU_SIZE, 1, torch.bfloat16, "cuda")
        setting = Setting(None, context)
        eager, ours = (costs(name, inputs, setting) for name in ("eager", "weighted"))
    assert ours[0] <= 0.15 * eager[0]
    assert ours[1] <= 0.85 * eager[1]
