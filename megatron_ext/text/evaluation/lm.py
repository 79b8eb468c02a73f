"""Runs lm-eval's tasks on a model of this package, which it wraps in lm-eval's class for models.

The package lm_eval must be installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron_ext.errors import ConfigError
from megatron_ext.text.evaluation.config import TaskEvaluationConfig
from megatron_ext.text.evaluation.service import ModelService, ScoreRequest
from megatron_ext.text.generation.decode import Request
from megatron_ext.text.generation.sampling import Sampling
from megatron_ext.text.sft.templates import apply_template
from megatron_ext.text.tokenizers.base import NO_TOKEN, Tokenizer

Encoded = tuple[tuple[str, str], list[int], list[int]]


class MegatronLM(TemplateLM):  # type: ignore[misc]
    """A model of this package, in any parallel layout, as lm-eval's tasks call it.

    Only rank 0 has an instance. Texts are tokenized as in training: a begin-of-text token is added
    only with ``--tokenizer-hf-include-special-tokens``.

    Args:
        chat_tokenizer: a tokenizer of transformers with a chat template; None if there is none.
    """

    def __init__(
        self, service: ModelService, tokenizer: Tokenizer, chat_tokenizer: Any = None
    ) -> None:
        super().__init__()
        self._service = service
        self._tokens = tokenizer
        self.tokenizer = chat_tokenizer
        self.max_length = service.forward.max_length

    @property
    def eot_token_id(self) -> int:
        """Return the id of the token that ends a text."""
        return self._tokens.eod

    @property
    def prefix_token_id(self) -> int:
        """Return the id of the token that is put before a text without a context."""
        return self._tokens.bos if self._tokens.bos != NO_TOKEN else self._tokens.eod

    @property
    def tokenizer_name(self) -> str:
        """Return a name of the tokenizer, which lm-eval puts into the keys of its cache."""
        return str(self._tokens.path or self._tokens.kind).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_kwargs: Any
    ) -> list[int]:
        """Return the tokens of a text, as in training; ``add_special_tokens`` has no effect."""
        return self._tokens.tokenize(string)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the messages of a chat as one text, written by the tokenizer's chat template.

        With ``add_generation_prompt`` the text ends with the beginning of a new answer. Without it,
        the last message is left open, so that the model continues it.
        """
        return str(
            apply_template(
                self.tokenizer,
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], **_kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-probability, whether greedy decoding would give it) for each continuation.

        A request is ((context, continuation), ids of the context, ids of the continuation). If the
        two are too long for the model, they lose their beginning.
        """
        fitting = [
            ScoreRequest.of_continuation(context, continuation, self.max_length)
            for _, context, continuation in requests
        ]
        return [(score.log_prob, score.is_greedy) for score in self._service.score(fitting)]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each whole text, computed in windows of `max_length`."""
        windows: list[Encoded] = []
        counts = []
        for request in requests:
            (text,) = request.args
            own = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            before = len(windows)
            windows += [(("", ""), *make_disjoint_window(window)) for window in own]
            counts.append(len(windows) - before)
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the model's continuation of each context.

        A context that leaves too little room for new tokens loses its beginning. Raise a
        ConfigError if a task asks for as many new tokens as the model has positions, or more.
        """
        completion_requests = []
        for number, request in enumerate(requests):
            context, options = request.args
            sampling = self._sampling(options)
            room = self.max_length - sampling.max_new_tokens
            if room <= 0:
                raise ConfigError(
                    f"A task asks for {sampling.max_new_tokens} new tokens, but must ask for fewer "
                    f"than the model has positions (`--max-position-embeddings` {self.max_length})"
                    "; give it fewer as `max_gen_toks` in its `generation_kwargs`."
                )
            ids = tuple(self.tok_encode(context)[-room:])
            completion_requests.append(Request(number, ids, sampling))
        return [completion.text for completion in self._service.write(completion_requests)]

    def _sampling(self, given: dict[str, Any]) -> Sampling:
        options = normalize_gen_kwargs(given)
        names = ("temperature", "top_k", "top_p", "repetition_penalty")
        taken = {name: options[name] for name in names if options.get(name) is not None}
        if not options["do_sample"]:
            taken = {k: v for k, v in taken.items() if k == "repetition_penalty"}
        return Sampling(
            max_new_tokens=options["max_gen_toks"],
            do_sample=bool(options["do_sample"]),
            stop_strings=tuple(stop for stop in options["until"] if stop),
            **taken,
        )


def task_manager(flags: TaskEvaluationConfig) -> tuple[TaskManager, list[str]]:
    """Return lm-eval's task manager, and the names of the tasks that the flags give.

    Searching lm-eval's own tasks takes long. They are searched only if a name is not found in the
    folders of ``--eval-tasks-path``.

    Raises:
        ConfigError: a task is unknown.
    """
    tasks = list(flags.eval_tasks or ())
    for name in tasks:
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise ConfigError(f"`--eval-tasks` ({name}) is no file; give a name or a YAML file.")
    folders = list(flags.eval_tasks_path or ())
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(
                f"`--eval-tasks-path` ({folder}) is no folder; give one with YAML files of tasks."
            )
    names = [name for name in tasks if not name.endswith((".yaml", ".yml"))]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folders)
    unknown = [name for name in names if name not in manager.all_tasks and "*" not in name]
    if unknown:
        raise ConfigError(
            f"`--eval-tasks` ({unknown[0]}) is no task of lm-eval or of `--eval-tasks-path`; give "
            "the name that stands under `task` in its YAML file."
        )
    return manager, tasks


def run_tasks(
    model: MegatronLM,
    flags: TaskEvaluationConfig,
    *,
    bootstrap_iters: int,
    apply_chat_template: bool = False,
) -> dict[str, Any]:
    """Score a model on the tasks that the flags give; return lm-eval's results.

    The results omit the individual questions and answers.

    Args:
        bootstrap_iters: number of bootstrap samples for standard errors; 0 computes no such errors.
        apply_chat_template: whether to put the questions into the tokenizer's chat template.
    """
    manager, tasks = task_manager(flags)
    results = lm_eval.simple_evaluate(
        model,
        tasks=tasks,
        task_manager=manager,
        num_fewshot=flags.eval_num_fewshot,
        limit=_limit(flags.eval_tasks_limit),
        bootstrap_iters=bootstrap_iters,
        apply_chat_template=apply_chat_template,
        log_samples=False,
        random_seed=None,
        numpy_random_seed=None,
        torch_random_seed=None,
    )
    assert results is not None
    return dict(results)


def _limit(given: float | None) -> float | None:
    return int(given) if given is not None and given >= 1 else given
