"""Tasks of Ray, on a real cluster of two workers, write the bytes of one machine."""

import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.errors import ConfigError, DataError, MachineFault
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.ray_tasks import _connect, _fault
from tests.text import tiny
from tests.text.preprocess.faults import deaths, plant_deaths
from tests.text.preprocess.runs import check_pair, left_in, run, texts_of

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")


@needs_ray
@pytest.mark.slow
def test_a_killed_worker_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    documents = tiny.corpus(160)
    documents[100]["text"] = "MARK"
    path = tiny.write_jsonl(tmp_path / "in.jsonl", documents)
    plant_deaths(tmp_path, monkeypatch, "MARK", times=1, parent=False)
    report, said = run(tmp_path, path, executor="ray", workers=2)
    assert deaths(tmp_path) == 1
    assert report.documents == 160
    assert said[1] == "Starting Ray with 2 CPUs on this machine; `RAY_ADDRESS` names no cluster."
    assert any(line.startswith("A Ray process died at ") for line in said)
    assert said[-1].endswith(" are encoded again (attempt 2).")
    check_pair(tmp_path, texts_of(documents))
    assert left_in(tmp_path) == ["out_text_document.bin", "out_text_document.idx"]


@needs_ray
@pytest.mark.slow
def test_errors_of_tasks_are_those_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    documents = tiny.corpus(60)
    path = tiny.write_jsonl(tmp_path / "bad.jsonl", [*documents, {"txt": "x"}])
    documents[1]["text"] = "MARK"
    plant_deaths(tmp_path, monkeypatch, "MARK", times=9, parent=False)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with pytest.raises(DataError, match=r"bad.jsonl line 61 has no key 'text' \(it has "):
            run(tmp_path, path, executor="ray")
        path = tiny.write_jsonl(tmp_path / "in.jsonl", documents)
        died = (
            r"^Parts 0 of .*out were not encoded in 3 attempts \(A Ray process died at .*in.jsonl, "
            r"bytes 0 to .*\); finished parts are kept"
        )
        with pytest.raises(MachineFault, match=died):
            run(tmp_path, path, executor="ray")
        assert ray.is_initialized()
    finally:
        ray.shutdown()
    assert deaths(tmp_path) == 3
    assert run(tmp_path, path)[0].documents == 60
    check_pair(tmp_path, texts_of(documents))


@needs_ray
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("ray://127.0.0.1:1", "Connection refused"),
        ("http://127.0.0.1:1", "Invalid Ray address"),
        ("nonsense", "Invalid address format"),
    ],
)
def test_an_address_without_a_cluster_is_told(
    address: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    start = time.monotonic()
    sentence = rf"^`RAY_ADDRESS` \({address}\) leads to no Ray cluster that can be used \(.*{why}"
    with pytest.raises(ConfigError, match=sentence):
        _connect(2, print)
    assert time.monotonic() - start < 30


def test_a_fault_of_a_disk_is_told() -> None:
    part = Part("/in.jsonl", "in.jsonl", 0, 9, "plain", 9)
    ray = SimpleNamespace(get=str)
    full = OSError(28, "No space left on device")
    assert _fault(ray, full, part).startswith(
        "A Ray process could not write or read ([Errno 28] No space left on device) for in.jsonl, "
        "bytes 0 to 9, as where"
    )
    assert _fault(ray, "", part) == ""


def test_without_ray_the_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(5))
    with pytest.raises(
        ConfigError, match="`--executor ray` needs the package ray, which is not in"
    ):
        run(tmp_path, path, executor="ray")
