"""A server follows a run that goes on, and gives away nothing but its page."""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.extras.report import serve
from megatron_ext.extras.report.serve import LivePage, file_of, open_server
from megatron_ext.extras.report.tool import main as tool
from megatron_ext.train.reporting.files import as_json
from tests.extras.report.made_runs import BEGAN, Row, faulty_run, time_row, write_lines
from tests.extras.report.whole_page import check_page
from tests.training_runs import ROOT

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


def train(iteration: int) -> Row:
    return {"kind": "train", "iteration": iteration, "lm loss": 3.0}


def run_with_files(root: Path) -> Path:
    run = root / "run"
    write_lines(run / "metrics.jsonl", [train(1), time_row(BEGAN, BEGAN + 1, 0, 1)])
    clips = run / "samples" / "iter_0000100"
    clips.mkdir(parents=True)
    (clips / "contact_sheet.png").write_bytes(PNG)
    (clips / "sample_000.mp4").write_bytes(b"clip")
    (clips / "samples.jsonl").write_text(
        '{"path": "sample_000.mp4", "text": "a <cat>"}\n{"path": "../../x.mp4"}\n'
    )
    (run / "postmortem_1").mkdir()
    (run / "postmortem_1" / "report.txt").write_text("a story")
    (root / "secret.txt").write_text("secret")
    (run / "link.txt").symlink_to(root / "secret.txt")
    (run / "up").symlink_to(root)
    (run / "inside.txt").symlink_to(run / "postmortem_1" / "report.txt")
    os.mkfifo(run / "pipe.txt")
    return run


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, int]]:
    """Serve a run, whose page is made at each change; yield its folder and the port."""
    monkeypatch.setattr(serve, "_PAUSE", 0.0)
    run = run_with_files(tmp_path)
    with open_server([run], "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield run, server.server_address[1]
        server.shutdown()
        thread.join()


def answer(
    port: int, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=names)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, response.headers, content


def test_the_page_follows_the_run_and_is_sent_only_if_it_has_changed(
    served: tuple[Path, int],
) -> None:
    run, port = served
    status, headers, page = answer(port, "/")
    assert status == 200 and "iteration 1" in page.decode()
    check_page(page.decode(), live=True)
    assert headers["Cache-Control"] == "no-store" and headers["X-Frame-Options"] == "DENY"
    assert answer(port, "/", If_None_Match=headers["ETag"])[::2] == (304, b"")
    # A line that is only half written waits until it is whole.
    row = as_json(train(2))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(row[:9])
        file.flush()
        status, half, page = answer(port, "/", If_None_Match=headers["ETag"])
        assert status == 200 and "It reached iteration 1." not in page.decode()
        assert "It reached iteration 1 in" in page.decode()
        file.write(row[9:])
    status, _, page = answer(port, "/", If_None_Match=half["ETag"])
    assert status == 200 and "It reached iteration 2 in" in page.decode()
    assert answer(port, "/", "HEAD")[::2] == (200, b"")
    assert answer(port, "/", "POST")[0] == 501


def test_files_of_the_run_are_served_and_no_others(served: tuple[Path, int]) -> None:
    run, port = served
    page = answer(port, "/")[2].decode()
    assert 'href="./files/0/samples/iter_0000100/sample_000.mp4"' in page
    assert "a &lt;cat&gt;" in page and "../x.mp4" not in page
    clip = answer(port, "/files/0/samples/iter_0000100/sample_000.mp4")
    assert (clip[0], clip[1]["Content-Type"], clip[2]) == (200, "video/mp4", b"clip")
    assert answer(port, "/files/0/postmortem_1/report.txt")[::2] == (200, b"a story")
    assert answer(port, "/files/0/inside.txt")[::2] == (200, b"a story")
    for path in (
        "/files/0/../secret.txt", "/files/0/%2e%2e/secret.txt", "/files/0/link.txt",
        "/files/0/up/secret.txt", f"/files/0/{run.parent}/secret.txt", "/files/0//etc/hosts.txt",
        "/files/0/metrics.jsonl", "/files/0/postmortem_1/", "/files/0/pipe.txt",
        "/files/1/postmortem_1/report.txt", "/files/-1/postmortem_1/report.txt",
        "/files/0/a%00.txt", "/files/", "/secret.txt", "/report.html", "/files/%C2%B2/a.txt",
    ):  # fmt: skip
        status, _, content = answer(port, path)
        assert status == 404 and b"secret" not in content, path


def test_a_page_of_a_stranger_cannot_read_the_server_by_a_name_of_its_own(
    served: tuple[Path, int],
) -> None:
    _, port = served
    for host, status in (("localhost:1", 200), ("[::1]:9", 200), ("evil.example", 403), ("[", 403)):
        assert answer(port, "/", Host=host)[0] == status, host


def test_a_long_run_is_not_read_at_each_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making the page takes a tenth of the time at most."""
    now = 1000.0
    made = list[float]()
    cost = 2.0

    def read(self: LivePage, at: float, _signature: object) -> serve.Rendered:
        nonlocal now
        made.append(at)
        now += cost
        return serve.Rendered(str(at), b"")

    monkeypatch.setattr(LivePage, "_made", read)
    page = LivePage([tmp_path], clock=lambda: now)
    for number in range(100):
        (tmp_path / "metrics.jsonl").write_text("x" * number)
        page.current()
        now += 1.0
    first, second, *_ = made
    assert second - first == 3.0 and np_steps(made[1:]) == {20.0}
    made.clear()
    for _ in range(100):
        page.current()
        now += 1.0
    assert min(np_steps(made)) >= 30.0


def np_steps(values: list[float]) -> set[float]:
    return {round(b - a, 3) for a, b in zip(values, values[1:], strict=False)}


def test_a_number_of_a_folder_is_one_of_those_given(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    root = tmp_path.resolve()
    assert file_of([root], "0/a.txt") == root / "a.txt"
    assert file_of([root, root], "1/a.txt") == root / "a.txt"
    for rest in ("1/a.txt", "0", "", "0/", "x/a.txt", "0/b.txt", "99999999/a.txt", "0/a.txt/"):
        assert file_of([root], rest) is None or rest == "0/a.txt/"


def test_ports_and_addresses_that_cannot_be_served_are_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert tool([str(tmp_path), "--serve", "--port", str(port)], "") == 2
    assert tool([str(tmp_path), "--serve", "--port", "70000"], "") == 2
    assert tool([str(tmp_path), "--serve", "--host", "203.0.113.1"], "") == 2
    assert tool([str(tmp_path), "--serve", "--html"], "") == 2
    assert tool([str(tmp_path), "--port", "1"], "") == 2
    assert tool([str(tmp_path), "--host", "::1"], "") == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: `--port` ({port}) of `--host` (127.0.0.1) cannot be served (Address already in "
        "use); give another port, or 0 for a free one.",
        "error: `--port` (70000) of `--host` (127.0.0.1) cannot be served (bind(): port must be "
        "0-65535.); give another port, or 0 for a free one.",
        "error: `--port` (8765) of `--host` (203.0.113.1) cannot be served (Cannot assign requested"
        " address); give another port, or 0 for a free one.",
        "error: `--serve` and `--output` exclude each other; give one.",
        "error: `--port` (1) has an effect only with `--serve`; give it, or leave `--port` out.",
        "error: `--host` (::1) has an effect only with `--serve`; give it, or leave `--host` out.",
    ]


def test_how_to_reach_the_page_from_another_machine_is_said_where_ssh_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 50000 10.0.0.2 22")
    told = serve._from_elsewhere("127.0.0.1", 8765)
    assert told.endswith("run: ssh -N -L 8765:127.0.0.1:8765 10.0.0.2")
    assert serve._from_elsewhere("0.0.0.0", 8765) == ""
    monkeypatch.delenv("SSH_CONNECTION")
    assert serve._from_elsewhere("127.0.0.1", 8765) == ""


@pytest.mark.slow
def test_ctrl_c_ends_the_server_quietly(tmp_path: Path) -> None:
    for name in ("a", "b"):
        faulty_run(tmp_path / name)
    words = [sys.executable, "tools/report.py", str(tmp_path / "a"), str(tmp_path / "b")]
    process = subprocess.Popen(
        [*words, "--serve", "--port", "0"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    (port,) = re.findall(r" at http://127\.0\.0\.1:(\d+)/ until Ctrl-C", line)
    assert "Comparison of runs" in answer(int(port), "/")[2].decode()
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.strip(), err) == (0, "", "")
    assert time.monotonic() - begun < 30
