"""The list of faults: whole lines from several processes, strict JSON, readable after a crash."""

import errno
import json
import math
import os
from pathlib import Path

import pytest

from megatron_ext.disk.events import EVENTS_FILE, append_event, read_events


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    children = []
    for rank in range(4):
        pid = os.fork()
        if pid == 0:
            for iteration in range(200):
                append_event(tmp_path, "fault", rank=rank, iteration=iteration, where="x" * 300)
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    events = read_events(tmp_path)
    assert len(events) == 800
    for rank in range(4):
        own = [event["iteration"] for event in events if event["rank"] == rank]
        assert own == list(range(200))


def test_lines_are_strict_json_without_what_is_not_known(tmp_path: Path) -> None:
    append_event(tmp_path / "save", "non_finite", norm=math.nan, rank=None, groups=[(1, math.inf)])
    [line] = (tmp_path / "save" / EVENTS_FILE).read_text().splitlines()
    event = json.loads(line, parse_constant=lambda name: 1 / 0)
    assert event.pop("time") > 1.7e9
    assert event == {"kind": "non_finite", "norm": "nan", "groups": [[1, "inf"]]}


@pytest.mark.parametrize("torn", ['{"kind": "sav', '{"kind": "sav\n7\n'])
def test_a_torn_line_is_left_out_and_the_next_one_is_not(torn: str, tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    append_event(tmp_path, "restart", generation=1)
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write(torn)
    append_event(tmp_path, "saved", iteration=3)
    assert [event["kind"] for event in read_events(tmp_path)] == ["restart", "saved"]


def test_a_run_without_a_save_folder_writes_nothing(tmp_path: Path) -> None:
    append_event(None, "restart")
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is printed instead; whatever is not of JSON is written as text."""
    append_event(tmp_path, "saved", path=tmp_path / "a", steps={3: {1}})
    assert read_events(tmp_path)[0]["path"] == f"{tmp_path}/a"
    assert read_events(tmp_path)[0]["steps"] == {"3": "{1}"}

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    append_event(tmp_path, "fault", rank=3)
    shown = capsys.readouterr().out
    assert shown.startswith("note: faults.jsonl cannot be written (") and '"rank": 3' in shown
    monkeypatch.undo()
    assert [event["kind"] for event in read_events(tmp_path)] == ["saved"]
