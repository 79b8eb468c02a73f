"""Tests of the configuration that megatron-core gets, and of the classes of its modules."""

import pytest
import torch

from megatron_ext.layers.subclass import specialize
from megatron_ext.layers.transformer_config import build_transformer_config
from tests.config.runs import SMALL, with_transformer_engine
from tests.training_runs import config_of

PP2 = "--pipeline-model-parallel-size 2"
VIRTUAL = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.parametrize(
    ("words", "batches"),
    [
        (PP2, True),
        (f"{PP2} --pipeline-schedule core-1f1b", True),
        (VIRTUAL, True),
        (f"{VIRTUAL} --pipeline-schedule core-interleaved", False),
    ],
)
def test_cores_interleaved_schedule_sends_apart_and_keeps_what_it_sends(
    words: str, batches: bool
) -> None:
    """It would swap the messages of two stages, and free outputs that are under way."""
    found = build_transformer_config(config_of(f"{SMALL} {words}", ranks=2))
    assert found.batch_p2p_comm is found.deallocate_pipeline_outputs is batches
    assert found.overlap_p2p_comm is not batches


@pytest.mark.parametrize(
    ("words", "dtype", "between"),
    [
        ("", torch.float32, torch.float32),
        ("--bf16", torch.bfloat16, torch.bfloat16),
        ("--fp16", torch.float16, torch.float16),
        ("--bf16 --fp32-residual-connection", torch.bfloat16, torch.float32),
    ],
)
def test_stages_send_the_dtype_of_the_residual_stream(
    words: str, dtype: torch.dtype, between: torch.dtype
) -> None:
    found = build_transformer_config(config_of(f"{SMALL} {words}"))
    assert (found.params_dtype, found.pipeline_dtype) == (dtype, between)


def test_products_add_to_the_buffer_in_the_layers_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_transformer_engine(monkeypatch)
    for impl, flags in (("torch", (True, False)), ("transformer_engine", (False, True))):
        words = f"{SMALL} --bf16 --no-rope-fusion --transformer-impl {impl}"
        found = build_transformer_config(config_of(words, device="cuda"))
        assert (found.adds_in_place, found.te_gradient_accumulation_fusion) == flags
        found = build_transformer_config(
            config_of(f"{words} --no-gradient-accumulation-fusion", device="cuda")
        )
        assert not (found.adds_in_place or found.te_gradient_accumulation_fusion)


@pytest.mark.parametrize(
    ("words", "biases"),
    [
        ("--disable-bias-linear", (False, False)),
        ("--disable-bias-linear --add-proj-bias", (True, False)),
        ("--disable-bias-linear --add-mlp-bias", (False, True)),
    ],
)
def test_parts_of_a_layer_have_the_biases_of_their_own_flags(
    words: str, biases: tuple[bool, bool]
) -> None:
    found = build_transformer_config(config_of(f"{SMALL} {words}"))
    assert (found.proj_bias, found.mlp_bias) == biases and not found.add_bias_linear


class Doubled(torch.nn.Linear):
    """A linear layer with another forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_module_takes_only_a_class_derived_from_its_own() -> None:
    layer, x = torch.nn.Linear(2, 3), torch.ones(1, 2)
    want = 2 * layer(x)
    weight = layer.weight
    specialize(layer, Doubled)
    assert torch.equal(layer(x), want) and layer.weight is weight
    with pytest.raises(TypeError, match="LayerNorm is no subclass of Doubled"):
        specialize(layer, torch.nn.LayerNorm)
    with pytest.raises(TypeError, match="Linear is no subclass of Doubled"):
        specialize(layer, torch.nn.Linear)
