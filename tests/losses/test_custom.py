"""A loss in a file of the user's, against its dense form on one rank; and how it is named."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import Batch
from megatron_ext.errors import ConfigError
from megatron_ext.layers.auxiliary_loss import OutputHead
from megatron_ext.losses import contract
from megatron_ext.losses.custom import LossInputs, TokenLoss, TokenLossConfig, load_loss
from megatron_ext.losses.linear_cross_entropy import hidden_states_loss
from megatron_ext.losses.vocabulary import VocabularyHead
from megatron_ext.text.task import GPT
from megatron_ext.train.task import STEP_FLAGS
from tests.training_runs import SAME_WEIGHTS, mock_data, train, train_steps

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

OPTIONS = """
from dataclasses import dataclass

from megatron_ext.losses.custom import TokenLoss, TokenLossConfig


class Plain(TokenLoss["PlainConfig"]):
    name = "plain loss"
    extra_names = ("hits",)


@dataclass(frozen=True)
class PlainConfig(TokenLossConfig):
    loss_class = Plain
    limit: float | None = 1.0
    count: int = 1
    rule: str = ""

    def __post_init__(self):
        if self.count < 0:
            raise ValueError("count is negative")


@dataclass(frozen=True)
class Without(TokenLossConfig):
    pass
"""

FLAGS = [*SAME_WEIGHTS, *mock_data(), *"--eod-mask-loss --train-iters 4".split()]
FLAGS += ["--padded-vocab-size", "2048"]
GAMMA = 1.5


@pytest.fixture
def spec(tmp_path: Path) -> str:
    file = tmp_path / "my_loss.py"
    file.write_text(USERS_FILE)
    return f"{file}:CappedConfig"


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    """Return specs of losses by name: one with options of two types, and some that do not fit."""
    twice = OPTIONS.replace('("hits",)', '("hits", "hits")')
    for name, text in (("options", OPTIONS), ("twice", twice), ("broken", f"{OPTIONS}\ndef (")):
        (tmp_path / f"{name}.py").write_text(text)
    names = {name: f"{tmp_path / name}.py:PlainConfig" for name in ("options", "twice", "broken")}
    return {**names, "without": f"{tmp_path}/options.py:Without"}


def dense_forward_step(
    config: RunConfig, batch: Batch, model: torch.nn.Module, counts: contract.StepCounts | None
) -> tuple[Tensor, contract.LossFunction]:
    logits = model(batch.tokens, batch.position_ids, batch.attention_mask)
    log_p = logits.double().log_softmax(-1).gather(2, batch.labels.unsqueeze(2)).squeeze(2)
    losses = -((1 - log_p.exp()) ** GAMMA) * log_p
    share = counts.main / counts.weight
    loss = partial(contract.weighted_token_loss, weights=batch.loss_weights, share=share)
    return losses.float(), loss


DENSE = replace(GPT, forward_step=dense_forward_step, implements={dense_forward_step: STEP_FLAGS})


def test_trains_like_its_dense_form_on_four_ranks(spec: str, tmp_path: Path) -> None:
    """TP2 x PP2 against one rank, losses and norms to 1e-6."""
    own = [*FLAGS, "--loss", spec, "--loss-args", f"gamma={GAMMA}", "vocab_size=2048"]
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    found = train_steps([*own, *layout], tmp_path / "own", ranks=4)
    want = train_steps(own, tmp_path / "dense", task=DENSE)
    assert len(found) == 4
    for mine, truth in zip(found, want, strict=True):
        assert mine["capped loss"] == pytest.approx(truth["lm loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(truth["grad_norm"], rel=1e-6)


@pytest.mark.slow
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
        found[ranks, layout] = train([*words, *layout.split()], tmp_path / layout, ranks)
    for rows in found.values():
        assert {row["kind"] for row in rows} == {"train", "evaluation"}
        for row, want in zip(rows, found[1, ""], strict=True):
            assert row["one"] == pytest.approx(1, abs=1e-6)
            assert row["nll"] == pytest.approx(row["capped loss"], rel=1e-6)
            assert row["nll"] == pytest.approx(want["nll"], rel=1e-6)


def test_options_come_from_the_command_line_and_a_name_of_the_log_is_refused(spec: str) -> None:
    assert load_loss(spec, ("gamma=3",)).config.gamma == 3
    assert load_loss(spec).config.gamma == 2.0
    file = Path(spec.rpartition(":")[0])
    file.write_text(file.read_text().replace('name = "capped loss"', 'name = "grad_norm"'))
    with pytest.raises(ConfigError, match="reports `grad_norm`, a name that is taken; rename it"):
        load_loss(f"{file}:CappedConfig", ("gamma=7",))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("{file}:CappedConfig", ("gama=1",), "did you mean gamma?"),
        ("{file}:CappedConfig", ("gamma",), "must be FIELD=VALUE"),
        ("{file}:Capped", (), "must name a subclass"),
        ("{file}:CapedConfig", (), "has no CapedConfig; did you mean CappedConfig"),
        ("{file}:Nothing", (), "has no Nothing; name the class of its options that is in"),
        ("{file}", (), "must be module:Class or file.py:Class"),
        ("no_such_module:Config", (), "cannot be imported: No module named"),
        ("no_such_file.py:Config", (), "cannot be imported: .*No such file"),
        ("{options}", ("limit=.inf",), "must give `limit` as float, and numbers must be finite"),
        ("{options}", ("limit=nan",), "must give `limit` as float"),
        ("{options}", ("count=true",), "must give `count` as int"),
        ("{options}", ("count=1.5",), "must give `count` as int"),
        ("{options}", ("count=-1",), "cannot be built from {'count': -1}: count is negative"),
        ("{without}", (), "must name a subclass of .* with a `loss_class`"),
        ("{twice}", (), "reports `hits`, a name that is taken"),
        ("{broken}", (), "cannot be imported: .*broken.py"),
    ],
)
def test_what_cannot_be_loaded_is_said(
    spec: str, options: dict[str, str], name: str, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_loss(name.format(file=spec.rpartition(":")[0], **options), arguments)


def test_an_optional_number_may_be_null_and_a_run_has_one_loss_object(
    options: dict[str, str],
) -> None:
    """A loss may keep state from one step to the next."""
    loss = load_loss(options["options"], ("limit=null", "count=3"))
    assert (loss.config.limit, loss.config.count) == (None, 3)
    assert load_loss(options["options"]).config.limit == 1.0
    assert load_loss(options["options"], ("limit=2",)).config.limit == 2.0
    assert load_loss(options["options"], ("limit=null", "count=3")) is loss
    assert load_loss(options["options"], ("rule=a=b",)).config.rule == "a=b"


TOTAL, COUNT = torch.tensor(3.0), torch.tensor(3)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ((TOTAL, {}), r"`my_loss` returned 2 value\(s\), but .* three"),
        ((TOTAL, COUNT, {}, {}), r"`my_loss` returned 4 value\(s\), but .* three"),
        (TOTAL, r"`my_loss` returned 1 value\(s\), but .* three"),
        ((TOTAL, 3, {}), r"`my_loss` returned a count of type <class 'int'>"),
        ((TOTAL, torch.tensor(2.5), {}), r"`my_loss` returned a count of type torch.float32"),
        ((TOTAL, COUNT, {"lm loss": TOTAL}), r"reports `lm loss` with 1 value\(s\)"),
    ],
    ids=[
        "two values", "four values", "one value", "a plain count", "fractional count",
        "bare mean in the report",
    ],
)  # fmt: skip
def test_a_break_of_the_contract_is_refused_by_name(returned: Any, sentence: str) -> None:
    def my_loss(_output: Any, share: float = 1.0) -> Any:
        return returned

    for loss in (my_loss, partial(my_loss, share=0.5)):
        with pytest.raises(ConfigError, match=sentence):
            contract.checked(loss)(torch.ones(3))


def test_a_loss_that_takes_any_keyword_can_give_data() -> None:
    def my_loss(output: Tensor, **options: Any) -> Any:
        return output, options

    data, options = contract.checked(my_loss)(torch.ones(3), non_loss_data=True)
    assert data.tolist() == [1.0] * 3 and options == {"non_loss_data": True}


def test_reports_survive_in_place_division_of_the_loss() -> None:
    def aliased(output: torch.Tensor) -> Any:
        total = output.sum()
        return total, COUNT, {"lm loss": contract.pair(total, COUNT)}

    total, _, report = contract.checked(aliased)(torch.ones(3))
    total /= 100
    assert report["lm loss"].tolist() == [3.0, 3.0]

    def bare(output: torch.Tensor) -> Any:
        totals = torch.stack([output.sum(), output.sum()])
        return totals[0], COUNT, {"lm loss": totals}

    total, _, report = contract.checked(bare)(torch.ones(3, requires_grad=True))
    total.data /= 100
    assert report["lm loss"].tolist() == [3.0, 3.0]
    assert not report["lm loss"].requires_grad, "a report must not keep the graph of a step"


def test_weighted_token_loss_sums_the_targets_only() -> None:
    losses = torch.tensor([[1.0, 2.0, 4.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    total, count, report = contract.weighted_token_loss(losses, weights=mask)
    assert (float(total), int(count), report["lm loss"].tolist()) == (5.0, 2, [5.0, 2.0])


@pytest.mark.parametrize("per_token", [True, False])
def test_fractional_weights_make_a_weighted_mean(per_token: bool) -> None:
    """They may sum to less than 1; the step divides by the number of targets."""
    losses = torch.tensor([[2.0, 9.0, 4.0]])
    weights = torch.tensor([[0.25, 0.0, 0.125]])
    counts = contract.StepCounts(torch.tensor(2), weights.sum(), torch.zeros(0), 1)
    share = contract.share_of_step(weights, counts, per_token=per_token)
    total, count, report = contract.weighted_token_loss(losses, weights=weights, share=share)
    assert float(total / count) == pytest.approx((0.25 * 2 + 0.125 * 4) / 0.375)
    assert report["lm loss"].tolist() == [1.0, 0.375]
    assert contract.share_of_step(weights, None, per_token=per_token) == 1.0


def test_a_loss_of_ones_own_sees_the_soft_cap_and_the_runs_ignored_label() -> None:
    """It is logged with the tokens' weights alone; its gradient has the share of the step too."""
    generator = torch.Generator().manual_seed(1)
    b, s, h, v, ignored, softcap = 2, 5, 4, 11, 1000, 1.5
    hidden = torch.randn(s, b, h, generator=generator)
    weight = torch.randn(v, h, generator=generator)
    labels = torch.randint(0, v, (b, s), generator=generator)
    labels[0, 1] = ignored
    weights = torch.rand(b, s, generator=generator)
    inputs = LossInputs(weights, {"labels": labels})
    batch = Batch(labels, labels, weights, torch.arange(s).expand(b, s), loss_inputs=inputs)
    head = OutputHead(weight, None, False, None, softcap=softcap)  # type: ignore[arg-type]
    own = NegativeLogProb(TokenLossConfig())
    total, count, report = hidden_states_loss(
        hidden, head, batch, custom=own, share=3.0, block_size=3, ignore_index=ignored
    )
    logits = softcap * torch.tanh(hidden.transpose(0, 1) @ weight.T / softcap)
    at_label = logits.gather(2, labels.clamp(max=v - 1)[..., None])[..., 0]
    losses = logits.logsumexp(2) - torch.where(labels == ignored, 0.0, at_label)
    want = (losses * weights).sum()
    torch.testing.assert_close(total, 3 * want)
    torch.testing.assert_close(report["own"], torch.stack([want, weights.sum()]))
    assert int(count) == b * s


class NegativeLogProb(TokenLoss[TokenLossConfig]):
    name = "own"

    def token_losses(
        self, hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]
    ) -> Tensor:
        return -head.log_prob(head.logits(hidden), inputs["labels"])


PAGE = Path(__file__).resolve().parents[2] / "docs" / "losses.md"


def documented_step() -> Any:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["step"]


@pytest.mark.parametrize("reduction", ["token", "sample"])
@pytest.mark.parametrize("bias", [False, True])
def test_micro_batches_of_the_page_make_one_batch(reduction: str, bias: bool) -> None:
    """Truth is torch's cross-entropy over whole logits of all rows at once, in float64."""
    generator = torch.Generator().manual_seed(1)
    b, s, h, v, ignored = 4, 6, 8, 12, 3
    tokens = torch.randint(0, v, (b, s), generator=generator)
    labels = torch.randint(0, v, (b, s), generator=generator)
    labels[0, :4] = ignored
    torch.manual_seed(2)
    backbone, head = torch.nn.Embedding(v, h), torch.nn.Linear(h, v, bias=bias)
    parts = [(tokens[:1], labels[:1]), (tokens[1:], labels[1:])]
    loss = documented_step()(backbone, head, parts, reduction, ignored)
    found = [p.grad.clone() for p in (*backbone.parameters(), *head.parameters())]

    backbone, head = backbone.double(), head.double()
    backbone.zero_grad()
    head.zero_grad()
    each = F.cross_entropy(
        head(backbone(tokens)).transpose(1, 2), labels, reduction="none", ignore_index=ignored
    )
    counts = (labels != ignored).sum(1, keepdim=True)
    weights = (labels != ignored) / (counts if reduction == "sample" else 1)
    want = (each * weights).sum() / weights.sum()
    want.backward()
    assert loss == pytest.approx(float(want.detach()), rel=1e-6)
    for mine, parameter in zip(found, (*backbone.parameters(), *head.parameters()), strict=True):
        torch.testing.assert_close(mine.double(), parameter.grad, rtol=1e-5, atol=1e-7)
