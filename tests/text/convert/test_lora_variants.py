"""Variants of LoRA train as peft does on transformers' class, and load there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.checkpoint.adapter_files import PublicLayers, write_adapters
from megatron_ext.checkpoint.adapter_forms import FORMS
from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.adapter_start import start_adapters
from megatron_ext.layers.chunks import wrap_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.optim.builder import build_optimizer
from megatron_ext.optim.schedule import build_scheduler
from megatron_ext.parallel.context import ParallelContext
from tests.numerics.stock import gpt_config, whole_batch
from tests.ranks import ranks
from tests.text.convert.test_lora import (
    GROUPS,
    LORA,
    MODEL,
    export,
    hugging_face_llama,
    llama_like,
    save,
    tool,
    train,
)
from tests.training_runs import mock_data, train_on_ranks

WORDS = [
    *LORA, "--lora-separate-projections", "--group-query-attention",
    *f"--num-query-groups {GROUPS} --clip-grad 0 --weight-decay 0.1".split(),
    *"--lr 1e-2 --min-lr 1e-2 --lr-decay-style constant".split(),
]  # fmt: skip
STEPS = 3


def trained(
    context: ParallelContext, source: Path, words: list[str], folder: Path
) -> tuple[list[float], list[float], Tensor]:
    """Train three steps; return losses, gradient norms, and the logits at the end."""
    run = gpt_config(*WORDS, *words)
    chunk = llama_like(run, context, source)
    if run.lora.is_principal:
        with torch.no_grad():
            for name, parameter in chunk.named_parameters():
                if ".lora." in name:
                    parameter.fill_(torch.nan)
    start_adapters([chunk], run.lora, context, 1)
    save(run, context, chunk, folder / "start")
    transformer_config = build_transformer_config(run)
    (ddp,) = wrap_chunks([chunk], run, transformer_config, context, torch.device("cpu"))
    optimizer = build_optimizer(run, [ddp], context.pgs)
    build_scheduler(run, optimizer)
    batch = whole_batch(run)
    losses = []
    norms = []
    for _ in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = ddp(batch.tokens, batch.position_ids, None, labels=batch.labels).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(
            float(sum(p.main_grad.square().sum() for p in ddp.parameters() if p.requires_grad))
            ** 0.5
        )
        optimizer.step()
    save(run, context, chunk, folder / "end")
    chunk.eval()
    with torch.no_grad():
        return losses, norms, chunk(batch.tokens, batch.position_ids, None)


def trained_by_peft(model: Any, groups: Any, batch: Any) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(batch.tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(
            float(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))
            ** 0.5
        )
        optimizer.step()
    return losses, norms


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    "variant",
    [
        "",
        "--lora-use-dora",
        "--lora-init pissa",
        "--lora-init pissa --lora-use-dora --lora-use-rslora",
    ],
)
@ranks()
def test_three_steps_are_those_of_peft(
    context: ParallelContext, tmp_path: Path, variant: str
) -> None:
    peft = pytest.importorskip("peft")
    llama = hugging_face_llama()
    llama.save_pretrained(tmp_path / "hf")
    losses, norms, logits = trained(context, tmp_path / "hf", variant.split(), tmp_path)
    batch = whole_batch(gpt_config())
    run = gpt_config(*WORDS, *variant.split())
    if run.lora.is_principal:
        config = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            init_lora_weights="pissa",
            use_dora=run.lora.lora_use_dora,
            use_rslora=run.lora.lora_rslora,
            target_modules=[
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            ],
        )
        model = peft.get_peft_model(llama, config)
    else:
        assert export(run, tmp_path / "start", tmp_path / "adapter") == []
        model = peft.PeftModel.from_pretrained(llama, tmp_path / "adapter", is_trainable=True)
    model.train()
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in own.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in own.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    theirs = trained_by_peft(model, [g for g in groups if g["params"]], batch)
    for ours, want in ((losses, theirs[0]), (norms, theirs[1])):
        assert ours[0] == pytest.approx(want[0], rel=1e-5)
        # Adam divides by gradients of B, which are small in the second step.
        assert ours == pytest.approx(want, rel=1e-4)
    assert export(run, tmp_path / "end", tmp_path / "adapter2") == []
    again = hugging_face_llama()
    model = peft.PeftModel.from_pretrained(again, tmp_path / "adapter2").eval()
    with torch.no_grad():
        want = model(batch.tokens).logits
    assert (logits - want).abs().max() <= 1e-5 * want.abs().max()


VARIANTS = [
    "--lora-use-dora --lora-init pissa --ema-decay 0.5",
    "--lora-use-dora --lora-plus-lr-ratio 4",
]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_go_on_in_another_layout_and_merge(variant: str, tmp_path: Path) -> None:
    words = [*LORA, *variant.split()]
    truth = train(tmp_path / "truth", *words)
    saved = tmp_path / "saved"
    first = train(saved, *words, "--exit-interval", "2")
    assert [*first, *train(tmp_path / "same", *words, "--load", str(saved))] == truth
    layout = "--tensor-model-parallel-size 2 --sequence-parallel".split()
    more = train(tmp_path / "more", *words, "--load", str(saved), *layout, ranks=2)
    assert [*first, *more] == pytest.approx(truth, rel=1e-5)
    assert tool("merge", "--load", saved, "--save", tmp_path / "merged") == 0
    flags = [*MODEL, *mock_data(), "--eval-iters", "2", "--skip-train", "--train-iters", "4"]

    def evaluated(name: str, *more: str) -> float:
        code, rows = train_on_ranks([*flags, *more], save=tmp_path / name)
        assert code == 0
        return float(rows[-1]["lm loss"])

    plain = [word for word in words if not word.startswith("--ema") and word != "0.5"]
    want = evaluated("adapters", *plain, "--load", str(saved))
    assert evaluated("whole", "--load", str(tmp_path / "merged")) == pytest.approx(want, rel=2e-6)


@pytest.mark.parametrize(
    ("form", "experts", "message"),
    [
        ("kohya", 1, r"cannot have magnitudes of `--lora-use-dora` in the form `kohya`"),
        (
            "peft",
            2,
            r"`mlp.up` stacks experts, whose magnitudes \(`--lora-use-dora`\) have no form",
        ),
        ("peft", 1, r"`mlp.up` adds up several layers with magnitudes"),
    ],
)
def test_magnitudes_without_a_form_are_named(
    form: str, experts: int, message: str, tmp_path: Path
) -> None:
    layers = PublicLayers(
        re.compile("x"),
        lambda matrices: {"mlp.up": (torch.ones(4, 3), torch.ones(5, 4))},
        str,
        None,
        experts=lambda _path: experts,
    )
    matrices = {f"x.lora.{name}": torch.ones(5, 2) for name in ("a", "b")}
    matrices["x.lora.magnitude"] = torch.ones(5)
    lora = LoraConfig(lora_rank=2, lora_use_dora=True)
    with pytest.raises(CheckpointError, match=message):
        write_adapters(lora, matrices, layers, tmp_path / "out", FORMS[form])
