"""The file of --data-schedule, and its faults in one sentence each."""

from fractions import Fraction
from pathlib import Path

import pytest

from megatron_ext.errors import DataError
from megatron_ext.text.data import schedule
from megatron_ext.text.data.schedule import read_schedule


def _read(folder: Path, text: str) -> schedule.Schedule:
    path = folder / "mixture.yaml"
    path.write_text(text)
    return read_schedule(str(path), 4096)


def test_the_file_of_the_manual_is_read(tmp_path: Path) -> None:
    assert schedule.__doc__ is not None
    example = "\n".join(line[4:] for line in schedule.__doc__.splitlines() if line[:4] == "    ")
    path = tmp_path / "mixture.yaml"
    path.write_text(example)
    found = read_schedule(str(path), 8192)
    first, ramp, last = found.stages
    assert (first.tokens, first.seq_length, first.ramp) == (20 * 10**9, 8192, False)
    assert first.weights == {"data/web": Fraction(4, 5), "data/code": Fraction(1, 5)}
    assert ramp.ramp and ramp.size == -(-5 * 10**9 // 8192)
    assert last.size is None and last.seq_length == 8192
    assert found.limits == {"data/math": 4} and not found.stops


STAGE = "stages: [{weights: {a: 1}}]\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[1]", "must be a YAML mapping with a list of `stages`"),
        ("stages: []", "has no stage; give at least one"),
        ("stages: [{samples: 1}]", "must give `weights` in stage 1"),
        ("stages: [{weights: {a: x}}]", "gives x for a in the weights of stage 1"),
        ("stages: [{weights: {a: -1}}]", "weights in stage 1 that must be at least 0"),
        ("stages: [{weights: {a: 0}}]", "weights in stage 1 that must be at least 0"),
        ("stages: [{weights: {a: 1}, token: 3}]", "has the key `token` in stage 1"),
        ("stages: [{weights: {a: 1}, tokens: 3, samples: 2}]", "gives both `tokens` and `samples`"),
        ("stages: [{weights: {a: 1}, samples: many}]", "has `samples` (many) in stage 1"),
        ("stages: [{weights: {a: 1}, samples: 0.5}]", "has `samples` (0.5) in stage 1"),
        ("stages: [{weights: {a: 1}, samples: 1/0}]", "has `samples` (1/0) in stage 1"),
        ("stages: [{weights: {a: 1, 'file:///a': 1, /a: 2}}]", "names /a twice in the weights of"),
        ("stages: [{weights: {a: 1}, ramp: 1}]", "has `ramp` (1) in stage 1"),
        ("stages: [{weights: {a: 1}, samples: 2, ramp: true}]", "has a ramp in stage 1, but"),
        ("stages: [{weights: {a: 1}}, {weights: {a: 1}}]", "must say in stage 1 how long it lasts"),
        (
            "stages: [{weights: {a: 1}, samples: 2}, {weights: {a: 1}, ramp: true}]",
            "has a ramp in stage 2 without an end",
        ),
        ("stages: [{weights: {a: 1}, seq_length: 8192}]", "must be at most `--seq-length` (4096)"),
        ("stages: [{weights: {a: 1}, seq_length: 1000}]", "must divide `--seq-length` (4096)"),
        (STAGE + "max_epochs: {b: 1}", "limits the source b, which no stage names"),
        (STAGE + "max_epochs: {a: 0}", "limits a to 0 epochs, which must be above 0"),
        (STAGE + "max_epochs: 3", "must give `max_epochs` as a mapping"),
        (STAGE + "when_exhausted: rest", "`when_exhausted` (rest), which must be reweight or stop"),
        (STAGE + "sources: 1", "has the key `sources` in it"),
        ("stages: [", "cannot be read (it is no valid YAML in line 2"),
    ],
)
def test_a_fault_is_told_in_a_sentence(text: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        _read(tmp_path, text)
    (message,) = caught.value.messages
    assert fault in message and message.startswith("`--data-schedule` (") and message[-1] == "."


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mixture.yaml\) cannot be read \(No such file"):
        read_schedule(str(tmp_path / "mixture.yaml"), 8)


def test_counts_may_have_suffixes(tmp_path: Path) -> None:
    for text, count in (
        ("1.5M", 1_500_000), ("2k", 2000), ("3K", 3000), ("1b", 10**9), ("1.25T", 1_250 * 10**9),
        ("1_000", 1000), ("7", 7),
    ):  # fmt: skip
        stage = f"stages: [{{weights: {{a: 1}}, tokens: {text}}}, {{weights: {{a: 1}}}}]"
        assert _read(tmp_path, stage).stages[0].tokens == count
    for length in (4096, 2048):
        stage = f"stages: [{{weights: {{a: 1}}, seq_length: {length}}}]"
        assert _read(tmp_path, stage).stages[0].seq_length == length
