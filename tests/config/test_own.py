"""Flags of a user's own stand in --help, files, configurations and checkpoints as ours do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ext.config.flags import Range, flag
from megatron_ext.config.rules.transformer_engine import needs_torch_layers
from megatron_ext.config.run import LayerSection, RunConfig
from megatron_ext.errors import ConfigError, FlagError
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.train.main import main
from tests.training_runs import SMALL as RUN
from tests.training_runs import config_of, errors_of, without


@dataclass(frozen=True)
class CapFlags:
    hidden_cap: float | None = flag(None, "bound of the hidden states", unit="units")
    cap_window: list[int] | None = flag(None, "rows and columns", unit="cells", nargs=2)
    cap_layers: list[int] = flag([1], "layers that it holds for", nargs="+")
    cap_kind: str = flag("soft", "how it bends", choices=("soft", "hard"))
    cap_embedding: bool = flag(False, "holds for the embedding too")
    cap_rate: float | None = flag(0.5, "share of them")

    def errors(self, config: RunConfig) -> list[str]:
        if self.hidden_cap is None or self.hidden_cap > 0:
            return []
        return [f"`--hidden-cap` ({self.hidden_cap}) must be above 0; use 30."]


def parsed(*words: str, **options: Any) -> RunConfig:
    program = TEXT.with_sections(*options.pop("sections", (CapFlags,)))
    return config_of([*RUN, *words], program, **options)


@dataclass(frozen=True)
class TileFlags:
    tile_width: int = flag(4, "columns of a tile", bounds=Range(1, 8))
    tile_height: int = flag(4, "rows of a tile", bounds=Range(1, 8))

    def errors(self, config: RunConfig) -> list[str]:
        return [
            FlagError("--tile-height", self.tile_height, "must be below `--tile-width`"),
            FlagError("--save", "`--tile-width`", "is an odd name"),
            "`--tile-width` is never right.",
        ]


def test_errors_that_depend_on_a_refused_number_are_left_out_by_their_flags() -> None:
    program = TEXT.with_sections(TileFlags)
    rest = ["`--save` (`--tile-width`) is an odd name.", "`--tile-width` is never right."]
    consequence = "`--tile-height` (4) must be below `--tile-width`."
    assert [*errors_of(RUN, program)] == [consequence, *rest]
    refused, *others = errors_of([*RUN, "--tile-width", "9"], program)
    assert refused.startswith("`--tile-width` (9) must be at least 1 and at most 8")
    assert others == rest


def test_own_flags_are_read_from_the_command_line() -> None:
    config = parsed("--hidden-cap", "3", "--cap_layers", "1", "2", "--cap-embedding")
    assert config.section(CapFlags) == CapFlags(3.0, None, [1, 2], "soft", True)
    assert parsed().section(CapFlags) == CapFlags()


def test_own_flags_are_shown_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of("--help cap-flags", TEXT.with_sections(CapFlags))
    shown = capsys.readouterr().out
    assert (
        "cap_flags:\n  --hidden-cap UNITS\n        bound of the hidden states\n"
        "  --cap-window CELLS CELLS\n        rows and columns\n"
        "  --cap-layers N ...\n        layers that it holds for [1]\n"
        "  --cap-kind {soft,hard}\n        how it bends [soft]\n"
    ) in shown
    words = [*RUN, "--hidden-cap", "3", "--cap-kind", "hard", "--print-config"]
    assert main(GPT.with_sections(CapFlags), words) == 0
    printed = capsys.readouterr().out
    cap = {
        "hidden_cap": 3.0,
        "cap_window": None,
        "cap_layers": [1],
        "cap_kind": "hard",
        "cap_embedding": False,
    }
    cap["cap_rate"] = 0.5
    assert yaml.safe_load(printed)["cap_flags"] == cap
    file = tmp_path / "run.yaml"
    file.write_text(printed)
    again = config_of(f"--config {file} --cap-kind soft", TEXT.with_sections(CapFlags))
    assert again.section(CapFlags) == CapFlags(3.0, None, [1], "soft")


def test_own_flags_come_with_the_arguments_of_a_checkpoint() -> None:
    stored = parsed("--hidden-cap", "3", "--cap-kind", "hard").to_dict()
    config = parsed("--cap-kind", "soft", checkpoint_config=stored)
    assert config.section(CapFlags) == CapFlags(3.0, None, [1], "soft")
    # One that was saved by a program without them.
    stored.pop("cap_flags")
    assert parsed(checkpoint_config=stored).section(CapFlags) == CapFlags()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--hidden-cap -1", "`--hidden-cap` (-1.0) must be above 0; use 30."),
        ("--hidden-cap much", "`--hidden-cap` (much) must be a number."),
        ("--cap-kind no", "`--cap-kind` (no) must be one of soft, hard."),
        ("--hidden-kap 1", "`--hidden-kap` is not a flag of this program; did you mean "
         "`--hidden-cap`"),
    ],
)  # fmt: skip
def test_wrong_values_of_own_flags_are_refused_with_all_others(words: str, sentence: str) -> None:
    errors = errors_of([*RUN, *words.split(), "--seq-len", "3"], TEXT.with_sections(CapFlags))
    assert any(text.startswith(sentence) for text in errors)
    assert any("`--seq-len`" in text for text in errors)


@dataclass
class NotFrozen:
    width: int = flag(1, "of it")


@dataclass(frozen=True)
class NotFlags:
    width: int = 1
    place: Path = flag(Path(), "of it")


@dataclass(frozen=True)
class Taken:
    hidden_size: int = flag(1, "of it")
    model_parallel_size: int = flag(1, "of it")


@pytest.mark.parametrize(
    ("section", "sentences"),
    [
        (NotFrozen, ["The section `NotFrozen` must be a frozen dataclass"]),
        (NotFlags, ["The field `width` of the section `NotFlags` must be a flag",
         "The field `place` of the section `NotFlags` is of type Path, but"]),
        (Taken, ["The section `Taken` has the name `hidden_size`, which is that of the section "
         "`model`; choose another.", "The section `Taken` has the name `--model-parallel-size`, "
         "which is that of the parser; choose another."]),
    ],
)  # fmt: skip
def test_sections_that_cannot_stand_are_refused(section: type, sentences: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(sections=(section,))
    for sentence in sentences:
        assert any(text.startswith(sentence) for text in caught.value.messages)


@dataclass(frozen=True)
class First:
    shared: int = flag(1, "of it")
    other: bool = flag(False, "of it", names="--short")


@dataclass(frozen=True)
class Second:
    shared: int = flag(1, "of it")
    third: bool = flag(False, "of it", names="--short")


def test_two_sections_of_ones_own_share_no_name() -> None:
    parsed(sections=(First,))
    with pytest.raises(ConfigError) as caught:
        parsed(sections=(First, Second))
    told = "The section `Second` has the name `{}`, which is that of the section `first`"
    assert [text.partition(";")[0] for text in caught.value.messages] == [
        told.format(name) for name in ("shared", "--shared", "--short")
    ]


def test_the_last_of_several_files_wins_whatever_the_dashes_of_its_names(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("global-batch-size: 32\ntraining:\n  seed: 5\n  --manual-gc-interval: 7\n")
    two.write_text("training: {global_batch_size: 64}\nmanual-gc: true\nlr: 0.5\n")
    bare = without(RUN, "--lr", "--global-batch-size")
    found = config_of([*bare, "--config", str(one), "--config", str(two), "--lr", "0.25"])
    training = found.training
    assert (training.global_batch_size, training.seed, found.optimizer.lr) == (64, 5, 0.25)
    assert (training.manual_gc, training.manual_gc_interval) == (True, 7)
    assert config_of([*bare, "--config", str(two), str(one)]).training.global_batch_size == 32


@dataclass(frozen=True)
class DepthFlags(LayerSection):
    depth_scale: float | None = flag(None, "factor of the scores of attention", unit="units")

    def transformer_fields(self, config: RunConfig) -> dict[str, object]:
        return {} if self.depth_scale is None else {"softmax_scale": self.depth_scale}

    def torch_only(self) -> list[str]:
        return [] if self.depth_scale is None else ["--depth-scale"]


def test_a_section_may_decide_what_the_layers_compute() -> None:
    given = parsed("--depth-scale", "0.5", sections=(DepthFlags,))
    assert build_transformer_config(given).softmax_scale == 0.5
    assert build_transformer_config(parsed(sections=(DepthFlags,))).softmax_scale is None
    assert needs_torch_layers(given) and not needs_torch_layers(parsed(sections=(DepthFlags,)))


def test_a_section_that_the_task_does_not_bring_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`Task\(sections=\(CapFlags,\), ...\)`"):
        parsed(sections=()).section(CapFlags)


def test_a_section_takes_the_place_of_one_of_its_class() -> None:
    run = parsed()
    changed = run.with_section(CapFlags(5.0), DepthFlags(0.5))
    assert changed.section(CapFlags).hidden_cap == 5.0 and changed.section(DepthFlags)
    assert len(changed.sections) == len(run.sections) + 1
    assert run.section(CapFlags).hidden_cap is None and not run.has(DepthFlags)


def test_an_entry_of_a_file_may_leave_a_flag_without_a_value(tmp_path: Path) -> None:
    """The last of several files counts."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("hidden_cap: 4\ncap_rate: 0.75\nlog_interval: 7\n")
    second.write_text("cap_rate: null\n")
    words = [*without(RUN, "--log-interval"), "--config", str(first), str(second)]
    config = config_of(words, TEXT.with_sections(CapFlags))
    caps = config.section(CapFlags)
    assert (caps.hidden_cap, caps.cap_rate, config.logging.log_interval) == (4.0, None, 7)
    again = config_of([*words, "--log-interval", "9"], TEXT.with_sections(CapFlags))
    assert again.logging.log_interval == 9
    (error,) = errors_of([*RUN, "--config"])
    assert error == "`--config` takes a file, but got none."
