"""AdamW in one pass against torch's: its kernel, interpreted, and its place in a run."""

import gc
import importlib.util
import json
import math
import subprocess
import sys
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megatron_ext.layers import compiled
from megatron_ext.optim.builder import choose_kernels, kernel_for, take_torchs_adam
from megatron_ext.optim.fused_adam import Entry, FusedAdam, Settings
from megatron_ext.optim.update import decides_on_device, parts_of
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepInputs
from tests.host_syncs import HostSyncs
from tests.ranks import on_ranks
from tests.runs_from_inside import build
from tests.training_runs import ROOT, SMALL

SINGLE, HALF = torch.float32, torch.bfloat16
HAS_TRITON = importlib.util.find_spec("triton") is not None
WITH_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@WITH_TRITON
def test_the_kernel_updates_as_torch_does() -> None:
    """The weights are as near to float64's as torch's float32 kernel's; a bad step is skipped.

    The interpreter cuts off what bfloat16 cannot hold, where a GPU rounds: up to 2^-7 of a number.
    """
    command = [sys.executable, "-m", "tests.optim.fused_adam_on_cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)
    assert len(cases) == 4
    for name, found in cases.items():
        narrow = "bf16" in name
        assert found["weight"] < (0.02 if narrow else max(1e-6, 2 * found["torch"])), name
        assert found["exp_avg"] < (0.01 if narrow else 1e-7), name
        assert found["exp_avg_sq"] < (0.001 if narrow else 1e-8), name
        assert found["copy"] <= 2**-7, name


@WITH_TRITON
def test_every_form_of_the_kernel_compiles_for_sm_90() -> None:
    """No register is spilled, weights move 16 bytes at a time, and bfloat16 is rounded."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_for

    from megatron_ext.optim.adam_kernel import signatures

    for kernel, types, constants, options in signatures():
        if constants["EXP_AVG"] != constants["EXP_AVG_SQ"]:
            continue  # Both are among the forms; all are compiled in tests/gpu_proof.
        types = {**types, **dict.fromkeys(constants, "constexpr")}
        at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, types, constexprs=at)
        compiled = compile_for(source, GPUTarget("cuda", 90, 32), options=options)
        ptx = compiled.asm["ptx"]
        assert ".local" not in ptx and compiled.metadata.shared <= 8192
        assert ("ld.global.v4" in ptx) == constants["ALIGNED"]
        if constants["HAS_COPY"]:
            assert "cvt.rn.bf16" in ptx or "cvt.rn.f16" in ptx


class _PlainKernel:
    """The update of `Kernel` in plain torch, as in the paper on AdamW (arXiv:1711.05101)."""

    calls = 0

    def __call__(self, entries: Sequence[Entry], settings: Settings) -> None:
        type(self).calls += 1
        skipped, divisor, step_size, root = settings.scalars.double()
        if skipped:
            return
        for entry in entries:
            gradient = entry.gradient.double() / divisor
            entry.weight.mul_(1 - settings.lr * settings.weight_decay)
            entry.exp_avg.lerp_(gradient.float(), 1 - settings.beta1)
            entry.exp_avg_sq.lerp_(gradient.square().float(), 1 - settings.beta2)
            denominator = entry.exp_avg_sq.double().sqrt() / root + settings.eps
            entry.weight.sub_((step_size * entry.exp_avg.double() / denominator).float())
            if entry.copy is not None:
                entry.copy.copy_(entry.weight)


def _run(context: ParallelContext, words: str, *, one_pass: bool) -> Run:
    run = build([*SMALL, *words.split(), *"--bf16 --train-iters 4".split()], context)
    if one_pass:
        take_torchs_adam(run.optimizer, (SINGLE, SINGLE), _PlainKernel)
    choose_kernels(run.optimizer, fused=True)
    return run


def _step(run: Run, gradients: list[torch.Tensor], *, bad: bool) -> torch.Tensor:
    """Train a step; return all weights of the model, one after the other.

    The step has the given gradients; an empty list is filled with those that it computes.
    """
    trained = [parameter for chunk in run.chunks for parameter in chunk.parameters()]

    def look() -> None:
        if not gradients:
            trained[0].main_grad.fill_(math.nan if bad else 0.5)
            gradients.extend(parameter.main_grad.clone() for parameter in trained)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.main_grad.copy_(gradient)

    run.runner.observer = look
    number = run.batch_size.num_microbatches
    samples = run.batch_size.global_batch_size
    inputs = StepInputs(run.train_source.next_step(number), number)
    result = run.runner.train(inputs, samples)
    assert result.update.applied != bad
    return torch.cat([weight.detach().flatten() for weight in trained])


def _compare(context: ParallelContext, words: str) -> None:
    """Compare three steps and a skipped one with torch's kernel and megatron-core's copy."""
    truth, mine = (_run(context, words, one_pass=one_pass) for one_pass in (False, True))
    for bad in (False, True, False, False):
        gradients: list[torch.Tensor] = []
        weights, others = (_step(run, gradients, bad=bad) for run in (truth, mine))
        # Float32 weights near a border of bfloat16 may be rounded to either side of it.
        torch.testing.assert_close(others, weights, rtol=2**-7, atol=1e-6)
        assert (others != weights).float().mean() < 1e-3
    assert _PlainKernel.calls
    for part in parts_of(mine.optimizer):
        adam: FusedAdam = part.optimizer
        assert {float(state["step"]) for state in adam.state.values()} == {3.0}
        shards = [p for group in adam.param_groups for p in group["params"]]
        assert shards and set(adam.copies) == set(shards)
        for weight, copy in adam.copies.items():
            assert torch.equal(copy.view(-1), weight.to(HALF).view(-1))


@pytest.mark.parametrize(
    "words",
    [
        "--no-use-distributed-optimizer",
        "--use-distributed-optimizer --num-experts 4 --expert-model-parallel-size 2",
    ],
)
def test_core_optimizers_are_updated_in_one_pass(words: str) -> None:
    on_ranks(_compare, {"dp": 2}, words=words)


@pytest.mark.parametrize("moments", [(HALF, HALF), (SINGLE, HALF), (HALF, SINGLE)])
def test_moments_are_kept_in_16_bits(moments: tuple[torch.dtype, torch.dtype]) -> None:
    """Without a kernel torch updates; between steps the moments are rounded to their dtypes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, generator=generator)
    truth, settings = weight.double(), {"lr": 0.1, "weight_decay": 0.01}
    adam = FusedAdam([weight], moments=moments, **settings)
    exp_avg, exp_avg_sq = torch.zeros(50).double(), torch.zeros(50).double()
    for step in range(1, 5):
        weight.grad = torch.randn(50, generator=generator)
        adam.step()
        exp_avg = 0.9 * exp_avg + 0.1 * weight.grad.double()
        exp_avg_sq = 0.999 * exp_avg_sq + 0.001 * weight.grad.double().square()
        denominator = (exp_avg_sq / (1 - 0.999**step)).sqrt() + 1e-8
        truth -= 0.1 * 0.01 * truth + 0.1 * exp_avg / (1 - 0.9**step) / denominator
        exp_avg, exp_avg_sq = (
            x.to(dtype).double() for x, dtype in zip((exp_avg, exp_avg_sq), moments, strict=True)
        )
        state = adam.state[weight]
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == moments
        torch.testing.assert_close(state["exp_avg"].double(), exp_avg, rtol=2**-7, atol=0)
        torch.testing.assert_close(state["exp_avg_sq"].double(), exp_avg_sq, rtol=2**-7, atol=0)
        torch.testing.assert_close(weight.double(), truth, rtol=1e-2, atol=1e-2)
    again = FusedAdam([weight.clone()], moments=(HALF, SINGLE), **settings)
    again.load_state_dict(adam.state_dict())
    (state,) = again.state.values()
    assert [state[name].dtype for name in ("exp_avg", "exp_avg_sq")] == [HALF, SINGLE]
    assert torch.equal(state["exp_avg"], adam.state[weight]["exp_avg"].to(HALF))


def test_moments_in_16_bits_are_cast_one_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts of all at once would take 8 more bytes for each weight of the model."""
    weights = [torch.ones(50), torch.ones(70), torch.ones(3)]
    adam, wide = FusedAdam(weights, moments=(HALF, HALF)), []
    truth = FusedAdam([weight.clone() for weight in weights])
    step = torch.optim.AdamW.step

    def watched(self: FusedAdam, closure: Any = None) -> Any:
        moments = [state[name] for state in self.state.values() for name in ("exp_avg",)]
        wide.append(sum(moment.numel() for moment in moments if moment.dtype == SINGLE))
        return step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    for optimizer in (adam, truth):
        for parameter in optimizer.param_groups[0]["params"][:2]:
            parameter.grad = torch.full_like(parameter, 0.25)  # bfloat16 holds its moments
        optimizer.step()
    assert wide[:2] == [50, 70] and len(wide) == 3  # the third weight has no gradient
    for weight, other in zip(weights, truth.param_groups[0]["params"], strict=True):
        assert torch.equal(weight, other)
    assert [float(adam.state[weight]["step"]) for weight in weights] == [1, 1, 0]


def test_a_state_that_only_counts_steps_gets_its_moments() -> None:
    """A loaded group gives its count also to weights that have never been updated."""
    first, second = torch.ones(2), torch.ones(3)
    adam = FusedAdam([first, second])
    first.grad = torch.ones(2)
    adam.step()
    saved = adam.state_dict()
    del saved["state"][1]
    again = FusedAdam([first, second])
    again.load_state_dict(saved)
    assert list(again.state[second]) == ["step"]
    second.grad = torch.ones(3)
    again.step()
    assert float(again.state[second]["step"]) == 2.0
    torch.testing.assert_close(again.state[second]["exp_avg"], torch.full((3,), 0.1))


def test_an_update_waits_for_nothing() -> None:
    """A step is counted, and bias is corrected, on the device."""
    weight = torch.ones(4)
    weight.grad = torch.ones(4)
    given: list[Settings] = []
    adam = FusedAdam([weight], make_kernel=lambda: lambda _entries, now: given.append(now))
    adam.grad_scale = torch.tensor(2.0)
    with HostSyncs() as waits:
        for bad in (True, False, False):
            adam.found_inf = torch.tensor(float(bad))
            adam.step()
    assert not waits.places
    assert float(adam.state[weight]["step"]) == 2.0
    skipped, divisor, step_size, root = given[-1].scalars.tolist()
    assert (skipped, divisor) == (0.0, 2.0)
    assert math.isclose(step_size, 1e-3 / (1 - 0.9**2), rel_tol=1e-7)
    assert math.isclose(root, math.sqrt(1 - 0.999**2), rel_tol=1e-7)


def test_adam_is_known_where_adamw_is_a_class_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.6 AdamW is not derived from Adam; it has moments and decides all the same."""
    weight = torch.ones(4)
    weight.grad = torch.ones(4)
    adam = FusedAdam([weight], make_kernel=_PlainKernel)
    monkeypatch.setattr(torch.optim, "Adam", type("Adam", (torch.optim.Optimizer,), {}))
    part: Any = SimpleNamespace(optimizer=adam)
    assert not decides_on_device(part)
    choose_kernels(part, fused=True)
    assert decides_on_device(part)
    adam.step()
    assert set(adam.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}
    take_torchs_adam(part, (SINGLE, SINGLE), None)
    assert part.optimizer is adam


@WITH_TRITON
@pytest.mark.parametrize(("backend", "has_kernel"), [("inductor", True), (None, False)])
def test_torch_updates_where_nothing_is_compiled(
    backend: str | None, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a C compiler, or with ``--no-compile``, no kernel of Triton is chosen."""
    monkeypatch.setattr(compiled.compiler, "backend", backend)
    monkeypatch.setattr(compiled.compiler, "checked", True)
    with FakeTensorMode():
        weight = torch.empty(4, device="cuda")
    assert (kernel_for(weight) is not None) == has_kernel
    assert kernel_for(torch.empty(4)) is None


@WITH_TRITON
def test_moved_gradients_are_found_again_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host sends their addresses without waiting for the device, and keeps no gradient."""
    from megatron_ext.optim import adam_kernel

    launched: list[tuple[list[list[int]], list[list[int]]]] = []
    sent: list[torch.Tensor] = []

    class Launcher:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(table: torch.Tensor, chunks: torch.Tensor, *_: Any, **__: Any) -> None:
                assert grid == (len(chunks),)
                launched.append((table.tolist(), chunks.tolist()))

            return launch

    def send(host: torch.Tensor, _device: torch.device) -> torch.Tensor:
        assert host.device.type == "cpu"
        sent.append(host)
        return host

    monkeypatch.setattr(adam_kernel, "adam_kernel", Launcher())
    monkeypatch.setattr(adam_kernel, "to_device", send)
    monkeypatch.setattr(adam_kernel, "CHUNK", 8)
    weights = [torch.zeros(n) for n in (17, 8)]
    adam = FusedAdam(weights, make_kernel=adam_kernel.GroupUpdate)
    first = [torch.ones_like(weight) for weight in weights]
    for gradients in (first, first, [gradient.clone() for gradient in first]):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        adam.step()
        table, chunks = launched[-1]
        assert [row[0] for row in table] == [gradient.data_ptr() for gradient in gradients]
        assert [row[-1] for row in table] == [17, 8]
        assert chunks == [[0, 0], [0, 1], [0, 2], [1, 0]]
    assert len(launched) == 3 and len(sent) == 4
    kept = weakref.ref(weights[0].grad)
    del gradient, gradients, weights[0].grad
    gc.collect()
    assert kept() is None


def _bytes(*, moments: torch.dtype, copy: bool) -> int:
    def like(dtype: torch.dtype) -> Any:
        return torch.empty(10, dtype=dtype)

    kept = like(moments), like(moments)
    return Entry(like(SINGLE), like(SINGLE), *kept, like(HALF) if copy else None).num_bytes


def test_one_pass_moves_30_bytes() -> None:
    assert _bytes(moments=SINGLE, copy=True) == 10 * 30
    assert _bytes(moments=SINGLE, copy=False) == 10 * 28
    assert _bytes(moments=HALF, copy=True) == 10 * 22


def test_a_launch_has_tensors_of_the_same_types_and_alignment() -> None:
    """A single address that is no multiple of 16 bytes keeps a weight from 16-byte moves."""

    def entry(odd: int = -1, moment: torch.dtype = SINGLE, copy: torch.dtype = HALF) -> Entry:
        types = (SINGLE, SINGLE, SINGLE, moment, copy)
        tensors = [torch.zeros(16, dtype=dtype) for dtype in types]
        if odd >= 0:
            half_way = 8 // tensors[odd].element_size()
            tensors[odd] = tensors[odd][half_way:]
        return Entry(*tensors)

    plain = entry()
    assert plain.aligned and plain.kind == entry().kind
    for number in range(5):
        assert not entry(number).aligned and entry(number).kind != plain.kind
    for other in (entry(moment=HALF), entry(copy=SINGLE)):
        assert other.aligned and other.kind != plain.kind


@WITH_TRITON
def test_each_form_of_the_kernel_names_the_types_of_its_tensors() -> None:
    import triton.language as tl

    from megatron_ext.optim import adam_kernel

    def like(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(16, dtype=dtype)

    entry = Entry(like(SINGLE), like(SINGLE), like(HALF), like(SINGLE), like(torch.float16))
    chosen = adam_kernel.constants(entry)
    names = ("EXP_AVG", "EXP_AVG_SQ", "COPY", "HAS_COPY", "ALIGNED")
    assert [chosen[name] for name in names] == [tl.bfloat16, tl.float32, tl.float16, True, True]
    forms = {tuple(form[2].values()) for form in adam_kernel.signatures()}
    # Four pairs of moments, three kinds of copies, with and without alignment.
    assert len(forms) == 4 * 3 * 2 and tuple(chosen.values()) in forms


@WITH_TRITON
def test_weights_of_two_kinds_are_updated_in_two_launches() -> None:
    from megatron_ext.optim import adam_kernel

    def entry(size: int, moment: torch.dtype) -> Entry:
        kept = torch.zeros(size, dtype=moment), torch.zeros(size)
        return Entry(torch.zeros(size), torch.zeros(size), *kept)

    entries = [entry(1, SINGLE), entry(5, HALF), entry(0, SINGLE), entry(7, SINGLE)]
    launches = adam_kernel._launches(entries)
    assert [table[:, -1].tolist() for _, table, _ in launches] == [[1, 7], [5]]
    assert [table[:, 4].tolist() for _, table, _ in launches] == [[0, 0], [0]]
