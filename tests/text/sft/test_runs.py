"""Fine-tuning with packed, padded and budgeted batches agrees, and resumes in an epoch."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import DataError, MegatronExtError
from megatron_ext.planning.report import num_steps
from megatron_ext.programs.parity import main as compare
from megatron_ext.text.generation.tool import GENERATION, _stored_model
from megatron_ext.text.sft.dataset import SftDataset, build_splits
from megatron_ext.text.sft.task import prepare_sft
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.train.main import preflight
from tests.checkpoint.tiny import whole_tensors
from tests.host_syncs import READ, record_steps
from tests.text.sft import tiny
from tests.training_runs import Rows, config_of, train, train_on_ranks, training_rows

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --seq-length 128 --max-position-embeddings 128 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --lr 1e-2 --min-lr 1e-3 "
    "--lr-decay-style cosine --clip-grad 1.0 --num-workers 0 "
    "--log-interval 1 --eval-interval 2 --make-vocab-size-divisible-by 1"
).split()
COUNT = 12
"""Conversations to train on, all of them in one step."""
BATCHING = {"packed": 8, "padded": 12, "token-budget": 12}
"""Global batch sizes that hold all of them."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("sft")
    first = tiny.write_jsonl(folder / "train.jsonl", tiny.chats(COUNT, turns=2, words=3))
    valid = tiny.write_jsonl(folder / "valid.jsonl", tiny.chats(7, turns=2, words=3, seed=1))
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    paths = ["--train-data-path", str(first), "--valid-data-path", str(valid)]
    return ["--sft", *tokenizer, str(tiny.save(folder / "tokenizer")), *paths]


def run(data: list[str], words: str, save: Path, ranks: int = 1) -> Rows:
    return train([*MODEL, *data, *words.split()], save, ranks)


def batching(kind: str) -> str:
    return f"--sft-batching {kind} --global-batch-size {BATCHING[kind]}"


def assert_same(rows: Rows, wanted: Rows) -> None:
    assert [row["kind"] for row in rows] == [row["kind"] for row in wanted]
    for row, want in zip(rows, wanted, strict=True):
        names = [name for name in want if name.endswith("loss") or name == "grad_norm"]
        assert "lm loss" in names
        for name in names:
            assert math.isclose(row[name], want[name], rel_tol=1e-5), (name, row["iteration"])


MTP, PP2 = "--mtp-num-layers 1", "--pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def padded(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    words = f"{batching('padded')} --train-epochs 3"
    folder = tmp_path_factory.mktemp("padded")
    return {model: run(data, f"{model} {words}", folder / model) for model in ("", MTP)}


@pytest.mark.parametrize(
    ("model", "kind", "ranks", "layout"),
    [
        ("", "packed", 4, f"--tensor-model-parallel-size 2 {PP2}"),
        ("", "token-budget", 4, "--pipeline-model-parallel-size 4"),
        (MTP, "packed", 2, "--context-parallel-size 2"),
        (MTP, "token-budget", 4, f"{PP2} --pipeline-model-parallel-layout Ett|ttmL"),
    ],
)
def test_packed_equals_padded(
    model: str, kind: str, ranks: int, layout: str, data: Any, padded: Any, tmp_path: Path
) -> None:
    """The loss over the same conversations, divided by the same count, agrees within 1e-5."""
    words = f"{model} {layout} {batching(kind)} --train-epochs 3"
    rows = run(data, words, tmp_path / "s", ranks)
    assert len(training_rows(rows)) == 3
    assert_same(rows, padded[model])


@pytest.mark.parametrize("kind", list(BATCHING))
def test_a_long_conversation_is_an_error(kind: str, data: list[str]) -> None:
    words = [*MODEL, *data, "--train-iters", "1", *batching(kind).split()]
    with pytest.raises(
        DataError,
        match=r"train.jsonl: \d+ of 12 conversations are longer than `--sft-max-length` \(80\), "
        r"such as number \d+ of its store with 8\d tokens; raise it and `--seq-length`, or set",
    ):
        _splits([*words, "--sft-max-length", "80"])


@pytest.mark.parametrize("kind", list(BATCHING))
@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_exact_slices(kind: str, side: str, data: list[str]) -> None:
    words = [*MODEL, *data, "--train-iters", "1", *batching(kind).split()]
    whole = _splits(words)
    cut = _splits([*words, "--sft-max-length", "60", "--sft-truncation", side])
    shorter = 0
    for sample, positions in enumerate(whole.lengths):
        kept = slice(-60, None) if side == "left" else slice(60)
        long, short = whole[(sample,)], cut[(sample,)]
        ids = [long["tokens"][0].item(), *long["labels"][:positions].tolist()]
        mask = [0, *long["loss_mask"][:positions].tolist()]
        count = len(ids[kept])
        shorter += count < len(ids)
        assert cut.lengths[sample] == count - 1
        assert short["tokens"][: count - 1].tolist() == ids[kept][:-1]
        assert short["labels"][: count - 1].tolist() == ids[kept][1:]
        assert short["loss_mask"][: count - 1].tolist() == mask[kept][1:]
        assert not short["loss_mask"][count - 1 :].any()
    assert shorter >= 2


def _splits(words: list[str]) -> SftDataset:
    config = config_of(words, ranks=0)
    found = build_splits(config, build_tokenizer(config.section(TokenizerConfig))).train
    assert isinstance(found, SftDataset)
    return found


STEPS, BREAK = 7, 4


def final_weights(folder: Path) -> dict[str, Tensor]:
    return whole_tensors(folder / f"iter_{STEPS:07d}", folder / "whole.pt")


@pytest.mark.parametrize("kind", ["packed", "token-budget"])
def test_runs_resume_in_the_middle_of_an_epoch(kind: str, data: list[str], tmp_path: Path) -> None:
    size = {"packed": 2, "token-budget": 4}[kind]
    words = f"--sft-batching {kind} --global-batch-size {size} --train-iters {STEPS}"
    whole = training_rows(run(data, words, tmp_path / "whole"))
    run(data, f"{words} --exit-interval {BREAK}", tmp_path / "s")
    load = f"--load {tmp_path / 's'}"
    rows = training_rows(run(data, f"{words} {load}", tmp_path / "s"))
    assert len(rows) == STEPS
    for name in ("lm loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert [row[name] for row in rows] == [row[name] for row in whole], name
    assert len({row["lm loss"] for row in rows}) == STEPS
    mine, wanted = final_weights(tmp_path / "s"), final_weights(tmp_path / "whole")
    assert mine and mine.keys() == wanted.keys()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def test_other_data_of_a_resumed_run_is_said(
    data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "--global-batch-size 2 --train-iters 2"
    run(data, f"{words} --exit-interval 1", tmp_path / "s")
    run(data, f"{words} --load {tmp_path / 's'}", tmp_path / "t")
    assert "not those of the checkpoint" not in capfd.readouterr().out
    run(data, f"{words} --load {tmp_path / 's'} --sft-batching padded", tmp_path / "u")
    assert "not those of the checkpoint" in capfd.readouterr().out


def test_a_run_resumes_in_another_layout(data: list[str], tmp_path: Path) -> None:
    words = f"--global-batch-size 2 --train-iters {STEPS}"
    whole = training_rows(run(data, words, tmp_path / "whole"))
    run(data, f"{words} --exit-interval {BREAK}", tmp_path / "s", 2)
    rows = training_rows(run(data, f"{words} --load {tmp_path / 's'}", tmp_path / "s"))
    for row, want in zip(rows, whole, strict=True):
        assert math.isclose(row["lm loss"], want["lm loss"], rel_tol=1e-5)


def test_another_batch_size_does_not_go_on_in_an_epoch(
    data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "--train-iters 3 --global-batch-size"
    run(data, f"{words} 2 --exit-interval 1", tmp_path / "s")
    flags = [*MODEL, *data, *words.split(), "4", "--load", str(tmp_path / "s")]
    flags.append("--override-opt-param-scheduler")
    assert train_on_ranks(flags, save=tmp_path / "s")[0] != 0
    said = "The run has consumed 2 samples, which is no whole number of steps of `--global"
    assert said in capfd.readouterr().err


def test_a_checkpoint_tells_the_date_that_the_template_has_written(
    data: list[str], tmp_path: Path
) -> None:
    template = tmp_path / "dated.jinja"
    plain = (tiny.TEMPLATES / "chatml.jinja").read_text("utf-8")
    template.write_text("{{ strftime_now('%d %b %Y') }}" + plain)
    words = [*MODEL, *data, *"--global-batch-size 2 --train-iters 1".split()]
    words += ["--sft-chat-template", str(template), "--data-cache-path", str(tmp_path)]
    flags = config_of([*words, "--sft-date", "2024-07-26"], ranks=0)
    stored = preflight(flags, prepare_sft)[0].to_dict()
    assert _stored_model(stored, GENERATION, "x")["trained_date"] == "2024-07-26"
    stored["sft"]["written_date"] = "of a stranger"
    assert _stored_model(stored, GENERATION, "x")["trained_date"] is None


def test_epochs_become_steps_and_validation_is_whole(data: list[str]) -> None:
    words = [*MODEL, *data, *"--global-batch-size 5 --sft-batching padded".split()]
    config, tokenizer = preflight(config_of([*words, "--train-epochs", "2"], ranks=0), prepare_sft)
    assert (config.training.train_iters, config.training.train_epochs) == (6, None)
    assert num_steps(config) == 6
    assert config.training.full_validation
    off = config_of([*words, "--train-iters", "2", "--eval-iters", "0"], ranks=0)
    assert not preflight(off, prepare_sft)[0].training.full_validation
    assert build_splits(config, tokenizer).test is None


def test_no_validation_data_is_no_error(data: list[str], tmp_path: Path) -> None:
    at = data.index("--valid-data-path")
    rows = run(data[:at], "--train-iters 2 --global-batch-size 2", tmp_path / "s")
    assert [row["kind"] for row in rows] == ["train"] * 2


def test_validation_does_not_depend_on_the_layout(data: list[str], tmp_path: Path) -> None:
    """Seven conversations in batches of 4: the last one is filled with empty rows."""
    losses = []
    for name, ranks, words in (
        ("a", 1, "--sft-batching padded --global-batch-size 4"),
        ("b", 2, "--sft-batching padded --global-batch-size 4 --micro-batch-size 2"),
        ("c", 2, "--sft-batching packed --global-batch-size 2"),
        ("d", 1, "--sft-batching token-budget --global-batch-size 3"),
    ):
        rows = run(data, f"{words} --skip-train --train-iters 1", tmp_path / name, ranks)
        losses += [row["lm loss"] for row in rows if row["kind"] != "train"]
    assert len(losses) == 4
    assert all(math.isclose(loss, losses[0], rel_tol=1e-5) for loss in losses)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--data-path 0.3 f", "`--data-path` (0.3) is a weight, but `--sft` uses every"),
        ("--data-path none.jsonl", "`--data-path` (none.jsonl) is neither a file of conversations"),
        ("", "`--sft` needs conversations to train on; name files with `--data-path`, or with"),
        ("--data-path FILE --split 0,1,0", "train split is empty under `--split` (0,1,0); give it"),
        (
            "--train-data-path FILE --tokenizer-type NullTokenizer --vocab-size 99",
            "`--tokenizer-type` (NullTokenizer) has no chat",
        ),
    ],
)
def test_data_and_tokenizers_of_no_use(words: str, sentence: str, data: list[str]) -> None:
    at = data.index("--train-data-path")
    flags = [*MODEL, *data[:at], "--train-iters", "1", *words.replace("FILE", data[at + 1]).split()]
    with pytest.raises(MegatronExtError) as caught:
        preflight(config_of(flags, ranks=0), prepare_sft)
    assert sentence in str(caught.value)


PACKED = "[--sft-batching token-budget]"
LAYOUTS = f"mbs4,dp2,dp1{PACKED},cp2{PACKED},pp2dp2{PACKED},tp2sp{PACKED}"


SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in ("sample", "square")]


@pytest.mark.parametrize("reduction", ["token", *SLOW])
def test_packed_gradient(reduction: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chats = tiny.write_jsonl(tmp_path / "chats.jsonl", tiny.chats(24, turns=2, words=3))
    words = [
        *MODEL,
        *("--sft", "--data-path", str(chats), "--split", "90,10,0", "--sft-batching", "padded"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--global-batch-size", "8"),
        *("--tokenizer-model", str(tiny.save(tmp_path / "tokenizer"))),
        *("--make-vocab-size-divisible-by", "192", "--mtp-num-layers", "1"),
        *("--loss-reduction", reduction),
    ]
    limits = "--steps 1 --loss-tolerance 1e-6 --gradient-tolerance 1e-6".split()
    code = compare(["--layouts", LAYOUTS, *limits, "--", *words])
    assert code == 0, "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_step_asks_its_device_for_the_update_before_it_alone(tmp_path: Path) -> None:
    chats = tiny.write_jsonl(tmp_path / "train.jsonl", tiny.chats(12, turns=2, words=3))
    tokenizer = str(tiny.save(tmp_path / "tokenizer"))
    words = f"{batching('packed')} --train-epochs 3 --mtp-num-layers 1 --eval-iters 0".split()
    words += ["--sft", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer]
    flags = [*MODEL, *words, "--train-data-path", str(chats), "--log-interval", "9"]
    note = tmp_path / "places.json"
    train(flags, tmp_path / "run", prepare=partial(record_steps, path=note))
    assert json.loads(note.read_text()) == [READ]
