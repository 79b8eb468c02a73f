"""Scores the model of tools/evaluate.py: checks before the run, and what all ranks do in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.config.run import RunConfig
from megatron_ext.text.evaluation.config import ResultsConfig, TaskEvaluationConfig
from megatron_ext.text.evaluation.scores import check_tasks, scored, table
from megatron_ext.text.generation.run import check_output, prepare
from megatron_ext.text.run import with_tokenizer
from megatron_ext.text.sft.chat import load_chat_tokenizer, with_known_date
from megatron_ext.text.tokenizers import TokenizerConfig
from megatron_ext.text.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from megatron_ext.train.run import Run


def prepare_evaluation(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Check before the model is built whether it, the tasks and the results file can be used.

    Return the configuration with the vocabulary size filled in, and the tokenizer.
    """
    config, tokenizer = prepare(config)
    check_output("--results-file", config.section(ResultsConfig).results_file)
    check_tasks(config.section(TaskEvaluationConfig))
    _chat_tokenizer(config, tokenizer)
    return config, tokenizer


def _chat_tokenizer(config: RunConfig, tokenizer: Tokenizer, *, tells: bool = False) -> Any:
    if not config.section(ResultsConfig).apply_chat_template:
        return None
    settings = config.section(TokenizerConfig)
    flag = "--apply-chat-template"
    loaded = load_chat_tokenizer(tokenizer, settings, None, flag=flag, template_flag=None)
    dated, sentence = with_known_date(loaded, config.section(ResultsConfig).trained_date)
    if sentence is not None and tells:
        print(f"> {sentence}", flush=True)
    return dated


def evaluate_model(run: Run) -> None:
    """Score the model on the tasks; on rank 0 print a table and write the results file."""
    config, tokenizer = with_tokenizer(run.config)
    own = config.section(ResultsConfig)
    flags = config.section(TaskEvaluationConfig)
    chat_tokenizer = None
    if run.context.rank == 0:
        chat_tokenizer = _chat_tokenizer(config, tokenizer, tells=True)
    results = scored(
        run,
        tokenizer,
        flags,
        bootstrap_iters=own.bootstrap_iters,
        chat_tokenizer=chat_tokenizer,
    )
    if results is None:
        return
    from lm_eval.utils import handle_non_serializable

    print("\n".join(table(results)), flush=True)
    if own.results_file is not None:
        text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        Path(own.results_file).write_text(text + "\n", encoding="utf-8")
