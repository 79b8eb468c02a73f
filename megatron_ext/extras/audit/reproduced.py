"""Defines the result of a reproduction of a defect, and runs reproductions on forked CPU ranks.

A reproduction runs the unmodified megatron-core and compares one of its figures with plain
arithmetic. Each file ``reproduce_*.py`` beside this one has a dictionary ``REPRODUCTIONS``, which
maps the number of a defect in docs/numerics.md, such as ``"D2"``, to its reproduction.
"""

from __future__ import annotations

import io
import logging
import math
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_ext.device import Device
from megatron_ext.disk.writing import write_bytes
from megatron_ext.errors import MegatronExtError
from megatron_ext.parallel.context import INIT_METHOD, ParallelContext, init_groups, seed_everything
from megatron_ext.parallel.grid import Layout
from megatron_ext.train.forking import fork_ranks

SEED = 1234
TIMEOUT_MINUTES = 2.0
"""Minutes that a rank waits for another one before it fails."""


@dataclass(frozen=True)
class Reproduced:
    """One figure of megatron-core, and the right figure.

    Attributes:
        stock: the figure of the installed megatron-core; NaN if it raised an error.
        right: the figure of plain arithmetic.
        what: a sentence that says what was measured, or which error was raised.
    """

    stock: float
    right: float
    what: str

    @property
    def ratio(self) -> float:
        """Return ``stock / right``: 1 if both are equal, else infinite if only ``right`` is 0.

        It is NaN if ``stock`` is.
        """
        if self.stock == self.right:
            return 1.0
        if self.right == 0:
            return math.nan if math.isnan(self.stock) else math.copysign(math.inf, self.stock)
        return self.stock / self.right


Reproduction = Callable[[], Reproduced]
Reproductions = Mapping[str, Reproduction]
T = TypeVar("T")


def layout_of(
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    dp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vpp: int | None = None,
) -> Layout:
    """Return a layout of ``tp * pp * cp * dp`` ranks.

    ``etp`` is the expert-tensor-parallel size (None: ``tp``), and ``vpp`` the number of virtual
    chunks on each pipeline rank (None: no interleaving).
    """
    return Layout(
        world_size=tp * pp * cp * dp,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        virtual_pipeline_model_parallel_size=vpp,
    )


def on_ranks(
    measure: Callable[[ParallelContext], T],
    *,
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    **sizes: int,
) -> list[T]:
    """Run ``measure(context)`` on forked CPU ranks; return the results of all ranks in order.

    The ranks have process groups for the parallel ``sizes`` (see `layout_of`), a stand-in for
    ``torch.cuda``, and the same seed. None of this affects the calling process. Results are
    pickled. The ranks' standard output and logged warnings are dropped.

    Args:
        get_embedding_ranks: an argument of megatron-core's ``initialize_model_parallel``; None for
            its default.

    Raises:
        MegatronExtError: a rank failed; its traceback is then on standard error.
    """
    layout = layout_of(**sizes)
    with tempfile.TemporaryDirectory(prefix="reproduce_") as name:
        rank = partial(_rank, measure, layout, Path(name), get_embedding_ranks)
        code = fork_ranks(rank, layout.world_size, timeout_minutes=TIMEOUT_MINUTES)
        if code != 0:
            raise MegatronExtError(
                f"A reproduction on {layout.world_size} ranks ended with exit code {code}; its "
                "error stands above."
            )
        paths = [_result(Path(name), rank) for rank in range(layout.world_size)]
        return [pickle.loads(path.read_bytes()) for path in paths]


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:03d}.pickle"


def _rank(
    measure: Callable[[ParallelContext], Any],
    layout: Layout,
    folder: Path,
    get_embedding_ranks: Callable[[list[int]], list[int]] | None,
) -> None:
    """Measure on one rank, and write the result to the rank's own file."""
    # GPUs are not used, so that the figures are the same on every machine.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = Device("cpu", "gloo")
    device.activate(0)
    logging.disable(logging.WARNING)
    with redirect_stdout(io.StringIO()):
        context = init_groups(
            layout,
            device,
            timeout_minutes=TIMEOUT_MINUTES,
            get_embedding_ranks=get_embedding_ranks,
            init_method=os.environ[INIT_METHOD],
        )
        seed_everything(context, SEED)
        result = measure(context)
    write_bytes(_result(folder, context.rank), pickle.dumps(result))
