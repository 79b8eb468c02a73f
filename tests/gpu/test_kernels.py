"""On a GPU the pointwise parts compile, agree with their eager selves, and make fewer kernels."""

import math
from statistics import median
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cross_entropy import GPU_SIZE, WAYS, Inputs, Setting, make_inputs, one_pass
from megatron_ext.device.gpus import peak_flops
from megatron_ext.device.rates import copy_rate, has_fp8, matrix_rate
from megatron_ext.inspect.doctor.examine import examine
from megatron_ext.inspect.doctor.host import ThisMachine
from megatron_ext.layers import compiled as module
from megatron_ext.layers.compiled import compiles
from megatron_ext.layers.pointwise import activated, norm_with_residual
from megatron_ext.layers.weight_gradients import add_product, adds_in_float32
from megatron_ext.optim.fused_adam import FusedAdam
from tests.gpu.runs import one_gpu
from tests.layers.test_pointwise import CASES, HALF_FACTOR, Case, cast, error, run
from tests.losses.dense_cross_entropy import ALONE, dense, leaves, weighted
from tests.training_runs import run_python
from tests.video.model.test_compiled import CASES as VIDEO_CASES

pytestmark = pytest.mark.gpu


def eagerly(case: Case, arguments: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(module.compiler, "backend", None)
        return run(case.function, arguments)


@pytest.mark.parametrize("case", [*CASES, *VIDEO_CASES], ids=lambda case: case.name)
def test_kernels_agree_with_eager_code(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.compiler, "strict", True)
    assert compiles(torch.ones(1, device="cuda"))
    arguments = cast(case.drawn("cuda"), torch.float64)
    truth = eagerly(case, arguments, monkeypatch)
    for index, (got, want) in enumerate(zip(run(case.function, arguments), truth, strict=True)):
        assert error(got, want) < 1e-10, index
    half = cast(arguments, torch.bfloat16)
    pairs = zip(run(case.function, half), eagerly(case, half, monkeypatch), truth, strict=True)
    for index, (got, eager, want) in enumerate(pairs):
        assert got.dtype == eager.dtype
        assert error(got, want) <= HALF_FACTOR * error(eager, want) + 1e-3, index


def kernels(step: Any) -> int:
    """Return the CUDA kernels of one call, after one that compiles."""
    step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return sum(
        event.count
        for event in profiled.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in event.key
    )


def test_a_norm_and_an_activation_are_a_few_kernels() -> None:
    x = torch.randn(512, 2, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gain = torch.ones(1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def normed() -> None:
        same, y = norm_with_residual(x, gain, None, ("RMSNorm", 1e-5, False))
        torch.autograd.grad((same, y), (x, gain), (x.detach(), x.detach()))

    def gated() -> None:
        y = activated(x, None, None, "silu", True)
        torch.autograd.grad(y, x, torch.ones_like(y))

    assert kernels(normed) <= 4  # forward, input gradient, and at most two for the sum over tokens
    assert kernels(gated) <= 3  # forward, backward, and the ones of this test


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
            assert float((one.double() - true).norm() / true.norm()) < tolerance


def test_products_are_added_in_float32() -> None:
    assert adds_in_float32(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("tokens", [96, 0])
def test_a_product_overwrites_an_old_gradient(tokens: int) -> None:
    gradient = torch.randn(tokens, 64, device=DEVICE, dtype=torch.bfloat16)
    entered = torch.randn(tokens, 32, device=DEVICE, dtype=torch.bfloat16)
    total = torch.full((64, 32), math.nan, device=DEVICE)
    add_product(total, gradient, entered, overwrite=True)
    truth = gradient.double().t() @ entered.double()
    torch.testing.assert_close(total.double(), truth, rtol=0, atol=1e-4)


@pytest.mark.parametrize("start", [0, 1])
def test_adam_in_one_pass_is_torchs(start: int) -> None:
    """Shards that begin between multiples of 16 bytes have a form of the kernel of their own."""
    from megatron_ext.optim.adam_kernel import GroupUpdate

    sizes, settings = (1, 1023, 70_000, 3_000_001), {"lr": 0.1, "weight_decay": 0.1}
    mine = [torch.randn(size + start, device=DEVICE)[start:] for size in sizes]
    theirs = [weight.clone() for weight in mine]
    adam = FusedAdam([torch.empty(0)], make_kernel=GroupUpdate, fused=True, **settings)
    adam.param_groups[0]["params"] = mine
    adam.copies = {weight: weight.to(torch.bfloat16) for weight in mine}
    plain = torch.optim.AdamW(theirs, fused=True, **settings)
    for bad in (False, True, False):
        for weight, other in zip(mine, theirs, strict=True):
            weight.grad = torch.randn_like(other)
            other.grad = weight.grad.clone()
        for each in (adam, plain):
            each.found_inf = torch.tensor(float(bad), device=DEVICE)  # type: ignore[attr-defined]
            each.grad_scale = torch.tensor(3.0, device=DEVICE)  # type: ignore[attr-defined]
            each.step()
    for weight, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-6)
        assert torch.equal(adam.copies[weight], weight.to(torch.bfloat16))
        assert float(adam.state[weight]["step"]) == 2.0


def costs(name: str, inputs: Inputs, setting: Setting) -> tuple[float, float]:
    """Return extra bytes, and median seconds after a first pass."""
    one_pass(WAYS[name], inputs, setting)
    inputs[0].grad = inputs[1].grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = median(one_pass(WAYS[name], inputs, setting)[0] for _ in range(5))
    return torch.cuda.max_memory_allocated() - before, seconds


def test_g3_a_seventh_of_eagers_memory_in_less_time() -> None:
    if torch.cuda.get_device_properties(DEVICE).total_memory < 70 * 2**30:
        pytest.skip("whole logits do not fit")
    with one_gpu() as context:
        inputs = make_inputs(*GPU_SIZE, 1, torch.bfloat16, "cuda")
        setting = Setting(None, context)
        eager, ours = (costs(name, inputs, setting) for name in ("eager", "weighted"))
    assert ours[0] <= 0.15 * eager[0]
    assert ours[1] <= 0.85 * eager[1]


SCRIPTS = ("gpu_throughput", "gpu_peers", "attention", "fp8_linear", "mmdit_block")


def test_the_matrix_rate_is_a_share_of_the_datasheets() -> None:
    sheet = peak_flops(torch.cuda.get_device_name())
    if sheet is None:
        pytest.skip(f"no datasheet of {torch.cuda.get_device_name()} is known")
    device = torch.device("cuda", 0)
    assert 0.4 * sheet < matrix_rate(device) < 1.1 * sheet
    if has_fp8(device):
        fp8 = matrix_rate(device, torch.float8_e4m3fn)
        assert 0.4 * 2 * sheet < fp8 < 1.1 * 2 * sheet


def test_copies_take_the_time_of_their_bytes() -> None:
    device = torch.device("cuda", 0)
    half, whole = (copy_rate(device, size) for size in (2**29, 2**30))
    assert half == pytest.approx(whole, rel=0.2)
    assert whole > 2e11


def test_the_doctor_finds_this_gpu() -> None:
    found = examine(ThisMachine())
    assert found.unknown == ()
    assert [gpu.name for gpu in found.gpus] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
    assert all(gpu.rates is not None and gpu.rates.bf16 > 1e12 for gpu in found.gpus)
    for name in ("NCCL", "CUDA graphs", "torch.compile"):
        assert found.finding(name).status == "found", found.finding(name)


@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmarks_run_at_a_tiny_size(script: str) -> None:
    done = run_python(f"benchmarks/{script}.py", "--tiny")
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) > 2
