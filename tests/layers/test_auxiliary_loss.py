"""A task's own auxiliary loss counts the same on every layout and micro-batch size."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from megatron_ext.inspect.parity import GradientRecorder, read_gradients
from megatron_ext.layers.auxiliary_loss import attach, attach_microbatch_loss
from megatron_ext.layers.initialization import shards_of
from megatron_ext.text.model.gpt import GPTModel, build_gpt_chunk
from megatron_ext.text.task import GPT
from megatron_ext.train.run import Run
from tests.training_runs import SAME_WEIGHTS, mock_data, train

COEFFICIENT = 0.3


class PenalizedGPT(GPTModel):
    """GPT whose first stage also keeps its embeddings small, averaged over the samples."""

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        hidden, *rest = super()._preprocess(*args, **kwargs)
        if hidden is not None and self.training:
            # Context-parallel ranks give parts that add up.
            penalty = COEFFICIENT * hidden.float().square().mean() / self.pg_collection.cp.size()
            hidden = attach_microbatch_loss(hidden, penalty, self.config)
        return hidden, *rest


def penalized_chunk(*args: Any, **kwargs: Any) -> GPTModel:
    chunk = build_gpt_chunk(*args, **kwargs)
    chunk.__class__ = PenalizedGPT
    return chunk


PENALIZED = replace(GPT, model_chunk=penalized_chunk, auxiliary_losses=True)
PLAIN = replace(GPT, model_chunk=build_gpt_chunk)


def gradients(task: Any, words: str, ranks: int, folder: Path) -> dict[str, Tensor]:
    """Return the gradients of the first step, and save the weights that it started from."""
    folder.mkdir()
    flags = [*SAME_WEIGHTS, *mock_data(), *"--train-iters 1 --eod-mask-loss".split()]

    def prepare(run: Run) -> None:
        run.runner.observer = GradientRecorder(folder, run)
        if run.context.rank == 0:
            weights = {s.name: s.tensor.detach().clone() for s in shards_of(run.chunks[0].module)}
            torch.save(weights, folder / "weights.pt")

    train([*flags, *words.split()], folder / "save", ranks, task=task, prepare=prepare)
    return read_gradients(folder, 1)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return gradients(PENALIZED, "", 1, tmp_path_factory.mktemp("one") / "run")


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("--micro-batch-size 4", 1),
        ("", 2),
        ("--context-parallel-size 2", 2),
        ("--tensor-model-parallel-size 2", 2),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1", 2),
        ("--pipeline-model-parallel-size 2 --context-parallel-size 2", 8),
    ],
)
def test_a_tasks_own_loss_does_not_depend_on_the_layout(
    words: str, ranks: int, one_rank: dict[str, Tensor], tmp_path: Path
) -> None:
    mine = gradients(PENALIZED, words, ranks, tmp_path / "run")
    for name, want in one_rank.items():
        assert float((mine[name] - want).norm() / want.norm()) <= 1e-5, name


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("", 1),
        ("--no-calculate-per-token-loss --micro-batch-size 4 --context-parallel-size 2", 2),
    ],
)
def test_the_loss_weighs_what_the_formula_says(words: str, ranks: int, tmp_path: Path) -> None:
    """The penalty's gradient by hand: that of the mean over all positions of the global batch."""
    with_, without = (
        gradients(task, words, ranks, tmp_path / name)
        for name, task in (("with", PENALIZED), ("without", PLAIN))
    )
    name = "embedding.word_embeddings.weight"
    weight = torch.load(tmp_path / "with" / "weights.pt")[name]
    difference = with_[name] - without[name]
    # d/dw of coefficient * sum(w^2) / (positions * hidden), for each use of the row.
    per_use = 2 * COEFFICIENT / (16 * 64 * 64)
    counted = (difference * weight).sum(dim=1) / weight.square().sum(dim=1) / per_use
    torch.testing.assert_close(counted, counted.round(), rtol=0, atol=1e-2)
    assert float(counted.sum()) == pytest.approx(16 * 64, rel=1e-4)


def test_attach_hands_both_gradients_on() -> None:
    class Config:
        grad_scale_func = staticmethod(lambda loss: loss * 8)

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    w = torch.tensor(3.0, requires_grad=True)
    out = attach(x * 1, (w * w).reshape(1), Config)
    out.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
    assert float(w.grad) == 8 * 6.0


SCENARIOS = [
    # scale, gradient of the attached loss to x and to y by itself -> gradients of loss, x and y
    (1.0, 0.0, (1.0, 3.0, 2.0)),
    (0.3, 0.0, (0.3, 3.0, 2.0)),
    (1.0, 3.0, (1.0, 6.0, 5.0)),
    (0.6, 3.0, (0.6, 4.8, 3.8)),
]
"""Attached losses on x y with x = 2 and y = 3, with and without a part in the parameters."""


@pytest.mark.parametrize(("scale", "slope", "want"), SCENARIOS)
def test_an_attached_loss_adds_its_scaled_gradient_and_no_more(
    scale: float, slope: float, want: tuple[float, float, float]
) -> None:
    """megatron-core's own function, with its scale, gives the same."""

    def gradients(attached: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, ...]:
        x, y = (torch.tensor(value, requires_grad=True) for value in (2.0, 3.0))
        free = torch.tensor(7.0, requires_grad=True)
        loss = slope * (x + y) if slope else free
        loss.retain_grad()
        attached(x * y, loss).backward()
        return tuple(float(tensor.grad) for tensor in (loss, x, y) if tensor.grad is not None)

    by_scaler = SimpleNamespace(grad_scale_func=lambda start: start * scale)
    assert gradients(partial(attach, transformer_config=by_scaler)) == pytest.approx(want)
    MTPLossAutoScaler.set_loss_scale(torch.tensor(scale))
    try:
        assert gradients(MTPLossAutoScaler.apply) == pytest.approx(want)
    finally:
        MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
