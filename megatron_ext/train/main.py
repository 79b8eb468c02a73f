"""`main` runs a whole program: it checks the flags and all that a run needs, then starts ranks.

All errors in flags are told before torch and megatron-core are imported, which takes seconds. So
this module imports neither, and names what needs them by `later`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ext.config.output import CheckpointConfig, LoggingConfig
from megatron_ext.config.parser import (
    ParsedArgs,
    Reading,
    all_errors,
    parse_args,
    read_words,
)
from megatron_ext.config.run import RunConfig
from megatron_ext.config.sections import Elsewhere
from megatron_ext.device import keep_launch_order, select, surely_no_gpu
from megatron_ext.disk.host_folder import generation
from megatron_ext.disk.writing import write_error
from megatron_ext.errors import (
    EXIT_CODE_INTERRUPTED,
    ConfigError,
    MegatronExtError,
    all_of,
    run_all,
    say_to_stderr,
)
from megatron_ext.train.exit_signal import ExitSignal, loss_at_end
from megatron_ext.train.launch import SCHEDULED, check_launcher, launch, launch_of, refuse
from megatron_ext.train.supervision import check_add_ons, supervision_of
from megatron_ext.train.task import Preflight, Task, TaskChoice, later

if TYPE_CHECKING:
    from megatron_ext.train.pretrain import Work

EVERYWHERE = (
    # megatron-core deprecates its own default value of this field.
    "full scope is deprecated. Use empty cuda_graph_",
    # megatron-core imports a model that is not used here.
    "MimoModelConfig is experimental and still under active development",
    # megatron-core reads `.grad` of every parameter, which is None with its distributed optimizer.
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    # megatron-core calls collectives by names that torch 2.13 deprecates.
    r"`torch\.distributed\.\w+` is deprecated",
    # megatron-core and torch read checkpoints through deprecated names.
    "`load_state_dict` is deprecated and will be removed in future versions",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    # A tool reads a checkpoint in a single process on purpose.
    r"torch\.distributed is disabled, unavailable or uninitialized",
)
"""Regular expressions of dependencies' warnings that all ranks would print, useless to a user."""
LOGGED = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
}
"""Log messages of megatron-core to drop: for each logger, text that occurs in the message."""
ON_A_CPU = (
    # This warning is about the order of GPU kernels.
    "When using async grad allreduce it is recommended to set the environment variable",
    "When using sequence parallelism it is recommended to set the environment variable",
)


def _lacks(message: str, record: logging.LogRecord) -> bool:
    """Return False for a record that contains ``message``, so that it is not logged."""
    return message not in record.getMessage()


_FILTERS = {name: partial(_lacks, message) for name, message in LOGGED.items()}
"""The filter of each logger, made once: a logger ignores a filter object that it already has."""


def silence_known_warnings(device: str) -> None:
    """Silence known warnings of runs on ``device`` (cuda or cpu).

    This has an effect in this process, and in processes that are forked from it later.
    """
    for message in EVERYWHERE + (ON_A_CPU if device == "cpu" else ()):
        warnings.filterwarnings("ignore", message=message)
    for name, silenced in _FILTERS.items():
        logging.getLogger(name).addFilter(silenced)


check_core = later("megatron_ext.layers.transformer_config:check_core")
check_parts = later("megatron_ext.planning.frozen:check_parts")
check_place = later("megatron_ext.config.user_code:check_place")
check_host_memory = later("megatron_ext.planning.host_memory:check_host_memory")
pretrain = later("megatron_ext.train.pretrain:pretrain")
print_plan = later("megatron_ext.planning.report:print_plan")
reported_end = later("megatron_ext.train.reporting.build:reported_end")
start_lines = later("megatron_ext.train.reporting.start:start_lines")
# A run that neither saves nor loads imports no code for checkpoints.
_CHECKPOINT = "megatron_ext.checkpoint"
check_replaced = later(f"{_CHECKPOINT}.stored:check_replaced")
check_base_given = later(f"{_CHECKPOINT}.adapters:check_base_given")
check_resume = later(f"{_CHECKPOINT}.compatibility:check_resume")
check_save_folder = later(f"{_CHECKPOINT}.publish:check_save_folder")
check_start = later(f"{_CHECKPOINT}.stored:check_start")
copy_records = later(f"{_CHECKPOINT}.staging:copy_records")
fetched = later(f"{_CHECKPOINT}.staging:fetched")
find = later(f"{_CHECKPOINT}.stored:find")
goes_on = later(f"{_CHECKPOINT}.run_record:goes_on")
load_notes = later(f"{_CHECKPOINT}.stored:load_notes")
read_run_config = later(f"{_CHECKPOINT}.stored:read_run_config")
root_of = later(f"{_CHECKPOINT}.files:root_of")
stage = later(f"{_CHECKPOINT}.staging:stage")
missing_packages = later("megatron_ext.train.reporting.trackers:missing_packages")
notes_on_nodes = later("megatron_ext.train.schedulers:notes_on_nodes")


def main(
    program: Task | TaskChoice,
    argv: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    work: Work | None = None,
    elsewhere: Elsewhere | None = None,
    notes: Sequence[str] = (),
) -> int:
    """Parse the flags, check everything that needs no ranks, start the ranks, and train.

    Args:
        program: the task to run, or several tasks among which the flags choose.
        argv: the command-line arguments.
        work: called with the run instead of training and evaluation.
        defaults: values by field that replace the task's default values of flags.
        elsewhere: returns entries about other programs' flags, so that the error about an unknown
            flag can name the program that has it.
        notes: sentences to print at the start, before those about the flags.

    Returns:
        The exit code of the program: 2 after a user error, which has been printed; 1 if
        ``--dry-run`` shows that the run does not fit the named GPU.
    """
    try:
        check_launcher()
    except ConfigError as error:
        return refuse(error)
    first = int(os.environ.get("RANK", "0")) == 0
    launched = launch_of(argv)
    try:
        words = read_words(argv, program, elsewhere)
        stored = stored_config(words)
        parse = partial(
            parse_args,
            argv,
            program,
            world_size=int(os.environ.get("WORLD_SIZE", "0")),
            checkpoint_config=stored,
            defaults=defaults,
            elsewhere=elsewhere,
        )
        parsed = parsed_for_device(parse, words, stored)
        if parsed.print_config:
            if first:
                for note in (*notes, *parsed.notes):
                    say_to_stderr(f"> {note}")
                print((parsed.as_flags or parsed.config.to_yaml()).rstrip("\n"))
            return 0
        logging.basicConfig(level=parsed.config.logging.logging_level or logging.WARNING)
        task = parsed.task
        check_add_ons(parsed.config)
        staged = stage(parsed.config, is_first=first) if parsed.config.checkpoint.addresses else []
        config, assets = preflight(parsed.config, task.preflight)
        device = select(config.parallel.distributed_backend)
        if device.kind == "cuda" and config.device == "cpu":
            # torch finds a GPU although nothing else did.
            parsed = parse(device=device.kind)
            config, assets = preflight(parsed.config, task.preflight)
        if config.freeze.is_used and not config.training.skip_train:
            _check_parts(config, task)
        configure = partial(_resized, config, task, partial(parse, device=device.kind))
        supervision = supervision_of(config)
        trains_here = work is None and not config.planning.dry_run
        may_be_apart = "RANK" not in os.environ and not SCHEDULED.keys().isdisjoint(os.environ)
        apart = notes_on_nodes() if trains_here and may_be_apart else []
        silence_known_warnings(device.kind)
        loading = load_notes(config.checkpoint) if config.checkpoint.is_used else []
        every = (*notes, *parsed.notes, *apart, *supervision.notes(), *staged, *loading)
        for note in every if first else ():
            print(f"> {note}", flush=True)
        if config.planning.dry_run:
            return int(first and not print_plan(config, task.cost))
        transformer_config = check_core(config)
        supervision.prepare(configure)
        if task.cost is not None and task.cost.may_exceed_host(config):
            check_host_memory(config, task.cost)
        if first and config.checkpoint.save is not None:
            check_save_folder(config.checkpoint.save)
            trains = work is None and not config.training.skip_train
            if trains and not goes_on(config.fault_tolerance, generation()):
                check_replaced(config.checkpoint)
        if work is None:
            # Any rank may be the reporting rank.
            lines = tuple(task.data_lines(config, assets))
            launched = dataclasses.replace(launched, data_lines=lines, given=parsed.given)
        if first and work is None:
            print("\n".join(start_lines(config, parsed.given)), flush=True)
            for line in launched.data_lines:
                print(f"> {line}", flush=True)
    except MegatronExtError as error:
        errors = all_errors(
            error.messages,
            argv,
            program,
            input_errors=input_errors,
            defaults=defaults,
            elsewhere=elsewhere,
        )
        return refuse(ConfigError(errors))
    # Ranks may be forked from here, and must know of a signal that arrives before they start.
    exit_signal = ExitSignal.of_run(config.training)
    # Forked ranks share what is imported here.
    task = task.loaded()
    program_of = partial(
        pretrain.load(),
        device=device,
        assets=assets,
        work=work,
        launched=launched,
        exit_signal=exit_signal,
    )
    tell = partial(_tell_loss, config) if work is None else _tell_interruption
    with reported_end(config.checkpoint.save, launched) as end:
        end.exit_code = launch(
            partial(program_of, task, config, transformer_config=transformer_config),
            nproc_per_node=config.parallel.nproc_per_node,
            device=device,
            timeout_minutes=config.parallel.distributed_timeout_minutes,
            supervision=supervision,
            main_of=lambda size: partial(program_of, task, configure(size)),
            save=config.checkpoint.save,
            exit_signal=exit_signal,
            tell=tell,
        )
    if config.checkpoint.addresses:
        copy_records(config.checkpoint, is_first=first)
    code: int = end.exit_code
    return code


def _check_parts(config: RunConfig, task: Task) -> None:
    """Raise a ConfigError if a flag freezes a part that the model lacks.

    Only the package's own models are known before they are built; of others, the ranks tell.
    """
    module = getattr(task.model_chunk, "__module__", "")
    if task.cost is not None and module.startswith("megatron_ext."):
        check_parts(config, task.cost)


def parsed_for_device(
    parse: Callable[..., ParsedArgs], words: Reading, stored: Mapping[str, Any] | None
) -> ParsedArgs:
    """Parse the flags for the device of this machine.

    Only torch knows for certain that there is a GPU, but its import takes seconds. It is not
    imported if there surely is no GPU, or if the flags are refused alike with and without one.

    Args:
        parse: `parse_args` with all arguments but ``device`` and ``reading``.
        words: the result of `read_words`, which cannot be used afterwards.
        stored: the configuration in the checkpoint to load, or None.
    """
    if "torch" not in sys.modules:
        if surely_no_gpu():
            return parse(device="cpu", reading=words)
        on_cpu, on_gpu = (run_all([partial(parse, device=x)])[1] for x in ("cpu", "cuda"))
        if on_cpu and on_gpu and on_cpu[0].messages == on_gpu[0].messages:
            raise on_cpu[0]
    if splits_layers(words, stored):
        keep_launch_order()
    return parse(device=select().kind, reading=words)


def _tell_loss(config: RunConfig, code: int) -> None:
    """If ``code`` is the exit code of a run that a signal ended, print what work is lost."""
    sentence = loss_at_end(code, config)
    if sentence is not None:
        say_to_stderr(sentence)


def _tell_interruption(code: int) -> None:
    """Print "interrupted" if ``code`` is `EXIT_CODE_INTERRUPTED`.

    This is for a run without training, which has no progress to lose.
    """
    if code == EXIT_CODE_INTERRUPTED:
        say_to_stderr("interrupted")


def _resized(
    config: RunConfig, task: Task, parse: Callable[..., ParsedArgs], world_size: int
) -> RunConfig:
    """Return the configuration of the run on ``world_size`` ranks.

    This is ``config`` if it has that number of ranks. Otherwise ``parse`` parses the flags again
    for ``world_size`` ranks, and the task checks its data again.
    """
    if world_size == config.parallel.world_size:
        return config
    changed: RunConfig = task.preflight(parse(world_size=world_size).config)[0]
    return changed


def stored_config(words: Reading) -> dict[str, Any] | None:
    """Return the configuration stored in the checkpoint to load, by section and field.

    Return None without ``--use-checkpoint-args``, or if no checkpoint is named. ``words`` holds the
    flags on the command line that could be parsed.
    """
    flags = words.values.get("checkpoint", {})
    if not flags.get("use_checkpoint_args"):
        return None
    read: Callable[..., dict[str, Any]] = read_run_config
    if flags.get("load"):
        step = flags.get("ckpt_step")
        return read(fetched("--load", flags["load"], step), step)
    pretrained = flags.get("pretrained_checkpoint")
    if pretrained is None:
        return None
    return read(*root_of(fetched("--pretrained-checkpoint", pretrained)))


def splits_layers(words: Reading, stored: Mapping[str, Any] | None) -> bool:
    """Return whether the flags, not yet checked, ask for tensor or context parallelism.

    ``words`` holds the flags on the command line that could be parsed. Sizes that are not given
    there are taken from ``stored``, the configuration in the checkpoint to load.
    """
    flags = words.values.get("parallel", {})
    sizes = {**(stored or {}).get("parallel", {}), **flags}
    names = "tensor_model_parallel_size", "context_parallel_size"
    return any((sizes.get(name) or 1) != 1 for name in names)


def check_folders(logs: LoggingConfig, checkpoint: CheckpointConfig) -> None:
    """Raise a ConfigError if a folder of a run is not writable, or a tracker is not installed.

    The error has a sentence for each of them.
    """
    folders = {"save": checkpoint.save, "tensorboard-dir": logs.tensorboard_dir}
    if logs.wandb_project:
        folders["wandb-save-dir"] = logs.wandb_save_dir
    errors = [
        error
        for name, folder in folders.items()
        if folder and (error := write_error(f"--{name}", folder)) is not None
    ]
    if logs.has_tracker:
        errors += missing_packages(logs)
    if errors:
        raise ConfigError(errors)


def input_errors(task: Task, config: RunConfig) -> list[str]:
    """Return a sentence for each input of a run that does not exist or is damaged.

    The inputs are the checkpoint to load, the files of ``--loss`` and ``--optimizer-class``, and
    the task's inputs. Classes in these files are not looked at, since that would import torch.

    Args:
        config: the flags as the user gave them, without derived values.
    """
    checks: list[Callable[[], Any]] = []
    checkpoint = config.checkpoint.resolved()
    if checkpoint.is_used and not checkpoint.addresses:
        checks.append(partial(find, checkpoint))
    checks += [*_check_places(config), *task.inputs(config)]
    return [sentence for error in run_all(checks)[1] for sentence in error.messages]


def _check_places(config: RunConfig) -> list[Callable[[], Any]]:
    """Return a check for each class of the user's own, which fails if its file cannot be read."""
    places = {
        "--loss": (config.loss.loss, "the class of its options"),
        "--optimizer-class": (config.optimizer.optimizer_class, "a class of optimizers"),
    }
    return [
        partial(check_place, flag, place, kind)
        for flag, (place, kind) in places.items()
        if place is not None
    ]


def _check_classes(config: RunConfig) -> list[Callable[[], Any]]:
    """Return a check for each class of the user's own, which fails if the run cannot use it.

    The classes are those that ``--loss`` and ``--optimizer-class`` name.
    """
    checks: list[Callable[[], Any]] = []
    loss = config.loss
    if loss.loss is not None:
        from megatron_ext.losses.custom import load_loss

        checks.append(partial(load_loss, loss.loss, tuple(loss.loss_args)))
    if config.optimizer.optimizer_class is not None:
        from megatron_ext.optim.custom import check_optimizer

        checks.append(partial(check_optimizer, config))
    return checks


def preflight(config: RunConfig, check_data: Preflight) -> tuple[RunConfig, Any]:
    """Check folders, checkpoints and data on every rank, before any process group exists.

    Return the result of ``check_data`` (`Task.preflight`): the configuration, completed from the
    data, and the task's assets.
    """
    checks: list[Callable[[], Any]] = []
    if not config.planning.dry_run:
        checks.append(partial(check_folders, config.logging, config.checkpoint))
    initializes = config.model.perform_initialization
    if config.checkpoint.is_used or not initializes:
        checks.append(partial(check_start, config.checkpoint, initializes=initializes))
    # What needs no torch comes first: a refused run does not wait for its import.
    all_of([*checks, *_check_places(config)])
    config, assets = all_of([*_check_classes(config), partial(check_data, config)])[-1]
    if config.checkpoint.is_used:
        if config.lora.lora_rank is not None:
            check_base_given(config.checkpoint)
        check_resume(config)
    return config, assets
