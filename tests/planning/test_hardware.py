"""Rates of GPUs: datasheets, what is assumed of them, and files of the doctor."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_ext.config.reporting import GPU_NAMES
from megatron_ext.device.gpus import GPUS
from megatron_ext.errors import ConfigError
from megatron_ext.inspect.doctor.findings import Examination, Rates
from megatron_ext.inspect.doctor.findings import Gpu as Found
from megatron_ext.planning.hardware import DEFAULT, Efficiency, Reserve, assumed, gpu_named
from megatron_ext.planning.hardware import Rates as Reached
from megatron_ext.planning.stages import Ranks
from megatron_ext.planning.step_time import estimate
from megatron_ext.text.task import GPT
from megatron_ext.train.main import main
from tests.text.cost.layouts import MODEL, llama, llama_network

H200 = Found(0, "NVIDIA H200", (9, 0), 150 * 10**9, Rates(8e14, 1.4e15, 4.2e12))


def _file(folder: Path, *gpus: Found) -> str:
    """Write what ``tools/doctor.py --json`` prints."""
    content = {"findings": [], "gpus": [dataclasses.asdict(gpu) for gpu in gpus]}
    path = folder / "machine.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_the_table_of_gpus() -> None:
    assert tuple(GPUS) == GPU_NAMES
    with pytest.raises(ConfigError, match=r"`--gpu` \(V100\) must be one of"):
        gpu_named("V100")
    assert GPUS["H100"].peak(1) == pytest.approx(2 * GPUS["H100"].peak(2), rel=1e-3)
    with pytest.raises(ConfigError, match="A100 has no fp8 products"):
        GPUS["A100"].peak(1)
    with pytest.raises(ConfigError, match=r"`products` \(1.5\) must be above 0"):
        Efficiency(products=1.5)


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
    assert rates.products(2) == 7e14 * DEFAULT.layers
    assert rates.products(1) == 1.3e15 * DEFAULT.layers
    assert rates.memory == 4.1e12 * DEFAULT.kernels
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


def test_a_measured_machine_changes_the_time(tmp_path: Path) -> None:
    fast = estimate(llama_network(), gpu_named(_file(tmp_path, H200)))
    slow = Found(0, "NVIDIA H200", (9, 0), 150 * 10**9, Rates(4e14, None, 4.2e12))
    slower = estimate(llama_network(), gpu_named(_file(tmp_path, slow)))
    assert 1.5 * fast.seconds < slower.seconds < 2.1 * fast.seconds


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "it is no JSON"),
        ("[]", "has no list of GPUs"),
        ('{"gpus": []}', "was written where torch found no GPU"),
        ('{"gpus": [{"name": "NVIDIA H200", "rates": null}]}', "holds no measured rates"),
        ('{"gpus": [{"name": "NVIDIA H200", "rates": {}}]}', "its rates cannot be read"),
        (
            '{"gpus": [{"name": "H200", "memory": 1, "capability": [9, 0], "rates": {"bf16": 0, '
            '"fp8": null, "copy": 1}}]}',
            "its rates cannot be read",
        ),
    ],
)
def test_a_bad_file_is_one_sentence(
    content: str | None, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    if content is not None:
        path.write_text(content)
    assert main(GPT, [*MODEL, "--dry-run", "--dry-run-gpu", str(path)]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert said in line and str(path) in line and "tools/doctor.py --json" in line


def test_assumptions_say_where_they_come_from() -> None:
    for name, value, what, _ in assumed(GPUS["H100"]):
        assert 0 < float(value) <= 1 and ";" in what, name
    with pytest.raises(ConfigError, match=r"`layers` \(0\) must be above 0"):
        Efficiency(layers=0)


def test_the_reserve_grows_with_groups_and_activations() -> None:
    mib, gpu, one = 2**20, GPUS["H100"], Ranks.of(llama(world=1))
    alone = Reserve.of(gpu, one, 0)
    assert alone.channels == alone.fragments == 0
    assert alone.matrix_library == 4 * 32 * mib
    assert Reserve.of(GPUS["A100"], one, 0).matrix_library == 4 * 8 * mib
    more = Reserve.of(gpu, Ranks.of(llama("--tensor-model-parallel-size 2")), 10**9)
    assert more.channels == 2 * 2 * 24 * 4 * mib
    assert more.fragments == 5 * 10**7
    assert more.total > alone.total > 500 * mib
