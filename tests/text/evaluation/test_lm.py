"""The model class that lm-eval calls: beginnings, lengths, options, and the flags of its tasks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.text.evaluation.config import TaskEvaluationConfig
from megatron_ext.text.evaluation.service import Score, ScoreRequest
from megatron_ext.text.generation.decode import Completion, Request
from megatron_ext.text.generation.sampling import Sampling
from megatron_ext.text.tokenizers.base import ByteLevelTokenizer
from tests.text.evaluation.stand_in import module_lm

lm = module_lm()


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


def model_of(chat_tokenizer: Any = None) -> tuple[Any, Service]:
    service: Any = Service()
    return lm.MegatronLM(service, ByteLevelTokenizer(), chat_tokenizer), service


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

    tokenizer = SimpleNamespace(apply_chat_template=apply, get_chat_template=lambda *_: "")
    model, _ = model_of(tokenizer)
    history = [{"role": "user", "content": "a"}]
    assert model.apply_chat_template(history) == "1 messages"
    model.apply_chat_template(history, add_generation_prompt=False)
    names = ("add_generation_prompt", "continue_final_message", "tokenize")
    assert [tuple(x[name] for name in names) for x in given] == [
        (True, False, False),
        (False, True, False),
    ]


class Manager:
    """Stands for lm-eval's manager, which knows tiny from a folder and others by itself.

    Attributes:
        made: for each manager, its folders, and whether it has lm-eval's own tasks.
    """

    made: ClassVar[list[tuple[list[str], bool]]] = []

    def __init__(self, include_path: list[str], include_defaults: bool = True) -> None:
        Manager.made.append((include_path, include_defaults))
        self.all_tasks = ["tiny", "usual"] if include_defaults else ["tiny"]


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], bool]]:
    monkeypatch.setattr(lm, "TaskManager", Manager)
    monkeypatch.setattr(Manager, "made", [])
    return Manager.made


def test_flags_of_tasks_reach_lm_eval(
    managers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    def evaluate(model: Any, **options: Any) -> dict[str, Any]:
        given.append(options)
        return {"results": {}}

    monkeypatch.setattr(lm.lm_eval, "simple_evaluate", evaluate)
    flags = TaskEvaluationConfig(
        eval_tasks=["tiny"], eval_tasks_path=[str(tmp_path)], eval_tasks_limit=3, eval_num_fewshot=2
    )
    model, _ = model_of()
    assert lm.run_tasks(model, flags, bootstrap_iters=7, apply_chat_template=True) == {
        "results": {}
    }
    (options,) = given
    assert options["tasks"] == ["tiny"]
    assert (options["limit"], options["num_fewshot"]) == (3, 2)
    assert (options["bootstrap_iters"], options["apply_chat_template"]) == (7, True)
    # lm-eval must not set the random states of a run.
    seeds = [options[f"{kind}_seed"] for kind in ("random", "numpy_random", "torch_random")]
    assert seeds == [None] * 3
    assert managers == [([str(tmp_path)], False)]


def test_lm_evals_own_tasks_are_searched_only_for_names_that_folders_lack(
    managers: Any, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    file = tmp_path / "own.yaml"
    file.touch()

    def names(*tasks: str) -> list[str]:
        managers.clear()
        flags = TaskEvaluationConfig(eval_tasks=[*tasks], eval_tasks_path=[folder])
        names_of: list[str] = lm.task_manager(flags)[1]
        return names_of

    assert names(str(file), "tiny") == [str(file), "tiny"]
    assert managers == [([folder], False)]
    for name in ("usual", "ti*"):
        assert names("tiny", name) == ["tiny", name]
        assert managers == [([folder], False), ([folder], True)]
    with pytest.raises(
        ConfigError, match=r"`--eval-tasks` \(neither\) is no task of lm-eval or of"
    ):
        names("tiny", "neither", "nor")
