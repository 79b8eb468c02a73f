"""Models of transformers' own classes go to our layouts and back, bit for bit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_ext.checkpoint.conversion import one_rank
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.convert import huggingface
from tests.checkpoint.tiny import whole_tensors
from tests.ranks import run_on_ranks
from tests.text.convert.models import (
    EXPERTS,
    MODELS,
    ONE_GROUP,
    check_logits,
    imported,
    in_child,
    make,
    run_config,
    theirs,
)
from tests.training_runs import config_of, train

QUERIES = "model__layers__1__self_attn__q_proj__weight"
TRAINING = (
    "--tensor-model-parallel-size 2 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 200 --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-3 "
    "--use-distributed-optimizer --num-workers 0 --eval-iters 0 --log-interval 1"
).split()
PP2 = Layout(2, pipeline_model_parallel_size=2)
TP2_PP2 = Layout(4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
EP2_PP2 = Layout(4, pipeline_model_parallel_size=2, expert_model_parallel_size=2)


def by_flags(context: Any, words: list[str], expected: torch.Tensor) -> None:
    check_logits(context, run_config(context, words), expected)


def by_checkpoint(context: Any, root: Path, expected: torch.Tensor) -> None:
    words = ["--load", str(root), "--finetune", "--use-checkpoint-args", "--hidden-dropout", "0"]
    config = run_config(context, [*words, "--attention-dropout", "0"], read_run_config(root))
    check_logits(context, config, expected)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    return found


def assert_same_tensors(a: Path, b: Path) -> None:
    before, after = tensors_of(a), tensors_of(b)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name


def exported(load: Path, target: Path, **options: Any) -> list[str]:
    order = huggingface.Export(load, target, **options)
    return list(in_child(lambda: huggingface.export_model(order), target.with_suffix(".notes")))


MORE = [
    "llama", "mistral without groups", "qwen2 with a window", "phi3 partly rotary", "gpt2",
    "qwen3_moe unnormalized", "qwen2 tied",
]  # fmt: skip
"""Models that differ from others of their families in settings of config.json only."""


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in MORE else x for x in MODELS]
)
def test_logits_and_the_way_back(tmp_path: Path, name: str) -> None:
    source, root = make(name, tmp_path / "hf"), tmp_path / "ours"
    words = ["--pretrained-checkpoint", str(root), *imported(source, root)]
    expected = theirs(source)
    run_on_ranks(by_flags, Layout(1), {"words": words, "expected": expected})
    layout = PP2 if name in ONE_GROUP else EP2_PP2 if name in EXPERTS else TP2_PP2
    run_on_ranks(by_checkpoint, layout, {"root": root, "expected": expected})
    assert exported(root, tmp_path / "back") == []
    assert_same_tensors(source, tmp_path / "back")
    assert torch.equal(theirs(tmp_path / "back"), expected)
    kinds = [json.loads((x / "config.json").read_text()) for x in (source, tmp_path / "back")]
    assert kinds[0]["model_type"] == kinds[1]["model_type"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_source_keeps_its_dtype_and_its_files(tmp_path: Path, dtype: torch.dtype) -> None:
    source = make("qwen2 tied", tmp_path / "hf", dtype, max_shard_size="40KB")
    (source / "tokenizer_config.json").write_text("{}")
    assert len(list(source.glob("*.safetensors"))) > 2
    words = imported(source, tmp_path / "ours", make_vocab_size_divisible_by=8)
    assert {torch.bfloat16: "--bf16", torch.float16: "--fp16"}[dtype] in words
    assert words[words.index("--padded-vocab-size") + 1] == "304"
    assert words[words.index("--tokenizer-model") + 1] == str(source)
    options = {"like": source, "max_shard_size": "40KB"}
    exported(tmp_path / "ours", tmp_path / "back", **options)
    assert_same_tensors(source, tmp_path / "back")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert (tmp_path / "back" / "tokenizer_config.json").read_text() == "{}"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == dtype


def test_the_bias_of_a_router_stays_exact_in_16_bits(tmp_path: Path) -> None:
    """Steps of a bias are smaller than what 16 bits tell apart."""
    source = make("deepseek_v3", tmp_path / "hf")
    imported(source, tmp_path / "ours", dtype="bfloat16")
    exported(tmp_path / "ours", tmp_path / "back")
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    biases = {name for name in after if name.endswith("e_score_correction_bias")}
    assert biases and before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == (torch.float32 if name in biases else torch.bfloat16), name
        assert torch.equal(tensor, before[name].to(tensor.dtype)), name


def test_padding_is_zero_and_follows_the_target_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make("llama", tmp_path / "hf")
    (source / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    words = imported(
        Path("hf"), tmp_path / "ours", tensor_parallel_size=4, dtype="bfloat16", seq_length=32
    )
    # The checkpoint may be loaded from another folder.
    assert words[words.index("--tokenizer-model") + 1] == str(source)
    stored = read_run_config(tmp_path / "ours")
    assert (stored["model"]["padded_vocab_size"], stored["model"]["seq_length"]) == (512, 32)
    assert stored["precision"]["bf16"] is True
    tensors = whole_tensors(tmp_path / "ours" / "iter_0000000", tmp_path / "whole.pt")
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert tensors[name].shape == (512, 64) and tensors[name].dtype == torch.bfloat16
        assert tensors[name][300:].count_nonzero() == 0
        assert tensors[name][299].count_nonzero() > 0


def test_another_padding_and_another_precision_load_it(tmp_path: Path) -> None:
    source, root = make("llama", tmp_path / "hf", torch.bfloat16), tmp_path / "ours"
    words = ["--pretrained-checkpoint", str(root), *imported(source, root)]
    words[words.index("--padded-vocab-size") + 1] = "512"
    words.remove("--bf16")
    run_on_ranks(by_flags, TP2_PP2, {"words": words, "expected": theirs(source)})


def test_a_trained_checkpoint_of_any_layout_is_exported(tmp_path: Path) -> None:
    source, root, trained = make("qwen3", tmp_path / "hf"), tmp_path / "ours", tmp_path / "trained"
    words = [*imported(source, root, seq_length=32), "--pretrained-checkpoint", str(root)]
    train([*words, *TRAINING], trained, 2)
    notes = exported(trained, tmp_path / "back")
    assert notes == ["The padding of the vocabulary is exported too; `--vocab-size` leaves it out."]
    assert exported(trained, tmp_path / "cut", like=source, step=2) == []
    expected = theirs(tmp_path / "cut")
    assert not torch.allclose(expected, theirs(source), atol=1e-3)
    assert torch.equal(theirs(tmp_path / "back")[..., :300], expected)
    run_on_ranks(by_checkpoint, TP2_PP2, {"root": trained, "expected": expected})


def test_a_hybrid_run_is_exported_as_the_gpt_that_it_spells(tmp_path: Path) -> None:
    source, root = make("qwen3", tmp_path / "hf"), tmp_path / "ours"
    words = [*imported(source, root, seq_length=32), "--pretrained-checkpoint", str(root)]
    for name, pattern in {"gpt": [], "hybrid": ["--hybrid-layer-pattern", "*-*-"]}.items():
        train([*words, *TRAINING, *pattern], tmp_path / name, 2)
        exported(tmp_path / name, tmp_path / f"{name}_back", like=source)
    assert_same_tensors(tmp_path / "gpt_back", tmp_path / "hybrid_back")


def refusal(source: Path, target: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        huggingface.import_model(huggingface.Import(source, target))
    assert not target.exists()
    return str(caught.value)


def change(folder: Path, **changed: torch.Tensor | None) -> None:
    """Replace tensors, or with None remove them; the first name part is the key, dotted."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changed.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def child_refusal(source: Path, target: Path) -> str:
    return str(in_child(lambda: refusal(source, target), target.with_suffix(".refusal")))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make("llama", tmp_path_factory.mktemp("llama"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path, llama: dict[str, bytes]) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, content in llama.items():
        (folder / name).write_bytes(content)
    return folder


def test_missing_and_damaged_files(source: Path, tmp_path: Path) -> None:
    weights = source / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    assert f"{weights} cannot be read" in refusal(source, tmp_path / "x")
    weights.unlink()
    assert "holds neither model.safetensors nor" in refusal(source, tmp_path / "x")
    index = source / "model.safetensors.index.json"
    index.write_text("[]")
    assert f"{index} is damaged" in refusal(source, tmp_path / "x")
    weights.write_bytes(content)
    index.write_text(json.dumps({"weight_map": {"y": "model.safetensors"}}))
    assert "does not hold `y`" in refusal(source, tmp_path / "x")
    weights.unlink()
    index.write_text(json.dumps({"weight_map": {"y": "model-00002-of-00002.safetensors"}}))
    assert "model-00002-of-00002.safetensors cannot be read" in refusal(source, tmp_path / "x")


def test_dtypes_that_cannot_be_kept(source: Path, tmp_path: Path) -> None:
    change(source, model__norm__weight=torch.ones(64, dtype=torch.bfloat16))
    assert "tensors in bfloat16 and float32, but a check" in refusal(source, tmp_path / "x")
    change(source, model__norm__weight=torch.ones(64, dtype=torch.int8))
    assert "holds `model.norm.weight` as I8" in refusal(source, tmp_path / "x")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"score__weight": torch.ones(2, 64)}, "holds `score.weight`, which a model of its"),
        ({"model__norm__weight": None}, "holds no `model.norm.weight`, which its config.json"),
        ({"lm_head__weight": torch.ones(299, 64)}, "with shape [299, 64], but its config.json"),
        ({QUERIES: torch.ones(48, 64)}, "q_proj.weight` with shape [48, 64], but its config.json"),
    ],
)
def test_wrong_tensors(source: Path, tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    change(source, **changed)
    assert text in child_refusal(source, tmp_path / "x")


def test_a_tied_model_with_another_head(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert "holds a `lm_head.weight` of its own" in child_refusal(source, tmp_path / "x")
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    change(source, lm_head__weight=embedding)
    assert "--untie-embeddings-and-output-weights" not in imported(source, tmp_path / "y")


def test_nothing_is_written_over(source: Path, tmp_path: Path) -> None:
    root, full = tmp_path / "ours", tmp_path / "full"
    imported(source, root)
    with pytest.raises(CheckpointError, match=r"`--save` \(.*\) holds checkpoints; give a new"):
        huggingface.import_model(huggingface.Import(source, root))
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"`--hf` \(.*\) holds something already"):
        huggingface.export_model(huggingface.Export(root, full))
    assert [path.name for path in full.iterdir()] == ["thesis.txt"]
    with pytest.raises(CheckpointError, match=r"vocabulary to export \(400\) must be at least"):
        huggingface.export_model(huggingface.Export(root, tmp_path / "new", vocab_size=400))
    other = make("qwen3", tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"`--kv-channels` is 16, but `--hf-like` is a model"):
        huggingface.export_model(huggingface.Export(root, tmp_path / "new", like=other))
    assert not (tmp_path / "new").exists()


def test_one_rank_only(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"`--target-tensor-parallel-size` \(0\) must be at"):
        huggingface.import_model(huggingface.Import(source, tmp_path / "x", tensor_parallel_size=0))
    with pytest.raises(CheckpointError, match=r"`--make-vocab-size-divisible-by` \(0\) and "):
        huggingface.import_model(
            huggingface.Import(source, tmp_path / "x", make_vocab_size_divisible_by=0)
        )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "Models are converted on one rank, but 2 were started" in refusal(source, tmp_path / "x")


def save_with_one_more(root: Path, target: Path) -> Path:
    """Save an imported model again, with a weight that transformers' class does not have."""
    words = ["--load", str(root), "--save", str(target), "--no-save-optim", "--no-save-rng"]
    stored = read_run_config(root)
    words += "--finetune --micro-batch-size 1 --skip-train".split()
    config = config_of(words, checkpoint_config=stored)
    with one_rank(config.training.seed) as context:
        chunk = huggingface.build_bare(config, context)
        chunk.output_layer.register_parameter("adapter", torch.nn.Parameter(torch.ones(3)))
        state = {"model": [chunk], "optimizer": None, "scheduler": None, "progress": {}}
        manager = CheckpointManager(config.checkpoint, context)
        return manager.save(7, run_config=config.to_dict(), **state)


def test_no_weight_is_lost(source: Path, tmp_path: Path) -> None:
    root, more = tmp_path / "ours", tmp_path / "more"
    imported(source, root)
    path = in_child(lambda: save_with_one_more(root, more), tmp_path / "path")

    def refused() -> str:
        with pytest.raises(CheckpointError) as caught:
            huggingface.export_model(huggingface.Export(more, tmp_path / "back"))
        return str(caught.value)

    said = f"{path} holds `output_layer.adapter`, which the exported model would not have; export"
    assert in_child(refused, tmp_path / "text").startswith(said)
    assert not (tmp_path / "back").exists()


class Answering(torch.nn.Linear):
    """A model that answers with given logits, whatever it is asked."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(1, 1)
        self.logits = logits

    def forward(self, *_: Any) -> torch.Tensor:
        return self.logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_verified_logits_may_differ_by_rounding_but_are_never_without_a_value(
    dtype: torch.dtype, source: Path
) -> None:
    """Compare 3 tokens; ours are in fp32, and have further logits for the padding."""
    model = huggingface.read_model(source)
    tokens = torch.arange(3)[None]
    theirs = torch.randn(1, 3, model.vocab_size, generator=torch.Generator().manual_seed(0))
    theirs[0, 0, 0] = -8.0

    def compare(place: int, difference: float) -> str:
        ours = torch.cat([theirs, torch.full((1, 3, 4), torch.nan)], dim=2)
        ours[0, 1, place] += difference
        return huggingface.compare_logits(Answering(ours).to(dtype), model, tokens, theirs)

    limit = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    assert "differ from those of transformers by" in compare(7, 8 * 0.9 * limit)
    for difference in (8 * 1.1 * limit, -8 * 1.1 * limit, math.nan, math.inf):
        with pytest.raises(CheckpointError, match="more than .*; do not use the imported model"):
            compare(7, difference)
