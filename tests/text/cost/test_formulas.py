"""Terms of a GPT's cost, each as a person would count it for Llama 3 8B and its relatives."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from megatron_ext.layers.pointwise import activated
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.planning.kernels import Phase, Work
from megatron_ext.planning.network import ring
from megatron_ext.planning.stages import Stage, in_order
from megatron_ext.text.config.attention import AttentionConfig
from megatron_ext.text.cost import kernels
from megatron_ext.text.cost.dispatch import dispatched
from megatron_ext.text.cost.kernels import layer_work
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.text.cost.products import _keys_in_window, flops_per_sample
from tests.planning.measure import configuration
from tests.text.cost import layouts
from tests.text.cost.layouts import llama, llama_network
from tests.training_runs import config_of

S, H, F, N, G, D, V, LAYERS = 8192, 4096, 14336, 32, 8, 128, 128256, 32
TENSOR = S * H * 2
"""Bytes of hidden states of one sample in 16 bits."""
LATENT = (
    "--no-group-query-attention --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --original-max-position-embeddings 8192"
)
KEY, VALUE, ROTATED, RANK = 192, 128, 64, 512
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024"


def on_cpu(more: str = "") -> GptNetwork:
    words = layouts.LLAMA_8B.replace("--bf16", "").replace("--global-batch-size 128", "")
    flags = f"{words} --global-batch-size 8 {more}"
    return GptNetwork.of(config_of(flags, ranks=8, device="cpu"))


def only_stage(network: GptNetwork) -> Stage:
    (stage,) = network.stages()
    return stage


# Activations.


@pytest.mark.parametrize(
    ("more", "eager"),
    [
        ("", False),
        ("--attention-dropout 0.1", False),
        ("--attention-dropout 0.1 --deterministic-dropout", True),
        ("--attn-logit-softcapping 30", False),
        ("--attn-logit-softcapping 30 --kv-channels 16", False),
        ("--attn-logit-softcapping 30 --kv-channels 8", True),
        ("--attn-logit-softcapping 30 --kv-channels 96", True),
        ("--attn-logit-softcapping 30 --attention-dropout 0.1", True),
    ],
)
def test_scores_are_kept_where_no_kernel_of_a_gpu_is_fused(more: str, eager: bool) -> None:
    """Flex attention takes 16-bit heads of a power of two of at least 16 without dropout."""
    assert llama_network(more).attends_eagerly is eager


@pytest.mark.parametrize(
    ("more", "eager"),
    [("", False), ("--bf16", True), ("--attention-dropout 0.1", True),
     ("--attn-logit-softcapping 30", True)],
)  # fmt: skip
def test_scores_are_kept_where_no_kernel_of_a_cpu_is_fused(more: str, eager: bool) -> None:
    assert on_cpu(more).attends_eagerly is eager


def test_eager_attention_keeps_its_scores_caps_and_masks() -> None:
    """A score has 4 + 2 bytes, a capped one 4 more, a dropped one 2 and a byte of the mask."""
    elements = N * S * S
    plain = llama_network("--attention-dropout 0.1 --deterministic-dropout")
    copies = 2 * S * N * D * 2  # keys and values of a group for each of its heads
    kept = elements * (4 + 2) + S * S + elements * (2 + 1) + copies
    assert plain.scores() == kept
    capped = llama_network(
        "--attention-dropout 0.1 --deterministic-dropout --attn-logit-softcapping 30"
    )
    assert capped.scores() == kept + 4 * elements
    in_fp32 = on_cpu("--attention-dropout 0.1")
    assert in_fp32.scores() == elements * (4 + 4 + 4) + S * S + 2 * copies
    # Going back, the gradients of two scores are there for a moment.
    qkv = (N + 2 * G) * D
    transient = TENSOR + 2 * S * qkv * 2 + 2 * 4 * elements
    assert plain.attention().transient == transient


def test_masks_take_a_byte_on_a_gpu_and_a_number_on_a_cpu() -> None:
    dropped, plain = (llama_network(f"--hidden-dropout {x}") for x in (0.1, 0))
    assert dropped.layer().kept - plain.layer().kept == 2 * S * H
    on_cpus = [on_cpu(f"--hidden-dropout {x}").layer().kept for x in (0.1, 0)]
    assert on_cpus[0] - on_cpus[1] == 2 * S * H * 4
    ends = [x.activations(only_stage(x)).kept for x in (dropped, plain)]
    assert ends[0] - ends[1] == (2 * LAYERS + 1) * S * H


def test_recomputed_attention_comes_back_for_a_moment() -> None:
    """Scores and output are computed again while the gradients of the layer are."""
    plain = llama_network()
    again = llama_network("--recompute-granularity selective --recompute-modules core_attn")
    statistics = S * N * 4
    assert plain.scores() == statistics
    before, after = (x.attention() for x in (plain, again))
    assert before.kept - after.kept == statistics
    assert after.transient - before.transient == statistics + S * N * D * 2


def test_the_largest_matrix_of_attention_is_there_for_a_moment() -> None:
    """The matrix of queries, keys and values is larger than that of the output."""
    wide = llama_network("--kv-channels 256 --num-query-groups 1 --seq-length 8")
    qkv = (N + 2) * 256
    assert wide.attention().transient == 8 * H * 2 + qkv * H * 2
    latent = llama_network(f"{LATENT} --v-head-dim 1024 --seq-length 8")
    up = N * KEY + N * (KEY - ROTATED + 1024)
    assert latent.attention().transient == 8 * H * 2 + up * H * 2


def test_only_the_first_layers_of_a_block_are_run_again() -> None:
    full = "--recompute-granularity full --recompute-num-layers"
    none = llama_network()
    kept = none.activations(only_stage(none)).kept
    layer = none.layer().kept
    for more, inputs in (
        (f"{full} 3 --recompute-method block", 3),
        (f"{full} 8 --recompute-method uniform", 4),
    ):
        network = llama_network(more)
        layers = 3 if "block" in more else LAYERS
        found = network.activations(only_stage(network)).kept
        assert kept - found == layers * layer - inputs * TENSOR
        again = network.recomputed(only_stage(network))
        assert again.again == layers * network.layer_flops(0).linear


def test_every_depth_keeps_a_layer_and_its_norms() -> None:
    """Two norms, a projection of both, a layer and a norm; each with its input and statistics."""
    one, two = (llama_network(f"--mtp-num-layers {x}") for x in (1, 2))
    stages = [only_stage(x) for x in (one, two)]
    parts = [
        x.activations(stage).kept - x.loss().kept
        for x, stage in zip((one, two), stages, strict=True)
    ]
    layer = in_order(one.attention(), one.mlp(False)).kept
    assert parts[1] - parts[0] == layer + 5 * TENSOR + 3 * S * 4


def test_norms_keep_statistics_of_each_token() -> None:
    rms, layer = (llama_network(f"--normalization {x}") for x in ("RMSNorm", "LayerNorm"))
    assert layer.layer().kept - rms.layer().kept == 2 * S * 4
    in_fp32 = on_cpu()
    assert in_fp32.norm(10, 7) == 10 * 4 + 10 * 7 * 4
    frozen = on_cpu("--lora-rank 4")
    assert frozen.norm(10, 7) == 10 * 4


def test_the_activation_of_an_mlp_is_one_kernel_on_a_gpu() -> None:
    """Gated, the kernel keeps three tensors: both halves of fc1's output, and the product."""
    tensor = S * F * 2
    for more, tensors in (
        ("", 3), ("--add-mlp-bias", 3), ("--no-swiglu", 2), ("--no-swiglu --add-mlp-bias", 2),
        ("--no-swiglu --geglu", 3), ("--no-bias-swiglu-fusion", 5),
        ("--no-swiglu --geglu --no-bias-gelu-fusion", 6),
    ):  # fmt: skip
        kept = llama_network(more)._inner(S, F, scaled=False).kept
        assert kept == tensors * tensor, more
    assert on_cpu("--add-mlp-bias")._inner(S, F, scaled=True).kept == 5 * 2 * tensor


@pytest.mark.slow
def test_the_kernel_of_an_activation_keeps_only_what_it_gets() -> None:
    """The result, which the second matrix keeps, makes it three tensors in a gated MLP."""
    kernel = torch.compile(inspect.unwrap(activated), backend="aot_eager_decomp_partition")
    wide = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    scale = torch.rand(8, 1, requires_grad=True)
    for given in ((wide, None, None), (wide, None, scale)):
        kept: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            kernel(*given, "silu", True)
        wanted = [x.data_ptr() for x in given if x is not None]
        assert [x.data_ptr() for x in kept] == wanted


def test_experts_keep_what_their_tokens_need() -> None:
    """Each token has two experts; a shared expert adds its own tensors."""
    plain = llama_network(EXPERTS)
    assert (plain.routed, plain.expert_width) == (2 * S, 1024)
    # Gated outputs of the experts; inputs with places and weights; the map of tokens and
    # experts; the router's choice and both of its scores.
    kept = 3 * 2 * S * 1024 * 2 + 2 * S * (2 * H + 8 + 4) + S * 8 * (4 + 1)
    kept += S * (2 * (8 + 4) + 2 * 8 * 4)
    assert plain._experts().kept == kept
    shared = llama_network(f"{EXPERTS} --moe-shared-expert-intermediate-size 64")
    one, two = (x.mlp(experts=True) for x in (plain, shared))
    assert two.kept - one.kept == 3 * S * 64 * 2
    # A small shared expert is over before the routed ones need most.
    assert two.transient == one.transient
    by_default = llama_network(EXPERTS.replace("--moe-ffn-hidden-size 1024", ""))
    assert by_default.expert_width == F
    four = "--tensor-model-parallel-size 4 --sequence-parallel"
    split = llama_network(f"{EXPERTS} {four}")
    assert (split.routed, split.expert_width) == (2 * S, 1024 // 4)
    apart = llama_network(f"{EXPERTS} {four} --expert-tensor-parallel-size 1")
    assert (apart.routed, apart.expert_width) == (2 * S // 4, 1024)


def test_ranks_that_gather_all_tokens_mark_those_of_every_expert() -> None:
    """A token seen has 4 bytes and a mark for each local expert."""
    flags = f"{EXPERTS} --expert-model-parallel-size 4 --moe-token-dispatcher-type"
    gathers, sends = (llama_network(f"{flags} {x}") for x in ("allgather", "alltoall"))
    seen = [S * 4, S]
    kept = [x.mlp(experts=True).kept for x in (gathers, sends)]
    assert kept[0] - kept[1] == (seen[0] - seen[1]) * 2 * (4 + 1)
    split = "--tensor-model-parallel-size 2 --sequence-parallel"
    gathers, sends = (llama_network(f"{flags} {x} {split}") for x in ("allgather", "alltoall"))
    kept = [x.mlp(experts=True).kept for x in (gathers, sends)]
    # Each of 2 x 4 ranks has half of a sample.
    assert kept[0] - kept[1] == (S // 2 * 8 - S // 2) * 2 * (4 + 1)


def test_deferred_gradients_keep_inputs_and_output_gradients() -> None:
    qkv = (N + 2 * G) * D
    one = H + qkv + N * D + H + H + 2 * F + F + H
    plain = llama_network()
    assert plain.deferred(only_stage(plain)) == LAYERS * S * one * 2
    ungated = llama_network("--no-swiglu")
    assert ungated.deferred(only_stage(ungated)) == LAYERS * S * (one - F) * 2
    quarter = llama_network("--tensor-model-parallel-size 4")
    split = 4 * H + (qkv + N * D + 3 * F) // 4
    assert quarter.deferred(only_stage(quarter)) == LAYERS * S * split * 2
    # Outputs of the projections down, and inputs of those up; queries may have a vector too.
    for rank in (0, 1536):
        up = N * KEY + N * (KEY - ROTATED + VALUE)
        small = 2 * (rank + RANK) + ROTATED
        values = one - qkv - N * D + up + N * VALUE + small
        latent = llama_network(f"{LATENT} {f'--q-lora-rank {rank}' if rank else ''}")
        assert latent.deferred(only_stage(latent)) == LAYERS * S * values * 2
    mixed = llama_network(f"{EXPERTS} --moe-layer-freq [0]*20+[1]*12")
    experts = one - 2 * H - 3 * F + 2 * H + 2 * 3 * 1024
    assert mixed.deferred(only_stage(mixed)) == S * (20 * one + 12 * experts) * 2


def test_the_loss_keeps_logits_or_gradients() -> None:
    table = V * H
    for depths in (0, 2):
        more = f"--mtp-num-layers {depths}"
        eager = llama_network(f"{more} --cross-entropy-impl eager").loss()
        assert eager.kept == (1 + depths) * (S * V * (4 + 2) + TENSOR)
        assert eager.transient == S * V * 2 + table * 2 + TENSOR
        chunked = llama_network(more).loss()
        assert chunked.kept == (1 + depths) * (table * 4 + TENSOR)
    sized = {
        size: llama_network(f"--cross-entropy-chunk-size {size}").loss().transient
        for size in (100, S, 3 * S)
    }
    assert sized == {size: min(size, S) * V * 2 + TENSOR for size in sized}
    # A frozen output layer has no gradient.
    assert llama_network("--lora-rank 4").loss().kept == TENSOR


# Operations.


@pytest.mark.parametrize("left", [-1, 0, 1, 5, 30, 31, 32, 40])
def test_a_window_counts_the_keys_that_it_shows(left: int) -> None:
    """Count the keys of 32 positions; the exact mean is rounded down to whole multiplications."""
    config = llama("--seq-length 32")
    shown = AttentionConfig(window_size=None if left < 0 else (left, 0))
    config = config.with_section(shown)
    keys = [min(at, left if left >= 0 else 32) + 1 for at in range(32)]
    twice_less_1 = 2 * sum(keys) / 32 - 1
    assert _keys_in_window(config) == pytest.approx(twice_less_1, abs=1)
    if left in (-1, 0, 31, 32, 40):
        assert _keys_in_window(config) == twice_less_1


def test_depths_are_like_the_last_layer() -> None:
    """A depth adds a layer, its norms, its projection of both inputs, and logits."""
    window = "--window-size 15 0 --window-attn-skip-freq [1]*31+[0]"
    mixed = f"{EXPERTS} --moe-layer-freq [0]*31+[1] {window}"
    none, two = (flops_per_sample(llama(f"{mixed} --mtp-num-layers {x}")) for x in (0, 2))
    projections = H * (N + 2 * G) * D + N * D * H
    layer = projections + N * D * S + 3 * H * 2 * 1024
    assert two - none == 6 * S * 2 * (layer + 3 * H + 2 * H * H + V * H)


def test_latent_attention_counts_its_small_vectors() -> None:
    """Queries of 192 channels and values of 128; the norms of small vectors count too."""
    queries = "--q-lora-rank 1536"
    for more, ranks in ((LATENT, 0), (f"{LATENT} {queries}", 1536)):
        matrices = H * (RANK + ROTATED) + RANK * N * (KEY - ROTATED + VALUE) + N * VALUE * H
        matrices += H * ranks + ranks * N * KEY if ranks else H * N * KEY
        scores = N * (KEY + VALUE) // 2 * S
        mlp = 3 * H * F
        layer = matrices + ranks + RANK + scores + mlp
        assert flops_per_sample(llama(more)) == 6 * S * (LAYERS * layer + V * H)


def test_the_router_sends_a_token_to_its_experts_alone() -> None:
    dense, experts = (flops_per_sample(llama(more)) for more in ("", EXPERTS))
    assert dense - experts == 6 * S * LAYERS * 3 * H * (F - 2 * 1024)
    shared = flops_per_sample(llama(f"{EXPERTS} --moe-shared-expert-intermediate-size 512"))
    assert shared - experts == 6 * S * LAYERS * 3 * H * 512


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ("", set()),
        ("--recompute-granularity selective", {"core_attn"}),
        ("--recompute-granularity selective --recompute-modules mlp", {"mlp"}),
        (
            "--recompute-granularity selective --recompute-modules core_attn mlp",
            {"core_attn", "mlp"},
        ),
        (f"{EXPERTS} --moe-layer-recompute", {"moe"}),
    ],
)
def test_a_layer_runs_again_what_is_asked_for(more: str, parts: set[str]) -> None:
    network = llama_network(more)
    names = ("core_attn", "mlp", "moe", "mla_up_proj")
    assert {name for name in names if network.recomputes(name)} == parts
    again = network.recomputed(only_stage(network))
    layer = network.layer_flops(0)
    mlp = 2 * S * 3 * H * (2 * 1024 if "experts" in more else F)
    assert again.scores_again == ("core_attn" in parts) * LAYERS * layer.scores
    assert again.again == bool(parts & {"mlp", "moe"}) * LAYERS * mlp


def test_up_projections_run_again_are_split_like_heads() -> None:
    more = f"{LATENT} --recompute-granularity selective --recompute-modules mla_up_proj"
    up = RANK * N * (KEY - ROTATED + VALUE) + H * N * KEY
    for ranks in (1, 4):
        network = llama_network(f"{more} --tensor-model-parallel-size {ranks}")
        again = network.recomputed(only_stage(network))
        assert again.again == 2 * S * LAYERS * up / ranks


EIGHT = "--fp8-format hybrid --fp8-recipe"


def test_layers_at_both_ends_may_stay_in_16_bits() -> None:
    ends = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 1"
    network = llama_network(f"{EIGHT} tensorwise {ends}")
    eight = [network.sizes.in_8_bits(network.config.fp8, number) for number in range(LAYERS)]
    assert eight == [False] * 2 + [True] * 29 + [False]
    layer = network.layer_flops(2)
    assert layer.linear == 0 and layer.fp8 == layer.fp8_weights == network.layer_flops(0).linear
    without = llama_network(f"{EIGHT} tensorwise --no-fp8-wgrad").layer_flops(0)
    assert (without.fp8_weights, without.weights) == (0, layer.fp8)


@pytest.mark.parametrize(("more", "fc1", "joined"), [("", 2, 6 + 5 * 2), ("--no-swiglu", 1, 4 + 6)])
def test_casts_move_inputs_and_output_gradients(more: str, fc1: int, joined: int) -> None:
    """Bytes per token of a layer: four of each number with given scales, and six without."""
    qkv = (N + 2 * G) * D
    around = (H + qkv) + (N * D + H) + H + H
    joins, apart = (llama_network(f"{EIGHT} {x} {more}") for x in ("delayed", "tensorwise"))
    assert apart.layer_flops(0).cast == S * 6 * (around + F + fc1 * F)
    assert joins.layer_flops(0).cast == S * (4 * around + joined * F)


@pytest.mark.parametrize(
    "more",
    [
        "--add-mlp-bias",
        "--lora-rank 4",
        "--no-fp8-wgrad",
        EXPERTS,
        "--activation-func-clamp-value 7",
    ],
)
def test_only_a_plain_activation_joins_the_cast(more: str) -> None:
    assert llama_network(f"{EIGHT} delayed").joins_activation(0)
    assert not llama_network(f"{EIGHT} delayed {more}").joins_activation(0)


def test_operations_of_the_head_are_those_of_every_loss() -> None:
    network = llama_network("--mtp-num-layers 2 --tensor-model-parallel-size 4")
    found = network.flops(only_stage(network))
    assert found.head == found.head_weights == 3 * 2 * S * V * H / 4
    frozen = llama_network("--lora-rank 4")
    assert frozen.flops(only_stage(frozen)).head_weights == 0
    whole = llama_network("--lora-rank 4 --lora-modules-to-save output_layer")
    found = whole.flops(only_stage(whole))
    assert found.head_weights == found.head


def test_operations_of_adapters_are_those_of_both_sides() -> None:
    frozen = llama_network("--lora-rank 4 --lora-target-modules linear_proj linear_fc1")
    plain, found = (x.flops(only_stage(x)) for x in (llama_network(), frozen))
    sides = (H + H) + (H + 2 * F)
    assert found.weights == found.linear - plain.linear == LAYERS * 2 * S * 4 * sides


def test_operations_of_one_micro_batch_are_a_part_of_those_of_a_step() -> None:
    micro = llama_network("--micro-batch-size 2").step_flops()
    assert micro == llama_network().step_flops() == 128 * flops_per_sample(llama())


# Kernels.


def works_of(more: str, kind: str, phase: Phase) -> list[Work]:
    network = llama_network(more)
    works = network.other_work(only_stage(network))
    return [work for work in works if (work.kind, work.phase) == (kind, phase)]


def moved(more: str, kind: str, phase: Phase) -> float:
    return sum(work.num_bytes for work in works_of(more, kind, phase))


def test_weights_are_cast_once_in_a_step() -> None:
    """Four micro-batches a rank; tensorwise casts of a layer's four inputs take three kernels."""
    more = f"{EIGHT} tensorwise --global-batch-size 32"
    forward = sum(work.kernels for work in works_of(more, "casts", Phase.FORWARD))
    assert forward == LAYERS * 12 * (1 + 1 / 4)
    backward = sum(work.kernels for work in works_of(more, "casts", Phase.INPUT))
    assert backward == LAYERS * 12


def test_a_depth_has_three_norms_and_reads_the_embedding() -> None:
    none, one, two = (f"--mtp-num-layers {x} --global-batch-size 32" for x in (0, 1, 2))
    for phase, tensors in ((Phase.FORWARD, 2), (Phase.INPUT, 3)):
        network = llama_network(one)
        layer = sum(
            work.num_bytes
            for work in layer_work(network, "*-")
            if (work.kind, work.phase) == ("pointwise", phase)
        )
        for fewer, more in ((none, one), (one, two)):
            added = moved(more, "pointwise", phase) - moved(fewer, "pointwise", phase)
            assert added == pytest.approx(layer + 3 * tensors * TENSOR)
    logits = [moved(more, "logits", Phase.FORWARD) for more in (none, one, two)]
    assert logits == [x * 6 * S * V for x in (1, 2, 3)]
    stages = dataclasses.replace(
        only_stage(llama_network(one)), embedding=False, head=False, layers=()
    )
    network = llama_network(one)
    works = [x for x in network.other_work(stages) if x.kind == "plumbing"]
    assert sum(work.num_bytes for work in works) == 4 * V * H / 4 + 18 * S * H


def test_gradients_of_embedding_and_head_are_zeroed_or_written_once_in_a_step() -> None:
    """The head's first gradient is written, unless gradients are sharded or the weight shared."""
    table = V * H
    more = "--use-distributed-optimizer --global-batch-size 32"
    embedding = 4 * table / 4 + 18 * S * H
    plain = moved(more, "plumbing", Phase.WEIGHT)
    assert plain == embedding + (12 - 4 / 4) * table
    for changed in (
        "--data-parallel-sharding-strategy optim_grads",
        "--no-untie-embeddings-and-output-weights",
        "--cuda-graph-impl local",
    ):
        assert moved(f"{more} {changed}", "plumbing", Phase.WEIGHT) == embedding + 13 * table


def test_logits_of_an_eager_loss_are_moved_often_and_blocks_are_rounded_up() -> None:
    assert moved("--cross-entropy-impl eager", "logits", Phase.FORWARD) == 48 * S * V
    for size, blocks in ((S, 1), (S - 1, 2), (S // 2, 2), (3000, 3)):
        more = f"--cross-entropy-chunk-size {size}"
        products = works_of(more, "head", Phase.FORWARD)
        assert [work.kernels for work in products] == [blocks] * 3
        weights = products[-1]
        assert weights.num_bytes == V * H * (8 * blocks - 4 - 2 * blocks)


# Latent attention.


def test_small_vectors_keep_their_normalized_copies() -> None:
    plain, normed = (
        llama_network(f"{LATENT} {x} --q-lora-rank 1536") for x in ("", "--qk-layernorm")
    )
    small = 1536 + RANK + ROTATED
    found = [x.sizes.latent.kept for x in (plain, normed) if x.sizes.latent is not None]
    assert found == [small, small + 1536 + RANK]
    direct = llama_network(LATENT).sizes.latent
    assert direct is not None and direct.kept == RANK + ROTATED
    assert (direct.queries, direct.keys_and_values) == (N * KEY, N * (KEY - ROTATED + VALUE))


# Stages, weights and messages.


LAYER_FLAGS = [
    "--pipeline-model-parallel-size 4",
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
    "--num-layers 30 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split",
    "--num-layers 30 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    "--num-layers 31 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
    "--account-for-loss-in-pipeline-split",
    "--num-layers 31 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
    "--account-for-embedding-in-pipeline-split",
    "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5 "
    "--decoder-last-pipeline-num-layers 7",
    "--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 2",
    "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2",
]


@pytest.mark.parametrize("more", LAYER_FLAGS)
def test_stages_have_as_many_layers_as_megatron_core_gives_them(more: str) -> None:
    config = configuration(
        [*layouts.LLAMA_8B.replace("--bf16", "").split(), *more.split(), "--nproc-per-node", "4"]
    )
    transformer_config = build_transformer_config(config)
    chunks = config.parallel.virtual_pipeline_model_parallel_size
    for stage in GptNetwork.of(config).stages():
        where: dict[str, Any] = {"vp_stage": stage.chunk if chunks else None, "pp_rank": stage.rank}
        assert len(stage.layers) == get_num_layers_to_build(transformer_config, **where)


def test_learned_positions_are_whole_on_every_rank() -> None:
    network = llama_network(
        "--position-embedding-type learned_absolute --tensor-model-parallel-size 2"
    )
    _, positions, *_ = network.weights(only_stage(network))
    assert positions.name == "embedding.position_embeddings.weight"
    assert (positions.numel, positions.parts) == (8192 * H, 1)


def test_context_parallel_ranks_send_keys_around_or_trade_heads() -> None:
    """Each of 4 ranks passes on the keys and values of 3; or it keeps a quarter of all heads."""
    tokens = S // 4
    for more, key in (("", D), (LATENT, KEY)):
        groups = G if not more else N
        sent = llama_network(f"{more} --context-parallel-size 4 --cp-comm-type p2p")
        assert sent.context() == 3 * tokens * groups * (key + VALUE) * 2
        traded = llama_network(f"{more} --context-parallel-size 4 --cp-comm-type a2a")
        assert traded.context() == 3 / 4 * tokens * (N + groups) * (key + VALUE) * 2
    split = llama_network("--context-parallel-size 4 --tensor-model-parallel-size 2")
    assert split.context() == 3 * tokens * G * 2 * D * 2 / 2


def test_tokens_go_to_their_experts_and_back() -> None:
    """Each of 4 ranks sends all tokens to all others, or each token twice to three quarters."""
    flags = f"{EXPERTS} --expert-model-parallel-size 4 --moe-token-dispatcher-type"
    assert dispatched(llama_network(f"{flags} allgather")).expert == 2 * 3 * TENSOR
    assert dispatched(llama_network(f"{flags} alltoall")).expert == 2 * 3 / 4 * 2 * TENSOR
    more = "--tensor-model-parallel-size 2 --sequence-parallel"
    both = llama_network(f"{flags} alltoall {more}")
    assert dispatched(both).expert == 2 * (3 / 4 + 2 - 1) * 2 * TENSOR / 2


def test_recomputed_passes_send_their_messages_again() -> None:
    more = "--tensor-model-parallel-size 4 --context-parallel-size 2 --sequence-parallel"
    plain = llama_network(more).layer_traffic("*-")
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    whole = llama_network(f"{more} {full}").layer_traffic("*-")
    gather = 3 / 4 * TENSOR / 2
    assert (plain.tensor, whole.tensor) == (10 * gather, 14 * gather)
    assert whole.context == 3 / 2 * plain.context
    selective = llama_network(f"{more} --recompute-granularity selective")
    assert selective.layer_traffic("*-").context == 3 / 2 * plain.context
    assert selective.layer_traffic("*-").tensor == plain.tensor


def test_latent_attention_gathers_its_small_vectors() -> None:
    more = "--tensor-model-parallel-size 4 --sequence-parallel --q-lora-rank 1536"
    found = llama_network(f"{LATENT} {more}").layer_traffic("*-")
    gather = ring(4) * TENSOR
    entering = gather * (1536 + RANK + ROTATED) / H
    assert found.tensor == pytest.approx(2 * (entering + 3 * gather) + entering + gather)


def test_the_head_gathers_its_input_for_every_loss() -> None:
    more = "--tensor-model-parallel-size 4"
    none, two = (llama_network(f"{more} --mtp-num-layers {x}") for x in (0, 2))
    found = [x.traffic(only_stage(x)).tensor for x in (none, two)]
    gather = ring(4) * TENSOR
    layer = none.layer_traffic("*-").tensor
    assert found[0] == pytest.approx(LAYERS * layer + 2 * gather * 2)
    # Each of two depths has a layer, an embedding and a loss of its own.
    assert found[1] - found[0] == pytest.approx(2 * layer + 2 * gather * 4)


def test_a_token_uses_as_many_experts_as_there_are() -> None:
    assert llama_network().experts == (1, 1)
    assert llama_network(EXPERTS).experts == (8, 2)


def test_the_layer_of_a_table_is_the_last_one() -> None:
    mixed = llama_network(f"{EXPERTS} --moe-layer-freq [0]*31+[1]")
    assert mixed.layer() == mixed.layer_bytes(31) != mixed.layer_bytes(0)


def test_products_of_a_step_count_what_runs_again_and_is_frozen() -> None:
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    plain, again = (llama_network(f"--global-batch-size 32 {x}") for x in ("", full))

    def flops(network: GptNetwork, kind: str, phase: Phase) -> float:
        works = network.products(only_stage(network))
        return sum(work.flops for work in works if (work.kind, work.phase) == (kind, phase))

    layer = plain.layer_flops(0)
    for kind, part, backward in (("linear", layer.linear, 1.0), ("attention", layer.scores, 2.5)):
        assert flops(plain, kind, Phase.FORWARD) == LAYERS * part
        assert flops(plain, kind, Phase.INPUT) == pytest.approx(LAYERS * part * backward)
        assert flops(again, kind, Phase.INPUT) == pytest.approx(LAYERS * part * (backward + 1))
    eight = llama_network(f"{EIGHT} delayed --global-batch-size 32 {full}")
    assert flops(eight, "linear", Phase.INPUT) == LAYERS * layer.linear * 2

    def num_bytes(network: GptNetwork, kind: str) -> float:
        works = network.products(only_stage(network))
        return sum(work.num_bytes for work in works if work.kind == kind)

    matrices = LAYERS * (H * (N + 2 * G) * D + N * D * H + 3 * H * F)
    # Four micro-batches: 2 bytes for the first sum and 6 for others; in a graph, zeros first.
    assert num_bytes(plain, "weight gradients") == matrices * (2 + 3 * 6) / 4
    graphed = llama_network("--global-batch-size 32 --cuda-graph-impl local")
    assert num_bytes(graphed, "weight gradients") == matrices * (6 + 4 / 4)
    assert num_bytes(llama_network("--lora-rank 4"), "weight gradients") == 0
    casts = [
        num_bytes(llama_network(f"{EIGHT} delayed --global-batch-size {x}"), "casts")
        for x in (8, 32)
    ]
    assert casts[0] - casts[1] == pytest.approx(4 * matrices * (1 - 1 / 4))


def test_sharded_gradients_are_zeroed_and_added_on_their_way() -> None:
    """A weight is written once and, by this rank's share, read twice and written once."""
    more = "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads"
    network = llama_network(more)
    (work,) = [x for x in network.products(only_stage(network)) if x.kind == "plumbing"]
    numbers = [weight.numel for weight in network.weights(only_stage(network))]
    assert work.num_bytes == sum(4 * (x + 3 * x // 8) for x in numbers)
    sizes = dataclasses.replace(network.sizes, expert_dp=2)
    experts = dataclasses.replace(network, sizes=sizes)
    weights = network.weights(only_stage(network))
    dense, expert = weights[1], dataclasses.replace(weights[2], expert=True)
    frozen = dataclasses.replace(weights[3], frozen=True)
    listed = [dense, expert, frozen]
    object.__setattr__(experts, "weights", lambda stage: [] if stage.layers else listed)
    wanted = 4 * (dense.numel + 3 * dense.numel // 8) + 4 * (expert.numel + 3 * expert.numel // 2)
    assert experts._sharded_bytes(only_stage(network)) == wanted


# Layouts in which parts of a model lie on other ranks than usual.


def test_only_the_gate_of_swiglu_is_reported() -> None:
    """Megatron-LM counts a third matrix for SwiGLU alone."""
    swiglu, geglu, plain = (
        flops_per_sample(llama(more)) for more in ("", "--no-swiglu --geglu", "--no-swiglu")
    )
    assert geglu == plain == swiglu - 6 * S * LAYERS * H * F
    gated = llama_network("--no-swiglu --geglu").layer_flops(0).linear
    assert gated == llama_network().layer_flops(0).linear


def test_the_attention_of_a_depth_is_that_of_the_last_layer() -> None:
    window = "--mtp-num-layers 1 --window-size 15 0 --window-attn-skip-freq"
    first, last = (llama_network(f"{window} {x}") for x in ("[1]+[0]*31", "[0]*31+[1]"))
    full = llama_network().layer_flops(0).scores
    assert first._depth_flops().scores == full
    assert last._depth_flops().scores == last.layer_flops(31).scores < full / 100


def test_blocks_of_logits_are_those_of_the_device() -> None:
    assert llama_network().loss_rows == min(S // 2, 2 * H) == 4096
    assert llama_network("--hidden-size 512 --seq-length 8192").loss_rows == S // 2
    assert on_cpu().loss_rows == min(S // 8, 1024)
    assert llama_network("--cross-entropy-chunk-size 77").loss_rows == 77
    # On a CPU a block is cast to float32, from 16 bits by a copy.
    in_halves = on_cpu("--bf16")
    block = in_halves.loss_rows * V
    assert in_halves.loss().transient == block * (4 + 4) + TENSOR
    assert on_cpu().loss().transient == block * 4 + 2 * TENSOR


def test_context_parallel_ranks_keep_their_part_of_rotary_tables() -> None:
    for ranks in (1, 4):
        split = f"--context-parallel-size {ranks} --cp-comm-type p2p"
        rope, none = (
            llama_network(f"{split} --qk-layernorm --position-embedding-type {x}").qk()
            for x in ("rope", "none")
        )
        assert rope - none == 4 * S // ranks * D * 2


def test_a_shared_expert_is_divided_among_tensor_parallel_ranks() -> None:
    four = f"{EXPERTS} --tensor-model-parallel-size 4 --sequence-parallel"
    plain, shared = (
        llama_network(f"{four} {x}").mlp(experts=True).kept
        for x in ("", "--moe-shared-expert-intermediate-size 64")
    )
    assert shared - plain == 3 * S * 64 // 4 * 2


def test_experts_run_one_after_the_other() -> None:
    """Each of two local experts has half of the tokens that a rank's experts get."""
    network = llama_network(f"{EXPERTS} --expert-model-parallel-size 4")
    one = network._inner(2 * S // 2, 1024, scaled=True).transient
    seen = 4 * S
    assert network._experts().transient == one + (seen + 2 * S) * H * 2


def test_dropped_inputs_of_adapters_take_a_byte_on_a_gpu_and_a_number_on_a_cpu() -> None:
    values = S * (H + N * D + H + F)
    plain, dropped = (llama_network(f"--lora-rank 4 --lora-dropout {x}") for x in (0, 0.1))
    assert dropped.layer().kept - plain.layer().kept == values
    plain, dropped = (on_cpu(f"--lora-rank 4 --lora-dropout {x}") for x in (0, 0.1))
    assert dropped.layer().kept - plain.layer().kept == values * 4


TWO = "--pipeline-model-parallel-size 2"
TIED = "--no-untie-embeddings-and-output-weights"


@pytest.mark.parametrize(
    ("more", "copies", "heads"),
    [
        ("", [[False], []], [[], [False]]),
        (TIED, [[True], []], [[], [True]]),
        ("--mtp-num-layers 1", [[True], [True]], [[], [False]]),
        (f"--mtp-num-layers 1 {TIED}", [[True], [True]], [[], []]),
    ],
)
def test_copies_of_the_word_embedding_are_marked(
    more: str, copies: list[list[bool]], heads: list[list[bool]]
) -> None:
    """A stage with depths holds a copy of the embedding, which a tied output layer uses too."""
    network = llama_network(f"{TWO} {more}")
    named = [
        [[w.shared for w in network.weights(stage) if name in w.name] for stage in network.stages()]
        for name in ("word_embeddings", "output_layer")
    ]
    assert named == [copies, heads]


def test_a_stage_with_the_copy_of_a_tied_embedding_adds_all_gradients() -> None:
    network = llama_network(f"{TWO} --mtp-num-layers 1 {TIED}")
    assert not kernels._overwrites_head(network, network.stages()[1])
    untied = llama_network(f"{TWO} --mtp-num-layers 1")
    assert kernels._overwrites_head(untied, untied.stages()[1])
    tied = llama_network(f"{TWO} {TIED}")
    assert kernels._overwrites_head(tied, tied.stages()[1])


def test_experts_on_other_ranks_than_the_dense_layers_have_a_buffer_of_their_own() -> None:
    four = "--tensor-model-parallel-size 4 --sequence-parallel"
    for more, apart in (
        (four, False),
        (f"{four} --expert-tensor-parallel-size 1", True),
        ("--expert-model-parallel-size 2", True),
        ("", False),
    ):
        network = llama_network(f"{EXPERTS} {more}")
        weights = network.weights(only_stage(network))
        experts = {weight.expert for weight in weights if "local_experts" in weight.name}
        assert experts == {apart}, more
        assert not any(weight.expert for weight in weights if "local_experts" not in weight.name)


def test_the_final_norm_ends_the_decoder_or_the_model() -> None:
    """If depths have a stage of their own, the norm is where the last layer is."""
    layout = "--pipeline-model-parallel-size 4 --mtp-num-layers 1 --pipeline-model-parallel-layout"
    words = f"{layout} E{'t' * 16}|{'t' * 16}|m|L"
    assert [stage.final_norm for stage in llama_network(words).stages()] == [
        False, True, False, False,
    ]  # fmt: skip
    assert [stage.depths for stage in llama_network(words).stages()] == [0, 0, 1, 0]
    plain = llama_network("--pipeline-model-parallel-size 4").stages()
    assert [stage.final_norm for stage in plain] == [False, False, False, True]


def test_8_bit_weights_of_every_stage_count() -> None:
    words = f"{EIGHT} tensorwise --fp8-param-gather --use-distributed-optimizer"
    network = llama_network(f"{TWO} {words}")
    first, second = map(network.fp8_weights, network.stages())
    assert first == second > 0
    ends = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 3"
    network = llama_network(f"{TWO} {words} {ends}")
    found = [*map(network.fp8_weights, network.stages())]
    assert found == [first * 15 / 16, first * 13 / 16]


def test_inputs_are_gathered_again_under_sequence_parallelism_alone() -> None:
    gather = ring(4) * TENSOR
    for more, gathers in (("", 8), ("--sequence-parallel", 10)):
        network = llama_network(f"--tensor-model-parallel-size 4 {more}")
        assert network.layer_traffic("*-").tensor == gathers * gather


def test_kernels_of_layers_are_launched_by_a_graph_where_one_is_captured() -> None:
    for more, graphed in (("", False), ("--cuda-graph-impl local", True)):
        assert {work.graphed for work in layer_work(llama_network(more), "*-")} == {graphed}


def test_queries_keys_and_values_are_kept_once_and_as_attention_gets_them() -> None:
    """Rotated or normalized ones are new tensors; of others, grouped queries are copied."""
    queries = S * N * D * 2
    keys = S * G * D * 2
    mixed = queries + 2 * keys
    tables = 4 * S * D * 2
    none = "--position-embedding-type none"
    # One kernel on a GPU copies all three; without it, rotated ones stand beside the projection.
    assert llama_network().qk() == mixed
    assert llama_network("--no-rope-fusion").qk() == tables + mixed + queries + keys
    assert llama_network(none).qk() == mixed + queries
    assert llama_network(f"{none} --no-group-query-attention").qk() == 3 * queries
    # A norm keeps its input, and the statistics of each head; a copy lies between them.
    norms = (S * N + S * G) * 4
    normed = mixed + queries + norms + queries + keys
    assert llama_network("--qk-layernorm").qk() == tables + normed
    ungrouped = llama_network("--qk-layernorm --no-group-query-attention").qk()
    assert ungrouped == tables + 3 * queries + 2 * S * N * 4 + 2 * queries


def test_exchanged_keys_are_kept_whole_or_by_heads_or_not_at_all() -> None:
    """Each of 4 ranks has a quarter of the tokens, and after a gather the keys of all."""
    queries = S // 4 * N * D * 2
    keys = S // 4 * G * D * 2
    four = "--context-parallel-size 4 --cp-comm-type"
    assert llama_network(f"{four} p2p").qk() == 2 * keys * 4 + queries
    assert llama_network(f"{four} a2a").qk() == 2 * keys + queries
    again = "--recompute-granularity selective --recompute-modules core_attn"
    kept = queries + 2 * keys
    for kind in ("p2p", "a2a"):
        assert llama_network(f"{four} {kind} {again}").qk() == kept


def test_parts_of_a_sequence_need_masks_on_a_cpu() -> None:
    """Two ranks have four parts; a mask is as large as a part or two, and five fit in all."""
    found = on_cpu("--context-parallel-size 2 --cp-comm-type p2p").scores()
    outputs = S // 2 * N * (4 + D * 4)
    assert found == outputs + (S // 4) ** 2 * 5 * 4
    assert on_cpu("--context-parallel-size 2 --cp-comm-type a2a").scores() == outputs
    on_a_gpu = llama_network("--context-parallel-size 2 --cp-comm-type p2p").scores()
    assert on_a_gpu == S // 2 * N * (4 + D * 2)


def test_a_residual_in_float32_is_twice_as_large() -> None:
    assert (llama_network().residual, llama_network("--fp32-residual-connection").residual) == (
        TENSOR,
        2 * TENSOR,
    )


def test_parts_outside_of_layers_are_kept_where_they_are() -> None:
    network = llama_network("--mtp-num-layers 1")
    none = dataclasses.replace(
        only_stage(network), layers=(), depths=0, embedding=False, final_norm=False, head=False
    )
    for part, kept in (
        ({}, 0),
        ({"final_norm": True}, TENSOR + S * 4),
        ({"head": True}, network.loss().kept),
        ({"embedding": True}, S * 8),
    ):
        assert network.activations(dataclasses.replace(none, **part)).kept == kept


def test_norms_after_each_half_of_a_layer_keep_their_inputs_and_weights() -> None:
    plain, sandwich = (llama_network(x) for x in ("", "--sandwich-norm"))
    assert sandwich.layer().kept - plain.layer().kept == 2 * (TENSOR + S * 4)
    more = [
        weight for weight in sandwich.weights(only_stage(sandwich)) if "layernorm" in weight.name
    ]
    names = {weight.name.rpartition("layers.0.")[2] for weight in more}
    assert {"post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"} <= names
    assert len(more) == 4 * LAYERS + 1 and {weight.numel for weight in more} == {H}


def test_the_gate_of_a_shared_expert_is_a_weight() -> None:
    shared = f"{EXPERTS} --moe-shared-expert-intermediate-size 64"
    plain, gated = (
        sum(weight.numel for weight in network.weights(only_stage(network)))
        for network in (llama_network(f"{shared} {x}") for x in ("", "--moe-shared-expert-gate"))
    )
    assert gated - plain == LAYERS * H


def test_small_vectors_have_norms_where_they_are() -> None:
    for more, sizes in (("", [RANK]), ("--q-lora-rank 1536", [1536, RANK])):
        network = llama_network(f"{LATENT} --qk-layernorm {more}")
        weights = network.weights(only_stage(network))
        norms = [
            w.numel for w in weights if "layers.0.self_attention" in w.name and "norm" in w.name
        ]
        assert norms == sizes


def test_experts_get_their_tokens_without_a_gather() -> None:
    """Only attention gathers its input and its output's gradient, each input twice."""
    network = llama_network(f"{EXPERTS} --tensor-model-parallel-size 4 --sequence-parallel")
    assert network.layer_traffic("*E").tensor == 5 * ring(4) * TENSOR


def test_a_step_computes_as_much_in_every_layout() -> None:
    whole = llama_network().step_flops()
    for words in (
        "--context-parallel-size 2",
        "--tensor-model-parallel-size 4",
        "--pipeline-model-parallel-size 2",
        "--micro-batch-size 4",
    ):
        assert llama_network(words).step_flops() == whole
