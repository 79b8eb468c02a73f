"""Frozen parts: plain torch on one rank, and every layout trains as one rank does."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from megatron_ext.config.frozen_parts import FrozenParts, Part, in_model
from megatron_ext.config.optimizer import FreezeConfig
from megatron_ext.device import select
from megatron_ext.errors import ConfigError
from megatron_ext.inspect import parity
from megatron_ext.inspect.layouts import parse_layout
from megatron_ext.layers.chunks import build_chunks, wrap_chunks
from megatron_ext.layers.moe import Router
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.optim.builder import build_optimizer
from megatron_ext.optim.schedule import build_scheduler
from megatron_ext.optim.update import update_parameters
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.train.exit_codes import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from tests.layers import plain
from tests.layers.test_lora import TIED, loss_of, near
from tests.layers.test_mtp_layout import assert_same
from tests.numerics.stock import gpt_chunk, gpt_config
from tests.ranks import ranks
from tests.training_runs import SAME_WEIGHTS, SMALL, mock_data, train_steps

CONSTANT = "--lr 1e-2 --min-lr 1e-2 --lr-decay-style constant --clip-grad 0.5".split()
STEPS = 3
FROZEN = {
    "--freeze embeddings norms": r"embedding|norm",
    "--freeze layers.0 output": r"decoder\.layers\.0|output_layer",
    "--freeze layers.1.attention mlp.linear_fc2": r"layers\.1\.self_attention|linear_fc2",
    "--freeze-all-but linear_qkv final_layernorm": r"^(?!.*(linear_qkv|final_layernorm))",
}
"""Flags, and which parameters they freeze."""


class Plain:
    """A model in plain torch, of which the parameters that match ``frozen`` need no gradient."""

    def __init__(self, base: Any, frozen: str) -> None:
        self.base = base
        self.weights = {
            name: x.detach().clone().requires_grad_(re.search(frozen, name) is None)
            for name, x in base.named_parameters()
        }
        self.trained = {name: x for name, x in self.weights.items() if x.requires_grad}
        decayed = [x for x in self.trained.values() if x.dim() > 1]
        others = [x for x in self.trained.values() if x.dim() == 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.01)

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        output: Tensor = functional_call(self.base, self.weights, inputs, named)
        return output

    def step(self, loss: Tensor) -> float:
        """Make an update with the gradients of ``loss``; return their norm before clipping."""
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), 0.5)
        self.optimizer.step()
        return float(norm)


@ranks()
def test_three_steps_are_those_of_plain_torch(context: ParallelContext) -> None:
    for words, frozen in FROZEN.items():
        run = gpt_config(*words.split(), *CONSTANT)
        transformer_config = build_transformer_config(run)
        (chunk,) = build_chunks(build_gpt_chunk, run, transformer_config, context)
        plain.fill(chunk, context)
        own = dict(chunk.named_parameters())
        before = {name: x.detach().clone() for name, x in own.items()}
        truth = Plain(gpt_chunk(gpt_config(), context), frozen)
        (ddp,) = wrap_chunks([chunk], run, transformer_config, context, torch.device("cpu"))
        optimizer = build_optimizer(run, [ddp], context.pgs)
        build_scheduler(run, optimizer)  # sets the learning rate
        for step in range(STEPS):
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            loss = loss_of(ddp, run)
            loss.backward()
            update = update_parameters(optimizer, 0.5)
            expected = loss_of(truth, run)
            near(loss, expected, f"{words}: loss of step {step}", 1e-6)
            assert update.grad_norm == pytest.approx(truth.step(expected), rel=2e-6), words
        for name, want in truth.weights.items():
            assert torch.equal(own[name], before[name]) == (name not in truth.trained), name
            near(own[name], want, f"{words}: {name}", 2e-6)
        assert {name for name, x in own.items() if hasattr(x, "main_grad")} == set(truth.trained)
        state = [x for group in optimizer.param_groups for x in group["params"]]
        assert len(state) == len(truth.trained)


RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type "
    "alltoall --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
)
LAYOUTS = {
    # A stage has nothing to train, in its layers or at all.
    "--freeze layers.0-1 embeddings": ["tp2sp", "pp2", "pp4", "pp2vpp2", f"pp2[{RECOMPUTED}]"],
    f"--freeze layers.0-2 mlp {RECOMPUTED}": ["pp2", "cp2", "pp2zbv"],
    "--freeze-all-but output": ["tp2", "pp2do", "pp2zbh1"],
    "--freeze-all-but embeddings": ["pp4", "dp2do"],
    f"--freeze experts layers.0-1.router {EXPERTS}": ["ep2", "pp2", "tp2sp"],
    f"--freeze-all-but experts {EXPERTS}": ["ep2", "dp2do"],
    "tied --freeze embeddings": ["pp2", "tp2sp"],
    "tied --freeze-base-for-mtp --mtp-num-layers 1": ["pp2", "tp2sp", f"pp2[{RECOMPUTED}]"],
}
QUICK = {("--freeze layers.0-1 embeddings", "pp4"), ("tied --freeze embeddings", "pp2")}
CASES = [
    pytest.param(
        words, layouts if slow else [x for x in layouts if (words, x) in QUICK],
        marks=[pytest.mark.slow] if slow else [],
    )
    for slow in (False, True) for words, layouts in LAYOUTS.items()
    if slow or any((words, x) in QUICK for x in layouts)
]  # fmt: skip


def record(words: str, layout: str, folder: Path) -> parity.Recording:
    base = [word for word in SAME_WEIGHTS if word != "--use-distributed-optimizer"]
    if words.startswith("tied"):
        base = [word for word in base if word in TIED]
    flags = [*base, *mock_data(), *words.removeprefix("tied").split()]
    return parity.record(GPT, flags, parse_layout(layout), STEPS, folder, select())


@pytest.mark.parametrize(("words", "layouts"), CASES)
def test_layouts_train_as_one_rank(words: str, layouts: list[str], tmp_path: Path) -> None:
    truth = record(words, "dp1", tmp_path / "one")
    assert truth.failure is None
    for number, layout in enumerate(layouts):
        found = record(words, layout, tmp_path / str(number))
        assert_same(parity.compare(found, truth, parity.Tolerances()))


@ranks()
def test_the_bias_of_a_frozen_router_stays(context: ParallelContext) -> None:
    run = gpt_config("--freeze", "layers.0.router", *EXPERTS.split())
    transformer_config = build_transformer_config(run)
    (chunk,) = build_chunks(build_gpt_chunk, run, transformer_config, context)
    loss_of(chunk, run).backward()
    counts = [x.local_tokens_per_expert for x in chunk.modules() if isinstance(x, Router)]
    assert [bool(count.any()) for count in counts] == [False, True]


PARAMETERS = (
    "embedding.word_embeddings.weight",
    "decoder.layers.0.input_layernorm.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.3.self_attention.q_layernorm.weight",
    "decoder.layers.12.mlp.router.weight",
    "decoder.layers.12.mlp.experts.local_experts.3.linear_fc1.weight",
    "decoder.layers.12.mlp.shared_experts.linear_fc1.weight",
    "decoder.final_layernorm.weight",
    "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight",
    "output_layer.weight",
    "double_blocks.1.img.linear_qkv.weight",
)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("embeddings", [0]),
        ("output", [9]),
        ("attention", [2, 3, 8, 10]),
        ("layers.attention", [2, 3]),
        ("mlp", [4, 5, 6]),
        ("experts", [5]),
        ("router", [4]),
        ("norms", [1, 3, 7]),
        ("layers.norms", [1, 3]),
        ("layers", [1, 2, 3, 4, 5, 6]),
        ("layers.1-3", [3]),
        ("layers.2", []),
        ("mtp", [8]),
        ("mtp.layers.0", [8]),
        ("linear_qkv", [2, 10]),
        ("double_blocks.0-1.img", [10]),
        ("decoder.final_layernorm", [7]),
    ],
)
def test_names_of_parts(name: str, places: list[int]) -> None:
    part = Part.of(name)
    assert part is not None
    assert [n for n, parameter in enumerate(PARAMETERS) if part.holds(parameter)] == places
    frozen, alone = (
        FrozenParts(FreezeConfig(freeze=[name])),
        FrozenParts(FreezeConfig(freeze_all_but=[name])),
    )
    assert all(frozen.freeze(x) != alone.freeze(x) for x in PARAMETERS)


@pytest.mark.parametrize("name", ["", "layers.3-1", "layers.-1", "mlp.3", "layers.1.2", "a b", "."])
def test_what_is_no_name(name: str) -> None:
    assert Part.of(name) is None


def test_names_in_the_whole_model() -> None:
    assert in_model("decoder.layers.1.mlp.x.weight", 5) == "decoder.layers.5.mlp.x.weight"
    assert in_model("output_layer.weight", tied=True) == "embedding.word_embeddings.weight"
    norm = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert in_model(norm) == "decoder.layers.0.input_layernorm.weight"
    assert in_model("mlp.linear_fc1.layer_norm_bias") == "pre_mlp_layernorm.bias"


@ranks(pp=2)
def test_a_model_of_ones_own_tells_of_parts_that_it_lacks(context: ParallelContext) -> None:
    words = "--pipeline-model-parallel-size 2 --freeze".split()
    for names, message in {
        "layers.0-2": r"`--freeze` \(layers.0-2\) names layers that this model lacks \(layers.2\)",
        "atention": r"`--freeze` \(atention\) names no part of this model; did you mean attention",
        "embeddings layers decoder output": "freezes all of this model",
    }.items():
        run = gpt_config(*words, *names.split(), world_size=2)
        transformer_config = build_transformer_config(run)
        build = partial(build_chunks, build_gpt_chunk, run, transformer_config, context)
        with pytest.raises(ConfigError, match=message):
            build()


SHARDED = {
    "optim_grads": "--data-parallel-sharding-strategy optim_grads --ddp-bucket-size 2000",
    "optim_grads_params": "--data-parallel-sharding-strategy optim_grads_params",
    "offload": "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_shared_state_trains_as_state_that_is_not(optimizer: str, tmp_path: Path) -> None:
    """Losses and norms agree; on the second stage of two, all or a part is trained."""
    words = f"--freeze embeddings layers.0-1 norms --optimizer {optimizer} --train-iters 4"
    layout = "--pipeline-model-parallel-size 2"
    flags = [*SAME_WEIGHTS, *mock_data(), *words.split(), *layout.split()]
    truth = train_steps(flags, tmp_path / "plain", 4)
    for name, more in SHARDED.items():
        if optimizer == "muon" and name == "offload":
            continue
        rows = train_steps([*flags, *more.split()], tmp_path / name, 4)
        for row, want in zip(rows, truth, strict=True):
            for key in ("lm loss", "grad_norm"):
                assert row[key] == pytest.approx(want[key], rel=1e-6), (name, row["iteration"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--freeze layers.1-4", "(layers.1-4) names layers that this model lacks (layers.4)"),
        ("--freeze-all-but linear_qvk", "names no part of this model; did you mean linear_qkv?"),
        ("--freeze router", "this model; use embeddings, output, attention, mlp, norms, layers."),
        ("--freeze output", "is the word embedding of this model, which is tied; use embeddings."),
        ("--freeze embeddings decoder", "freezes all of this model, and nothing would be trained"),
        ("--freeze embeddings --decoupled-lr 0.1", "`--decoupled-lr` (0.1) is for the embedding"),
    ],
)
def test_parts_that_a_model_lacks_are_refused_before_ranks_start(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(TEXT, [*SMALL, *words.split()]) == EXIT_CODE_USER_ERROR
    assert message in capsys.readouterr().err
