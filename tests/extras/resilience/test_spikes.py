"""A leap of the loss or of the gradient norm is told, left out, or gone back from."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.extras.resilience.spikes import FLOORS, limit
from megatron_ext.train.run import Run
from tests.extras.resilience.silent_faults import FLAGS, NO_DROPOUT, Spoiler, run_with
from tests.reference import REFERENCE
from tests.training_runs import check_refused, parsed


def leaps(values: list[float], window: int, floor: float) -> list[int]:
    """Return the indices of spikes in a series, as a run with the default factor finds them."""
    return [
        index
        for index in range(window // 2, len(values))
        if values[index] > limit(values[max(0, index - window) : index], 8.0, floor)
    ]


def test_recorded_curves_have_no_spike_and_planted_ones_are_found() -> None:
    runs = json.loads((REFERENCE / "curves.json").read_text())["runs"]
    for run in runs.values():
        for name, floor in (("lm_loss", FLOORS["loss"]), ("grad_norm", FLOORS["grad_norm"])):
            values = [step[name] for step in run["iterations"]]
            assert leaps(values, 4, floor) == []
            planted = [*values[:9], 1.5 * max(values), *values[9:]]
            if name == "lm_loss":
                assert leaps(planted, 4, floor) == [9]


def test_a_long_noisy_curve_has_no_spike_but_those_planted() -> None:
    drawn = random.Random(5)
    losses = [2.0 + 6.0 / math.sqrt(step) + drawn.gauss(0, 0.05) for step in range(1, 3001)]
    norms = [0.4 * math.exp(drawn.gauss(0, 0.3)) for _ in range(3000)]
    for values, floor, size in ((losses, FLOORS["loss"], 1.6), (norms, FLOORS["grad_norm"], 12.0)):
        assert leaps(values, 128, floor) == []
        for at in (200, 1500, 2999):
            planted = [*values]
            planted[at] *= size
            assert leaps(planted, 128, floor) == [at]


def test_a_lasting_level_becomes_normal() -> None:
    values = [1.0] * 20 + [3.0] * 20
    assert leaps(values, 8, 0.02) == [20, 21, 22, 23]


class Without:
    """Leaves the batches of some steps, given by their places in the data from 1, out of a run."""

    def __init__(self, *left_out: int) -> None:
        self.left_out, self.number = left_out, 0

    def __call__(self, run: Run) -> None:
        next_step = run.train_source.next_step

        def later(num_microbatches: int, seq_length: int | None) -> Any:
            self.number += 1
            while self.number in self.left_out:
                next_step(num_microbatches, seq_length)
                self.number += 1
            return next_step(num_microbatches, seq_length)

        run.train_source.next_step = later  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        pytest.param(
            2, "--tensor-model-parallel-size 2 --sequence-parallel --bf16", marks=pytest.mark.slow
        ),
        (4, "--pipeline-model-parallel-size 2 --mtp-num-layers 1"),
        pytest.param(2, "--context-parallel-size 2", marks=pytest.mark.slow),
    ],
)
def test_a_skipped_spike_is_as_if_its_samples_had_not_been(
    ranks: int, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoiler = Spoiler("linear_fc1", ranks - 1, iteration=4, factor=1e3)
    words = f"{words} {NO_DROPOUT} --lr-decay-style constant"
    flags = f"{words} --spike-window 4 --on-spike"
    ended = run_with(f"{flags} skip", tmp_path / "skip", ranks, prepare=spoiler)
    assert ": its gradient norm is " in capfd.readouterr().out
    (event,) = ended.events
    wanted = {
        "kind": "spike",
        "iteration": 4,
        "first_sample": 48,
        "last_sample": 63,
        "leaped": ["grad_norm"],
        "action": "skip",
    }
    assert {key: event[key] for key in wanted} == wanted
    assert event["grad_norm"] > event["limits"]["grad_norm"] > ended.curve[2][1]
    plain = run_with(f"{words} --train-iters 4", tmp_path / "plain", ranks, prepare=Without(4))
    assert [*ended.curve[:3], ended.curve[4]] == plain.curve
    assert ended.state == plain.state
    logged = run_with(f"{flags} log", tmp_path / "log", ranks, prepare=spoiler)
    assert [e["iteration"] for e in logged.events if "grad_norm" in e["leaped"]] == [4]
    assert logged.state != plain.state


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        pytest.param(2, "--tensor-model-parallel-size 2", marks=pytest.mark.slow),
        (2, "--bf16 --ema-decay 0.9"),
        pytest.param(
            4,
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --bf16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_goes_back_and_leaves_out_what_led_to_a_spike(
    ranks: int, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Steps 5 and 6 are left out, with dropout and a falling rate, also after a resume."""
    words = f"{words} --train-iters 8"
    plain = run_with(f"{words} --train-iters 6", tmp_path / "plain", ranks, prepare=Without(5, 6))
    spoiler = Spoiler("linear_fc1", 0, iteration=6, factor=1e3)
    flags = f"{words} --spike-window 4 --on-spike rewind --save-interval 2"
    ended = run_with(flags, tmp_path / "rewound", ranks, prepare=spoiler)
    assert [*ended.curve[:4], *ended.curve[6:]] == plain.curve
    assert list(map(sorted, ended.state)) == list(map(sorted, plain.state))
    spike, rewind = ended.events
    assert (spike["kind"], spike["iteration"], spike["first_sample"]) == ("spike", 6, 80)
    assert (rewind["kind"], rewind["restored_iteration"]) == ("rewind", 4)
    assert "goes on with sample 96\n" in capfd.readouterr().out
    assert ended.rows[-1]["total_skipped_iterations"] == 2
    folder = tmp_path / "resumed"
    run_with(f"{flags} --exit-interval 4", folder, ranks)
    resumed = run_with(f"{flags} --load {folder}", folder, ranks, prepare=spoiler)
    assert resumed.curve[-3:] == ended.curve[-3:]
    assert resumed.events[-1]["restored_iteration"] == 4


def test_flags_of_spikes() -> None:
    check_refused([*FLAGS, "--on-spike", "rewind"], "`--on-spike` (rewind) needs whole checkpoints")
    notes = parsed([*FLAGS, "--spike-window", "8"]).notes
    assert "`--spike-window` has no effect without `--on-spike`." in notes
    check_refused([*FLAGS, "--on-spike", "log", "--spike-window", "3"], "`--spike-window` (3) must")
