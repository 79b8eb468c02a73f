"""Pages name only paths, flags, commands and tests that exist, and the true order of imports."""

import ast
import contextlib
import functools
import importlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import megatron.core
import pytest

from examples.custom_model.train import CapFlags
from examples.distillation.train import DistillationFlags
from examples.dpo.train import DpoFlags
from megatron_ext.config.flags import flags_of
from megatron_ext.config.inapplicable import megatron_flags
from megatron_ext.config.sections import OWN_FLAGS, spellings
from pretrain_gpt import AUDIT
from tests.combinations.options import every_flag
from tests.examples.test_scripts import SMOKED
from tests.test_surface import ENGINE

ROOT = Path(__file__).resolve().parents[1]
CORE = Path(megatron.core.__path__[0])
PAGES = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "tests/gpu/README.md",
            "tests/reference/README.md",
        )
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SCRIPTS = [
    path
    for folder in ("examples", "benchmarks", "megatron_ext/programs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".sh", ".sbatch")
]
FOLDERS = sorted(
    {path.name for place in (ROOT, ROOT / "megatron_ext") for path in place.iterdir()}
    - {"out", "__pycache__"}
)

PATH = re.compile(
    r"(?<![\w/.{$*-])((?:\.\./)*[a-z][\w.-]*(?:/[\w.-]+)*(?:\.(?:py|md|sh|sbatch)|/))(?![\w*/])"
)
QUOTED = re.compile(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]+)`")
METRIC = re.compile(r"(?:train|val)/\w+")
FLAG = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*(?![\w*]|-\*)")
TEST = re.compile(r"\btest_\w+\b")
COMMAND = re.compile(r"(?:python|\"\$PYTHON\") +(-m +megatron_ext[\w.]*|[\w/]+\.py)([^\n`#]*)")
ARROWS = re.compile(r"\w+(?:\s*→\s*\w+)+")
OWN_FLAG = re.compile(r"^    (\w+): .* = flag\(", re.MULTILINE)
ARGUMENT = re.compile(r"""add_argument\(\s*["'](--[\w-]+)["'](?:, ["'](--[\w-]+)["'])?""")

OTHERS = set(
    "--standalone --nproc-per-node --nnodes --node-rank --rdzv-backend --rdzv-endpoint --rdzv-id "
    "--master-addr --master-port --max-restarts --pdb --no-deps --only-binary --python-version "
    "--platform --implementation --shutdown-timeout --signal --requeue --signals-to-handle "
    "--no-python --build-arg --rm --gpus --shm-size --env "
    "--deepspeed --deepspeed-config --zero-stage --local-dir".split()
)
"""Flags of torchrun, pytest, pip, Slurm, Docker, kubectl, sky, DeepSpeed and Hugging Face's hf."""
FAMILY = "-"
"""Ends the beginning of several names, as in `--shift-*`."""


def said_by(path: Path) -> str:
    """Return what a script says of itself: its docstring, or the lines at its top."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    lines = [line for line in text.splitlines()[1:] if line.startswith(("# ", "#\n"))]
    return "\n".join(line.lstrip("# ") for line in lines)


TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES} | {
    str(path.relative_to(ROOT)): said_by(path) for path in SCRIPTS
}


def exists(path: str, page: str) -> bool:
    """Return whether what looks like a path of this repository, or of megatron-core, exists."""
    if METRIC.fullmatch(path) or f"```python\n# {path}\n" in TEXTS[page]:
        return True
    if path.startswith("../"):
        return (ROOT / page).parent.joinpath(path).exists()
    if "/" not in path:
        return any(ROOT.glob(f"*/**/{path}")) or (ROOT / path).exists()
    if path.split("/")[0] not in FOLDERS and not (CORE / path).exists():
        return not path.endswith((".py", ".sh"))  # a user's own folder
    places = (ROOT, ROOT / "megatron_ext", CORE)
    return any((place / name).exists() for place in places for name in (path, f"{path}.py"))


@pytest.mark.parametrize("page", TEXTS)
def test_every_path_exists(page: str) -> None:
    paths = [*PATH.findall(TEXTS[page]), *QUOTED.findall(TEXTS[page])]
    assert [path for path in paths if not exists(path, page)] == []


@functools.cache
def engine_flags() -> frozenset[str]:
    table = spellings(every_flag())
    return frozenset({*table, *megatron_flags(), *OWN_FLAGS, AUDIT})


@functools.cache
def arguments_of(path: Path) -> frozenset[str]:
    """Return options that a file, or its imports from benchmarks, adds to a parser of argparse."""
    text = path.read_text(encoding="utf-8")
    if path.parent.name == "benchmarks":
        for module in re.findall(r"^from benchmarks\.(\w+) import", text, re.MULTILINE):
            text += path.with_name(f"{module}.py").read_text(encoding="utf-8")
    return frozenset(name for names in ARGUMENT.findall(text) for name in names if name)


@functools.cache
def flags_of_tool(path: Path) -> frozenset[str]:
    """Return the flags of a tool's --help, with those of its subcommands."""
    name = path.stem.replace("preprocess_data", "preprocess")
    module = importlib.import_module(f"megatron_ext.programs.{name}")
    text = help_of(module.main, [])
    for command in re.findall(r"\{(\w+(?:,\w+)+)\}", text.split("\n\n")[0]):
        text += "".join(help_of(module.main, [name]) for name in command.split(","))
    return frozenset(FLAG.findall(text))


def help_of(main: object, words: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words, "--help", "all"])  # type: ignore[operator]
    return out.getvalue()


@functools.cache
def own_flags() -> frozenset[str]:
    """Return the flags that programs in examples/ add to those of GPT."""
    kinds = (CapFlags, DpoFlags, DistillationFlags)
    flags = [flag for kind in kinds for flag in flags_of("own", kind)]
    return frozenset(name for flag in flags for name in (*flag.positive, *flag.negative))


@functools.cache
def all_arguments() -> frozenset[str]:
    folders = ("megatron_ext", "tools", "benchmarks", "examples", "tests/combinations")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    tools = [flags_of_tool(path) for path in (ROOT / "tools").glob("*.py")]
    return frozenset(OTHERS | own_flags() | engine_flags()).union(*map(arguments_of, files), *tools)


@pytest.mark.parametrize("page", TEXTS)
def test_every_flag_is_one_of_some_program(page: str) -> None:
    named = {flag.replace("_", "-") for flag in FLAG.findall(TEXTS[page])}
    families = {flag for flag in named if flag.endswith(FAMILY)}
    shown = {name for names in ARGUMENT.findall(TEXTS[page]) for name in names}
    shown |= {f"--{name.replace('_', '-')}" for name in OWN_FLAG.findall(TEXTS[page])}
    unknown = named - families - shown - all_arguments()
    assert sorted(unknown) == []
    for family in families:
        assert any(flag.startswith(family) for flag in all_arguments()), family


def commands() -> Iterator[tuple[str, str, str]]:
    """Yield page, program and words of every command that a page or a script shows."""
    for page, text in TEXTS.items():
        for program, words in COMMAND.findall(text.replace("\\\n", " ")):
            yield page, program, words


def flags_of_program(program: str) -> frozenset[str]:
    """Return the flags that a program takes before ``--``."""
    if program.startswith("-m"):
        name = program.split()[1]
        spec = importlib.util.find_spec(name)
        is_package = spec is not None and spec.submodule_search_locations is not None
        module = importlib.import_module(f"{name}.__main__" if is_package else name)
        return frozenset(FLAG.findall(help_of(getattr(module, "main", None) or module.parse, [])))
    path = ROOT / program
    if path.parent.name == "tools":
        return flags_of_tool(path)
    if arguments_of(path):
        return arguments_of(path)
    return engine_flags() | own_flags()


def test_every_command_names_a_program_and_its_flags() -> None:
    wrong = []
    seen = list(commands())
    for page, program, words in seen:
        if program.endswith(".py") and not exists(program, page):
            wrong.append(f"{page}: {program}")
            continue
        if program.endswith(".py") and not (ROOT / program).exists():
            continue  # named without its folder
        own, _, onward = words.partition(" -- ")
        flags = flags_of_program(program)
        wrong += [f"{page}: {program} {x}" for x in FLAG.findall(own) if x not in flags]
        wrong += [f"{page}: {program} -- {x}" for x in FLAG.findall(onward)
                  if x not in engine_flags()]  # fmt: skip
    assert wrong == []
    assert len(seen) > 50


@functools.cache
def defined_in(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
def test_every_test_that_is_named_exists(page: str) -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    known = frozenset(path.stem for path in files).union(*map(defined_in, files))
    unknown = sorted(set(TEST.findall(TEXTS[page])) - known)
    # `test_d01_…` stands for all that begin so.
    assert [x for x in unknown if not (x.endswith("_") and begins(x, known))] == []
    for file, name in re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", TEXTS[page]):
        inside = defined_in(ROOT / file)
        assert name in inside or (name.endswith("_") and begins(name, inside))


def begins(name: str, names: frozenset[str]) -> bool:
    return any(x.startswith(name) for x in names)


def test_the_readme_is_read_in_five_minutes_and_leads_to_every_page() -> None:
    assert len(TEXTS["README.md"].split()) <= 1000
    docs = ROOT / "docs"
    listed = re.findall(r"\]\(([\w./]+\.md)\)", TEXTS["docs/README.md"])
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(pages)


def test_every_example_of_the_readme_has_a_smoke_mode_that_a_test_runs() -> None:
    rows = re.findall(r"^\| `examples/(\S+)` \|", TEXTS["README.md"], re.MULTILINE)
    assert len(rows) > 10
    assert set(rows) <= set(SMOKED)


@pytest.mark.parametrize("page", ["docs/reading_order.md", "CONTRIBUTING.md"])
def test_the_order_of_imports_is_the_one_that_is_tested(page: str) -> None:
    orders = [re.findall(r"\w+", order) for order in ARROWS.findall(TEXTS[page])]
    assert [order for order in orders if "checkpoint" in order] == [ENGINE]
