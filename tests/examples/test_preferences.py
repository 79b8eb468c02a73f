"""examples/dpo/train.py: its losses and gradients are those of plain torch, in any layout."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from examples.dpo import train as preferences
from examples.dpo.train import TASK
from megatron_ext.config.parser import parse_args
from megatron_ext.errors import MegatronExtError
from tests.examples.scripts import rows as rows_of
from tests.examples.scripts import smoke
from tests.text.sft import tiny
from tests.training_runs import train_on_ranks, train_steps

BETA = 0.3
PAIRS: list[dict[str, Any]] = [
    {"prompt": "one two", "chosen": "three four five", "rejected": "five"},
    {
        "prompt": [{"role": "user", "content": "six"}],
        "chosen": [{"role": "assistant", "content": "seven eight"}],
        "rejected": [{"role": "assistant", "content": "eight seven six five"}],
    },
    # Whole conversations: what they have in common is the prompt, an answer among it.
    {
        side: [
            {"role": "user", "content": "nine"},
            {"role": "assistant", "content": "ten nine"},
            {"role": "user", "content": "ten"},
            {"role": "assistant", "content": answer},
        ]
        for side, answer in (("chosen", "eleven"), ("rejected", "twelve eleven nine"))
    },
    {"prompt": "one", "chosen": "two", "rejected": "three two"},
]
RUN = (
    "--seq-length 192 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --eval-iters 0 "
    "--log-interval 1 --lr 1e-2 --lr-decay-style constant --weight-decay 0 --attention-dropout 0 "
    f"--hidden-dropout 0 --make-vocab-size-divisible-by 1 --dpo-beta {BETA}"
).split()
NAMES = ("dpo loss", "rewards/margins", "rewards/accuracies", "logps/rejected", "grad_norm")
LLAMA = {"model_type": "llama", "num_key_value_heads": 2}
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "head_dim": 8, "num_key_value_heads": 2, "norm_topk_prob": True,
}  # fmt: skip


def make_model(folder: Path, tokenizer: Any, seed: int, kind: dict[str, Any]) -> None:
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 192,
        "vocab_size": len(tokenizer) + len(tokenizer) % 2,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**sizes, **kind}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + ("norm" in name))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file of pairs, a policy and a reference of each kind."""
    folder = tmp_path_factory.mktemp("preferences")
    tiny.write_jsonl(folder / "pairs.jsonl", PAIRS)
    tokenizer = AutoTokenizer.from_pretrained(tiny.save(folder / "tokenizer"))
    for name, kind in (("llama", LLAMA), ("experts", EXPERTS)):
        make_model(folder / name, tokenizer, 1, kind)
        make_model(folder / f"{name}-reference", tokenizer, 2, kind)
    return folder


def conversations(tokenizer: Any) -> list[tuple[Tensor, int]]:
    """Return ids and length of the prompt of the chosen and the rejected answer of all pairs."""
    found = []
    for row in PAIRS:
        for side in ("chosen", "rejected"):
            prompt, answer = row.get("prompt"), row[side]
            if prompt is None:
                prompt, answer = answer[:-1], answer[-1:]
            elif isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
                answer = [{"role": "assistant", "content": answer}]
            whole = tokenizer.apply_chat_template([*prompt, *answer], tokenize=False)
            before = tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            )
            assert whole.startswith(before)
            ids = tokenizer(whole, add_special_tokens=False, return_tensors="pt").input_ids
            count = len(tokenizer(before, add_special_tokens=False).input_ids)
            found.append((ids, count))
    return found


def log_probs(model: Any, rows: list[tuple[Tensor, int]], *, mean: bool) -> Tensor:
    """Return the log probability of each answer as ``[pairs, 2]``."""
    sums = []
    for ids, count in rows:
        logits = model(ids).logits[0, :-1].log_softmax(-1)
        tokens = logits.gather(1, ids[0, 1:, None])[count - 1 :, 0]
        sums.append(tokens.mean() if mean else tokens.sum())
    return torch.stack(sums).view(-1, 2)


def plain(made: Path, name: str, loss: str, steps: int) -> list[dict[str, float]]:
    """Train transformers' model by the published formulas on one rank."""
    tokenizer = AutoTokenizer.from_pretrained(made / name)
    rows = conversations(tokenizer)
    policy = AutoModelForCausalLM.from_pretrained(made / name)
    reference = AutoModelForCausalLM.from_pretrained(made / f"{name}-reference")
    mean = loss == "ipo"
    with torch.no_grad():
        fixed = log_probs(reference, rows, mean=mean)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0)
    found = []
    for _ in range(steps):
        scores = log_probs(policy, rows, mean=mean)
        ratios = scores - fixed
        margins = BETA * (ratios[:, 0] - ratios[:, 1])
        if mean:
            values = (margins / BETA - 1 / (2 * BETA)) ** 2
        else:
            values = -0.9 * F.logsigmoid(margins) - 0.1 * F.logsigmoid(-margins)
        optimizer.zero_grad()
        values.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        found.append(
            {
                "dpo loss": values.mean().item(),
                "rewards/margins": margins.mean().item(),
                "rewards/accuracies": (margins > 0).float().mean().item(),
                "logps/rejected": scores[:, 1].mean().item(),
                "grad_norm": norm.item(),
            }
        )
    return found


def run(made: Path, name: str, save: Path, words: str, ranks: int) -> list[list[float]]:
    flags = [
        *RUN, "--load-hf", str(made / name), "--dpo-data", str(made / "pairs.jsonl"),
        "--dpo-reference-hf", str(made / f"{name}-reference"), *words.split(),
    ]  # fmt: skip
    rows = train_steps(flags, save, ranks, task=TASK)
    return [[row[key] for key in NAMES] for row in rows]


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "one": ("llama", "", 1),
    "tp": ("llama", TP2, 2),
    "pp": ("llama", PP2, 2),
    "cp": ("llama", "--context-parallel-size 2", 2),
    "dp": ("llama", "--use-distributed-optimizer", 2),
    "tp pp": ("llama", f"{TP2} {PP2} --micro-batch-size 2", 4),
    "experts": ("experts", f"--expert-model-parallel-size 2 --moe-aux-loss-coeff 0 {PP2}", 4),
}
SOME_SLOW = [
    x if x in ("tp pp", "cp") else pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS
]


@pytest.mark.parametrize("layout", SOME_SLOW)
def test_steps_are_those_of_plain_torch(made: Path, tmp_path: Path, layout: str) -> None:
    name, words, ranks = LAYOUTS[layout]
    found = run(made, name, tmp_path / "run", f"{words} --dpo-label-smoothing 0.1", ranks)
    for mine, theirs in zip(found, plain(made, name, "sigmoid", 3), strict=True):
        assert mine == pytest.approx([theirs[key] for key in NAMES], rel=1e-5, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp pp", "cp", "dp"])
def test_ipo(made: Path, tmp_path: Path, layout: str) -> None:
    name, words, ranks = LAYOUTS[layout]
    found = run(made, name, tmp_path / "run", f"{words} --dpo-loss ipo", ranks)
    for mine, theirs in zip(found, plain(made, name, "ipo", 3), strict=True):
        assert mine == pytest.approx([theirs[key] for key in NAMES], rel=2e-5)


def flags_of(made: Path, words: str) -> list[str]:
    data = ["--load-hf", str(made / "llama"), "--dpo-data", str(made / "pairs.jsonl")]
    return [*RUN, *data, *words.split()]


@pytest.mark.parametrize("start", ["kaiming", "pissa"])
def test_the_start_is_the_reference_and_chosen_answers_win(
    made: Path, tmp_path: Path, start: str
) -> None:
    words = (
        f"--lora-init {start} --lora-rank 8 --lora-alpha 16 --train-iters 16 --global-batch-size 4"
    )
    rows = train_steps(flags_of(made, words), tmp_path / "run", 1, task=TASK)
    assert rows[0]["dpo loss"] == pytest.approx(math.log(2))
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert rows[-1]["rewards/accuracies"] == 1
    assert rows[-1]["rewards/margins"] > 1 > 5 * rows[-1]["dpo loss"]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--lora-rank 4"])
def test_a_resumed_run_goes_on_to_the_same_bits(made: Path, tmp_path: Path, words: str) -> None:
    flags = flags_of(made, f"{words} --train-iters 4 --save-interval 2")
    whole = train_steps(flags, tmp_path / "whole", 2, task=TASK)
    train_steps([*flags, "--exit-interval", "2"], tmp_path / "cut", 2, task=TASK)
    rest = train_steps([*flags, "--load", str(tmp_path / "cut")], tmp_path / "cut", 2, task=TASK)
    for key in NAMES:
        assert [row[key] for row in rest][-2:] == [row[key] for row in whole][-2:]


@pytest.mark.slow
def test_lost_scores_are_computed_again_without_the_adapters_or_refused(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in ("--lora-rank 4", ""):
        save = tmp_path / ("adapters" if words else "whole")
        flags = flags_of(made, f"{words} --train-iters 4 --save-interval 2")
        train_steps([*flags, "--exit-interval", "2"], save, 2, task=TASK)
        before = np.load(save / "reference.npz")["scores"]
        (save / "reference.npz").unlink()
        code, rows = train_on_ranks([*flags, "--load", str(save)], ranks=2, save=save, task=TASK)
        if words:
            assert np.allclose(before, np.load(save / "reference.npz")["scores"], atol=1e-4)
            assert rows[-1]["iteration"] == 4
        else:
            assert code == 2
            assert "give the starting model by `--dpo-reference-hf`" in capfd.readouterr().err


BAD: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str, str]] = {
    "no answer": (lambda rows: rows[1].pop("rejected"), "", "row 2 must be a JSON object with `c"),
    "no prompt": (lambda rows: rows[0].pop("prompt"), "", "row 1 has no `prompt`, and `chosen`"),
    "another prompt": (
        lambda rows: rows[2].update(prompt="one"), "", "row 3 has a `prompt` that is none of the"
    ),
    "too long": (lambda rows: None, "--seq-length 16", "for its two conversations, but `--seq-le"),
    "apart": (
        lambda rows: rows[2]["chosen"].pop(0), "", "row 3 has conversations with 0 messages in"
    ),
    "beta": (lambda rows: None, "--dpo-beta 0", "`--dpo-beta` (0.0) must be above 0; use 0.1"),
    "smoothing": (
        lambda rows: None,
        "--dpo-loss ipo --dpo-label-smoothing 0.1",
        "`--dpo-label-smoothing` goes with `--dpo-loss sigmoid`; leave it out",
    ),
    "reference": (
        lambda rows: None,
        f"--dpo-reference-hf {Path(__file__).parent}",
        "config.json cannot be read (No such file or directory)",
    ),
    "loss": (lambda rows: None, "--mtp-num-layers 1", "`--mtp-num-layers` is left out of"),
}  # fmt: skip


def test_a_prompt_is_not_repeated_and_unused_values_are_named(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows as those of UltraFeedback have a prompt, which both conversations begin with."""
    monkeypatch.setattr(preferences, "REFERENCE", reference := preferences.Reference())
    turns = PAIRS[2]["chosen"][:3]
    rows = [{**PAIRS[2], "prompt": x, "score": 7} for x in ("nine", "ten", turns[:1], turns)]
    rows += [PAIRS[2], {**PAIRS[1], "rejected": PAIRS[1]["chosen"]}]
    pairs = tiny.write_jsonl(tmp_path / "pairs.jsonl", rows)
    flags = [*flags_of(made, f"--save {tmp_path / 'run'}"), "--dpo-data", str(pairs)]
    preferences.prepare(parse_args(flags, TASK, world_size=1, device="cpu").config)
    assert reference.datasets is not None
    read = reference.datasets[0].pairs
    assert read[0] == read[1] == read[2] == read[3] == read[4]
    ignored, equal = reference.unused
    assert ignored.endswith(": column `score` (4)")
    assert equal == "1 pairs have equal answers, which teach nothing"


@pytest.mark.parametrize("name", BAD)
def test_bad_pairs(made: Path, tmp_path: Path, name: str) -> None:
    change, words, sentence = BAD[name]
    rows = json.loads(json.dumps(PAIRS))
    change(rows)
    pairs = tiny.write_jsonl(tmp_path / "pairs.jsonl", rows)
    flags = [*flags_of(made, words), "--dpo-data", str(pairs)]
    with pytest.raises(MegatronExtError) as caught:
        train_on_ranks(flags, save=tmp_path / "run", task=TASK)
    assert any(sentence in message for message in caught.value.messages)


@pytest.mark.slow
def test_the_script_trains_and_writes_the_model(tmp_path: Path) -> None:
    out = tmp_path / "run"
    smoke("dpo/train.sh", out)
    losses = [row["dpo loss"] for row in rows_of(out, "train")]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-3)
    assert sum(losses[-5:]) / 5 < losses[0]
    assert any((out / "hf").glob("iter_*/config.json"))
