"""Layouts compared across releases of megatron-core, and what is refused before anything runs."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.device import select
from megatron_ext.errors import ConfigError
from megatron_ext.inspect import cores
from megatron_ext.inspect.cores import Environment, choose_environments, record_on
from megatron_ext.inspect.layouts import parse_layout, refuse_random_draws, split_layouts
from megatron_ext.inspect.parity import Recording
from megatron_ext.programs.parity import main
from megatron_ext.text.task import TEXT
from megatron_ext.train.forking import fork_ranks
from tests.training_runs import ROOT, SAME_WEIGHTS, mock_data

INSTALLED = version("megatron-core")
PINS = ("0.16.1", "0.19.2")
FLAGS = [*SAME_WEIGHTS, *mock_data()]
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.2"]
EXPERTS = ["--num-experts", "4"]


def make_python(root: Path, name: str, script: str) -> Path:
    """Return the path of an executable in place of an environment's Python."""
    python = root / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    make_python(tmp_path, ".venv", "echo 7.1.0")
    make_python(tmp_path, ".venv-core-7.2", 'echo "7.2.${PYTHONPATH:-13}"')
    make_python(tmp_path, ".venv-without-core", "echo 7.3.0; exit 1")
    return tmp_path


def test_environments_are_found_by_the_core_that_they_have(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    first, second, third = choose_environments(f"7.2,{INSTALLED},7.1.0", checkout)
    # The running interpreter keeps the search path by which it finds its core; others have none.
    assert (first.core, first.variables().get("PYTHONPATH")) == ("7.2.13", None)
    assert first.python == checkout / ".venv-core-7.2/bin/python"
    assert second == Environment(INSTALLED, Path(sys.executable), "/elsewhere")
    assert second.variables()["PYTHONPATH"] == "/elsewhere"
    assert third == Environment("7.1.0", checkout / ".venv/bin/python")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (
            "7.3",
            r"`7.3`, but no environment .*7.1.0 in .*\.venv/.*or of 0.16.1 and ",
        ),
        ("7", ""),
        ("7.10", "has `7.10`, but no environment"),
        ("7.1,7.1.0", r"`--cores` \(7.1,7.1.0\) names megatron-core 7.1.0 twice; name it once"),
        ("", r"`--cores` \(\) names no megatron-core; give such as"),
    ],
)
def test_a_core_without_an_environment_is_refused(
    names: str, sentence: str, checkout: Path
) -> None:
    if not sentence:
        assert choose_environments(names, checkout)[0].core == "7.1.0"
        return
    with pytest.raises(ConfigError, match=sentence):
        choose_environments(names, checkout)


def test_the_refusal_names_the_command_that_makes_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    monkeypatch.setattr("megatron_ext.programs.parity.ROOT", tmp_path)
    other = next(pin for pin in PINS if pin != INSTALLED)
    short = other.rpartition(".")[0]
    for name in (other, short):
        assert main(["--cores", f"{INSTALLED},{name}", "--", *FLAGS]) == 2
        said = capsys.readouterr().err
        assert f"`--cores` has `{name}`, but no environment has that megatron-core" in said
        assert f"make one by `CORE={name} bash tests/run.sh`" in said


def test_a_process_that_dies_fails_the_layouts_that_it_has_not_trained(tmp_path: Path) -> None:
    python = make_python(tmp_path, "broken", "exit 3")
    layouts = split_layouts("dp1,tp2")
    found = list(record_on(Environment("9.9", python), "code", [], layouts, 1, tmp_path))
    assert [recording.layout for recording in found] == layouts
    assert {recording.failure for recording in found} == {
        "the process with megatron-core 9.9 ended with exit code 3"
    }


def test_whoever_stops_reading_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0/recording.json").write_text(
        '{"rows": [{"lm loss": NaN}], "failure": "x", "core": "9.8"}'
    )
    script = f"echo $$ > {tmp_path}/pid; echo 0; exec sleep 600"
    environment = Environment("9.9", make_python(tmp_path, "slow", script))
    with closing(
        record_on(environment, "code", [], split_layouts("dp1,tp2"), 1, tmp_path)
    ) as recordings:
        first = next(recordings)
    assert (first.label, first.failure, str(first.rows[0]["lm loss"])) == ("9.8 dp1", "x", "nan")
    pid = (tmp_path / "pid").read_text().strip()
    assert subprocess.run(["ps", "-p", pid], capture_output=True, check=False).returncode == 1


def test_a_process_gets_the_flags_and_the_search_path_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    script = f'echo "$PYTHONPATH|$@" > {tmp_path}/called'
    for path in (None, "/its own"):
        environment = Environment("9.9", make_python(tmp_path, f"of {path}", script), path)
        layouts = split_layouts("tp2,pp2[--a b,c]")
        words = ["--lr", "1"]
        list(record_on(environment, "code", words, layouts, 3, tmp_path))
        assert (tmp_path / "called").read_text().strip() == (
            f"{path or ''}|-c code --record-into {tmp_path} --steps 3 "
            "--layouts tp2,pp2[--a b,c] -- --lr 1"
        )


def serve_made_up(folder: Path, out: int) -> None:
    """Serve three layouts whose training is made up; what a run prints goes to stderr."""
    os.dup2(out, 1)

    def record(*given: Any) -> Recording:
        _, words, layout, steps, own, _ = given
        own.mkdir(parents=True)
        print("output of the run", flush=True)
        rows = [{"words": list(words), "steps": steps}]
        return Recording(layout, own, rows, 100 + layout.ranks, f"no {layout.name}")

    cores.record = record  # type: ignore[assignment]
    cores.megatron.core.__version__ = "9.8+local"  # type: ignore[attr-defined]
    layouts = split_layouts("tp2,pp4,tp2")
    cores.serve(TEXT, ["--lr", "1"], layouts, 5, folder, select())


def test_recordings_of_a_process_are_stored_and_named_when_they_are_whole(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    assert fork_ranks(partial(serve_made_up, tmp_path, writing), 1) == 0
    os.close(writing)
    with os.fdopen(reading) as stream:
        assert stream.read() == "0\n1\n2\n"
    for index, (name, ranks) in enumerate((("tp2", 2), ("pp4", 4), ("tp2", 2))):
        assert json.loads((tmp_path / str(index) / "recording.json").read_text()) == {
            "rows": [{"words": ["--lr", "1"], "steps": 5}], "padded_vocab_size": 100 + ranks,
            "failure": f"no {name}", "core": "9.8",
        }  # fmt: skip


def refuse(layouts: str, words: Sequence[str], against: str = "dp1") -> None:
    named = split_layouts(layouts)
    refuse_random_draws(TEXT, [*FLAGS, *words], parse_layout(against), named, 2, select())


@pytest.mark.parametrize(
    ("layouts", "words", "against", "sentence"),
    [
        ("dp1,tp2", DROPOUT, "dp1", r"`--hidden-dropout` \(0.1\) and `--attention-dropout` \(0.2\)"
         " would change other elements in `tp2` than in `dp1`, since each rank draws from a "
         "generator of its own, so losses would differ; add `--deterministic-dropout`, or turn "
         "them off"),
        ("mbs4", DROPOUT[:2], "mbs2", r"^`--hidden-dropout` \(0.1\) would .* or turn it off"),
        ("pp2zbv", DROPOUT, "pp2vpp2", "`pp2zbv` than in `pp2vpp2`"),
        ("dp2", [*EXPERTS, "--moe-input-jitter-eps", "0.1"], "dp1", "-jitter-eps` .*add `--det"),
        ("tp2[--deterministic-dropout]", DROPOUT, "dp1", "`--hidden-dropout`"),
        ("tp2[--hidden-dropout 0.3]", [], "dp1", r"^`--hidden-dropout` \(0.3\) would change"),
        ("pp2", ["--lora-rank", "2", "--lora-dropout", "0.1"], "dp1",
         r"^`--lora-dropout` \(0.1\) would .* would differ; turn it off"),
    ],
)  # fmt: skip
def test_layouts_with_dropout_of_their_own_are_refused(
    layouts: str, words: list[str], against: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        refuse(layouts, words, against)


@pytest.mark.parametrize(
    ("layouts", "words", "against"),
    [
        ("tp2,pp2zbv,cp2,dp2,mbs4", [], "dp1"),
        ("tp2,pp2,mbs4", [*DROPOUT, "--deterministic-dropout"], "dp1"),
        ("tp2[--hidden-dropout 0 --attention-dropout 0]", [], "dp1"),
        ("dp1,dp1do", DROPOUT, "dp1"),
        ("pp2zbh1,pp2core1f1b", DROPOUT, "pp2"),
        ("dp2", ["--moe-input-jitter-eps", "0.1"], "dp1"),
        ("dp2", ["--lora-dropout", "0.1"], "dp1"),
        ("tp3", DROPOUT, "dp1"),  # which cannot be run, and says so in its row
    ],
)
def test_layouts_with_the_same_masks_are_not(layouts: str, words: list[str], against: str) -> None:
    refuse(layouts, words, against)


def test_dropout_is_told_before_anything_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--layouts", "tp2,pp2", "--", *FLAGS, *DROPOUT]) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith("error: `--hidden-dropout` (0.1) and `--attention-dropout`")
    assert "parameters" not in shown.err + shown.out


@pytest.mark.slow
def test_schedules_of_the_same_stages_draw_the_same_masks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    own = "--against pp2 --layouts pp2zbh1,pp2core1f1b,pp2do --steps 2 --".split()
    assert main([*own, *FLAGS, *DROPOUT]) == 0
    assert capfd.readouterr().out.count(": PASS") == 3


@pytest.mark.slow
def test_the_running_core_trains_in_a_process_of_its_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    own = f"--cores {INSTALLED} --layouts tp2,tp3 --steps 1 --".split()
    assert main([*own, *FLAGS]) == 1
    shown = capfd.readouterr().out
    assert f"> {INSTALLED} tp2: PASS\n> {INSTALLED} tp3: FAIL" in shown
    assert f"difference to dp1 on megatron-core {INSTALLED} over 1 steps" in shown
    assert "must be divisible by" in " ".join(shown.split())
    # What the runs themselves print is not mixed with the table.
    assert "parameters:" not in shown


def test_both_cores_agree_with_one_rank_of_the_first(capfd: pytest.CaptureFixture[str]) -> None:
    cores = ",".join(PINS)
    try:
        choose_environments(cores, ROOT)
    except ConfigError as error:
        pytest.skip(str(error))
    own = f"--cores {cores} --layouts tp2sp,pp2vpp2 --steps 2 --".split()
    code = main([*own, *FLAGS, "--mtp-num-layers", "1"])
    shown = capfd.readouterr().out
    assert code == 0, shown
    rows = [line.split("│")[1:3] for line in shown.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["0.19.2", "dp1"],
        *([pin, layout] for layout in ("tp2sp", "pp2vpp2") for pin in PINS),
    ]
