"""Plants small faults in a copy of the tree, and says which of them no test finds.

python tests/mutation/run.py                 # every fault of faults.yaml
python tests/mutation/run.py --only ema      # those whose file or text holds a word
python tests/mutation/run.py --list mine.yaml

It ends with 1 if a fault survives, and with 2 if the list is no longer right: the text is gone, or
the named tests fail without any fault. The list does not belong to CI, whose tests it judges.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.yaml")
PASSED = 0
FAILED = 1
"""Exit code of pytest where a test fails; others say that pytest itself could not do its work."""


@dataclass(frozen=True)
class Fault:
    """A change of one place of the package that a test must find.

    Attributes:
        file: path in the repository.
        before: text that stands once in the file.
        after: what the fault puts in its place.
        tests: what pytest is to run: files, or single tests of them.
        why: what the fault does to a run.
    """

    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    why: str

    def plant(self, tree: Path) -> str:
        """Put the fault in a copy of the tree, and return the text that the file had.

        Raises:
            ValueError: the text does not stand exactly once in the file.
        """
        path = tree / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.file} has {self.before!r} {count} times, not once")
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")
        return text


def read_faults(path: Path) -> list[Fault]:
    """Read the faults of a list."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def copy_tree(source: Path, target: Path) -> None:
    """Copy the files that git knows or would add, as they are now."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=source, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if name and (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def run_tests(tree: Path, tests: Sequence[str], seconds: float) -> int | None:
    """Run pytest in a copy of the tree; return its exit code, or None if it takes too long."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        # The copy of a file without the fault may be as long, and of the same second.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    process = subprocess.Popen(
        [sys.executable, *words, *tests],
        cwd=tree,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        # The tests' ranks are in its process group, too.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def outcome_of(fault: Fault, tree: Path, seconds: float) -> str:
    """Plant a fault, run its tests and take it out; return what became of it."""
    try:
        text = fault.plant(tree)
    except ValueError as error:
        return f"gone: {error}"
    try:
        code = run_tests(tree, fault.tests, seconds)
    finally:
        (tree / fault.file).write_text(text, encoding="utf-8")
    if code == PASSED:
        return "survived"
    if code is None or code == FAILED:
        return "found"
    return f"broken: pytest ended with {code}"


def main(words: Sequence[str]) -> int:
    """Plant the faults that are chosen, and print what became of each."""
    parser = argparse.ArgumentParser(description="Plant faults, and see whether tests find them.")
    parser.add_argument("--list", type=Path, default=FAULTS, help="file of faults (YAML)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree that is copied")
    parser.add_argument("--only", default="", help="a word of the file, the texts or the reason")
    parser.add_argument("--seconds", type=float, default=600, help="limit for the tests of a fault")
    options = parser.parse_args(words)
    faults = [fault for fault in read_faults(options.list) if options.only in str(fault)]
    if not faults:
        print(f"no fault of {options.list} has the word {options.only!r}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutation_") as name:
        tree = Path(name)
        copy_tree(options.root, tree)
        tests = sorted({test for fault in faults for test in fault.tests})
        if run_tests(tree, tests, len(faults) * options.seconds) != PASSED:
            print("without any fault, some of these tests fail:", *tests, sep="\n  ")
            return 2
        outcomes = []
        for fault in faults:
            start = time.monotonic()
            outcomes.append(outcome_of(fault, tree, options.seconds))
            took = f"{time.monotonic() - start:.0f} s"
            print(f"{outcomes[-1]} ({took}): {fault.file}: {fault.why}", flush=True)
    found = outcomes.count("found")
    survived = outcomes.count("survived")
    print(f"{len(faults)} faults: {found} found, {survived} survived")
    if found + survived < len(faults):
        return 2
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
