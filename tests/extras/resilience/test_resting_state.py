"""A bit that flips between two updates is found, with its rank and its tensor."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.disk.events import read_events
from megatron_ext.extras.chaos.inject import Fault, as_variable
from megatron_ext.extras.resilience.replay import digest
from megatron_ext.extras.resilience.resting_state import resting_tensors
from megatron_ext.text.task import GPT
from megatron_ext.train.main import main
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepInputs, StepLosses
from tests.extras.resilience.silent_faults import FLAGS, FinalState, run_with, state_of
from tests.training_runs import split, train_on_ranks


def test_any_flipped_bit_changes_the_digest() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        base = torch.arange(40).to(dtype)
        for tensor in (base, base[1:], base[3:30], base[:2], base[:0], base[::3]):
            before = digest(tensor)
            whole = tensor.contiguous()
            for element in range(tensor.numel()):
                for bit in range(8 * dtype.itemsize):
                    changed = whole.clone()
                    _flip(changed, element, bit)
                    assert digest(changed) != before


def _flip(tensor: Tensor, element: int, bit: int) -> None:
    size = tensor.element_size()
    octets = tensor.detach().view(-1).view(torch.uint8).numpy()
    octets[element * size + bit // 8] ^= 1 << bit % 8


def _flips(where: str, rank: int) -> Callable[[Run], None]:
    """Return what flips a bit of a tensor during the fourth step, before its backward pass ends."""

    def prepare(run: Run) -> None:
        compute = run.runner.compute_gradients

        def flipping(inputs: StepInputs) -> StepLosses:
            if run.context.rank == rank and run.progress.iteration == 3:
                named = resting_tensors(run)
                tensor = next(x for name, x in named if where in name and x.numel() > 5)
                _flip(tensor, 5, 3)
            return compute(inputs)

        run.runner.compute_gradients = flipping  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize(
    ("words", "ranks", "where", "told"),
    [
        pytest.param(
            "--tensor-model-parallel-size 2", 2, "weight `module.decoder.layers.1.mlp.linear_fc2",
            "weight `module.decoder.layers.1.mlp.linear_fc2.weight` changed on rank 1 (tensor 1)",
            marks=pytest.mark.slow,
        ),
        ("--bf16", 2, "the optimizer's copy", "weight` changed on rank 1 (data 1)"),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2,
         "`exp_avg_sq` of weight `chunk 1: module.decoder.layers.0.mlp.linear_fc1",
         "linear_fc1.weight` changed on rank 1 (pipeline 1)"),
    ],
)  # fmt: skip
def test_a_flipped_bit_ends_the_run(
    words: str, ranks: int, where: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [*FLAGS, *split(words), "--check-state-interval"]
    prepare = _flips(where, ranks - 1)
    code, _ = train_on_ranks([*flags, "2"], ranks=ranks, save=tmp_path / "found", prepare=prepare)
    output = capfd.readouterr()
    assert code == 1
    assert f"{told}, although only updates may change it" in output.err
    assert f"{told}, between two updates" in output.out
    code, _ = train_on_ranks([*flags, "3"], ranks=ranks, save=tmp_path / "other", prepare=prepare)
    assert code == 0


def test_a_state_at_rest_is_left_alone(tmp_path: Path) -> None:
    more = "--ema-decay 0.9 --eval-iters 1 --eval-interval 2"
    plain = run_with(more, tmp_path / "plain", 2)
    assert (
        run_with(f"{more} --check-state-interval 1", tmp_path / "watched", 2).state == plain.state
    )


@pytest.mark.parametrize("at", ["step", "update"])
def test_an_injected_bit_is_met(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in as_variable([Fault("bit flip", 3, rank=1, at=at)]).items():
        monkeypatch.setenv(name, value)
    flags = [*FLAGS, "--bf16", "--check-state-interval", "1"]
    code, rows = train_on_ranks(flags, ranks=2, save=tmp_path)
    assert (code, len(rows)) == (1, 2)
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["iteration"], event["rank"]) == ("mismatch", 3, 1)
    assert "During iteration 3 weight `" in capfd.readouterr().err


@pytest.mark.slow
def test_a_restart_mends_a_flipped_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_with("--bf16", tmp_path / "plain", 2)
    for name, value in as_variable([Fault("bit flip", 4, rank=0, at="forward")]).items():
        monkeypatch.setenv(name, value)
    save = tmp_path / "struck"
    words = [*FLAGS, "--bf16", *"--check-state-interval 1 --max-restarts 1".split()]
    words += ["--save-interval", "2", "--nproc-per-node", "2", "--save", str(save)]
    assert main(replace(GPT, callbacks=(FinalState,)), words) == 0
    # A loaded optimizer keeps the states of its parameters in another order.
    assert list(map(sorted, state_of(save, 2))) == list(map(sorted, plain.state))
    kinds = [event["kind"] for event in read_events(save)]
    assert kinds.count("mismatch") == kinds.count("fault") == 1
