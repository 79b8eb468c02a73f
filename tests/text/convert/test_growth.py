"""Vocabularies that grow, against transformers' own ``resize_token_embeddings``."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.layers.initialization import generator_of
from megatron_ext.text.convert.growth import Growth
from megatron_ext.text.convert.huggingface import Export, Import, export_model, import_model
from tests.text.convert.models import class_of, make
from tests.text.convert.test_training import FLAGS, LAYOUTS
from tests.text.tiny import hf_folder
from tests.training_runs import SMALL, check_refused, prepared, train, without

SEED = 1234
FILE = "model.safetensors"
NAMES = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "transformer.wte.weight": "embedding.word_embeddings.weight",
    "lm_head.weight": "output_layer.weight",
}


def grown_flags(source: Path, size: int, *more: str) -> list[str]:
    """Return flags of a run whose tokenizer has ``size`` entries and that changes no weight."""
    kept = without(FLAGS, "--vocab-size", "--train-iters", "--lr", "--min-lr", "--weight-decay")
    still = "--train-iters 1 --lr 0 --min-lr 0 --weight-decay 0"
    own = ["--vocab-size", str(size - 1), *still.split(), "--seed", str(SEED)]
    return ["--load-hf", str(source), *kept, *own, *more]


class Resized:
    """A model of transformers whose tables it has resized, drawn with our seeds."""

    def __init__(self, source: Path, size: int, method: str) -> None:
        self.model: Any = class_of(source)
        old = {name: x.detach().clone() for name, x in self.model.named_parameters()}
        self.model.resize_token_embeddings(size, mean_resizing=method == "noise")
        self.tables = {k: x for k, x in self.model.named_parameters() if x.shape != old[k].shape}
        for name, table in self.tables.items():
            self._draw(old[name], table, NAMES[name], method)

    def _draw(self, old: Tensor, table: Tensor, name: str, method: str) -> None:
        count = len(table) - len(old)
        before = torch.nn.Embedding.from_pretrained(old)
        after = torch.nn.Embedding(*table.shape)
        with torch.no_grad(), generator_of(name, SEED):
            if method == "noise":
                self.model._init_added_embeddings_weights_with_mean(before, after, len(old), count)
                table[len(old) :] = after.weight[len(old) :]
            elif method == "normal":
                drawn = torch.empty(count, table.size(1)).normal_()
                table[len(old) :] = self.model.config.initializer_range * drawn
            else:
                table[len(old) :] = old.mean(0)


CASES = [
    ("llama", 1, "noise", "tp2pp2", ""),
    ("llama", 7, "mean", "one", ""),
    ("llama", 100, "normal", "tp2pp2", ""),
    ("llama 3.1 tied", 1, "normal", "tp2sp", ""),
    ("llama 3.1 tied", 7, "noise", "tp2pp2", ""),
    ("llama 3.1 tied", 100, "noise", "dp2", ""),
    ("glm4_moe", 7, "mean", "pp2ep2", "--mtp-num-layers 1"),
    ("gpt2", 7, "noise", "tp2sp", ""),
]


@pytest.mark.parametrize(
    ("name", "count", "method", "layout", "more"),
    [
        pytest.param(*case, marks=[] if case[:2] == ("llama", 1) else [pytest.mark.slow])
        for case in CASES
    ],
)
def test_new_rows_are_those_of_transformers(
    name: str, count: int, method: str, layout: str, more: str, tmp_path: Path
) -> None:
    source = make(name, tmp_path / "source")
    ranks, flags = LAYOUTS.get(layout, (1, ""))
    size = 300 + count
    words = grown_flags(source, size, "--resize-vocabulary", method, *flags.split(), *more.split())
    train([*words, "--save-hf", str(tmp_path / "out")], tmp_path / "save", ranks)
    truth = Resized(source, size, method)
    written: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "iter_0000001")
    assert written.config.vocab_size == size
    for key, want in truth.model.state_dict().items():
        got = written.state_dict()[key]
        assert got.shape == want.shape and (got - want).norm() <= 1e-6 * want.norm(), key
    tokens = torch.arange(size - 16, size)[None]
    with torch.no_grad():
        ours, theirs = (x.eval()(tokens).logits for x in (written, truth.model.float()))
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def added(folder: Path, count: int) -> Path:
    """Save the tests' tokenizer of 600 entries with added tokens in a folder of its own."""
    tokenizer = AutoTokenizer.from_pretrained(hf_folder())
    tokenizer.add_tokens([f"<new {n}>" for n in range(count)])
    tokenizer.save_pretrained(folder)
    return folder


def test_the_tool_lets_a_vocabulary_grow_to_that_of_a_tokenizer(tmp_path: Path) -> None:
    """An export then has the tokenizer, and all rows, whatever folder it is to be like."""
    size = len(AutoTokenizer.from_pretrained(hf_folder()))
    source = make("llama", tmp_path / "hf", changed={"vocab_size": size})
    tokenizer = added(tmp_path / "tokenizer", 3)
    order = Import(source, tmp_path / "save", verify=True)
    order = replace(order, resize_vocabulary="noise", tokenizer_model=tokenizer)
    words, notes = import_model(order)
    assert any(f"has grown from {size} to {size + 3} entries" in note for note in notes)
    assert str(tokenizer) in words
    for name, like in {"plain": None, "like": source}.items():
        target = tmp_path / name
        export_model(Export(tmp_path / "save", target, like=like))
        written = AutoModelForCausalLM.from_pretrained(target)
        truth = Resized(source, size + 3, "noise")
        for key, want in truth.model.state_dict().items():
            got = written.state_dict()[key]
            assert got.shape == want.shape and (got - want).norm() <= 1e-6 * want.norm(), key
    assert len(AutoTokenizer.from_pretrained(tmp_path / "like")) == size + 3
    with pytest.raises(CheckpointError, match=r"`--resize-vocabulary` needs a tokenizer, which"):
        import_model(Import(source, tmp_path / "none", resize_vocabulary="mean"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama") / "hf")


def test_a_grown_run_trains_its_new_rows_or_says_that_it_does_not_and_resumes(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*without(FLAGS, "--vocab-size", "--train-iters"), "--vocab-size", "306"]
    words += ["--load-hf", str(source), "--resize-vocabulary", "mean", "--train-iters"]
    out = ["--save-hf", str(tmp_path / "out"), "--load", str(tmp_path / "run")]
    train([*words, "1", *out], tmp_path / "run")
    assert "are not trained" not in capfd.readouterr().out
    train([*words, "2", *out, "--override-opt-param-scheduler"], tmp_path / "run", 1)
    first, second = (load_file(tmp_path / "out" / f"iter_000000{n}" / FILE) for n in (1, 2))
    rows = slice(300, 307)
    for tables in (first, second):
        assert all(tables[name].size(0) == 307 for name in NAMES if name in tables)
    head = "lm_head.weight"
    assert not torch.equal(first[head][rows], second[head][rows])
    capfd.readouterr()
    for frozen in ("--lora-rank 2", "--freeze embeddings output"):
        train([*words, "1", *frozen.split()], tmp_path / frozen.replace(" ", ""))
        said = capfd.readouterr().out
        assert "> The vocabulary has grown from 300 to 307 entries; new rows are the mean" in said
        assert "> The new rows of the vocabulary are not trained, since the word embedding" in said


def test_a_tokenizer_that_a_model_has_no_rows_for(source: Path) -> None:
    words = [*without(FLAGS, "--vocab-size"), "--load-hf", str(source), "--vocab-size"]
    with pytest.raises(ConfigError, match="trained with, or `--resize-vocabulary noise` for new"):
        prepared([*words, "306"])
    config = prepared([*words, "306", "--resize-vocabulary", "noise"])[1]
    assert config.model.padded_vocab_size == 307
    given = [*words, "306", "--resize-vocabulary", "noise", "--padded-vocab-size", "384"]
    assert prepared(given)[1].model.padded_vocab_size == 384
    # A smaller tokenizer leaves the vocabulary as it is.
    config = prepared([*words, "250", "--resize-vocabulary", "noise"])[1]
    assert config.model.padded_vocab_size == 300
    check_refused([*SMALL, "--resize-vocabulary", "mean"], "needs `--load-hf`, whose vocabulary")


def test_few_rows_have_no_covariance_and_biases_follow_their_own(source: Path) -> None:
    """transformers' own function is the truth for tables; a bias hardly varies."""
    model: Any = class_of(source)
    for rows in (20, 300):
        table = torch.randn(rows, 64)
        before, after = torch.nn.Embedding.from_pretrained(table), torch.nn.Embedding(rows + 5, 64)
        with torch.no_grad(), generator_of("a", 7):
            model._init_added_embeddings_weights_with_mean(before, after, rows, 5)
        growth = Growth(rows, rows + 5, "noise", 0.02, 7)
        read = partial(lambda table, first, end: table[first:end], table)
        found = growth.values("a", (64,), read)
        assert torch.allclose(found, after.weight[rows:], rtol=1e-5, atol=1e-7)
        assert torch.equal(found[0], found[1]) == (rows == 20)
        bias = growth.values("b", (), partial(lambda x, first, end: x[first:end], table[:, 0]))
        assert bias.shape == (5,) and torch.allclose(bias, table[:, 0].mean())
