"""TensorBoard and Weights & Biases, under Megatron-LM's tags and a few common ones."""

from __future__ import annotations

import threading
from typing import Any

from megatron_ext.config.logs import LoggingConfig
from megatron_ext.errors import ConfigError
from megatron_ext.training.reporting.records import EvaluationRecord, IterationRecord


def iteration_scalars(record: IterationRecord, config: LoggingConfig) -> dict[str, float]:
    """Tags and values of one report."""
    scalars = {
        "learning-rate": record.learning_rate,
        "batch-size": float(record.global_batch_size),
        **record.losses,
        "grad-norm": record.grad_norm,
    }
    if config.log_loss_scale_to_tensorboard:
        scalars["loss-scale"] = record.loss_scale
    if config.log_world_size_to_tensorboard:
        scalars["world-size"] = float(record.world_size)
    if config.log_timers_to_tensorboard:
        scalars["iteration-time"] = record.seconds
    if config.log_memory_to_tensorboard:
        scalars.update(_memory())
    if record.num_zeros is not None:
        scalars["num-zeros"] = record.num_zeros
    if record.params_norm is not None:
        scalars["params-norm"] = record.params_norm
    if config.log_throughput:
        scalars["throughput"] = record.tflops_per_device
    return scalars


def _memory() -> dict[str, float]:
    import torch

    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
    }


def evaluation_scalars(record: EvaluationRecord, config: LoggingConfig) -> dict[str, float]:
    """Tags and values of one evaluation."""
    scalars = {}
    for name, value in record.losses.items():
        scalars[f"{name} {record.split}"] = value
        perplexity = record.perplexity_of(name)
        if config.log_validation_ppl_to_tensorboard and perplexity is not None:
            scalars[f"{name} {record.split} ppl"] = perplexity
    return scalars


def _leave_errors_to_the_next_call() -> None:
    """Let TensorBoard's thread print no traceback: its error is raised again by the next call."""
    usual = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        writes = type(arguments.thread).__name__ == "_AsyncWriterThread"
        if not (writes and isinstance(arguments.exc_value, OSError)):
            usual(arguments)

    threading.excepthook = hook


class TensorBoard:
    """Writes event files; each of Megatron-LM's tags also against consumed samples."""

    def __init__(self, folder: str, config: LoggingConfig) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"`--tensorboard-dir` ({folder}) needs TensorBoard, which is not installed; "
                "run `pip install tensorboard`."
            ) from error
        self._config = config
        _leave_errors_to_the_next_call()
        self.writer: Any = SummaryWriter(folder, max_queue=config.tensorboard_queue_size)

    def on_iteration(self, record: IterationRecord) -> None:
        if record.iteration % self._config.tensorboard_log_interval:
            return
        for tag, value in iteration_scalars(record, self._config).items():
            self.writer.add_scalar(tag, value, record.iteration)
            self.writer.add_scalar(f"{tag} vs samples", value, record.consumed_samples)
        for tag, value in record.common.items():
            self.writer.add_scalar(tag, value, record.iteration)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        for tag, value in evaluation_scalars(record, self._config).items():
            self.writer.add_scalar(tag, value, record.iteration)
            self.writer.add_scalar(f"{tag} vs samples", value, record.consumed_samples)
        for tag, value in record.common.items():
            self.writer.add_scalar(tag, value, record.iteration)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Sends scalars to a Weights & Biases run."""

    def __init__(self, config: LoggingConfig, folder: str, settings: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"`--wandb-project` ({config.wandb_project}) needs Weights & Biases, which is "
                "not installed; run `pip install wandb`."
            ) from error
        self._config = config
        self._run: Any = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity or None,
            dir=config.wandb_save_dir or folder,
            config=settings,
        )

    def on_iteration(self, record: IterationRecord) -> None:
        scalars = iteration_scalars(record, self._config)
        self._run.log(
            {"samples vs steps": record.consumed_samples, **scalars, **record.common},
            step=record.iteration,
        )

    def on_evaluation(self, record: EvaluationRecord) -> None:
        scalars = evaluation_scalars(record, self._config)
        self._run.log({**scalars, **record.common}, step=record.iteration)

    def close(self) -> None:
        self._run.finish()
