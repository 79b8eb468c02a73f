"""examples/distillation/train.py: its losses and gradients are those of plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.distillation.train import TASK
from tests.examples.scripts import rows as rows_of
from tests.examples.scripts import smoke
from tests.examples.test_preferences import EXPERTS, LAYOUTS, LLAMA, SOME_SLOW, make_model
from tests.text.sft import tiny
from tests.training_runs import errors_of, train_steps

K, T, ALPHA = 6, 1.7, 0.7
CHATS = tiny.chats(4, turns=2, words=3)
RUN = (
    "--seq-length 192 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --eval-iters 0 "
    "--log-interval 1 --lr 1e-2 --lr-decay-style constant --weight-decay 0 --attention-dropout 0 "
    "--hidden-dropout 0 --make-vocab-size-divisible-by 1 --sft --sft-batching padded "
    f"--teacher-top-k {K} --distill-temperature {T} --distill-alpha {ALPHA}"
).split()
NAMES = ("distillation loss", "divergence", "lm loss", "grad_norm")
LARGE = {**LLAMA, "hidden_size": 48, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with conversations, students and a larger teacher."""
    folder = tmp_path_factory.mktemp("distillation")
    tiny.write_jsonl(folder / "chats.jsonl", CHATS)
    tokenizer = AutoTokenizer.from_pretrained(tiny.save(folder / "tokenizer"))
    for seed, (name, kind) in enumerate(
        {"llama": LLAMA, "experts": EXPERTS, "teacher": LARGE}.items()
    ):
        make_model(folder / name, tokenizer, seed, kind)
    return folder


def plain(made: Path, name: str, direction: str, steps: int) -> list[dict[str, float]]:
    """Train transformers' student by the published formulas on one rank."""
    tokenizer = AutoTokenizer.from_pretrained(made / name)
    student = AutoModelForCausalLM.from_pretrained(made / name)
    teacher = AutoModelForCausalLM.from_pretrained(made / "teacher").requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.0)
    found = []
    for _ in range(steps):
        terms: list[tuple[Tensor, Tensor]] = []
        for row in CHATS:
            ids, trained = trained_tokens(tokenizer, row["messages"])
            mine, theirs = (model(ids).logits[0, :-1] for model in (student, teacher))
            top = theirs.topk(K)
            q = (mine.gather(1, top.indices) / T).log_softmax(-1)
            p = (top.values / T).log_softmax(-1)
            if direction == "reverse":
                divergence = (q.exp() * (q - p)).sum(-1)
            else:
                divergence = (p.exp() * (p - q)).sum(-1)
            entropy = F.cross_entropy(mine, ids[0, 1:], reduction="none")
            terms.append((divergence[trained], entropy[trained]))
        divergence, entropy = (torch.cat(parts).mean() for parts in zip(*terms, strict=True))
        loss = ALPHA * T**2 * divergence + (1 - ALPHA) * entropy
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        values = (loss, divergence, entropy, norm)
        found.append(dict(zip(NAMES, (x.item() for x in values), strict=True)))
    return found


def trained_tokens(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return ids ``[1, s]``, and which of the s - 1 predictions are the assistant's."""
    text = ""
    ids: list[int] = []
    mask: list[bool] = []
    for count in range(1, len(messages) + 1):
        is_assistant = messages[count - 1]["role"] == "assistant"
        whole = tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=not is_assistant
        )
        assert whole.startswith(text)
        more = tokenizer(whole.removeprefix(text), add_special_tokens=False).input_ids
        ids += more
        mask += [is_assistant] * len(more)
        text = whole
    return torch.tensor([ids]), torch.tensor(mask[1:])


def run(made: Path, name: str, save: Path, words: str, ranks: int) -> list[list[float]]:
    flags = [
        *RUN, "--load-hf", str(made / name), "--teacher-hf", str(made / "teacher"),
        "--train-data-path", str(made / "chats.jsonl"), *words.split(),
    ]  # fmt: skip
    return [[row[key] for key in NAMES] for row in train_steps(flags, save, ranks, task=TASK)]


@pytest.mark.parametrize("layout", SOME_SLOW)
def test_steps_are_those_of_plain_torch(made: Path, tmp_path: Path, layout: str) -> None:
    name, words, ranks = LAYOUTS[layout]
    direction = "reverse" if layout == "pp" else "forward"
    words = f"{words} --distill-divergence {direction}"
    found = run(made, name, tmp_path / "run", words, ranks)
    for mine, theirs in zip(found, plain(made, name, direction, 3), strict=True):
        assert mine == pytest.approx([theirs[key] for key in NAMES], rel=1e-5)


@pytest.mark.slow
def test_the_student_nears_the_teacher_and_resumes_to_the_same_bits(
    made: Path, tmp_path: Path
) -> None:
    words = "--distill-alpha 1 --train-iters 12 --save-interval 6"
    whole = run(made, "llama", tmp_path / "whole", words, 2)
    assert whole[-1][1] < 0.5 * whole[0][1]
    run(made, "llama", tmp_path / "cut", f"{words} --exit-interval 6", 2)
    rest = run(made, "llama", tmp_path / "cut", f"{words} --load {tmp_path / 'cut'}", 2)
    assert rest[-6:] == whole[-6:]


def test_refusals(made: Path) -> None:
    flags = [*RUN, "--load-hf", str(made / "llama"), "--train-data-path", "x"]
    (missing,) = errors_of(flags, TASK)
    assert missing == "`--teacher-hf` is missing; name the folder of the teacher."
    flags += ["--teacher-hf", str(made / "teacher")]
    for words, sentence in (
        ("--teacher-top-k 0", "`--teacher-top-k` (0) must be at least 1; use 64."),
        ("--distill-temperature 0", "`--distill-temperature` (0.0) must be above 0; use 1."),
        ("--distill-alpha 2", "`--distill-alpha` (2.0) must be from 0 to 1; use 0.5."),
        ("--pipeline-schedule core-1f1b", "runs one network; leave it out"),
    ):
        assert any(sentence in x for x in errors_of([*flags, *words.split()], TASK)), words


@pytest.mark.slow
def test_the_script_distils(tmp_path: Path) -> None:
    out = tmp_path / "run"
    smoke("distillation/train.sh", out)
    values = [row["divergence"] for row in rows_of(out, "train")]
    assert sum(values[-5:]) < 0.9 * sum(values[:5])
    assert any((out / "hf").glob("iter_*/config.json"))
