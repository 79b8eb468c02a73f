"""Flags of checkpoints, reports and dry runs."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.config.flags import COUNT, NATURAL, SIZE, Range, UsersOwn, flag, must_divide
from megatron_ext.errors import FlagError

STRICTNESS = (
    "assume_ok_unexpected log_unexpected log_all raise_unexpected raise_all return_unexpected "
    "return_all ignore_all"
).split()


_FLAGS_OF_FOLDERS = ("save", "load", "pretrained_checkpoint")


def split_address(address: str) -> tuple[str, str]:
    """Split ``s3://bucket/run/iter_0000100`` into ``s3://bucket/run`` and ``iter_0000100``.

    The second part is "" if the address does not end in the name of one checkpoint.
    """
    root, _, name = address.rstrip("/").rpartition("/")
    from megatron_ext.disk.iterations import iteration_of  # only for object storage

    return (address.rstrip("/"), "") if iteration_of(name) is None else (root, name)


def staging_folder(address: str) -> Path:
    """Return the local folder for copies of the checkpoints at an object-storage address.

    The folder lies in the user's cache folder (``XDG_CACHE_HOME``). It depends only on the
    address, so all runs that use the address share it.
    """
    root, name = split_address(address)
    return user_cache() / hashlib.blake2b(root.encode(), digest_size=8).hexdigest() / name


def user_cache() -> Path:
    """Return this package's folder in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
    return cache / "megatron_ext"


@dataclass(frozen=True)
class CheckpointConfig(UsersOwn):
    """Flags of checkpoints; names and meanings are Megatron-LM's.

    Unlike in Megatron-LM, optimizer state can be loaded in any parallel layout.
    """

    save: str | None = flag(
        None,
        "folder for checkpoints, metrics and the loss plot, or an address of object storage, such "
        "as s3://bucket/run; likewise --load and --pretrained-checkpoint",
    )
    save_interval: int | None = flag(
        None,
        "save after each multiple of this many steps; without it at the end only",
        COUNT,
        names="--persistent-save-interval",
    )
    save_retain_interval: int | None = flag(
        None, "keep only the older checkpoints whose step is a multiple of this", COUNT, "steps"
    )
    keep_last: int | None = flag(None, "keep only this many of the newest checkpoints", COUNT)
    keep_best: int | None = flag(
        None, "besides, save and keep so many checkpoints of the lowest validation loss seen", COUNT
    )
    load: str | None = flag(None, "folder to continue from")
    resume_mode: str | None = flag(
        None,
        "where to go on: auto, from the newest checkpoint of --save, else as --load or "
        "--pretrained-checkpoint say; disable, nowhere; path, from --load, which must hold one; "
        "default: from --load, where it holds one",
        choices="auto disable path",
    )
    ckpt_step: int | None = flag(None, "iteration to load; default: the latest", NATURAL, "steps")
    finetune: bool = flag(False, "load the weights only, and start at iteration 0")
    pretrained_checkpoint: str | None = flag(
        None, "weights to start from, without --load", from_checkpoint=True
    )
    pretrained_average: bool = flag(
        False,
        "take the averaged weights of --pretrained-checkpoint, where it holds them",
        from_checkpoint=True,
    )
    no_save_optim: bool = flag(False, "leave the optimizer out of checkpoints")
    no_save_rng: bool = flag(False, "leave the random states out of checkpoints")
    no_load_optim: bool = flag(False, "do not load the optimizer")
    no_load_rng: bool = flag(False, "do not load the random states")
    exit_on_missing_checkpoint: bool = flag(False, "fail when --load holds no checkpoint")
    use_checkpoint_args: bool = flag(False, "take the shape of the model from the checkpoint")
    ckpt_format: str = flag(
        "torch_dist",
        "format of checkpoints",
        choices="torch_dist",
        advice="leave it out, and convert checkpoints in other formats by Megatron-LM's own tools",
    )
    ckpt_fully_parallel_save: bool = flag(True, "share the writing over replicas")
    ckpt_fully_parallel_load: bool = flag(False, "share the reading over replicas")
    async_save: bool = flag(
        False, "write checkpoints in a process beside each rank while training goes on"
    )
    async_save_buffer: float | None = flag(
        None,
        "memory of a rank's host for copies of what --async-save writes, in GiB; there is room for "
        "one copy at least, which is the default, and a save waits until it has room",
        Range(0, 1e6, above=True),
        "GiB",
    )
    dist_ckpt_strictness: str = flag(
        "assume_ok_unexpected", "what to do about keys that do not match", choices=STRICTNESS
    )
    dist_ckpt_optim_fully_reshardable: bool = flag(
        True, "optimizer state that loads in any layout (the default here)"
    )

    peer_checkpoint_interval: int | None = flag(
        None,
        "after each multiple of this many steps, keep the state of each rank in the memory of its "
        "machine and of its neighbour's, from where a restarted run goes on; 1 loses at most one "
        "step",
        COUNT,
        "steps",
    )
    non_persistent_save_interval: int | None = flag(
        None,
        "keep a checkpoint that does not stay after each multiple of this many steps",
        COUNT,
        "steps",
    )
    non_persistent_ckpt_type: str | None = flag(
        None,
        "where --non-persistent-save-interval keeps checkpoints: local, in files of each machine; "
        "in_memory, in its memory, until the run ends",
        choices="global local in_memory",
    )
    non_persistent_local_ckpt_dir: str | None = flag(
        None, "folder for --non-persistent-ckpt-type local, best on a disk of each machine"
    )

    usual_save_interval: int | None = None
    """The task's default for ``--save-interval``, in steps; used only with ``--save``."""
    starts_others: bool = False
    """Whether a network beside the run's model, such as a teacher, starts from a checkpoint."""
    starts_elsewhere: bool = False
    """Whether the task gives the model its first weights, so that no checkpoint is needed."""
    published: tuple[str, str, str] | None = None
    """Place and digest of published weights that the task gives a new model, and their flag."""
    passes_over_damaged: bool = False
    """Whether to report a damaged checkpoint and load an older one; restarted runs always do."""

    addresses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name of a field -> the address of object storage that the user gave for it.

    `resolved` fills this in, and puts the address's local staging folder into the field itself.
    """

    @property
    def is_used(self) -> bool:
        """Return whether the run reads or writes checkpoints."""
        folders = self.save, self.load, self.pretrained_checkpoint, self.resume_mode
        return any(folder is not None for folder in folders)

    def resolved(self, *, may_restart: bool = False) -> CheckpointConfig:
        """Return a copy in which local staging folders replace addresses of object storage.

        If ``--save`` is given without ``--save-interval``, the task's default interval is filled
        in. ``may_restart`` says whether the run is restarted after a failure; such a run loads an
        older checkpoint in place of a damaged one (``passes_over_damaged``).
        """
        given = {name: getattr(self, name) or "" for name in _FLAGS_OF_FOLDERS}
        new = {name: value for name, value in given.items() if "://" in value}
        folders: dict[str, Any] = {name: str(staging_folder(x)) for name, x in new.items()}
        folders["addresses"] = {**self.addresses, **new}
        resolved = dataclasses.replace(self, passes_over_damaged=may_restart, **folders)
        if self.save is None or self.save_interval is not None:
            return resolved
        return dataclasses.replace(resolved, save_interval=self.usual_save_interval)

    def as_given(self) -> CheckpointConfig:
        """Return a copy with the addresses that the user gave instead of staging folders."""
        given: dict[str, Any] = dict(self.addresses)
        return dataclasses.replace(self, **given, addresses={})

    def _address_errors(self) -> Iterator[FlagError]:
        for name, address in self.as_given().resolved().addresses.items():
            if address.startswith("memory:"):
                yield FlagError(
                    f"--{name.replace('_', '-')}",
                    address,
                    "is memory of one process, which the ranks of a run do not share",
                    "give a folder, or storage outside the run",
                )
            if name == "save" and self.async_save:
                yield FlagError(
                    "--async-save",
                    None,
                    f"writes to folders, but `--save` ({address}) is an address of object storage",
                    "leave `--async-save` out, or give a mounted folder",
                )

    def errors(self, *, evaluates: bool) -> Iterator[FlagError]:
        """Yield an error for each fault in these flags; ``evaluates`` says if the run validates."""
        yield from self._address_errors()
        for name in ("save_interval", "save_retain_interval", "keep_last", "keep_best"):
            if getattr(self, name) is not None and self.save is None:
                yield FlagError(
                    f"--{name.replace('_', '-')}",
                    None,
                    "needs `--save`",
                    "give a folder, or leave it out",
                )
        retain = self.save_retain_interval
        interval = self.save_interval or 1
        yield from must_divide("--save-retain-interval", retain, "--save-interval", interval)
        yield from self._non_persistent_errors()
        if self.use_checkpoint_args and self.load is None and self.pretrained_checkpoint is None:
            yield FlagError(
                "--use-checkpoint-args",
                None,
                "needs `--load` or `--pretrained-checkpoint`",
                "give one",
            )
        if self.keep_best is not None and not evaluates:
            yield FlagError(
                "--keep-best",
                self.keep_best,
                "needs evaluation, but `--eval-iters` is 0",
                "give a number of batches, or `--full-validation`",
            )
        if self.pretrained_average and not (
            self.starts_others or self.finetune or self.pretrained_checkpoint
        ):
            yield FlagError(
                "--pretrained-average",
                None,
                "needs a checkpoint that gives weights to start from",
                "give `--pretrained-checkpoint`, or `--load` with `--finetune`",
            )
        if self.async_save and self.save is None:
            yield FlagError("--async-save", None, "needs `--save`", "give a folder")
        if self.async_save_buffer is not None and not self.async_save:
            yield FlagError(
                "--async-save-buffer",
                f"{self.async_save_buffer:g}",
                "needs `--async-save`",
                "give both",
            )
        if self.resume_mode == "disable" and self.load is not None:
            yield FlagError(
                "--resume-mode disable",
                None,
                f"starts anew and contradicts `--load` ({self.load})",
                "leave one out, or give the weights to start from as `--pretrained-checkpoint`",
            )
        if self.resume_mode == "path" and self.load is None:
            yield FlagError(
                "--resume-mode path", None, "needs `--load`", "give the folder to go on from"
            )
        if self.resume_mode == "path" and self.pretrained_checkpoint is not None:
            yield FlagError(
                "--resume-mode path",
                None,
                "goes on from `--load`, so `--pretrained-checkpoint` "
                f"({self.pretrained_checkpoint}) has no use",
                "leave one out",
            )
        if self.resume_mode == "auto":
            yield from self._auto_errors()

    def _non_persistent_errors(self) -> Iterator[FlagError]:
        interval = self.non_persistent_save_interval
        kind = self.non_persistent_ckpt_type
        folder = self.non_persistent_local_ckpt_dir
        if kind == "global":
            yield FlagError(
                "--non-persistent-ckpt-type global",
                None,
                "is not supported",
                "use local or in_memory, or `--save-interval` with `--keep-last`",
            )
        if interval is not None and kind is None:
            yield FlagError(
                "--non-persistent-save-interval",
                interval,
                "needs `--non-persistent-ckpt-type`",
                "give local or in_memory",
            )
        if interval is None and kind is not None:
            yield FlagError(
                "--non-persistent-ckpt-type",
                kind,
                "needs `--non-persistent-save-interval`",
                "give a number of steps",
            )
        if kind == "local" and folder is None:
            yield FlagError(
                "--non-persistent-ckpt-type local",
                None,
                "needs `--non-persistent-local-ckpt-dir`",
                "give a folder",
            )
        if kind != "local" and folder is not None:
            yield FlagError(
                "--non-persistent-local-ckpt-dir",
                folder,
                "is for `--non-persistent-ckpt-type local`",
                "give that, or leave it out",
            )

    def _auto_errors(self) -> Iterator[FlagError]:
        if self.save is None:
            yield FlagError(
                "--resume-mode auto", None, "needs `--save`", "give the folder to go on in"
            )
        if self.ckpt_step is not None:
            yield FlagError(
                "--ckpt-step",
                self.ckpt_step,
                "contradicts `--resume-mode auto`, which takes the newest checkpoint",
                "use `--resume-mode path` with `--load`",
            )
        if self.finetune and self.load is not None and self.load == self.save:
            yield FlagError(
                "With `--resume-mode auto` and `--finetune`, `--load`",
                self.load,
                "must differ from `--save`, or the run could not tell its own checkpoints from "
                "those that it starts from",
                "give another `--save`",
            )


TRACKERS = ("tensorboard_dir", "wandb_project", "mlflow_experiment", "trackio_project")
"""The fields of `LoggingConfig` that each switch on a tracker."""


@dataclass(frozen=True)
class LoggingConfig(UsersOwn):
    """Flags of a run's logs and reports; names and defaults are Megatron-LM's."""

    log_interval: int = flag(100, "report after each multiple of this many steps", COUNT, "steps")
    log_throughput: bool = flag(
        False, "TFLOP/s per GPU to the trackers; the iteration line in a log has them anyway"
    )
    log_params_norm: bool = flag(False, "norm of the parameters in the iteration line")
    log_layer_norms_interval: int | None = flag(
        None,
        "report the norm of each layer's parameters after each multiple of this many steps",
        COUNT,
        "steps",
    )
    log_progress: bool = flag(False, "append the progress of the run to progress.txt")
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard; none without it")
    tensorboard_log_interval: int = flag(
        1, "write to all trackers after each multiple of this many steps", COUNT, "steps"
    )
    tensorboard_queue_size: int = flag(1000, "pending TensorBoard events", COUNT)
    log_loss_scale_to_tensorboard: bool = flag(True, "loss scale to TensorBoard")
    log_validation_ppl_to_tensorboard: bool = flag(False, "perplexity to TensorBoard")
    log_timers_to_tensorboard: bool = flag(False, "iteration time to TensorBoard")
    log_memory_to_tensorboard: bool = flag(False, "memory use to TensorBoard")
    log_world_size_to_tensorboard: bool = flag(False, "number of ranks to TensorBoard")
    wandb_project: str = flag("", "project in Weights & Biases; none without it")
    wandb_exp_name: str = flag("", "name of the run in Weights & Biases")
    wandb_entity: str = flag("", "entity, a user or team, in Weights & Biases")
    wandb_save_dir: str = flag("", "folder on disk for files of Weights & Biases")
    mlflow_experiment: str = flag("", "experiment in MLflow; none without it")
    mlflow_run_name: str = flag("", "name of the run in MLflow; default: the name of --save")
    mlflow_tracking_uri: str = flag(
        "", "server, database or folder of MLflow; default: what MLFLOW_TRACKING_URI says"
    )
    trackio_project: str = flag("", "project in Trackio; none without it")
    trackio_run_name: str = flag("", "name of the run in Trackio; made up without it")
    tracker_artifacts: list[str] = flag(
        [],
        "what the trackers get when the run has ended well: the newest checkpoint, the report",
        choices=("checkpoint", "report"),
        nargs="+",
    )
    logging_level: int | None = flag(None, "level of Python's logging (20 is INFO)", Range(0, 100))

    @property
    def has_tracker(self) -> bool:
        """Return whether a tracker, such as TensorBoard, gets the values of single steps."""
        return any(getattr(self, name) for name in TRACKERS)

    def errors(self, save: str | None) -> Iterator[FlagError]:
        """Yield an error for each flag that contradicts the others; ``save`` is ``--save``."""
        if self.wandb_project and not self.wandb_exp_name:
            yield FlagError(
                "--wandb-project",
                self.wandb_project,
                "needs `--wandb-exp-name`",
                "give the run a name",
            )
        if re.search(r"://[^/@]*:[^/@]*@", self.mlflow_tracking_uri):
            yield FlagError(
                "--mlflow-tracking-uri",
                None,
                "must hold no password, since a run's files keep its flags",
                "set the environment variable MLFLOW_TRACKING_URI instead",
            )
        if self.tracker_artifacts and save is None:
            yield FlagError(
                "--tracker-artifacts",
                " ".join(self.tracker_artifacts),
                "needs `--save`, where checkpoints and the report lie",
                "give a folder",
            )


GPU_NAMES = ("A100-40GB", "A100", "L40S", "H100", "H200", "B200")
"""GPUs whose FLOP/s and bandwidths `planning.hardware` knows, for dry runs."""


def unknown_gpu(flag: str, name: str) -> FlagError:
    """Return the error about a flag with the name of a GPU that no plan knows."""
    rule = f"must be one of {', '.join(GPU_NAMES)}, or a file .json that `tools/doctor.py --json`"
    # Others write 8xH100, H100-80GB or h100_sxm.
    near = next((known for known in GPU_NAMES if known.lower() in name.lower()), None)
    return FlagError(flag, name, f"{rule} wrote", f"did you mean {near}?" if near else "")


@dataclass(frozen=True)
class PlanningConfig(UsersOwn):
    """Flags of ``--dry-run``, which checks a run and estimates memory, communication and time."""

    dry_run: bool = flag(
        False, "check everything, print what memory and time a step would take, start nothing"
    )
    dry_run_nodes: int | None = flag(
        None, "machines of the planned run, each with --nproc-per-node ranks", SIZE, "machines"
    )
    dry_run_gpu: str | None = flag(
        None,
        f"estimate time for this GPU, and check what holds on GPUs: {', '.join(GPU_NAMES)}, or a "
        "file .json that tools/doctor.py --json wrote",
    )

    def errors(self) -> Iterator[FlagError]:
        """Yield an error for each fault in the flags of a dry run."""
        for name in ("dry_run_nodes", "dry_run_gpu"):
            value = getattr(self, name)
            if value is not None and not self.dry_run:
                yield FlagError(
                    f"--{name.replace('_', '-')}", value, "needs `--dry-run`", "give both"
                )
        gpu = self.dry_run_gpu
        names = [name.lower() for name in GPU_NAMES]
        if gpu is not None and not gpu.endswith(".json") and gpu.lower() not in names:
            yield unknown_gpu("--dry-run-gpu", gpu)
