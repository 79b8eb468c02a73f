"""The line of a log and the bar of a terminal that show how far a run is."""

import io

import pytest

from megatron_ext.data.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_of_a_log_counts_from_where_the_run_went_on() -> None:
    progress = Progress(6_000_000, 3_000_000, "documents", log_interval=1000, in_bytes=True)
    line = progress.line(1_000_000, 500, 2.0)
    assert line == " 67%  500 documents  250 documents/s  0.5 MB/s  ETA 0:04"
    assert progress.line(500, 5, 1.0).endswith("ETA 1:39:59")
    hours = Progress(3_601, 0, "clips")
    assert hours.line(1, 1, 1.0).endswith("ETA 1:00:00")
    assert hours.line(2, 2, 2.0).endswith("ETA 59:59")
    clips = Progress(300, 100, "clips", verb="Encoded")
    assert clips.line(50, 50, 20.0) == "Encoded  50%  50 clips  2.5 clips/s  ETA 1:00"


def test_a_log_gets_a_line_at_times_and_a_terminal_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    log, terminal = io.StringIO(), Terminal()
    for out in (log, terminal):
        monkeypatch.setattr("sys.stderr", out)
        now[0] = 0.0
        read = documents = 0
        progress = Progress(6_000_000, 0, "documents", log_interval=10, in_bytes=True)
        for _ in range(40):
            now[0] += 0.25
            read, documents = read + 1000, documents + 2
            progress.show(read, documents)
        progress.close()
    # Ten documents take 1.25 s, and in these 10 s a line comes every 5 at most.
    assert len(log.getvalue().splitlines()) == 2
    assert "6.00M" in terminal.getvalue() and "\n" not in terminal.getvalue()


def test_a_line_comes_after_as_many_items_and_a_bar_begins_where_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    progress = Progress(100, 40, "clips", log_interval=10)
    lines = []
    for items in (9, 10, 10, 19, 20):
        now[0] += 5.0
        progress.show(items, items)
        lines.append(len(log.getvalue().splitlines()))
    assert lines == [0, 1, 1, 1, 2]
    assert log.getvalue().splitlines()[0].startswith(" 50%  10 clips  1.0 clips/s  ETA 0:50")
    monkeypatch.setattr("sys.stderr", Terminal())
    bar = Progress(100, 40, "clips")
    for done in (10, 25):
        bar.show(done, done)
        assert bar._bar.n == 40 + done
