"""Parameters, state, operations and messages of a GPT against closed forms."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ext.config.precision import Fp8Config
from megatron_ext.device.gpus import GPUS
from megatron_ext.errors import ConfigError
from megatron_ext.planning.memory import memory
from megatron_ext.planning.network import Volume
from megatron_ext.planning.report import model_parameters
from megatron_ext.planning.step_time import estimate, rank_volume
from megatron_ext.text.cost.flops import GptFlops, flops_per_sample, step_flops
from megatron_ext.text.cost.network import GptNetwork, with_recomputation
from megatron_ext.text.cost.sizes import Sizes, stages
from tests.planning.measure import configuration
from tests.text.cost.layouts import LAYOUTS, MORE, flags_of, llama, llama_network


@pytest.mark.parametrize("name", [*LAYOUTS, *MORE])
def test_operations_of_all_stages_are_those_of_the_training_log(name: str) -> None:
    config = configuration(flags_of(name))
    counted = step_flops(config, Sizes.of(config), stages(config))
    wanted = flops_per_sample(config) * config.training.batch_sizes[1]
    depths = config.model.mtp_num_layers or 0
    # The log counts the norms of the depths too.
    assert counted == pytest.approx(wanted, rel=1e-2 if depths else 1e-12)


def test_full_recomputation_repeats_the_layers() -> None:
    config = llama()
    stage = stages(config)[0]
    full = with_recomputation(config, "full")
    flops = GptFlops.of(full, Sizes.of(full))
    assert flops.recomputed(stage).again == 32 * flops.layer(0).forward
    assert GptFlops.of(config, Sizes.of(config)).recomputed(stage).forward == 0


def test_parameters_of_llama_3_8b() -> None:
    """8,030,261,248 by its model card's weights."""
    for more in ("", "--tensor-model-parallel-size 4", "--pipeline-model-parallel-size 4"):
        assert model_parameters(memory(llama_network(more))) == 8_030_261_248


def test_llama_8b_state_in_bf16_over_replicas() -> None:
    """16 + 2 bytes a parameter: bf16 weights, fp32 gradients, main weights and two moments."""
    (rank,) = memory(llama_network("--use-distributed-optimizer"))
    assert rank.state.parameters == pytest.approx(2 * 8_030_261_248, rel=1e-4)
    assert rank.state.gradients == pytest.approx(4 * 8_030_261_248, rel=1e-4)
    assert rank.state.optimizer == pytest.approx(12 * 8_030_261_248 / 8, rel=1e-3)


def _volume(more: str) -> Volume:
    network = llama_network(more)
    return rank_volume(network, memory(network)[0], 1)


def test_tensor_parallel_messages_of_a_layer() -> None:
    """A layer has four all-reduces of [s, b, h], 2 (n - 1) / n each; SP gathers twice more."""
    tensor = 8192 * 4096 * 2
    for flags, passes in (("", 8), ("--sequence-parallel", 10)):
        network = llama_network(f"--tensor-model-parallel-size 4 {flags}")
        layer = network.layer_traffic(experts=False)
        assert layer.tensor == passes * 3 / 4 * tensor
        assert layer.context == layer.expert == 0


def test_messages_between_replicas() -> None:
    gradients = memory(llama_network())[0].state.gradients
    assert _volume("").data == 2 * 7 / 8 * gradients
    shared = memory(llama_network("--use-distributed-optimizer"))[0].state
    wanted = 7 / 8 * (shared.gradients + shared.parameters)
    assert _volume("--use-distributed-optimizer").data == wanted


def test_messages_between_stages_and_along_the_sequence() -> None:
    tensor = 8192 * 4096 * 2
    assert _volume("--pipeline-model-parallel-size 2").pipeline == tensor
    keys = 32 * 2 * 4096 * 2 * 8 * 128 * 2  # layers, passes, tokens, keys and values, bytes
    assert _volume("--context-parallel-size 2").context == keys
    assert _volume("").total == _volume("").data


def test_eight_bit_layers_and_weights_of_llama_8b() -> None:
    matrices = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    plain = llama("--use-distributed-optimizer")
    eight = dataclasses.replace(plain, fp8=Fp8Config(fp8_format="hybrid", fp8_recipe="tensorwise"))
    gathers = dataclasses.replace(eight, fp8=dataclasses.replace(eight.fp8, fp8_param_gather=True))
    wide, low, held = (memory(GptNetwork.of(config))[0] for config in (plain, eight, gathers))
    assert low.state == wide.state and low.fp8_weights == 2 * matrices
    assert low.activations < 0.95 * wide.activations
    assert held.fp8_weights == matrices
    saved = wide.state.parameters - held.state.parameters
    assert saved == pytest.approx(matrices, rel=1e-5)
    assert held.state.optimizer == pytest.approx(wide.state.optimizer, rel=1e-5)
    times = [estimate(GptNetwork.of(x), GPUS["H100"]).seconds for x in (plain, eight)]
    assert 1.2 < times[0] / times[1] < 1.9
    with pytest.raises(ConfigError, match="A100 has no fp8 products, but `--fp8-format`"):
        estimate(GptNetwork.of(eight), GPUS["A100"])


def test_adapters_of_llama_8b_have_no_other_gradients() -> None:
    """Adapters of rank 16 hold 32 * 16 * the sum of both sides of the four matrices."""
    (rank,) = memory(llama_network("--lora-rank 16"))
    sides = (4096 + 6144) + (4096 + 4096) + (4096 + 2 * 14336) + (14336 + 4096)
    assert rank.state.gradients == 4 * 32 * 16 * sides
    assert rank.state.frozen == 2 * 8_030_261_248
    plain = estimate(llama_network(), GPUS["H100"])
    assert estimate(llama_network("--lora-rank 16"), GPUS["H100"]).seconds < 0.8 * plain.seconds
