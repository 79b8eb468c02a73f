"""Starts of a run, its ends by a signal or by the clock, and warnings that are known."""

import dataclasses
import logging
import math
import os
import signal
import threading
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext import device as devices
from megatron_ext.checkpoint.files import read_tracker
from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.config.output import CheckpointConfig, LoggingConfig
from megatron_ext.errors import CheckpointError, ConfigError, DataError, MegatronExtError
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.train import main as module
from megatron_ext.train import pretrain as rank_module
from megatron_ext.train.exit_codes import EXIT_CODE_SIGNAL, EXIT_CODE_USER_ERROR
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.launch import Launch
from megatron_ext.train.main import (
    LOGGED,
    check_folders,
    input_errors,
    main,
    preflight,
    silence_known_warnings,
    splits_layers,
    stored_config,
)
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.rank import End
from megatron_ext.train.reporting.files import read_metrics
from megatron_ext.train.run import StopRequests
from megatron_ext.train.supervision import Supervision
from tests import training_runs
from tests.ranks import ParallelContext, ranks
from tests.training_runs import config_of

FLAGS = [*training_runs.TINY, *training_runs.mock_data(), "--train-iters", "500"]


def test_the_exit_signal_saves_and_gives_its_code(tmp_path: Path) -> None:
    def send_when_training() -> None:
        end = time.monotonic() + 60
        while len(read_metrics(tmp_path / "metrics.jsonl")) < 3 and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send_when_training)
    sender.start()
    code, rows = training_runs.train_on_ranks(
        [*FLAGS, "--exit-signal-handler"], ranks=2, save=tmp_path
    )
    sender.join()
    assert code == EXIT_CODE_SIGNAL == 143
    assert 3 <= len(training_runs.training_rows(rows)) < 500
    assert read_tracker(tmp_path) == training_runs.training_rows(rows)[-1]["iteration"]


def test_the_time_limit_saves_and_ends_well(tmp_path: Path) -> None:
    flags = [*FLAGS, "--train-iters", "100000", "--exit-duration-in-mins", "0.1"]
    rows = training_runs.train_steps(flags, tmp_path)
    assert 1 <= len(rows) < 100000
    assert read_tracker(tmp_path) == rows[-1]["iteration"]


@ranks(dp=2)
def test_a_gpu_is_told_a_step_later_on_all_ranks_alike(context: ParallelContext) -> None:
    training = training_runs.config_of([*FLAGS, "--exit-signal-handler"], ranks=2).training
    requests = StopRequests(training, time.time())
    device = torch.device("cpu")
    assert requests.check(device, late=True) is None
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    assert requests.check(device, late=True) is None
    assert requests.check(device, late=True) == "signal"
    assert requests.check(device) == "signal"


COLLECTIVE = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use another."
DEFAULT = "full scope is deprecated. Use empty cuda_graph_modules to capture the whole layer."
ORDER = (
    "When using sequence parallelism it is recommended to set the environment variable "
    "CUDA_DEVICE_MAX_CONNECTIONS to 1"
)


@pytest.mark.parametrize(
    ("device", "message", "kind", "heard"),
    [
        ("cpu", COLLECTIVE, FutureWarning, False),
        ("cuda", COLLECTIVE, FutureWarning, False),
        ("cpu", DEFAULT, UserWarning, False),
        ("cpu", ORDER, UserWarning, False),
        ("cuda", ORDER, UserWarning, True),
        ("cpu", "the data is odd", UserWarning, True),
    ],
)
def test_known_noise_is_silent(device: str, message: str, kind: type[Warning], heard: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence_known_warnings(device)
        warnings.warn(message, kind, stacklevel=1)
    assert bool(caught) is heard


def test_what_core_logs_for_programmers_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    silence_known_warnings("cpu")
    once = [list(logging.getLogger(name).filters) for name in LOGGED]
    silence_known_warnings("cpu")
    assert [logging.getLogger(name).filters for name in LOGGED] == once
    for name, message in LOGGED.items():
        logging.getLogger(name).warning("a class: %s and more", message)
        logging.getLogger(name).warning("the model is odd")
    assert caplog.messages == ["the model is odd"] * len(LOGGED)


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
CP2 = "--context-parallel-size 2"


@pytest.mark.parametrize(
    ("words", "generation", "given", "seen"),
    [
        (TP2, 9, None, "1"),
        (CP2, 9, None, "1"),
        (TP2, None, None, "1"),  # what the GPU is cannot be told
        (TP2, 9, "8", "8"),
        (TP2, 10, None, None),
        ("", 9, None, None),
    ],
)
def test_the_order_of_launches_is_set_before_the_driver_starts(
    words: str,
    generation: int | None,
    given: str | None,
    seen: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    found: list[str | None] = []

    def starts_the_driver() -> bool:
        found.append(os.environ.get(name))
        return False

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(devices, "_generation", lambda: generation)
    monkeypatch.setattr(torch.cuda, "is_available", starts_the_driver)
    assert main(GPT, [*FLAGS, *words.split(), "--nproc-per-node", "2", "--print-config"]) == 0
    assert found and set(found) == {seen}


NOWHERE = "--load FOLDER/b --loss FOLDER/c.py:Loss"
IN_ORDER = ("/b) holds no checkpoint;", "/c.py:Loss) cannot be imported")
HF = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER/tok"
DATASETS = "--data-path FOLDER/d FOLDER/e"
ABSENT = ("/d.idx does not exist;", "/e.idx does not exist;")
NULL = "--tokenizer-type NullTokenizer --vocab-size 128"
GPT2 = "--tokenizer-type GPT2BPETokenizer --vocab-file FOLDER/v --merge-file FOLDER/m"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{NULL} {NOWHERE} {DATASETS}", (*IN_ORDER, *ABSENT)),
        # The tokenizer's check hides that of the data.
        (f"{HF} {DATASETS} --eval-iters 0", ("/tok) does not exist; give a", *ABSENT)),
        (f"{GPT2} --data-order direct {DATASETS}", ("/v) is not a file", "/m) is not a", *ABSENT)),
        # An error of a flag hides all of them.
        (
            f"--lr abc {HF} {NOWHERE} --data-args-path FOLDER/f",
            ("`--lr` (abc) must", *IN_ORDER, "/tok) does not", "`--data-args-path` ("),
        ),
        (f"{NULL} --lr -1 {DATASETS}", ("`--lr` (-1.0) must be at least 0", *ABSENT)),
        # Neither the data nor the schedule of it is missing because a flag's own words are.
        (f"{NULL} --data-path --mock-dat", ("`--data-path` takes", "`--mock-dat` is not a")),
        (
            "--data-order direct --data-schedule FOLDER/s --lr abc --load-hf FOLDER/hf",
            ("`--lr` (abc)", "/hf/config.json cannot be read", "`--data-schedule` ("),
        ),
        (
            f"--sft --sft-chat-template FOLDER/t {HF} {DATASETS} --lr abc",
            (
                "`--lr` (abc)",
                "/tok) does not exist",
                "`--sft-chat-template` (",
                "/d) is neither a file of conversations",
                "/e) is neither a file of conversations",
            ),
        ),
        # A checkpoint that describes the model is looked for before the flags are read.
        (
            f"{NULL} --use-checkpoint-args --load FOLDER/b --lr abc --vocab-size -3 {DATASETS}",
            ("`--lr` (abc)", "/b) is no folder;", "`--vocab-size` (-3) must", *ABSENT),
        ),
        (f"--print-config --lr abc {HF} {NOWHERE} {DATASETS}", ("`--lr` (abc) must",)),
    ],
)
def test_all_that_is_missing_is_told_together(
    words: str, expected: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = words.replace("FOLDER", str(tmp_path)).split()
    assert main(TEXT, [*training_runs.TINY, "--train-iters", "1", *given]) == EXIT_CODE_USER_ERROR
    shown = capfd.readouterr().err.splitlines()
    assert len(shown) == len(expected), shown
    for part, line in zip(expected, shown, strict=True):
        assert part in line


def words_of(**sections: dict[str, object]) -> Any:
    return SimpleNamespace(values=sections)


@pytest.mark.parametrize(
    ("given", "stored", "expected"),
    [
        ({}, None, False),
        ({"tensor_model_parallel_size": 2}, None, True),
        ({}, {"parallel": {"context_parallel_size": 2}}, True),
        ({"context_parallel_size": 1}, {"parallel": {"context_parallel_size": 2}}, False),
        ({"tensor_model_parallel_size": None}, {"parallel": {}}, False),
        ({"pipeline_model_parallel_size": 2}, None, False),
    ],
)
def test_flags_and_the_checkpoint_say_whether_layers_are_split(
    given: dict[str, object], stored: dict[str, Any] | None, expected: bool
) -> None:
    assert splits_layers(words_of(parallel=given), stored) is expected


def test_the_configuration_comes_from_the_step_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(module, "fetched", lambda *given: given)
    monkeypatch.setattr(module, "root_of", lambda place: (place, "root"))
    monkeypatch.setattr(module, "read_run_config", lambda *given: read.append(given) or {"a": 1})
    use = {"use_checkpoint_args": True}
    both = {"load": "l", "pretrained_checkpoint": "p"}
    assert stored_config(words_of(checkpoint={**both})) is None
    assert stored_config(words_of(checkpoint=use)) is None
    assert stored_config(words_of(checkpoint={**use, **both, "ckpt_step": 5})) == {"a": 1}
    assert stored_config(words_of(checkpoint={**use, "load": "l"})) == {"a": 1}
    assert stored_config(words_of(checkpoint={**use, "pretrained_checkpoint": "p"})) == {"a": 1}
    assert read == [
        (("--load", "l", 5), 5),
        (("--load", "l", None), None),
        (("--pretrained-checkpoint", "p"), "root"),
    ]


def test_each_folder_that_is_not_writable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "write_error", lambda flag, folder: f"{flag} ({folder}) is odd.")
    monkeypatch.setattr(module, "missing_packages", lambda logs: [])
    logs = LoggingConfig(tensorboard_dir="t", wandb_project="p", wandb_save_dir="w")
    checkpoint = CheckpointConfig(save="s")
    with pytest.raises(ConfigError) as caught:
        check_folders(logs, checkpoint)
    three = ["--save (s) is odd.", "--tensorboard-dir (t) is odd.", "--wandb-save-dir (w) is odd."]
    assert caught.value.messages == tuple(three)
    # Without a project nothing is written there.
    check_folders(LoggingConfig(wandb_save_dir="w"), CheckpointConfig())


class Steps:
    """Stands in for the parts of a rank's run, and notes in which order they come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *words: str, code: int | None) -> None:
        self.events: list[Any] = []
        self.code = code
        self.error: Exception | None = None
        self.tp = 1
        self.config = config_of([*TRAIN, *words])
        note = self.events.append
        self.context = SimpleNamespace(
            rank=0,
            pgs=SimpleNamespace(tp=SimpleNamespace(size=lambda: self.tp)),
            abort=lambda: note("abort"),
            destroy=lambda: note("destroy"),
        )
        self.run = SimpleNamespace(
            chunks=[],
            progress=SimpleNamespace(iteration=5),
            saved_at=3,  # It has resumed from a newer snapshot.
            num_iterations=9,
            finish_saves=lambda: note("finish saves"),
            stores=[SimpleNamespace(remove=lambda: note("remove"))],
        )
        self.groups: dict[str, Any] = {}
        self.built: dict[str, Any] = {}
        self.reported: dict[str, Any] = {}
        recorder = SimpleNamespace(close=lambda: note("close"))
        for name, stand_in in {
            "open_recorder": lambda: recorder,
            "init_groups": self.init_groups,
            "seed_everything": lambda *_, **__: None,
            "compile_nothing": lambda: note("compile nothing"),
            "compile_alike": lambda: note("compile alike"),
            "tell_bus_errors": lambda: None,
            "build_run": self.build_run,
            "build_reporters": self.build_reporters,
            "train": self.train,
            "evaluate_at_end": lambda run: note("evaluate"),
            "supervision_of": lambda config: Supervision(),
        }.items():
            monkeypatch.setattr(rank_module, name, stand_in)
        monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: note("deterministic"))

    def init_groups(self, layout: Any, device: Any, **named: Any) -> Any:
        self.groups = named
        return self.context

    def build_run(self, *_: Any, **named: Any) -> Any:
        self.built = named
        return self.run

    def build_reporters(self, *_: Any, **named: Any) -> Any:
        self.reported = named
        return nullcontext()

    def train(self, run: Any) -> int | None:
        self.events.append("train")
        if self.error is not None:
            raise self.error
        return self.code

    def start(self, **options: Any) -> int:
        device: Any = SimpleNamespace(activate=lambda rank: "cpu")
        options.setdefault("exit_signal", ExitSignal(None))
        return pretrain(GPT, self.config, device=device, assets=None, **options)


TRAIN = [*training_runs.TINY, *training_runs.mock_data(), *"--train-iters 2".split()]
TRAIN = [*training_runs.without(TRAIN, "--eval-iters"), *"--eval-iters 1".split()]
END = ["finish saves", "remove", "close", "destroy"]


@pytest.mark.parametrize(
    ("words", "code", "events"),
    [
        ("", None, ["train", "evaluate", *END]),
        # A run that ends early does not evaluate, whatever its code.
        ("", 0, ["train", *END]),
        ("", 7, ["train", *END]),
        ("--skip-train", None, ["evaluate", *END]),
        ("--deterministic-mode", None, ["deterministic", "train", "evaluate", *END]),
    ],
)
def test_a_rank_trains_evaluates_and_waits_for_its_saves(
    words: str, code: int | None, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, *words.split(), code=code)
    launched = Launch(77.0, ends_itself=True)
    assert steps.start(launched=launched) == (code or 0)
    assert [event for event in steps.events if event != "compile nothing"] == events
    assert steps.built["started"] == 77.0
    assert steps.reported == {"resumed_at": 5, "num_iterations": 9, "launched": launched}
    steps.start()
    assert steps.built["started"] is None


def test_a_rank_with_work_of_its_own_does_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, code=None)
    steps.config = dataclasses.replace(
        steps.config,
        parallel=dataclasses.replace(steps.config.parallel, distributed_timeout_minutes=3),
    )
    assert steps.start(work=lambda run: 5, launched=Launch(77.0, ends_itself=True)) == 5
    assert steps.reported["launched"] is None
    assert [event for event in steps.events if event != "compile nothing"] == END
    assert steps.groups["timeout_minutes"] == 3


def test_a_rank_that_fails_stops_its_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, code=None)
    steps.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        steps.start()
    assert steps.events[-3:] == ["train", "abort", "destroy"]


@pytest.mark.parametrize(
    ("compiles", "tp", "sequence", "expected"),
    [
        (False, 2, False, ["compile nothing"]),
        (True, 1, False, []),
        (True, 2, False, ["compile alike"]),
        (True, 2, True, []),
    ],
)
def test_layers_without_sequence_parallelism_are_compiled_alike(
    compiles: bool, tp: int, sequence: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, code=0)
    config = steps.config
    steps.config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, compile=compiles),
        parallel=dataclasses.replace(config.parallel, sequence_parallel=sequence),
    )
    steps.tp = tp
    steps.start()
    assert [event for event in steps.events if str(event).startswith("compile")] == expected


@pytest.mark.parametrize(
    ("used", "initializes", "start", "resume"),
    [
        (False, True, False, False),
        (True, True, True, True),
        # Weights that are not initialized must come from somewhere.
        (False, False, True, False),
    ],
)
def test_what_is_checked_before_a_run_starts(
    used: bool, initializes: bool, start: bool, resume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(module, "check_folders", lambda *_: events.append("folders"))
    monkeypatch.setattr(module, "check_start", lambda *_, **__: events.append("start"))
    monkeypatch.setattr(module, "check_resume", lambda config: events.append("resume"))
    config: Any = SimpleNamespace(
        planning=SimpleNamespace(dry_run=False),
        logging=None,
        checkpoint=SimpleNamespace(is_used=used),
        model=SimpleNamespace(perform_initialization=initializes),
        lora=LoraConfig(),
        loss=SimpleNamespace(loss=None),
        optimizer=SimpleNamespace(optimizer_class=None),
    )
    assert preflight(config, lambda config: (config, "assets")) == (config, "assets")
    assert events == ["folders", *["start"] * start, *["resume"] * resume]


def test_one_error_keeps_its_class_and_several_are_told_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config: Any = SimpleNamespace(
        planning=SimpleNamespace(dry_run=True),
        checkpoint=SimpleNamespace(is_used=True),
        model=SimpleNamespace(perform_initialization=True),
        loss=SimpleNamespace(loss=None),
        optimizer=SimpleNamespace(optimizer_class=None),
    )

    def fail(error: MegatronExtError) -> Any:
        raise error

    monkeypatch.setattr(module, "check_start", lambda *_, **__: None)
    with pytest.raises(DataError, match=r"^no data$"):
        preflight(config, lambda config: fail(DataError("no data")))
    monkeypatch.setattr(
        module, "check_start", lambda *_, **__: fail(CheckpointError("no checkpoint"))
    )
    # The data is read by torch, and so not looked at in a run that is refused without it.
    with pytest.raises(CheckpointError, match=r"^no checkpoint$"):
        preflight(config, lambda config: fail(DataError("no data")))
    config.loss.loss = "nowhere.py:A"
    with pytest.raises(ConfigError) as caught:
        preflight(config, lambda config: fail(DataError("no data")))
    assert [message[:8] for message in caught.value.messages] == ["no check", "`--loss`"]
    assert "nowhere.py" in caught.value.messages[1]


@pytest.mark.parametrize(("rank", "fits", "code", "prints"), [
    ("0", True, 0, 1), ("0", False, 1, 1), ("1", False, 0, 0),
])  # fmt: skip
def test_the_first_rank_alone_prints_a_plan(
    rank: str, fits: bool, code: int, prints: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[Any] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        "megatron_ext.planning.report.print_plan", lambda *given: printed.append(given) or fits
    )
    assert main(GPT, [*TRAIN, "--dry-run"]) == code
    assert len(printed) == prints


@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_a_program_does_before_its_ranks_train_and_after(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[str] = []

    class Watch(Supervision):
        def prepare(self, configure: Any) -> None:
            events.append("prepare")

    def noted(name: str, result: Any) -> Any:
        return lambda *_, **__: (events.append(name), result)[1]

    levels: list[Any] = []
    for variable, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, result in {
        "stage": ["what lies elsewhere is staged."],
        "check_host_memory": None,
        "check_save_folder": None,
        "launch": 3,
        "copy_records": None,
    }.items():
        monkeypatch.setattr(module, name, noted(name, result))
    monkeypatch.setattr(module, "supervision_of", Watch)
    monkeypatch.setattr(module, "reported_end", lambda *_: nullcontext(End()))
    monkeypatch.setattr(logging, "basicConfig", lambda *, level: levels.append(level))
    words = [*TRAIN, "--save", f"file://{tmp_path}/there", "--logging-level", "15"]
    may_be_large = dataclasses.replace(GPT.cost, most_memory=lambda _: math.inf)
    assert main(dataclasses.replace(GPT, cost=may_be_large), words) == 3
    first = rank == "0"
    assert events == [
        "stage",
        "prepare",
        "check_host_memory",
        *["check_save_folder"] * first,
        "launch",
        "copy_records",
    ]
    assert ("> what lies elsewhere is staged." in capsys.readouterr().out) is first
    assert levels == [15]


@pytest.mark.parametrize("works", [True, False])
def test_a_program_with_work_of_its_own_loses_nothing(
    works: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(_: Any, *, tell: Any, **named: Any) -> int:
        capsys.readouterr()
        tell(130)
        return 130

    monkeypatch.setattr(module, "launch", launch)
    work: Any = (lambda run: 0) if works else None
    assert main(GPT, [*TRAIN, "--nproc-per-node", "1"], work=work) == 130
    said = capsys.readouterr().err
    assert (said == "interrupted\n") is works
    assert said.startswith("interrupted")


@pytest.mark.parametrize(
    ("used", "addresses", "looks"),
    [(True, [], True), (True, ["s3://b"], False), (False, [], False)],
)
def test_a_checkpoint_elsewhere_is_not_looked_for_here(
    used: bool, addresses: list[str], looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find", lambda checkpoint: refuse_all("no checkpoint"))
    checkpoint = SimpleNamespace(is_used=used, addresses=addresses)
    config: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(resolved=lambda: checkpoint),
        loss=SimpleNamespace(loss=None),
        optimizer=SimpleNamespace(optimizer_class=None),
    )
    task: Any = SimpleNamespace(inputs=lambda config: [lambda: refuse_all("no data")])
    assert input_errors(task, config) == [*["no checkpoint"] * looks, "no data"]


def refuse_all(sentence: str) -> None:
    raise CheckpointError(sentence)


def test_a_dry_run_for_a_gpu_checks_its_data_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*training_runs.SMALL, *"--make-vocab-size-divisible-by 128".split()]
    words += "--tensor-model-parallel-size 2 --nproc-per-node 2".split()
    assert main(TEXT, [*words, "--dry-run", "--dry-run-gpu", "H100"]) == 0
    assert capsys.readouterr().out.count("The vocabulary is padded to 256") == 1
