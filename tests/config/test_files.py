"""Files of ``--config``: layouts, notes as flags get them, and configurations as lines of flags."""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.inapplicable import of_program
from megatron_ext.config.parser import read_words
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import main, splits_layers, stored_config
from megatron_ext.video.task import VIDEO
from tests.config.runs import SMALL
from tests.training_runs import config_of, errors_of, parsed

LAYOUTS = """
lr: 0.5
tensor_model_parallel_size: 1
layouts:
  one: {nproc_per_node: 1, dry_run_gpu: H100}
  2x:
    parallel: {tensor-model-parallel-size: 2, nproc_per_node: 2}
    lr: 0.25
    dry_run_nodes: 4
    dry_run_gpu: H100
"""
BARE = SMALL.replace("--lr 1e-3 ", "")
FLOW = "--micro-batch-size 1 --train-iters 6 --video-data-path d --eval-iters 0"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(LAYOUTS, encoding="utf-8")
    return path


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return f"{BARE} --config {path}"


def test_a_layout_replaces_the_rest_of_its_file_and_flags_replace_both(file: Path) -> None:
    words = f"{BARE} --config {file} --layout 2x"
    found = parsed(words, ranks=0)
    config = found.config
    sizes = config.parallel.tensor_model_parallel_size, config.parallel.world_size
    assert (sizes, config.optimizer.lr) == ((2, 2), 0.25)
    assert found.notes == []
    config = config_of(f"{words} --lr 0.125 --nproc-per-node 4", ranks=0)
    assert (config.optimizer.lr, config.parallel.data_parallel_size) == (0.125, 2)


def test_a_layout_is_planned_with_the_gpus_that_it_names(file: Path) -> None:
    words = f"{BARE} --config {file} --layout 2x"
    assert config_of(words, ranks=0).planning.dry_run_gpu is None
    for more in ("--dry-run", f"--config {written(file, LAYOUTS + 'dry_run: true').split()[-1]}"):
        planned = config_of(f"{words} {more}", ranks=0)
        assert (planned.device, planned.parallel.world_size) == ("cuda", 8)
    assert errors_of(f"{BARE} --lr 1 --dry-run-nodes 2")[0].startswith(
        "`--dry-run-nodes` (2) needs"
    )


def test_a_later_file_replaces_a_layout_of_an_earlier_one(file: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    written(later, "lr: 0.75\nlayouts: {2x: {seed: 7}, other: {}}")
    config = config_of(f"{BARE} --config {file} {later} --layout 2x", ranks=2)
    assert (config.optimizer.lr, config.training.seed) == (0.75, 7)
    assert config.parallel.tensor_model_parallel_size == 2
    (error,) = errors_of(f"{BARE} --lr 1 --config {file} {later} --layout 3x")
    assert error.startswith("`--layout` (3x) must be a layout of the `--config` file")
    assert error.endswith("which has one, 2x, other.")


def test_a_file_whose_layouts_are_not_chosen_says_so(file: Path) -> None:
    (note,) = parsed(f"{BARE} --config {file}").notes
    assert (
        note == f"`{file}` has layouts, but none is chosen; choose by `--layout`: one, 2x, or none."
    )
    assert parsed(f"{BARE} --config {file} --layout none").notes == []


@pytest.mark.parametrize(
    ("text", "more", "sentence"),
    [
        ("lr: 1", "--layout 2x", "`--layout` (2x) needs a `--config` file with a block `layouts`"),
        (None, "--layout 2x", "`--layout` (2x) needs a `--config` file with a block `layouts`"),
        ("lr: 1", "--layout", "`--layout` takes the name of one layout, but got 0."),
        ("lr: 1", "--layout a b", "`--layout` takes the name of one layout, but got 2."),
        ("lr: 1", "--as-flags", "`--as-flags` needs `--print-config`; give both."),
        ("layouts: 3", "", "`layouts` in `{file}` (3) must hold the names of layouts"),
        ("layouts: {a: 3}", "", "the layout a in `{file}` (3) must hold names and values."),
        ("layouts: {a: {}, b: {hiden_size: 3}}", "--layout a",
         "`hiden_size` in the layout b in `{file}` is not a flag of this program; did you mean"),
        ("layouts: {a: {}, b: {seed: x}}", "--layout a",
         "`seed` in the layout b in `{file}` (x) must be an integer."),
        ("layouts: {a: {layouts: {b: {sed: 2}}}}", "--layout a",
         "`b` in the layout a in `{file}` is not a flag of this program"),
        ("training: {learning-rate: 1e-4}", "", "`learning-rate` in `{file}` is not a flag of this "
         "program; did you mean lr?"),
        ("trainer: {output_dir: a}", "", "`output_dir` in `{file}` is not a flag of this program; "
         "did you mean save?"),
        ("save: $SCRATCH/run", "", "`save` in `{file}` ($SCRATCH/run) begins with the variable "
         "$SCRATCH, which a shell would replace, but nothing here; write the path itself."),
        ("split: [9, 1, 0]", "", "`split` in `{file}` ([9, 1, 0]) must be one value, not a list; "
         "write 9,1,0."),
        ("no_bf16: 3", "", "`no_bf16` in `{file}` (3) must be true or false."),
        ("fp8: hybrid", "", "`fp8` in `{file}` (hybrid) is spelled `--fp8-format` now."),
        ("use_legacy_models: true", "", "`use_legacy_models` in `{file}` (True) is known from"),
        ("layout: 2x", "", "`layout` in `{file}` (2x) belongs on the command line, not in a file; "
         "give `--layout` there."),
    ],
)  # fmt: skip
def test_a_wrong_file_or_layout_is_refused(
    text: str | None, more: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    words = BARE if text is None else written(path, text)
    errors = errors_of(f"{words} --lr 1 {more}")
    assert any(error.startswith(sentence.format(file=path)) for error in errors), errors


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("rum.yml", "lr: 1", "`--config` ({file}) cannot be read: No such file or directory; did "
         "you mean {folder}/run.yaml?"),
        ("nowhere/run.yaml", "lr: 1", "`--config` ({file}) cannot be read: No such file or "
         "directory; {folder}/nowhere is no folder, seen from "),
        ("lr=1e-4", "3", "`--config` ({file}) cannot be read: No such file or directory; files are "
         "followed by flags with two dashes, such as `--lr 1e-4`."),
        ("run.toml", "", "`--config` ({file}) must be YAML, and its name ends as TOML's."),
        ("run.yaml", "[]", "`--config` ({file}) must hold names and values."),
        ("run.yaml", "3", "`--config` ({file}) must hold names and values."),
        ("run.yaml", LAYOUTS.replace("layouts:", "layout:"), "`layout` in `{file}` holds blocks of "
         "flags by name, as only the block of layouts does; call it `layouts`."),
        ("run.yaml", "video_model: video-dit\nlayouts: {2x: {recompute_blocks: 3}}", "`--config` "
         "({file}) sets flags of pretrain_video.py, which this program lacks: `video_model`, "
         "`recompute_blocks`; give the file to pretrain_video.py, or leave them out."),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_gets_one_error_without_what_follows_from_it(
    name: str, text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    words = ["--config", str(tmp_path / name), "--layout", "2x"]
    video = of_program("pretrain_video.py", VIDEO.sections)
    assert main(TEXT, words, elsewhere=lambda: [video]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    told = sentence.format(file=tmp_path / name, folder=tmp_path)
    assert error.startswith(f"error: {told}"), error


def test_a_value_that_cannot_be_read_gets_one_error_without_what_follows_from_it(
    tmp_path: Path,
) -> None:
    wrong, right = tmp_path / "wrong.yaml", tmp_path / "right.yaml"
    text = "fine_grained_activation_offloading: true\noffload_modules: qkv,core_attn"
    wrong.write_text(text, encoding="utf-8")
    words = f"{SMALL} --config {wrong}"
    (error,) = errors_of(words)
    assert error.startswith(f"`offload_modules` in `{wrong}` (qkv,core_attn) must be one of attn_n")
    more = "`--offload-modules` (core_attn) is recomputed"
    right.write_text("offload_modules: core_attn", encoding="utf-8")
    for later in ("--offload-modules core_attn", f"--config {right}"):
        errors = errors_of(f"{words} {later} --recompute-granularity selective")
        assert errors[0] == error
        assert errors[1].startswith(more)


def test_a_null_asks_for_nothing(tmp_path: Path) -> None:
    names = "no_save_optim fp8 num_layers_per_virtual_pipeline_stage params_dtype".split()
    nulls = "".join(f"{name}: null\n" for name in names)
    words = written(tmp_path / "run.yaml", f"lr: 1\n{nulls}")
    found = parsed(words)
    assert (found.notes, found.config.checkpoint.no_save_optim) == ([], False)


def test_an_empty_file_is_told(tmp_path: Path) -> None:
    found = parsed(f"{written(tmp_path / 'run.yaml', '# lr: 1')} --lr 1")
    assert found.notes == [f"`{tmp_path}/run.yaml` is empty, so it gives no values."]


def test_a_path_may_begin_at_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words = f"{written(tmp_path / 'run.yaml', 'save: ~/run')} --lr 1 --load=~/base"
    checkpoint = config_of(words).checkpoint
    assert (checkpoint.save, checkpoint.load) == ("/home/me/run", "/home/me/base")


def test_values_of_a_file_get_the_notes_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    words = written(
        path,
        "lr: 1\nrotary_base: 500000\noverlap-grad-reduce: true\nuse_mcore_models: true\nseed: 5\n"
        "training: {--seed: 7}\nloss_scale_window: 1000\nsgd_momentum: 0.5\n"
        "use_legacy_models: false\n",
    )
    notes = parsed(f"{words} --sgd-momentum 0.25").notes
    told = "has no effect without `--position-embedding-type rope`."
    assert f"`rotary_base` in `{path}` {told}" in notes
    assert (
        f"`--seed` in `{path}` (7) takes the place of the value (5) that was given before it."
        in notes
    )
    starts = [
        "`--sgd-momentum` has no effect",
        f"`overlap-grad-reduce` in `{path}` has no effect on a CPU",
        f"`use_mcore_models` in `{path}` has no effect",
    ]
    for start in starts:
        assert len([note for note in notes if note.startswith(start)]) == 1, notes
    assert len(notes) == 5


def test_a_file_may_spell_a_flag_as_a_command_line_does(tmp_path: Path) -> None:
    words = written(tmp_path / "run.yaml", "lr: 1\ndisable-bias-linear: true\n--no-bf16: false\n")
    config = config_of(words)
    assert not config.model.add_bias_linear and config.precision.bf16


def test_what_a_program_looks_up_before_it_parses_may_be_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_ext.train.main.read_run_config", lambda *named: {"of": named})
    monkeypatch.setattr("megatron_ext.train.main.fetched", lambda flag, path, step: path)
    text = "use_checkpoint_args: true\nload: weights\nlayouts: {2x: {context_parallel_size: 2}}"
    words = read_words(f"{written(tmp_path / 'run.yaml', text)} --layout 2x".split(), TEXT)
    assert stored_config(words) == {"of": ("weights", None)}
    assert splits_layers(words, None)


def test_code_that_a_file_permits_needs_no_permission_again(tmp_path: Path) -> None:
    stored = config_of(f"{SMALL} --trust-remote-code").to_dict()
    note = "The checkpoint was trained with `--trust-remote-code`"
    for text, told in (("lr: 1", True), ("trust_remote_code: true", False)):
        words = f"{written(tmp_path / 'run.yaml', text)} --lr 1 --use-checkpoint-args --load x"
        notes = parsed(words, checkpoint_config=stored).notes
        assert any(line.startswith(note) for line in notes) is told


def test_a_pipe_of_a_shell_is_read_once_for_all_parses() -> None:
    source, sink = os.pipe()
    with os.fdopen(source), os.fdopen(sink, "w") as file:
        file.write("lr: 0.5\n")
        file.close()
        words = f"{BARE} --config /dev/fd/{source}"
        assert [config_of(words).optimizer.lr for _ in range(2)] == [0.5, 0.5]


RUNS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "gpt": (SMALL, TEXT, {}),
    "gpt on gpus": (
        f"{SMALL} --no-bf16 --overlap-grad-reduce --use-distributed-optimizer --swiglu "
        "--tensor-model-parallel-size 2 --recompute-granularity selective --disable-bias-linear "
        "--data-cache-path 'a b' --rampup-batch-size 8 8 64 --global-batch-size 32",
        TEXT,
        {"device": "cuda", "ranks": 8},
    ),
    "experts": (
        f"{SMALL} --num-experts 4 --moe-layer-freq ([0]*1+[1]*3) --moe-router-topk 2 "
        "--moe-aux-loss-coeff 1e-2 --window-size (7,0)",
        TEXT,
        {},
    ),
    "video": (f"{FLOW} --axes-dim 4 6 6 --no-adaln-zero --ema-decay 0.5", VIDEO, {}),
    "video on gpus": (f"{FLOW} --video-model video-dit --video-dit-size 1.3b", VIDEO,
                      {"device": "cuda"}),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_configuration_is_the_same_from_its_line_and_from_its_file(
    name: str, tmp_path: Path
) -> None:
    flags, task, options = RUNS[name]
    words = shlex.split(flags)
    found = parsed([*words, "--print-config", "--as-flags"], task, **options)
    assert found.as_flags is not None
    assert config_of(shlex.split(found.as_flags), task, **options) == found.config
    path = tmp_path / "run.yaml"
    path.write_text(found.config.to_yaml(), encoding="utf-8")
    again = parsed(["--config", str(path), "--print-config", "--as-flags"], task, **options)
    assert again.config == found.config
    assert config_of(shlex.split(str(again.as_flags)), task, **options) == found.config
    # What a run has anyway is left out: it is a line for people.
    assert len(str(found.as_flags)) <= len(flags) + 20
    plain = {note for note in again.notes if "--config" not in note}
    assert plain <= {note.replace("`--", "`") for note in found.notes} | set(found.notes)


def test_a_line_of_flags_holds_what_a_layout_says(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{BARE} --config {file} --layout 2x --seed 7 --print-config --as-flags".split()
    assert main(TEXT, words) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "--lr 0.25" in line and "--layout" not in line and "--config" not in line
    assert "--tensor-model-parallel-size 2" in line and "--seed 7" in line
    assert main(TEXT, [*shlex.split(line), "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert main(TEXT, words[:-1]) == 0
    assert capsys.readouterr().out == printed


def test_a_value_that_no_flag_sets_is_refused_in_a_line(tmp_path: Path) -> None:
    """A file may have texts that begin with dashes; on a command line they are flags."""
    words = written(tmp_path / "run.yaml", "lr: 1\nwandb_exp_name: --x")
    (error,) = errors_of(f"{words} --print-config --as-flags")
    assert error.startswith("`wandb_exp_name` (--x) cannot be written as a flag")
