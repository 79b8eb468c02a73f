"""examples/custom_model/train.py: each flag of GPT works in it, in any layout, or is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from examples.custom_loss.distillation import Distillation, DistillationConfig, write_cache
from examples.custom_model.train import TASK
from megatron_ext.data.batch import Batch
from megatron_ext.errors import DataError
from megatron_ext.losses.vocabulary import VocabularyHead
from megatron_ext.text.sft.dataset import SftDataset, build_splits
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from tests.text.sft import tiny
from tests.text.sft.test_runs import MODEL
from tests.training_runs import SMALL, config_of, errors_of, train_steps

RUN = [*SMALL, *"--eval-iters 0 --init-method-std 0.1 --position-embedding-type rope".split()]
OWN = {"task": TASK}
FOCAL = "--loss examples/custom_loss/focal.py:FocalLossConfig --loss-args gamma=1.5"
SMOOTH = "--loss cross-entropy --label-smoothing 0.1 --z-loss-coeff 1e-3"
PARTS = "--rotary-percent 0.5 --mtp-num-layers 1"
NAMES = ("lm loss", "mtp_1 loss", "focal loss", "grad_norm")


def run(save: Path, words: str, ranks: int = 1, steps: int = 3, **options: Any) -> list[Any]:
    flags = [*RUN, "--train-iters", str(steps), *words.split()]
    rows = train_steps(flags, save, ranks, **options)
    return [[row.get(name) for name in NAMES] for row in rows]


def test_with_losses_and_parts_of_gpt_it_trains_what_pretrain_gpt_trains(tmp_path: Path) -> None:
    words = f"{PARTS} {SMOOTH}"
    own = run(tmp_path / "own", words, **OWN)
    assert own == run(tmp_path / "gpt", words)
    assert own[0][1] is not None
    assert own != run(tmp_path / "capped", f"{words} --hidden-cap 1", **OWN)


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    ("loss", "layout"),
    [
        ("", TP2),
        (FOCAL, PP2),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("", PP2), (FOCAL, TP2))),
        *(pytest.param(SMOOTH, layout, marks=pytest.mark.slow) for layout in (TP2, PP2)),
    ],
)
def test_losses_are_those_of_one_rank(loss: str, layout: str, tmp_path: Path) -> None:
    words = f"--hidden-cap 2 {PARTS} {loss}"
    alone = run(tmp_path / "one", words, **OWN)
    cut = run(tmp_path / "two", f"{words} {layout}", ranks=2, **OWN)
    for mine, theirs in zip(cut, alone, strict=True):
        assert [x for x in mine if x] == pytest.approx([x for x in theirs if x], rel=1e-5)


def test_the_ceiling_bounds_what_a_token_costs(tmp_path: Path) -> None:
    low = run(tmp_path / "low", "--loss-args ceiling=0.5", steps=1, **OWN)
    assert low[0][0] == pytest.approx(0.5)


def test_flags_that_its_loss_does_not_know_are_refused() -> None:
    words = "--train-iters 1 --label-smoothing 0.1 --z-loss-coeff 1e-3".split()
    smoothing, z_loss = errors_of([*RUN, *words], TASK)
    assert smoothing.startswith("`--label-smoothing` (0.1) is a part of cross-entropy, which")
    assert "or give `--loss cross-entropy`" in smoothing
    assert z_loss.startswith("`--z-loss-coeff` (0.001) is a part of cross-entropy")


def test_its_flag_is_in_its_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = f"{PARTS} --hidden-cap 2"
    whole = run(tmp_path / "whole", words, steps=4, **OWN)
    half = f"{words} --save-interval 2 --exit-interval 2 --lr-decay-iters 4"
    run(tmp_path / "cut", half, steps=4, **OWN)
    # Neither the flag nor the parts of the model are given again.
    onward = f"--use-checkpoint-args --load {tmp_path / 'cut'}"
    assert run(tmp_path / "cut", onward, steps=4, **OWN) == whole
    run(tmp_path / "other", f"{onward} --ckpt-step 2 --hidden-cap 3", steps=4, **OWN)
    assert "`--hidden-cap` (3.0, before 2.0)" in capfd.readouterr().out


V, K, H = 50, 4, 8
SPEC = "examples/custom_loss/distillation.py:DistillationConfig"


def cache(folder: Path, lengths: list[int], vocabulary: int) -> Path:
    generator = torch.Generator().manual_seed(5)
    logits = [3 * torch.randn(n, vocabulary, generator=generator) for n in lengths]
    write_cache(folder, logits, K)
    return folder


def test_the_formula_on_one_rank(tmp_path: Path) -> None:
    """Samples and positions find their teacher; padding finds any."""
    cache(tmp_path, [5, 3], V)
    config = DistillationConfig(cache=str(tmp_path), temperature=3.0, alpha=0.7)
    loss = Distillation(config)
    samples = torch.tensor([[1, 1, 1, 0, 0, -1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    labels = torch.randint(0, V, (1, 6), generator=torch.Generator().manual_seed(1))
    batch = Batch(labels, labels, (samples >= 0).float(), positions, sample_ids=samples)
    nowhere: Any = SimpleNamespace()
    inputs = loss.build([batch], nowhere)[0].tensors
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(6, H, generator=generator)
    weight = torch.randn(V, H, generator=generator)
    flat = {name: x[0] for name, x in inputs.items()}
    found = loss.token_losses(hidden, VocabularyHead(weight, None), flat)

    generator = torch.Generator().manual_seed(5)
    teacher = torch.cat([3 * torch.randn(n, V, generator=generator) for n in (5, 3)])
    top = teacher[[5, 6, 7, 0, 1]].topk(K)
    logits = hidden[:5] @ weight.t()
    student = logits.gather(1, top.indices)
    mine, wanted = F.log_softmax(student / 3.0, -1), F.softmax(top.values / 3.0, -1)
    divergence = F.kl_div(mine, wanted, reduction="none").sum(1)
    want = 0.7 * 9.0 * divergence + 0.3 * F.cross_entropy(logits, labels[0, :5], reduction="none")
    assert torch.allclose(found[:5], want, rtol=1e-5)


def test_fine_tuning_does_not_depend_on_the_layout(tmp_path: Path) -> None:
    chats = tiny.write_jsonl(tmp_path / "chats.jsonl", tiny.chats(12, turns=2, words=3))
    flags = [*MODEL, "--sft", "--train-data-path", str(chats), "--global-batch-size", "8"]
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--train-iters", "3"]
    flags += ["--tokenizer-model", str(tiny.save(tmp_path / "tokenizer"))]
    flags += ["--make-vocab-size-divisible-by", "192", "--eval-iters", "0"]
    config = config_of(flags)
    rows = build_splits(config, build_tokenizer(config.section(TokenizerConfig))).train
    assert isinstance(rows, SftDataset)
    teacher = cache(tmp_path / "teacher", rows.lengths.tolist(), 300)
    own = [*flags, "--loss", SPEC, "--loss-args", f"cache={teacher}"]

    def losses(name: str, words: str, ranks: int = 1) -> list[float]:
        rows = train_steps([*own, *words.split()], tmp_path / name, ranks)
        return [row["distillation loss"] for row in rows]

    whole = losses("whole", "--sft-batching padded")
    layout = "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel"
    cut = losses("cut", f"--sft-batching token-budget {layout}", 4)
    assert cut == pytest.approx(whole, rel=1e-5)
    assert whole[0] != pytest.approx(whole[2], rel=1e-3)


def test_a_missing_cache_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must hold offsets\.npy"):
        Distillation(DistillationConfig(cache=str(tmp_path)))
