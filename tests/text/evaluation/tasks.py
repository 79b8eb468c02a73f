"""Three tasks of lm-eval in YAML files, with their data: choice, perplexity, generation."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.text.tiny import sentences

TASKS = ("tiny_choice", "tiny_perplexity", "tiny_writing")
_METRICS = {
    "tiny_choice": ("acc", "acc_norm"),
    "tiny_perplexity": ("word_perplexity", "bits_per_byte"),
    "tiny_writing": ("exact_match",),
}
_SPECIAL = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
    },
    "tiny_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
    },
    "tiny_writing": {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 6, "do_sample": False},
    },
}


def prompts() -> list[str]:
    """Return the beginnings of texts of the task of generation."""
    return [" ".join(text.split()[:3]) for text in sentences()[:10]]


def write_tasks(folder: Path, answers: Sequence[str]) -> Path:
    """Write the tasks and their data into a folder; ``answers`` are those of `prompts`."""
    folder.mkdir()
    dice = random.Random(7)
    rows: dict[str, list[dict[str, object]]] = {name: [] for name in TASKS}
    for text in sentences()[10:22]:
        words = text.split()
        choices = [f" {' '.join(dice.sample(words, k=2))}" for _ in range(3)]
        rows["tiny_choice"].append(
            {"question": " ".join(words[:-2]), "choices": choices, "label": dice.randrange(3)}
        )
    # Some are longer than the model has positions, and are scored in windows.
    rows["tiny_perplexity"] = [{"text": " ".join(sentences()[i : i + 6])} for i in range(0, 60, 9)]
    rows["tiny_writing"] = [
        {"prompt": prompt, "answer": answer}
        for prompt, answer in zip(prompts(), answers, strict=True)
    ]
    for name in TASKS:
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "metric_list": [{"metric": metric} for metric in _METRICS[name]],
            **_SPECIAL[name],
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder
