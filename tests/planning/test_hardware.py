"""Rates and reserves of a GPU, by format, class of kernels, span of ranks and groups."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_ext.device.gpus import GB, GPUS, Measured
from megatron_ext.errors import ConfigError
from megatron_ext.planning.hardware import (
    DEFAULT,
    GAP,
    GRAPH_GAP,
    Efficiency,
    Rates,
    gpu_named,
    reserve_on,
    size,
)
from megatron_ext.planning.kernels import Phase, Work, cast_of, update_work
from megatron_ext.planning.stages import Ranks
from megatron_ext.planning.state import State
from tests.text.cost.layouts import llama

H100 = GPUS["H100"]


@pytest.mark.parametrize("name", ["H100", "h100", "a100-40gb", "B200"])
def test_names_of_gpus_have_no_case(name: str) -> None:
    assert gpu_named(name) is GPUS[name.upper()]


def test_products_have_the_rate_of_their_format() -> None:
    rates = Rates(H100)
    assert rates.products(2) == H100.bf16 * DEFAULT.products
    assert rates.products(4) == H100.peak(4) * DEFAULT.products
    assert rates.products(1) == H100.peak(1) * DEFAULT.fp8_products
    # A machine whose rates are measured in 16 and 8 bits.
    gpu = dataclasses.replace(H100, measured=Measured(8e14, None, 3e12, "x"))
    measured = Rates(gpu)
    assert (measured.products(2), measured.products(1)) == (8e14, rates.products(1))
    assert measured.products(4) == rates.products(4)


def test_kernels_have_the_rate_of_their_class() -> None:
    rates = Rates(H100)
    copied = H100.memory_bandwidth * DEFAULT.copies
    for kind in ("pointwise", "casts"):
        assert rates.memory(kind) == copied * DEFAULT.kernels
    for kind in ("optimizer", "logits", "plumbing", "weight gradients"):
        assert rates.memory(kind) == copied * DEFAULT.streams
    work = Work("linear", Phase.FORWARD, flops=1e12, num_bytes=1e9, kernels=10, width=2)
    busy = 1e12 / (rates.products(2) * DEFAULT.layers) + 1e9 / rates.memory("linear")
    assert rates.seconds(work) == pytest.approx(busy + 10 * GAP)
    graphed = dataclasses.replace(work, graphed=True)
    assert rates.seconds(graphed) == pytest.approx(busy + 10 * GRAPH_GAP)


def test_ranks_of_one_machine_have_its_links() -> None:
    rates = Rates(H100)
    own = [rates.link(span) for span in (1, 2, H100.per_node)]
    assert own == [H100.link * DEFAULT.links] * 3
    assert rates.link(H100.per_node + 1) == H100.network * DEFAULT.links


def test_a_group_of_several_machines_uses_the_ports_of_all_its_ranks() -> None:
    """An H100's link is 9 times as fast as its port, of which a machine has 8."""
    rates = Rates(H100)
    port = H100.network * DEFAULT.links
    link = H100.link * DEFAULT.links
    assert [rates.ring(8), rates.ring(2, 4)] == [link, link]
    assert [rates.ring(16), rates.ring(4, 4), rates.ring(2, 8)] == [8 * port, 2 * port, port]
    assert rates.all_to_all(7e9, 8) == pytest.approx(7e9 / link)
    assert rates.all_to_all(15e9, 16) == pytest.approx(8e9 / port)
    # Where few ranks are elsewhere, the links within a machine take longer.
    slow = Rates(dataclasses.replace(H100, link=H100.network))
    assert slow.all_to_all(11e9, 12) == pytest.approx(7e9 / port)
    assert rates.all_to_all(1e9, 1) == 0


def test_nothing_of_an_exchange_may_be_hidden_but_a_rate_is_above_zero() -> None:
    assert Efficiency(hidden=0, kernels=1).hidden == 0
    with pytest.raises(ConfigError) as caught:
        Efficiency(hidden=-0.1, links=0, copies=1.01)
    assert [text.split("`")[1] for text in caught.value.messages] == ["copies", "links", "hidden"]


RANKS = {"--tensor-model-parallel-size 2": 1, "--context-parallel-size 2": 2,
         "--pipeline-model-parallel-size 2": 3, "": 1, "--tensor-model-parallel-size 8": 1,
         "--context-parallel-size 8": 2, "--pipeline-model-parallel-size 8": 2,
         "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4": 3}  # fmt: skip
"""Flags of 8 ranks -> groups besides that of the replicas of 8 / tp / pp ranks, if any."""


@pytest.mark.parametrize("flags", RANKS)
def test_every_group_of_several_ranks_has_buffers(flags: str) -> None:
    """Context-parallel ranks share replicas' gradients; stages have two groups of neighbours."""
    ranks = Ranks.of(llama(flags))
    groups = [ranks.tp > 1, ranks.cp > 1, ranks.dp * ranks.cp > 1, ranks.pp > 1, ranks.pp > 1]
    channels = reserve_on(H100, ranks, 0)["NCCL buffers of all groups"]
    assert channels == sum(groups) * 2 * 24 * 4 * 2**20
    experts = dataclasses.replace(ranks, ep=4)
    more = reserve_on(H100, experts, 0)["NCCL buffers of all groups"]
    assert more - channels == 2 * 24 * 4 * 2**20


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (10**8, "0.10 GB"),
        (10**8 - 10**4, "99.99 MB"),
        (5 * 10**8, "0.50 GB"),
        (1234 * 10**9, "1,234.00 GB"),
        (10**6, "1.00 MB"),
    ],
)
def test_a_tenth_of_a_gigabyte_is_shown_in_gigabytes(count: int, text: str) -> None:
    assert size(count) == text


def machine(folder: Path, **changed: object) -> str:
    rates = {"bf16": 8e14, "fp8": 1.4e15, "copy": 4e12}
    report = {"name": "NVIDIA X900", "memory": 100 * GB, "capability": [9, 0], "rates": rates}
    rates.update({name: changed.pop(name) for name in ("fp8", "copy") if name in changed})
    path = folder / "machine.json"
    path.write_text(json.dumps({"gpus": [{**report, **changed}]}))
    return str(path)


def test_a_gpu_that_no_table_has_is_as_it_was_measured(tmp_path: Path) -> None:
    gpu = gpu_named(machine(tmp_path))
    assert (gpu.name, gpu.memory, gpu.hopper) == ("NVIDIA X900", 100 * GB, True)
    assert (gpu.bf16, gpu.fp8, gpu.memory_bandwidth) == (8e14, 1.4e15, 4e12)
    assert (gpu.fp32, gpu.link, gpu.network) == (8e14 / 16, 25 * GB, 25 * GB)
    assert not gpu_named(machine(tmp_path, capability=[8, 9])).hopper
    assert gpu_named(machine(tmp_path, fp8=None)).fp8 is None
    # A kind of the table keeps its links, with the memory that the machine has.
    known = gpu_named(machine(tmp_path, name="NVIDIA H200", memory=150 * GB))
    assert (known.memory, known.link) == (150 * GB, GPUS["H200"].link)
    # Of kinds with one name, that with the nearest memory.
    for memory, kind in ((42, "A100-40GB"), (85, "A100")):
        a100 = gpu_named(machine(tmp_path, name="NVIDIA A100-SXM4", memory=memory * GB))
        assert a100.memory_bandwidth == GPUS[kind].memory_bandwidth


@pytest.mark.parametrize("wrong", [{"copy": 0}, {"fp8": -1}, {"memory": 0}])
def test_rates_that_cannot_be_are_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="but its rates cannot be read"):
        gpu_named(machine(tmp_path, **wrong))


def test_recipes_of_transformer_engine_cast_like_tensorwise_ones() -> None:
    assert cast_of("delayed") == (4, 1)
    assert cast_of("tensorwise") == cast_of("blockwise") == cast_of("mxfp8") == (6, 3)
    assert cast_of("rowwise") == (8, 4)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_an_update_moves_weights_state_and_averages(kind: str, half: bool) -> None:
    """Numbers of elements and bytes, all different, so that no two can be mixed up."""
    ranks = dataclasses.replace(Ranks.of(llama()), width=2 if half else 4)
    optimizer = dataclasses.replace(llama().optimizer, optimizer=kind)
    state = State(count=7000, gradients=300, optimizer=50, average=11, updated=1000)
    (work,) = update_work(optimizer, ranks, state)
    per_weight = 4 + 4 + (2 if half else 8)
    moved = 2 * 50 + 3 * 11
    if kind == "sgd":
        per_weight += 4 + (4 if half else 0)
        moved += 2 * 300
    assert work.num_bytes == per_weight * 1000 + moved


@pytest.mark.parametrize(
    ("name", "near"),
    [("8xH100", "H100"), ("A100-80GB", "A100"), ("h200_sxm", "H200"), ("V100", "")],
)
def test_other_names_of_a_gpu_lead_to_the_one_that_is_known(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gpu_named(name, "--gpu")
    assert str(caught.value).endswith(f"; did you mean {near}?" if near else "wrote.")
