"""Parts of documents, records and comparisons at their edges, from records that tests write."""

import re
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.data.order import Pieces, SampleOrder, Stage
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.extras.ledger.counts import compare, uses
from megatron_ext.extras.ledger.documents import Documents, parts_of
from megatron_ext.extras.ledger.ledger import Ledger, Read, _moves
from megatron_ext.extras.ledger.recording import DataLedger
from megatron_ext.extras.ledger.step_record import (
    LOST,
    NO_UPDATE,
    REWOUND,
    History,
    RecordWriter,
    StepRecord,
    Steps,
    joined,
)
from megatron_ext.extras.ledger.tool import Texts, _reads_table, _show_use, _stages
from megatron_ext.extras.ledger.tool import main as tool
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.tokenizers.base import ByteLevelTokenizer
from tests.extras.ledger.test_step_record import ORDER, _run, _shown


def documents_of(folder: Path, lengths: Sequence[int], first: int, tokens: int) -> Documents:
    """Write documents whose tokens are their positions in the file."""
    end = 0
    with IndexedWriter(str(folder / "d"), np.dtype(np.int32)) as writer:
        for length in lengths:
            writer.add_document(np.arange(end, end + length), [length])
            end += length
    return Documents(str(folder / "d"), first, tokens, DataConfig())


def test_a_split_may_begin_and_end_inside_documents(tmp_path: Path) -> None:
    documents = documents_of(tmp_path, (4, 6, 0, 5), first=3, tokens=9)
    assert documents.starts.tolist() == [0, 4, 10, 10, 15]
    ranges = [documents.range_of(number) for number in range(4)]
    assert ranges == [(0, 1), (1, 7), (7, 7), (7, 9)]
    assert documents.length(3) == 5 and documents.read(4, 3).tolist() == [4, 5, 6]
    for number in (-1, 4):
        with pytest.raises(ConfigError, match="must be from 0 to 3, the last document"):
            documents.range_of(number)
    whole = Documents(documents.prefix, 0, 15, DataConfig())
    assert whole.range_of(3) == (10, 15)
    with pytest.raises(DataError, match="holds 15 tokens, but the run read up to token 16"):
        Documents(documents.prefix, 1, 15, DataConfig())


def test_pieces_are_cut_at_documents_and_at_the_end_of_the_circle(tmp_path: Path) -> None:
    documents = documents_of(tmp_path, (4, 6, 0, 5), first=3, tokens=9)
    numbers = {name: np.array(x) for name, x in {
        "rows": [0, 1, 1], "columns": [0, 0, 2], "sources": [1, 0, 1], "begins": [0, 0, 6],
        "lengths": [4, 2, 6],
    }.items()}  # fmt: skip
    rows = parts_of(Pieces(**numbers), 20, 1, documents)
    found = sorted(
        zip(
            rows.samples.tolist(), rows.columns.tolist(), rows.documents.tolist(),
            rows.begins.tolist(), rows.lengths.tolist(), strict=True,
        )
    )  # fmt: skip
    # Sample 20 has tokens 3 to 6 of the file; sample 21 has 9 to 11, then the beginning again.
    assert found == [
        (20, 0, 0, 3, 1), (20, 1, 1, 0, 3), (21, 2, 1, 5, 1), (21, 3, 3, 0, 2), (21, 5, 0, 3, 1),
        (21, 6, 1, 0, 2),
    ]  # fmt: skip
    assert rows.sources.tolist() == [1] * 6


def test_moves_of_sources_are_followed() -> None:
    def order(**tokens: int) -> dict[str, Any]:
        return {"tokens": {name.replace("_", "/"): count for name, count in tokens.items()}}

    assert _moves([order(x_a=5), order(y_a=5), order(z_a=5)]) == {"x/a": "z/a", "y/a": "z/a"}
    assert _moves([order(x_a=5), order(y_a=6)]) == {}
    assert _moves([order(x_a=5), order(y_b=5)]) == {}
    assert _moves([order(x_a=5), order(y_a=5), order(x_a=5)]) == {"y/a": "x/a"}


def test_a_step_that_has_begun_outlives_one_that_is_left_out() -> None:
    history = History([Steps(0, 0, 2, 3, 4)])
    history.leave_out(3, 3, NO_UPDATE)
    assert [(x.iteration, x.done, x.begun, x.reason) for x in history.steps] == [
        (0, 2, 2, None), (2, 3, 3, NO_UPDATE), (3, 3, 4, None),
    ]  # fmt: skip
    history.cut(3)
    assert [(x.iteration, x.done, x.reason) for x in history.lost] == [(3, 4, LOST)]
    assert (history.iteration, history.samples) == (3, 6)
    gap = [Steps(0, 0, 2, 3, 3), Steps(3, 8, 2, 5, 5)]
    assert joined(gap) == gap
    assert joined([gap[0], Steps(3, 6, 2, 5, 5)]) == [Steps(0, 0, 2, 5, 5)]
    begun = [Steps(0, 0, 2, 3, 4), Steps(3, 6, 2, 5, 5)]
    assert joined(begun) == begun


def test_a_run_that_dies_in_its_first_step_has_begun_it(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    writer.start(0, 0, None, None, time=0.0, generation=0)
    writer.steps(Steps(0, 0, 4, 0, 0))
    assert [row["kind"] for row in StepRecord(tmp_path).rows] == ["start", "steps"]
    writer.count(0, 1)
    _run(tmp_path, 4, generation=1)
    assert [x.reason for x in StepRecord(tmp_path).history().lost] == [LOST]


def test_counts_that_do_not_fit_a_record_replace_it(tmp_path: Path) -> None:
    _run(tmp_path / "own", 4, 4, 4)
    _run(tmp_path / "own", 4, at=5, sample=8)
    steps = StepRecord(tmp_path / "own").history().steps
    assert [(x.iteration, x.done, x.batch, x.stop) for x in steps] == [
        (0, 5, None, 8),
        (5, 6, 4, 12),
    ]
    other = tmp_path / "other"
    _run(other, 4, at=3, sample=13, loaded=tmp_path / "own", past=ORDER)
    before = StepRecord(other).history().steps[0]
    assert (before.done, before.batch, before.stop) == (3, None, 13)


def test_an_order_is_written_when_it_changes(tmp_path: Path) -> None:
    second = {**ORDER, "seed": 2}
    _run(tmp_path, 4).order(second)
    again = RecordWriter(tmp_path)
    again.order(second)
    assert [row["seed"] for row in StepRecord(tmp_path).rows if row["kind"] == "order"] == [1, 2]
    again.order(ORDER)
    assert [row["seed"] for row in StepRecord(tmp_path).rows if row["kind"] == "order"] == [1, 2, 1]


def test_the_last_folder_that_was_taken_over_counts(tmp_path: Path) -> None:
    first, second, own = (tmp_path / name for name in ("first", "second", "own"))
    _run(first, *[4] * 4)
    _run(second, *[4] * 8)
    _run(own, 4, at=2, sample=8, loaded=first)
    _run(own, 4, at=6, sample=24, loaded=second)
    record = StepRecord(own)
    assert record.taken_from == str(second.resolve()) and record.own_start == 6
    number = len(record.rows)
    _run(own, 4, at=6, sample=24, loaded=second, generation=1)
    assert [row["kind"] for row in StepRecord(own).rows[number:]] == ["start", "steps"]


def recorded(folder: Path, *batches: tuple[int, int, int]) -> Path:
    """Record steps in the direct order of two sources: iteration, samples before, batch."""
    names = [str(folder.parent / name) for name in "ab"]
    for name in names:
        if not Path(f"{name}.idx").exists():
            with IndexedWriter(name, np.dtype(np.int32)) as writer:
                writer.add_document(np.arange(160), [160])
    weights = dict(zip(names, (Fraction(3), Fraction(1)), strict=True))
    order = SampleOrder(dict.fromkeys(names, 160), [Stage(0, 16, weights)], 16, 5)
    writer = RecordWriter(folder)
    writer.start(0, 0, None, None, time=0.0, generation=0)
    writer.order({**order.to_dict(), "first_tokens": dict.fromkeys(names, 0)})
    for iteration, sample, batch in batches:
        writer.steps(Steps(iteration, sample, batch, iteration + 2, iteration + 2))
    return folder


def test_runs_that_share_no_step_have_nothing_before(tmp_path: Path) -> None:
    ledgers = [Ledger(recorded(tmp_path / name, (0, 0, 8))) for name in ("one", "two")]
    branch, rows = compare(*ledgers)
    assert branch == 0
    assert [(x.before, x.first, x.second, x.both) for x in rows] == [(0, 12, 12, 12), (0, 4, 4, 4)]
    assert [(use.counted, use.epochs) for use in uses(ledgers[0])] == [(12, 1.2), (4, 0.4)]


def test_a_table_of_uses_has_epochs_of_each_source(tmp_path: Path) -> None:
    ledger = Ledger(recorded(tmp_path / "run", (0, 0, 8), (2, 16, 4)))
    console = Console(width=200, record=True)
    _show_use(ledger, console, with_lost=False)
    shown = console.export_text()
    lines = [line for line in shown.splitlines() if str(tmp_path / "a") in line]
    cells = [cell.strip() for cell in lines[0].split("│")[1:-1]]
    assert cells[:2] == ["0", "16"] and cells[3:] == ["18", "288", "75.00%", "1.800"]
    # A mixture that never changes needs no sum of its stages.
    assert len(lines) == 1 and not [line for line in shown.splitlines() if "│ all " in line]


def test_a_document_that_is_read_in_two_epochs_is_counted_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """12 samples of 16 tokens are read of 160 tokens, in a document each."""
    folder = recorded(tmp_path / "run", (0, 0, 8))
    assert tool([str(folder), "--document", str(tmp_path / "a"), "0"], "") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "was read in 2 steps and 12 samples: 100.0% of its tokens, each 1 to 2 times" in out
    assert "1.20 on average." in out
    assert tool([str(folder), "--step", "1"], "") == 0
    shown = re.findall(r"(\d+) to (\d+) of 160", capsys.readouterr().out)
    assert sum(int(last) - int(first) + 1 for first, last in shown) == 8 * 16


def test_steps_that_are_known_only_together_cannot_be_cut(tmp_path: Path) -> None:
    recorded(tmp_path / "first")
    writer = RecordWriter(tmp_path / "first")
    writer.steps(Steps(0, 0, None, 10, 10, end=43))
    writer.steps(Steps(10, 43, 4, 12, 12))
    first = Ledger(tmp_path / "first")
    with pytest.raises(
        ConfigError, match=r"`--step` \(3\) is not recorded by itself, as steps 1 t"
    ):
        first.step(3)
    assert first.step(11)[1:] == (43, 47)
    recorded(tmp_path / "second")
    writer = RecordWriter(tmp_path / "second")
    writer.start(5, 20, tmp_path / "none", None, time=0.0, generation=0)
    writer.steps(Steps(5, 20, 4, 6, 6))
    second = Ledger(tmp_path / "second")
    assert second.record.own_start == 5
    with pytest.raises(
        ConfigError, match="Steps 1 to 10 are recorded only as a whole, so that the"
    ):
        compare(first, second)


def test_texts_are_cut_after_their_characters() -> None:
    texts = Texts.__new__(Texts)
    texts._tokenizer = ByteLevelTokenizer()
    documents: Any = SimpleNamespace(read=lambda begin, length: np.frombuffer(b"a'c", np.uint8))
    for characters, shown in ((0, '"a\'c"'), (2, '"a\'"…'), (3, '"a\'c"'), (4, '"a\'c"')):
        texts._characters = characters
        assert texts.of(documents, 0, 3) == shown


def test_a_table_of_uses_has_what_does_not_count_of_each_source(tmp_path: Path) -> None:
    """Steps 3 and 4 are lost, and 5 is left out; the sources have 3 and 1 of 4 samples."""
    folder = recorded(tmp_path / "run", (0, 0, 8), (2, 16, 4))
    writer = RecordWriter(folder)
    writer.start(2, 16, None, None, time=0.0, generation=1)
    writer.steps(Steps(2, 16, 16, 3, 3))
    writer.write("left_out", first=3, last=3, why=NO_UPDATE)
    console = Console(width=200, record=True)
    _show_use(Ledger(folder), console, with_lost=True)
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in console.export_text().splitlines()
        if str(tmp_path) in line and "│" in line
    ]
    assert [(row[3], sorted(row[-2:])) for row in cells] == [
        ("12", ["12", "6"]), ("4", ["2", "4"]),
    ]  # fmt: skip


def test_many_stages_that_differ_in_their_weights_share_a_row() -> None:
    def use(stage: int, length: int = 16) -> Any:
        return SimpleNamespace(stage=stage, seq_length=length, source="a")

    eight = [use(stage) for stage in range(8)]
    assert [len(group) for group in _stages(eight)] == [1] * 8
    assert [len(group) for group in _stages([*eight, use(8), use(9, 32)])] == [9, 1]


def test_reads_are_shown_up_to_a_number() -> None:
    reads = [Read(i, i, 0, 10, REWOUND) for i in range(51)]
    assert _reads_table(reads[:50], with_lost=False).caption is None
    table = _reads_table(reads, with_lost=True)
    assert table.row_count == 50 and table.caption == "and 1 more; --export has all"
    assert [next(iter(column.cells)) for column in table.columns] == ["0", "0", "0 to 9", "rewound"]


class Writer:
    """Notes what is written; fails from a number of calls on."""

    def __init__(self, left: int = 100) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.left = left

    def __getattr__(self, name: str) -> Any:
        def note(*given: Any, **facts: Any) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError("the disk is full")
            self.calls.append((name, *given, *facts.values()))

        return note


def ledger_of(writer: Writer) -> tuple[DataLedger, Any]:
    run: Any = SimpleNamespace(
        progress=SimpleNamespace(iteration=0, consumed_train_samples=0),
        batch_size=SimpleNamespace(global_batch_size=4),
        runner=SimpleNamespace(settled=False),
        rewinds=[],
        config=SimpleNamespace(checkpoint=SimpleNamespace(save=".")),
    )
    callback = DataLedger(run)
    callback._writer = writer  # type: ignore[assignment]
    return callback, run


def step(callback: DataLedger, run: Any, *, applied: bool = True) -> None:
    callback.before_step()
    run.progress.iteration += 1
    run.progress.consumed_train_samples += run.batch_size.global_batch_size
    callback.after_update(SimpleNamespace(update=SimpleNamespace(applied=applied)))  # type: ignore[arg-type]
    callback.after_step()


def test_each_step_is_counted_and_what_does_not_count_is_said_once() -> None:
    writer = Writer()
    callback, run = ledger_of(writer)
    for batch, applied in ((4, True), (4, False), (8, True), (8, False)):
        run.batch_size.global_batch_size = batch
        step(callback, run, applied=applied)
    run.rewinds.append((4, 2))
    callback.after_step()
    callback.after_step()
    callback.on_train_end()
    callback.on_train_end()
    assert [call for call in writer.calls if call[0] != "count"] == [
        ("steps", Steps(0, 0, 4, 0, 0)),
        ("steps", Steps(2, 8, 8, 2, 2)),
        ("write", "left_out", 2, 2, NO_UPDATE),
        ("write", "left_out", 3, 4, REWOUND),
        ("write", "left_out", 4, 4, NO_UPDATE),
        ("close",),
    ]
    counts = [call[1:] for call in writer.calls if call[0] == "count"]
    assert counts == [(0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 4)]


def test_a_record_that_cannot_be_written_ends_and_the_run_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = Writer(left=2)
    callback, run = ledger_of(writer)
    for _ in range(3):
        step(callback, run)
    with suppress(OSError):
        callback.on_train_end()
    assert len(writer.calls) == 2 and writer.left == -1
    assert capsys.readouterr().out.count("data_ledger.jsonl cannot be written") == 1


def test_lost_steps_are_shown_with_their_reason(tmp_path: Path) -> None:
    _run(tmp_path, 4, 4, 4)
    _run(tmp_path, 4, at=1, sample=4, generation=1)
    assert _shown(StepRecord(tmp_path).history())[-1] == (2, 3, 4, 11, LOST)
