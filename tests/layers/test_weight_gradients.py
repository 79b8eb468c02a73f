"""Weight gradients that products add to the gradient buffer, against autograd's and the hooks'."""

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.layers.weight_gradients import add_product, gradient_placeholder
from megatron_ext.train.run import Run
from tests.ranks import ParallelContext, ranks
from tests.runs_from_inside import build
from tests.training_runs import TINY, config_of, mock_data

FLAGS = [*TINY, *mock_data(), *"--train-iters 4 --eod-mask-loss --global-batch-size 8".split()]


def _matrices(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (24, 16), (96, 24), (96, 16)
    total, gradient, entered = (torch.randn(shape, generator=generator) for shape in shapes)
    return total.to(device), gradient.to(device, dtype), entered.to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added(dtype: torch.dtype) -> None:
    total, gradient, entered = _matrices(dtype, "cpu")
    truth = total.double() + gradient.double().t() @ entered.double()
    add_product(total, gradient, entered)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.2}[dtype]  # bf16 rounds sums near 30
    torch.testing.assert_close(total.double(), truth, rtol=0, atol=tolerance)


def test_a_buffer_in_16_bits_takes_it_too() -> None:
    total, gradient, entered = _matrices(torch.bfloat16, "cpu")
    total = total.bfloat16()
    truth = total.double() + gradient.double().t() @ entered.double()
    add_product(total, gradient, entered)
    torch.testing.assert_close(total.double(), truth, rtol=1e-2, atol=0.2)


@pytest.mark.gpu
def test_a_gpu_never_rounds_the_sum_to_16_bits() -> None:
    """Products of bf16 numbers are exact in float32, so only its sums of 96 are rounded."""
    total, gradient, entered = _matrices(torch.bfloat16, "cuda")
    truth = total.double() + gradient.double().t() @ entered.double()
    add_product(total, gradient, entered)
    torch.testing.assert_close(total.double(), truth, rtol=0, atol=1e-4)


def test_autograd_gets_something_that_hooks_need_not_add() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    assert gradient_placeholder(weight).shape == weight.shape
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    assert not gradient_placeholder(weight).any()


def _gradients(run: Run, batches: list, *, in_place: bool) -> dict[str, Tensor]:  # type: ignore[type-arg]
    run.runner.transformer_config.adds_in_place = in_place
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    run.runner.forward_backward(batches, run.batch_size.num_microbatches, forward_only=False)
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


@pytest.mark.parametrize(
    "words",
    [
        "--mtp-num-layers 1 --no-untie-embeddings-and-output-weights --cross-entropy-impl eager",
        "--num-experts 4 --moe-router-topk 2 --recompute-granularity full --recompute-method "
        "uniform --recompute-num-layers 1",
    ],
)
@ranks()
def test_a_step_has_the_gradients_of_the_hooks(context: ParallelContext, words: str) -> None:
    _compare(context, words)


@ranks(tp=2, dp=2)
def test_a_cut_sequence_has_the_gradients_of_the_hooks(context: ParallelContext) -> None:
    _compare(context, "--tensor-model-parallel-size 2 --sequence-parallel")


@ranks(tp=2, pp=2)
def test_deferred_gradients_are_those_of_the_hooks(context: ParallelContext) -> None:
    words = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    _compare(context, f"{words} --pipeline-schedule zb-h1")


def test_the_flag_decides_on_a_gpu() -> None:
    def adds(device: str, *words: str) -> bool:
        config = config_of([*FLAGS, "--transformer-impl", "torch", *words], device=device)
        return build_transformer_config(config).adds_in_place

    assert adds("cuda") and not adds("cpu")
    assert not adds("cuda", "--no-gradient-accumulation-fusion")
