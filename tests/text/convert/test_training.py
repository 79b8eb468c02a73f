"""Runs that start from a Hugging Face folder, against transformers' class and torch's AdamW."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ext.errors import ConfigError
from megatron_ext.programs.lora import main as lora
from megatron_ext.text.convert import reading
from megatron_ext.text.convert.huggingface import Export, export_model
from megatron_ext.text.convert.reading import Loaded
from megatron_ext.text.convert.training import load_initial_weights
from megatron_ext.train.run import Run
from tests.text.convert.models import (
    EXPERTS,
    MODELS,
    ONE_GROUP,
    SIZES,
    class_of,
    in_child,
    make,
)
from tests.text.tiny import hf_folder
from tests.training_runs import (
    SMALL,
    Rows,
    check_refused,
    config_of,
    prepared,
    train,
    training_rows,
)

STEPS, RATE, DECAY = 2, 1e-3, 0.1
EPSILON = 1e-5
"""Far above the rounding of gradients that are zero, as those of biases of keys."""
FLAGS = (
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --mock-data --split 100,0,0 "
    "--tokenizer-type NullTokenizer --vocab-size 299 --num-workers 0 --eval-iters 0 "
    f"--log-interval 1 --train-iters {STEPS} --lr {RATE} --min-lr {RATE} --lr-decay-style constant "
    f"--weight-decay {DECAY} --adam-eps {EPSILON} --clip-grad 1 --attention-dropout 0 "
    "--hidden-dropout 0 "
    "--accumulate-allreduce-grads-in-fp32 --moe-router-bias-update-rate 0"
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
    "pp2vpp2": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
    "cp2": (2, "--context-parallel-size 2"),
    "dp2": (
        2,
        "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params",
    ),
}


def flags_of(source: Path, *more: str) -> list[str]:
    return ["--load-hf", str(source), *FLAGS, *more]


def record(target: Path, run: Run) -> None:
    """Write the tokens and labels of each step of a run on one rank."""
    steps: list[list[tuple[Tensor, Tensor]]] = []
    following = run.train_source.next_step

    def next_step(num_microbatches: int, seq_length: int | None) -> Any:
        batches = following(num_microbatches, seq_length)
        assert batches is not None
        steps.append([(batch.tokens.clone(), batch.labels.clone()) for batch in batches])
        torch.save(steps, target)
        return batches

    run.train_source.next_step = next_step  # type: ignore[method-assign]


def truth(source: Path, steps: list[list[tuple[Tensor, Tensor]]]) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step of transformers' class with torch's AdamW."""
    model = class_of(source).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return trained_by_torch(model, steps)


def trained_by_torch(
    model: torch.nn.Module, steps: list[list[tuple[Tensor, Tensor]]]
) -> list[tuple[float, float]]:
    """Train a model of transformers in place; return loss and gradient norm of each step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    # Megatron-LM decays matrices only.
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
    """Return loss and gradient norm of each step."""
    return [(row["lm loss"], row["grad_norm"]) for row in training_rows(rows)]


def check_model(name: str, layouts: list[str], tmp_path: Path) -> None:
    check_folder(make(name, tmp_path / "hf"), layouts, tmp_path)


def check_folder(
    source: Path, layouts: list[str], tmp_path: Path, *, tolerance: float = 1e-6, steps: int = 2
) -> None:
    """Compare steps of a run from a folder, on one rank and in layouts, with transformers.

    Loss and gradient norm may differ by ``tolerance``, relatively, and the second step's norm by
    five times as much, since updated weights differ by rounding, which its gradients multiply.
    ``steps`` is how many steps are compared, one or two.
    """
    batches = tmp_path / "steps.pt"
    rows = train(flags_of(source), tmp_path / "one", prepare=lambda run: record(batches, run))
    want = truth(source, torch.load(batches))
    assert len(want) == STEPS
    found = {"one": curve_of(rows)}
    for layout in layouts:
        count, words = LAYOUTS[layout]
        flags = flags_of(source, *words.split())
        found[layout] = curve_of(train(flags, tmp_path / layout, count))
    for layout, curve in found.items():
        # Ranks of context parallelism sum the gradients of a sequence's parts in another order.
        limit = max(tolerance, 2e-6 if layout == "cp2" else 0)
        assert curve[0] == pytest.approx(want[0], rel=limit), layout
        if steps == 1:
            continue
        assert curve[1][0] == pytest.approx(want[1][0], rel=tolerance), layout
        assert curve[1][1] == pytest.approx(want[1][1], rel=5 * tolerance), layout


QUICK = {"qwen2 tied": ["tp2pp2"], "qwen3_moe": ["tp2pp2ep2"], "mistral with a window": ["pp2dp2"]}


@pytest.mark.parametrize("name", QUICK)
def test_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check_model(name, QUICK[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_steps_of_every_family_on_six_layouts(name: str, tmp_path: Path) -> None:
    if name in EXPERTS:
        layouts = ["tp2pp2ep2", "pp2ep2", "pp2dp2", "dp2", "cp2"]
        # Experts with biases are not split.
        layouts += [] if name == "gpt_oss" else ["tp2etp2"]
    elif name in ONE_GROUP:
        layouts = ["pp2dp2", "dp2", "cp2", *(["pp2vpp2"] if name == "gemma3" else [])]
    else:
        layouts = ["tp2pp2", "pp2dp2", "tp2sp", "dp2", "cp2"]
    check_model(name, layouts, tmp_path)


def same_tensors(one: Path, two: Path) -> bool:
    """Return whether two folders hold equal tensors."""
    a, b = (load_file(folder / "model.safetensors") for folder in (one, two))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def exported(run: Path, target: Path, *merge: str) -> Path:
    """Export the checkpoint of a run in a process of its own, with adapters merged if so asked."""

    def export() -> None:
        load = run
        if merge:
            load = run.with_name(f"{run.name}_merged")
            assert lora(["merge", "--load", str(run), "--save", str(load)]) == 0
        export_model(Export(load, target))

    in_child(export, target.with_suffix(".export"))
    return target


@pytest.mark.parametrize("adapters", [[], ["--lora-rank", "4"]], ids=["all weights", "LoRA"])
def test_folders_written_in_training(adapters: list[str], tmp_path: Path) -> None:
    source, written = make("qwen3", tmp_path / "hf"), tmp_path / "written"
    (source / "tokenizer_config.json").write_text("{}")
    count, words = LAYOUTS["tp2pp2"]
    flags = [*flags_of(source, *words.split(), *adapters), "--save-hf", str(written)]
    train([*flags, "--save-hf-interval", "1"], tmp_path / "run", count)
    assert sorted(x.name for x in written.iterdir()) == ["iter_0000001", "iter_0000002"]
    merge = ["merge"] if adapters else []
    back = exported(tmp_path / "run", tmp_path / "back", *merge)
    assert same_tensors(written / "iter_0000002", back)
    assert not same_tensors(written / "iter_0000001", written / "iter_0000002")
    assert not same_tensors(source, written / "iter_0000001")
    model = AutoModelForCausalLM.from_pretrained(written / "iter_0000002")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    more = ["--train-iters", "3", "--override-opt-param-scheduler"]
    # The same command goes on from its checkpoint, not from the folder.
    rows = train([*flags, "--load", str(tmp_path / "run"), *more], tmp_path / "on", 4)
    assert [row["iteration"] for row in training_rows(rows)] == [3]


def test_a_folder_of_a_model_from_scratch_names_the_end_of_a_text(tmp_path: Path) -> None:
    """Tokens as transformers' own tokenizer of the same folder has them."""
    words = "--num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 "
    words += "--seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --swiglu "
    words += "--global-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --mock-data "
    words += "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    words += "--num-workers 0 --no-gradient-accumulation-fusion "
    words += f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {hf_folder()}"
    train([*words.split(), "--save-hf", str(tmp_path / "hf")], tmp_path / "run")
    written = tmp_path / "hf" / "iter_0000001"
    tokenizer = AutoTokenizer.from_pretrained(written)
    config, generation = (
        json.loads((written / f"{name}.json").read_text())
        for name in ("config", "generation_config")
    )
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    assert config["pad_token_id"] == generation["pad_token_id"] == tokenizer.pad_token_id
    assert config["bos_token_id"] is None and tokenizer.bos_token_id is None
    # Rows of padding are left out.
    assert config["vocab_size"] == len(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(written)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_folders_written_with_weights_in_one_buffer(tmp_path: Path) -> None:
    """The distributed optimizer lays all weights of a rank into one buffer."""
    source, written = make("qwen3", tmp_path / "hf"), tmp_path / "written"
    flags = flags_of(source, "--use-distributed-optimizer", "--save-hf", str(written))
    train(flags, tmp_path / "run", 2)
    back = exported(tmp_path / "run", tmp_path / "back")
    assert same_tensors(written / "iter_0000002", back)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--hidden-size 32", "`--hidden-size` is 32, but {hf}/config.json says 64, with which its"),
        ("--num-layers 4 --kv-channels 8", "`--num-layers` is 4, but {hf}/config.json says 2"),
        ("--no-swiglu", "`--swiglu` is False, but {hf}/config.json says True"),
        ("--num-experts 2", "`--num-experts` is 2, but {hf}/config.json says None"),
        ("--rotary-base 10000", "`--rotary-base` is 10000.0, but {hf}/config.json says 50000.0"),
        ("--padded-vocab-size 256", "`--padded-vocab-size` (256) must be at least the 300 entries"),
        ("--pretrained-checkpoint X", "`--load-hf` ({hf}) and `--pretrained-checkpoint` (X) both"),
        ("--use-checkpoint-args --load X", "`--load-hf` and `--use-checkpoint-args` both give the"),
        ("--save-hf-interval 2", "`--save-hf-interval` needs `--save-hf`; give a folder"),
        (
            "--seq-length 999999",
            "which comes with the weights) must be at least `--seq-length` (999999); change",
        ),
        ("--save-hf /proc/x", "`--save-hf` (/proc/x) cannot be written"),
    ],
)
def test_flags_that_disagree_with_the_folder(words: str, sentence: str, source: Path) -> None:
    check_refused(flags_of(source, *words.split()), sentence.format(hf=source))


def test_an_interval_needs_a_folder_where_no_folder_is_loaded_either() -> None:
    check_refused(
        [*SMALL, "--save-hf-interval", "2"], "`--save-hf-interval` needs `--save-hf`; give a folder"
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama") / "hf")


def test_a_tokenizer_with_more_entries(source: Path) -> None:
    flags = [*flags_of(source), "--vocab-size", "400", "--padded-vocab-size", "512"]
    with pytest.raises(ConfigError, match=r"The tokenizer has 401 entries, but the model of `--lo"):
        prepared(flags)


def test_a_model_of_no_family_is_told_before_training(tmp_path: Path) -> None:
    flags = f"--save-hf {tmp_path} --num-layers 1 --hidden-size 8 --num-attention-heads 1 "
    flags += "--max-position-embeddings 16 --position-embedding-type none"
    check_refused([*flags.split(), *FLAGS], "`--save-hf` is not possible: The checkpoint's model")


def test_weights_need_no_initialization(source: Path, tmp_path: Path) -> None:
    flags = flags_of(source)
    drawn = curve_of(train(flags, tmp_path / "drawn"))
    assert curve_of(train([*flags, "--no-initialization"], tmp_path / "left")) == drawn


@pytest.mark.parametrize(("ranks", "rows"), [(1, 301), (2, 302), (4, 304)])
def test_a_vocabulary_is_padded_to_the_ranks_and_no_further(
    ranks: int, rows: int, tmp_path: Path
) -> None:
    content = {**SIZES, **MODELS["llama"], "vocab_size": 301, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(content))
    words = flags_of(tmp_path, "--tensor-model-parallel-size", str(ranks))
    assert config_of(words, ranks=ranks).model.padded_vocab_size == rows


def test_notes_of_a_folder_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []

    def load(*arguments: Any, **options: Any) -> Loaded:
        given.append((arguments, options))
        return Loaded(3, ["a note", "another"])

    monkeypatch.setattr(reading, "load_folder", load)
    content = {**SIZES, **MODELS["llama"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    for more, draws in ([], True), (["--no-initialization"], False):
        config = config_of(flags_of(tmp_path, *more))
        context: Any = "context"
        notes = load_initial_weights(config, context, ["chunk"])  # type: ignore[list-item]
        assert notes == [f"loaded {tmp_path} (Hugging Face)", "a note", "another"]
        assert given.pop() == ((["chunk"], tmp_path, "context"), {"may_lack_depths": draws})
