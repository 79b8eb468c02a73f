"""Which layers of a model get 8-bit products, and what cannot have them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_ext.config.parser import parse_args
from megatron_ext.config.precision import Fp8Config
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.fp8.attach import attach_fp8
from megatron_ext.layers.fp8.scaling import ExpertParts, Parts, Role
from megatron_ext.layers.linear import ColumnParallelLinear
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.text.task import TEXT
from tests.ranks import ParallelContext, ranks
from tests.training_runs import TINY, mock_data

HYBRID = Fp8Config(fp8_format="hybrid")
ON_A_CPU: dict[str, Any] = {"num_layers": None, "on_gpu": False, "varies": False}


def config_of(flags: str) -> RunConfig:
    words = [*TINY, *mock_data(), *"--bf16 --ffn-hidden-size 192 --train-iters 1".split()]
    parsed = parse_args([*words, *flags.split()], TEXT, world_size=1, device="cpu").config
    model = dataclasses.replace(parsed.model, padded_vocab_size=2048)
    return dataclasses.replace(parsed, model=model)


@ranks()
def test_the_linear_layers_of_the_decoder_are_attached(context: ParallelContext) -> None:
    config = config_of("--fp8-format hybrid --mtp-num-layers 1")
    (chunk,) = build_chunks(build_gpt_chunk, config, build_transformer_config(config), context)
    found = {name for name, module in chunk.named_modules() if name.endswith(".fp8")}
    kinds = "self_attention.linear_qkv self_attention.linear_proj mlp.linear_fc1 mlp.linear_fc2"
    assert found == {f"decoder.layers.{n}.{kind}.fp8" for n in range(4) for kind in kinds.split()}
    assert any(name.startswith("mtp.") for name, _ in chunk.named_modules())


@ranks()
def test_a_model_without_such_layers_is_refused(context: ParallelContext) -> None:
    foreign = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(16, 16)])})
    with pytest.raises(ConfigError, match="of which this model has none; leave it out"):
        attach_fp8([foreign], HYBRID, context.pgs, **ON_A_CPU)
    # A stage may hold the ends of a model only.
    attach_fp8([torch.nn.Linear(16, 16)], HYBRID, context.pgs, **ON_A_CPU)


@ranks()
def test_sides_that_no_product_can_have_are_refused(context: ParallelContext) -> None:
    """The flags of such models do not name the sides."""
    transformer_config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)
    for sides in ((16, 24), (24, 16)):
        layer = ColumnParallelLinear(
            *sides,
            config=transformer_config,
            init_method=torch.nn.init.zeros_,
            tp_group=context.pgs.tp,
        )
        model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([layer])})
        with pytest.raises(ConfigError, match=r"those of `blocks.0` are \(.*24.*\); change its"):
            attach_fp8([model], HYBRID, context.pgs, **ON_A_CPU)


@ranks(tp=2, dp=2, ep=2, etp=1)
def test_experts_are_completed_over_ranks_that_hold_them(context: ParallelContext) -> None:
    """Experts have another tensor-parallel group and other replicas."""
    pgs = context.pgs
    parts = ExpertParts(pgs, cuts_input=True, varies=True)
    assert [parts.of_tensor(role) for role in Role] == [None] * 3
    assert parts.of_step() == (pgs.expt_tp, pgs.expt_dp)
    whole = Parts(pgs, cuts_input=True)
    assert whole.of_tensor(Role.WEIGHT) is pgs.tp and whole.of_step() == (pgs.tp_dp_cp,)


@ranks()
def test_layers_of_experts_vary_in_tokens(context: ParallelContext) -> None:
    flags = "--fp8-format hybrid --num-experts 2 --moe-shared-expert-intermediate-size 64"
    config = config_of(flags)
    (chunk,) = build_chunks(build_gpt_chunk, config, build_transformer_config(config), context)
    kinds = {name: m.fp8.parts for name, m in chunk.named_modules() if getattr(m, "fp8", None)}
    experts = {name for name, parts in kinds.items() if isinstance(parts, ExpertParts)}
    assert experts == {name for name in kinds if ".local_experts." in name}
    assert len(experts) == 4 * 2 * 2 and any(".shared_experts." in name for name in kinds)
    assert all(parts.varies == (name in experts) for name, parts in kinds.items())


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    groups: Any = None
    with pytest.raises(ConfigError, match=r"capability 8\.9 or above, but this one has 8\.0"):
        attach_fp8([], Fp8Config(), groups, num_layers=4, on_gpu=True, varies=False)
