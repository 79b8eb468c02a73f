"""Which layers of a model get 8-bit products, and what cannot have them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config import RunConfig, parse_args
from megatron_ext.errors import ConfigError
from megatron_ext.models.chunks import build_chunks
from megatron_ext.models.fp8.attach import attach_fp8
from megatron_ext.models.gpt import build_gpt_chunk
from megatron_ext.models.transformer_config import build_transformer_config
from tests.ranks import ParallelContext, ranks
from tests.training_runs import TINY, mock_data


def config_of(flags: str) -> RunConfig:
    words = [*TINY, *mock_data(), *"--bf16 --ffn-hidden-size 192 --train-iters 1".split()]
    parsed = parse_args([*words, *flags.split()], world_size=1, device="cpu").config
    model = dataclasses.replace(parsed.model, padded_vocab_size=2048)
    return dataclasses.replace(parsed, model=model)


@ranks()
def test_the_linear_layers_of_the_decoder(context: ParallelContext) -> None:
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
        attach_fp8([foreign], config_of("--fp8-format hybrid"), context.pgs)
    # A stage may hold the ends of a model only.
    attach_fp8([torch.nn.Linear(16, 16)], config_of("--fp8-format hybrid"), context.pgs)


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    config: Any = SimpleNamespace(device="cuda")
    with pytest.raises(ConfigError, match=r"capability 8\.9 or above, but this one has 8\.0"):
        attach_fp8([], config, config)
