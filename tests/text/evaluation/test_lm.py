"""What lm-eval asks of a model class: beginnings, lengths, options, and the flags of its tasks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed (the extra `eval`)")

from megatron_ext.errors import ConfigError
from megatron_ext.text.evaluation import lm
from megatron_ext.text.evaluation.config import TaskEvaluationConfig
from megatron_ext.text.evaluation.lm import MegatronLM, run_tasks, task_manager
from megatron_ext.text.evaluation.service import Score, ScoreRequest
from megatron_ext.text.generation.decode import Completion, Request
from megatron_ext.text.generation.sampling import Sampling
from megatron_ext.text.tokenizers.base import ByteLevelTokenizer

POSITIONS = 8


class Service:
    """Answers with the requests that it has got: a score is minus the number of scored tokens."""

    forward = SimpleNamespace(max_length=POSITIONS)

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def score(self, rows: list[ScoreRequest]) -> list[Score]:
        return [
            Score(number, -float(len(row.ids) - row.first), number % 2 == 0)
            for number, row in enumerate(rows)
        ]

    def write(self, requests: list[Request]) -> list[Completion]:
        self.requests += requests
        return [Completion(x.number, f"text {x.number}", (), "eos") for x in requests]


def model_of(chat_tokenizer: Any = None) -> tuple[MegatronLM, Service]:
    service: Any = Service()
    return MegatronLM(service, ByteLevelTokenizer(), chat_tokenizer), service


def asked(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def test_a_text_without_context_begins_with_the_token_that_begins_texts() -> None:
    model, _ = model_of()
    tokens = ByteLevelTokenizer()
    tokens.bos = -1
    model._tokens = tokens
    assert model.prefix_token_id == model.eot_token_id == tokens.eod
    tokens.bos = 77
    assert (model.prefix_token_id, model.eot_token_id) == (77, tokens.eod)
    assert model.tok_encode("ab", add_special_tokens=True) == [*b"ab"]
    assert model.tokenizer_name == "ByteLevelTokenizer"
    tokens.path = "a/b"
    assert model.tokenizer_name == "a__b"


def test_continuations_and_windows_of_long_texts_are_scored_once_each() -> None:
    model, _ = model_of()
    pairs = [(("", ""), [1, 2], [3]), (("", ""), [1], [2, 3, 4])]
    assert model._loglikelihood_tokens(pairs) == [(-1.0, True), (-3.0, False)]
    # Of 20 tokens in windows of 8, and of 3 in one, each is scored once.
    assert model.loglikelihood_rolling([asked("x" * 20), asked("abc")]) == [-20.0, -3.0]


def test_contexts_lose_their_beginning_where_the_new_tokens_need_room() -> None:
    model, service = model_of()
    options = {"until": ["."], "max_gen_toks": 5}
    requests = [asked("abcdef", options), asked("gh", {**options, "max_gen_toks": POSITIONS - 1})]
    assert model.generate_until(requests) == ["text 0", "text 1"]
    assert [bytes(request.ids) for request in service.requests] == [b"def", b"h"]
    assert [request.number for request in service.requests] == [0, 1]
    with pytest.raises(ConfigError, match=r"for 8 new tokens, .* \(`--max-position-embeddings` 8"):
        model.generate_until([asked("a", {**options, "max_gen_toks": POSITIONS})])


def test_options_of_a_task_are_those_of_the_texts() -> None:
    model, _ = model_of()
    drawn = {
        "do_sample": True, "temperature": 0.7, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.2,
        "until": ["a", "", "b"], "max_gen_toks": 3,
    }  # fmt: skip
    assert model._sampling(dict(drawn)) == Sampling(
        max_new_tokens=3, do_sample=True, temperature=0.7, top_k=4, top_p=0.9,
        repetition_penalty=1.2, stop_strings=("a", "b"),
    )  # fmt: skip
    # The likeliest token does not depend on how tokens would be drawn.
    greedy = {**drawn, "do_sample": False, "temperature": 0.0}
    assert model._sampling(greedy) == Sampling(
        max_new_tokens=3, repetition_penalty=1.2, stop_strings=("a", "b")
    )


def test_the_chat_template_ends_with_a_question_or_an_open_answer() -> None:
    given: list[dict[str, Any]] = []

    def apply(messages: Any, **options: Any) -> str:
        given.append(options)
        return f"{len(messages)} messages"

    tokenizer = SimpleNamespace(apply_chat_template=apply)
    model, _ = model_of(tokenizer)
    history = [{"role": "user", "content": "a"}]
    assert model.apply_chat_template(history) == "1 messages"
    model.apply_chat_template(history, add_generation_prompt=False)
    names = ("add_generation_prompt", "continue_final_message", "tokenize")
    assert [tuple(x[name] for name in names) for x in given] == [
        (True, False, False),
        (False, True, False),
    ]


TASK = """
task: tiny
dataset_path: json
output_type: generate_until
doc_to_text: a
doc_to_target: a
"""


def test_flags_of_tasks_reach_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.yaml").write_text(TASK)
    given: list[dict[str, Any]] = []

    def evaluate(model: Any, **options: Any) -> dict[str, Any]:
        given.append(options)
        return {"results": {}}

    monkeypatch.setattr(lm.lm_eval, "simple_evaluate", evaluate)
    flags = TaskEvaluationConfig(
        eval_tasks=["tiny"], eval_tasks_path=[str(tmp_path)], eval_tasks_limit=3, eval_num_fewshot=2
    )
    model, _ = model_of()
    assert run_tasks(model, flags, bootstrap_iters=7, apply_chat_template=True) == {"results": {}}
    (options,) = given
    assert options["tasks"] == ["tiny"]
    assert (options["limit"], options["num_fewshot"]) == (3, 2)
    assert (options["bootstrap_iters"], options["apply_chat_template"]) == (7, True)
    # Neither may lm-eval draw its own seeds: a run's random states are not its to set.
    assert {options[f"{kind}_seed"] for kind in ("random", "numpy_random", "torch_random")} == {
        None
    }
    file = str(tmp_path / "tiny.yaml")
    several = TaskEvaluationConfig(eval_tasks=[file, "ti*"], eval_tasks_path=[str(tmp_path)])
    _, names = task_manager(several)
    assert names == [file, "ti*"]
