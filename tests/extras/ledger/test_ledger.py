"""The ledger of a run with restarts and changes tells what its own batches show."""

import dataclasses
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.disk.host_folder import generation
from megatron_ext.extras.ledger.counts import check_of, compare, uses
from megatron_ext.extras.ledger.ledger import Ledger
from megatron_ext.extras.ledger.step_record import LOST, REWOUND
from megatron_ext.programs.ledger import main as tool
from megatron_ext.text.step import gpt_forward_step
from megatron_ext.text.task import GPT
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.main import main
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from tests.extras.resilience.silent_faults import Spoiler

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --lr 1e-4 --lr-decay-style constant --log-interval 1 "
    "--tokenizer-type NullTokenizer --vocab-size 399 --make-vocab-size-divisible-by 8 "
    "--attention-dropout 0 --hidden-dropout 0 --num-workers 0 --eval-iters 0 --split 90,10,0 "
    "--nproc-per-node 2 --data-order direct --save-interval 3 "
    "--on-spike rewind --spike-window 4"
).split()
SIZES = {"a": 150, "b": 100, "c": 50}
"""Documents by source; a document consists of its own number, counted through all sources."""
FIRST = {"a": 0, "b": 150, "c": 250}

here: dict[str, Any] = {}
"""The run of this rank, and where it writes what reaches the forward step."""


class Struck(Callback):
    """Spoils a gradient in step 8 of a restarted run, and kills a rank after step 6 of the first.

    It lets the forward step know the run.
    """

    def __init__(self, run: Run, notes: Path) -> None:
        super().__init__(run)
        here.update(run=run, path=notes / f"{generation()}_{run.context.rank}")

    def on_train_start(self) -> None:
        if generation() == 1:
            Spoiler("linear_fc1", rank=0, iteration=8, factor=1e3)(self.run)

    def after_update(self, result: StepResult) -> None:
        is_first = self.run.config.fault_tolerance.max_restarts and generation() == 0
        if is_first and self.run.progress.iteration == 6 and self.run.context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def noting_step(config: Any, batch: Any, model: Any, counts: Any) -> Any:
    """Write the tokens of each micro-batch with its step, once for each data-parallel rank."""
    run: Run = here["run"]
    if run.context.tp_rank == 0:
        with here["path"].open("a") as file:
            step = run.progress.iteration + 1
            file.write(json.dumps([step, batch.tokens.flatten().tolist()]) + "\n")
    return gpt_forward_step(config, batch, model, counts)


def _documents(folder: Path, name: str) -> str:
    """Write documents of 1 to 40 tokens, each of which is the document's number."""
    lengths = np.random.default_rng(FIRST[name]).integers(1, 41, SIZES[name])
    with IndexedWriter(str(folder / name), np.dtype(np.uint16)) as writer:
        for number, length in enumerate(lengths.tolist()):
            writer.add_document(np.full(length, FIRST[name] + number), [length])
    return str(folder / name)


def _train(folder: Path, notes: Path, words: str) -> None:
    notes.mkdir()
    callbacks = (*GPT.callbacks, partial(Struck, notes=notes))
    task = dataclasses.replace(GPT, forward_step=noting_step, callbacks=callbacks)
    assert main(task, [*FLAGS, *words.split(), "--save", str(folder)]) == 0


Counts = dict[int, Counter[int]]


def _noted(notes: Path, generation: int = 0) -> Counts:
    """Return how often each document's tokens reached the forward step, by step."""
    found: Counts = {}
    for path in notes.glob(f"{generation}_*"):
        for line in path.read_text().splitlines():
            step, tokens = json.loads(line)
            found.setdefault(step, Counter()).update(tokens)
    return found


@dataclasses.dataclass
class Runs:
    """A run with restarts, one that goes on from its step 12, and what their batches held.

    Attributes:
        counted: by step that counts in the weights, tokens of each document.
        lost, rewound: the same of steps whose work a restart lost, or that a spike left out.
        continued: the same of the other run's own steps.
    """

    save: Path
    other: Path
    counted: Counts
    lost: Counts
    rewound: Counts
    continued: Counts


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Train 14 steps with a kill, a rewind, other weights, sources, layout and batch size."""
    folder = tmp_path_factory.mktemp("ledger")
    a, b, c = (_documents(folder, name) for name in SIZES)
    save, other = folder / "run", folder / "other"
    first = f"--data-path 0.7 {a} 0.3 {b} --train-iters 10 --micro-batch-size 1"
    _train(save, folder / "first", f"{first} --global-batch-size 4 --max-restarts 1")
    second = f"--load {save} --data-path 0.2 {a} 0.3 {b} 0.5 {c} --micro-batch-size 2"
    second += " --tensor-model-parallel-size 2 --global-batch-size 6"
    second += " --use-checkpoint-opt-param-scheduler"
    _train(save, folder / "second", f"{second} --train-iters 14")
    _train(other, folder / "third", f"{second} --ckpt-step 12 --train-iters 16")
    before, after = (_noted(folder / "first", number) for number in (0, 1))
    late = _noted(folder / "second")
    counted = {**{s: before[s] for s in (1, 2, 3)}, **{s: after[s] for s in (4, 5, 6, 9, 10)}}
    assert sorted(before) == [1, 2, 3, 4, 5, 6] and sorted(after) == [4, 5, 6, 7, 8, 9, 10]
    yield Runs(
        save, other, {**counted, **late}, {s: before[s] for s in (4, 5, 6)},
        {s: after[s] for s in (7, 8)}, _noted(folder / "third"),
    )  # fmt: skip
    here.clear()


def _of_source(counts: Counts, name: str) -> int:
    """Return the tokens of one source in all steps."""
    own = range(FIRST[name], FIRST[name] + SIZES[name])
    return sum(count for step in counts.values() for token, count in step.items() if token in own)


def test_tokens_of_each_source_are_those_of_the_batches(runs: Runs) -> None:
    found = uses(Ledger(runs.save))
    assert Ledger(runs.save).unknown(with_lost=True) == []
    for name in SIZES:
        own = [use for use in found if Path(use.source).name == name]
        assert sum(use.counted * 32 for use in own) == _of_source(runs.counted, name) > 0
        for reason, counts in ((LOST, runs.lost), (REWOUND, runs.rewound)):
            assert sum(use.others[reason] * 32 for use in own) == _of_source(counts, name)
    assert [use.stage for use in found] == [0, 0, 40, 40, 40]
    assert check_of(Ledger(runs.save)) == (0, 0)


def test_documents_of_every_step_are_those_of_the_batches(runs: Runs, tmp_path: Path) -> None:
    """The exported rows, counted by step and document."""
    path = tmp_path / "rows.parquet"
    assert tool([str(runs.save), "--export", str(path), "--with-lost"]) == 0
    rows = pq.read_table(path).to_pylist()
    wanted = {None: runs.counted, LOST: runs.lost, REWOUND: runs.rewound}
    for reason, counts in wanted.items():
        found: Counts = {}
        for row in rows:
            if row["reason"] == reason:
                token = FIRST[Path(row["source"]).name] + row["document"]
                found.setdefault(row["step"], Counter())[token] += row["length"]
        assert found == counts
    assert tool([str(runs.save), "--export", str(path)]) == 0
    assert {row["step"] for row in pq.read_table(path).to_pylist()} == set(runs.counted)


def test_steps_of_a_document_are_those_whose_batches_hold_it(runs: Runs) -> None:
    ledger = Ledger(runs.save)
    for name in SIZES:
        prefix = str(runs.save.parent / name)
        for number in (0, 17, int(SIZES[name] * 0.9) - 1, SIZES[name] - 1):
            reads = ledger.reads_of(prefix, number, with_lost=False)
            found: Counter[int] = Counter()
            for read in reads:
                found[read.step] += read.end - read.begin
            token = FIRST[name] + number
            assert found == {s: c[token] for s, c in runs.counted.items() if token in c}
            every = ledger.reads_of(prefix, number, with_lost=True)
            lost = sum(c[token] for c in [*runs.lost.values(), *runs.rewound.values()])
            assert sum(r.end - r.begin for r in every) == lost + sum(found.values())


def test_a_checkpoint_has_seen_the_steps_before_it(runs: Runs) -> None:
    found = uses(Ledger(runs.save, 9))
    tokens = sum(use.counted * use.seq_length for use in found)
    assert tokens == sum(sum(runs.counted[step].values()) for step in (1, 2, 3, 4, 5, 6, 9))
    assert {Path(use.source).name for use in found} == {"a", "b"}


def test_a_run_that_goes_on_elsewhere_repeats_and_misses_nothing(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record of the other begins with the steps that it comes from."""
    counts = {**{s: c for s, c in runs.counted.items() if s <= 12}, **runs.continued}
    found = uses(Ledger(runs.other))
    for name in SIZES:
        own = [use for use in found if Path(use.source).name == name]
        assert sum(use.counted * 32 for use in own) == _of_source(counts, name)
    assert check_of(Ledger(runs.other)) == (0, 0)
    branch, rows = compare(Ledger(runs.save), Ledger(runs.other))
    assert branch == 12 and [row.repeated + row.lost for row in rows] == [0, 0, 0]
    # Both ran steps 13 and 14, with the same samples.
    assert sum(row.both for row in rows) == sum(row.first for row in rows) == 2 * 6
    assert sum(row.second for row in rows) == 4 * 6
    assert tool([str(runs.save), "--compare", str(runs.other)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{runs.other} goes its own way after step 12. It read 0 samples again" in out


def test_a_spike_is_followed_to_its_texts_by_one_command(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """The null tokenizer writes a token as its number, so that a text repeats its document's."""
    assert tool([str(runs.save), "--spike", "--text", "--characters", "0"]) == 0
    out = capsys.readouterr().out
    assert (
        "Spike in step 8: " in out
        and "step 8, no part of the weights (rewound): samples 28 to 31" in out
    )
    for token in runs.rewound[8]:
        name = next(n for n in SIZES if FIRST[n] <= token < FIRST[n] + SIZES[n])
        assert f" {token - FIRST[name]} " in out and f"{token}" in out
    assert tool([str(runs.save), "--step", "9"]) == 0
    shown = capsys.readouterr().out
    assert "step 9: samples 32 to 35 of 32 tokens" in shown and "text" not in shown


def test_the_table_and_the_answer_about_a_document_are_printed(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool([str(runs.save), "--with-lost"]) == 0
    out = capsys.readouterr().out
    assert f"{runs.save}: 14 steps, 64 samples" in out
    assert f"{_of_source(runs.counted, 'c'):,}" in out and "samples, rewound" in out
    assert "Steps 7 to 8 (samples 24 to 31): no part of the weights (rewound)." in out
    assert "Steps 4 to 6 (samples 12 to 23): no part of the weights (lost by a restart)." in out
    assert "0 samples were read more than once, 0 were missed." in out
    prefix, token = str(runs.save.parent / "c"), max(runs.counted[14])
    assert tool([str(runs.save), "--document", prefix, str(token - FIRST["c"])]) == 0
    out = capsys.readouterr().out
    steps = [step for step, counts in runs.counted.items() if token in counts]
    assert f"Document {token - FIRST['c']} of {prefix} (" in out
    assert f"was read in {len(steps)} steps" in out
    shown = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert sorted({int(step) for step in shown}) == steps
    # The table may show steps that are no part of the weights; the sentence counts none of them.
    lost = next(iter(max(runs.rewound.items())[1]))
    name = next(n for n in SIZES if FIRST[n] <= lost < FIRST[n] + SIZES[n])
    words = [str(runs.save), "--document", str(runs.save.parent / name), str(lost - FIRST[name])]
    sentences = []
    for more in ([], ["--with-lost"]):
        assert tool([*words, *more]) == 0
        sentences.append(capsys.readouterr().out.split("\n")[0])
    assert sentences[0] == sentences[1]
    assert tool([str(runs.save), "--document", prefix, "49"]) == 0
    assert "is not in the split that is trained." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--document a 1000", "`--document` (a 1000) must be from 0 to 149, the last document"),
        ("--document a x", "`--document` (a x) must end with the number of a document"),
        ("--document q 1", "q is no source of the run; name one of a, b, c"),
        ("--step 15", "`--step` (15) was not trained; the run has steps from 1 to 14."),
        (
            "--checkpoint 15",
            "does not record step 15 by itself; the last one that it records is 14",
        ),
        ("--text", "`--text` shows the texts of a step; give `--step` or `--spike` too."),
        ("--export none/x.parquet", "`--export` (none/x.parquet) cannot be written (No such file"),
    ],
)
def test_questions_that_cannot_be_answered_get_a_sentence(
    words: str, sentence: str, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = f"{runs.save.parent}/"
    given = [parent + word if word in ("a", "q") else word for word in words.split()]
    assert tool([str(runs.save), *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert sentence in error.replace(parent, "")


def test_a_folder_without_a_record_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'data_ledger.jsonl'} does not exist or is empty; give the save folder "
        "of a run with `--data-order direct`, which keeps it.\n"
    )
