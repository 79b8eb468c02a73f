"""Differences as a person would compute them."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from megatron_ext.device import select
from megatron_ext.errors import ConfigError
from megatron_ext.inspect import parity
from megatron_ext.inspect.cores import Environment
from megatron_ext.inspect.layouts import flags_of_run, parse_layout, split_layouts
from megatron_ext.programs import parity as tool
from megatron_ext.programs.parity import main, prove, train
from tests.training_runs import SAME_WEIGHTS, mock_data


def recording(
    folder: Path, name: str, loss: float = 2.0, gradient: float = 1.0
) -> parity.Recording:
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for step, (value, g) in enumerate([(3.0, 1.0), (loss, gradient)], start=1):
        rows.append({"iteration": step, "lm loss": value, "grad_norm": 1.0, "learning_rate": step})
        halves = [("w", (4,), (0,), torch.tensor([g, 1.0])), ("w", (4,), (2,), torch.ones(2))]
        for rank, part in enumerate(halves):
            torch.save([part], folder / f"gradients_{step:04d}_{rank:04d}.pt")
    return parity.Recording(parse_layout(name), folder, rows, padded_vocab_size=128)


def test_equal_runs_pass(tmp_path: Path) -> None:
    truth, mine = recording(tmp_path / "a", "dp1"), recording(tmp_path / "b", "tp2")
    result = parity.compare(mine, truth, parity.Tolerances())
    assert result.passed
    assert parity.compare(mine, truth, parity.Tolerances(0.0, 0.0)).passed
    assert (result.loss and result.loss.size, result.gradient and result.gradient.size) == (0, 0)


def test_the_first_divergence_is_named(tmp_path: Path) -> None:
    truth = recording(tmp_path / "a", "dp1")
    mine = recording(tmp_path / "b", "tp2", loss=2.0002, gradient=1.5)
    result = parity.compare(mine, truth, parity.Tolerances())
    assert not result.passed
    assert result.loss is not None and result.loss.size == pytest.approx(1e-4, rel=1e-3)
    # 0.5 over the norm of four ones.
    assert (result.first.step, result.first.name) == (2, "w")
    assert parity.read_gradients(tmp_path / "b", 2)["w"].tolist() == [1.5, 1.0, 1.0, 1.0]
    assert result.first.size == pytest.approx(0.25)
    shown = io.StringIO()
    Console(width=200, file=shown).print(parity.table([result], truth, parity.Tolerances()))
    text = shown.getvalue()
    assert "FAIL" in text and "step 2: w (2.5e-01)" in text


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rows": []}, "0 steps instead of 2"),
        ({"failure": "a rank ended with exit code 1"}, "a rank ended with exit code 1"),
        ({"padded_vocab_size": 256}, "the vocabulary is padded to 256, not 128"),
    ],
)
def test_what_has_no_match_fails(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    truth, mine = recording(tmp_path / "a", "dp1"), recording(tmp_path / "b", "tp2")
    result = parity.compare(
        parity.Recording(**{**vars(mine), **changes}), truth, parity.Tolerances()
    )
    assert not result.passed
    assert result.problem is not None and problem in result.problem


def test_a_gradient_that_one_run_lacks_is_infinitely_far(tmp_path: Path) -> None:
    truth, mine = recording(tmp_path / "a", "dp1"), recording(tmp_path / "b", "tp2")
    torch.save([("v", (1,), (0,), torch.ones(1))], mine.folder / "gradients_0001_0005.pt")
    result = parity.compare(mine, truth, parity.Tolerances())
    assert (result.first.step, result.first.name, result.first.size) == (1, "v", math.inf)


def test_each_kind_is_judged_by_its_own_tolerance(tmp_path: Path) -> None:
    """Losses, norms and gradients differ by 0.2, 0.5 and 0.3 in the second step."""
    truth = recording(tmp_path / "a", "dp1")
    mine = recording(tmp_path / "b", "tp2", loss=2.4, gradient=1.6)
    mine.rows[1]["grad_norm"] = 1.5
    for rank, kept in enumerate([torch.tensor([1.6, 1.0]), torch.ones(2)]):
        path = mine.folder / f"gradients_0002_{rank:04d}.pt"
        torch.save([("w", (4,), (2 * rank,), kept)], path)
    for loss, gradient, first in (
        (1.0, 1.0, None), (0.6, 0.2, "w"), (0.4, 0.4, "grad_norm"), (0.51, 0.29, "w"),
        (0.49, 0.31, "grad_norm"),
    ):  # fmt: skip
        result = parity.compare(mine, truth, parity.Tolerances(loss, gradient))
        assert (None if result.first is None else result.first.name) == first
        assert result.passed is (first is None)
        kinds = (result.loss, result.grad_norm, result.gradient)
        sizes = [0.0 if kind is None else kind.size for kind in kinds]
        assert sizes == pytest.approx([0.2, 0.5, 0.3])
    shown = io.StringIO()
    tolerances = parity.Tolerances(0.25, 0.125)
    Console(width=200, file=shown).print(parity.table([result], truth, tolerances))
    (cells,) = [line.split("│") for line in shown.getvalue().splitlines() if line[:1] == "│"]
    assert [cell.strip() for cell in cells[1:7]] == [
        "tp2",
        "2",
        "2.0e-01",
        "5.0e-01",
        "3.0e-01",
        "w",
    ]
    assert "over 2 steps (limits: 0.25, gradients 0.125)" in shown.getvalue()


def test_differences_are_relative_to_the_reference() -> None:
    assert parity.relative(3.0, 2.0) == 0.5
    assert parity.relative(-1.0, 2.0) == 1.5
    assert parity.relative(1.0, -2.0) == 1.5
    assert parity.gradient_difference(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])) == 0.75


def test_the_first_of_several_steps_that_diverge_is_named(tmp_path: Path) -> None:
    truth, mine = recording(tmp_path / "a", "dp1"), recording(tmp_path / "b", "tp2", loss=9.0)
    mine.rows[0]["lm loss"] = 3.3
    result = parity.compare(mine, truth, parity.Tolerances())
    assert (result.first.step, result.first.size) == (1, pytest.approx(0.1))
    assert result.loss is not None and (result.loss.step, result.loss.size) == (2, 3.5)


def test_a_loss_that_a_layout_lacks_is_infinitely_far(tmp_path: Path) -> None:
    truth, mine = recording(tmp_path / "a", "dp1"), recording(tmp_path / "b", "tp2")
    truth.rows[1]["mtp loss"] = 1.0
    result = parity.compare(mine, truth, parity.Tolerances())
    assert (result.first.step, result.first.name, result.first.size) == (2, "mtp loss", math.inf)


def test_numbers_that_are_not_finite() -> None:
    assert parity.relative(math.nan, math.nan) == 0
    assert parity.relative(1.0, math.nan) == math.inf
    assert parity.relative(0.0, 0.0) == 0
    assert parity.gradient_difference(torch.tensor([math.nan]), torch.ones(1)) == math.inf
    assert parity.gradient_difference(torch.zeros(2), torch.zeros(2)) == 0
    assert parity.gradient_difference(torch.ones(2), torch.ones(3)) == math.inf


@pytest.mark.parametrize(
    ("name", "ranks", "flags"),
    [
        ("dp1", 1, ""),
        ("tp2sp", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("pp2vpp3", 2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3"),
        ("cp2a2adp2", 4, "--context-parallel-size 2 --cp-comm-type a2a"),
        ("ep4", 4, "--expert-model-parallel-size 4"),
        ("ep2pp2", 4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2"),
        ("etp2ep3", 6, "--expert-tensor-parallel-size 2 --expert-model-parallel-size 3"),
        ("ep2tp2dp2", 4, "--expert-model-parallel-size 2 --tensor-model-parallel-size 2"),
        ("mbs4", 1, "--micro-batch-size 4"),
        ("pp4zbh1", 4, "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h1"),
        ("pp2[--bf16 --lr 1]", 2, "--pipeline-model-parallel-size 2 --bf16 --lr 1"),
    ],
)
def test_a_name_gives_ranks_and_flags(name: str, ranks: int, flags: str) -> None:
    layout = parse_layout(name)
    assert (layout.name, layout.ranks, list(layout.flags)) == (name, ranks, flags.split())


def test_every_step_is_logged_and_nothing_is_evaluated() -> None:
    flags = flags_of_run(["--lr", "1"], parse_layout("tp2"), 7)
    assert (
        flags
        == (
            "--lr 1 --tensor-model-parallel-size 2 --train-iters 7 --log-interval 1 --eval-iters 0 "
            "--nproc-per-node 2"
        ).split()
    )


@pytest.mark.parametrize(
    ("failing", "code"), [((), 0), ((0,), 1), ((1,), 1), ((2,), 1), ((0, 1, 2), 1)]
)
def test_one_layout_that_fails_decides_the_exit_code(
    failing: tuple[int, ...], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has the order of the layouts, and gradients of compared runs are removed."""
    layouts = split_layouts("tp2,pp2,cp2")
    losses = [2.2 if number in failing else 2.0 for number in range(3)]
    found = [recording(tmp_path / "truth", "dp1")]
    for layout, loss in reversed(list(zip(layouts, losses, strict=True))):
        found.append(recording(tmp_path / layout.name, layout.name, loss=loss))
    recordings: Any = (one for one in found)
    assert prove(recordings, layouts, parity.Tolerances(0.01, 0.2)) == code
    shown = capsys.readouterr().out
    cells = [line.split("│")[1].strip() for line in shown.splitlines() if line[:1] == "│"]
    assert cells == ["tp2", "pp2", "cp2"]
    assert shown.count("FAIL") == 2 * len(failing)
    left = {path.parent.name for path in tmp_path.glob("*/gradients_*")}
    assert left == {"truth"}


def test_tolerances_are_those_of_their_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[parity.Tolerances] = []

    def noted(recordings: Any, layouts: Any, tolerances: parity.Tolerances) -> int:
        seen.append(tolerances)
        return 0

    monkeypatch.setattr("megatron_ext.programs.parity.prove", noted)
    words = ["--layouts", "tp2", "--loss-tolerance", "0.5", "--gradient-tolerance", "0.25"]
    assert main([*words, "--", *FLAGS]) == main([*words[:2], "--", *FLAGS]) == 0
    assert seen == [parity.Tolerances(0.5, 0.25), parity.Tolerances(1e-6, 1e-5)]


def test_each_core_trains_the_reference_layout_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first core also trains it again where it is one of the layouts to compare."""
    trained: list[tuple[str, ...]] = []

    def noted(core: Environment, script: str, words: Any, layouts: Any, *rest: Any) -> list[Any]:
        trained.append((core.core, *(layout.name for layout in layouts)))
        assert rest == (3, tmp_path / core.core) and "parity" in script
        return []

    monkeypatch.setattr("megatron_ext.programs.parity.record_on", noted)
    environments = [Environment(name, Path(name)) for name in ("1", "2")]
    layouts = split_layouts("tp2,dp1,pp2")
    given: list[Any] = [[], parse_layout("dp1"), layouts, 3, environments, tmp_path, select()]
    assert list(train(*given)) == []
    assert trained == [("1", "dp1", "tp2", "dp1", "pp2"), ("2", "dp1", "tp2", "pp2")]


def test_commas_in_brackets_do_not_split_and_an_unknown_part_is_named() -> None:
    names = [layout.name for layout in split_layouts("tp2,pp2[--x a,b],cp2")]
    assert names == ["tp2", "pp2[--x a,b]", "cp2"]
    with pytest.raises(ConfigError, match="has `tp2xp3`, whose part `xp3` is not known; join"):
        parse_layout("tp2xp3")


FLAGS = [*SAME_WEIGHTS, *mock_data()]
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 "
    "--moe-token-dispatcher-type alltoall"
)
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 --deterministic-dropout"
MANY = "tp2sp,pp2vpp2,pp2zbh1,cp2,cp2a2a,cp4,dp4,mbs4,tp2sppp2vpp2,pp2vpp2cp2,tp2cp2dp2,pp4zbh1dp2"


def run(layouts: str, words: str, steps: int = 3) -> int:
    return main(["--layouts", layouts, "--steps", str(steps), "--", *FLAGS, *words.split()])


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        (f"{MANY},pp2zbv,pp2zbvtp2spdp2", "--eod-mask-loss"),
        ("tp2sp,pp2vpp2,tp2spcp2", "--eod-mask-loss --mtp-num-layers 2"),
        pytest.param("tp2sp,pp2zbh1,pp2zbv,cp2,ep2,ep2pp2vpp2dp2,tp2spcp2,ep4pp2zbh1dp4", EXPERTS,
                     marks=pytest.mark.slow),
        ("tp2spep2etp1,cp2", f"--num-experts 4 {DROPOUT} --moe-input-jitter-eps 0.1 "
         "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3"),
        ("tp2spetp1,tp2spetp1ep2,ep2etp2dp4,tp2spcp2etp1do", "--num-experts 4"),
        pytest.param("tp2sp,pp2vpp2,cp2a2a,dp2,mbs4,tp2sppp2cp2", DROPOUT, marks=pytest.mark.slow),
        ("pp2zbh1,pp2tp2sp,cp2dp2", "--mtp-num-layers 1 --no-untie-embeddings-and-output-weights"),
    ],
    ids=["dense", "mtp", "experts", "jitter", "whole and cut experts", "dropout", "tied mtp"],
)  # fmt: skip
def test_all_layouts_agree(layouts: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = run(layouts, words)
    shown = capfd.readouterr().out
    assert code == 0, shown
    assert shown.count(": PASS") == layouts.count(",") + 1


def test_weights_that_depend_on_the_layout_are_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Megatron-LM's own initialization draws each pipeline stage from its own seed."""
    assert run("pp2", "--use-cpu-initialization", steps=2) == 1
    shown = capfd.readouterr().out
    assert "pp2: FAIL" in shown
    assert "step 1: " in shown


@pytest.mark.parametrize(
    ("layouts", "words", "sentence"),
    [
        ("tp2xx", "", "whose part `xx` is not known"),
        ("tp2", "--save /tmp/x", "dp1: `--save` is given, but a parity run keeps nothing"),
        ("tp2", "--num-layers 0", "dp1: "),
    ],
)
def test_bad_flags_end_with_a_sentence(
    layouts: str, words: str, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(layouts, words) == 2
    assert sentence in capfd.readouterr().err


def test_a_layout_that_cannot_be_run_fails_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("tp4,dp2", "", steps=1) == 1
    shown = capfd.readouterr().out
    assert "tp4: FAIL" in shown and "dp2: PASS" in shown
    assert "must be divisible by" in shown


def test_options_of_the_tool_reach_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    runs: list[tuple[str, int, str]] = []
    monkeypatch.setattr(tool, "refuse_random_draws", lambda *_: None)

    def proven(*arguments: Any) -> int:
        given.append((*list(arguments[0]), *arguments[1:]))
        return 0

    monkeypatch.setattr(tool, "prove", proven)

    def record(_: Any, words: Any, layout: Any, steps: int, folder: Path, *__: Any) -> str:
        runs.append((str(layout.name), steps, folder.name))
        return str(layout.name)

    monkeypatch.setattr(tool, "record", record)
    options = "--layouts tp2,pp2 --against cp2 --steps 3 --loss-tolerance 0.1"
    assert main([*options.split(), "--gradient-tolerance", "0.2", "--", "--lr", "1"]) == 0
    ((*recordings, layouts, limits),) = given
    assert [layout.name for layout in layouts] == ["tp2", "pp2"]
    assert (limits.loss, limits.gradient) == (0.1, 0.2)
    assert recordings == ["cp2", "tp2", "pp2"]
    assert runs == [("cp2", 3, "0"), ("tp2", 3, "1"), ("pp2", 3, "2")]
