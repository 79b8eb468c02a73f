"""Finds the places where a run would wait for its GPU, also on a machine without one.

On a CPU the operations that hand a tensor's value to Python are recorded, with the line of this
package or of megatron-core that asked. The same operations would wait on a GPU.
"""

import contextlib
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.optim.builder import choose_kernels

WAITING = {
    "aten::_local_scalar_dense",  # item, float, int, bool
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::_unique2",
    "aten::repeat_interleave.Tensor",
}
READ = "megatron_ext/device/streams.py:read"
"""The place where the host reads what the step before did, which is over by then."""
METHODS = ("tolist", "numpy", "cpu")
ON_A_CPU_ALONE = ("check_labels",)
"""Functions that look at no tensor of a GPU."""
ON_THE_HOST = ("torch/optim/", "torch/utils/data/", "torch/_refs", "torch/testing")
"""Files whose values are on the host on a GPU too, such as an optimizer's count of steps."""


def waits(func: Any, args: Any) -> bool:
    """Return whether the host would wait for the value of an operation's result."""
    name = func.name() if hasattr(func, "name") else ""
    by_mask = name == "aten::index.Tensor" and any(
        index is not None and index.dtype == torch.bool for index in args[1]
    )
    return by_mask or name in WAITING or name.removesuffix(".self_int") in WAITING


class HostSyncs(TorchDispatchMode):
    """Records in `places` where values were asked for, as ``file:function``."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(func, args):
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        frames = traceback.extract_stack()
        if any(frame.name in ON_A_CPU_ALONE for frame in frames):
            return
        for frame in reversed(frames):
            if any(part in frame.filename for part in ON_THE_HOST):
                return
            for root in ("megatron_ext/", "megatron/core/"):
                _, found, rest = frame.filename.rpartition(f"/{root}")
                # The folder of a clone may have the package's name.
                if found and not rest.startswith(("tests/", ".venv")):
                    path = root + rest
                    self.places.append(f"{path}:{frame.name}")
                    return


@contextlib.contextmanager
def host_syncs() -> Iterator[list[str]]:
    """Yield the places that ask within the block, one entry for each time."""
    with contextlib.ExitStack() as stack:
        recorder = stack.enter_context(HostSyncs())
        for name in METHODS:
            original = getattr(torch.Tensor, name)

            def asked(
                self: torch.Tensor, *args: Any, _original: Any = original, **kwargs: Any
            ) -> Any:
                recorder.note()
                return _original(self, *args, **kwargs)

            stack.enter_context(mock.patch.object(torch.Tensor, name, asked))
        make = torch.tensor

        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") is not None:  # copied there, for which the host waits
                recorder.note()
            return make(*args, **kwargs)

        stack.enter_context(mock.patch.object(torch, "tensor", made))
        yield recorder.places


def record_steps(run: Any, path: Path) -> None:
    """Let a run note where its latest step asks, whose updates the device decides on."""
    choose_kernels(run.optimizer, fused=True)
    train = run.runner.train

    def recorded(*arguments: Any) -> Any:
        with host_syncs() as places:
            result = train(*arguments)
        assert not run.runner.settled
        path.write_text(json.dumps(places))
        return result

    run.runner.train = recorded
