"""Specs of layers that a user's function changes, for all layers or for some."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.layers.changed_specs import changed_specs
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.text.task import TEXT
from tests.layers.test_layers import SMALL
from tests.training_runs import SMALL as WORDS
from tests.training_runs import train_steps

EXPERTS = {"num_moe_experts": 2, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}


class Scaled(torch.nn.Module):
    """A norm with one more parameter than others."""

    def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.factor = torch.nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:]) * self.weight * self.factor


Block = TransformerBlockSubmodules


def scaled(block: Block, layers: slice = slice(None)) -> Block:
    for layer in block.layer_specs[layers]:
        layer.submodules.input_layernorm = Scaled
    return block


@pytest.mark.parametrize("changes", [{}, EXPERTS])
@pytest.mark.parametrize("layers", [slice(None), slice(1)])
def test_checkpoints_name_each_layer_only_if_layers_differ(
    changes: dict[str, Any], layers: slice
) -> None:
    config = StepTransformerConfig(**{**SMALL, **changes})
    assert config.num_layers > 1
    block = changed_specs(config, partial(scaled, layers=layers), impl="torch")
    own = [layer.submodules.input_layernorm is Scaled for layer in block.layer_specs]
    assert own == [number < (layers.stop or len(own)) for number in range(config.num_layers)]
    assert config.hetereogenous_dist_checkpoint == (layers.stop is not None)


def test_the_number_of_layers_stays() -> None:
    config = StepTransformerConfig(**SMALL)

    def one(block: Block) -> Block:
        return Block(layer_specs=block.layer_specs[:1])

    def nothing(_block: Block) -> Any:
        return None

    with pytest.raises(ConfigError, match=r"must return the specs of \d layers, but returns 1; ch"):
        changed_specs(config, one, impl="torch")
    with pytest.raises(ConfigError, match=r"but returns 0; change the layers in its argument"):
        changed_specs(config, nothing, impl="torch")


@pytest.mark.slow
def test_a_model_with_one_changed_layer_goes_on_in_another_layout(tmp_path: Path) -> None:
    chunk = partial(build_gpt_chunk, change_layers=partial(scaled, layers=slice(1)))
    task = TEXT.replace(model_chunk=chunk)
    words = [*WORDS, *"--train-iters 4 --save-interval 2 --eval-iters 0".split()]
    whole = train_steps(words, tmp_path / "whole", task=task)
    stages = ["--pipeline-model-parallel-size", "2"]
    first = tmp_path / "first"
    train_steps([*words, *stages, "--exit-interval", "2"], first, ranks=2, task=task)
    rest = train_steps([*words, "--load", str(first)], tmp_path / "rest", task=task)
    found = [row["lm loss"] for row in rest]
    assert found == pytest.approx([row["lm loss"] for row in whole[2:]], rel=1e-6)
