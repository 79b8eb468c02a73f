"""Finds the checkpoint to load, and reads the parts of it that need no model.

A CheckpointError is raised for a checkpoint that is damaged, or required but missing.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint import files
from megatron_ext.checkpoint.files import TRACKER, Files, published, standing_folder_of
from megatron_ext.checkpoint.manifest import MANIFEST, read_manifest
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.disk.host_folder import generation
from megatron_ext.disk.reading import UnreadableFile, is_count, kind_of, read_json_object, shortened
from megatron_ext.errors import CheckpointError, FlagError

RUN_CONFIG = "run_config.json"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint to load: its folder and iteration, and whether to load only its weights."""

    root: Path
    iteration: int
    weights_only: bool

    @property
    def path(self) -> Path:
        return standing_folder_of(self.root, self.iteration)


def check_files(
    checkpoint: CheckpointRef, own: Callable[[Files], Iterable[str]] = lambda listed: listed
) -> None:
    """Raise a CheckpointError if a file does not match the checksum in the checkpoint's manifest.

    ``own`` takes the files in the manifest and returns the names to check; by default all.
    """
    listed = read_manifest(checkpoint.path) or {}
    check_listed(checkpoint, listed, own(listed))


def check_listed(checkpoint: CheckpointRef, listed: Files, names: Iterable[str]) -> None:
    """Raise a CheckpointError if a file in ``names`` does not match its checksum in ``listed``."""
    fault = files.checksum_fault(checkpoint.path, listed, names)
    if fault is not None:
        error = DamagedFile(refusal(checkpoint.root, checkpoint.iteration, fault))
        error.fault = fault
        raise error


class DamagedFile(CheckpointError):
    """A file of a checkpoint does not match its checksum.

    Attributes:
        fault: which file is damaged and how, without advice.
    """

    fault = ""


Damaged = dict[Path, str]
"""Folder of each damaged checkpoint that is skipped -> what is wrong with it."""


def cause_of(error: CheckpointError) -> str:
    """Return why a checkpoint is skipped, as a clause for a log message.

    ``error`` is the error that a check of the checkpoint raised; the advice in a `DamagedFile` is
    left out.
    """
    return error.fault if isinstance(error, DamagedFile) else str(error).rstrip(".")


def passes_over_damaged(config: CheckpointConfig) -> bool:
    """Return whether the run skips a damaged checkpoint and loads the next older one.

    Runs that have been restarted, or may be, do so. Other runs fail.
    """
    return config.passes_over_damaged or generation() > 0


def find_intact(
    config: CheckpointConfig, own: Callable[[Files], Iterable[str]]
) -> CheckpointRef | None:
    """Return the checkpoint that `find` chooses, after checking the checksums of some of its files.

    ``own`` takes the files in the manifest and returns the names to check. If one does not match,
    raise a CheckpointError, or try the next older checkpoint if `passes_over_damaged` says so.
    """
    damaged: Damaged | None = {} if passes_over_damaged(config) else None
    while (checkpoint := find(config, damaged)) is not None:
        try:
            check_files(checkpoint, own)
        except CheckpointError as error:
            if damaged is None:
                raise
            damaged[checkpoint.path] = cause_of(error)
        else:
            return checkpoint
    return None


def find(config: CheckpointConfig, damaged: Damaged | None = None) -> CheckpointRef | None:
    """Return the checkpoint that the flags choose, or None if the run starts anew.

    A damaged checkpoint raises a CheckpointError, or is skipped for the next older complete one.

    Args:
        damaged: faults of known damaged checkpoints, by folder. If given, all damaged checkpoints
            are skipped, and newly found ones are added to this mapping. If None,
            `passes_over_damaged` decides whether to skip.
    """
    if damaged is None and passes_over_damaged(config):
        damaged = {}
    for folder, step, weights_only in candidates(config):
        root = Path(folder)
        if root.is_file():
            names = ("load", "save", "pretrained_checkpoint")
            flag = next(name for name in names if getattr(config, name) == folder)
            raise CheckpointError.about(
                f"--{flag.replace('_', '-')}",
                folder,
                "is a file, but checkpoints are folders",
                "give the folder that holds them",
            )
        iteration = choose(root, step, damaged) if root.is_dir() else None
        if iteration is not None:
            return CheckpointRef(root, iteration, weights_only)
    for name, given in (
        ("--resume-mode path", config.resume_mode == "path"),
        ("--exit-on-missing-checkpoint", config.exit_on_missing_checkpoint),
        ("--ckpt-step", config.ckpt_step is not None),
        ("--finetune", config.finetune),
    ):
        if given and config.load is not None and config.pretrained_checkpoint is None:
            raise CheckpointError.about(
                "--load",
                config.load,
                f"holds no checkpoint, but `{name}` is given",
                "give a folder that does",
            )
    if config.pretrained_checkpoint is not None:
        raise CheckpointError.about(
            "--pretrained-checkpoint",
            config.pretrained_checkpoint,
            "holds no checkpoint",
            "give a folder that does",
        )
    # There may still be snapshots in `--non-persistent-local-ckpt-dir`, which are looked up later.
    has_local = config.non_persistent_local_ckpt_dir is not None
    if config.load is not None and not has_local and not _same_folder(config.load, config.save):
        raise CheckpointError.about(
            "--load",
            config.load,
            "holds no checkpoint",
            "give a folder that does, or leave `--load` out to start from scratch",
        )
    return None


def _same_folder(path: str, other: str | None) -> bool:
    return other is not None and Path(path).resolve() == Path(other).resolve()


def check_replaced(config: CheckpointConfig) -> None:
    """Raise a CheckpointError if a run that starts now would replace another run in ``--save``.

    That is so if the folder holds checkpoints and the run does not go on from them, unless
    ``--resume-mode disable`` says that they may be replaced.
    """
    save = config.save
    held = [] if save is None or config.resume_mode == "disable" else published(Path(save))
    if not held:
        return
    found = find(config)
    if found is None or found.weights_only or not _same_folder(str(found.root), save):
        raise CheckpointError.about(
            "--save",
            config.as_given().save,
            f"holds the checkpoints of another run, up to iteration {held[-1]}, which this run "
            "would replace, with its metrics and configuration, since it does not go on from them",
            "go on from them with `--resume-mode auto` or with `--load` of the same folder, give "
            "another `--save`, or begin anew in this one with `--resume-mode disable`",
        )


def load_notes(config: CheckpointConfig) -> list[str]:
    """Return log messages on folders of ``--load`` and the like that hold no checkpoint.

    They say what the run starts from instead. The list is empty if all folders hold one.
    """
    found = find(config)
    if found is not None and not found.weights_only and config.pretrained_checkpoint is not None:
        root, step = files.root_of(Path(config.pretrained_checkpoint))
        if not (root.is_dir() and choose(root, step, {}) is not None):
            return [
                f"`--pretrained-checkpoint` ({config.as_given().pretrained_checkpoint}) holds no "
                f"checkpoint; the run goes on from {found.root}, which comes first."
            ]
    if config.load is None or config.starts_elsewhere or found is not None:
        return []
    local = config.non_persistent_local_ckpt_dir
    if local is not None:
        return [
            f"`--load` ({config.as_given().load}) holds no checkpoint; training starts from what "
            f"`--non-persistent-local-ckpt-dir` ({local}) holds of it, or else from scratch."
        ]
    return [
        f"`--load` ({config.as_given().load}) is the folder of `--save` and holds no checkpoint "
        "yet; training starts from scratch."
    ]


def candidates(config: CheckpointConfig) -> list[tuple[str, int | None, bool]]:
    """Return the folders in which to look for a checkpoint, first choice first.

    Each is (folder, iteration, whether to load only weights); the iteration is None for the latest.
    """
    folders: list[tuple[str, int | None, bool]] = []
    if config.resume_mode == "auto" and config.save is not None:
        # The same command later resumes from its own checkpoints, whatever weights it first started
        # from.
        folders.append((config.save, None, False))
    if config.load is not None:
        folders.append((config.load, config.ckpt_step, config.finetune))
    if config.pretrained_checkpoint is not None:
        root, step = files.root_of(Path(config.pretrained_checkpoint))
        folders.append((str(root), step, True))
    return folders


def check_weights(flag: str, folder: str | None) -> None:
    """Raise a CheckpointError if the folder given by ``flag`` holds no loadable checkpoint.

    None, for a flag that was not given, is accepted.
    """
    if folder is None:
        return
    try:
        find(CheckpointConfig(pretrained_checkpoint=folder))
    except CheckpointError as error:
        name = "--pretrained-checkpoint"
        raise CheckpointError(
            [
                text.renamed(name, flag)
                if isinstance(text, FlagError)
                else text.replace(name, flag)
                for text in error.messages
            ]
        ) from error


def check_start(config: CheckpointConfig, *, initializes: bool) -> None:
    """Raise a CheckpointError if the run neither initializes its weights nor loads them.

    ``initializes`` is False with ``--no-initialization``.
    """
    if find(config) is None and not (initializes or config.starts_elsewhere):
        raise CheckpointError.about(
            "--no-initialization",
            None,
            "leaves the weights to a checkpoint, but there is none to load",
            "give `--load` or `--pretrained-checkpoint` with a folder that holds one, or "
            "leave it out",
        )


def fault_of(folder: Path) -> str | None:
    """Return why a folder is not a complete checkpoint, or None if it is one."""
    if not folder.is_dir():
        return f"{folder} does not exist"
    try:
        listed = read_manifest(folder)
    except CheckpointError as error:
        return str(error).rstrip(".")
    if listed is not None:
        return files.size_fault(folder, listed)
    if (folder / RUN_CONFIG).is_file():
        return f"{folder / MANIFEST} is missing"
    if any(folder.glob("mp_rank_*/*.pt")):
        return (
            f"{folder} is in Megatron-LM's old format `torch`, whose weights "
            "`tools/convert_checkpoint.py import --checkpoint` imports"
        )
    paths = [folder / name for name in ("metadata.json", ".metadata")]
    missing = next((path for path in paths if not path.is_file()), None)
    # Its module imports torch.
    from megatron_ext.checkpoint.unpickling import holds_common_state

    try:
        if missing is None and not holds_common_state(folder):
            missing = folder / "common.pt"
    except CheckpointError as error:
        return str(error).rstrip(".")
    return f"{missing} is missing" if missing is not None else None


def choose(root: Path, step: int | None, damaged: Damaged | None = None) -> int | None:
    """Return the iteration to load: ``step``, or the latest if ``step`` is None.

    The result is None if there is no checkpoint at all.

    Args:
        damaged: faults of known damaged checkpoints, by folder. If given, a missing or damaged
            checkpoint is added, and the next older complete one is chosen instead.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, and no older one is chosen instead.
            The message names the newest complete one.
    """
    iteration = step
    if iteration is None:
        # A kill after publishing and before the tracker was written leaves an announcement file.
        iteration = files.announced(root)
    if iteration is None:
        iteration = files.read_tracker(root)
    passed = {} if damaged is None else damaged
    candidates = published(root) if iteration is None else [iteration]
    if iteration is not None and damaged is not None:
        candidates = [*(older for older in published(root) if older < iteration), iteration]
    for candidate in reversed(candidates):
        folder = standing_folder_of(root, candidate)
        fault = passed.get(folder) or fault_of(folder)
        if fault is None:
            return candidate
        passed[folder] = fault
    if iteration is None:
        return None
    raise CheckpointError(refusal(root, iteration, passed[standing_folder_of(root, iteration)]))


def refusal(root: Path, iteration: int, fault: str) -> str:
    """Return the message of the error that refuses a checkpoint for its ``fault``.

    It suggests the newest complete checkpoint, if there is one.
    """
    others = [i for i in published(root) if i != iteration]
    whole = [i for i in others if fault_of(standing_folder_of(root, i)) is None]
    advice = "there is no other whole one, so remove `--load` to start anew"
    if whole:
        advice = f"give `--ckpt-step {whole[-1]}` for the newest whole one"
    return f"The checkpoint of iteration {iteration} cannot be loaded: {fault}; {advice}."


def read_run_config(root: Path, step: int | None = None) -> dict[str, Any]:
    """Read the flags stored in a checkpoint of ``root``, by section and field.

    This is for ``--use-checkpoint-args``. A ``step`` of None stands for the latest checkpoint.
    """
    if not root.is_dir():
        raise CheckpointError.about(
            "--load", root, "is no folder", f"give one that holds {TRACKER}"
        )
    iteration = choose(root, step)
    if iteration is None:
        raise CheckpointError.about("--load", root, "holds no checkpoint", "give another folder")
    path = standing_folder_of(root, iteration) / RUN_CONFIG
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, so `--use-checkpoint-args` has nothing to read; give the flags "
            "of the model instead, or import a checkpoint of Megatron-LM with "
            "`tools/convert_checkpoint.py import --checkpoint`."
        )
    return read_settings(standing_folder_of(root, iteration))


def read_json(path: Path) -> dict[str, Any]:
    """Read a mapping from a JSON file of a checkpoint; return {} if there is no file."""
    try:
        # An infinite option is stored as Infinity, which strict JSON does not allow.
        return read_json_object(path, not_finite=True)
    except UnreadableFile as error:
        if error.missing:
            return {}
        raise CheckpointError(
            f"{path} is damaged ({error.reason}); load another checkpoint."
        ) from error


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """Read the flags of the run that wrote a checkpoint, by section and field; {} if not stored."""
    stored = read_json(path / RUN_CONFIG)
    wrong = next((name for name, values in stored.items() if not isinstance(values, dict)), None)
    if wrong is not None and wrong != "device":
        raise CheckpointError(
            f"{path / RUN_CONFIG} is damaged (`{shortened(wrong)}` is {kind_of(stored[wrong])} "
            "instead of an object); load another checkpoint."
        )
    return stored


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_best(value: object) -> bool:
    """Return whether a value is a list of best checkpoints with the fields of `BestCheckpoint`."""
    return isinstance(value, list) and all(
        isinstance(entry, dict)
        and entry.keys() == {"iteration", "loss", "regular"}
        and is_count(entry["iteration"])
        and _is_number(entry["loss"])
        and isinstance(entry["regular"], bool)
        for entry in value
    )


def _are_rows(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list) and all(map(_is_number, row)) for row in value
    )


_COUNT = is_count, "a whole number from 0 on"
_NUMBER = lambda x: x is None or _is_number(x), "a number"
_FORMS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(
        (
            "iteration",
            "consumed_train_samples",
            "consumed_valid_samples",
            "skipped_iterations",
            "nan_iterations",
            "stale_evaluations",
            "average_updates",
        ),
        _COUNT,
    ),
    **dict.fromkeys(("epoch", "lowest_loss", "average_start"), _NUMBER),
    "floating_point_operations": (_is_number, "a number"),
    "best_checkpoints": (_is_best, "a list of checkpoints with their losses"),
    "recent_values": (_are_rows, "a list of lists of numbers"),
    "data_plan": (lambda x: isinstance(x, str), "a text"),
    "data_order": (lambda x: x is None or isinstance(x, dict), "an object"),
}
"""For each counter of a checkpoint: the function that checks its value, and the rule in words."""


def read_progress(path: Path) -> dict[str, Any]:
    """Read the counters of a checkpoint; return {} if another program wrote it."""
    stored = read_json(path / PROGRESS)
    for name, value in stored.items():
        fits, words = _FORMS.get(name, (lambda _: True, ""))
        if not fits(value):
            raise CheckpointError(
                f"{path / PROGRESS} is damaged (`{name}` is {shortened(value)}, but must be "
                f"{words}); load another checkpoint."
            )
    return stored


def stored_progress(path: Path, arguments: Namespace) -> dict[str, Any]:
    """Read a checkpoint's counters.

    Megatron-LM's checkpoints have no file of counters. The consumed samples are then taken from
    ``arguments``, the flags that such a checkpoint stores.
    """
    stored = read_progress(path)
    if stored:
        return stored
    names = ("consumed_train_samples", "consumed_valid_samples")
    return {name: getattr(arguments, name, 0) for name in names}
