"""The doctor on made-up machines, and on this one, whatever it is."""

import json
import sys
from pathlib import Path

import pytest

from megatron_ext.inspect.doctor.examine import examine, main
from megatron_ext.inspect.doctor.gpus import QUESTIONS
from megatron_ext.inspect.doctor.host import Outcome, ThisMachine, ask_python, report, run_python
from megatron_ext.inspect.doctor.packages import is_nvidia_apex
from tests.inspect.doctor.machines import H200, NO_CUDA, Machine


def text_of(machine: Machine, **options: bool) -> str:
    return "\n".join(report(examine(machine, **options)))


def test_a_whole_machine_lacks_nothing_and_needs_no_apex() -> None:
    found = examine(Machine())
    assert not found.stops_runs
    assert found.unknown == ()
    statuses = {finding.name: finding.status for finding in found.findings}
    others = {name: status for name, status in statuses.items() if status != "found"}
    assert others == {"apex": "not needed"}
    assert found.finding("apex").detail.startswith("Nothing: norms, Adam, the gradient norm")
    assert found.finding("NCCL").version == "2.28.9"
    assert found.finding("cuDNN").version == "9.15.1"
    assert found.finding("nvcc").version == "13.0"
    assert found.finding("NVIDIA driver").version == "580.65.06"
    text = "\n".join(report(found))
    assert "GPU 0: NVIDIA H200, compute capability 9.0, 139.7 GiB" in text
    assert "bf16 matrix product, measured: 790 TFLOP/s" in text
    assert "fp8 matrix product, measured: 1400 TFLOP/s" in text
    assert "copy within its memory, read and written: 4.10 TB/s" in text
    assert text.endswith("Runs compute on 1 GPU(s).")


def test_without_a_gpu_it_says_what_it_cannot_know() -> None:
    machine = Machine(NO_CUDA, smi=None, transformer_engine=None, flash_attn=None, triton=None)
    found = examine(machine)
    assert not found.stops_runs
    assert found.gpus == ()
    assert found.finding("NVIDIA driver").status == "unknown"
    assert found.finding("NCCL").status == "unknown"
    assert found.finding("NCCL").version is None
    for name in ("Transformer Engine", "flash-attn", "triton", "apex"):
        assert found.finding(name).status == "not needed"
    detail = "No driver shows one, and this torch was built without CUDA."
    assert found.finding("GPU").detail == detail
    text = "\n".join(report(found))
    assert "Torch can use no GPU here, so this cannot be known:" in text
    assert "the matrix rate and the copy bandwidth of a GPU" in text
    assert "TFLOP/s" not in text and "TB/s" not in text
    assert "compute capability 8.9 or newer" in text and "fp8 recipes" not in text
    assert found.to_dict()["gpus"] == ()
    tried = ("device.rates", "CUDAGraph", "torch.compile")
    assert not any(word in code for word in tried for code in machine.ran)
    names = {finding.name for finding in found.findings}
    assert not names & {"CUDA graphs", "torch.compile", "links of GPUs", "RDMA network"}
    assert text.endswith("Runs compute on the CPU, and their ranks talk over gloo.")


def test_an_extra_without_a_gpu_and_a_version_that_nobody_states_are_not_judged() -> None:
    finding = examine(Machine(megatron_ext=None)).finding("megatron-core")
    assert (finding.status, finding.install) == ("unknown", "pip install -e .")
    machine = Machine(NO_CUDA, smi=None)
    finding = examine(machine).finding("Transformer Engine")
    assert (finding.status, finding.version) == ("unknown", "2.11.0")
    assert not any("transformer_engine" in code for code in machine.ran)


REINSTALL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/"
UNUSABLE = {**H200, "usable": False, "gpus": []}


@pytest.mark.parametrize(
    ("torch", "environ", "detail", "install"),
    [
        (NO_CUDA, {}, "this torch was built without CUDA.", f"{REINSTALL}cu130"),
        ({**UNUSABLE, "driver_cuda": 12040}, {}, "the driver supports CUDA up to 12.4 and this "
         "torch was built for 13.0.", f"{REINSTALL}cu126"),
        ({**UNUSABLE, "driver_cuda": 13010, "cuda": "14.0"}, {}, "the driver supports CUDA up to "
         "13.1 and this torch was built for 14.0.", f"{REINSTALL}cu130"),
        ({**UNUSABLE, "driver_cuda": 0}, {"CUDA_VISIBLE_DEVICES": " -1"}, "`CUDA_VISIBLE_DEVICES` "
         "(' -1') hides them all.", "unset CUDA_VISIBLE_DEVICES"),
        (UNUSABLE, {"CUDA_VISIBLE_DEVICES": ""}, "`CUDA_VISIBLE_DEVICES` ('') hides them all.",
         "unset CUDA_VISIBLE_DEVICES"),
        (UNUSABLE, {}, "torch cannot use any; `python -c 'import torch; torch.cuda.init()'` says "
         "why.", ""),
    ],
)  # fmt: skip
def test_why_torch_cannot_use_a_gpu_that_is_there(
    torch: dict[str, object], environ: dict[str, str], detail: str, install: str
) -> None:
    finding = examine(Machine(torch, environ=environ)).finding("GPU")
    assert finding.status == "broken"
    assert finding.detail == f"The driver shows NVIDIA H200, but {detail}"
    assert finding.install == install
    assert finding.cost == (
        "Runs compute on the CPU and talk over gloo: for tests and small models only."
    )


def test_missing_extras_say_what_they_cost_and_how_to_install_them() -> None:
    found = examine(Machine(transformer_engine=None, flash_attn=None, triton=None))
    engine = found.finding("Transformer Engine")
    assert engine.status == "missing"
    assert "`--transformer-impl transformer_engine` is refused" in engine.cost
    assert engine.install.endswith('--no-build-isolation "transformer-engine[pytorch,core_cu13]"')
    assert found.finding("flash-attn").cost.startswith("Nothing with the torch layers")
    assert "`torch.compile` cannot make GPU kernels" in found.finding("triton").cost
    twelve = examine(Machine({**H200, "cuda": "12.6"}, transformer_engine=None))
    assert "core_cu12" in twelve.finding("Transformer Engine").install
    # A torch for CPUs beside a driver: the engine is that of the driver's CUDA.
    cpu = examine(Machine(NO_CUDA, transformer_engine=None))
    assert cpu.finding("Transformer Engine").status == "missing"
    assert "core_cu13" in cpu.finding("Transformer Engine").install


def test_versions_are_judged_by_what_this_project_supports() -> None:
    """A release candidate counts as its version."""
    old = examine(Machine(transformer_engine="2.3.0"), measure=False).finding("Transformer Engine")
    assert (old.status, old.detail) == ("broken", "This project supports >=2.4.")
    for version, status in (("0.16.2rc1", "found"), ("0.16.1", "found"), ("0.17.0", "broken")):
        found = examine(Machine(megatron_core=version), measure=False).finding("megatron-core")
        assert found.status == status
    engine = examine(Machine(transformer_engine="2.5.0.dev1"), measure=False)
    assert engine.finding("Transformer Engine").status == "found"


def test_an_extra_whose_import_crashes_is_broken() -> None:
    failed = Outcome(1, errors="Traceback\nImportError: undefined symbol: _ZN3c10\n")
    broken = {"transformer_engine": Outcome(-11), "flash_attn": failed, "triton": Outcome(None)}
    found = examine(Machine(broken=broken))
    details = [found.finding(x).detail for x in ("Transformer Engine", "flash-attn", "triton")]
    assert details == [
        "`import transformer_engine.pytorch` failed: it was ended by signal 11.",
        "`import flash_attn` failed: ImportError: undefined symbol: _ZN3c10.",
        "`import triton` failed: it ran out of time.",
    ]
    install = "pip install --force-reinstall --no-build-isolation flash-attn"
    assert found.finding("flash-attn").install == install
    assert not found.stops_runs


def test_flash_attention_3_is_imported_by_its_own_name() -> None:
    machine = Machine(flash_attn_3="3.0.0")
    assert examine(machine).finding("flash-attn 3").version == "3.0.0"
    assert "import flash_attn_interface" in machine.ran
    missing = examine(Machine(flash_attn_3=None)).finding("flash-attn 3")
    assert missing.status == "missing"
    assert missing.cost.startswith("On Hopper GPUs attention of the torch layers takes cuDNN's")
    assert missing.install.endswith('flash-attention.git#subdirectory=hopper"')


def make_apex(folder: Path, file: str) -> Path:
    module = folder / "apex"
    (module / "optimizers").mkdir(parents=True)
    for name in ("__init__.py", file):
        (module / name).write_text("")
    return module


def test_the_apex_of_pypi_is_told_from_nvidias(tmp_path: Path) -> None:
    other = make_apex(tmp_path / "pypi", "views.py")
    assert not is_nvidia_apex(other)
    finding = examine(Machine(folders={"apex": other}, apex="0.9.10.dev0")).finding("apex")
    assert finding.status == "broken"
    assert finding.detail.startswith(f"What is installed at {other} is not NVIDIA's apex but an ")
    assert finding.install == "pip uninstall -y apex"
    on_cpu = Machine(NO_CUDA, smi=None, folders={"apex": other}, apex="0.9.10.dev0")
    assert examine(on_cpu).finding("apex").install == "pip uninstall -y apex"

    ours = make_apex(tmp_path / "nvidia", "optimizers/fused_adam.py")
    finding = examine(Machine(folders={"apex": ours}, apex="0.1")).finding("apex")
    assert (finding.status, finding.version, finding.detail) == ("found", "0.1", "")
    machine = Machine(folders={"apex": ours}, apex="0.1", modules=("amp_C",))
    assert "no kernel that adds weight gradients" in examine(machine).finding("apex").detail
    machine = Machine(folders={"apex": ours}, apex="0.1", modules=())
    finding = examine(machine).finding("apex")
    assert finding.status == "broken"
    assert finding.detail == "It was built without its extensions (`amp_C` is absent)."
    failed = {"apex": Outcome(1, errors="ImportError: no\n")}
    machine = Machine(folders={"apex": ours}, apex="0.1", broken=failed)
    finding = examine(machine).finding("apex")
    assert (finding.status, finding.detail) == ("broken", "Its import failed: ImportError: no.")
    on_cpu = Machine(NO_CUDA, smi=None, folders={"apex": ours}, apex="0.1", broken=failed)
    assert examine(on_cpu).finding("apex").status == "unknown"


@pytest.mark.parametrize(
    ("machine", "name", "status", "words"),
    [
        (Machine(megatron_core="0.15.0"), "megatron-core", "broken", "supports <0.17,>=0.16.1"),
        (Machine(megatron_core=None), "megatron-core", "missing", "Nothing runs."),
        (Machine(broken={"megatron.core": Outcome(1, errors="ImportError: no\n")}),
         "megatron-core", "broken", "Its import failed: ImportError: no."),
        (Machine(torch=Outcome(-4)), "torch", "broken", "failed: it was ended by signal 4."),
        (Machine(torch=Outcome(0, "nonsense")), "torch", "broken", "nothing that could be read"),
        (Machine({**H200, "gpus": [["Tesla V100", 7, 0, 10**10]]}), "kernels for GPU 0", "broken",
         "Tesla V100 is sm_70; this torch has kernels for sm_80, sm_90, sm_100, compute_120."),
    ],
)  # fmt: skip
def test_what_stops_every_run(machine: Machine, name: str, status: str, words: str) -> None:
    found = examine(machine, measure=False)
    assert found.stops_runs
    assert found.finding(name).status == status
    text = "\n".join(report(found))
    assert words in text
    assert text.endswith(f"No run can start: mend {name} first.")


def test_a_machine_without_torch() -> None:
    machine = Machine(Outcome(1, errors="ModuleNotFoundError: No module named 'torch'\n"))
    machine.versions["torch"] = None
    found = examine(machine)
    assert found.finding("torch").install == "pip install torch"
    assert found.finding("GPU").status == "unknown"
    assert found.finding("GPU").detail == (
        "The driver shows NVIDIA H200. Torch, which would use it, does not work."
    )
    machine = Machine(Outcome(1), smi=None)
    assert examine(machine).finding("GPU").detail == "Torch, which would use it, does not work."


@pytest.mark.parametrize(
    ("capability", "fits"), [((8, 6), True), ((9, 0), True), ((10, 3), True), ((12, 1), True),
                             ((7, 5), False), ((11, 0), False)],
)  # fmt: skip
def test_kernels_run_on_newer_minor_versions(capability: tuple[int, int], fits: bool) -> None:
    facts = {**H200, "gpus": [["GPU", *capability, 10**10]]}
    assert examine(Machine(facts), measure=False).stops_runs is not fits
    # Kernels for sm_90a run on 9.0 as those for sm_90.
    archs = ["sm_80", "sm_90a", "sm_100f", "compute_120a"]
    assert examine(Machine({**facts, "archs": archs}), measure=False).stops_runs is not fits


@pytest.mark.parametrize(
    ("smi", "words"),
    [
        (Outcome(9, "NVIDIA-SMI has failed because it couldn't communicate.\n"), "communicate."),
        ("", "`nvidia-smi` shows no device."),
    ],
)
def test_a_driver_that_does_not_answer(smi: str | Outcome, words: str) -> None:
    finding = examine(Machine(NO_CUDA, smi=smi)).finding("NVIDIA driver")
    assert finding.status == "broken"
    assert finding.detail.endswith(words)


def test_rates_that_could_not_be_measured_say_why() -> None:
    machine = Machine(rates=Outcome(1, errors="torch.OutOfMemoryError: CUDA out of memory\n"))
    assert "rates: the measurement failed: torch.OutOfMemoryError" in text_of(machine)
    assert "printed nothing that could be read" in text_of(Machine(rates=Outcome(0, "")))
    assert "rates: not measured (`--no-measure`)" in text_of(Machine(), measure=False)
    tried = {"CUDA graphs", "torch.compile"}
    for measure in (True, False):
        names = {finding.name for finding in examine(Machine(), measure=measure).findings}
        assert names & tried == (tried if measure else set())
    a100 = {**H200, "gpus": [["NVIDIA A100", 8, 0, 85_000_000_000]]}
    older = Machine(a100, rates={"bf16": 2.4e14, "fp8": None, "copy": 1.5e12})
    assert "fp8: its matrix units do not take it" in text_of(older)
    assert "fp8 matrix product" not in text_of(older)


@pytest.mark.parametrize(
    ("capability", "torch_layers", "engine"),
    [
        ((8, 0), "", ""),
        ((8, 9), "delayed tensorwise rowwise", "delayed tensorwise"),
        ((9, 0), "delayed tensorwise rowwise", "delayed tensorwise blockwise"),
        ((10, 0), "delayed tensorwise rowwise", "delayed tensorwise blockwise mxfp8"),
        ((12, 0), "delayed tensorwise rowwise", "delayed tensorwise blockwise"),
    ],
)
def test_fp8_recipes_of_gpus(capability: tuple[int, int], torch_layers: str, engine: str) -> None:
    (gpu,) = examine(Machine({**H200, "gpus": [["GPU", *capability, 10**10]]})).gpus
    assert [" ".join(names) for names in gpu.fp8_recipes.values()] == [torch_layers, engine]


def test_json_holds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "doctor.json"
    assert main(["--json", "--out", str(out)], Machine()) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text(encoding="utf-8")) == found
    assert found["host"]["cores"] == 192.0
    assert found["gpus"][0]["fp8_recipes"]["torch"] == ["delayed", "tensorwise", "rowwise"]
    assert found["gpus"][0]["rates"] == {"bf16": 7.9e14, "fp8": 1.4e15, "copy": 4.1e12}
    assert {"name", "status", "version", "cost", "install"} <= set(found["findings"][0])
    assert main(["--no-measure"], Machine(megatron_core=None)) == 1
    assert "mend by: pip install" in capsys.readouterr().out


def test_what_a_build_for_gpus_is_asked_can_be_asked_without_one() -> None:
    """A build for CPUs stands in, so no name that only some versions have may be asked for."""
    code = f"import torch\ntorch.version.cuda = '13.0'\n{QUESTIONS}"
    found = ask_python(ThisMachine(), code)
    assert isinstance(found, dict), found.reason
    assert found["cuda"] == "13.0"
    assert isinstance(found["driver_cuda"], int)


def test_programs_and_imports_run_apart() -> None:
    here = ThisMachine()
    crashed = run_python(here, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert crashed.reason == "it was ended by signal 11"
    assert run_python(here, "import time; time.sleep(60)", seconds=0.2).code is None
    assert run_python(here, "raise OSError('no')").reason == "OSError: no"
    assert ask_python(here, "print('a note'); print('{\"a\": 1}')") == {"a": 1}
    failed = Outcome(1, errors="Traceback\n  in line 1\nImportError: no\n\n")
    assert failed.reason == "ImportError: no"
    assert here.run(["/nowhere/at/all"]).code == 127
    assert here.version("megatron-core") is not None
    assert here.version("no-such-distribution") is None
    assert here.folder("no_such_module") is None
    assert here.has_module("torch")
    assert here.program("no-such-program", sys.executable) == sys.executable
