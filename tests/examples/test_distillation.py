"""The distillation example: the formula in plain torch, and fine-tuning with cached logits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from examples.custom_loss.distillation import Distillation, DistillationConfig, write_cache
from megatron_ext.config.parser import parse_args
from megatron_ext.data.batch import Batch
from megatron_ext.errors import DataError
from megatron_ext.losses.vocabulary import VocabularyHead
from megatron_ext.text.config import TokenizerConfig
from megatron_ext.text.sft.dataset import SftDataset, build_splits
from megatron_ext.text.task import TEXT
from megatron_ext.text.tokenizers import build_tokenizer
from tests.text.sft import tiny
from tests.text.sft.test_runs import MODEL
from tests.training_runs import train_on_ranks, training_rows

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
    divergence = F.kl_div(
        F.log_softmax(student / 3.0, -1), F.softmax(top.values / 3.0, -1), reduction="none"
    ).sum(1)
    want = 0.7 * 9.0 * divergence + 0.3 * F.cross_entropy(logits, labels[0, :5], reduction="none")
    assert torch.allclose(found[:5], want, rtol=1e-5)


def test_fine_tuning_does_not_depend_on_the_layout(tmp_path: Path) -> None:
    chats = tiny.write_jsonl(tmp_path / "chats.jsonl", tiny.chats(12, turns=2, words=3))
    flags = [*MODEL, "--sft", "--train-data-path", str(chats), "--global-batch-size", "8"]
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--train-iters", "3"]
    flags += ["--tokenizer-model", str(tiny.save(tmp_path / "tokenizer"))]
    flags += ["--make-vocab-size-divisible-by", "192", "--eval-iters", "0"]
    config = parse_args(flags, TEXT, world_size=1, device="cpu").config
    train = build_splits(config, build_tokenizer(config.section(TokenizerConfig))).train
    assert isinstance(train, SftDataset)
    teacher = cache(tmp_path / "teacher", train.lengths.tolist(), 300)
    own = [*flags, "--loss", SPEC, "--loss-args", f"cache={teacher}"]

    def losses(name: str, words: str, ranks: int = 1) -> list[float]:
        code, rows = train_on_ranks([*own, *words.split()], ranks=ranks, save=tmp_path / name)
        assert code == 0
        return [row["distillation loss"] for row in training_rows(rows)]

    whole = losses("whole", "--sft-batching padded")
    layout = "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel"
    assert losses("cut", f"--sft-batching token-budget {layout}", 4) == pytest.approx(
        whole, rel=1e-5
    )
    assert whole[0] != pytest.approx(whole[2], rel=1e-3)


def test_a_missing_cache_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must hold offsets\.npy"):
        Distillation(DistillationConfig(cache=str(tmp_path)))
