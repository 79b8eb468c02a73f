"""The time of a step, and the rates that it rests on."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_ext.config.output import GPU_NAMES
from megatron_ext.device.gpus import GPUS
from megatron_ext.errors import ConfigError
from megatron_ext.inspect.doctor.host import Examination, Rates
from megatron_ext.inspect.doctor.host import Gpu as Found
from megatron_ext.planning.budget import budget
from megatron_ext.planning.hardware import DEFAULT, Efficiency, assumed, gpu_named, reserve_on
from megatron_ext.planning.hardware import Rates as Reached
from megatron_ext.planning.kernels import Phase, Work
from megatron_ext.planning.memory import moments, peak_of
from megatron_ext.planning.stages import LayerBytes, Ranks
from megatron_ext.planning.state import buckets
from megatron_ext.planning.step_time import Clock, estimate
from megatron_ext.planning.weights import Weight
from megatron_ext.schedules.orders import build_plan
from megatron_ext.text.task import GPT
from megatron_ext.train.main import main
from tests.text.cost.layouts import MODEL, llama, llama_network


def test_time_grows_with_the_bubble_and_stays_below_the_peak_rate() -> None:
    gpu = GPUS["H100"]
    one = estimate(llama_network("--use-distributed-optimizer"), gpu)
    deep = estimate(llama_network("--pipeline-model-parallel-size 8"), gpu)
    assert 0 < one.mfu < Efficiency().products * Efficiency().layers
    assert one.seconds > one.flops / (8 * gpu.bf16)
    assert deep.price.bubble_share > one.price.bubble_share == 0
    assert one.tokens_per_second == pytest.approx(128 * 8192 / one.seconds)
    slower = estimate(llama_network("--use-distributed-optimizer"), gpu, Efficiency(products=0.35))
    assert slower.seconds > 1.5 * one.seconds


PLAN = build_plan("1f1b", pipeline_size=2, num_microbatches=4)
TENS = [LayerBytes(10, 0), LayerBytes(10, 0)]


def test_buckets_follow_the_alignment_of_the_distributed_optimizer() -> None:
    weights = [Weight("a", 100), Weight("b", 10), Weight("c", 200)]
    (plain,) = buckets(weights, distributed=False, replicas=2, bucket_size=None)
    assert (plain.start, plain.end) == (0, 310)
    (shared,) = buckets(weights, distributed=True, replicas=3, bucket_size=None)
    assert shared.spans == [(0, 200), (256, 266), (320, 420)]
    assert shared.end == 768  # a multiple of 3 and 128
    parts = buckets(weights, distributed=True, replicas=2, bucket_size=150)
    assert [(part.start, part.end) for part in parts] == [(0, 256), (256, 512)]
    # A copy of the embedding has a bucket of its own.
    weights = [Weight("a", 100), Weight("e", 64, shared=True)]
    alone = buckets(weights, distributed=True, replicas=2, bucket_size=None)
    assert [part.spans for part in alone] == [[(0, 64)], [(128, 228)]]


def test_a_walk_holds_what_the_schedule_has_in_flight_and_what_has_arrived() -> None:
    costs = [LayerBytes(10, 3), LayerBytes(7, 2)]
    assert peak_of(moments(PLAN, 0), costs) == (20, 3, 2)
    assert peak_of(moments(PLAN, 1), costs) == (7, 2, 1)
    without, buffers = peak_of(moments(PLAN, 1), TENS), peak_of(moments(PLAN, 1), TENS, boundary=3)
    assert buffers[0] in (without[0] + 3, without[0] + 6)
    # With zero bubbles also what weight gradients need.
    plan = build_plan("zb-h1", pipeline_size=2, num_microbatches=4)
    waiting = peak_of(moments(plan, 1), TENS, deferred=[4, 4])
    assert waiting[0] == 14  # one whole, one whose weight gradient waits
    assert peak_of(moments(plan, 1), TENS, deferred=[0, 0])[0] == 10


H200 = Found(0, "NVIDIA H200", (9, 0), 150 * 10**9, Rates(8e14, 1.4e15, 4.2e12))


def _file(folder: Path, *gpus: Found) -> str:
    """Write what ``tools/doctor.py --json`` prints."""
    content = {"findings": [], "gpus": [dataclasses.asdict(gpu) for gpu in gpus]}
    path = folder / "machine.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_the_table_of_gpus_and_the_assumptions() -> None:
    assert tuple(GPUS) == GPU_NAMES
    with pytest.raises(ConfigError, match=r"`--gpu` \(V100\) must be one of"):
        gpu_named("V100", "--gpu")
    assert GPUS["H100"].peak(1) == pytest.approx(2 * GPUS["H100"].peak(2), rel=1e-3)
    with pytest.raises(ConfigError, match="A100 has no fp8 products"):
        GPUS["A100"].peak(1)
    with pytest.raises(ConfigError, match=r"`products` \(1.5\) must be above 0"):
        Efficiency(products=1.5)
    with pytest.raises(ConfigError, match=r"`layers` \(0\) must be above 0"):
        Efficiency(layers=0)
    for name, value, what, _ in assumed(GPUS["H100"]):  # They say where they come from.
        assert 0 < float(value) <= 1 and ";" in what, name


def test_the_doctor_still_writes_what_is_read() -> None:
    names = {field.name for field in dataclasses.fields(Examination)}
    assert "gpus" in names and "to_dict" in vars(Examination)
    assert {x.name for x in dataclasses.fields(Found)} >= {"name", "memory", "capability", "rates"}
    assert {x.name for x in dataclasses.fields(Rates)} >= {"bf16", "fp8", "copy"}


def test_a_measured_machine_takes_the_place_of_assumptions(tmp_path: Path) -> None:
    slower = Found(1, "NVIDIA H200", (9, 0), 150 * 10**9, Rates(7e14, 1.3e15, 4.1e12))
    gpu = gpu_named(_file(tmp_path, H200, slower))
    assert gpu.memory == 150 * 10**9
    assert (gpu.bf16, gpu.link) == (GPUS["H200"].bf16, GPUS["H200"].link)
    rates = Reached(gpu)
    assert (rates.products(2), rates.products(1)) == (7e14, 1.3e15)
    assert rates.operations(Work("linear", Phase.FORWARD)) == 7e14 * DEFAULT.layers
    assert rates.memory("pointwise") == 4.1e12 * DEFAULT.kernels
    assert rates.memory("optimizer") == 4.1e12 * DEFAULT.streams
    replaced = {name for name, _, _, measured in assumed(gpu) if measured}
    assert replaced == {"products", "fp8_products", "copies"}
    assert not any(measured for *_, measured in assumed(GPUS["H200"]))


def test_a_gpu_that_the_table_lacks_has_the_links_of_its_slot(tmp_path: Path) -> None:
    found = Found(0, "NVIDIA RTX 6000", (8, 9), 48 * 10**9, Rates(2e14, None, 8e11))
    gpu = gpu_named(_file(tmp_path, found))
    assert (gpu.bf16, gpu.link, gpu.hopper) == (2e14, 25e9, False)
    with pytest.raises(ConfigError, match="has no fp8 products"):
        Reached(gpu).products(1)
    a100 = Found(0, "NVIDIA A100-SXM4-40GB", (8, 0), 42 * 10**9, Rates(2.5e14, None, 1.3e12))
    assert gpu_named(_file(tmp_path, a100)).memory_bandwidth == GPUS["A100-40GB"].memory_bandwidth

    fast = estimate(llama_network(), gpu_named(_file(tmp_path, H200)))
    slow = Found(0, "NVIDIA H200", (9, 0), 150 * 10**9, Rates(4e14, None, 4.2e12))
    slower = estimate(llama_network(), gpu_named(_file(tmp_path, slow)))
    assert 1.5 * fast.seconds < slower.seconds < 2.1 * fast.seconds


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "it is no valid JSON"),
        ("[]", "has no list of GPUs"),
        ('{"gpus": []}', "was written where torch found no GPU"),
        ('{"gpus": [{"name": "NVIDIA H200", "rates": null}]}', "holds no measured rates"),
        ('{"gpus": [{"name": "NVIDIA H200", "rates": {}}]}', "its rates cannot be read"),
        ('{"gpus": [{"name": "H200", "memory": 1, "capability": [9, 0], "rates": {"bf16": 0, '
         '"fp8": null, "copy": 1}}]}', "its rates cannot be read"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(
    content: str | None, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    if content is not None:
        path.write_text(content)
    assert main(GPT, [*MODEL, "--dry-run", "--dry-run-gpu", str(path)]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert said in line and str(path) in line and "tools/doctor.py --json" in line


def test_the_reserve_grows_with_groups_and_activations() -> None:
    mib, gpu, one = 2**20, GPUS["H100"], Ranks.of(llama(world=1))
    _, matrix_library, channels, fragments = alone = [*reserve_on(gpu, one, 0).values()]
    assert channels == fragments == 0
    assert matrix_library == 4 * 32 * mib
    assert 4 * 8 * mib in reserve_on(GPUS["A100"], one, 0).values()
    two = Ranks.of(llama("--tensor-model-parallel-size 2"))
    _, _, channels, fragments = more = [*reserve_on(gpu, two, 10**9).values()]
    assert channels == 2 * 2 * 24 * 4 * mib
    assert fragments == 5 * 10**7
    assert sum(more) > sum(alone) > 500 * mib


def test_pairs_hide_the_exchange_of_experts_and_hold_one_more_micro_batch() -> None:
    words = "--num-experts 8 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
    gpu = gpu_named("H100")
    efficiency = dataclasses.replace(DEFAULT, hidden=1.0)
    alone = estimate(llama_network(words), gpu, efficiency)
    pairs = f"{words} --overlap-moe-expert-parallel-comm"
    paired = estimate(llama_network(pairs), gpu, efficiency)
    network = paired.network
    clock = Clock(network, paired.rates)
    (stage,) = network.stages()
    exchanged = clock.experts_exchange(network.traffic(stage))
    # All passes but the first and the last are in pairs, and much computing hides all of it.
    saved = (network.num_microbatches - 1) * exchanged
    assert alone.seconds - paired.seconds == pytest.approx(saved, rel=0.03)
    assert saved > 0
    kept = network.activations(stage).kept
    assert paired.peak - alone.peak >= kept
    lines = [sum(line.seconds for line in budget(x)) for x in (alone, paired)]
    assert lines == pytest.approx([alone.seconds, paired.seconds])
