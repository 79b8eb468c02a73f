"""A loss in a file of the user's, against its dense form on one rank; and how it is named."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import Batch
from megatron_ext.errors import ConfigError
from megatron_ext.losses.contract import LossFunction, StepCounts, weighted_token_loss
from megatron_ext.losses.custom import load_loss
from megatron_ext.text.task import GPT
from tests.training_runs import TINY, mock_data, train_on_ranks, training_rows

USERS_FILE = '''
from dataclasses import dataclass

import torch

from megatron_ext.losses.custom import LossInputs, TokenLoss, TokenLossConfig


class Capped(TokenLoss["CappedConfig"]):
    """Focal loss, every token weighed by the share of the step's tokens that have its label."""

    name = "capped loss"

    def build(self, batches, context):
        counts = torch.zeros(self.config.vocab_size)
        for batch in batches:
            counted = batch.labels[batch.loss_weights > 0]
            counts += counted.bincount(minlength=self.config.vocab_size)
        torch.distributed.all_reduce(counts, group=context.pgs.dp_cp)
        rare = 1 / counts.clamp(min=1).sqrt()
        return [
            LossInputs(b.loss_weights * rare[b.labels], {"labels": b.labels}) for b in batches
        ]

    def token_losses(self, hidden, head, inputs):
        log_p = head.log_prob(head.logits(hidden), inputs["labels"])
        return -((1 - log_p.exp()) ** self.config.gamma) * log_p


@dataclass(frozen=True)
class CappedConfig(TokenLossConfig):
    loss_class = Capped
    gamma: float = 2.0
    vocab_size: int = 2048
'''

FLAGS = [word for word in TINY if word != "--use-cpu-initialization"]
FLAGS += [*mock_data(), "--eod-mask-loss", "--train-iters", "4", "--padded-vocab-size", "2048"]
GAMMA = 1.5


@pytest.fixture
def spec(tmp_path: Path) -> str:
    file = tmp_path / "my_loss.py"
    file.write_text(USERS_FILE)
    return f"{file}:CappedConfig"


def dense_forward_step(
    config: RunConfig, batch: Batch, model: torch.nn.Module, counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    """Compute the same formula on whole logits, in plain torch."""
    logits = model(batch.tokens, batch.position_ids, batch.attention_mask)
    log_p = logits.double().log_softmax(-1).gather(2, batch.labels.unsqueeze(2)).squeeze(2)
    losses = -((1 - log_p.exp()) ** GAMMA) * log_p
    assert counts is not None
    share = counts.main / counts.weight
    loss = partial(weighted_token_loss, weights=batch.loss_weights, share=share)
    return losses.float(), loss


DENSE = replace(GPT, forward_step=dense_forward_step, takes_step_flags=True)


def test_trains_like_its_dense_form_on_four_ranks(spec: str, tmp_path: Path) -> None:
    """TP2 x PP2 against one rank, losses and norms to 1e-6."""
    own = [*FLAGS, "--loss", spec, "--loss-args", f"gamma={GAMMA}", "vocab_size=2048"]
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    code, found = train_on_ranks([*own, *layout], ranks=4, save=tmp_path / "own")
    assert code == 0
    _, want = train_on_ranks(own, save=tmp_path / "dense", task=DENSE)
    assert len(training_rows(found)) == 4
    for mine, truth in zip(training_rows(found), training_rows(want), strict=True):
        assert mine["capped loss"] == pytest.approx(truth["lm loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(truth["grad_norm"], rel=1e-6)


def test_further_values_of_a_loss_are_in_the_log(spec: str, tmp_path: Path) -> None:
    """Means over the tokens with the loss's weights; the same on two ranks as on one."""
    file = Path(spec.rpartition(":")[0])
    text = file.read_text().replace(
        'name = "capped loss"', 'name = "capped loss"\n    extra_names = ("nll", "one")'
    )
    text = text.replace(
        "return -((1 - log_p.exp()) ** self.config.gamma) * log_p",
        "losses = -((1 - log_p.exp()) ** self.config.gamma) * log_p\n"
        '        return losses, {"nll": -log_p, "one": torch.ones_like(log_p)}',
    )
    file.write_text(text)
    words = [*FLAGS, "--loss", spec, "--loss-args", "gamma=0", "vocab_size=2048"]
    words += "--train-iters 2 --eval-iters 1 --eval-interval 1".split()
    found = {}
    for ranks, layout in ((1, ""), (2, "--tensor-model-parallel-size 2"), (2, "")):
        code, rows = train_on_ranks([*words, *layout.split()], ranks=ranks, save=tmp_path / layout)
        assert code == 0
        found[ranks, layout] = rows
    for rows in found.values():
        assert {row["kind"] for row in rows} == {"train", "evaluation"}
        for row, want in zip(rows, found[1, ""], strict=True):
            assert row["one"] == pytest.approx(1, abs=1e-6)
            assert row["nll"] == pytest.approx(row["capped loss"], rel=1e-6)
            assert row["nll"] == pytest.approx(want["nll"], rel=1e-6)


def test_a_name_that_the_log_has_already_is_refused(spec: str) -> None:
    file = Path(spec.rpartition(":")[0])
    file.write_text(file.read_text().replace('name = "capped loss"', 'name = "grad_norm"'))
    with pytest.raises(ConfigError, match="reports `grad_norm`, a name that is taken; rename it"):
        load_loss(f"{file}:CappedConfig", ("gamma=7",))


def test_options_come_from_the_command_line(spec: str) -> None:
    assert load_loss(spec, ("gamma=3",)).config.gamma == 3
    assert load_loss(spec).config.gamma == 2.0


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("{file}:CappedConfig", ("gama=1",), "did you mean gamma?"),
        ("{file}:CappedConfig", ("gamma",), "must be FIELD=VALUE"),
        ("{file}:Capped", (), "must name a subclass"),
        ("{file}:Nothing", (), "must name a subclass"),
        ("{file}", (), "must be module:Class or file.py:Class"),
        ("no_such_module:Config", (), "cannot be imported: No module named"),
        ("no_such_file.py:Config", (), "cannot be imported: .*No such file"),
    ],
)
def test_what_cannot_be_loaded_is_said(
    spec: str, name: str, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_loss(name.format(file=spec.rpartition(":")[0]), arguments)
