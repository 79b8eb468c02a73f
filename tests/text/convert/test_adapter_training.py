"""Runs that go on from adapters of peft, against peft on transformers' class with torch's AdamW."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_ext.programs.lora import main as lora
from megatron_ext.train.launch import fork_ranks
from tests.text.convert.models import make, theirs, tokens
from tests.text.convert.test_training import (
    DECAY,
    EPSILON,
    LAYOUTS,
    RATE,
    curve_of,
    flags_of,
    record,
)
from tests.training_runs import train

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning"
)

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (
        "llama",
        {
            "target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
            "modules_to_save": ["embed_tokens", "lm_head", "norm"],
        },
    ),
    "some projections of some layers": (
        "qwen3",
        {"target_modules": ["q_proj", "v_proj", "down_proj"], "layers_to_transform": [1]},
    ),
    "experts": (
        "qwen3_moe unnormalized",
        # peft 0.21 makes them parameters of experts, that of both with twice the rank.
        {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    ),
    "experts alone, and routers": (
        "mixtral",
        {"target_modules": [], "target_parameters": EXPERTS[:1], "modules_to_save": ["mlp.gate"]},
    ),
    "stacked experts": ("gpt_oss", {"target_modules": ["o_proj"], "target_parameters": EXPERTS}),
    "latent": (
        "deepseek_v3",
        {
            "target_modules": [
                "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
            ],
            "target_parameters": [
                *EXPERTS, *(f"shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")),
                "mlp.down_proj.weight",
            ],
        },
    ),
}  # fmt: skip


def start(source: Path, settings: dict[str, Any], folder: Path) -> Path:
    """Save adapters with random A and B, and parts trained whole that have been changed."""
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = peft.LoraConfig(r=2, lora_alpha=6, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(base, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def truth(
    source: Path, adapter: Path, steps: list[list[tuple[Tensor, Tensor]]]
) -> tuple[list[tuple[float, float]], Tensor]:
    """Return loss and gradient norm of each step of peft's model, and its logits at the end."""
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[Mapping[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([dict(x) for x in groups], lr=RATE, eps=EPSILON)
    found = []
    for batches in steps:
        ids, labels = (torch.cat([batch[x] for batch in batches]) for x in (0, 1))
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    with torch.no_grad():
        return found, model.eval()(tokens()).logits


def exported(run: Path, target: Path, *words: str) -> Path:
    command = ["export", "--load", str(run), "--output", str(target), *words]
    assert fork_ranks(lambda: lora(command), 1) == 0
    return target


def logits_of(source: Path, adapter: Path) -> Tensor:
    """Return the logits of adapters that peft has loaded."""
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        logits: Tensor = model(tokens()).logits
    return logits


def check(case: str, layouts: list[str], tmp_path: Path) -> None:
    """Compare three steps from a folder of peft on one rank and in layouts with peft's own."""
    name, settings = CASES[case]
    source = make(name, tmp_path / "hf")
    adapter = start(source, settings, tmp_path / "adapter")
    more = ["--adapter-path", str(adapter), "--train-iters", "3"]
    steps = tmp_path / "steps.pt"
    rows = train(flags_of(source, *more), tmp_path / "one", prepare=lambda run: record(steps, run))
    want, logits = truth(source, adapter, torch.load(steps))
    found = {"one": curve_of(rows)}
    for layout in layouts:
        count, words = LAYOUTS[layout]
        found[layout] = curve_of(
            train(flags_of(source, *more, *words.split()), tmp_path / layout, count)
        )
    for layout, curve in found.items():
        assert len(curve) == 3
        for index, (loss, norm) in enumerate(want):
            assert curve[index] == (
                pytest.approx(loss, rel=2e-6), pytest.approx(norm, rel=1e-5)
            ), (layout, index)  # fmt: skip
    last = [*found][-1]
    ours = logits_of(source, exported(tmp_path / last, tmp_path / "exported"))
    scale = logits.abs().max()
    assert (ours - logits).abs().max() <= 1e-5 * scale
    assert (theirs(source) - logits).abs().max() > 1e-2 * scale


LAYOUTS_OF = {
    "dense": ["pp2dp2", "tp2sp", "tp2pp2"],
    "some projections of some layers": ["pp2dp2", "tp2sp"],
    "experts": ["pp2ep2", "pp2dp2", "tp2etp2", "tp2pp2ep2"],
    "experts alone, and routers": ["pp2dp2", "tp2pp2ep2"],
    "stacked experts": ["pp2ep2"],
    "latent": ["pp2ep2", "tp2etp2", "tp2pp2ep2"],
}
QUICK = {"dense": ["tp2pp2"], "experts": ["tp2pp2ep2"], "latent": [], "stacked experts": []}


@pytest.mark.parametrize("case", QUICK)
def test_steps_are_those_of_peft(case: str, tmp_path: Path) -> None:
    check(case, QUICK[case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_of_every_case_on_layouts(case: str, tmp_path: Path) -> None:
    check(case, LAYOUTS_OF[case], tmp_path)
