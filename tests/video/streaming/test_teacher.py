"""A teacher in a layout of its own predicts as on one rank, and stays as it is."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import DataError
from megatron_ext.optim.update import parts_of
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.run import Run
from megatron_ext.video.streaming import step
from megatron_ext.video.streaming import teacher as teacher_module
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.teacher import ParallelTeacher, build_teacher
from megatron_ext.video.task import VIDEO
from tests.ranks import on_ranks, ranks
from tests.video.networks.harness import gathered_weights
from tests.video.networks.wan.plain import num_parameters
from tests.video.streaming.runs import after_each_step, flags_of, observed, runner_of

TENSOR, STAGES = "--teacher-tensor-model-parallel-size", "--teacher-pipeline-model-parallel-size"
BATCH = 2
ONE_STEP = "--train-iters 1 --clip-grad 0"


def _step(run: Run) -> dict[str, Any]:
    """Note the teacher's predictions, D, and all gradients of the generator in the only step."""
    runner = runner_of(run)
    seen: dict[str, Any] = {"replica": run.context.dp_rank}
    direction = step.generator_direction

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        seen["direction"] = direction(*args, **kwargs)
        return seen["direction"]

    def note(_: Any) -> None:
        teacher = getattr(runner.teacher, "network", runner.teacher)
        seen["gradients"] = gathered_weights(unwrap_model(runner.chunks), lambda p: p.main_grad)
        seen["teacher"] = gathered_weights(unwrap_model([teacher]))

    runner.teacher.register_forward_hook(lambda _module, _args, flow: seen.update(flow=flow))
    step.generator_direction = noted
    after_each_step(run, note)
    return seen


def step_of(folder: Path, words: str, ranks: int, replicas: int) -> dict[str, Any]:
    """Return what all ranks noted, put together, and the losses that were logged."""
    sizes = {"micro": BATCH // replicas, "batch": BATCH, "ranks": ranks}
    rows, seen = observed(folder, f"{ONE_STEP} {words}", _step, **sizes)
    found = {}
    for name in ("flow", "direction"):
        parts: dict[int, Tensor] = {}
        for rank in seen:
            # All ranks of a replica go on with the same numbers.
            assert torch.equal(parts.setdefault(rank["replica"], rank[name]), rank[name])
        found[name] = [parts[replica] for replica in range(replicas)]
    # Rows with the prompt, and then those with the negative prompt, of each replica.
    halves = zip(*(flow.chunk(2) for flow in found["flow"]), strict=True)
    for name in ("gradients", "teacher"):
        assert not any(tensor.isnan().any() for tensor in seen[0][name].values())
    return {
        "flow": torch.cat([torch.cat(half) for half in halves]),
        "direction": torch.cat(found["direction"]),
        "gradients": seen[0]["gradients"],
        "teacher": seen[0]["teacher"],
        "losses": {k: v for k, v in rows[0].items() if k.endswith(("loss", "gradient_norm"))},
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return step_of(tmp_path_factory.mktemp("alone") / "run", "", 1, 1)


def check_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare to 1e-5 numbers that are of order 1 or are brought there."""
    assert found["teacher"].keys() == wanted["teacher"].keys()
    for name, tensor in wanted["teacher"].items():
        assert torch.equal(found["teacher"][name], tensor), name
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-5)
    assert wanted["flow"].abs().mean() > 0.1
    close(found["flow"], wanted["flow"])
    close(found["direction"], wanted["direction"])
    assert {"generator loss", "critic loss", "dmdtrain_gradient_norm"} <= wanted["losses"].keys()
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    largest = max(float(x.abs().max()) for x in wanted["gradients"].values())
    assert largest > 0 and found["gradients"].keys() == wanted["gradients"].keys()
    for name, gradient in wanted["gradients"].items():
        close(found["gradients"][name] / largest, gradient / largest, msg=name)


RUN_TP2, RUN_CP2 = "--tensor-model-parallel-size 2", "--context-parallel-size 2"
RUN_TP4, RUN_TP2_CP2 = "--tensor-model-parallel-size 4", f"{RUN_TP2} {RUN_CP2}"
SEQUENCE = "--sequence-parallel"


@pytest.mark.parametrize(
    ("replicas", "words", "ranks"),
    [
        pytest.param(2, f"{TENSOR} 2", 2, id="dp2-teacher-tp2"),
        pytest.param(2, f"{STAGES} 2", 2, id="dp2-teacher-pp2"),
        pytest.param(1, f"{RUN_TP2} {TENSOR} 1", 2, id="tp2-teacher-tp1"),
        *(
            pytest.param(replicas, words, ranks, id=name, marks=pytest.mark.slow)
            for name, replicas, words, ranks in (
                ("tp2-teacher-pp2", 1, f"{RUN_TP2} {TENSOR} 1 {STAGES} 2", 2),
                ("cp2-teacher-tp2", 1, f"{RUN_CP2} {TENSOR} 2", 2),
                ("cp2-teacher-tp1", 1, f"{RUN_CP2} {TENSOR} 1", 2),
                ("cp2-teacher-pp2", 1, f"{RUN_CP2} {STAGES} 2", 2),
                ("tp2dp2-teacher-tp4", 2, f"{RUN_TP2} {TENSOR} 4", 4),
                ("tp2dp2-teacher-tp2pp2", 2, f"{RUN_TP2} {STAGES} 2", 4),
                ("tp2dp2-teacher-pp2", 2, f"{RUN_TP2} {TENSOR} 1 {STAGES} 2", 4),
                ("sp2dp2-teacher-tp2pp2", 2, f"{RUN_TP2} {SEQUENCE} {STAGES} 2", 4),
                ("sp2dp2-teacher-tp4", 2, f"{RUN_TP2} {SEQUENCE} {TENSOR} 4", 4),
                ("cp2dp2-teacher-tp4", 2, f"{RUN_CP2} {TENSOR} 4", 4),
                ("tp2cp2-teacher-tp2", 1, f"{RUN_TP2_CP2} {TENSOR} 2", 4),
                ("tp4-teacher-tp1", 1, f"{RUN_TP4} {TENSOR} 1", 4),
            )
        ),
    ],
)
def test_a_teacher_with_a_layout_of_its_own_changes_no_number(
    tmp_path: Path, alone: dict[str, Any], replicas: int, words: str, ranks: int
) -> None:
    check_same(step_of(tmp_path / "run", words, ranks, replicas), alone)


def _frozen(run: Run) -> list[int]:
    """Compare the teacher before and after each step, and look for it in the optimizers."""
    runner = runner_of(run)
    assert isinstance(runner.teacher, ParallelTeacher)
    own = list(runner.teacher.parameters())
    before = [parameter.detach().clone() for parameter in own]
    memory = {parameter.untyped_storage().data_ptr() for parameter in own}
    optimized = {
        parameter.untyped_storage().data_ptr()
        for network in (runner.generator, runner.critic)
        for part in parts_of(network.optimizer)
        for parameter in part.get_parameters()
    }
    assert own and optimized and not memory & optimized
    steps: list[int] = []

    def check(_: Any) -> None:
        assert all(map(torch.equal, own, before))
        for parameter in own:
            assert not parameter.requires_grad and parameter.grad is None
            assert not hasattr(parameter, "main_grad")
        steps.append(runner.extra_state.steps)

    after_each_step(run, check)
    return steps


def test_a_teacher_with_a_layout_of_its_own_is_frozen(tmp_path: Path) -> None:
    _, seen = observed(tmp_path, f"--train-iters 2 {STAGES} 2", _frozen, ranks=2, batch=2)
    assert seen == [[1, 2]] * 2
    stored = FileSystemReader(tmp_path / "save" / "iter_0000002").read_metadata()
    names = stored.state_dict_metadata
    assert any("critic" in name for name in names) and not any("teacher" in name for name in names)


def teacher_of(context: ParallelContext, words: str = "") -> Any:
    return build_teacher(configuration(context, words), context, torch.device("cpu"))


def configuration(context: ParallelContext, words: str) -> RunConfig:
    """Return the configuration of a tiny run whose layout is that of the context."""
    layout = context.layout
    sizes = (
        f"--tensor-model-parallel-size {layout.tensor_model_parallel_size} "
        f"--context-parallel-size {layout.context_parallel_size} --prompts-path x "
        f"--train-iters 1 {words}"
    )
    flags = flags_of(Path(), sizes, batch=layout.data_parallel_size)
    parsed = parse_args(flags, VIDEO, world_size=layout.world_size, device="cpu").config
    return parsed.with_section(replace(parsed.section(StreamingConfig), text_features=32))


def inputs(rows: int, first: int = 0) -> dict[str, Tensor]:
    tensors = []
    for number in range(first, first + rows):
        source = torch.Generator().manual_seed(number)
        x, text = (torch.randn(size, generator=source) for size in ((9, 4, 4, 4), (5, 32)))
        tensors.append((x, 1000 * torch.rand((), generator=source), text))
    x, timesteps, text = map(torch.stack, zip(*tensors, strict=True))
    return {"x": x, "timesteps": timesteps, "text": text}


def random_states() -> list[Any]:
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    states = [torch.get_rng_state(), torch.cuda.get_rng_state(), *tracked.values()]
    return [random.getstate(), repr(np.random.get_state()), *(x.tolist() for x in states)]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"dp": 2}, f"{STAGES} 2"),
        ({"tp": 2}, f"{TENSOR} 1"),
        pytest.param({"tp": 4}, f"{TENSOR} 1", marks=pytest.mark.slow),
        pytest.param({"tp": 2, "dp": 2}, f"{TENSOR} 4", marks=pytest.mark.slow),
        pytest.param({"tp": 2, "cp": 2}, f"{TENSOR} 1 {STAGES} 2", marks=pytest.mark.slow),
    ],
)
def test_all_samples_are_shared_out(tmp_path: Path, layout: dict[str, int], words: str) -> None:
    """Give numbers that the groups do not divide, and each replica samples of its own."""
    counts, path = (1, 2, 3), tmp_path / "alone.pt"
    num_rows = max(counts) * layout.get("dp", 1)

    def alone(context: ParallelContext) -> None:
        with torch.no_grad():
            torch.save(teacher_of(context)(**inputs(num_rows)), path)

    def apart(context: ParallelContext) -> None:
        before = random_states()
        teacher = teacher_of(context, words)
        wanted = torch.load(path)
        for count in counts:
            first = context.dp_rank * count
            flow = teacher(**inputs(count, first))
            torch.testing.assert_close(flow, wanted[first : first + count], rtol=0, atol=1e-6)
        # Neither building nor running it shows in what the run decides.
        assert random_states() == before

    on_ranks(alone, {})
    on_ranks(apart, layout)


@pytest.mark.parametrize(("groups", "samples"), [(4, 2), (4, 3), (3, 6), (2, 3)])
def test_groups_of_a_replica_predict_each_sample(
    groups: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let groups beside those that share all samples equally compute a part once more."""
    given = inputs(samples)
    parts: list[Tensor] = []

    def member(rank: int) -> ParallelTeacher:
        teacher = ParallelTeacher.__new__(ParallelTeacher)
        torch.nn.Module.__init__(teacher)
        teacher.network = torch.nn.Identity()
        teacher._num_replicas = 1
        teacher._peers = SimpleNamespace(rank=lambda: rank, size=lambda: groups)  # type: ignore[assignment]
        teacher._predicted = lambda rows, count: 10 * rows[0]  # type: ignore[method-assign]
        return teacher

    monkeypatch.setattr(teacher_module, "unwrap_model", lambda _: [SimpleNamespace(sizes=None)])
    checked = SimpleNamespace(check_inputs=lambda *_: None)
    monkeypatch.setattr(teacher_module, "streamed_network", lambda: checked)
    monkeypatch.setattr(teacher_module, "_gathered", lambda part, _: parts.append(part) or part)
    for rank in range(groups):
        member(rank)(**given)
    assert len({part.size(0) for part in parts}) == 1
    monkeypatch.setattr(teacher_module, "_gathered", lambda part, _: torch.cat(parts))
    for rank in range(groups):
        assert torch.equal(member(rank)(**given), 10 * given["x"])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_group_over_several_replicas_predicts_the_samples_of_all(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = ParallelTeacher.__new__(ParallelTeacher)
    torch.nn.Module.__init__(teacher)
    teacher.network = torch.nn.Identity()
    teacher._num_replicas = 3
    teacher._peers = SimpleNamespace(rank=lambda: number, size=lambda: 3)  # type: ignore[assignment]
    seen: list[tuple[int, int]] = []

    def predicted(rows: tuple[Tensor, ...], num_microbatches: int) -> Tensor:
        seen.append((len(rows[0]), num_microbatches))
        return 10 * rows[0]

    teacher._predicted = predicted  # type: ignore[method-assign]
    monkeypatch.setattr(teacher_module, "unwrap_model", lambda _: [SimpleNamespace(sizes=None)])
    checked = SimpleNamespace(check_inputs=lambda *_: None)
    monkeypatch.setattr(teacher_module, "streamed_network", lambda: checked)
    shares = [part + 1000 * (i - number) for i in range(3) for part in [inputs(2)["x"]]]
    monkeypatch.setattr(
        teacher_module, "_gathered",
        lambda part, _: torch.cat(shares) if part.dim() == 5 else torch.cat([part] * 3),
    )  # fmt: skip
    found = teacher(**inputs(2))
    assert torch.equal(found, 10 * inputs(2)["x"]) and seen == [(6, 3)]


@ranks(tp=2)
def test_a_teacher_loads_under_another_layout(context: ParallelContext, tmp_path: Path) -> None:
    config = configuration(context, f"--save {tmp_path}")
    saved = build_teacher(config, context, torch.device("cpu"))
    with torch.no_grad():
        for parameter in saved.parameters():
            # Not what weights without a checkpoint would be.
            parameter.mul_(1.5)
        wanted = saved(**inputs(2))
    CheckpointManager(config.checkpoint, context).save(
        1, model=[saved], optimizer=None, scheduler=None, progress={}, run_config=config.to_dict()
    )
    loaded = teacher_of(context, f"--teacher-checkpoint {tmp_path} {TENSOR} 1 {STAGES} 2")
    assert isinstance(loaded, ParallelTeacher)
    # The stages hold every weight, and none of them twice.
    held = torch.tensor(sum(parameter.numel() for parameter in loaded.parameters()))
    torch.distributed.all_reduce(held)
    assert int(held) == num_parameters(config.section(StreamingConfig).sizes())
    torch.testing.assert_close(loaded(**inputs(2)), wanted, rtol=0, atol=1e-5)


@ranks(dp=2, timeout=20)
def test_inputs_that_do_not_fit_are_refused_before_a_stage_waits(context: ParallelContext) -> None:
    teacher, given = teacher_of(context, f"{STAGES} 2"), inputs(2)
    with pytest.raises(DataError, match="`text` has the shape"):
        teacher(**{**given, "text": given["text"][..., :7]})
    assert teacher(**given).shape == given["x"].shape


@ranks(dp=2)
def test_bfloat16_goes_through_stages(context: ParallelContext) -> None:
    teachers = teacher_of(context, f"--bf16 {STAGES} 2"), teacher_of(context, "--bf16")
    flow, wanted = (teacher(**inputs(2, context.dp_rank)) for teacher in teachers)
    assert flow.dtype == wanted.dtype == torch.float32 and wanted.abs().mean() > 0.1
    torch.testing.assert_close(flow, wanted, rtol=0, atol=0.05)
