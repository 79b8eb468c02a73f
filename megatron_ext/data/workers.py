"""Worker processes of data loaders, which ignore signals: the rank that started them reacts."""

from __future__ import annotations

import signal
import threading
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess

from megatron_ext.errors import held_signals


class _Popen(Popen):
    """A forked process that receives no signal before it is ready to ignore signals."""

    def _launch(self, process_obj: BaseProcess) -> None:
        # In the worker, `loader_ends_with_parent` unblocks the signals.
        with held_signals():
            super()._launch(process_obj)  # type: ignore[misc]

    def terminate(self) -> None:
        """Kill the process, since it ignores SIGTERM.

        torch's handler of SIGCHLD would report a killed worker as a fault, so the handler is
        removed until this process is gone.
        """
        if threading.current_thread() is not threading.main_thread():
            self.kill()
            return
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            self.kill()
            self.wait()
        finally:
            # None means a handler of the C library, which Python cannot restore.
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


class _Process(ForkProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:  # noqa: N802 - the name of the base class
        return _Popen(process_obj)


class WorkerContext(ForkContext):
    """A ``multiprocessing_context`` for DataLoaders whose workers ignore signals.

    Such a DataLoader must also get ``worker_init_fn=loader_ends_with_parent()``.
    """

    Process = _Process


def worker_context(num_workers: int) -> WorkerContext | None:
    """Return a `WorkerContext` for a DataLoader; None if ``num_workers`` is 0."""
    return WorkerContext() if num_workers else None
