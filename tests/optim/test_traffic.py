"""Counts the bytes that a step moves for each weight beside its matrix products, by operation.

A CPU runs what a GPU would: products that add to the buffer of gradients, a kernel that decides by
itself whether to update. That kernel is counted by the tensors that it is given.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.optim.builder import choose_kernels, take_torchs_adam
from megatron_ext.optim.fused_adam import Entry, FusedAdam, Settings
from megatron_ext.optim.update import parts_of
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepInputs
from tests.ranks import on_ranks
from tests.runs_from_inside import build
from tests.training_runs import SMALL

FLAGS = (
    "--bf16 --no-use-distributed-optimizer --num-layers 6 --hidden-size 64 --global-batch-size 1 "
    "--train-iters 4 --position-embedding-type rope --untie-embeddings-and-output-weights"
).split()
KINDS = {
    "addcmul_": "gradients", "mul": "gradients",
    "zero_": "zeroing", "_foreach_zero_": "zeroing", "add_": "gradients", "copy_": "copies",
    "mul_": "scaling", "linalg_vector_norm": "norm", "_fused_adamw_": "Adam", "kernel": "Adam",
}  # fmt: skip
"""Names the purpose of each operation on the state of a run; first gradients are copied to it."""


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Traffic(TorchDispatchMode):
    """Counts the bytes of tensors in some storages that operations read and write, by kind.

    What communication moves is not counted.
    """

    counting: "_Traffic | None" = None

    def __init__(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self.storages = {_address(tensor) for tensor in tensors}
        self.gradients = {_address(tensor) for tensor in gradients}
        self.bytes: Counter[str] = Counter()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.paused and func.namespace == "aten":
            self._count(func, args, kwargs)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any) -> None:
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
        given |= kwargs
        for argument in schema.arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            reads = not writes or name not in ("zero_", "_foreach_zero_", "copy_", "mul")
            for tensor in tree_leaves(given.get(argument.name)):
                if not isinstance(tensor, Tensor) or _address(tensor) not in self.storages:
                    continue
                # Others read weights, or add to the rows of the embedding that a batch has.
                if (writes and name != "_index_put_impl_") or name in KINDS:
                    adds = name == "copy_" and _address(tensor) in self.gradients
                    kind = "gradients" if adds else KINDS[name]
                    self.bytes[kind] += _size(tensor) * (reads + writes)

    @contextmanager
    def kernel(self, num_bytes: int) -> Iterator[None]:
        """Count what happens inside as one kernel that moves ``num_bytes``."""
        self.bytes["Adam"] += num_bytes
        self.paused = True
        yield
        self.paused = False


class _CountedKernel:
    """A stand-in for the kernel that only tells its bytes."""

    def __call__(self, entries: Sequence[Entry], _settings: Settings) -> None:
        assert _Traffic.counting is not None
        with _Traffic.counting.kernel(sum(entry.num_bytes for entry in entries)):
            for entry in entries:
                assert entry.copy is not None
                entry.copy.copy_(entry.weight)


def _step(run: Run) -> dict[str, float]:
    """Train a step; return its bytes for each weight, by kind."""
    state: list[Tensor] = []
    gradients = [p.main_grad for c in run.chunks for p in c.params_with_grad]
    for part in parts_of(run.optimizer):
        adam = part.optimizer
        for group in adam.param_groups:
            for p in group["params"]:
                state += [p, adam.state[p]["exp_avg"], adam.state[p]["exp_avg_sq"]]
    state += [p.data for c in run.chunks for p in c.parameters()]
    (batch,) = run.train_source.next_step(1)
    with _Traffic([*state, *gradients], gradients) as traffic:
        _Traffic.counting = traffic
        run.runner.train(StepInputs([batch], 1), 1)
    weights = sum(gradient.numel() for gradient in gradients)
    return {kind: moved / weights for kind, moved in traffic.bytes.items()}


def _measure(context: ParallelContext) -> None:
    before, after = (build([*SMALL, *FLAGS], context) for _ in range(2))
    take_torchs_adam(after.optimizer, (torch.float32, torch.float32), _CountedKernel)
    for run in (before, after):
        run.runner.transformer_config.adds_in_place = True
        choose_kernels(run.optimizer, fused=True)
        run.runner.scales_in_update = True
        number = run.batch_size.num_microbatches
        _Traffic.counting = _Traffic([], [])
        inputs = StepInputs(run.train_source.next_step(number), number)
        run.runner.train(inputs, 1)  # It makes the state.
    # What looks at gradients, as parity does, or at zeros keeps the longer way.
    before.runner.observer, before.runner.check_zeroed = (lambda: None), (lambda chunks: None)
    long, short = _step(before), _step(after)
    assert isinstance(parts_of(after.optimizer)[0].optimizer, FusedAdam)
    # Six layers have 95% of the weights. The head's gradient is one that the loss has made.
    assert long.pop("gradients") == pytest.approx(8, abs=0.5)
    assert short.pop("gradients") == pytest.approx(4, abs=0.7)
    assert long == pytest.approx(
        {"zeroing": 4, "scaling": 8, "norm": 4, "Adam": 32, "copies": 6}, abs=0.05
    )
    assert short == pytest.approx({"zeroing": 0.2, "norm": 4, "Adam": 30}, abs=0.15)
    # A product writes 4 bytes in any case.
    assert sum(long.values()) + 4 > 57 and sum(short.values()) < BUDGET


BUDGET = 35.0
"""Bytes for each weight and step beside those of the matrix products."""


def test_an_update_moves_34_bytes_for_each_weight() -> None:
    on_ranks(_measure, {})
