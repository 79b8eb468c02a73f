"""A checkpoint's configuration describes a model; it permits nothing and names no code to run."""

import dataclasses
import json
import multiprocessing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ext.checkpoint.files import describe_file, folder_of
from megatron_ext.checkpoint.manifest import MANIFEST
from megatron_ext.checkpoint.stored import RUN_CONFIG
from megatron_ext.config.flags import flag, from_checkpoint
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import engine_sections, named
from megatron_ext.config.sections import described, withheld_notes
from megatron_ext.errors import CheckpointError, DataError
from megatron_ext.extras.ledger.ledger import Ledger
from megatron_ext.extras.ledger.step_record import RecordWriter
from megatron_ext.extras.ledger.tool import Texts
from megatron_ext.text.evaluation.tool import EVALUATION
from megatron_ext.text.generation.tool import GENERATION, generate_text
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.text.tokenizers import TokenizerConfig
from megatron_ext.train.main import main
from megatron_ext.video.task import VIDEO
from tests.data.test_strangers import _with_code
from tests.training_runs import TINY, mock_data

TRAIN = [*TINY, *mock_data(), "--train-iters", "1"]
LIST = Path(__file__).with_name("from_checkpoint.txt")
NOTE = (
    "The checkpoint was trained with `--trust-remote-code` (let transformers run code of the "
    "tokenizer's folder), which no file can give; give it yourself if you trust that code."
)


def test_of_every_field_is_decided_whether_a_checkpoint_may_give_it() -> None:
    """Keep the list by hand: a new field goes to the line of its section that says what it is.

    What permits code, names code or names a place to write to is the user's.
    """
    kinds = dict(engine_sections())
    for program in (TEXT, VIDEO, GENERATION, EVALUATION):
        kinds |= named(program.sections)
    found = {}
    for name, kind in kinds.items():
        may = from_checkpoint(kind)
        found[f"{name} by a checkpoint"] = {field for field, given in may.items() if given}
        found[f"{name} by the user alone"] = {field for field, given in may.items() if not given}
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line]
    decided = {head: set(rest.split()) for head, _, rest in (x.partition(":") for x in lines)}
    assert {name: fields for name, fields in found.items() if fields} == decided


@dataclasses.dataclass(frozen=True)
class OwnFlags:
    own_size: int = flag(1, "a size")
    own_code: str | None = flag(None, "a file with code", from_checkpoint=False)


def test_a_flag_of_a_users_own_may_be_kept_from_checkpoints() -> None:
    program = TEXT.with_sections(OwnFlags)
    stored = parse_args(
        [*TRAIN, "--own-size", "3", "--own-code", "a.py"],
        program, world_size=1, device="cpu",
    ).config.to_dict()  # fmt: skip
    words = [*TRAIN, "--use-checkpoint-args", "--load", "x"]
    config = parse_args(words, program, world_size=1, device="cpu", checkpoint_config=stored).config
    assert config.section(OwnFlags) == OwnFlags(own_size=3)


def test_a_section_that_holds_no_names_is_a_sentence() -> None:
    with pytest.raises(CheckpointError, match=r"has `model` \(\[1\]\) in the place of a section"):
        described({"model": [1]}, ())


def test_a_permission_is_told_unless_the_user_gives_it() -> None:
    stored = {"tokenizer": {"trust_remote_code": True, "tokenizer_model": "a"}}
    assert described(stored, [TokenizerConfig]) == {"tokenizer": {"tokenizer_model": "a"}}
    assert withheld_notes(stored, [TokenizerConfig], ()) == [NOTE]
    assert withheld_notes(stored, [TokenizerConfig], {"trust_remote_code"}) == []
    off = {"tokenizer": {"trust_remote_code": False}}
    assert withheld_notes(off, [TokenizerConfig], ()) == []
    parsed = parse_args(
        [*TRAIN, "--use-checkpoint-args", "--load", "x"], TEXT, world_size=1,
        device="cpu",
        checkpoint_config={"model": {}, "moe": {}, **stored},
    )  # fmt: skip
    assert NOTE in parsed.notes


def _change(root: Path, section: str, values: Mapping[str, Any]) -> None:
    """Change a section of a stored configuration, and the manifest, as a stranger would."""
    path = folder_of(root, 1)
    stored = json.loads((path / RUN_CONFIG).read_text())
    stored[section] |= values
    (path / RUN_CONFIG).write_text(json.dumps(stored))
    files = {file.name: describe_file(file) for file in path.iterdir() if file.name != MANIFEST}
    (path / MANIFEST).write_text(json.dumps({"version": 1, "files": files}))


def _in_fork(function: Callable[[], Any]) -> None:
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_checkpoint_does_not_let_the_code_of_its_tokenizer_run(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    root, mark = tmp_path / "run", tmp_path / "mark"
    assert main(GPT, [*TRAIN, "--save", str(root)]) == 0
    folder = _with_code(tmp_path / "tokenizer", mark)
    _change(
        root,
        "tokenizer",
        {
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str(folder),
            "trust_remote_code": True,
        },
    )
    asks = ["--load", str(root), "--prompt", "a", "--max-new-tokens", "1"]
    # The tool leaves its mark in transformers, so that models loaded later in this process differ.
    _in_fork(lambda: generate_text(asks))
    assert not mark.exists()
    _in_fork(lambda: generate_text([*asks, "--trust-remote-code"]))
    assert mark.exists()


def test_the_ledger_does_not_let_the_code_of_a_tokenizer_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    mark, save = tmp_path / "mark", tmp_path / "run"
    settings = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(_with_code(tmp_path / "tokenizer", mark)),
        trust_remote_code=True,
    )
    save.mkdir()
    RecordWriter(save).start(0, 0, None, None, time=0.0, generation=0)
    (save / "config.yaml").write_text(yaml.safe_dump({"tokenizer": dataclasses.asdict(settings)}))
    ledger = Ledger(save)
    assert ledger.section(TokenizerConfig).tokenizer_model == settings.tokenizer_model
    with pytest.raises(DataError, match="code of its own, which is not run"):
        Texts(ledger, 10, trust_remote_code=False)
    assert NOTE in capsys.readouterr().err
    assert not mark.exists()
    Texts(ledger, 10, trust_remote_code=True)
    assert NOTE not in capsys.readouterr().err
    assert mark.exists()
