"""torch's layers with Transformer Engine installed: torch's Adam, and checkpoints as core has them.

Transformer Engine is played by a class with its constructor and its place for the count of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron.core.optimizer as core_optimizer
import pytest
import torch
from megatron.core.optimizer import distrib_optimizer

from megatron_ext.optim.builder import CountedAdam, choose_kernels
from megatron_ext.train.run import Run
from tests.checkpoint.tiny import whole_tensors
from tests.training_runs import TINY, mock_data, train_on_ranks

SMALL = [
    *TINY,
    *mock_data(),
    *"--vocab-size 200 --num-layers 1 --hidden-size 32 --ffn-hidden-size 64".split(),
    *"--seq-length 16 --train-iters 4 --save-interval 2".split(),
]


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's Adam, as far as megatron-core builds it."""

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        *,
        adam_w_mode: bool,
    ) -> None:
        assert adam_w_mode
        names = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, {**names, "bias_correction": True})


@pytest.fixture
def installed() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (core_optimizer, distrib_optimizer):
            patch.setattr(module, "Adam", FusedAdam)
        patch.setattr(core_optimizer, "USING_PYTORCH_OPTIMIZER", False)
        patch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
        patch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
        yield patch


def _expect(run: Run) -> None:
    inner = run.optimizer.chained_optimizers[0].optimizer  # type: ignore[union-attr]
    assert isinstance(inner, CountedAdam)


def _train(folder: Path, *more: str, **options: Any) -> dict[str, torch.Tensor]:
    """Train, and return the whole tensors of the last checkpoint."""
    code, _ = train_on_ranks([*SMALL, *more], save=folder, **options)
    assert code == 0
    if "--exit-interval" in more:
        return {}
    return whole_tensors(folder / "iter_0000004", folder / "whole.pt")


@pytest.mark.slow
def test_checkpoints_go_on_with_and_without_transformer_engine(
    installed: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = tmp_path / "with"
    _train(first, "--exit-interval", "2", prepare=_expect)
    load = ["--load", str(first)]
    found = {"with": _train(tmp_path / "later", *load, prepare=_expect)}
    installed.undo()
    found["without"] = _train(tmp_path / "without", *load)
    truth = _train(tmp_path / "truth")
    for name, tensor in truth.items():
        for kind, tensors in found.items():
            assert torch.equal(tensors[name], tensor), (kind, name)


def test_what_a_checkpoint_does_not_say_keeps_its_default() -> None:
    """A checkpoint of torch's Adam resumes with Transformer Engine's."""
    weight = torch.nn.Parameter(torch.ones(2))
    theirs = torch.optim.AdamW([weight], lr=0.5).state_dict()
    ours = FusedAdam([weight], 0.1, 0.0, (0.9, 0.99), 1e-8, adam_w_mode=True)

    class Chain:
        chained_optimizers = (type("Part", (), {"optimizer": ours})(),)

    choose_kernels(Chain(), fused=True)  # type: ignore[arg-type]
    ours.load_state_dict(theirs)
    assert ours.param_groups[0]["bias_correction"] is True
    assert ours.param_groups[0]["lr"] == 0.5
