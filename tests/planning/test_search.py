"""Which layouts a search tries, in which order it lists them, and the flags that it gives them."""

import dataclasses
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from megatron_ext.config.parser import parse_args
from megatron_ext.config.rules.pipeline_layout import stages_of
from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import GPUS
from megatron_ext.errors import ConfigError
from megatron_ext.planning import search as searching
from megatron_ext.planning.layouts import (
    ALL_ON_HOST,
    HALF_ON_HOST,
    PARALLEL,
    SHARDED_GRADIENTS,
    SHARDED_WEIGHTS,
    Candidate,
    LayoutFlags,
    balanced,
    candidates,
    decided_fields,
    without,
)
from megatron_ext.planning.memory import worst_case
from megatron_ext.planning.proposal import command, proposal
from megatron_ext.planning.search import LeastCosts, SearchResult, StateBound, search
from megatron_ext.planning.stages import Ranks
from megatron_ext.planning.step_time import estimate, least_seconds, needed_on
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.text.cost.switches import KEPT_TOKENS, PAIRS, TWO_HOPS
from megatron_ext.text.cost.task_cost import GPT_COST
from megatron_ext.text.task import TEXT
from tests.text.cost.layouts import LLAMA_8B, llama
from tests.training_runs import ROOT, config_of

H100 = GPUS["H100"]
MOE = "--num-experts 6 --moe-ffn-hidden-size 512"
A2A = f"{MOE} --moe-token-dispatcher-type alltoall"
EXPERTS = (
    "--num-experts 32 --moe-ffn-hidden-size 4096 --moe-router-topk 4 --num-layers 8 "
    "--moe-token-dispatcher-type alltoall"
)


def of(layout: Candidate, more: str = "", world: int = 8) -> RunConfig:
    """Return the configuration of a layout's own flags behind those of Llama 3 8B."""
    words = LayoutFlags(TEXT, GPT_COST, llama(more, 1)).words(layout)
    kept = without(f"{LLAMA_8B} {more}".split(), TEXT, {*PARALLEL, "micro_batch_size"})
    return config_of(
        [*kept, *(word for entry in words for word in entry)], ranks=world, device="cuda"
    )


def searched(more: str = "", world: int = 8, gpu: str = "H100", count: int = 10) -> SearchResult:
    base = llama(more, 1)
    flags = LayoutFlags(TEXT, GPT_COST, base)
    kept = without(f"{LLAMA_8B} {more}".split(), TEXT, decided_fields(base, GPT_COST))
    arguments = parse_args(kept, TEXT, world_size=1, device="cuda")
    assert arguments.with_values is not None
    complete = partial(arguments.with_values, world_size=world)
    return search(base, flags, complete, world, GPUS[gpu], count=count)


def test_candidates_have_every_size_that_divides_ranks_layers_and_experts() -> None:
    config = llama("--num-layers 12 --micro-batch-size 4")
    found = [*candidates(config, 4, H100, GPT_COST)]
    assert {(x.recompute, x.switches) for x in found} == {("none", ())}
    assert {x.micro_batch for x in found} == {1, 2, 4}
    assert {(x.tp, x.pp, x.cp) for x in found} == {
        (tp, pp, cp)
        for tp in (1, 2, 4) for pp in (1, 2, 4) for cp in (1, 2, 4) if tp * pp * cp <= 4
    }  # fmt: skip
    assert {x.ep for x in found} == {1}
    # 12 layers in 2 stages have 1, 2, 3 or 6 chunks of equal length; in 4 stages 1 or 3.
    even = {(1, 1), (2, 1), (2, 2), (2, 3), (2, 6), (4, 1), (4, 3)}
    assert {(x.pp, x.chunks) for x in found} == even
    uneven = [*candidates(config, 4, H100, GPT_COST, GptNetwork.of(llama("--num-layers 12", 1)))]
    # Embedding, layers and head fill 14 stages, one each.
    assert {(x.pp, x.chunks) for x in uneven if x.stages} == {(2, 4), (2, 5), (2, 7), (4, 2)}
    assert {x.stages for x in uneven if x.chunks == 7} == {"E|(t|)*12,L"}
    flat = [*candidates(llama("--num-layers 2"), 4, H100, GPT_COST)]
    assert {x.pp for x in flat} == {1, 2}  # A stage has one layer at least.
    # A slice of a sequence across nodes has 512 of its 8192 tokens at least.
    wide = [*candidates(config, 64, H100, GPT_COST)]
    assert {x.cp for x in wide} == {1, 2, 4, 8, 16}
    experts = dataclasses.replace(GPT_COST, num_experts=lambda _: 6)
    found = [*candidates(config, 4, H100, experts)]
    assert {(x.pp, x.ep) for x in found} == {(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)}


def test_a_candidate_is_a_run_with_its_flags() -> None:
    layout = Candidate(tp=2, pp=2, cp=1, ep=1, chunks=2, micro_batch=4, recompute="full")
    run = of(layout, "--use-tp-pp-dp-mapping")
    sizes = Ranks.of(run)
    assert (sizes.tp, sizes.pp, sizes.dp, sizes.b, sizes.sequence_parallel) == (2, 2, 2, 4, True)
    assert run.parallel.virtual_pipeline_model_parallel_size == 2
    assert run.model.recompute_granularity == "full"
    assert run.optimizer.use_distributed_optimizer
    plain = of(dataclasses.replace(layout, tp=1, chunks=1, recompute="none"))
    assert not plain.parallel.sequence_parallel
    assert plain.parallel.virtual_pipeline_model_parallel_size is None
    assert not of(layout, "--optimizer sgd").optimizer.use_distributed_optimizer
    experts = of(dataclasses.replace(layout, ep=2), MOE)
    assert experts.parallel.expert_tensor_parallel_size == 1  # Tensor ranks share no expert.


@pytest.mark.parametrize(
    ("more", "layout"),
    [
        ("", Candidate(2, 2, 1, 1, 2, 4, "full")),
        ("", Candidate(1, 1, 2, 1, 1, 1, "selective")),
        ("--num-layers 5", Candidate(1, 2, 1, 1, 1, 1, "none", "Ett|tttL")),
        (MOE, Candidate(2, 2, 1, 2, 1, 2, "none")),
        ("--optimizer sgd", Candidate(4, 1, 1, 1, 1, 1, "none")),
        (A2A, Candidate(1, 1, 1, 2, 1, 1, "full", None, (SHARDED_GRADIENTS, PAIRS, KEPT_TOKENS))),
        (A2A, Candidate(1, 1, 1, 2, 1, 1, "none", None, (TWO_HOPS,))),
    ],
)
def test_values_of_a_layout_are_the_run_of_its_words(more: str, layout: Candidate) -> None:
    """The search reads no words, but proposes some."""
    base = llama(more, 1)
    kept = without(f"{LLAMA_8B} {more}".split(), TEXT, decided_fields(base, GPT_COST))
    arguments = parse_args(kept, TEXT, world_size=1, device="cuda")
    assert arguments.with_values is not None
    values = LayoutFlags(TEXT, GPT_COST, base).values(layout)
    assert arguments.with_values(values, 8) == of(layout, more)
    with pytest.raises(ConfigError, match="`--global-batch-size` \\(128\\) must be divisible by"):
        arguments.with_values(values, 8 * 37)


def test_a_search_imports_neither_torch_nor_megatron_core() -> None:
    """They would take most of the memory of a search, and more time than a small one."""
    script = (
        "import sys; from megatron_ext.programs.plan import main; "
        "words = '--world-size 4 --search -- --config recipes/llama3_8b.yaml'.split(); "
        "assert main(words) == 0; sys.exit(bool({'torch', 'megatron.core'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 12",
        "--pipeline-model-parallel-size=4 --pipeline-schedule zb-h1",
        "--model-parallel-size 2 --pipeline_model_parallel_layout Et*20|t*12L",
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 8 --layout 8xH100",
    ],
)
def test_a_search_takes_nothing_from_the_layout_of_the_user(flags: str) -> None:
    words = f"--num-layers 4 {flags} --lr 1e-3".split()
    assert without(words, TEXT, PARALLEL) == "--num-layers 4 --lr 1e-3".split()


def test_flags_of_recomputation_are_left_out_in_every_spelling() -> None:
    fields = decided_fields(llama(world=1), GPT_COST)
    for flags in ("--recompute-activations", "--recompute-granularity selective "
                  "--recompute-modules core_attn mlp", "--recompute-method block "
                  "--recompute-num-layers 3 --recompute-granularity full"):  # fmt: skip
        assert without(f"{flags} --lr 1e-3".split(), TEXT, fields) == ["--lr", "1e-3"]
    full = llama("--recompute-granularity full --recompute-method uniform "
                 "--recompute-num-layers 1", 1)  # fmt: skip
    assert decided_fields(full, GPT_COST) == fields


@pytest.mark.parametrize("seed", range(8))
def test_an_uneven_cut_holds_every_layer_and_its_slowest_stage_is_fastest(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randrange(5, 30)
    size = draw.choice([2, 3, 4])
    chunks = draw.choice([1, 1, 2]) if layers >= 2 * size else 1
    depths = " --mtp-num-layers 1" if seed % 2 else ""
    network = GptNetwork.of(llama(f"--num-layers {layers}{depths}", 1))
    text = balanced(network, size, chunks)
    assert text is not None
    stages = stages_of(text)
    assert len(stages) == size * chunks
    assert "".join(stages) == f"E{'t' * layers}{'m' if depths else ''}L"
    layout = Candidate(1, size, 1, 1, chunks, 1, "none", text)
    cut = GptNetwork.of(of(layout, f"--num-layers {layers}{depths}", size))
    costs = [cut.flops(stage).forward for stage in cut.stages()]
    # A stage exceeds the mean by one part that cannot be cut, at most.
    first = dataclasses.replace(cut.stages()[0], embedding=False)
    last = dataclasses.replace(first, layers=(), depths=cut.sizes.depths, head=True)
    parts = [dataclasses.replace(first, layers=(0,)), last]
    assert max(costs) <= sum(costs) / len(costs) + max(cut.flops(x).forward for x in parts)


def test_search_finds_layouts_that_fit_and_sorts_them_or_says_why_not() -> None:
    found = searched("--num-layers 8 --hidden-size 8192 --num-attention-heads 64",
                     gpu="A100-40GB", count=5)  # fmt: skip
    times = [layout.cost.seconds for layout in found.best]
    assert len(times) == 5 and times == sorted(times)
    assert all(layout.cost.fits for layout in found.best)
    assert found.fitting < found.tried
    # Each choice of sizes is listed once.
    sizes = [layout.candidate.sizes for layout in found.best]
    assert len(sizes) == len(set(sizes))
    with pytest.raises(ConfigError, match="No layout of 37 ranks") as caught:
        searched(world=37)
    assert any("`--global-batch-size` (128)" in text for text in caught.value.messages)
    assert 1 < len(caught.value.messages) == len(set(caught.value.messages)) <= 6


LONG = "--seq-length 32768 --max-position-embeddings 32768"


def test_a_search_takes_the_fastest_mode_that_fits_and_counts_layouts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tried(sizes: Sequence[tuple[int, int]]) -> Callable[..., list[Candidate]]:
        return lambda *_: [Candidate(tp, 1, 1, 1, 1, batch, "none") for tp, batch in sizes]

    monkeypatch.setattr(searching, "candidates", tried([(8, 1), (7, 1), (4, 1), (1, 16)]))
    found = searched(LONG)
    # 7 ranks are impossible; a micro-batch of 16 fits in no mode.
    assert (found.tried, found.checked, found.fitting, len(found.best)) == (3, 3, 2, 2)
    assert [layout.candidate.recompute for layout in found.best] == ["none"] * 2
    assert sum(count for _, count in found.refused) == 1
    monkeypatch.setattr(searching, "candidates", tried([(1, 16)]))
    found = searched(LONG)
    assert found.best == [] and found.closest is not None
    needed, closest = found.closest
    assert closest.recompute == "full" and needed > H100.memory
    report = proposal(found, 8, H100, None)
    assert not report.fits and report.lines[0].startswith("no layout fits: the closest, dp with")


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        (
            "--num-layers 8 --hidden-size 6144 --num-attention-heads 48",
            [(1, 1, 1, 1), (2, 1, 1, 1), (1, 4, 1, 1), (1, 4, 1, 2), (2, 4, 2, 1)],
        ),
        (
            EXPERTS,
            [(1, 1, 16, 1), (2, 1, 16, 1), (1, 4, 4, 1), (1, 4, 4, 2), (2, 4, 2, 2)],
        ),
    ],
)
def test_a_search_finds_what_trying_every_variant_finds(
    more: str, sizes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its bounds nor counts that networks share lose a layout."""
    experts = "experts" in more
    listed = [
        Candidate(tp, pp, 1 if experts else x, x if experts else 1, chunks, 1, "none")
        for tp, pp, x, chunks in sizes
    ]
    monkeypatch.setattr(searching, "candidates", lambda *_: listed)
    base = llama(more, 1)
    flags = LayoutFlags(TEXT, GPT_COST, base)
    kept = without(f"{LLAMA_8B} {more}".split(), TEXT, decided_fields(base, GPT_COST))
    complete = parse_args(kept, TEXT, world_size=1, device="cuda").with_values
    assert complete is not None
    gpu = GPUS["A100-40GB"]
    least = LeastCosts(flags, 16, gpu)
    state = StateBound.of(GPT_COST.cases(base)[0].network, 16)
    best: dict[tuple[int, ...], float] = {}
    variants = [each for layout in listed for each in flags.variants(layout, gpu)]
    for variant in variants:
        variants += [each for each in flags.leaner(variant, gpu) if each not in variants]
        try:
            network, ranks = worst_case(GPT_COST.cases(complete(flags.values(variant), 16)))
        except ConfigError:
            continue
        seconds = estimate(network, gpu, ranks=ranks).seconds
        assert least.of_variant(variant) <= seconds * (1 + 1e-9)
        bound = state.bytes_of(variant) + least.activations(variant)
        assert bound <= needed_on(gpu, network, ranks)
        if variant.recompute == "none" and not variant.switches:
            assert least.activations(variant) > 0.4 * max(x.activations for x in ranks)
        assert least_seconds(network, gpu) <= seconds * (1 + 1e-9)
        if needed_on(gpu, network, ranks) <= gpu.memory:
            best[variant.sizes] = min(seconds, best.get(variant.sizes, seconds))
    found = searched(more, 16, gpu.name).best
    assert len(best) > 1 and len(variants) > 3 * len(listed)
    assert {x.candidate.sizes: x.cost.seconds for x in found} == pytest.approx(best)


def test_what_replaces_a_switch_decides() -> None:
    flags = LayoutFlags(TEXT, GPT_COST, llama(world=1))
    layout = Candidate(1, 1, 1, 1, 1, 1, "full")
    for switch in (SHARDED_WEIGHTS, SHARDED_GRADIENTS, ALL_ON_HOST, HALF_ON_HOST):
        layout = flags.with_switch(layout, switch)
    run = of(layout)
    assert run.optimizer.shards_weights
    assert run.offload.optimizer_offload_fraction == 1.0
    assert layout.uses == ["sharded weights", "host state"]


@pytest.mark.parametrize("more", ["", MOE, "--grad-reduce-in-bf16", "--lora-rank 8",
                                  "--data-parallel-sharding-strategy optim_grads "
                                  "--use-distributed-optimizer"])  # fmt: skip
def test_the_quick_bound_is_below_what_a_layout_needs(more: str) -> None:
    bound = StateBound.of(GptNetwork.of(llama(more, 1)), 8)
    for tp, pp, cp, ep in ((1, 1, 1, 1), (2, 2, 1, 1), (1, 4, 2, 1), (4, 1, 1, 2), (1, 1, 1, 2)):
        if ep > 1 and more != MOE:
            continue
        run = of(Candidate(tp, pp, cp, ep, 1, 1, "none"), more)
        network = GptNetwork.of(run)
        ranks = worst_case(GPT_COST.cases(run))[1]
        assert bound.bytes_of(Candidate(tp, pp, cp, ep, 1, 1, "none")) < needed_on(
            H100, network, ranks
        )


def test_a_command_is_one_for_each_node_and_quotes_its_words() -> None:
    start = partial(command, "pretrain_gpt.py", gpu=H100)
    layout = ["--pipeline-model-parallel-layout", "Et*2|(t*2|)*2,tL", "--bf16"]
    assert start(layout, 4) == (
        "python pretrain_gpt.py --nproc-per-node 4 \\\n"
        "    --pipeline-model-parallel-layout 'Et*2|(t*2|)*2,tL' --bf16"
    )
    assert start(["--bf16"], 24).startswith("torchrun --nnodes 3 --nproc-per-node 8 \\\n")
    assert start([], 6).endswith("--nproc-per-node 6")


def test_stages_of_a_kind_cost_the_same() -> None:
    """Experts and windows tell layers apart."""
    flags = (
        f"{MOE} --moe-layer-freq ([0]*2+[1]*30) --pipeline-model-parallel-size 8 "
        "--num-virtual-stages-per-pipeline-rank 2 --window-size (127,0) --window-attn-skip-freq 4"
    )
    network = GptNetwork.of(llama(flags, 16))
    stages = network.stages()
    kinds = {network.kind(stage) for stage in stages}
    assert 3 < len(kinds) < len(stages) == 16
    for count in (network.weights, network.activations, network.deferred, network.flops):
        assert network.of_stages(count, stages) == [count(stage) for stage in stages]


def test_least_seconds_are_those_of_a_schedule_whose_messages_take_no_time() -> None:
    for flags in ("", "--pipeline-model-parallel-size 4", "--tensor-model-parallel-size 2"):
        network = GptNetwork.of(llama(flags, 8))
        found = estimate(network, H100).seconds
        assert found * 0.998 < least_seconds(network, H100) <= found
