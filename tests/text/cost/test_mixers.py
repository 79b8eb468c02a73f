"""Planned cost of layers with other sequence mixers than attention, beside what they do."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, baddbmm_flop

from megatron_ext.config.run import RunConfig
from megatron_ext.layers.mixers import delta_rule, delta_scan, state_space_chunks
from megatron_ext.planning.kernels import Phase
from megatron_ext.planning.memory import memory
from megatron_ext.planning.report import model_parameters
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.text.cost.products import flops_per_sample
from megatron_ext.text.cost.recurrent import Recurrent
from megatron_ext.text.task import GPT
from tests.planning.fake_world import built, enter_fake_world
from tests.planning.measure import configuration
from tests.ranks import ParallelContext, ranks
from tests.text.cost import layouts
from tests.training_runs import config_of

ROOT = Path(__file__).parents[3]
S, H, V = 8192, 4096, 128256
LLAMA = layouts.LLAMA_8B.replace("--num-layers 32 ", "")
DELTA = (
    "--linear-num-key-heads 2 --linear-num-value-heads {} --linear-key-head-dim 128 "
    "--linear-value-head-dim 128"
)
MAMBA = "--mamba-num-heads 8 --mamba-head-dim 64 --mamba-num-groups 2 --mamba-state-dim 128"
SIZES = {"G": DELTA.format(4), "K": DELTA.format(2), "M": MAMBA}
VIEWS = (
    "view _unsafe_view transpose permute unsqueeze squeeze expand slice select split "
    "split_with_sizes unbind t alias detach as_strided diagonal empty empty_like new_empty "
    "_reshape_alias"
).split()


def in_place_flops(total: Any, first: Any, second: Any, **_unused: Any) -> int:
    """Count the operations of a batched product that is added in place."""
    return int(baddbmm_flop(total, first, second))


IN_PLACE = {torch.ops.aten.baddbmm_: in_place_flops}
"""The products that torch's counter leaves out, with functions that count them."""
PRODUCTS = "mm bmm addmm baddbmm baddbmm_".split()


class Kernels(TorchDispatchMode):
    """Counts the operations that would be kernels, and the bytes that pointwise ones move."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in VIEWS:
            return out
        if name in PRODUCTS:
            self.count["attention"] += 1
            return out
        self.count["pointwise"] += 1
        tensors = [x for x in tree_leaves((args, kwargs, out)) if torch.is_tensor(x)]
        self.num_bytes += sum(x.numel() * x.element_size() for x in tensors)
        return out


def of_pattern(pattern: str, more: str = "") -> RunConfig:
    """Return a run of Llama 3 8B whose layers are those of a pattern."""
    words = f"{LLAMA} --hybrid-layer-pattern {pattern} {more}"
    return config_of(words, ranks=8, device="cuda")


def gpu_sizes(length: int, key_size: int, device: torch.device) -> delta_scan.Sizes:
    return delta_scan.Sizes(min(64, 1 << (length - 1).bit_length()), 8, 1 << 30)


def network_of(letter: str, more: str = "") -> GptNetwork:
    """Return the network of four layers, the first of which has a mixer, with sizes of a GPU."""
    words = f"--hybrid-layer-pattern {letter}*-*-* {SIZES[letter]} --bf16 {more}"
    return GptNetwork.of(configuration([*layouts.MODEL, *words.split()]))


@pytest.mark.parametrize("length", [512, pytest.param(1024, marks=pytest.mark.slow)])
@ranks()
def test_kernels_and_bytes_are_those_of_the_torch_form(
    context: ParallelContext, length: int
) -> None:
    with (
        mock.patch.object(delta_rule, "sizes_for", gpu_sizes),
        mock.patch.object(state_space_chunks, "BLOCK", 2**28),
    ):
        for letter in SIZES:
            network = network_of(letter, f"--seq-length {length} --max-position-embeddings 1024")
            config = network.config
            x = network.sizes
            (chunk, *_), _ = built(GPT, config, enter_fake_world(config, 0))
            mixer = chunk.to(torch.bfloat16).decoder.layers[0].self_attention
            hidden = torch.randn(x.s, x.b, x.h, dtype=torch.bfloat16, requires_grad=True)
            with Kernels() as forward:
                output, _ = mixer(hidden)
            gradient = torch.randn_like(output)
            with Kernels() as backward:
                output.backward(gradient)
            on_gpu = GptNetwork(config, x.__class__(**{**vars(x), "gpu": True}))
            planned = on_gpu.mixers[letter]
            kernels = planned.kernels(on_gpu)
            for found, phase in ((forward, Phase.FORWARD), (backward, Phase.INPUT)):
                linears = len(planned.matrices(1)) * (1 if phase is Phase.FORWARD else 2)
                counted = kernels["attention", phase] + linears
                assert counted == pytest.approx(found.count["attention"], rel=0.1), letter
                counted = kernels["pointwise", phase]
                assert counted == pytest.approx(found.count["pointwise"], rel=0.1), letter
            moved = planned.moved(on_gpu)
            assert moved[0] == pytest.approx(forward.num_bytes, rel=0.15), letter
            assert moved[1] == pytest.approx(backward.num_bytes, rel=0.15), letter


@ranks()
def test_products_of_chunks_are_those_that_torch_counts(context: ParallelContext) -> None:
    for letter in SIZES:
        network = network_of(letter)
        x = network.sizes
        (chunk, *_), _ = built(GPT, network.config, enter_fake_world(network.config, 0))
        mixer = chunk.to(torch.bfloat16).decoder.layers[0].self_attention
        hidden = torch.randn(x.s, x.b, x.h, dtype=torch.bfloat16)
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter, torch.no_grad():
            mixer(hidden)
        planned = network.mixers[letter]
        assert isinstance(planned, Recurrent)
        products = planned.products + planned.chunked(network)
        found = counter.get_total_flops() / (2 * x.tokens)
        assert products == pytest.approx(found, rel=0.02), letter


def test_operations_are_those_that_megatron_lm_counts() -> None:
    """Compare projections, convolution and states of a layer; the log reports three passes."""
    head = 6 * S * V * H
    attention = flops_per_sample(of_pattern("*")) - head
    gated = "--linear-num-key-heads 16 --linear-num-value-heads 32"
    key = value = 128
    qk, v = 16 * key, 32 * value
    of_delta = 2 * (H * (2 * qk + 2 * v + 2 * 32) + 4 * (2 * qk + v) + 32 * value**2 * 4 + H * v)
    found = flops_per_sample(of_pattern("G*", gated))
    assert found == head + attention + 3 * S * of_delta
    inner, groups, state, heads = 2 * H, 8, 128, 2 * H // 64
    of_mamba = 2 * H * (2 * inner + 2 * groups * state + heads) + 7 * inner * state + 2 * inner * H
    found = flops_per_sample(of_pattern("MM*"))
    assert found == head + attention + 2 * 3 * S * of_mamba


def test_messages_of_states_do_not_grow_with_the_sequence() -> None:
    """Each of 4 ranks sends the state and the transition of two slices to 3 others."""
    more = "--context-parallel-size 4 --cp-comm-type p2p"
    for letter, state in (
        ("G", 32 * 128 * (128 + 128) * 4 + 3 * (2 * 2048 + 4096) * 2),
        ("M", 128 * (64 * 128 + 1) * 4 + 3 * (8192 + 2 * 8 * 128) * 2),
    ):
        found = {
            length: GptNetwork.of(of_pattern(f"{letter}*", f"{more} --seq-length {length}"))
            for length in (S // 4, S)
        }
        sent = [network.mixer_context(letter) for network in found.values()]
        assert sent == [3 * 2 * state] * 2
        keys = [network.mixer_context("*") for network in found.values()]
        assert keys[1] == 4 * keys[0]


def test_layers_of_one_part_send_and_compute_that_part_alone() -> None:
    network = GptNetwork.of(of_pattern("**-", "--tensor-model-parallel-size 4 --sequence-parallel"))
    whole, mixer, mlp = (network.layer_traffic(kind).tensor for kind in ("*-", "*", "-"))
    # Each gathers its input and scatters its output, there and back, and its input once more.
    assert whole == 2 * mixer == 2 * mlp == 2 * 5 * network.gather() > 0
    alone, both = (network.layer_flops(number).linear for number in (0, 1))
    assert both - alone == network.mlp_flops("-") == 6 * S * H * network.sizes.f / 4


def of_recipe(name: str) -> GptNetwork:
    words = (
        f"--config {ROOT / 'recipes' / name}.yaml --layout 64xH100 --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 128"
    )
    return GptNetwork.of(config_of(words, ranks=64, device="cuda"))


def parameters_of(model: type[Any], config: Any) -> int:
    """Return the number of parameters of a model of transformers, which takes no memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model(config).parameters())


def test_planned_parameters_of_published_models_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    qwen = transformers.Qwen3NextConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        num_experts=512,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    )
    wanted = parameters_of(transformers.Qwen3NextForCausalLM, qwen)
    assert wanted == 79_674_391_296
    assert model_parameters(memory(of_recipe("qwen3_next_80b_a3b"))) == wanted
    network = of_recipe("nemotron_h_56b")
    names = {"M": "mamba", "*": "attention", "-": "mlp"}
    nemotron = transformers.NemotronHConfig(
        vocab_size=131072,
        hidden_size=8192,
        intermediate_size=32768,
        layers_block_type=[names[letter] for letter in "".join(network.sizes.kinds)],
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        ssm_state_size=256,
        mamba_num_heads=256,
    )
    wanted = parameters_of(transformers.NemotronHForCausalLM, nemotron)
    assert model_parameters(memory(network)) == wanted
    assert 56.3e9 < wanted < 56.4e9
