"""The command as a user runs it: flags, exit codes, kills, start-up."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.text.preprocess.cli import main, parse_options
from megatron_ext.text.tokenizers import TokenizerConfig
from tests.text import tiny
from tests.text.tiny import read_pair, write_expected

TOOL = tiny.ROOT / "tools" / "preprocess_data.py"


def command(folder: Path, *more: str, source: str = "in.jsonl") -> list[str]:
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer"]
    tokenizer += ["--tokenizer-model", str(tiny.sentencepiece_model())]
    place = ["--input", source, "--output-prefix", str(folder / "out"), "--append-eod"]
    return [sys.executable, str(TOOL), *place, *tokenizer, *more]


def run(
    folder: Path, *more: str, source: str = "in.jsonl", stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    argv = command(folder, *more, source=source)
    return subprocess.run(argv, cwd=folder, input=stdin, capture_output=True, timeout=60)


def expected(folder: Path, documents: list[dict[str, object]]) -> tuple[bytes, bytes]:
    flags = TokenizerConfig("SentencePieceTokenizer", str(tiny.sentencepiece_model()))
    texts = [str(document["text"]) for document in documents]
    return write_expected(folder / "expected", texts, flags, append_eod=True)


@pytest.mark.parametrize("stdin", [False, True])
def test_run_and_report(tmp_path: Path, stdin: bool) -> None:
    documents = tiny.corpus(200)
    path = tiny.write_jsonl(tmp_path / "in.jsonl", documents)
    data = path.read_bytes() if stdin else b""
    done = run(tmp_path, "--workers=2", stdin=data, source="-" if stdin else "in.jsonl")
    said = done.stderr.decode()
    assert done.returncode == 0, said
    assert read_pair(tmp_path / "out_text_document") == expected(tmp_path, documents)
    assert "Tokenizing with gigatoken, equal to SentencePieceTokenizer on " in said
    assert "200 documents, " in said
    assert ("Copying standard input into" in said) == stdin
    assert not (tmp_path / "out.parts").exists()


def test_bad_line_exits_nonzero(tmp_path: Path) -> None:
    lines = b'{"text": "a"}\n{"text": 1}\n'
    done = run(tmp_path, "--workers", "2", source="-", stdin=lines)
    assert done.returncode == 1
    said = done.stderr.decode().splitlines()[-1]
    assert said.startswith("error: standard input line 2 has int under key 'text', not a text")
    assert list(tmp_path.iterdir()) == []
    done = run(tmp_path, "--on-bad-line=quarantine", source="-", stdin=lines)
    assert done.returncode == 0
    assert "1 bad lines are in" in done.stderr.decode()
    (record,) = map(json.loads, (tmp_path / "out.rejected.jsonl").read_text().splitlines())
    reason = "has int under key 'text', not a text or a list of texts"
    assert record == {
        "file": "standard input", "line": 2, "reason": reason, "text": '{"text": 1}'
    }  # fmt: skip
    assert f"Reasons of refused lines: {reason} (1)." in done.stderr.decode()


@pytest.mark.parametrize("shell", ["<(cat in.jsonl)", "/dev/stdin < <(cat in.jsonl)"])
def test_pipes_of_a_shell_are_read(tmp_path: Path, shell: str) -> None:
    documents = tiny.corpus(50)
    tiny.write_jsonl(tmp_path / "in.jsonl", documents)
    words = command(tmp_path, "--workers", "2", source="SOURCE")
    line = shlex.join(words).replace("SOURCE", shell)
    how = {"cwd": tmp_path, "stdin": subprocess.DEVNULL, "timeout": 60}
    done = subprocess.run(["bash", "-c", line], capture_output=True, **how)
    assert done.returncode == 0, done.stderr.decode()
    assert read_pair(tmp_path / "out_text_document") == expected(tmp_path, documents)


def test_a_socket_as_standard_input_is_read(tmp_path: Path) -> None:
    """A remote shell hands its input over as a socket, which cannot be opened by its name."""
    documents = tiny.corpus(20)
    data = tiny.write_jsonl(tmp_path / "lines", documents).read_bytes()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        argv = command(tmp_path, source="/dev/stdin")
        done = subprocess.run(argv, stdin=theirs, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert read_pair(tmp_path / "out_text_document") == expected(tmp_path, documents)


def alive(group: int) -> bool:
    """Return whether a process of the group still runs (zombies do not)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


@pytest.mark.parametrize("parts_before_kill", [1, 4])
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, parts_before_kill: int) -> None:
    documents = tiny.corpus(12_000)
    tiny.write_jsonl(tmp_path / "in.jsonl", documents)
    more = ["--workers", "2", "--engine", "native", "--part-megabytes", "0.2"]
    how = {"cwd": tmp_path, "stderr": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen(command(tmp_path, *more), **how)
    markers: list[Path] = []
    until = time.monotonic() + 30
    while len(markers) < parts_before_kill and time.monotonic() < until:
        markers = list((tmp_path / "out.parts").glob("p0*.json"))
        assert process.poll() is None, "the run was over before it could be killed"
    process.kill()
    process.wait()
    assert not (tmp_path / "out_text_document.idx").exists()
    done = run(tmp_path, *more)
    said = done.stderr.decode()
    assert done.returncode == 0, said
    assert int(said.split("Resuming: ")[1].split()[0]) >= parts_before_kill
    assert read_pair(tmp_path / "out_text_document") == expected(tmp_path, documents)
    assert not (tmp_path / "out.parts").exists()
    while alive(process.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(process.pid), "workers outlived their killed run"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_all_and_keeps_parts(tmp_path: Path, how: signal.Signals) -> None:
    tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(30_000))
    more = ["--workers", "2", "--engine", "native", "--part-megabytes", "0.2"]
    process = subprocess.Popen(
        command(tmp_path, *more),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # Shells start jobs in the background with the interrupt ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not list((tmp_path / "out.parts").glob("p0*.json")):
        time.sleep(0.01)
    os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 130
    assert said.decode().splitlines()[-1].startswith("Interrupted; finished parts are kept")
    assert not alive(process.pid)
    assert list((tmp_path / "out.parts").glob("p0*.json"))


def test_starts_without_torch(tmp_path: Path) -> None:
    tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(5))
    script = (
        f"import sys; sys.path.insert(0, {str(tiny.ROOT)!r})\n"
        "from megatron_ext.text.preprocess.cli import main\n"
        f"assert main({command(tmp_path)[2:]!r}) == 0\n"
        "heavy = 'torch triton transformer_engine megatron transformers awkward jinja2'.split()\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    how = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", script], **how)
    assert done.stdout.strip() == "[]", done.stderr


GOOD = ["--input", "a", "b*", "--output-prefix", "x", "--tokenizer-type", "NullTokenizer"]


def test_megatrons_flags_reach_the_options() -> None:
    more = [
        *("--json-keys", "text", "title", "--split-sentences", "--keep-newlines", "--append-eod"),
        *("--lang", "german", "--workers", "4", "--partitions", "2", "--log-interval", "50"),
        *("--keep_sequential_samples", "--vocab_size=7", "--merge-file", "m", "--vocab-file", "v"),
        *("--tokenizer-hf-use-fast", "--padded-vocab-size", "128"),
    ]
    options, notes = parse_options([*GOOD, *more])
    assert (options.inputs, options.output_prefix) == (["a", "b*"], "x")
    found = options.json_keys, options.lang, options.log_interval
    assert found == (["text", "title"], "german", 50)
    assert (options.workers, options.partitions, options.keep_sequential_samples) == (4, 2, True)
    assert options.split_sentences and options.keep_newlines and options.append_eod
    assert (options.tokenizer.vocab_size, options.tokenizer.merge_file) == (7, "m")
    unused = [note.partition(" has no effect ")[0] for note in notes]
    assert unused == [
        "`--padded-vocab-size`",
        "`--tokenizer-hf-use-fast`",
        "`--vocab-file` (v)",
        "`--merge-file` (m)",
    ]
    assert notes[2] == (
        "`--vocab-file` (v) has no effect without `--tokenizer-type GPT2BPETokenizer`."
    )


def test_underscores_stand_for_dashes_in_names_alone() -> None:
    words = ["--output_prefix=a_b", "--input=c_d", "--tokenizer_type", "NullTokenizer"]
    options, _ = parse_options([*words, "--json_keys", "g_h", "--tokenizer_model=i_j=k_l"])
    assert (options.output_prefix, options.inputs) == ("a_b", ["c_d"])
    assert (options.json_keys, options.tokenizer.tokenizer_model) == (["g_h"], "i_j=k_l")


@pytest.mark.parametrize(
    ("more", "sentences"),
    [
        (
            ["--legacy-tokenizer", "--find-optimal-num-workers", "--workers-to-check", "1", "2"],
            [
                "`--legacy-tokenizer` is known in Megatron-LM but not supported here: Megatron-LM",
                "`--find-optimal-num-workers` is known in Megatron-LM but not supported here: each",
                "`--workers-to-check` is known in Megatron-LM but not supported here: there is no",
            ],
        ),
        (
            ["--legacy-tokenizer", "--append-eos"],
            [
                "`--legacy-tokenizer` is known in Megatron-LM but not supported here: Megatron-LM",
                "Unknown flag `--append-eos`; did you mean `--append-eod`?",
            ],
        ),
        (["--worker", "3"], ["Unknown flag `--worker`; did you mean `--workers`?", "Unknown arg"]),
        (["--append-eos"], ["Unknown flag `--append-eos`; did you mean `--append-eod`?"]),
        (["--workers", "two"], ["Argument --workers: invalid int value: 'two'; see --help."]),
        (["--on-bad-line", "skip"], ["Argument --on-bad-line: invalid choice: 'skip'"]),
    ],
)
def test_flags_that_cannot_be_honoured(more: list[str], sentences: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options([*GOOD, *more])
    assert len(caught.value.messages) == len(sentences)
    for message, sentence in zip(caught.value.messages, sentences, strict=True):
        assert message.startswith(sentence)


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--output-prefix", "x"]) == 2
    said = "error: The following arguments are required: --input; see --help.\n"
    assert capsys.readouterr().err == said
    assert main(["--input", "none.jsonl", "--output-prefix", "x"]) == 2
    assert "error: `--tokenizer-type` is missing; give one of" in capsys.readouterr().err
    words = ["--input", "none.jsonl", "--output-prefix", "x", "--tokenizer-type", "NullTokenizer"]
    assert main([*words, "--vocab-size", "9", "--padded-vocab-size", "16"]) == 1
    note, error = capsys.readouterr().err.splitlines()
    assert note.startswith("`--padded-vocab-size` has no effect here: ")
    assert error.startswith("error: `--input` (none.jsonl) matches no file")
    assert signal.getsignal(signal.SIGTERM) is before
