"""Weight gradients that products add to the gradient buffer, against autograd's and the hooks'."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.layers import weight_gradients
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.layers.weight_gradients import (
    DeferredWeightGradients,
    StepGradients,
    accumulate,
    add_product,
    expect_additions,
    gradient_placeholder,
    takes_overwrite,
    zero_untouched,
)
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepInputs
from tests.ranks import ParallelContext, on_ranks
from tests.runs_from_inside import build
from tests.training_runs import TINY, config_of, mock_data

FLAGS = [*TINY, *mock_data(), *"--train-iters 4 --eod-mask-loss --global-batch-size 8".split()]


def _matrices(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (24, 16), (96, 24), (96, 16)
    total, gradient, entered = (torch.randn(shape, generator=generator) for shape in shapes)
    return total.to(device), gradient.to(device, dtype), entered.to(device, dtype)


SINGLE, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "buffer", "device", "rtol", "atol"),
    [
        (SINGLE, SINGLE, "cpu", 0, 1e-5),
        (HALF, SINGLE, "cpu", 0, 0.2),  # bf16 rounds sums near 30
        (HALF, HALF, "cpu", 1e-2, 0.2),
        # Products of bf16 numbers are exact in float32, so a GPU rounds only its sums of 96.
        pytest.param(HALF, SINGLE, "cuda", 0, 1e-4, marks=pytest.mark.gpu),
    ],
)
def test_a_product_is_added(
    dtype: torch.dtype, buffer: torch.dtype, device: str, rtol: float, atol: float
) -> None:
    total, gradient, entered = _matrices(dtype, device)
    total = total.to(buffer)
    truth = total.double() + gradient.double().t() @ entered.double()
    add_product(total, gradient, entered)
    torch.testing.assert_close(total.double(), truth, rtol=rtol, atol=atol)


def test_autograd_gets_something_that_hooks_need_not_add() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    assert gradient_placeholder(weight).shape == weight.shape
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    assert not gradient_placeholder(weight).any()


def test_a_gradient_that_was_not_added_to_the_buffer_is_left_to_the_hooks() -> None:
    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            expect_additions(weight)
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    weight: Any = torch.nn.Parameter(torch.ones(3, 2))
    weight.zero_out_wgrad = True
    seen: list[tuple[bool, Tensor]] = []
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append((weight.grad_added_to_main_grad, weight.grad)))
    (Added.apply(weight) + (3 * weight).sum()).backward()  # type: ignore[no-untyped-call]
    weight.grad = None
    assert weight.zero_out_wgrad
    (Added.apply(weight) + Added.apply(weight)).backward()  # type: ignore[no-untyped-call]
    (mixed, gradient), (added, nothing) = seen
    assert not mixed and torch.equal(gradient, torch.full((3, 2), 3.0))
    assert added and not nothing.any() and nothing.untyped_storage().nbytes() == 4
    assert not weight.zero_out_wgrad


def _gradients(
    run: Run,
    batches: list,  # type: ignore[type-arg]
    *,
    in_place: bool,
    gradients: StepGradients | None = None,
) -> dict[str, Tensor]:
    """Return the gradients of a step, which begins with zeros or, by ``gradients``, with NaN."""
    run.runner.transformer_config.adds_in_place = in_place
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.params_with_grad if gradients is not None else ():
            parameter.main_grad.fill_(math.nan)
    if gradients is not None:
        gradients.start(overwrite=True)
    run.runner.compute_gradients(StepInputs(batches, run.batch_size.num_microbatches))
    return {
        f"{index}.{name}": parameter.main_grad.clone()
        for index, chunk in enumerate(run.chunks)
        for name, parameter in chunk.named_parameters()
    }


def _compare(context: ParallelContext, words: str) -> None:
    """Compare a step's gradients, made both ways, with those of weights that are used twice."""
    run = build([*FLAGS, *words.split()], context)
    batches = run.train_source.next_step(run.batch_size.num_microbatches)
    truth = _gradients(run, batches, in_place=False)
    found = _gradients(run, batches, in_place=True)
    layers = [p for c in run.chunks for p in c.parameters() if p.grad_added_to_main_grad]
    assert layers or "zb" in words
    for name, gradient in truth.items():
        difference = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert difference < 1e-6, name
    gradients = StepGradients(run.chunks)
    # The first use of the hooks and of the counts of --overlap-grad-reduce, and one after it.
    for _ in range(2):
        overwritten = _gradients(run, batches, in_place=True, gradients=gradients)
        assert all(torch.equal(overwritten[name], gradient) for name, gradient in found.items())
    trained = [parameter for chunk in run.chunks for parameter in chunk.params_with_grad]
    marked = [p for p in trained if hasattr(p, "overwrite_main_grad")]
    assert marked and not any(p.overwrite_main_grad for p in marked)
    if "num-experts" in words:
        idle = [name for name, gradient in found.items() if not gradient.any()]
        assert {name.rpartition(".")[0].rpartition(".")[2] for name in idle} == {
            "linear_fc1", "linear_fc2"
        }  # fmt: skip


TP2 = "--tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, "--mtp-num-layers 1 --no-untie-embeddings-and-output-weights "
         "--cross-entropy-impl eager"),
        ({}, "--num-experts 48 --moe-router-topk 2 --moe-ffn-hidden-size 16 --seq-length 16 "
         "--micro-batch-size 1 --global-batch-size 2 --recompute-granularity full "
         "--recompute-method uniform --recompute-num-layers 1"),
        ({"tp": 2, "dp": 2}, f"{TP2} --sequence-parallel"),
        ({"tp": 2, "pp": 2}, f"{TP2} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    ],
)  # fmt: skip
def test_a_step_has_the_gradients_of_the_hooks(sizes: dict[str, int], words: str) -> None:
    on_ranks(_compare, sizes, words=words)


def test_the_flag_decides_on_a_gpu() -> None:
    def adds(device: str, *words: str) -> bool:
        config = config_of([*FLAGS, "--transformer-impl", "torch", *words], device=device)
        return build_transformer_config(config).adds_in_place

    assert adds("cuda") and not adds("cpu")
    assert not adds("cuda", "--no-gradient-accumulation-fusion")


class _OldTorch:
    """torch before 2.11, which multiplies to float32, but does not add to it.

    Attributes:
        refuses: ``addmm`` raises an error; else it ignores the float32 matrix.
    """

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses

    def mm(self, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Any = None) -> Tensor:
        product = a.to(out_dtype) @ b.to(out_dtype)
        return product if out is None else out.copy_(product)

    def addmm(
        self, _total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor
    ) -> Tensor:
        if self.refuses:
            raise RuntimeError("self and mat2 must have the same dtype")
        return self.mm(a, b, out_dtype=out_dtype, out=out)


@pytest.fixture(params=[True, False], ids=["refuses", "ignores"])
def old_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a CPU stand for a GPU whose torch is old."""
    ones, old = torch.ones, _OldTorch(refuses=request.param)
    caches = weight_gradients.adds_in_float32, weight_gradients.multiplies_to_float32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", old.mm)
        patch.setattr(torch, "addmm", old.addmm)
        patch.setattr(torch, "ones", lambda *shape, device=None, **kind: ones(*shape, **kind))
        adds, multiplies = (cached(torch.device("cuda"), HALF) for cached in caches)
        assert multiplies and not adds
        patch.setattr(weight_gradients, "multiplies_to_float32", lambda device, dtype: True)
        yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_old_torch_rounds_nothing_to_16_bits(old_torch: None, overwrite: bool) -> None:
    """Products of bf16 numbers are exact in float32, which rounds only the sums of 96."""
    total, gradient, entered = _matrices(HALF, "cpu")
    truth = gradient.double().t() @ entered.double() + (0 if overwrite else total.double())
    add_product(total, gradient, entered, overwrite=overwrite)
    torch.testing.assert_close(total.double(), truth, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("dtype", "buffer"), [(SINGLE, SINGLE), (HALF, SINGLE), (HALF, HALF)])
def test_a_product_overwrites_what_is_not_a_number(dtype: torch.dtype, buffer: torch.dtype) -> None:
    total, gradient, entered = _matrices(dtype, "cpu")
    zeroed = torch.zeros_like(total, dtype=buffer)
    stale = torch.full_like(zeroed, math.nan)
    add_product(zeroed, gradient, entered)
    add_product(stale, gradient, entered, overwrite=True)
    assert torch.equal(stale, zeroed)
    idle = torch.full_like(zeroed, math.nan)
    add_product(idle, gradient[:0], entered[:0], overwrite=True)
    assert not idle.any()


def test_an_old_gradient_cannot_be_added_to_unseen() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.overwrite_main_grad = True  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="added to an old one"):
        gradient_placeholder(weight)


class Product(torch.nn.Linear):
    """A linear layer whose weight's gradient a product would add to the buffer itself."""

    overwrites = True


class Chunk(torch.nn.Module):
    """A chunk with the buffers of data parallelism: a product's weight, a shared one, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.head = Product(2, 3, bias=False), Product(2, 3, bias=False)
        self.embedding = torch.nn.Embedding(3, 2)
        self.head.weight = self.embedding.weight
        self.norm = torch.nn.LayerNorm(2)
        self.resets = 0
        self.bucket_groups = [SimpleNamespace(reset=self.count)]
        self.expert_parallel_bucket_groups = [SimpleNamespace(reset=self.count)]
        self.params_with_grad: list[Any] = list(self.parameters())
        for parameter in self.params_with_grad:
            parameter.main_grad = torch.full_like(parameter, math.nan)
            parameter.grad_added_to_main_grad = True

    def count(self) -> None:
        self.resets += 1

    def zero_grad_buffer(self) -> None:
        for parameter in self.params_with_grad:
            parameter.main_grad.zero_()


def test_a_step_begins_with_zeros_but_for_what_a_product_overwrites() -> None:
    """Weights that another module uses, too, are zeroed, and all hooks and counts begin anew."""
    chunk = Chunk()
    gradients = StepGradients([chunk])
    for step in (1, 2):
        gradients.start(overwrite=True)
        own = chunk.product.weight
        assert [p for p in chunk.params_with_grad if takes_overwrite(p)] == [own]
        assert [p for p in chunk.params_with_grad if p.main_grad.isnan().any()] == [own]
        assert not any(p.grad_added_to_main_grad for p in chunk.params_with_grad)
        assert chunk.resets == 2 * step
    gradients.start(overwrite=False)
    assert not any(p.main_grad.any() for p in chunk.params_with_grad)


def test_what_nothing_overwrote_is_zeroed_before_another_gradient_and_at_the_end() -> None:
    chunk = Chunk()
    StepGradients([chunk]).start(overwrite=True)
    weight: Any = chunk.product.weight
    chunk.product(torch.ones(1, 2)).sum().backward()
    assert not weight.main_grad.any() and not weight.overwrite_main_grad
    weight.main_grad.fill_(5)
    zero_untouched(chunk)
    assert weight.main_grad.eq(5).all()
    StepGradients([chunk]).start(overwrite=True)
    zero_untouched(chunk)
    assert not weight.main_grad.any() and not weight.overwrite_main_grad


def test_deferred_gradients_are_added_where_the_first_ones_went() -> None:
    gradient = torch.full((3, 2), 2.0)
    weight: Any = torch.nn.Parameter(torch.ones(3, 2))
    for total in (2.0, 4.0):
        accumulate(weight, gradient.clone())
        assert weight.grad.eq(total).all()
    weight.main_grad, weight.overwrite_main_grad = torch.full((3, 2), math.nan), True
    for total in (2.0, 4.0):
        accumulate(weight, gradient)
        assert weight.main_grad.eq(total).all() and weight.grad.eq(4.0).all()


def test_gradients_are_queued_by_micro_batch_and_only_inside_the_block() -> None:
    queue = DeferredWeightGradients()
    ran: list[str] = []
    for key, name in (((0, 0), "a"), ((1, 0), "b"), ((0, 0), "c")):
        with queue.collect(key):
            assert queue.collecting
            queue.add(lambda name=name: ran.append(name))
    assert not queue.collecting and ran == []
    queue.add(lambda: ran.append("now"))
    queue.compute((0, 0))
    queue.compute((0, 0))
    assert ran == ["now", "a", "c"]
    with pytest.raises(RuntimeError), queue.collect((2, 0)):
        raise RuntimeError
    assert not queue.collecting
