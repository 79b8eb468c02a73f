"""The program tools/evaluate.py: scores a checkpoint on tasks of lm-eval, in any layout.

What needs torch is in `text.evaluation.run`, so that the flags are read without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.config.run import RunConfig
from megatron_ext.text.evaluation.config import ResultsConfig, TaskEvaluationConfig
from megatron_ext.text.generation.tool import inference_rules, inference_task, run_model
from megatron_ext.train.task import later

RUN = "megatron_ext.text.evaluation.run"


def evaluation_rules(given: RunConfig, run: RunConfig) -> list[str]:
    """Return the errors in the flags of tools/evaluate.py.

    ``given`` has the user's flags, ``run`` the flags with derived values.
    """
    errors = inference_rules(given, run)
    if not run.section(TaskEvaluationConfig).eval_tasks:
        errors.append("`--eval-tasks` is missing; give names of tasks, or YAML files.")
    if run.section(TaskEvaluationConfig).eval_tasks_interval is not None:
        errors.append("`--eval-tasks-interval` is a flag of training; leave it out.")
    return errors


EVALUATION = replace(
    inference_task(TaskEvaluationConfig, ResultsConfig),
    rules=evaluation_rules,
    preflight=later(f"{RUN}:prepare_evaluation"),
)


def evaluate(argv: Sequence[str]) -> int:
    """Run tools/evaluate.py with command-line arguments; return its exit code."""
    return run_model(argv, EVALUATION, "tools/evaluate.py", later(f"{RUN}:evaluate_model"), {})
