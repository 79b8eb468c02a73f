"""Initial weights are the same bits on every layout, and are drawn as the flags say."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config import RunConfig, parse_args
from megatron_ext.layout import Layout, ParallelContext, embedding_ranks, mtp_rank
from megatron_ext.models.chunks import build_chunks
from megatron_ext.models.initialization import Marked, initialize_by_name, mark_methods
from megatron_ext.models.shards import shards_of
from megatron_ext.models.transformer_config import build_transformer_config
from megatron_ext.training.preflight import preflight
from pretrain_gpt import GPT
from tests.ranks import ranks, run_on_ranks
from tests.training_runs import TINY, mock_data

FLAGS = [word for word in TINY if word != "--use-cpu-initialization"]
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
}  # fmt: skip

MODELS = {
    "dense": "",
    "experts": EXPERTS,
    "mtp, tied": "--mtp-num-layers 2 --tie",
    "tied": "--tie",
}


def config_of(words: str, num_ranks: int) -> RunConfig:
    flags = [*FLAGS, *mock_data(), "--train-iters", "1", "--nproc-per-node", str(num_ranks)]
    if "--tie" in words:
        flags.remove("--untie-embeddings-and-output-weights")
        words = words.replace("--tie", "")
    parsed = parse_args([*flags, *words.split()], world_size=0, device="cpu")
    return preflight(parsed.config)[0]


def save_weights(context: ParallelContext, config: RunConfig, folder: Path) -> None:
    chunks = build_chunks(GPT.model_chunk, config, build_transformer_config(config), context)
    parts = [
        (shard.name, shard.full_shape, shard.offset, shard.tensor.detach().clone())
        for chunk in chunks
        for shard in shards_of(chunk)
    ]
    torch.save(parts, folder / f"{context.rank}.pt")


def weights_of(words: str, num_ranks: int, folder: Path) -> dict[str, Tensor]:
    """Full weights by name; copies on several ranks must agree."""
    folder.mkdir()
    config = config_of(words, num_ranks)
    groups = embedding_ranks(
        tied=not config.model.untie_embeddings_and_output_weights, mtp_rank=mtp_rank(config)
    )
    arguments = {"config": config, "folder": folder}
    run_on_ranks(save_weights, Layout.from_config(config), arguments, get_embedding_ranks=groups)
    full: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.pt")):
        for name, shape, offset, part in torch.load(path):
            whole = full.setdefault(name, torch.full(shape, math.nan, dtype=part.dtype))
            sizes = zip(offset, part.shape, strict=True)
            target = whole[tuple(slice(start, start + size) for start, size in sizes)]
            assert target.isnan().all() or torch.equal(target, part), f"{name} differs on {path}"
            target.copy_(part)
    return full


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Flags of a model, and its weights on one rank."""
    words = MODELS[request.param]
    folder = tmp_path_factory.mktemp("one") / "weights"
    return SimpleNamespace(name=request.param, words=words, truth=weights_of(words, 1, folder))


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_do_not_depend_on_the_layout(name: str, model: Any, tmp_path: Path) -> None:
    num_ranks, layout = LAYOUTS[name]
    if "expert" in layout and model.name != "experts":
        pytest.skip("a model without experts")
    if "zb-v" in layout and "tie" in model.words:
        pytest.skip("zb-v refuses tied embeddings")
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


def test_bf16_weights_are_the_rounded_single_precision_ones(tmp_path: Path) -> None:
    single = weights_of("", 1, tmp_path / "fp32")
    half = weights_of("--bf16", 1, tmp_path / "bf16")
    for name, weight in single.items():
        assert torch.equal(half[name], weight.bfloat16()), name


def test_the_seed_decides(tmp_path: Path) -> None:
    one = weights_of("", 1, tmp_path / "one")
    other = weights_of("--seed 7", 1, tmp_path / "other")
    assert not torch.equal(one["output_layer.weight"], other["output_layer.weight"])


def test_a_wider_padded_vocabulary_keeps_the_rows(tmp_path: Path) -> None:
    """1,900 ids are padded to 1,920 on one rank, to 2,048 for four."""
    words = "--vocab-size 1900 --num-query-groups 4"
    one = weights_of(words, 1, tmp_path / "one")
    four = weights_of(f"{words} --tensor-model-parallel-size 4", 4, tmp_path / "four")
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        rows = one[name].size(0)
        assert four[name].size(0) > rows
        assert torch.equal(four[name][:rows], one[name])


def check_cpu_initialization(context: ParallelContext, folder: Path) -> None:
    """With the flag the weights are megatron-core's, drawn from torch's generator in order."""
    config = config_of("--use-cpu-initialization", 1)
    core = build_transformer_config(config)
    assert not isinstance(core.init_method, Marked)
    torch.manual_seed(5)
    (chunk,) = build_chunks(GPT.model_chunk, config, core, context)
    torch.manual_seed(5)
    first = torch.empty(2048, 64)
    torch.nn.init.normal_(first, std=0.02)
    assert torch.equal(chunk.embedding.word_embeddings.weight, first)


def test_cpu_initialization_stays_megatrons(tmp_path: Path) -> None:
    run_on_ranks(check_cpu_initialization, Layout(world_size=1), {"folder": tmp_path})


class PlainModel(torch.nn.Module):
    """A user's own module, with a linear layer of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        from megatron.core.transformer.utils import sharded_state_dict_default

        return sharded_state_dict_default(self.linear, "linear.", (), metadata)  # type: ignore[no-any-return]


@ranks()
def test_a_users_plain_modules_are_drawn_by_name(context: ParallelContext) -> None:
    torch.manual_seed(1)
    one = PlainModel()
    initialize_by_name([one], 1234)
    torch.manual_seed(2)
    other = PlainModel()
    state = torch.get_rng_state()
    initialize_by_name([other], 1234)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.linear.weight, other.linear.weight)
    assert torch.equal(one.linear.bias, other.linear.bias)
    assert float(one.linear.weight.detach().std()) > 0


def test_marked_methods_fill_plain_tensors_at_once() -> None:
    method = partial(torch.nn.init.constant_, val=3.0)
    config = SimpleNamespace(
        init_method=method, output_layer_init_method=method, embedding_init_method=method
    )
    mark_methods(config)
    mark_methods(config)
    assert config.init_method.method is method
    assert torch.equal(config.init_method(torch.zeros(2)), torch.full((2,), 3.0))
    parameter = torch.nn.Parameter(torch.zeros(2))
    config.init_method(parameter)
    assert torch.equal(parameter.detach(), torch.zeros(2))
