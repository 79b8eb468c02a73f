"""Defects of megatron-core's losses (docs/numerics.md): what core does, and what we do instead."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import distributed
from megatron.core.enums import ModelType
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.losses.contract import checked, pair
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from tests.numerics.stock import cross_entropy, gpt_chunk, gpt_config, gradients, whole_batch, worst
from tests.ranks import ranks, run_on_ranks
from tests.training_runs import SAME_WEIGHTS, TINY, check_refused, errors_of, mock_data
from tools.parity import main as parity

MICROBATCHES = 4
Loss = Callable[[Tensor], tuple[Any, ...]]


class Scale(MegatronModule):  # type: ignore[misc]
    """``[1, 2, 3]`` times a number, so that the number's gradient is a sum of the positions."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, _tensor: Tensor | None) -> None:
        """Ignore the input; a single stage takes none."""

    def forward(self) -> Tensor:
        return self.weight * torch.tensor([1.0, 2.0, 3.0])


def step(loss: Loss, *, per_token: bool) -> tuple[float, list[Any]]:
    """Return the number's gradient after one step of core's schedule, and the loss's report."""
    transformer_config = TransformerConfig(
        num_layers=1, hidden_size=2, num_attention_heads=1, calculate_per_token_loss=per_token
    )
    transformer_config.finalize_model_grads_func = distributed.finalize_model_grads
    model = distributed.DistributedDataParallel(
        transformer_config, distributed.DistributedDataParallelConfig(), Scale(transformer_config)
    )

    def forward_step(_data: Iterator[Any], chunk: torch.nn.Module) -> tuple[Tensor, Loss]:
        return chunk(), loss

    reports = forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter(()),
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=3,
        micro_batch_size=1,
    )
    return float(model.module.weight.main_grad), reports


def mean_pair(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return output.mean(), {}


def weighted(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return output.sum(), torch.tensor(2.5), {}


@ranks()
def test_d17_fractional_counts_are_refused_by_name(context: ParallelContext) -> None:
    with pytest.raises(RuntimeError, match="result type Float can't be cast"):
        step(weighted, per_token=True)
    with pytest.raises(ConfigError, match=r"`weighted` returned a count of type torch.float32"):
        step(checked(weighted), per_token=True)


@ranks()
def test_d18_what_is_logged_survives_cores_divisions(context: ParallelContext) -> None:
    def bare(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = output.sum()
        return total, torch.tensor(3), {"lm loss": total.detach()}

    def ours(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = output.sum()
        return total, torch.tensor(3), {"lm loss": pair(total, torch.tensor(3))}

    _, stock = step(bare, per_token=False)
    # The sum is 12; core has divided it by 3 tokens and 4 micro-batches where it was logged.
    assert float(stock[0]["lm loss"]) == pytest.approx(12 / 3 / MICROBATCHES)
    _, mine = step(checked(ours), per_token=False)
    assert mine[0]["lm loss"].tolist() == [12.0, 3.0]


def check_pairs(context: ParallelContext, want: float) -> None:
    """Check a loss on ranks with equal micro-batches, whose mean has the gradient 2."""
    gradient, _ = step(mean_pair, per_token=True)
    assert gradient == pytest.approx(want)
    with pytest.raises(ConfigError, match=r"`mean_pair` returned 2 value\(s\), but .* three"):
        step(checked(mean_pair), per_token=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "context_parallel", "want"), [(1, 1, 2.0), (2, 1, 4.0), (1, 2, 8.0)]
)
def test_d19_pairs_are_refused_because_core_scales_them_with_the_layout(
    data: int, context_parallel: int, want: float
) -> None:
    """Data-parallel ranks add up, context-parallel ranks twice: nothing counts their targets."""
    layout = Layout(world_size=data * context_parallel, context_parallel_size=context_parallel)
    run_on_ranks(check_pairs, layout, {"want": want})


def logits_and_labels(vocabulary: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(16, 2, vocabulary, generator=generator)
    return logits, torch.randint(0, vocabulary, (16, 2), generator=generator)


def gradient_error(loss: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Return the largest error of a gradient over the largest gradient, in double precision."""
    logits, labels = logits_and_labels()
    exact = logits.double().requires_grad_()
    F.cross_entropy(exact.view(-1, 64), labels.view(-1), reduction="sum").backward()
    mine = logits.clone().requires_grad_()
    # Twice: the function writes into what it is given, and a leaf may not be.
    loss(mine * 1.0, labels).sum().backward()
    return float((mine.grad - exact.grad).abs().max() / exact.grad.abs().max())


@ranks()
def test_d22_stock_rounds_the_gradient_of_the_fused_loss_to_bf16(context: ParallelContext) -> None:
    fused = gradient_error(lambda x, y: fused_vocab_parallel_cross_entropy(x, y, context.pgs.tp))
    assert 5e-4 < fused < 5e-3
    assert gradient_error(vocab_parallel_cross_entropy) <= 1e-6


@ranks()
def test_d22_in_bf16_the_fused_gradient_is_the_unfused_one(context: ParallelContext) -> None:
    """The cast changes nothing there: bf16 logits take a bf16 gradient anyway."""
    logits, labels = logits_and_labels()
    found = []
    for fused in (True, False):
        mine = logits.bfloat16().requires_grad_()
        arguments = (mine, labels, context.pgs.tp) if fused else (mine, labels)
        loss = fused_vocab_parallel_cross_entropy if fused else vocab_parallel_cross_entropy
        loss(*arguments).sum().backward()
        found.append(mine.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("precision", ["", "--fp16"])
def test_d22_the_fused_loss_without_bf16_is_refused_and_none_on_a_cpu(precision: str) -> None:
    """The fused loss would round the gradient of every logit to eight bits."""
    words = f"--train-iters 1 --cross-entropy-loss-fusion {precision}".split()
    (error,) = errors_of([*TINY, *mock_data(), *words], device="cuda")
    assert "`--cross-entropy-loss-fusion`" in error and "`--bf16`" in error
    run = gpt_config("--cross-entropy-loss-fusion")
    assert not build_transformer_config(run).cross_entropy_loss_fusion


@ranks()
def test_d23_logits_are_overwritten_and_losses_are_right(context: ParallelContext) -> None:
    """Core's loss leaves the softmax in fp32 logits; nothing of ours reads them after it."""
    logits, labels = logits_and_labels()
    spoilt = logits.clone()
    vocab_parallel_cross_entropy(spoilt, labels)
    torch.testing.assert_close(spoilt, logits.softmax(-1))

    run = gpt_config()
    batch = whole_batch(run)
    inputs = (batch.tokens, batch.position_ids, None)
    chunk = gpt_chunk(run, context)
    losses = chunk(*inputs, labels=batch.labels)
    losses.mean().backward()
    mine = gradients(chunk)
    chunk.zero_grad()
    want = cross_entropy(chunk(*inputs).transpose(0, 1), batch.labels)
    want.mean().backward()
    torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-6)
    assert worst(mine, gradients(chunk)) <= 1e-5


def smoothing_error(group: ProcessGroup, smoothing: float) -> float:
    """Return the largest relative error of a loss with smoothed labels and a cut vocabulary."""
    full, labels = logits_and_labels()
    part = full.chunk(group.size(), dim=-1)[group.rank()].clone()
    mine = vocab_parallel_cross_entropy(part, labels, smoothing)
    # Core spreads the smoothing over the other words, torch over all of them.
    size = full.size(-1)
    exact = F.cross_entropy(
        full.double().view(-1, size),
        labels.view(-1),
        reduction="none",
        label_smoothing=smoothing * size / (size - 1),
    )
    return float((mine.view(-1) / exact - 1).abs().max())


@ranks()
def test_d24_the_formula_on_one_rank(context: ParallelContext) -> None:
    assert smoothing_error(context.pgs.tp, 0.1) <= 1e-5


@ranks(tp=2)
def test_d24_stock_smooths_labels_over_the_part_of_the_vocabulary(context: ParallelContext) -> None:
    assert smoothing_error(context.pgs.tp, 0.1) > 1e-2
    assert smoothing_error(context.pgs.tp, 0.0) <= 1e-5


def test_d24_ours_is_the_same_on_two_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    """tests/losses compares with torch's smoothing; here the flags are used, with the z-loss."""
    own = "--label-smoothing 0.1 --z-loss-coeff 1e-3".split()
    limits = "--steps 2 --loss-tolerance 1e-6 --gradient-tolerance 1e-5".split()
    code = parity(["--layouts", "tp2,tp2sp", *limits, "--", *SAME_WEIGHTS, *mock_data(), *own])
    assert code == 0, capfd.readouterr().out


def test_d24_whole_logits_are_not_smoothed() -> None:
    words = "--train-iters 1 --label-smoothing 0.1 --cross-entropy-impl eager".split()
    sentence = "`--label-smoothing` needs `--cross-entropy-impl chun"
    check_refused([*TINY, *mock_data(), *words], sentence)
