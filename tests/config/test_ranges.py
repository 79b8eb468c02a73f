"""Each numeric flag has a range, and any value ends in a configuration or in one sentence."""

import importlib.metadata
import math
import os
import shlex
from pathlib import Path
from random import Random

import pytest

from megatron_ext.config import finalize
from megatron_ext.config.flags import COUNT, SHARE, Flag, Range, range_errors
from megatron_ext.config.run import RunConfig
from megatron_ext.config.sections import all_flags
from megatron_ext.errors import CheckpointError, ConfigError, DataError
from megatron_ext.layers.transformer_config import check_core
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.train.main import preflight
from megatron_ext.video.task import VIDEO
from tests.combinations.options import every_flag
from tests.training_runs import SMALL, check_refused, config_of, errors_of

TINY = [*SMALL, *"--train-iters 6 --eval-iters 0".split()]
FLOW = shlex.split(
    "--micro-batch-size 1 --train-iters 6 --lr 1e-2 --video-data-path d --eval-iters 0"
)
STREAMING = shlex.split(
    "--task streaming --prompts-path p --train-iters 2 --lr 1e-2 --micro-batch-size 1 "
    "--eval-iters 0"
)
PROGRAMS = {
    "text": (TINY, TEXT),
    "experts": ([*TINY, "--num-experts", "2", "--disable-bias-linear"], TEXT),
    "sft": ([*(word for word in TINY if word != "--mock-data"), "--sft", "--data-path", "d"], TEXT),
    "lora": ([*TINY, "--lora-rank", "2"], TEXT),
    "flow": (FLOW, VIDEO),
    "streaming": (STREAMING, VIDEO),
}
NUMBERS = [flag for flag in every_flag() if flag.type in (int, float)]
OF_FLOW = (
    "video joint mmdit hunyuan video_dit flow conditions text_dropout codec text_encoder encode "
    "sample"
).split()
PROGRAM_OF = {
    **dict.fromkeys(OF_FLOW, "flow"),
    **{name: name for name in ("sft", "lora", "streaming")},
    "streaming_sample": "streaming",
    "moe": "experts",
}
WORDS = "-1 0 1 3 nan inf 1e30 100000000000000000000 abc".split()


def test_each_numeric_flag_declares_its_range_in_which_its_default_lies() -> None:
    assert not [flag.shown for flag in NUMBERS if flag.bounds is None]
    run = RunConfig.from_dict({}, (*TEXT.sections, *VIDEO.sections))
    for section in run.by_name().values():
        assert range_errors(section) == {}


@pytest.mark.parametrize("flag", NUMBERS, ids=lambda flag: flag.shown)
def test_any_word_ends_in_a_configuration_or_in_sentences(flag: Flag) -> None:
    base, tasks = PROGRAMS[PROGRAM_OF.get(flag.section, "text")]
    number = flag.nargs if isinstance(flag.nargs, int) else 1
    for word in WORDS:
        argv = [*base, flag.positive[0], *[word] * number]
        try:
            config_of(argv, tasks)
        except ConfigError:
            continue
        assert math.isfinite(float(word)), f"{flag.positive[0]} {word}"


@pytest.mark.parametrize("flag", NUMBERS, ids=lambda flag: flag.shown)
def test_what_is_no_number_of_use_is_told_with_the_flag(flag: Flag) -> None:
    word = "nan" if flag.type is float else "1" + 20 * "0"
    number = flag.nargs if isinstance(flag.nargs, int) else 1
    base, tasks = PROGRAMS[PROGRAM_OF.get(flag.section, "text")]
    errors = errors_of([*base, flag.positive[0], *[word] * number], tasks)
    named = [text for text in errors if text.startswith(f"`{flag.positive[0]}` (")]
    assert len(named) == 1 and "must be" in named[0]


@pytest.mark.parametrize(
    ("bounds", "value", "rule"),
    [
        (COUNT, 0, "must be at least 1"),
        (COUNT, 10**20, "must be at most 2147483647"),
        (COUNT, 2**31 - 1, None),
        (SHARE, 1.5, "must be at least 0 and at most 1"),
        (SHARE, math.nan, "must be a finite number, at least 0 and at most 1"),
        (Range(0, 1, above=True, below=True), 0.0, "must be above 0 and below 1"),
        (Range(0, 1, above=True, below=True), 1.0, "must be above 0 and below 1"),
        (Range(0, 1, above=True, below=True), 0.5, None),
        (Range(-5, 5), -math.inf, "must be a finite number"),
    ],
)
def test_the_rule_that_a_number_breaks(bounds: Range, value: float, rule: str | None) -> None:
    assert bounds.broken_rule(value) == rule


def test_a_number_out_of_range_does_not_hide_other_errors_nor_cause_them() -> None:
    argv = [*TINY, "--num-layers", "0", "--lr", "nan", "--bf16", "--fp16"]
    layers, rate, dtypes = errors_of(argv)
    assert layers == "`--num-layers` (0) must be at least 1; use 1."
    assert rate.startswith("`--lr` (nan) must be a finite number, at least 0 and at most 1000; ")
    assert dtypes == "`--bf16` and `--fp16` exclude each other; give one."


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("num_layers: two", "(two) must be an integer."),
        ("num_layers: [2, 3]", "must be one value, not a list; write 2,3."),
        ("num_layers: true", "(True) must be an integer."),
        ("num_layers: 2.5", "(2.5) must be an integer."),
        ("lr: fast", "(fast) must be a number."),
        ("min_lr: .nan", "`--min-lr` (nan) must be a finite number"),
        ("bf16: maybe", "(maybe) must be true or false."),
        ("lr_decay_style: round", "(round) must be one of constant"),
        ("hidden_dropout: null", "(None) must be a value or a list of values."),
        ("model: {hidden_size: {a: 1}}", "must be a value or a list of values."),
    ],
)
def test_an_entry_of_a_file_is_read_as_a_flag(entry: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(entry, encoding="utf-8")
    check_refused(["--config", str(file), *TINY[6:]], sentence)


def test_numbers_that_yaml_takes_for_text_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("min_lr: 1e-4\nrampup_batch_size: [2, 2, 8]", encoding="utf-8")
    config = config_of([*TINY, "--config", str(file)])
    assert config.optimizer.min_lr == 1e-4
    assert config.training.rampup_batch_size == [2, 2, 8]


def _drawn(flag: Flag, random: Random) -> list[str]:
    if flag.type is bool:
        return [random.choice((*flag.positive, *flag.negative))]
    words = list(map(str, flag.choices or ()))
    if flag.type is not str and flag.bounds is not None:
        low, high = (flag.type(end) for end in (flag.bounds.low, flag.bounds.high))
        words += map(str, (low, low, 1, 2, 3, 4, 8, 0.5 if flag.type is float else 5, high))
    words += ["x", "", "[1,0]", "1,2", "Et|tL"] if not words else []
    number = flag.nargs if isinstance(flag.nargs, int) else 1
    if flag.nargs == "+":
        number = random.randint(1, 3)
    return [flag.positive[0], *(random.choice(words) for _ in range(number))]


LAYOUTS = (
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
    "--expert-model-parallel-size 2",
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_any_two_flags_end_in_a_configuration_or_in_sentences(program: str) -> None:
    base, tasks = PROGRAMS[program]
    random = Random(f"{os.environ.get('PAIRS_SEED', 1)} {program}")
    flags = [flag for flag in all_flags(tasks) if flag.field not in ("codec", "load", "save")]
    accepted = 0
    for _ in range(int(os.environ.get("PAIRS", "1000"))):
        pair = [word for flag in random.sample(flags, 2) for word in _drawn(flag, random)]
        layout = random.choice(("", "", *LAYOUTS))
        argv, size = [*base, *layout.split(), *pair], 4 if layout else random.choice((1, 2))
        try:
            config = config_of(argv, tasks, ranks=size)
            if config.has(DataConfig) and config.section(DataConfig).mock_data:
                config, _ = preflight(config, GPT.preflight)
            check_core(config)
        except (ConfigError, DataError, CheckpointError):
            continue
        except Exception as error:
            raise AssertionError(f"{size} rank(s): {shlex.join(argv)}") from error
        accepted += 1
    assert accepted


def test_an_untested_core_is_refused_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    for found in ("0.15.3", "0.20.0"):
        table = {"megatron-core": found}
        monkeypatch.setattr(
            finalize, "_version_of", lambda name, t=table: t.get(name) or version(name)
        )
        (error,) = errors_of(SMALL)
        assert error == (
            f"megatron-core ({found}) must be a release that was tested (>=0.16.1,<0.20); run `pip "
            "install 'megatron-core>=0.16.1,<0.20'`, or give `--allow-untested-core`."
        )
        assert config_of([*SMALL, "--allow-untested-core"]).parallel.allow_untested_core
