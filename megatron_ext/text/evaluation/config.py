"""Flags for scoring a model on lm-eval tasks, during training or by tools/evaluate.py."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.flags import COUNT, NATURAL, SIZE, Range, UsersOwn, derived, flag
from megatron_ext.errors import FlagError


@dataclass(frozen=True)
class TaskEvaluationConfig(UsersOwn):
    """The flags for scoring a model on lm-eval tasks."""

    eval_tasks: list[str] | None = flag(
        None, "tasks of lm-eval to score the model on: names, or YAML files", nargs="+"
    )
    eval_tasks_path: list[str] | None = flag(
        None, "folders with YAML files of further tasks, which --eval-tasks may name", nargs="+"
    )
    eval_tasks_interval: int | None = flag(
        None,
        "score on --eval-tasks after each multiple of this many steps, and at the end",
        COUNT,
        "steps",
    )
    eval_tasks_limit: float | None = flag(
        None, "documents of each task; below 1, their share", Range(0, 1e9, above=True)
    )
    eval_num_fewshot: int | None = flag(
        None, "examples before each question; default: as the task says", NATURAL
    )
    eval_batch_size: int = flag(
        16, "texts that a replica writes at once for --eval-tasks", SIZE, "texts"
    )

    def training_errors(self) -> list[FlagError]:
        """Return an error for each flag that has no effect in training for lack of another."""
        interval = self.eval_tasks_interval
        errors = []
        if self.eval_tasks and interval is None:
            errors.append(
                FlagError(
                    "--eval-tasks",
                    " ".join(self.eval_tasks),
                    "needs `--eval-tasks-interval` in training, the steps between two scores",
                    "add it, or use tools/evaluate.py",
                )
            )
        others = {
            "--eval-tasks-interval": interval,
            "--eval-tasks-path": self.eval_tasks_path,
            "--eval-tasks-limit": self.eval_tasks_limit,
            "--eval-num-fewshot": self.eval_num_fewshot,
        }
        errors += [
            FlagError(
                name, None, "has an effect only with `--eval-tasks`", "add it, or leave this out"
            )
            for name, value in others.items()
            if value is not None and not self.eval_tasks
        ]
        return errors


@dataclass(frozen=True)
class ResultsConfig(UsersOwn):
    """The flags of the scores that tools/evaluate.py writes, and how it makes them."""

    results_file: str | None = flag(None, "JSON file for lm-eval's results")
    apply_chat_template: bool = flag(
        False, "put questions into the tokenizer's chat template, as a user's messages"
    )
    bootstrap_iters: int = flag(
        100, "samples of which standard errors are computed; 0 for none", NATURAL
    )
    trained_date: str | None = derived()
    """The date that the chat template wrote into the training data, YYYY-MM-DD; None if unknown."""
