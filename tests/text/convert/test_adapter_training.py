"""Runs that go on from adapters of peft, against peft on transformers' class with torch's AdamW."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.programs.lora import main as lora
from megatron_ext.train.forking import fork_ranks
from tests.text.convert.models import make, theirs, tokens
from tests.text.convert.test_training import (
    LAYOUTS,
    curve_of,
    flags_of,
    record,
    trained_by_torch,
)
from tests.training_runs import config_of, train

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
    "Mamba-2": (
        "bamba",
        {"target_modules": ["in_proj", "out_proj", *ATTENTION, "gate_proj", "up_proj"]},
    ),
    "mixers and MLPs as layers": (
        "nemotron_h", {"target_modules": ["in_proj", *ATTENTION, "down_proj"]}
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
    found = trained_by_torch(model, steps)
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
    merged = tmp_path / "merged"
    more = ["--adapter-path", str(adapter), "--train-iters", "3", "--save-hf", str(merged)]
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
    assert (theirs(merged / "iter_0000003") - logits).abs().max() <= 1e-5 * scale
    assert (theirs(source) - logits).abs().max() > 1e-2 * scale


LAYOUTS_OF = {
    "dense": ["pp2dp2", "tp2sp", "tp2pp2"],
    "some projections of some layers": ["pp2dp2", "tp2sp"],
    "experts": ["pp2ep2", "pp2dp2", "tp2etp2", "tp2pp2ep2"],
    "experts alone, and routers": ["pp2dp2", "tp2pp2ep2"],
    "stacked experts": ["pp2ep2"],
    "latent": ["pp2ep2", "tp2etp2", "tp2pp2ep2"],
    "Mamba-2": ["tp2pp2"],
    "mixers and MLPs as layers": ["tp2sp"],
}
QUICK = {"dense": ["tp2pp2"], "experts": ["tp2pp2ep2"], "latent": [], "stacked experts": []}


@pytest.mark.parametrize("case", QUICK)
def test_steps_are_those_of_peft(case: str, tmp_path: Path) -> None:
    check(case, QUICK[case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_of_every_case_on_layouts(case: str, tmp_path: Path) -> None:
    check(case, LAYOUTS_OF[case], tmp_path)


ROUTED = "base_model.model.model.layers.0.mlp.experts"


def changed(folder: Path, settings: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Change a folder of peft: entries of its configuration, and tensors (None removes one)."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    file = folder / "adapter_model.safetensors"
    content = {**load_file(file), **tensors}
    save_file({name: x for name, x in content.items() if x is not None}, file)


def layer(name: str, rank: int = 2, inputs: int = 64, outputs: int = 64) -> dict[str, Tensor]:
    stem = f"base_model.model.model.layers.0.{name}"
    return {
        f"{stem}.lora_A.weight": torch.ones(rank, inputs),
        f"{stem}.lora_B.weight": torch.ones(outputs, rank),
    }


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"bias": "all"}, {}, "", "says `bias` 'all', which no layer here computes; only LoRA with"),
    ({"layer_replication": [[0, 2]]}, {}, "", "says `layer_replication` [[0, 2]], which no layer"),
    ({"alpha_pattern": {"k_proj": 64}}, {}, "", "but the adapters of a run have one scale; give"),
    ({}, layer("mlp.gate"), "", "holds an adapter of `layers.0.mlp.gate`, which is none of the"),
    ({"rank_pattern": {"gate_up_proj": 3}}, {}, "", "which must be divisible by its rank (3)"),
    ({}, {f"{ROUTED}.base_layer.lora_A.weight": None}, "", "without A; copy the file again"),
    (
        {},
        {f"{ROUTED}.{x}.weight": None for x in ("lora_A", "lora_B")},
        "",
        "holds 1 adapters of parameters of `layers.0.mlp.experts`, but its `target_parameters`",
    ),
    ({}, {}, "--lora-rank 3", "`--lora-rank` (3) contradicts `--adapter-path` ("),
    ({}, {}, "--lora-target-modules linear_qkv", "(linear_qkv) contradicts `--adapter-path` ("),
    (
        {"modules_to_save": ["q_proj"]},
        {"base_model.model.model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)},
        "",
        "whole, which is no part that `--lora-modules-to-save` names (embedding, output_layer,",
    ),
]  # fmt: skip


def test_what_cannot_be_gone_on_from_is_said_in_one_sentence(tmp_path: Path) -> None:
    source = make("qwen3_moe", tmp_path / "hf")
    settings = {"target_modules": ATTENTION, "target_parameters": EXPERTS}
    whole = start(source, settings, tmp_path / "adapter")
    for number, (described, tensors, words, sentence) in enumerate(REFUSED):
        folder = shutil.copytree(whole, tmp_path / str(number))
        changed(folder, described, tensors)
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            config_of([*flags_of(source), "--adapter-path", str(folder), *words.split()])
        messages = [x for x in caught.value.messages if sentence in x]
        assert messages, (sentence, caught.value.messages)


def test_layers_of_each_expert_and_a_tied_embedding_go_out_and_in(tmp_path: Path) -> None:
    """An expert whose projections have an A each gets one adapter of twice the rank."""
    source = make("qwen3_moe", tmp_path / "hf")
    settings = {
        "target_modules": ATTENTION, "target_parameters": EXPERTS,
        "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True,
    }  # fmt: skip
    first = start(source, settings, tmp_path / "adapter")
    logits = logits_of(source, first)
    steps = ["--train-iters", "1", "--lr", "0", "--min-lr", "0"]
    train(flags_of(source, "--adapter-path", str(first), *steps), tmp_path / "run")
    split = exported(tmp_path / "run", tmp_path / "split", "--format", "peft-experts")
    names = load_file(split / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.1.mlp.experts.3"
    both = [names[f"{stem}.{x}_proj.lora_A.weight"] for x in ("gate", "up")]
    assert torch.equal(*both) and both[0].shape == (2, 64)
    want = logits_of(source, exported(tmp_path / "run", tmp_path / "whole"))
    assert (want - logits).abs().max() <= 1e-5 * logits.abs().max()
    # The A of two projections differ, and the B of one is zero, so that the model is the same.
    other = f"{stem}.up_proj.lora"
    more = {f"{other}_A.weight": both[1] + 1}
    want_b = names[f"{other}_B.weight"]
    changed(split, {}, {**more, f"{other}_B.weight": 0 * want_b})
    train(flags_of(source, "--adapter-path", str(split), *steps), tmp_path / "again")
    back = exported(tmp_path / "again", tmp_path / "back", "--format", "peft-experts")
    config = json.loads((back / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["embed_tokens"] and config["r"] == 4
    found = load_file(back / "adapter_model.safetensors")
    assert found.keys() == names.keys()
    for half in ("A", "B"):
        name = f"{stem}.gate_proj.lora_{half}.weight"
        assert found[name].shape[half == "B"] == 4
    for name in (f"{other}_B.weight", f"{other}_A.weight"):
        assert found[name].shape[name.endswith("B.weight")] == 4
    products = [
        x[f"{stem}.gate_proj.lora_B.weight"] @ x[f"{stem}.gate_proj.lora_A.weight"]
        for x in (names, found)
    ]
    assert torch.allclose(*products, rtol=0, atol=1e-6)
    assert not (found[f"{other}_B.weight"] @ found[f"{other}_A.weight"]).any()
    rest = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(found[rest], names[rest])
