"""What is reported, and where."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.flags import flag
from megatron_ext.config.ranges import COUNT, Range


@dataclass(frozen=True)
class LoggingConfig:
    """Names and defaults are Megatron-LM's."""

    log_interval: int = flag(
        100,
        "report after each multiple of this; in pretrain_video.py 10",
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
        1, "write after each multiple of this", unit="steps", bounds=COUNT
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
    wandb_exp_name: str = flag("", "name of the run there")
    wandb_entity: str = flag("", "its entity")
    wandb_save_dir: str = flag("", "its folder on disk")
    logging_level: int | None = flag(
        None, "level of Python's logging, such as 20 for INFO", bounds=Range(0, 100)
    )

    def errors(self) -> list[str]:
        """What cannot be run, one sentence each."""
        found = []
        if self.wandb_project and not self.wandb_exp_name:
            found.append(
                f"`--wandb-project` ({self.wandb_project}) needs `--wandb-exp-name`; give the "
                "run a name."
            )
        return found
