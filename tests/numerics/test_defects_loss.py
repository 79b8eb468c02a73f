"""Defects of megatron-core's losses (docs/numerics.md): what core does, and what we do instead."""

import math

import pytest
import torch
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.extras.audit import reproduce_losses as losses
from megatron_ext.extras.audit.reproduce_losses import logits_and_labels, train_step
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.losses.contract import checked, pair
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from megatron_ext.programs.parity import main as parity
from tests.numerics.reproductions import check_ratio
from tests.numerics.stock import cross_entropy, gpt_chunk, gpt_config, gradients, whole_batch, worst
from tests.ranks import ranks, run_on_ranks
from tests.training_runs import SAME_WEIGHTS, TINY, check_refused, errors_of, mock_data


def test_d17_stock_counts_no_fractions() -> None:
    found = check_ratio(losses.d17, {"0.16": math.nan, "0.19": math.nan})
    assert "result type Float can't be cast" in found.what


@ranks()
def test_d17_fractional_counts_are_refused_by_name(context: ParallelContext) -> None:
    with pytest.raises(ConfigError, match=r"`weighted_loss` returned a count of type torch.fl"):
        train_step(checked(losses.weighted_loss), per_token=True)


def test_d18_stock_divides_what_is_logged() -> None:
    """The sum is 12; core has divided it by 3 tokens and 4 micro-batches where it was logged."""
    check_ratio(losses.d18, {"0.16": 1 / 12, "0.19": 1 / 12})


@ranks()
def test_d18_what_is_logged_survives_cores_divisions(context: ParallelContext) -> None:
    def ours(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = output.sum()
        return total, torch.tensor(3), {"lm loss": pair(total, torch.tensor(3))}

    _, mine = train_step(checked(ours), per_token=False)
    assert mine[0]["lm loss"].tolist() == [12.0, 3.0]


def check_pairs(context: ParallelContext, want: float) -> None:
    """Check a loss on ranks with equal micro-batches, whose mean has the gradient 2."""
    gradient, _ = train_step(losses.mean_loss, per_token=True)
    assert gradient == pytest.approx(want)
    with pytest.raises(ConfigError, match=r"`mean_loss` returned 2 value\(s\), but .* three"):
        train_step(checked(losses.mean_loss), per_token=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "context_parallel", "want"), [(1, 1, 2.0), (2, 1, 4.0), (1, 2, 8.0)]
)
def test_d19_pairs_are_refused_because_core_scales_them_with_the_layout(
    data: int, context_parallel: int, want: float
) -> None:
    """Data-parallel ranks add up, context-parallel ranks twice: nothing counts their targets."""
    layout = Layout(world_size=data * context_parallel, context_parallel_size=context_parallel)
    run_on_ranks(check_pairs, layout, {"want": want})


def test_d19_stock_counts_context_parallel_ranks_twice() -> None:
    check_ratio(losses.d19, {"0.16": 4.0, "0.19": 4.0})


def test_d22_stock_rounds_the_gradient_of_the_fused_loss_to_bf16() -> None:
    check_ratio(losses.d22, {"0.16": 1.00188, "0.19": 1.00188}, rel=1e-5)


@ranks()
def test_d22_the_unfused_gradient_is_exact(context: ParallelContext) -> None:
    mine, exact = losses.logit_gradients(vocab_parallel_cross_entropy)
    assert float((mine - exact).abs().max()) <= 1e-6 * float(exact.abs().max())


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


def test_d23_stock_overwrites_logits() -> None:
    """Core's loss leaves the softmax, here 2e-8, where the logit -10.6 was."""
    check_ratio(losses.d23, {"0.16": -2.12e-9, "0.19": -2.12e-9}, rel=1e-2)


@ranks()
def test_d23_logits_are_overwritten_and_losses_are_right(context: ParallelContext) -> None:
    """Core's loss leaves the softmax in fp32 logits; nothing of ours reads them after it."""
    run = gpt_config()
    batch = whole_batch(run)
    inputs = (batch.tokens, batch.position_ids, None)
    chunk = gpt_chunk(run, context)
    found = chunk(*inputs, labels=batch.labels)
    found.mean().backward()
    mine = gradients(chunk)
    chunk.zero_grad()
    want = cross_entropy(chunk(*inputs).transpose(0, 1), batch.labels)
    want.mean().backward()
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    assert worst(mine, gradients(chunk)) <= 1e-5


@ranks()
def test_d24_the_formula_on_one_rank(context: ParallelContext) -> None:
    mine, exact = losses.smoothed_loss(context, 0.1)
    assert mine == pytest.approx(exact, rel=1e-5)


def test_d24_stock_smooths_labels_over_the_part_of_the_vocabulary() -> None:
    check_ratio(losses.d24, {"0.16": 1.017795, "0.19": 1.017795}, rel=1e-5)


@ranks(tp=2)
def test_d24_without_smoothing_the_part_is_enough(context: ParallelContext) -> None:
    mine, exact = losses.smoothed_loss(context, 0.0)
    assert mine == pytest.approx(exact, rel=1e-5)


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
