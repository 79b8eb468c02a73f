"""Measure what a real step on forked ranks holds, as the truth of the planner's tests.

State is found by walking model and optimizer, activations by watching every tensor that a forward
and backward pass makes, from its first to its last reference.
"""

import dataclasses
import json
import weakref
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_ext.config.run import RunConfig
from megatron_ext.device import select
from megatron_ext.layers import attention
from megatron_ext.optim.ema import ShardedEMA
from megatron_ext.planning.memory import memory
from megatron_ext.planning.network import Network
from megatron_ext.planning.state import rank_state
from megatron_ext.text.task import GPT
from megatron_ext.train.forking import fork_ranks
from megatron_ext.train.loop import train
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.run import Run
from megatron_ext.train.task import Task, TaskChoice
from megatron_ext.video.streaming.step import StreamingRunner
from tests.training_runs import prepared

TOLERANCE = 0.10
KINDS = ("count", "parameters", "gradients", "optimizer", "average")


class LiveBytes(TorchDispatchMode):
    """A counter of the bytes of storages that operations within it make, while they live.

    Attributes:
        now: bytes alive.
        peak: the most at any time.
        at_peak: sizes of the storages alive then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at_peak: list[tuple[int, str]] = []
        self._alive: dict[int, tuple[int, str]] = {}
        self._known: set[int] = set()

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)
        }
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in before:
                self._watch(tensor, f"{func} {tuple(tensor.shape)} {tensor.dtype}")
        return out

    def _watch(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self._known:
            return
        self._alive[key] = (storage.nbytes(), name)
        self.now += storage.nbytes()
        weakref.finalize(storage, self._forget, key)
        if self.now > self.peak:
            self.peak = self.now
            self.at_peak = sorted(self._alive.values(), reverse=True)

    def _forget(self, key: int) -> None:
        self.now -= self._alive.pop(key)[0]


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measures of one rank: place, bytes of its state, parameters' names, peak of a step.

    Attributes:
        networks: state and parameters of critic and teacher of streaming, and its cache.
    """

    place: dict[str, int]
    state: dict[str, int]
    weights: list[list[list[object]]]
    peak: int
    at_peak: list[tuple[int, str]]
    networks: dict[str, Any]


def configuration(flags: Sequence[str], program: Task | TaskChoice = GPT) -> RunConfig:
    return prepared(flags, program, device=select().kind)[1]


def measure(flags: Sequence[str], folder: Path, program: Task | TaskChoice = GPT) -> list[Measured]:
    task, config, tokenizer = prepared(flags, program, device=select().kind)
    work = partial(_work, folder)
    main = partial(pretrain, task, config, device=select(), assets=tokenizer, work=work)
    with (folder / "log").open("w") as log, redirect_stdout(log):
        assert fork_ranks(main, config.parallel.nproc_per_node) == 0
    paths = sorted(folder.glob("rank_*.json"))
    assert len(paths) == config.parallel.nproc_per_node
    return [Measured(**json.loads(path.read_text())) for path in paths]


def check_state(network: Network, ranks: Sequence[Measured]) -> None:
    """Check that names and sizes of parameters, and bytes of each kind of state, are as planned."""
    planned = memory(network)
    for rank in ranks:
        mine = planned[rank.place["pp"]]
        assert [[[x.name, x.numel] for x in weights] for weights in mine.weights] == rank.weights
        replicas = {"replica": rank.place["dp_cp"], "expert_replica": rank.place["expt_dp"]}
        state = rank_state(network.config, network.sizes, mine.rank, mine.weights, **replicas)
        assert {kind: getattr(state, kind) for kind in KINDS} == rank.state


def check_peak(network: Network, ranks: Sequence[Measured]) -> None:
    planned = memory(network)
    for rank in ranks:
        mine = planned[rank.place["pp"]]
        held = sum(rank.state[kind] for kind in KINDS[1:])
        moving = mine.fp8_weights + mine.activations + mine.transient
        assert moving == pytest.approx(rank.peak, rel=TOLERANCE)
        assert mine.total == pytest.approx(held + rank.peak, rel=TOLERANCE)


def _work(folder: Path, run: Run) -> None:
    live, runner, lower_right = LiveBytes(), run.runner, attention.causal_lower_right

    def outside_of_modes(*args: Any) -> Any:
        with _disable_current_modes():  # No dispatch mode may see subclasses being made.
            return lower_right(*args)

    attention.causal_lower_right = outside_of_modes
    name = "_pass" if isinstance(runner, StreamingRunner) else "compute_gradients"
    step = getattr(runner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        with live:
            return step(*args, **kwargs)

    setattr(runner, name, watched)
    with (folder / f"log_{run.context.rank}").open("w") as log, redirect_stdout(log):
        train(run)
    pgs = run.context.pgs
    found = Measured(
        place={"pp": run.context.pp_rank, "dp_cp": pgs.dp_cp.rank(), "expt_dp": pgs.expt_dp.rank()},
        state=state_bytes(run.chunks, run.optimizer, run.ema),
        weights=_weights(run.chunks),
        peak=live.peak,
        at_peak=live.at_peak[:400],
        networks=_networks(runner) if isinstance(runner, StreamingRunner) else {},
    )
    path = folder / f"rank_{run.context.rank}.json"
    path.write_text(json.dumps(dataclasses.asdict(found)))


def _weights(chunks: Sequence[Any]) -> list[list[tuple[str, int]]]:
    bare = unwrap_model(list(chunks))
    return [[(plain(name), p.numel()) for name, p in chunk.named_parameters()] for chunk in bare]


def plain(name: str) -> str:
    """Return the name of a parameter in megatron-core 0.16, whose layer of a depth has another."""
    return name.replace(".mtp_model_layer.", ".transformer_layer.")


def _networks(runner: StreamingRunner) -> dict[str, Any]:
    """Return the networks that streaming holds besides the model of the run."""
    critic, teacher = runner.critic, getattr(runner.teacher, "network", runner.teacher)
    cache: Any = runner.sequence.generator.cache
    return {
        "critic": state_bytes(critic.chunks, critic.optimizer, None),
        "critic weights": _weights(critic.chunks)[0],
        "teacher": sum(p.numel() * p.element_size() for p in teacher.parameters()),
        "teacher weights": _weights([teacher])[0],
        "cache": cache.num_bytes,
    }


def state_bytes(chunks: Sequence[Any], optimizer: Any, ema: ShardedEMA | None) -> dict[str, int]:
    """Return bytes by kind; memory that two kinds share counts for the first."""
    known: set[int] = set()

    def take(tensors: Iterable[torch.Tensor]) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                total += storage.nbytes()
        return total

    parameters = [p for chunk in chunks for p in chunk.parameters()]
    buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    laid = [b.param_data for b in buffers if b.param_data is not None]
    return {
        "count": sum(p.numel() for p in parameters),
        "parameters": take([*laid, *parameters]),
        "gradients": take(b.grad_data for b in buffers),
        "optimizer": take(_optimizer_tensors(optimizer)),
        "average": take([] if ema is None else [part.average for part in ema._parts]),
    }


def _optimizer_tensors(optimizer: Any) -> Iterable[torch.Tensor]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        # The optimizer of dense weights is none on a rank that trains experts alone.
        for group in [] if part.optimizer is None else part.optimizer.param_groups:
            for parameter in group["params"]:
                held = part.optimizer.state[parameter].values()
                yield from (x for x in (parameter, *held) if torch.is_tensor(x))


def slow_but(quick: Sequence[Any], names: Iterable[Any]) -> list[Any]:
    """Return the names, those that are not quick marked as slow."""
    return [pytest.param(x, marks=() if x in quick else pytest.mark.slow) for x in names]
