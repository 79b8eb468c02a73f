"""A model continues prompts while it trains, and its training does not notice."""

import json
from pathlib import Path

import pytest

from megatron_ext.extras.report.samples import samples_of
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import main
from tests.training_runs import train, training_rows

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data "
    "--max-position-embeddings 64 --position-embedding-type rope --micro-batch-size 1 "
    "--tokenizer-type ByteLevelTokenizer --global-batch-size 2 --train-iters 4 --lr 1e-3 "
    "--num-workers 0 --eval-iters 0 --log-interval 1"
).split()


WEIGHTS = "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"


@pytest.mark.parametrize(
    "layout",
    ["", "--pipeline-model-parallel-size 2", pytest.param(WEIGHTS, marks=pytest.mark.slow)],
)
def test_texts_are_written_and_losses_stay(layout: str, tmp_path: Path) -> None:
    words = [*TINY, *layout.split()]
    flags = "--sample-interval 2 --sample-new-tokens 5 --sample-texts once then,".split()
    found = train([*words, *flags], tmp_path / "sampled", 2)
    plain = train(words, tmp_path / "plain", 2)
    losses = [[row["lm loss"] for row in training_rows(rows)] for rows in (found, plain)]
    assert losses[0] == losses[1]
    for iteration in (2, 4):
        file = tmp_path / "sampled" / "samples" / f"iter_{iteration:07}" / "samples.jsonl"
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        assert [(row["prompt"], row["iteration"]) for row in rows] == [
            ("once", iteration), ("then,", iteration)
        ]  # fmt: skip
        assert all(row["finish_reason"] == "length" for row in rows)
    (first, _), count = samples_of(tmp_path / "sampled")
    assert (count, first.iteration, first.clips) == (2, 2, [])
    assert [prompt for prompt, _ in first.texts] == ["once", "then,"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--sample-texts a", "`--sample-texts` needs `--sample-interval`, the steps between two"),
        ("--sample-interval 2 --save {save}", "`--sample-interval` (2) needs prompts; give `--sam"),
        ("--sample-interval 2 --sample-texts a", "`--sample-interval` (2) needs `--save`, whose"),
        ("--sample-interval 2 --sample-texts a --sample-prompts b --save {save}",
         "`--sample-prompts` and `--sample-texts` exclude each other; give a file or texts."),
        ("--sample-interval 2 --sample-prompts {save}/none --save {save}",
         "`--sample-prompts` ({save}/none) cannot be read"),
        ("--sample-interval 2 --sample-prompts {save}/chat --save {save}",
         "`--sample-prompts` ({save}/chat), line 1 must be an object with \"prompt\", a text; for "
         "messages give `--sft`."),
        ("--sample-interval 2 --sample-texts a --save {save} --nproc-per-node 2 "
         "--context-parallel-size 2", "`--context-parallel-size` (2) must be 1 where text is"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_before_the_start(
    flags: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chat").write_text('{"messages": []}', encoding="utf-8")
    words = [*TINY, *flags.format(save=tmp_path).split()]
    assert main(TEXT, words) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {sentence.format(save=tmp_path)}"), error
