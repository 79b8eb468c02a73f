"""Optimizer state on the host, against updates on the device: the bits must be the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.optim.host_share import host_share
from megatron_ext.optim.update import parts_of
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.planning.memory import memory
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.train.loop import IntervalMetrics
from megatron_ext.train.run import Run
from tests.ranks import on_ranks
from tests.runs_from_inside import build, one_step, spoil_steps
from tests.training_runs import TINY, check_refused, curve, mock_data

SMALL = [
    *TINY,
    *mock_data(),
    *"--vocab-size 200 --num-layers 2 --hidden-size 32 --ffn-hidden-size 64".split(),
    *"--seq-length 16 --train-iters 4 --micro-batch-size 1 --global-batch-size 4".split(),
]
OFFLOAD = "--optimizer-cpu-offload --optimizer-offload-fraction"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


def test_the_host_takes_at_least_its_share_and_little_more() -> None:
    sizes = [5, 1, 7, 3, 3]
    for fraction, total in ((0.0, 0), (0.1, 3), (0.5, 10), (0.6, 13), (0.9, 18), (1.0, 19)):
        for order in (sizes, sizes[::-1], sorted(sizes)):
            assert sum(order[index] for index in host_share(order, fraction)) == total, fraction
    assert host_share([], 1.0) == set()


class Apart(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails if an operation other than a copy takes tensors of the host and of the device.

    On a CPU both are in the same memory, so that torch itself does not.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kinds: dict[int, tuple[str, Any]] = {}
        self.run = run

    def mark(self, kind: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.dim() and storage.nbytes():
                self._kinds[storage._cdata] = kind, storage

    def mark_run(self) -> None:
        for chunk in self.run.chunks:
            self.mark("device", *chunk.parameters())
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                self.mark("device", buffer.grad_data)
        for part in parts_of(self.run.optimizer):
            inner = part.optimizer
            for main, state in inner.state.items():
                here = main in inner.on_host
                self.mark("host" if here else "device", *filter(torch.is_tensor, state.values()))
            for each in inner.offload._hosted:
                if each.has_copy:
                    self.mark("host", each.main)
            for buffers in (inner.offload._gradients, *inner.offload._weights.values()):
                self.mark("host", *buffers._buffers)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if "copy" in func.__name__:
            return result
        if func.__name__.startswith("_foreach"):  # Each index of the lists is an operation.
            lists = [x for x in args if isinstance(x, list)]
            results = [None] * len(lists[0]) if result is None else result
            for *given, own in zip(*lists, results, strict=True):
                self._check(func, given, own)
        else:
            self._check(func, (args, kwargs), result)
        return result

    def _check(self, func: Any, given: Any, result: Any) -> None:
        tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        kinds = {self._kinds.get(x.untyped_storage()._cdata, ("", 0))[0] for x in tensors} - {""}
        assert len(kinds) < 2, func
        for kind in kinds:
            self.mark(kind, *(x for x in tree_leaves(result) if isinstance(x, Tensor)))


def _weights(run: Run) -> list[Tensor]:
    return [p.detach().clone() for chunk in run.chunks for p in chunk.parameters()]


def _state(run: Run) -> list[Tensor]:
    states = [s for part in parts_of(run.optimizer) for s in part.optimizer.state.values()]
    return [value.clone() for state in states for value in state.values()]


def _take_steps(run: Run, count: int) -> list[list[Tensor]]:
    """Return weights and averages after each step, and the optimizer's state after the last."""
    metrics = IntervalMetrics(run)
    found = []
    for _ in range(count):
        one_step(run, metrics)
        averages = [part.average.clone() for part in run.ema.parts] if run.ema else []
        found.append([*_weights(run), *averages])
    return [*found, _state(run)]


def _same_on(context: ParallelContext, *, flags: str, fraction: float, more: str) -> None:
    """Compare three steps with and without offload, of which the second is skipped."""
    plain = build([*SMALL, *flags.split()], context)
    spoil_steps(plain, [2])
    truth = _take_steps(plain, 3)
    run = build([*SMALL, *flags.split(), *f"{OFFLOAD} {fraction} {more}".split()], context)
    spoil_steps(run, [2])
    found = _take_steps(run, 1)
    apart = Apart(run)
    apart.mark_run()
    with apart:
        found = [*found[:1], *_take_steps(run, 2)]
    for own, others in zip(found, truth, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(own, others, strict=True))
    for part in parts_of(run.optimizer):
        inner = part.optimizer
        all_elements = sum(x.numel() for group in inner.param_groups for x in group["params"])
        elements = sum(main.numel() for main in inner.on_host)
        assert fraction * all_elements <= elements
        copied = any(each.has_copy for each in inner.offload._hosted)
        down, up = (4, 2) if copied else (8, 4)
        traffic = inner.offload.traffic
        # NaN do not get through to gradients that are sharded.
        moved = elements * (3 if "optim_grads" in flags else 2)
        assert traffic.to_device == moved * up
        # The first gradient of a step is on its way when the step is skipped.
        first = max((main.numel() for main in inner.on_host), default=0)
        assert 0 <= traffic.to_host - moved * down <= first * down
    if context.dp_rank == 0:
        _check_plan(run)


def _check_plan(run: Run) -> None:
    """Compare the bytes on the host with the plan of the first replica."""
    network = GptNetwork.of(run.config)
    state = memory(network)[run.context.pp_rank].state
    found = 0
    averages = {id(part.main): part.average.nbytes for part in run.ema.parts} if run.ema else {}
    for inner in (part.optimizer for part in parts_of(run.optimizer)):
        for each in inner.offload._hosted:
            found += sum(x.nbytes for x in inner.state[each.main].values())
            if each.has_copy:
                found += each.main.nbytes + averages.get(id(each.main), 0)
        for buffers in (inner.offload._gradients, *inner.offload._weights.values()):
            found += sum(x.nbytes for x in buffers._buffers)
    assert found == state.host


OVERLAP = "--overlap-cpu-optimizer-d2h-h2d"


@pytest.mark.parametrize(
    ("sizes", "flags", "fraction", "more"),
    [
        pytest.param({}, "--bf16 --ema-decay 0.9", 0.5, "", id="bf16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow, id=name)
            for name, case in {
                "gradients sharded": (
                    {"dp": 2},
                    "--bf16 --data-parallel-sharding-strategy optim_grads --ddp-bucket-size 2000 "
                    "--use-precision-aware-optimizer --exp-avg-dtype bf16",
                    0.7,
                    OVERLAP,
                ),
                "fp32": ({"dp": 2}, "", 1.0, ""),
                "whole state": ({"dp": 2}, "--bf16 --no-use-distributed-optimizer", 0.3, ""),
                "whole fp32": ({}, "--no-use-distributed-optimizer", 0.5, OVERLAP),
                "sgd": ({}, "--bf16 --optimizer sgd --no-use-distributed-optimizer", 1.0, OVERLAP),
                "fp16": ({"dp": 2}, "--fp16 --initial-loss-scale 1024", 0.5, OVERLAP),
                "experts": ({"dp": 2, "ep": 2}, f"--bf16 {EXPERTS}", 0.5, OVERLAP),
                "TP2 PP2": ({"tp": 2, "pp": 2}, f"--bf16 {TP2_PP2} --mtp-num-layers 1", 0.9, ""),
            }.items()
        ),
    ],
)
def test_an_update_on_the_host_gives_the_same_bits(
    sizes: dict[str, int], flags: str, fraction: float, more: str
) -> None:
    on_ranks(_same_on, sizes, flags=flags, fraction=fraction, more=more)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--bf16", ""])
def test_state_of_sharded_weights_may_lie_on_the_host(flags: str, tmp_path: Path) -> None:
    sharded = "--data-parallel-sharding-strategy optim_grads_params"
    words = [*SMALL, *flags.split(), *sharded.split()]
    both = f"{OFFLOAD} 0.6 {OVERLAP} --cpu-offloading-num-layers 1 --min-offloaded-tensor-size 1"
    truth = curve(words, tmp_path / "whole", 2)
    assert curve([*words, *both.split()], tmp_path / "moved", 2) == truth


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--bf16", "--fp16 --initial-loss-scale 64", ""])
def test_a_checkpoint_goes_on_with_and_without_offload(flags: str, tmp_path: Path) -> None:
    words = [*SMALL, *flags.split(), "--save-interval", "2"]
    offload = f"{OFFLOAD} 0.5 --overlap-cpu-optimizer-d2h-h2d".split()
    truth = curve(words, tmp_path / "whole", 2)
    for number, (first, second) in enumerate([([], offload), (offload, []), (offload, offload)]):
        save = tmp_path / str(number)
        curve([*words, *first, "--exit-interval", "2"], save, 2)
        assert curve([*words, *second, "--load", str(save)], save, 2) == truth


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--optimizer muon", "`--optimizer-cpu-offload` does not go with `--optimizer muon`"),
        (
            "--optimizer-class torch.optim:RMSprop --no-use-distributed-optimizer",
            "`--optimizer-cpu-offload` does not go with `--optimizer-class`",
        ),
        ("--optimizer-offload-fraction 1.5", "`--optimizer-offload-fraction` (1.5) must be"),
    ],
)
def test_what_the_host_does_not_update_is_told(flags: str, sentence: str) -> None:
    check_refused([*SMALL, "--optimizer-cpu-offload", *flags.split()], sentence)
