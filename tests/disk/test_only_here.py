"""Files are opened for writing, and JSON and YAML are parsed, by the modules of `disk` alone."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_ext"
OWN = ("disk/reading.py", "disk/writing.py")
WRITERS = {
    "write_text", "write_bytes", "touch", "tofile", "savefig", "save_file", "export_chrome_trace",
    "copyfile", "copy", "copy2", "move", "memmap", "ParquetWriter", "save", "savez", "symlink_to",
    "mkfifo", "truncate",
}  # fmt: skip
"""Names of functions that write to a path; `save` is that of torch and numpy."""
OF_MODULES = {"copy", "copy2", "move", "save", "savez", "copyfile"}
"""Names that count only as functions of a module, such as `torch.save` and `shutil.copy`."""
MODULES = {"torch", "np", "numpy", "shutil"}
PARSERS = {
    "json.load", "json.loads", "yaml.load", "yaml.safe_load", "yaml.full_load",
    "yaml.unsafe_load", "yaml.parse", "yaml.load_all", "yaml.safe_load_all", "orjson.loads",
}  # fmt: skip
CLEARED = {"cleared", "own_folder"}
"""Functions that remove what stands at a path before a library writes there."""

USERS_OWN = "a file or folder that the user names for this output, which may be a link"
TEMPORARY = "a file in a temporary folder that this process has made"
FRESH = "a folder that the same function has just made, or that must be empty"
PROC = "a file of the kernel"
WRITES = {
    ("text/generation/run.py", "write_text"): USERS_OWN,
    ("text/evaluation/run.py", "write_text"): USERS_OWN,
    ("inspect/doctor/examine.py", "write_text"): USERS_OWN,
    ("extras/chaos/goodput.py", "savefig"): USERS_OWN,
    ("schedules/picture.py", "savefig"): USERS_OWN,
    ("text/preprocess/slurm.py", "write_text"): USERS_OWN,
    ("train/rank.py", "write_text"): "torchrun's error file, which torchrun has made and names",
    ("extras/quality/duplicates.py", "memmap"): TEMPORARY,
    ("checkpoint/prepared.py", "torch.save"): "a buffer in memory",
    ("data/block_cache.py", "np.memmap"): "a table that was made or checked just before",
    ("inspect/parity.py", "torch.save"): FRESH,
    ("text/sft/store.py", "np.memmap"): "mapped for reading",
    ("extras/resilience/watchdog.py", "os.mkfifo"): "a pipe in the private folder of this machine",
    ("extras/resilience/watchdog.py", "os.open"): "a pipe in the private folder of this machine",
    (
        "extras/resilience/watchdog.py",
        "os.truncate",
    ): "a file in the private folder of this machine",
    ("extras/chaos/strikes.py", "open"): "damages a checkpoint on purpose, of a run that is tested",
    ("extras/ledger/tool.py", "ParquetWriter"): "a file that was opened by `open_new`",
    ("errors.py", "os.open"): "/dev/null",
    ("disk/host_folder.py", "os.open"): "the lock of a folder that is this user's alone",
    ("data/block_cache.py", "truncate"): "a file that was opened by `open_new`",
}
"""Writes outside of `disk`, by file and function, each with its reason."""
PARSES = {
    ("text/preprocess/long_lines.py", "orjson.loads"): "a piece of one string",
    ("text/preprocess/encode.py", "orjson.loads"): "a line of bounded length; depth 1024 at most",
    ("text/preprocess/encode.py", "json.loads"): "such a line, again; RecursionError is caught",
    ("text/preprocess/tables.py", "orjson.loads"): "a cell of bounded length; depth 1024 at most",
    ("text/preprocess/parts.py", "json.loads"): "what this process has just written as JSON",
    ("text/tokenizers/huggingface.py", "json.loads"): "what the tokenizer has just written as JSON",
    ("video/data/register.py", "json.loads"): "what this process has just written as JSON",
    ("text/tokenizers/entries.py", "orjson.loads"): "what the library has just written as JSON",
    ("text/tokenizers/entries.py", "json.loads"): "what the library has just written as JSON",
    ("text/preprocess/folders.py", "json.loads"): "a list that this run has written",
    ("extras/chaos/inject.py", "json.loads"): "an environment variable of the tool's own",
    ("extras/resilience/flight.py", "json.loads"): "a file in the private folder of this machine",
    ("inspect/doctor/host.py", "json.loads"): "the output of a process of the tool's own",
}
READS = {
    ("text/tokenizers/base.py", "read_bytes"): "hashed, after the tokenizer has read it",
    ("checkpoint/helper.py", "read_bytes"): "results of the ranks in a folder that this run made",
    ("checkpoint/helper.py", "read_text"): "results of the ranks in a folder that this run made",
    ("extras/resilience/flight.py", "read_bytes"): "a file in the private folder of this machine",
    ("extras/resilience/watchdog.py", "read_text"): "a file in the private folder of this machine",
    ("extras/chaos/strikes.py", "read_text"): PROC,
    ("extras/resilience/process.py", "read_text"): PROC,
    ("device/host.py", "read_text"): PROC,
    ("limits.py", "read_text"): PROC,
    ("text/sft/templates.py", "read_text"): PROC,
    ("disk/host_folder.py", "read_text"): "a file in the private folder of this machine",
    ("data/block_cache.py", "read_text"): PROC,
    ("extras/chaos/run.py", "read_text"): PROC,
    ("train/exit_codes.py", "read_text"): "exit codes that processes of this job have left",
    ("inspect/pages/page.py", "read_text"): "a file of this package",
    ("inspect/cores.py", "read_text"): "a file of this package",
    ("extras/chaos/campaign.py", "read_text"): "the log of a run that the tool has started",
    ("extras/audit/reproduced.py", "read_bytes"): TEMPORARY,
}


Calls = list[tuple[str, int, str, ast.Call]]


@pytest.fixture(scope="module")
def calls() -> Calls:
    """Return file, line and dotted name of each call of the package."""
    found: Calls = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name in OWN:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                found.append((name, node.lineno, _dotted(node.func), node))
    return found


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "()"


def _opens_to_write(name: str, call: ast.Call) -> bool:
    """Return whether a call is `open` or `Path.open` with a mode that writes, or `os.open`."""
    last = name.rpartition(".")[2]
    if name == "os.open":
        return any("O_WRONLY" in ast.dump(x) or "O_RDWR" in ast.dump(x) for x in call.args[1:])
    if last != "open" or name.startswith(("av.", "Image.", "self._av", "tarfile", "webbrowser")):
        return False
    modes = [*call.args[: 2 if name == "open" else 1], *(k.value for k in call.keywords)]
    texts = [x.value for x in modes if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    return any(set(text) <= set("rwaxbt+") and set(text) & set("wax+") for text in texts)


def _writes(name: str, call: ast.Call) -> str | None:
    """Return the short name of a function that writes to a path; None for any other call."""
    before, _, last = name.rpartition(".")
    if _opens_to_write(name, call):
        return name if name == "os.open" else "open"
    if last not in WRITERS or name in ("write_text", "write_bytes"):
        return None  # those of `disk`
    if last in OF_MODULES and before.rpartition(".")[2] not in MODULES:
        return None
    given = [_dotted(x.func) for arg in call.args for x in ast.walk(arg) if isinstance(x, ast.Call)]
    if CLEARED & set(given):
        return None
    return name if before in (*MODULES, "os") else last


def test_files_are_opened_for_writing_by_one_module_alone(calls: Calls) -> None:
    known = {(file, short.rpartition(".")[2]) for file, short in WRITES}
    found = {
        (file, short.rpartition(".")[2]): f"{file}:{line} calls {name}"
        for file, line, name, call in calls
        if (short := _writes(name, call)) is not None
    }
    assert [text for key, text in found.items() if key not in known] == []
    assert known - found.keys() == set()


def test_locks_follow_no_link(calls: Calls) -> None:
    """filelock empties the target of a link, so `lock_path` has to see its path first."""
    made = {file for file, _, name, _ in calls if name.endswith("FileLock")}
    seen = {file for file, _, name, _ in calls if name == "lock_path"}
    assert made and made - seen == set()


def test_json_and_yaml_are_parsed_by_one_module_alone(calls: Calls) -> None:
    found = {(file, name): line for file, line, name, _ in calls if name in PARSERS}
    assert [
        f"{file}:{found[file, name]} calls {name}" for file, name in found.keys() - PARSES.keys()
    ] == []
    assert PARSES.keys() - found.keys() == set()


def test_whole_files_are_read_by_one_module_alone(calls: Calls) -> None:
    found = {
        (file, last): line
        for file, line, name, _ in calls
        if "." in name and (last := name.rpartition(".")[2]) in ("read_text", "read_bytes")
    }
    assert [
        f"{file}:{found[file, last]} calls {last}" for file, last in found.keys() - READS.keys()
    ] == []
    assert READS.keys() - found.keys() == set()
