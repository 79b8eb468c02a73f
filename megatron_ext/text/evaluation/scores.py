"""Scores a run's model on tasks of lm-eval, once or during training."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.text.evaluation.config import TaskEvaluationConfig
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.callbacks.callback import Callback, due
from megatron_ext.train.reporting.records import EvaluationRecord

if TYPE_CHECKING:
    from megatron_ext.train.run import Run


def check_tasks(flags: TaskEvaluationConfig) -> None:
    """Raise a ConfigError if lm-eval is not installed, or lacks a task that the flags give."""
    if find_spec("lm_eval") is None:
        raise ConfigError(
            f"`--eval-tasks` ({' '.join(flags.eval_tasks or ())}) needs the package lm_eval, which "
            "is not installed; run `pip install 'lm-eval>=0.4.13'`."
        )
    from megatron_ext.text.evaluation.lm import task_manager

    task_manager(flags)


def check_training(config: RunConfig) -> None:
    """Raise a ConfigError if a run cannot score its model on ``--eval-tasks`` during training.

    It cannot if lm-eval or a task is missing, or if its flags rule out a key-value cache.
    """
    from megatron_ext.text.generation.forward import check_model

    check_model(config)
    check_tasks(config.section(TaskEvaluationConfig))


def scored(
    run: Run,
    tokenizer: Tokenizer,
    flags: TaskEvaluationConfig,
    *,
    bootstrap_iters: int = 0,
    chat_tokenizer: Any = None,
) -> dict[str, Any] | None:
    """Score the run's model on the tasks that the flags give; all ranks call this together.

    Return lm-eval's results on rank 0, elsewhere None.

    Args:
        bootstrap_iters: number of bootstrap samples for standard errors; 0 computes no such errors.
        chat_tokenizer: a tokenizer whose chat template is applied to the questions; None leaves the
            questions as they are.
    """
    # Imported here, since a run that scores nothing does not need them.
    from megatron_ext.text.evaluation.service import ModelService
    from megatron_ext.text.generation.decode import Decoder
    from megatron_ext.text.generation.forward import PackedForward
    from megatron_ext.text.generation.requests import end_tokens

    forward = PackedForward.of_run(run)
    ends = end_tokens(run.config, tokenizer)
    decoder = Decoder(forward, tokenizer, ends, batch_size=flags.eval_batch_size)
    service = ModelService(forward, decoder)

    def work() -> dict[str, Any]:
        from megatron_ext.text.evaluation.lm import MegatronLM, run_tasks

        return run_tasks(
            MegatronLM(service, tokenizer, chat_tokenizer),
            flags,
            bootstrap_iters=bootstrap_iters,
            apply_chat_template=chat_tokenizer is not None,
        )

    return service.lead(work, "Scoring on `--eval-tasks`")


def values_of(results: dict[str, Any]) -> dict[str, tuple[float, Any]]:
    """Return (value, standard error) of each metric in lm-eval's results, by name.

    A name is "task metric", such as "hellaswag acc", or "task metric filter" if the answers are
    filtered. The standard error may be "N/A". Tasks come first, then groups of tasks.
    """
    values = {}
    for task, metrics in {**results["results"], **results.get("groups", {})}.items():
        for key, value in metrics.items():
            name, _, filtered = key.partition(",")
            if isinstance(value, (int, float)) and filtered and not name.endswith("_stderr"):
                suffix = "" if filtered == "none" else f" {filtered}"
                error = metrics.get(f"{name}_stderr,{filtered}", "N/A")
                values[f"{task} {name}{suffix}"] = float(value), error
    return values


def table(results: dict[str, Any]) -> list[str]:
    """Return the lines of a table of the metrics in lm-eval's results."""
    values = values_of(results)
    width = max(map(len, values), default=0)
    lines = [f"{'task and metric':<{width}}         value     stderr"]
    for name, (value, error) in values.items():
        stderr = f"{error:10.4f}" if isinstance(error, float) else f"{error:>10}"
        lines.append(f"{name:<{width}}  {value:>12.6g} {stderr}")
    return lines


class TaskScores(Callback):
    """Scores the model on ``--eval-tasks`` every ``--eval-tasks-interval`` steps and at the end."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        from megatron_ext.text.generation.forward import PackedForward

        self._flags = run.config.section(TaskEvaluationConfig)
        PackedForward.of_run(run)  # Raises before the first step if it cannot run the model.
        self._tokenizer: Tokenizer | None = None
        self._scored_at: int | None = None

    def after_step(self) -> None:
        if due(self.run.progress.iteration, self._flags.eval_tasks_interval):
            self._score()

    def on_train_end(self) -> None:
        ends = self.run.progress.iteration == self.run.num_iterations
        if ends and self._scored_at != self.run.progress.iteration:
            self._score()

    def _score(self) -> None:
        run = self.run
        iteration = self.run.progress.iteration
        if self._tokenizer is None:
            self._tokenizer = build_tokenizer(run.config.section(TokenizerConfig))
        with run.parameter_gather.paused():
            results = scored(run, self._tokenizer, self._flags)
        values = {} if results is None else values_of(results)
        given: list[Any] = [{name: value for name, (value, _) in values.items()}]
        torch.distributed.broadcast_object_list(given, src=0)
        self._scored_at = iteration
        run.reporters.on_evaluation(
            EvaluationRecord(
                split="tasks",
                iteration=iteration,
                losses=given[0],
                consumed_samples=run.progress.consumed_train_samples,
                perplexity=False,
                title="task scores",
            )
        )
