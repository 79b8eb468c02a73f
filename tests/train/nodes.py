"""Stand-ins for machines: torchrun agents on addresses of this one, with ranks of their own."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from megatron_ext.train.reporting.files import read_metrics
from tests.training_runs import ROOT

NEW_STORE_EACH_ROUND = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment without which torch's c10d rendezvous never tells a node that comes back where the
others are."""
SECONDS = 600.0
"""Time for anything that a run does, on a machine that does much else."""


class Nodes:
    """Starts, kills and awaits the agents of a run, whose output goes to files in ``folder``.

    Args:
        nnodes: torchrun's ``--nnodes``.
        flags: flags of pretrain_gpt.py.
    """

    def __init__(self, folder: Path, nnodes: str, flags: Sequence[str], restarts: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._words = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nnodes),
            *("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", folder.name),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--monitor-interval", "0.1"),
            *("--max-restarts", str(restarts)),
        ]
        # On a busy machine a node that lives is late: it must not be taken for dead, and the other
        # must not begin without it, or both train on their own.
        self._meeting = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=15"
        self._flags, self._folder = list(flags), folder
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node, agent in list(self._agents.items()):
            if agent.poll() is None:
                self.kill(node)

    def start(self, node: int) -> None:
        """Start the agent of a node, on an address of its own, in a new session."""
        # Node 0 holds the store through which they meet.
        meeting = f"{self._meeting},is_host={int(node == 0)}"
        words = [*self._words, "--local-addr", f"127.0.0.{node + 1}", "--rdzv-conf", meeting]
        with (self._folder / f"node_{node}.log").open("ab") as log:
            self._agents[node] = subprocess.Popen(
                [*words, "pretrain_gpt.py", *self._flags],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **NEW_STORE_EACH_ROUND},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ranks(self, node: int) -> list[psutil.Process]:
        """Return the processes of a node's ranks, by local rank."""
        return sorted(_children(self._agents[node].pid), key=lambda process: process.pid)

    def kill(self, node: int) -> None:
        """Kill the agent of a node and all its ranks at once, as a power failure does."""
        agent = self._agents.pop(node)
        for process in [psutil.Process(agent.pid), *_children(agent.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        agent.wait(timeout=SECONDS)

    def wait(self) -> list[int]:
        """Wait for all agents, and return their exit codes by node."""
        codes = [agent.wait(timeout=SECONDS) for _, agent in sorted(self._agents.items())]
        self._agents = {}
        return codes

    def log(self) -> str:
        """Return the output of all nodes."""
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("node_*.log")))


def _children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def until(happened: Callable[[], bool]) -> None:
    """Wait until something has happened; fail after `SECONDS`."""
    end = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < end, "it has not happened in time"
        time.sleep(0.05)


def steps_done(save: Path) -> int:
    """Return the last iteration in the metrics of a run, 0 before the first."""
    return max((row["iteration"] for row in read_metrics(save / "metrics.jsonl")), default=0)
