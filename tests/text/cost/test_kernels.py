"""Planned bytes and operations of a GPT's kernels, beside those of a traced layer and loss."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_setup import LLAMAS
from benchmarks.layer_traffic import DTYPE, LLAMA, gpt_step
from benchmarks.traffic import compiled_traffic
from megatron_ext.config.training import fused_rows
from megatron_ext.device.gpus import GPUS
from megatron_ext.losses.linear_cross_entropy import weighted_linear_cross_entropy
from megatron_ext.planning.hardware import Rates
from megatron_ext.planning.kernels import Phase, Work
from megatron_ext.text.cost.kernels import LOGIT, layer_kernels, layer_work
from megatron_ext.text.cost.network import GptNetwork
from tests.ranks import ParallelContext, ranks
from tests.training_runs import config_of


def network(size: str, length: int, more: str = "", batch: int = 1) -> GptNetwork:
    sizes = LLAMAS[size]
    flags = f"{' '.join(sizes.flags(length, batch))} --padded-vocab-size {sizes.vocab}"
    return GptNetwork.of(config_of(f"{flags} --bf16 {more}", device="cuda"))


def num_bytes(works: list[Work], kind: str) -> float:
    return sum(work.num_bytes for work in works if work.kind == kind)


@ranks()
def test_pointwise_bytes_are_those_of_a_traced_layer(context: ParallelContext) -> None:
    s, h = 128, 512
    more = (
        f"--hidden-size {h} --num-attention-heads 4 --num-query-groups 1 "
        f"--ffn-hidden-size {7 * h // 2} --kv-channels 128"
    )
    planned = num_bytes(layer_work(network("tiny", s, more), "*-"), "pointwise")
    step = gpt_step(context, LLAMA, torch.randn(s, 1, h, dtype=DTYPE))
    # Attention on a CPU gives gradients in another layout, which is copied.
    traced = [x for x in compiled_traffic(step).kernels if x.name != "copy_"]
    found = sum(kernel.num_bytes for kernel in traced if kernel.kind == "pointwise")
    assert planned == pytest.approx(found, rel=0.02)


def test_a_logit_is_read_once_and_overwritten_once() -> None:
    s, h, v = 64, 32, 4096
    hidden, weight = (torch.randn(n, h, dtype=DTYPE, requires_grad=True) for n in (s, v))
    labels, weights = torch.randint(v, (1, s)), torch.ones(1, s)

    def step() -> None:
        layout: dict[str, Any] = {"tp_group": None, "sequence_parallel": False}
        given: tuple[Tensor, ...] = (hidden.unsqueeze(1), weight, labels, weights)
        weighted_linear_cross_entropy(*given, **layout)[1].backward()  # type: ignore[no-untyped-call]

    passes = [x.num_bytes for x in compiled_traffic(step).kernels if x.name == "compiled"]
    assert sum(passes) == pytest.approx(LOGIT * s * v, rel=0.02)


LENGTH = 8192
SIZES = LLAMAS["3b"]
MATRICES = SIZES.layers * (
    SIZES.hidden * SIZES.head_size * (2 * SIZES.heads + 2 * SIZES.groups)
    + 3 * SIZES.hidden * SIZES.ffn
)
TABLE = SIZES.vocab * SIZES.hidden


def test_operations_of_a_3b_llama_by_class() -> None:
    """Six operations per weight and token; attention makes its scores again going back."""
    found = network("3b", LENGTH)
    works = found.work(found.stages()[0])
    counted = {work.kind: 0.0 for work in works}
    for work in works:
        counted[work.kind] += work.flops
    assert counted["linear"] == 6 * MATRICES * LENGTH
    assert counted["head"] == 6 * TABLE * LENGTH
    scores = SIZES.layers * 2 * SIZES.hidden * LENGTH**2
    assert counted["attention"] == (1 + 2.5) * scores
    model = counted["linear"] + counted["head"] + 3 * scores
    assert model == pytest.approx(SIZES.flops_per_token(LENGTH) * LENGTH)


def test_the_first_gradient_of_a_head_of_its_own_is_written_once() -> None:
    """A sum over blocks is read, 4 bytes; the buffer is written, and before that read or zeroed."""
    rows = 18 * LENGTH * SIZES.hidden
    for more, of_head in (("", 4 + 4), ("--no-untie-embeddings-and-output-weights", 12 + 4)):
        found = network("3b", LENGTH, more)
        planned = num_bytes(found.other_work(found.stages()[0]), "plumbing")
        assert planned == TABLE * (of_head + 4) + rows, more


def test_graphs_shorten_gaps_and_add_to_zeros() -> None:
    plain, graphed = (network("3b", LENGTH, more) for more in ("", "--cuda-graph-impl local"))
    works = [found.work(found.stages()[0]) for found in (plain, graphed)]
    rates = Rates(GPUS["H200"])
    gaps = [sum(map(rates.gaps, each)) for each in works]
    kernels = SIZES.layers * sum(layer_kernels(plain, "*-").values())
    assert gaps[0] - gaps[1] == pytest.approx(kernels * 0.4e-6)
    summed = [num_bytes(each, "weight gradients") for each in works]
    assert summed == [2 * MATRICES, 10 * MATRICES]


def test_blocks_of_the_loss_are_half_of_a_sequence_or_twice_the_width() -> None:
    assert [fused_rows(n, SIZES.hidden) for n in (2048, 8192, 8193, 32768)] == [
        1024, 4096, 4097, 2 * SIZES.hidden,
    ]  # fmt: skip
    found = network("3b", LENGTH)
    transient = found.loss().transient
    assert transient == 2 * 4096 * SIZES.vocab + 2 * LENGTH * SIZES.hidden


def test_recomputed_layers_run_their_forward_kernels_once_more() -> None:
    full = "--recompute-granularity full --recompute-method"
    runs = [
        network("1b", 2048, more)
        for more in ("", f"{full} uniform --recompute-num-layers 1",
                     f"{full} block --recompute-num-layers 2")
    ]  # fmt: skip
    works = [run.other_work(run.stages()[0]) for run in runs]
    plain, whole, block = (num_bytes(work, "pointwise") for work in works)
    layer = [x for x in layer_work(runs[0], "*-") if x.phase is Phase.FORWARD]
    again = num_bytes(layer, "pointwise")
    assert whole - plain == pytest.approx(runs[0].sizes.layers * again)
    assert block - plain == pytest.approx(2 * again)


def test_eight_bits_cast_inputs_gradients_and_weights() -> None:
    plain, eight = (
        network("3b", LENGTH, more) for more in ("", "--fp8-format hybrid --fp8-recipe tensorwise")
    )
    works = eight.work(eight.stages()[0])
    assert num_bytes(plain.work(plain.stages()[0]), "casts") == 0
    x = SIZES
    qkv = (x.heads + 2 * x.groups) * x.head_size
    inputs = x.hidden + x.heads * x.head_size + x.hidden + x.ffn
    gradients = qkv + x.hidden + 2 * x.ffn + x.hidden
    numbers = x.layers * (inputs + gradients) * LENGTH + MATRICES
    assert num_bytes(works, "casts") == 6 * numbers


def test_casts_with_given_scales_take_the_activation_along() -> None:
    """Joined, the activation reads 4 and writes 2 bytes per number, its gradient 3 and 2."""
    more = "--fp8-format hybrid --fp8-recipe"
    joined, apart = (network("3b", LENGTH, f"{more} {x}") for x in ("delayed", "tensorwise"))
    f, tokens = SIZES.ffn, SIZES.layers * LENGTH
    stages = joined.stages()[0], apart.stages()[0]
    pointwise, casts = (
        [num_bytes(x.work(stage), kind) for x, stage in zip((joined, apart), stages, strict=True)]
        for kind in ("pointwise", "casts")
    )
    assert pointwise[1] - pointwise[0] == tokens * (3 * f + 5 * f) * 2
    others = (casts[1] - 6 * 3 * f * tokens) * 4 / 6
    assert casts[0] == pytest.approx(others + tokens * (6 * f + 5 * 2 * f))
