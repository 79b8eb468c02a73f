"""Tasks of Ray, on a real cluster of two workers, write the bytes of one machine."""

import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.errors import ConfigError, DataError, MachineFault
from megatron_ext.text.preprocess import ray_tasks
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.ray_tasks import RayTasks, _connect, _fault
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


class Ray:
    """The functions of ray that are used, without a cluster; tasks end in the order of starting."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.options: dict[str, Any] = {}
        self.started: list[int] = []
        self.most = 0
        self.open: list[int] = []
        self.cancelled: list[int] = []
        self.is_shut = False
        kinds = {name: type(name, (Exception,), {}) for name in ("RayTaskError", "RayError")}
        self.exceptions = SimpleNamespace(**kinds)

    def remote(self, **options: Any) -> Any:
        self.options = options
        return lambda function: SimpleNamespace(remote=self._start)

    def _start(self, folder: str, key: str, number: int) -> int:
        assert (folder, key) == ("/parts", "k")
        self.started.append(number)
        self.open.append(number)
        self.most = max(self.most, len(self.open))
        return number

    def wait(
        self, references: list[int], *, timeout: float, num_returns: int = 1
    ) -> tuple[list[int], list[int]]:
        ended = references[:num_returns]
        for number in ended:
            self.open.remove(number)
        return ended, references[num_returns:]

    def get(self, reference: int) -> str:
        answer = self.answers.get(f"p{reference}", "")
        if answer.startswith("died"):
            raise self.exceptions.RayError(answer)
        return answer

    def cancel(self, reference: int, *, force: bool) -> None:
        assert force
        self.cancelled.append(reference)

    def shutdown(self) -> None:
        self.is_shut = True


def tasks_on(ray: Ray, monkeypatch: pytest.MonkeyPatch, *, ours: bool = True) -> RayTasks:
    monkeypatch.setattr(ray_tasks, "save_job", lambda job: None)
    monkeypatch.setattr(ray_tasks, "_connect", lambda workers, say: (ray, ours))
    parts = [Part("/in", "in", n, n + 1, "plain", 1) for n in range(6)]
    options = SimpleNamespace(workers=2)
    job: Any = SimpleNamespace(options=options, folder=Path("/parts"), key="k", parts=parts)
    return RayTasks(job, range(6), print)


def test_as_many_tasks_run_as_there_are_workers_and_faults_are_those_of_an_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = Ray(p1="disk full", p4="died of memory")
    tasks = tasks_on(ray, monkeypatch)
    assert ray.options == {"num_cpus": 1, "max_retries": 0}
    tasks.submit(range(6))
    while tasks.running([]):
        pass
    assert ray.started == list(range(6)) and ray.most == 2
    clauses, may_be_late = tasks.faults([1, 4])
    assert clauses[0].startswith(
        "A Ray process could not write or read (disk full) for in, bytes 1"
    )
    assert clauses[1] == "A Ray process died at in, bytes 4 to 5 (died of memory)"
    assert not may_be_late
    # A task without a fault may have left a marker that is not seen yet.
    clauses, may_be_late = tasks.faults([1, 3])
    assert clauses[1] == "A Ray process has left no marker for in, bytes 3 to 4" and may_be_late
    ray.answers.clear()
    tasks.submit([1])
    assert tasks.faults([1]) == (["A Ray process has left no marker for in, bytes 1 to 2"], True)


@pytest.mark.parametrize("ours", [True, False])
def test_a_run_that_ends_leaves_no_task_and_the_cluster_of_its_caller(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray()
    tasks = tasks_on(ray, monkeypatch, ours=ours)
    now = iter([0.0, 0.0, 9.0])
    monkeypatch.setattr(ray_tasks.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(ray, "wait", lambda references, **how: ([], references))
    tasks.submit([3, 5, 2])
    assert tasks.running([3, 5, 2])
    waited: list[Any] = []
    monkeypatch.setattr(ray, "wait", lambda references, **how: waited.append((references, how)))
    tasks.close()
    assert ray.cancelled == [3, 5]
    assert waited == [([3, 5], {"num_returns": 2, "timeout": ray_tasks._SECONDS_TO_CANCEL})]
    assert ray.is_shut == ours
    idle = Ray()
    tasks_on(idle, monkeypatch, ours=ours).close()
    assert idle.cancelled == [] and idle.is_shut == ours


def test_without_ray_the_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    path = tiny.write_jsonl(tmp_path / "in.jsonl", tiny.corpus(5))
    with pytest.raises(
        ConfigError, match="`--executor ray` needs the package ray, which is not in"
    ):
        run(tmp_path, path, executor="ray")
