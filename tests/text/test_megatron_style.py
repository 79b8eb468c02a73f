"""Programs of Megatron-LM run through the adapter, and train what pretrain_gpt.py trains."""

import argparse
import dataclasses
import re
import runpy
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.config.sections import section_of
from megatron_ext.errors import ConfigError
from megatron_ext.losses.contract import StepCounts
from megatron_ext.text import megatron_style
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.megatron_style import (
    GPTFIMDataset,
    SFTDataset,
    _of_contract,
    _preflight,
    _scale_mtp_losses,
    core_transformer_config_from_yaml,
    get_args,
    get_batch_on_this_tp_rank,
    get_tokenizer,
    is_first_or_last_pipeline_stage,
    megatron_task,
    pretrain,
    print_rank_0,
)
from megatron_ext.text.task import TEXT
from megatron_ext.train.reporting.files import read_metrics
from megatron_ext.train.task import Task
from tests import training_runs as runs

OWN = Path(__file__).parent / "megatron_program.py"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "porting.md"
RUN = [
    *runs.SMALL,
    *"--train-iters 3 --eval-interval 2 --eval-iters 1 --init-method-std 0.1".split(),
    *("--position-embedding-type", "rope"),
]
PP2, TP2 = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
CP2, DP2 = "--context-parallel-size 2", ""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path_factory.mktemp("ported") / "pretrain_ported.py"
    path.write_text(code)
    return path


def losses(rows: list[dict[str, Any]]) -> list[list[float]]:
    return [[row["lm loss"], row["grad_norm"]] for row in runs.training_rows(rows)]


def run_program(program: Path, words: list[str], save: Path, monkeypatch: Any) -> list[Any]:
    ranks = ["--nproc-per-node", "2", "--save", str(save)]
    monkeypatch.setattr(sys, "argv", [str(program), *words, *ranks])
    runpy.run_path(str(program), run_name="__main__")
    return read_metrics(save / "metrics.jsonl")


@pytest.mark.parametrize(
    "layout", [PP2, *(pytest.param(layout, marks=pytest.mark.slow) for layout in (TP2, CP2, DP2))]
)
def test_the_pages_program_trains_what_pretrain_gpt_trains(
    layout: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*RUN, *layout.split()]
    ported = run_program(program, words, tmp_path / "ported", monkeypatch)
    rows = runs.train(words, tmp_path / "gpt", 2)
    assert losses(ported) == [pytest.approx(row, rel=1e-6) for row in losses(rows)]
    validation = [row["lm loss"] for row in rows if row["kind"] == "evaluation"]
    found = [row["lm loss"] for row in ported if row["kind"] == "evaluation"]
    assert found == pytest.approx(validation, rel=1e-6)


@pytest.mark.skipif(
    not version("megatron-core").startswith("0.16"),
    reason="the program is written for the names of megatron-core 0.16",
)
def test_megatron_lms_own_program_trains_what_pretrain_gpt_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*RUN, *PP2.split(), "--mtp-num-layers", "1", "--untie-embeddings-and-output-weights"]
    own = run_program(OWN, words, tmp_path / "own", monkeypatch)
    # core 0.16 divides the sum over a depth's targets, 31 in a sequence of 32, by the main ones.
    factor = str(0.1 * 31 / 32)
    rows = runs.train([*words, "--mtp-loss-scaling-factor", factor], tmp_path / "gpt", 2)
    assert losses(own) == [pytest.approx(row, rel=1e-5) for row in losses(rows)]
    depths = [row["mtp_1 loss"] for row in runs.training_rows(rows)]
    assert [row["mtp_1 loss"] for row in runs.training_rows(own)] == pytest.approx(depths, rel=1e-5)


@pytest.mark.parametrize("function", [GPTFIMDataset, SFTDataset, core_transformer_config_from_yaml])
def test_what_has_another_way_here_says_which(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"; use `(pretrain_gpt.py --(sft|fim-data)|--config)`"):
        function()


@pytest.mark.slow
def test_the_pages_program_keeps_its_flag_in_checkpoints(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, saved = [*RUN, "--loss-ceiling", "4.5"], tmp_path / "half"
    whole = losses(run_program(program, words, tmp_path / "whole", monkeypatch))
    assert whole[0][0] < 4.5
    half = [*words, "--save-interval", "2", "--exit-interval", "2"]
    run_program(program, half, saved, monkeypatch)
    onward = [*RUN, "--use-checkpoint-args", "--load", str(saved), *PP2.split()]
    found = losses(run_program(program, onward, saved, monkeypatch))
    assert found == [pytest.approx(row, rel=1e-5) for row in whole]


def mean_loss(mask: Tensor, output: Tensor, *, parts: int) -> Any:
    loss = (output.view(-1) * mask.view(-1)).sum() / mask.sum()
    return loss if parts == 1 else (loss, {"lm loss": loss.detach().clone().view(1)})


@pytest.mark.parametrize("parts", [1, 2])
def test_uncounted_losses_are_micro_batch_means(parts: int, program: Path, tmp_path: Path) -> None:
    page = runpy.run_path(str(program))

    def forward_step(data_iterator: Any, model: torch.nn.Module) -> Any:
        tokens, labels, mask, attention_mask, positions = page["get_batch"](data_iterator)
        output = model(tokens, positions, attention_mask, labels=labels)
        return output, partial(mean_loss, mask, parts=parts)

    providers = page["train_valid_test_datasets_provider"], page["model_provider"]
    task = megatron_task(*providers, forward_step)
    rows = runs.train_steps(RUN, tmp_path / "means", 2, task=task)
    gpt = runs.curve([*RUN, "--no-calculate-per-token-loss"], tmp_path / "gpt", 2)
    name = "lm loss" if parts == 2 else "loss"
    found = [(row[name], row["grad_norm"]) for row in rows]
    assert found == [pytest.approx(row, rel=1e-6) for row in gpt]


class Line(MegatronModule):
    """A model that is no language model: ``[b, 4]`` to ``[b]``."""

    share_embeddings_and_output_weights = False

    def __init__(self, config: Any, *, pre_process: bool, post_process: bool) -> None:
        super().__init__(config=config)
        self.pre_process = pre_process
        self.line = torch.nn.Linear(4, 1)

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Take nothing, as there is one stage."""

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).squeeze(-1)


class Points(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum(), "name": f"point {index}"}


def line_of(pre_process: bool, post_process: bool, config: Any) -> Line:
    return Line(config, pre_process=pre_process, post_process=post_process)


def squared(y: Tensor, output: Tensor) -> tuple[Tensor, dict[str, float]]:
    loss = (output - y).square().mean()
    return loss, {"squared error": float(loss.detach())}


def line_step(data_iterator: Any, model: torch.nn.Module) -> Any:
    point = next(data_iterator)
    assert len(point["name"]) == get_args().micro_batch_size
    return model(point["x"]), partial(squared, point["y"])


@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", ""], ids=["TP2", "DP2"])
def test_datasets_and_models_that_are_no_gpt_train(layout: str, tmp_path: Path) -> None:
    task = megatron_task(lambda sizes: (Points(), Points(), None), line_of, line_step)
    found = []
    for name, more, ranks in (("one", "", 1), ("two", layout, 2)):
        flags = [*RUN, "--micro-batch-size", "2", *more.split()]
        rows = runs.train_steps(flags, tmp_path / name, ranks, task=task)
        found.append([[row["squared error"], row["grad_norm"]] for row in rows])
    assert found[1] == [pytest.approx(row, rel=1e-5) for row in found[0]]


def with_own(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("own")
    group.add_argument("--width", type=int, required=True)
    group.add_argument("--rates", "--lrs", type=float, nargs="+", default=[0.5], help="of them")
    group.add_argument("--kind", choices=["a", "b"], default="a")
    group.add_argument("--fast_path", action="store_true")
    group.add_argument("--disable-cap", action="store_false", dest="cap")
    return parser


def test_arguments_of_argparse_are_flags() -> None:
    kind = section_of(with_own)
    words = "--width 3 --lrs 1 2 --kind b --fast-path --disable-cap".split()
    config = runs.config_of([*RUN, *words], TEXT.with_sections(kind))
    found = {"width": 3, "rates": [1.0, 2.0], "kind": "b", "fast_path": True, "cap": False}
    assert dataclasses.asdict(config.section(kind)) == found
    runs.check_refused(RUN, "`--width` is required; give it.", TEXT.with_sections(kind))


UNFIT = {"--v": {"action": "count"}, "file": {}, "--at": {"type": Path}, "--maybe": {"nargs": "?"}}


@pytest.mark.parametrize(("name", "how"), UNFIT.items())
def test_arguments_that_no_flag_can_stand_for_are_refused(name: str, how: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="of `extra_args_provider` must be an option with two"):
        section_of(lambda parser: parser.add_argument(name, **how))


def nothing(*_: Any, **__: Any) -> Any:
    return None


def config_with_sft() -> RunConfig:
    """Return a configuration whose only fault is ``--sft``."""
    return runs.config_of(RUN).with_section(SftConfig(sft=True))


def test_a_loss_without_a_count_is_the_mean_of_all_context_parallel_ranks() -> None:
    """The step divides by a count on each rank, of which those of a sequence are to count once."""
    output = torch.tensor([3.0])
    report = {"lm loss": torch.tensor([5.0]), "kept": torch.tensor([1.0, 2.0]), "number": 7.0}
    loss, count, entries = _of_contract(lambda x: (x.sum(), report), 4)(output)
    assert (float(loss), int(count)) == (12.0, 1)
    assert {name: value.tolist() for name, value in entries.items()} == {
        "lm loss": [5.0, 1.0],
        "kept": [1.0, 2.0],
        "number": [7.0, 1.0],
    }
    alone = _of_contract(lambda x: x.sum(), 2)(output)
    assert (float(alone[0]), alone[2]["loss"].tolist()) == (6.0, [3.0, 1.0])
    # A loss with a count of its own is a sum, which needs no factor.
    counted = _of_contract(lambda x: (x.sum(), torch.tensor(9), report), 4)(output)
    assert (float(counted[0]), int(counted[1])) == (3.0, 9)
    four = (1, 2, 3, 4)
    assert _of_contract(lambda x: four, 4)(output) is four


@pytest.mark.parametrize(
    ("words", "evaluates", "scale"),
    [
        ("--no-calculate-per-token-loss", False, 8 * 2 / 3),
        ("--calculate-per-token-loss", False, 8),
        ("--no-calculate-per-token-loss", True, 8),
    ],
)
def test_mtp_losses_of_core_get_the_share_of_their_micro_batch(
    words: str, evaluates: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales: list[float] = []
    monkeypatch.setattr(megatron_style.core, "scale_mtp_losses", lambda x: scales.append(float(x)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    core_config = SimpleNamespace(grad_scale_func=lambda x: 8 * x)
    monkeypatch.setattr(megatron_style._current, "transformer_config", core_config)
    more = "--context-parallel-size 2 --attention-dropout 0"
    config = runs.config_of([*RUN, *more.split(), words], ranks=2)
    one = torch.ones(())
    counts = None if evaluates else StepCounts(one, one, one[None], num_microbatches=3)
    _scale_mtp_losses(config, counts)
    assert scales == [pytest.approx(scale)]


@pytest.mark.parametrize(
    ("chunks", "found"),
    [(None, [(0, None), (2, None)]), (2, [(0, 0), (2, 1)]), (3, [(0, 0), (2, 2)])],
)
def test_the_first_and_the_last_chunk_of_the_model(
    chunks: int | None, found: list[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=chunks)
    monkeypatch.setattr(megatron_style._current, "transformer_config", config)
    ends = []
    for rank in range(3):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 3)
        monkeypatch.setattr(megatron_style._current, "pp_group", group)
        for chunk in range(chunks) if chunks else (None,):
            if is_first_or_last_pipeline_stage(chunk):
                ends.append((rank, chunk))
    assert ends == found


def test_a_micro_batch_has_all_of_megatrons_keys() -> None:
    missing = dict.fromkeys(("tokens", "labels", "loss_mask", "attention_mask", "position_ids"))
    assert get_batch_on_this_tp_rank(None) == missing
    rows = iter([{"tokens": 1, "own": 2}, {"labels": 3}])
    assert get_batch_on_this_tp_rank(rows) == {**missing, "tokens": 1, "own": 2}
    assert get_batch_on_this_tp_rank(rows) == {**missing, "labels": 3}


def test_only_rank_0_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        print_rank_0(f"from {rank}")
    assert capsys.readouterr().out == "from 0\n"


def test_functions_of_non_loss_data_and_defaults_reach_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []

    def run(task: Task, argv: list[str], *, defaults: dict[str, Any]) -> int:
        given.extend([task, argv, defaults])
        return 0

    def process(*_: Any) -> None: ...
    def collect(*_: Any) -> None: ...

    monkeypatch.setattr(megatron_style, "main", run)
    monkeypatch.setattr(sys, "argv", ["program", "--lr", "1"])
    kind = ModelType.encoder_or_decoder
    own = {"process_non_loss_data_func": process, "non_loss_data_func": collect}
    pretrain(
        nothing, nothing, kind, nothing, **own,
        extra_args_provider=with_own, args_defaults={"seed": 3, "width": 5},
    )  # fmt: skip
    task, argv, defaults = given
    assert (task.process_non_loss_data, task.non_loss_data) == (process, collect)
    assert (argv, defaults) == (["--lr", "1"], {"seed": 3, "width": 5})
    monkeypatch.setattr(megatron_style, "main", lambda *_, **__: 4)
    with pytest.raises(SystemExit) as left:
        pretrain(nothing, nothing, kind, nothing)
    assert left.value.code == 4


def test_what_the_adapter_cannot_run_gets_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    kind = ModelType.encoder_or_decoder
    with pytest.raises(SystemExit) as left:
        pretrain(nothing, nothing, kind, nothing, args_defaults={"widht": 3})
    assert left.value.code == 2
    assert "`args_defaults` has `widht`, which is not the name of a flag" in capsys.readouterr().err


def test_globals_are_there_only_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_ext.text.megatron_style._current.args", None)
    monkeypatch.setattr("megatron_ext.text.megatron_style._current.tokenizer", None)
    for function in (get_args, get_tokenizer):
        with pytest.raises(ConfigError, match="was called before the run has begun"):
            function()


def test_flags_that_only_gpts_step_honours_are_refused(program: Path, tmp_path: Path) -> None:
    page = runpy.run_path(str(program))
    names = ("train_valid_test_datasets_provider", "model_provider", "forward_step")
    with pytest.raises(ConfigError, match="`--sft` does nothing in a program whose datasets and"):
        _preflight(config_with_sft())
    task: Task = megatron_task(*(page[name] for name in names))
    with pytest.raises(ConfigError, match="`--loss-reduction` does nothing in a program whose"):
        runs.train_on_ranks([*RUN, "--loss-reduction", "sample"], save=tmp_path, task=task)
    advice = r"`--label-smoothing` is left out .*`forward_step` and .*`pretrain_gpt.py`, whose own"
    with pytest.raises(ConfigError, match=advice):
        runs.train_on_ranks([*RUN, "--label-smoothing", "0.1"], save=tmp_path, task=task)
    tied = [*RUN, "--mtp-num-layers", "1", *PP2.split()]
    with pytest.raises(ConfigError, match="add `--untie-embeddings-and-output-weights`"):
        runs.train_on_ranks(tied, ranks=2, save=tmp_path, task=task)


def test_a_provider_gets_the_arguments_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    core_config: Any = SimpleNamespace(params_dtype=torch.bfloat16)
    context: Any = SimpleNamespace(rank=3, pgs=SimpleNamespace(cp="cp", pp="pp"))
    for name in ("args", "transformer_config", "cp_group", "pp_group"):
        monkeypatch.setattr(megatron_style._current, name, None)
    config = runs.config_of([*RUN, "--seed", "77"])
    stage: dict[str, Any] = {"pre_process": True, "post_process": False, "vp_stage": 1}
    whole = {**stage, "config": core_config, "pg_collection": context.pgs}

    def few(pre_process: bool, config: Any, vp_stage: int | None = None) -> Any:
        return pre_process, config, vp_stage

    def all_of(**given: Any) -> Any:
        return given

    given = (config, core_config, context)
    assert megatron_style._model_chunk(few, *given, **stage) == (True, core_config, 1)
    assert megatron_style._model_chunk(all_of, *given, **stage) == whole
    args = get_args()
    assert (args.seed, args.rank, args.params_dtype) == (77, 3, torch.bfloat16)
    assert (args.legacy_tokenizer, args.create_attention_mask_in_dataloader) == (True, False)
    assert megatron_style.core_transformer_config_from_args(args) is core_config
    assert (megatron_style._current.cp_group, megatron_style._current.pp_group) == ("cp", "pp")
    sliced: list[Any] = []
    monkeypatch.setattr(megatron_style.core, "slice_batch", lambda *x: sliced.append(x))
    megatron_style.get_batch_on_this_cp_rank({"tokens": 1})
    assert sliced == [({"tokens": 1}, "cp")]


def test_blends_are_those_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    words = runs.without([*RUN], "--split")
    words.remove("--mock-data")
    for more, splits in (
        ("--data-path 0.3 a 0.7 b --split 90,10,0", None),
        ("--train-data-path a --valid-data-path b", ["a", "b", None]),
    ):
        config = runs.config_of([*words, *more.split()])
        args = argparse.Namespace(**vars(config.section(megatron_style.DataConfig)))
        blend, per_split = megatron_style.get_blend_and_blend_per_split(args)
        assert (blend is None) != (per_split is None)
        if splits is None:
            assert blend == (["a", "b"], [0.3, 0.7])
        else:
            assert per_split is not None
            assert [None if each is None else each[0][0] for each in per_split] == splits


def test_tied_mtp_of_one_stage_is_taken() -> None:
    config, tokenizer = _preflight(runs.config_of([*RUN, "--mtp-num-layers", "1"]))
    assert config.model.unpadded_vocab_size == tokenizer.vocab_size


def test_losses_of_depths_are_reported_in_training_and_counted_from_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = [torch.tensor(2.0), torch.tensor(3.0)]
    monkeypatch.setattr(megatron_style.core, "take_mtp_losses", lambda: taken)
    output = torch.tensor([3.0])
    loss = _of_contract(lambda x: (x.sum(), torch.tensor(4), {"lm loss": x}), 1)
    entries = loss(output)[2]
    assert {name: value.tolist() for name, value in entries.items()} == {
        "lm loss": [3.0, 1.0],
        "mtp_1 loss": [2.0, 1.0],
        "mtp_2 loss": [3.0, 1.0],
    }
    with torch.no_grad():
        assert loss(output)[2].keys() == {"lm loss"}


def test_a_program_learns_whether_its_data_make_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    core_config: Any = SimpleNamespace(params_dtype=torch.float32)
    context: Any = SimpleNamespace(rank=0, pgs=SimpleNamespace(cp="cp", pp="pp"))
    for name in ("args", "transformer_config", "cp_group", "pp_group"):
        monkeypatch.setattr(megatron_style._current, name, None)
    config = runs.config_of([*RUN, "--reset-attention-mask"])
    megatron_style._model_chunk(nothing, config, core_config, context)
    assert get_args().create_attention_mask_in_dataloader is True
