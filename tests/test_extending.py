"""Each case of docs/extending.md is built in a copy and trains a few steps.

The blocks of the page are taken as they stand: a block of Python whose first line names a file is
that file, a block of differences changes the file that it names, and the command below them is run.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.examples.test_dit import make_latents

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MORE = "--num-workers 0 --log-interval 1"
NETWORK = "a video network"
PP2 = "--pipeline-model-parallel-size 2 --nproc-per-node 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --nproc-per-node 2"
DRY = "--hidden-dropout 0 --attention-dropout 0"
ROPE = "--attention-dropout 0 --position-embedding-type rope"
SAME = "--padded-vocab-size 128"
ON = "--train-iters 4 --override-opt-param-scheduler"
OF_PARTS = {
    "block alone": ("a transformer block", DRY),
    "block cut": ("a transformer block", f"{DRY} {TP2} {SAME}"),
    "norm of torch": ("a norm", f"{TP2} --normalization RMSNorm"),
    "norm resumed": ("a norm", f"{PP2} --load out/a_norm {ON}"),
    "usual attention": (
        "an attention",
        f"{ROPE} --tensor-model-parallel-size 2 --nproc-per-node 2",
    ),
    "attention resumed": ("an attention", f"{ROPE} {PP2} --load out/an_attention {ON}"),
}
"""Sections of the page whose programs run again, with which other flags, by the name of the run."""
STOCK = ("norm of torch", "usual attention")
"""Runs of pretrain_gpt.py instead, whose layers the page's own ones must equal."""
OF_NETWORK = {
    "stages": PP2,
    "plan": "--dry-run",
    "checkpoint": "--use-checkpoint-args --load out/a_video_network --train-iters 4",
    "ranks": "--context-parallel-size 2 --nproc-per-node 2",
    "blocks": f"--mixer-blocks 1 {PP2}",
    "width": "--mixer-width 0",
    "others": "--mmdit-size small --video-dit-size small --i2v-head-weight 1 --chunk-frames 3",
    "mmdit": "--video-model mmdit --mixer-width 8",
}
"""Further flags of runs of the new video network, by name."""
REFUSED = {
    "ranks": [
        "context-parallel-size` (2) must be 1 for a mixer; use pipeline stages and replicas."
    ],
    "blocks": [
        "the pipeline has 2 stages, but the model only 1 blocks; use a smaller `--pipeline-"
    ],
    "width": ["`--mixer-width` (0) must be at least 1"],
    "others": [
        "`--mmdit-size` has an effect only with `--video-model mmdit`; leave it out.",
        "`--video-dit-size` has an effect only with `--video-model video-dit or causal-video-dit`;",
        "`--chunk-frames` has an effect only with `--task streaming`; leave it out.",
        "`--i2v-head-weight` has no effect with `--video-model mixer`: a mixer is given no refer",
    ],
    "mmdit": ["`--mixer-width` has an effect only with `--video-model mixer`; leave it out."],
}
DRIVER = """
import json, os, runpy, sys
import megatron.core.dist_checkpointing, megatron.core.models.gpt, megatron.core.optimizer
import megatron.core.pipeline_parallel, torch._dynamo
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import pretrain
from megatron_ext.video.task import VIDEO
from megatron_ext.train.reporting import loss_plot
loss_plot.LossPlot.close = lambda self: None  # draws a chart
pretrain.load()
for task in (*TEXT.tasks, *VIDEO.tasks):
    task.loaded()
codes = {}
for name, words in json.load(open("cases.json")).items():
    pid = os.fork()
    if pid == 0:
        with open(f"{name}.log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.argv = words
        code = 0
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as error:
            code = error.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
json.dump(codes, open("codes.json", "w"))
"""
"""Imports what runs need once, as the tests do, and runs each command in a fork."""


@dataclass
class Case:
    """A section of the page; `said` is the end of its heading, which says what it costs."""

    said: str
    command: list[str] = field(default_factory=list)
    added: set[str] = field(default_factory=set)
    edited: set[str] = field(default_factory=set)


def flags() -> dict[str, str]:
    """Return the flags of the tiny runs, by the names that the commands give them."""
    block = next(text for kind, text in BLOCK.findall(PAGE) if kind == "bash")
    found = re.findall(r'^(\w+)="(.*?)"$', block.replace("\\\n", " "), re.MULTILINE)
    return {name: " ".join(value.split()) for name, value in found}


def cases() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {head.split(":")[0].lower(): head + text for head, text in pairs}


def write(case: Case, kind: str, text: str, folder: Path) -> None:
    head, _, body = text.partition("\n")
    name = head.removeprefix("# ")
    path = folder / name
    if kind == "python":
        assert not path.exists(), name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(body, encoding="utf-8")
        if not name.startswith("my_"):
            case.added.add(name)
        return
    lines = body.splitlines(keepends=True)
    before = "".join(line[1:] or "\n" for line in lines if line[0] in " -")
    after = "".join(line[1:] or "\n" for line in lines if line[0] in " +")
    content = path.read_text(encoding="utf-8")
    assert content.count(before) == 1, f"{name} does not hold once:\n{before}"
    path.write_text(content.replace(before, after), encoding="utf-8")
    case.edited.add(name)


def build(name: str, section: str, folder: Path) -> Case:
    case = Case(section.splitlines()[0].partition(": ")[2])
    for kind, text in BLOCK.findall(section):
        if kind == "bash":
            words = text.replace("\\\n", " ").strip()
            for variable, value in flags().items():
                words = words.replace(f"${variable}", value)
            words += f" {MORE} --save out/{name.replace(' ', '_')}"
            case.command = shlex.split(words)[1:]
        else:
            write(case, kind, text, folder)
    return case


Built = tuple[Path, dict[str, Case]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("copy")
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_ext", folder / "megatron_ext", ignore=skipped)
    for path in ROOT.glob("pretrain_*.py"):
        shutil.copy(path, folder)
    shutil.move(make_latents(tmp_path_factory.mktemp("clips")), folder / "latents")
    found = {name: build(name, section, folder) for name, section in cases().items()}
    commands = {name: case.command for name, case in found.items()}
    for name, words in OF_NETWORK.items():
        commands[name] = [*commands[NETWORK][:-2], *words.split(), "--save", f"out/{name}"]
    tiny = shlex.split(f"{flags()['TEXT']} {MORE}")
    for name, (section, words) in OF_PARTS.items():
        program = "pretrain_gpt.py" if name in STOCK else commands[section][0]
        save = f"out/{name.replace(' ', '_')}"
        commands[name] = [program, *tiny, *words.split(), "--save", save]
    for words in commands.values():
        if "--mock-data" in words:  # One of the runs shuffles the samples.
            words += ["--data-cache-path", "order"]
    (folder / "cases.json").write_text(json.dumps(commands))
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", DRIVER], cwd=folder, env=env, check=True, timeout=600)
    return folder, found


@pytest.mark.parametrize("name", cases())
def test_a_case_trains_and_costs_what_the_page_says(name: str, built: Built) -> None:
    folder, found = built
    case = found[name]
    if case.said.endswith("its line in the table"):
        assert len({Path(path).parent for path in case.added}) == 1
        assert case.edited == {"megatron_ext/video/networks/__init__.py"}
    else:
        assert case.said == f"{len(case.added | case.edited)} file{'s' * (case.said[0] != '1')}"
    log = (folder / f"{name}.log").read_text(encoding="utf-8")
    if name == "a thing done between steps":  # The callback prints after each one.
        assert log.count("weight norm ") == 3
    assert json.loads((folder / "codes.json").read_text())[name] == 0, log[-3000:]
    assert [row["iteration"] for row in steps_of(folder, name)] == [1, 2, 3]


def steps_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return what a run wrote down of its steps."""
    rows = (folder / "out" / name.replace(" ", "_") / "metrics.jsonl").read_text().splitlines()
    assert "NaN" not in "".join(rows)
    return [row for row in map(json.loads, rows) if row["kind"] == "train"]


def result(folder: Path, name: str) -> tuple[int, str]:
    """Return the exit code of a run, and what it printed."""
    code = json.loads((folder / "codes.json").read_text())[name]
    return code, (folder / f"{name}.log").read_text(encoding="utf-8")


def test_the_new_network_trains_the_same_on_two_stages(built: Built) -> None:
    folder, _ = built
    code, log = result(folder, "stages")
    assert code == 0, log[-3000:]
    losses = [[row["loss"] for row in steps_of(folder, name)] for name in (NETWORK, "stages")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[0][-1] != losses[0][0]


def test_the_new_network_goes_on_from_its_checkpoint(built: Built) -> None:
    folder, _ = built
    code, log = result(folder, "checkpoint")
    assert code == 0, log[-3000:]
    assert [row["iteration"] for row in steps_of(folder, "checkpoint")] == [4]


def test_the_cost_of_the_new_network_is_planned(built: Built) -> None:
    folder, _ = built
    code, log = result(folder, "plan")
    assert code == 0, log[-3000:]
    # Embedders of 16, 32 and 1 features, two blocks of 32 x 32, and 16 outputs, with biases.
    count = 32 * (16 + 32 + 1 + 2 * 32 + 16) + 5 * 32 + 16
    assert f"{count:,}" in log, log[-3000:]


@pytest.mark.parametrize("name", REFUSED)
def test_flags_that_do_not_fit_the_new_network_are_refused(name: str, built: Built) -> None:
    folder, _ = built
    code, log = result(folder, name)
    assert code == 2, log[-3000:]
    errors = [line for line in log.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(REFUSED[name]), errors
    for sentence in REFUSED[name]:
        assert any(sentence in line for line in errors), errors


def losses_of(built: Built, name: str) -> list[float]:
    code, log = result(built[0], name)
    assert code == 0, log[-3000:]
    return [row["lm loss"] for row in steps_of(built[0], name)]


def test_the_new_block_trains_the_same_in_all_layouts(built: Built) -> None:
    """The page's own command recomputes it on two stages."""
    truth = losses_of(built, "block alone")
    assert losses_of(built, "a transformer block") == pytest.approx(truth, rel=1e-5)
    assert losses_of(built, "block cut") == pytest.approx(truth, rel=1e-5)
    assert truth != pytest.approx(losses_of(built, "a norm"), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "stock"), [("a norm", "norm of torch"), ("an attention", "usual attention")]
)
def test_parts_that_compute_the_same_train_the_same(name: str, stock: str, built: Built) -> None:
    """The attention's temperatures begin at 1, where they change nothing."""
    count = 3 if name == "a norm" else 1
    losses = losses_of(built, name)
    assert losses[:count] == pytest.approx(losses_of(built, stock)[:count], rel=1e-5)
    assert losses[-1] != losses[0]


@pytest.mark.parametrize("name", ["norm resumed", "attention resumed"])
def test_new_parts_go_on_in_another_layout(name: str, built: Built) -> None:
    assert len(losses_of(built, name)) == 1


def test_the_table_says_what_the_headings_say() -> None:
    rows = re.findall(r"^\| (an? .+?) \| (.+?) \| .+ \|$", PAGE, re.MULTILINE)
    headings = {name: text.splitlines()[0].partition(": ")[2] for name, text in cases().items()}
    assert dict(rows) == {name: re.sub(r" files?$", "", said) for name, said in headings.items()}
