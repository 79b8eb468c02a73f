"""Runs that start from a Hugging Face folder, against transformers' class and torch's AdamW."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_ext.train.run import Run
from tests.text.convert.models import EXPERTS, MODELS, ONE_GROUP, make
from tests.training_runs import Rows, train, training_rows

STEPS, RATE, DECAY = 2, 1e-3, 0.1
EPSILON = 1e-5
"""Far above the rounding of gradients that are zero, as those of biases of keys."""
FLAGS = (
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --mock-data --split 100,0,0 "
    "--tokenizer-type NullTokenizer --vocab-size 299 --num-workers 0 --eval-iters 0 "
    f"--log-interval 1 --train-iters {STEPS} --lr {RATE} --min-lr {RATE} --lr-decay-style constant "
    f"--weight-decay {DECAY} --adam-eps {EPSILON} --clip-grad 1 --attention-dropout 0 "
    "--hidden-dropout 0 "
    "--accumulate-allreduce-grads-in-fp32"
).split()
LAYOUTS = {
    "tp2pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "pp2dp2": (4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer"),
    "tp2sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2ep2": (4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
    "tp2pp2ep2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    ),
    "tp2etp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "cp2": (2, "--context-parallel-size 2"),
    "dp2": (2, "--use-distributed-optimizer"),
}


def flags_of(source: Path, *more: str) -> list[str]:
    return ["--load-hf", str(source), *FLAGS, *more]


def record(target: Path, run: Run) -> None:
    """Write the tokens and labels of each step of a run on one rank."""
    steps: list[list[tuple[Tensor, Tensor]]] = []
    following = run.train_source.next_step

    def next_step(num_microbatches: int) -> Any:
        batches = following(num_microbatches)
        assert batches is not None
        steps.append([(batch.tokens.clone(), batch.labels.clone()) for batch in batches])
        torch.save(steps, target)
        return batches

    run.train_source.next_step = next_step  # type: ignore[method-assign]


def truth(source: Path, steps: list[list[tuple[Tensor, Tensor]]]) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step of transformers' class with torch's AdamW."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    # Megatron-LM decays matrices only.
    parameters = list(model.parameters())
    groups: list[Mapping[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([dict(x) for x in groups], lr=RATE, eps=EPSILON)
    found = []
    for batches in steps:
        tokens, labels = (torch.cat([batch[x] for batch in batches]) for x in (0, 1))
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def curve_of(rows: Rows) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step; the second report is of the first two steps."""
    (first, norm), (both, second) = ((x["lm loss"], x["grad_norm"]) for x in training_rows(rows))
    return [(first, norm), (2 * both - first, second)]


def check_model(name: str, layouts: list[str], tmp_path: Path) -> None:
    source, steps = make(name, tmp_path / "hf"), tmp_path / "steps.pt"
    rows = train(flags_of(source), tmp_path / "one", prepare=lambda run: record(steps, run))
    want = truth(source, torch.load(steps))
    assert len(want) == STEPS
    found = {"one": curve_of(rows)}
    for layout in layouts:
        count, words = LAYOUTS[layout]
        flags = flags_of(source, *words.split())
        found[layout] = curve_of(train(flags, tmp_path / layout, count))
    for layout, curve in found.items():
        for ours, theirs in zip(curve, want, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6), (layout, ours, theirs)


QUICK = {"qwen2 tied": ["tp2pp2"], "qwen3_moe": ["tp2pp2ep2"], "mistral with a window": ["pp2dp2"]}


@pytest.mark.parametrize("name", QUICK)
def test_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check_model(name, QUICK[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_steps_of_every_family_on_six_layouts(name: str, tmp_path: Path) -> None:
    if name in EXPERTS:
        layouts = ["tp2pp2ep2", "pp2ep2", "tp2etp2", "pp2dp2", "dp2", "cp2"]
    elif name in ONE_GROUP:
        layouts = ["pp2dp2", "dp2", "cp2"]
    else:
        layouts = ["tp2pp2", "pp2dp2", "tp2sp", "dp2", "cp2"]
    check_model(name, layouts, tmp_path)
