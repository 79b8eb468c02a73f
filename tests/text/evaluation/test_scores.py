"""Scores of lm-eval are those of its own `hf` model in every layout, and training logs them."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("lm_eval", reason="lm_eval is not installed (the extra `eval`)")

from megatron_ext.text.evaluation.tool import evaluate
from megatron_ext.train.forking import fork_ranks
from tests.text.convert.models import imported, in_child
from tests.text.evaluation.tasks import TASKS, prompts, write_tasks
from tests.text.generation.tiny import speaking_model
from tests.text.tiny import hf_folder
from tests.training_runs import train, training_rows

LAYOUTS = {
    "one rank": [],
    "tp2": ["--tensor-model-parallel-size", "2"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "tp2 pp2": ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
    "dp2": [],
    "pp2 dp2": ["--pipeline-model-parallel-size", "2"],
    "ep2": ["--expert-model-parallel-size", "2"],
}
RANKS = {"one rank": 1, "tp2": 2, "pp2": 2, "tp2 pp2": 4, "dp2": 2, "pp2 dp2": 4, "ep2": 2}
IN_CI = ("one rank", "tp2 pp2", "dp2")


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Libraries of lm-eval warn of each other.
    warnings.simplefilter("ignore")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("scores") / "hf")


def tasks_of(source: Path) -> Path:
    """Write tasks beside a model; every second answer is what the model writes."""
    model = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    answers = []
    for index, prompt in enumerate(prompts()):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.size(1) :]
        answers.append(tokenizer.decode(out).split(".")[0] if index % 2 else "none")
    return write_tasks(source.parent / "tasks", answers)


@pytest.fixture(scope="module")
def tasks(source: Path) -> Path:
    return tasks_of(source)


def theirs(source: Path, tasks: Path) -> dict[str, dict[str, float]]:
    """Return the results of lm-eval's own model class."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    # In this process of one rank the library would look for others.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    model = HFLM(pretrained=str(source), device="cpu", batch_size=4, dtype="float32")
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    options: dict[str, Any] = {"bootstrap_iters": 0, "log_samples": False}
    return dict(
        lm_eval.simple_evaluate(model, tasks=list(TASKS), task_manager=manager, **options)[
            "results"
        ]
    )


def ours(root: Path, tasks: Path, layout: str, file: Path) -> dict[str, dict[str, float]]:
    words = ["--load", str(root), "--eval-tasks", *TASKS, "--eval-tasks-path", str(tasks)]
    words += ["--results-file", str(file), "--bootstrap-iters", "0", *LAYOUTS[layout]]
    ranks = RANKS[layout]
    if ranks == 1:
        assert fork_ranks(lambda: evaluate(words), 1) == 0
    else:
        assert evaluate([*words, "--nproc-per-node", str(ranks)]) == 0
    return dict(json.loads(file.read_text())["results"])


def check_scores(source: Path, tasks: Path, tmp_path: Path, layouts: list[str]) -> None:
    root = tmp_path / "ours"
    imported(source, root)
    expected = in_child(lambda: theirs(source, tasks), tmp_path / "theirs")
    assert expected["tiny_writing"]["exact_match,none"] == pytest.approx(0.5, abs=0.2)
    for layout in layouts:
        found = ours(root, tasks, layout, tmp_path / f"{layout}.json")
        for task in TASKS:
            numbers = {k: v for k, v in expected[task].items() if isinstance(v, float)}
            assert numbers
            for name, value in numbers.items():
                assert found[task][name] == pytest.approx(value, rel=1e-4), (layout, name)


def test_scores_are_those_of_lm_evals_own_model(
    source: Path, tasks: Path, tmp_path: Path
) -> None:  # fmt: skip
    check_scores(source, tasks, tmp_path, list(IN_CI))


@pytest.mark.slow
def test_scores_in_further_layouts(source: Path, tasks: Path, tmp_path: Path) -> None:
    further = [name for name in LAYOUTS if name not in (*IN_CI, "ep2")]
    check_scores(source, tasks, tmp_path, further)


def test_scores_with_experts_on_two_ranks(tmp_path: Path) -> None:
    source = speaking_model(tmp_path / "hf", "qwen3_moe")
    check_scores(source, tasks_of(source), tmp_path, ["ep2"])


def test_training_logs_scores_and_goes_on_as_without_them(tasks: Path, tmp_path: Path) -> None:
    flags = [
        *"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split(),
        *"--max-position-embeddings 64 --position-embedding-type rope --mock-data".split(),
        *"--tokenizer-type HuggingFaceTokenizer --micro-batch-size 1 --global-batch-size 2".split(),
        *"--train-iters 3 --lr 1e-3 --num-workers 0 --eval-iters 0 --log-interval 1".split(),
        *"--tensor-model-parallel-size 2 --sequence-parallel".split(),
        *["--tokenizer-model", str(hf_folder())],
    ]
    scored = ["--eval-tasks", *TASKS, "--eval-tasks-path", str(tasks), "--eval-tasks-interval", "2"]
    rows = train([*flags, *scored, "--eval-tasks-limit", "4"], tmp_path / "scored", 2)
    plain = train(flags, tmp_path / "plain", 2)
    losses = [[row["lm loss"] for row in training_rows(found)] for found in (rows, plain)]
    assert losses[0] == losses[1]
    scores = [row for row in rows if row["kind"] == "evaluation"]
    assert [(row["split"], row["iteration"]) for row in scores] == [("tasks", 2), ("tasks", 3)]
    assert {"tiny_choice acc", "tiny_writing exact_match"} <= set(scores[0])
    # The model has not yet learnt to write: its tokens are almost equally likely.
    assert 2 < scores[0]["tiny_perplexity bits_per_byte"] < 5


BAD = {
    "no tasks": ([], "`--eval-tasks` is missing; give names of tasks, or YAML files."),
    "unknown task": (["--eval-tasks", "tiny_none"], "`--eval-tasks` (tiny_none) is no task of"),
    "missing file": (["--eval-tasks", "none.yaml"], "`--eval-tasks` (none.yaml) is no file"),
    "missing folder": (
        ["--eval-tasks", "tiny_choice", "--eval-tasks-path", "none"],
        "`--eval-tasks-path` (none) is no folder",
    ),
    "interval": (
        ["--eval-tasks", "tiny_choice", "--eval-tasks-interval", "2"],
        "`--eval-tasks-interval` is a flag of training; leave it out.",
    ),
    "no template": (
        ["--eval-tasks", "TASK", "--apply-chat-template"],
        "has no chat template, so conversations cannot be tokenized; leave out "
        "`--apply-chat-template`.",
    ),
}


def test_bad_input_is_told_in_one_sentence(
    source: Path, tasks: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words, sentence in BAD.values():
        file = str(tasks / f"{TASKS[0]}.yaml")
        asked = [file if word == "TASK" else word for word in words]
        assert evaluate(["--load-hf", str(source), *asked]) == 2
        told = capfd.readouterr().err.strip()
        assert sentence in told
        assert len(told.splitlines()) == 1, told
