"""A user's own tasks get collected data, and learn what their model or step lacks."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import Batch
from megatron_ext.errors import ConfigError
from megatron_ext.losses.contract import LossFunction, StepCounts, checked, weighted_token_loss
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.text.task import GPT
from megatron_ext.train.task import STEP_FLAGS, Task
from tests.training_runs import SMALL as RUN
from tests.training_runs import train, train_on_ranks

PP2 = "--pipeline-model-parallel-size 2"


def collecting_loss(
    losses: Tensor, batch: Batch, non_loss_data: bool = False
) -> tuple[Tensor, Tensor, Any] | Tensor:
    """Return the loss, or the data to be looked at, as Megatron-LM's functions do."""
    if non_loss_data:
        return losses.detach().clone()
    return weighted_token_loss(losses, weights=batch.loss_weights)


def collecting_step(
    _config: RunConfig, batch: Batch, model: torch.nn.Module, _counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    output = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
    return output, partial(collecting_loss, batch=batch)


def write(collected: list[Tensor], iteration: int, writer: Any, *, file: Path) -> None:
    writer.add_scalar("highest loss", float(torch.stack(collected).max()), iteration)
    shapes = {tuple(x.shape) for x in collected}
    with file.open("a") as seen:
        seen.write(f"{iteration} {len(collected)} {shapes} {float(collected[0].sum()):.4f}\n")


def collecting_task(file: Path, **changes: Any) -> Task:
    process = partial(write, file=file)
    return dataclasses.replace(
        GPT, forward_step=collecting_step, process_non_loss_data=process, **changes
    )


@pytest.mark.parametrize(
    "words", [PP2, f"{PP2} --pipeline-schedule core-1f1b"], ids=["own", "core"]
)
def test_non_loss_data_of_the_last_stage_reaches_its_function(words: str, tmp_path: Path) -> None:
    seen = []
    for name, ranks, layout in (("one", 1, ""), ("two", 2, words)):
        file = tmp_path / name
        flags = [*RUN, *layout.split(), "--tensorboard-dir", str(tmp_path / f"board_{name}")]
        rows = train(flags, tmp_path / f"run_{name}", ranks, task=collecting_task(file))
        seen.append((file.read_text(), [row["lm loss"] for row in rows]))
    # Of four micro-batches: after both evaluations, and at the end those of both splits.
    lines = seen[0][0].splitlines()
    assert [line.split(" {")[0] for line in lines] == ["1 4", "2 4", "2 4", "2 4"]
    assert all("{(1, 32)}" in line for line in lines)
    assert seen[1][0] == seen[0][0]
    assert seen[1][1] == pytest.approx(seen[0][1], rel=1e-5)
    assert list((tmp_path / "board_two").glob("events*"))


def test_non_loss_data_may_come_from_a_function_of_the_model(tmp_path: Path) -> None:
    """Collecting costs a run without a writer nothing."""

    def norms(chunks: Any) -> list[Tensor]:
        return [torch.stack([p.norm() for p in chunk.parameters()]) for chunk in chunks]

    task = collecting_task(tmp_path / "seen", non_loss_data=norms)
    board = ["--tensorboard-dir", str(tmp_path / "board")]
    train(RUN, tmp_path / "bare", task=task)
    assert not (tmp_path / "seen").exists()
    train([*RUN, *board], tmp_path / "run", task=task)
    assert (tmp_path / "seen").read_text().startswith("1 1 {(")


def test_a_loss_that_cannot_give_non_loss_data_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="The loss `write` has no argument `non_loss_data`"):
        checked(write)(torch.zeros(1), non_loss_data=True)


class NoInput(torch.nn.Module):
    def sharded_state_dict(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("kind", "words", "missing"),
    [
        (torch.nn.Identity, "", "sharded_state_dict set_input_tensor"),
        (NoInput, "", "set_input_tensor"),
        (NoInput, PP2, "set_input_tensor pre_process share_embeddings_and_output_weights"),
        (NoInput, f"{PP2} --untie-embeddings-and-output-weights", "set_input_tensor"),
    ],
)
def test_a_model_that_lacks_what_training_needs_gets_a_sentence(
    kind: type, words: str, missing: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = dataclasses.replace(GPT, model_chunk=lambda *_, **__: kind())
    flags = [*RUN, *words.split()]
    assert train_on_ranks(flags, ranks=2 if words else 1, save=tmp_path, task=task)[0] == 2
    shown = capfd.readouterr().err
    assert "Traceback" not in shown
    for name in missing.split():
        assert f"The model `{kind.__name__}` has no `{name}`, by which" in shown
    told = {line.split("by which")[0].split("] ")[-1] for line in shown.splitlines()}
    assert len(told) == len(missing.split())


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--label-smoothing 0.1", "--label-smoothing"),
        ("--z-loss-coeff 0.1", "--z-loss-coeff"),
        ("--mtp-num-layers 1 --position-embedding-type rope", "--mtp-num-layers"),
        ("--cross-entropy-chunk-size 8", "--cross-entropy-chunk-size"),
        ("--loss examples/custom_loss/focal.py:FocalLossConfig", "--loss"),
    ],
)
def test_flags_that_a_step_leaves_out_are_refused(words: str, flag: str, tmp_path: Path) -> None:
    task = dataclasses.replace(GPT, model_chunk=build_gpt_chunk, forward_step=collecting_step)
    with pytest.raises(ConfigError) as caught:
        train_on_ranks([*RUN, *words.split()], save=tmp_path, task=task)
    (sentence,) = caught.value.messages
    assert sentence.startswith(
        f"`{flag}` is left out of account by the forward step and the model of this task "
        "(`collecting_step` and `build_gpt_chunk`); leave it out, or say"
    )
    implements = {collecting_step: f"{STEP_FLAGS} mtp-num-layers"}
    allowed = dataclasses.replace(task, implements=implements)
    train_on_ranks([*RUN, *words.split(), "--dry-run"], save=tmp_path, task=allowed)


def test_fine_tuning_with_datasets_of_pretraining_is_refused(tmp_path: Path) -> None:
    task = dataclasses.replace(GPT, model_chunk=build_gpt_chunk)
    run = [word for word in RUN if word != "--mock-data"]
    words = ["--sft", "--data-path", str(tmp_path / "none")]
    with pytest.raises(ConfigError) as caught:
        train_on_ranks([*run, *words], save=tmp_path, task=task)
    assert caught.value.messages[0].startswith(
        "`--sft` is left out of account by the datasets of this task (`build_datasets`); leave"
    )
