"""Multi-token prediction on every layout: gradients of one rank, and equal embedding copies."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.run import RunConfig
from megatron_ext.device import select
from megatron_ext.errors import ConfigError
from megatron_ext.inspect.layouts import parse_layout
from megatron_ext.inspect.parity import Parity, Recording, Tolerances, compare, record
from megatron_ext.text.task import GPT
from megatron_ext.train import pretrain
from tests.training_runs import TINY, config_of, mock_data, train

PLACE = "--pipeline-model-parallel-layout"
UNTIE = "--untie-embeddings-and-output-weights"
DEPTHS = "--mtp-num-layers 2 --eod-mask-loss".split()
MODEL = [word for word in TINY if word not in (UNTIE, "--use-cpu-initialization")]
TIES = {"untied": [UNTIE], "tied": []}

LAYOUTS = {
    "mbs1": "mbs1",
    "mbs4": "mbs4",
    "dp2": "dp2",
    "cp2": "cp2",
    "tp2+sp": "tp2sp",
    "pp2": "pp2",
    "pp2xvpp2": "pp2vpp2",
    "pp4 own stage": f"pp4[{PLACE} Ett|tt|mm|L]",
    "pp4 with a layer": f"pp4[{PLACE} Et|t|ttmm|L]",
    "pp3xvpp2 own stage": f"pp3[{PLACE} Et|t|t|t|mm|L]",
    "pp4 own stage zb-h1": f"pp4[{PLACE} Ett|tt|mm|L --pipeline-schedule zb-h1]",
    "pp4 own stage core": f"pp4[{PLACE} Ett|tt|mm|L --pipeline-schedule core-1f1b]",
}


def run_layout(name: str, tie: str, folder: Path, *more: str, steps: int = 1) -> Recording:
    words = [*MODEL, *mock_data(), *DEPTHS, *TIES[tie], *more]
    return record(GPT, words, parse_layout(name), steps, folder, select())


OF_TIED = ("tp2+sp", "pp2", "pp4 own stage", "pp4 own stage zb-h1")
"""Layouts where tied weights matter: a cut vocabulary, and stages that hold copies."""
SEVERAL = (f"tp2sppp3[{PLACE} Etttt|mm|L]", f"cp2pp3[{PLACE} Etttt|mm|L]", "pp2cp2", "tp2sppp2")


@pytest.fixture(scope="module")
def after_three(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_layout("dp1", "untied", tmp_path_factory.mktemp("three") / "run", steps=3)


@pytest.fixture(scope="module", params=TIES)
def one_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return tied or untied, and what one rank records with micro-batches of two."""
    folder = tmp_path_factory.mktemp("one_rank") / "run"
    truth = run_layout("dp1", request.param, folder)
    assert truth.failure is None
    return request.param, truth


def assert_same(found: Parity) -> None:
    assert found.problem is None, found.problem
    assert found.first is None, found.first
    assert found.gradient is not None and found.grad_norm is not None


@pytest.mark.parametrize(
    ("one_rank", "name"),
    [*(("untied", name) for name in LAYOUTS), *(("tied", name) for name in OF_TIED)],
    indirect=["one_rank"],
)
def test_layout_gives_the_gradients_of_one_rank(name: str, one_rank: Any, tmp_path: Path) -> None:
    """Every parameter to 1e-5; the losses of all depths and the gradient norm to 1e-6."""
    tie, truth = one_rank
    mine = run_layout(LAYOUTS[name], tie, tmp_path / "run")
    assert_same(compare(mine, truth, Tolerances(loss=1e-6, gradient=1e-5)))
    assert {"lm loss", "mtp_1 loss", "mtp_2 loss"} <= mine.rows[0].keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_d07_own_stage_over_several_steps(name: str, after_three: Any, tmp_path: Path) -> None:
    mine = run_layout(name, "untied", tmp_path / "run", steps=3)
    assert_same(compare(mine, after_three, Tolerances()))


@pytest.mark.parametrize("name", ["mbs1", "cp2", f"pp3[{PLACE} Ettt|tmm|L]"])
def test_documents_apart_give_the_gradients_of_one_rank(name: str, tmp_path: Path) -> None:
    """Targets end where the documents do, as attention does."""
    flag = "--reset-attention-mask"
    truth = run_layout("dp1", "untied", tmp_path / "truth", flag)
    through = run_layout("dp1", "untied", tmp_path / "through")
    assert_same(compare(run_layout(name, "untied", tmp_path / "run", flag), truth, Tolerances()))
    assert truth.rows[0]["mtp_1 loss"] != through.rows[0]["mtp_1 loss"]


@pytest.mark.slow
@pytest.mark.parametrize("tie", TIES)
def test_d07_one_rank_goes_on_from_the_checkpoint_of_an_own_stage(tie: str, tmp_path: Path) -> None:
    """Both evaluate alike: in evaluation the own stage hands on the model's states alone."""
    words = [*MODEL, *mock_data(), *DEPTHS, *TIES[tie]]
    words += "--eval-iters 1 --eval-interval 1 --train-iters 3".split()
    # Not Etttt: core saves a first stage wrongly whose layers do not fill 128 elements.
    place = f"--pipeline-model-parallel-size 3 {PLACE} Ett|ttmm|L --exit-interval 2".split()
    mine = train([*words, *place], tmp_path / "mine", ranks=3)
    mine += train([*words, "--load", str(tmp_path / "mine")], tmp_path / "more")
    truth = train(words, tmp_path / "truth")
    keys = ("iteration", "lm loss", "mtp_1 loss", "mtp_2 loss", "grad_norm")
    found, want = ([row[k] for row in rows for k in keys if k in row] for rows in (mine, truth))
    assert found == pytest.approx(want, rel=1e-6)


def test_d07_cores_embedding_ranks_mix_gradients(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage is not one of them when untied; the own stage always is."""
    tie, truth = one_rank
    monkeypatch.setattr(pretrain, "embedding_ranks", lambda *_: lambda ranks: [ranks[0], ranks[-1]])
    mine = run_layout(f"pp3[{PLACE} Etttt|mm|L]", tie, tmp_path / "run")
    found = compare(mine, truth, Tolerances())
    assert found.problem is None
    assert found.gradient is not None and found.gradient.size > 1e-2


def parsed(words: str) -> RunConfig:
    return config_of([*MODEL, *mock_data(), *DEPTHS, "--train-iters", "3", *words.split()], ranks=2)


def test_d08_learned_positions_on_several_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="`--position-embedding-type learned_absolute`, whose"):
        parsed("--pipeline-model-parallel-size 2 --position-embedding-type learned_absolute")
    parsed("--position-embedding-type learned_absolute")


def test_the_layout_decides_the_virtual_chunks() -> None:
    four = parsed(f"--pipeline-model-parallel-size 2 {PLACE} Et|tt|t|mmL").parallel
    assert four.virtual_pipeline_model_parallel_size == 2
    assert four.pipeline_schedule == "interleaved"
    two = parsed(f"--pipeline-model-parallel-size 2 {PLACE} Ettt|tmmL").parallel
    assert two.virtual_pipeline_model_parallel_size is None
    assert two.pipeline_schedule == "1f1b"
