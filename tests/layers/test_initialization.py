"""Initial weights are the same bits on every layout, and are drawn as the flags say."""

import copy
import hashlib
import math
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel as CoreGPTModel
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import make_sharded_tensor_for_checkpoint
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.initialization import (
    Marked,
    initialize_by_name,
    mark_methods,
    shards_of,
    unmark_methods,
)
from megatron_ext.layers.specs import layer_spec
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext, embedding_ranks
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.task import GPT
from tests.ranks import ranks, run_on_ranks
from tests.training_runs import SAME_WEIGHTS, mock_data, prepared

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"

LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2sp pp2": (4, "--tensor-model-parallel-size 2 --sequence-parallel "
                     "--pipeline-model-parallel-size 2"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp2vpp2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "pp2 zb-v": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"),
    "cp2": (2, "--context-parallel-size 2"),
    "dp2": (2, ""),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "tp2sp ep2 etp1": (2, "--tensor-model-parallel-size 2 --sequence-parallel "
                          "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"),
}  # fmt: skip

MODELS = {
    "dense": "",
    "experts": EXPERTS,
    "some experts": (
        f"{EXPERTS} --moe-layer-freq [0,1,0,1] --moe-shared-expert-intermediate-size 64"
    ),
    "mtp": "--mtp-num-layers 2",
    "mtp, tied": "--mtp-num-layers 2 --tie --embedding-init-method-std 0.5",
    "tied": "--tie --embedding-init-method-std 0.5",
    "xavier": "--init-method-xavier-uniform --qk-layernorm --add-qkv-bias",
}


def config_of(words: str, num_ranks: int) -> tuple[RunConfig, int]:
    """Return a run's configuration, and the entries of its vocabulary before padding."""
    # Models are only built here, experts also in layouts that could not train them.
    flags = [*SAME_WEIGHTS, *mock_data(), "--train-iters", "1", "--skip-train"]
    flags += ["--nproc-per-node", str(num_ranks)]
    if "--tie" in words:
        flags.remove("--untie-embeddings-and-output-weights")
        words = words.replace("--tie", "")
    _, config, tokenizer = prepared([*flags, *words.split()])
    return config, tokenizer.vocab_size


def save_weights(
    context: ParallelContext, config: RunConfig, vocab_size: int, folder: Path
) -> None:
    state = torch.get_rng_state()
    transformer_config = build_transformer_config(config)
    chunks = build_chunks(GPT.model_chunk, config, transformer_config, context, vocab_size)
    assert torch.equal(torch.get_rng_state(), state)
    assert not isinstance(transformer_config.init_method, Marked), "later modules fill themselves"
    parts = [
        (shard.name, shard.full_shape, shard.offset, shard.tensor.detach().clone(), shard.is_main)
        for chunk in chunks
        for shard in shards_of(chunk)
    ]
    torch.save(parts, folder / f"{context.rank}.pt")


def weights_of(words: str, num_ranks: int, folder: Path) -> dict[str, Tensor]:
    """Return full weights by name; copies on several ranks must agree."""
    folder.mkdir()
    config, vocab_size = config_of(words, num_ranks)
    groups = embedding_ranks(config.model, config.parallel)
    arguments = {"config": config, "vocab_size": vocab_size, "folder": folder}
    run_on_ranks(
        save_weights, Layout.from_config(config.parallel), arguments, get_embedding_ranks=groups
    )
    full: dict[str, Tensor] = {}
    mains: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for path in sorted(folder.glob("*.pt")):
        for name, shape, offset, part, is_main in torch.load(path):
            mains[name, offset] += is_main
            whole = full.setdefault(name, torch.full(shape, math.nan, dtype=part.dtype))
            sizes = zip(offset, part.shape, strict=True)
            target = whole[tuple(slice(start, start + size) for start, size in sizes)]
            assert target.isnan().all() or torch.equal(target, part), f"{name} differs on {path}"
            target.copy_(part)
    assert set(mains.values()) == {1}, "of the copies of a part one is the main one"
    return full


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    words = MODELS[request.param]
    folder = tmp_path_factory.mktemp("one") / "weights"
    return SimpleNamespace(words=words, truth=weights_of(words, 1, folder))


PAIRS = [
    (model, layout)
    for model in MODELS
    for layout in LAYOUTS
    if not ("ep2" in layout and "experts" not in model)
    and not ("zb-v" in layout and ("tied" in model or "mtp" in model))
    and not (layout in ("cp2", "dp2") and model not in ("dense", "experts"))
]
"""Models with the layouts that they can have; only two of them have copies."""


@pytest.mark.parametrize(("model", "name"), PAIRS, indirect=["model"])
def test_weights_do_not_depend_on_the_layout(name: str, model: Any, tmp_path: Path) -> None:
    num_ranks, layout = LAYOUTS[name]
    mine = weights_of(f"{model.words} {layout}", num_ranks, tmp_path / "weights")
    assert mine.keys() == model.truth.keys()
    for key, want in model.truth.items():
        assert not mine[key].isnan().any(), key
        assert torch.equal(mine[key], want), key


def test_layers_and_experts_are_drawn_apart_and_as_wide_as_asked(tmp_path: Path) -> None:
    words = f"{EXPERTS} --init-method-std 0.03"
    weights = weights_of(words, 1, tmp_path / "weights")
    fc1 = {name: w for name, w in weights.items() if "experts.linear_fc1.weight" in name}
    assert len(fc1) == 4 * 4
    first, *others = fc1.values()
    assert not any(torch.equal(first, other) for other in others)
    for name, weight in weights.items():
        if "linear_proj" in name or "linear_fc2" in name:
            assert float(weight.std()) == pytest.approx(0.03 / math.sqrt(2 * 4), rel=0.1), name
        elif "norm" not in name:
            # A router has 256 weights only.
            tolerance = 0.2 if "router" in name else 0.1
            assert float(weight.std()) == pytest.approx(0.03, rel=tolerance), name
        else:
            assert torch.equal(weight, torch.ones_like(weight)), name


@pytest.mark.parametrize("method", ["", "--init-method-xavier-uniform", EXPERTS])
def test_bf16_weights_are_the_rounded_single_precision_ones(method: str, tmp_path: Path) -> None:
    """Xavier's uniform numbers show it: drawn in bfloat16 they are other numbers."""
    single = weights_of(method, 1, tmp_path / "fp32")
    half = weights_of(f"--bf16 {method}", 1, tmp_path / "bf16")
    for name, weight in single.items():
        assert torch.equal(half[name], weight.bfloat16()), name


def test_xavier_leaves_the_biases_of_a_router_at_zero(tmp_path: Path) -> None:
    words = f"--init-method-xavier-uniform --add-bias-linear {EXPERTS}"
    weights = weights_of(words, 1, tmp_path / "weights")
    biases = [weight for name, weight in weights.items() if "router.bias" in name]
    assert len(biases) == 4 and not any(bias.any() for bias in biases)
    router = weights["decoder.layers.mlp.router.weight[0]"]
    output = weights["decoder.layers.self_attention.linear_proj.weight[0]"]
    for weight in (router, output):
        limit = math.sqrt(6 / sum(weight.shape))
        assert 0.9 * limit < float(weight.abs().max()) <= limit


def test_the_seed_decides(tmp_path: Path) -> None:
    one = weights_of("", 1, tmp_path / "one")
    other = weights_of("--seed 7", 1, tmp_path / "other")
    assert not torch.equal(one["output_layer.weight"], other["output_layer.weight"])


@pytest.mark.parametrize("method", ["", "--init-method-xavier-uniform"])
def test_a_wider_padded_vocabulary_keeps_the_rows(method: str, tmp_path: Path) -> None:
    """1,901 entries need no more on one rank, 1,904 on two and on four; a row has 20 numbers."""
    words = (
        "--vocab-size 1900 --make-vocab-size-divisible-by 1 --hidden-size 20 --kv-channels 6 "
        f"--num-query-groups 4 --ffn-hidden-size 40 {method}"
    )
    one = weights_of(words, 1, tmp_path / "one")
    for size in (2, 4):
        layout = f"--tensor-model-parallel-size {size}"
        other = weights_of(f"{words} {layout}", size, tmp_path / str(size))
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert one[name].size(0) == 1901
            assert other[name].size(0) == 1901 + -1901 % size
            assert torch.equal(other[name][:1901], one[name])
            assert other[name].isfinite().all()
            assert float(other[name].std()) == pytest.approx(float(one[name].std()), rel=0.1)


def test_a_weight_is_what_its_name_and_seed_draw(tmp_path: Path) -> None:
    """Draws by hand, so that the same seed gives the same model in later versions too."""
    weights = weights_of("--tensor-model-parallel-size 2", 2, tmp_path / "weights")
    for name, std in (
        ("decoder.layers.self_attention.linear_qkv.weight[2]", 0.02),
        ("decoder.layers.self_attention.linear_proj.weight[3]", 0.02 / math.sqrt(2 * 4)),
    ):
        digest = hashlib.sha256(f"1234 {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") // 2)
        want = torch.empty(weights[name].shape).normal_(0.0, std, generator=generator)
        assert torch.equal(weights[name], want), name


def test_zero_centred_norms_start_at_a_gain_of_one(tmp_path: Path) -> None:
    """The flag makes the stored weight the gain minus one."""
    weights = weights_of("--apply-layernorm-1p", 1, tmp_path / "weights")
    norms = {name: weight for name, weight in weights.items() if "norm" in name}
    assert len(norms) == 2 * 4 + 1
    for name, weight in norms.items():
        assert torch.equal(weight, torch.zeros_like(weight)), name


def test_learned_positions_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    """torch's embedding draws for itself, on the first stage only (see `save_weights`)."""
    words = "--position-embedding-type learned_absolute --normalization LayerNorm"
    one = weights_of(words, 1, tmp_path / "one")
    other = weights_of(f"{words} --pipeline-model-parallel-size 2", 2, tmp_path / "other")
    name = "embedding.position_embeddings.weight"
    assert torch.equal(one[name], other[name])
    assert float(one[name].std()) == pytest.approx(0.02, rel=0.1)


@ranks()
def test_cpu_initialization_stays_megatrons(context: ParallelContext) -> None:
    """Weights are megatron-core's, drawn from torch's generator in order."""
    config, vocab_size = config_of("--use-cpu-initialization", 1)
    transformer_config = build_transformer_config(config)
    assert not isinstance(transformer_config.init_method, Marked)
    torch.manual_seed(5)
    (chunk,) = build_chunks(GPT.model_chunk, config, transformer_config, context, vocab_size)
    torch.manual_seed(5)
    # Embedding, attention's output and input, the gated layer's output and input, and so on.
    truth = CoreGPTModel(
        config=transformer_config,
        transformer_layer_spec=layer_spec(transformer_config, impl="torch"),
        vocab_size=config.model.padded_vocab_size,
        max_sequence_length=config.section(PositionConfig).max_position_embeddings,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pg_collection=context.pgs,
    )
    want = dict(truth.named_parameters())
    assert len(want) == 4 * 6 + 3
    for name, parameter in chunk.named_parameters():
        assert torch.equal(parameter, want[name]), name
    seeded = torch.Generator().manual_seed(5)
    first = torch.nn.init.normal_(torch.empty(2048, 64), std=0.02, generator=seeded)
    assert torch.equal(chunk.embedding.word_embeddings.weight, first)


class PlainModel(torch.nn.Module):
    """A user's own module: torch's layers, one of which starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.last = torch.nn.Linear(8, 4)
        torch.nn.init.zeros_(self.last.weight)
        self.cut = torch.nn.Linear(8, 4)
        self.cut.weight.tensor_model_parallel = True
        self.register_buffer("noise", torch.randn(3))

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name in ("linear", "last", "cut"):
            part = getattr(self, name)
            state.update(sharded_state_dict_default(part, f"{name}.", (), metadata))
        noise = make_sharded_tensor_for_checkpoint(self.noise, "noise")
        return {**state, "noise": noise}


def marked_config(method: Any = torch.nn.init.ones_) -> SimpleNamespace:
    names = ("init_method", "output_layer_init_method", "embedding_init_method")
    config = SimpleNamespace(**dict.fromkeys(names, method), perform_initialization=True)
    mark_methods(config)
    return config


def plain_model(seed: int, dtype: torch.dtype = torch.float32) -> PlainModel:
    torch.manual_seed(seed)
    model = PlainModel().to(dtype)
    cut = {name: p.detach().clone() for name, p in model.cut.named_parameters()}
    state = torch.get_rng_state()
    initialize_by_name([model], marked_config(), 1234)
    assert torch.equal(torch.get_rng_state(), state)
    # A rank cannot draw its part of a cut weight by itself.
    assert all(torch.equal(p, cut[name]) for name, p in model.cut.named_parameters())
    return model


@ranks()
def test_a_users_plain_modules_are_drawn_by_name_but_for_zeros(context: ParallelContext) -> None:
    one, other, half = plain_model(1), plain_model(2), plain_model(3, torch.bfloat16)
    for name in ("weight", "bias"):
        value = getattr(one.linear, name)
        assert torch.equal(value, getattr(other.linear, name)), name
        assert torch.equal(value.bfloat16(), getattr(half.linear, name)), name
        # As torch draws them: uniform between plus and minus 1/sqrt(inputs).
        assert 0 < float(value.detach().abs().max()) < 1 / math.sqrt(8)
    assert not torch.equal(one.linear.bias, one.last.bias)
    names = {shard.name for shard in shards_of(one)}
    assert {shard.name for shard in shards_of(one, buffers=True)} == {*names, "noise"}
    assert "noise" not in names
    assert torch.equal(one.last.weight, torch.zeros(4, 8))


class Rewrapping(PlainModel):
    """A module that does as Transformer Engine does: a new Parameter after initialization."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        config.init_method(self.linear.weight)
        self.linear.weight = torch.nn.Parameter(self.linear.weight)


@ranks()
def test_a_marked_parameter_may_be_wrapped_again(context: ParallelContext) -> None:
    config = marked_config(partial(torch.nn.init.constant_, val=3.0))
    model = Rewrapping(config)
    assert model.linear.weight.isnan().all()
    initialize_by_name([model], config, 1234)
    assert torch.equal(model.linear.weight, torch.full((4, 8), 3.0))


def test_a_parameter_that_moves_leaves_its_place_to_no_other() -> None:
    """megatron-core's router moves so; the memory that it frees is what the next one would get."""
    config = marked_config(partial(torch.nn.init.constant_, val=3.0))
    parameters = [torch.nn.Parameter(torch.empty(64, 64)) for _ in range(8)]
    for parameter in parameters:
        parameter.data = torch.empty(64, 64)
        config.init_method(parameter)
        parameter.data = parameter.data.to(torch.bfloat16)
    marks = config.init_method.marks
    marks.settle()
    assert all(marks.method_of(parameter) is not None for parameter in parameters)


@ranks()
def test_a_parameter_that_is_not_named_is_refused(context: ParallelContext) -> None:
    config = marked_config()
    model = PlainModel()
    model.forgotten = torch.nn.Parameter(torch.empty(3))
    config.init_method(model.forgotten)
    with pytest.raises(ConfigError, match=r"the weight `forgotten` has no initial values: .* name"):
        initialize_by_name([model], config, 1234)


@ranks()
def test_without_initial_weights_memory_stays_as_it_was_found(context: ParallelContext) -> None:
    """``--no-initialization`` leaves weights to a checkpoint; the memory may hold NaN."""
    config = marked_config()
    config.perform_initialization = False
    model = PlainModel()
    model.found = torch.nn.Parameter(torch.full((3,), math.nan))
    initialize_by_name([model], config, 1234)
    assert model.found.isnan().all()


def test_marked_methods_fill_plain_tensors_at_once() -> None:
    method = partial(torch.nn.init.constant_, val=3.0)
    config = marked_config(method)
    marked = config.init_method
    mark_methods(config)
    assert config.init_method is marked and marked.method is method
    assert torch.equal(marked(torch.zeros(2)), torch.full((2,), 3.0))
    unmark_methods(config)
    unmark_methods(config)
    methods = config.init_method, config.output_layer_init_method, config.embedding_init_method
    assert methods == (method, method, method)


def test_a_copied_configuration_marks_in_the_same_place() -> None:
    config = marked_config()
    copied = copy.deepcopy(config)
    copied.init_method = torch.nn.init.zeros_
    mark_methods(copied)
    parameter = torch.nn.Parameter(torch.zeros(2))
    copied.init_method(parameter)
    assert config.embedding_init_method.marks.method_of(parameter) is torch.nn.init.zeros_
