"""A step that is computed again tells a transient fault from a property of the data."""

from pathlib import Path

import pytest

from megatron_ext.extras.chaos.inject import Fault, as_variable
from megatron_ext.train.run import Run
from tests.extras.resilience.silent_faults import Spoiler, run_with
from tests.training_runs import SAME_WEIGHTS, check_refused

LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2": (2, "--no-use-distributed-optimizer"),
    "cp2": (2, "--context-parallel-size 2 --attention-dropout 0"),
    "pp2vpp2bf16": (2, "--pipeline-model-parallel-size 2 --bf16 "
                    "--num-virtual-stages-per-pipeline-rank 2"),
    "ep2": (2, "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 "
            "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 "
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --bf16"),
    "mtp": (1, "--mtp-num-layers 1 --bf16"),
    "fp8": (1, "--bf16 --ffn-hidden-size 96 --fp8-format hybrid --fp8-recipe delayed"),
    "sharded": (2, "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads "
                "--overlap-grad-reduce --overlap-param-gather --bf16"),
    "tp2pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}  # fmt: skip


SLOW = ("tp2", "pp2", "cp2", "pp2vpp2bf16", "ep2", "mtp", "tp2pp2")


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in LAYOUTS]
)
def test_a_transient_fault_leaves_no_trace(layout: str, tmp_path: Path) -> None:
    """A gradient of step 3 is not finite, and step 4 gives other bits the second time."""
    ranks, words = LAYOUTS[layout]
    plain = run_with(words, tmp_path / "plain", ranks)
    rank = ranks - 1
    not_finite = Spoiler("linear_fc1", rank)
    wrong = Spoiler("linear_fc1", rank, iteration=4, factor=1.25, attempts=(1,))

    def prepare(run: Run) -> None:
        not_finite(run)
        wrong(run)

    words = f"{words} --rerun-mode validate_results --rerun-interval 4"
    ended = run_with(words, tmp_path / "disturbed", ranks, prepare=prepare)
    assert ended.curve == plain.curve
    assert ended.state == plain.state
    facts = [(e["kind"], e["iteration"], e["verdict"], e["ranks"]) for e in ended.events]
    wanted = [("non_finite", 3, "transient", [rank]), ("mismatch", 4, "second", [rank])]
    assert facts == wanted
    assert all("linear_fc1" in event["parameter"] for event in ended.events)


@pytest.mark.slow
def test_a_result_that_comes_again_is_skipped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoiler = Spoiler("linear_fc1", 1, attempts=range(9))
    words = "--tensor-model-parallel-size 2 --sequence-parallel"
    plain = run_with(words, tmp_path / "plain", 2, prepare=spoiler)
    told = capfd.readouterr().out
    assert (
        "> iteration 3 is not finite: the gradient of `module.decoder.layers.0.mlp.linear_fc1."
        "weight` first, on rank 1 (tensor 1); the loss is finite\n"
    ) in told
    words += " --rerun-mode validate_results"
    ended = run_with(words, tmp_path / "again", 2, prepare=spoiler)
    assert "computed again, it is the same: a property of the data or of the model\n" in (
        capfd.readouterr().out
    )
    assert ended.curve[3:] == plain.curve[3:]
    assert ended.state == plain.state
    assert plain.rows[2]["skipped_iterations"] == ended.rows[2]["skipped_iterations"] == 1
    for events, verdict in ((plain.events, None), (ended.events, "reproduced")):
        (event,) = events
        facts = event["kind"], event["rank"], event["cause"], event.get("verdict")
        assert facts == ("non_finite", 1, "gradient", verdict)


def test_results_that_never_come_again_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def prepare(run: Run) -> None:
        for attempt in range(3):
            factor = 1.0 + attempt / 4
            Spoiler("linear_fc1", 0, iteration=4, factor=factor, attempts=(attempt,))(run)

    mode = "--rerun-interval 2 --rerun-mode"
    ended = run_with(f"{mode} validate_results", tmp_path / "a", 1, prepare=prepare)
    (event,) = ended.events
    assert (event["iteration"], event["verdict"]) == (4, "nondeterministic")
    assert "kernels that are not deterministic" in capfd.readouterr().out
    run_with(f"{mode} report_stats", tmp_path / "b", 1, prepare=prepare)
    told = capfd.readouterr().out
    assert "> iteration 2 was computed twice: all gradients are the same\n" in told
    assert "> iteration 4 was computed twice with different results: up to 1 of " in told


def test_flags_that_need_each_other() -> None:
    check_refused([*SAME_WEIGHTS, "--rerun-interval", "2"], "`--rerun-interval` (2) needs `--rerun")
    check_refused(
        [*SAME_WEIGHTS, "--rerun-mode", "report_stats"],
        "`--rerun-mode` (report_stats) needs `--rerun-interval`",
    )


@pytest.mark.parametrize(
    ("at", "words"),
    [
        pytest.param("end of backward", "--tensor-model-parallel-size 2", marks=pytest.mark.slow),
        ("update", "--no-use-distributed-optimizer"),
    ],
)
def test_an_injected_gradient_leaves_no_trace(
    at: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At "update" a replica's gradient is spoiled after the replicas have summed theirs."""
    plain = run_with(words, tmp_path / "plain", 2)
    for name, value in as_variable([Fault("NaN gradient", 3, rank=1, at=at, seed=4)]).items():
        monkeypatch.setenv(name, value)
    ended = run_with(f"{words} --rerun-mode validate_results", tmp_path / "struck", 2)
    assert ended.state == plain.state
    (event,) = ended.events
    assert (event["kind"], event["iteration"], event["rank"]) == ("non_finite", 3, 1)
    assert event["verdict"] == "transient"
