"""Reports of a run, and plans of one.

Checking a run, and pricing it, without starting it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import COUNT, SIZE, IfChanged, Range, flag


@dataclass(frozen=True)
class LoggingConfig:
    """Names and defaults are Megatron-LM's."""

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    log_interval: int = flag(
        100,
        "report after each multiple of this many steps",
        unit="steps",
        bounds=COUNT,
    )
    log_throughput: bool = flag(
        False,
        "TFLOP/s per GPU to TensorBoard and Weights & Biases; the iteration line has them",
    )
    log_params_norm: bool = flag(False, "norm of the parameters in the iteration line")
    log_progress: bool = flag(False, "append the progress of the run to progress.txt")
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard; none without it")
    tensorboard_log_interval: int = flag(
        1, "write to TensorBoard after each multiple of this many steps", unit="steps", bounds=COUNT
    )
    tensorboard_queue_size: int = flag(1000, "pending TensorBoard events", bounds=COUNT)
    log_loss_scale_to_tensorboard: bool = flag(True, "loss scale to TensorBoard")
    log_validation_ppl_to_tensorboard: bool = flag(False, "perplexity to TensorBoard")
    log_timers_to_tensorboard: bool = flag(False, "iteration time to TensorBoard")
    log_memory_to_tensorboard: bool = flag(
        False, "memory use to TensorBoard", gpu_only="memory of a GPU"
    )
    log_world_size_to_tensorboard: bool = flag(False, "number of ranks to TensorBoard")
    wandb_project: str = flag("", "project in Weights & Biases; none without it")
    wandb_exp_name: str = flag("", "name of the run in Weights & Biases")
    wandb_entity: str = flag("", "entity, a user or team, in Weights & Biases")
    wandb_save_dir: str = flag("", "folder on disk for files of Weights & Biases")
    logging_level: int | None = flag(
        None, "level of Python's logging, such as 20 for INFO", bounds=Range(0, 100)
    )

    def errors(self) -> list[str]:
        """Return a sentence for everything that cannot be run."""
        found = []
        if self.wandb_project and not self.wandb_exp_name:
            found.append(
                f"`--wandb-project` ({self.wandb_project}) needs `--wandb-exp-name`; give the "
                "run a name."
            )
        return found


GPU_NAMES = ("A100-40GB", "A100", "L40S", "H100", "H200", "B200")
"""GPUs whose rates are known; see `planning.hardware`."""


@dataclass(frozen=True)
class PlanningConfig:
    """``--dry-run``: all checks, and what each rank would hold, send and take."""

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    dry_run: bool = flag(
        False, "check everything, print what memory and time a step would take, start nothing"
    )
    dry_run_nodes: int | None = flag(
        None,
        "machines of the planned run, each with --nproc-per-node ranks",
        unit="machines",
        bounds=SIZE,
    )
    dry_run_gpu: str | None = flag(
        None,
        f"estimate time for this GPU, and check what holds on GPUs: {', '.join(GPU_NAMES)}, or a "
        "file .json that tools/doctor.py --json wrote",
    )

    def errors(self) -> list[str]:
        """Return a sentence for everything that cannot be planned."""
        found = [
            f"`--{name.replace('_', '-')}` ({getattr(self, name)}) needs `--dry-run`; give both."
            for name in ("dry_run_nodes", "dry_run_gpu")
            if getattr(self, name) is not None and not self.dry_run
        ]
        if self.dry_run_gpu is not None and not is_gpu(self.dry_run_gpu):
            found.append(
                f"`--dry-run-gpu` ({self.dry_run_gpu}) must be one of {', '.join(GPU_NAMES)}, or a "
                "file .json that `tools/doctor.py --json` wrote."
            )
        return found


def is_gpu(name: str) -> bool:
    """Return whether this names one of the GPUs, in any case, or a file that may describe some."""
    return name.endswith(".json") or name.lower() in {known.lower() for known in GPU_NAMES}
