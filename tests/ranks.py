"""``@ranks(tp=2, pp=2)``: a test body that runs on forked ranks, each with fresh groups.

The parent has imported torch and megatron-core once; the ranks are forked, meet through a file
store, and every failing rank's traceback is shown. With ``--device cuda`` the same body runs on
spawned NCCL ranks.
"""

import functools
import gc
import inspect
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from megatron_ext.device import Device, select
from megatron_ext.extras.audit.reproduced import layout_of
from megatron_ext.parallel.context import ParallelContext, init_groups, seed_everything
from megatron_ext.parallel.grid import Layout

Body = Callable[..., None]
SEED = 1234


def on_ranks(body: Body, sizes: Mapping[str, int], **arguments: Any) -> None:
    """Run ``body(context, **arguments)`` on ranks of the sizes that `layout_of` takes."""
    run_on_ranks(body, layout_of(**sizes), arguments)


def ranks(*, timeout: float = 60, **sizes: int) -> Callable[[Body], Body]:
    """Run the decorated test on ranks of the sizes that `layout_of` takes.

    The body takes ``context`` (a `ParallelContext`) first, then pytest's fixtures by name. After
    ``timeout`` seconds, or more on a busy machine, the ranks are killed and the test fails.
    """
    layout = layout_of(**sizes)

    def decorate(body: Body) -> Body:
        parameters = list(inspect.signature(body).parameters.values())[1:]

        @functools.wraps(body)
        def test(**fixtures: Any) -> None:
            run_on_ranks(body, layout, fixtures, timeout)

        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        del test.__wrapped__  # type: ignore[attr-defined]
        # The name of the body stands for the test, by which spawned ranks find the body.
        test.__wrapped_body__ = body  # type: ignore[attr-defined]
        body.by_name = test  # type: ignore[attr-defined]
        return test

    return decorate


def run_on_ranks(
    body: Body,
    layout: Layout,
    arguments: dict[str, Any],
    timeout: float = 60,
    *,
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
) -> None:
    """Run ``body(context, **arguments)`` on the ranks of a layout; fail if any rank fails."""
    if get_embedding_ranks is not None:
        body = functools.partial(body)
        body.embedding_ranks = get_embedding_ranks  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="ranks_") as name:
        folder = Path(name)
        device = select()
        if device.kind == "cuda":
            count = torch.cuda.device_count()
            if count < layout.world_size:
                pytest.skip(f"needs {layout.world_size} GPUs, this machine has {count}")
            failed = _spawn(body, layout, arguments, folder, timeout)
        else:
            failed = _fork(body, layout, arguments, folder, timeout)
        if failed:
            shown = [path.read_text() for path in sorted(folder.glob("traceback_*"))]
            pytest.fail("\n".join([*failed, *shown]), pytrace=False)


def _rank(
    rank: int, body: Body, layout: Layout, arguments: dict[str, Any], folder: Path, device: Device
) -> int:
    try:
        device.activate(rank)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(layout.world_size))
        context = init_groups(
            layout,
            device,
            init_method=f"file://{folder}/store",
            get_embedding_ranks=getattr(body, "embedding_ranks", None),
        )
        seed_everything(context, SEED)
        body(context, **arguments)
        torch.distributed.barrier()
        # A forked rank ends here, which closes gloo's connections faster than gloo does.
        if device.kind == "cuda":
            context.destroy()
        return 0
    except BaseException:
        text = f"--- rank {rank} ---\n{traceback.format_exc()}"
        (folder / f"traceback_{rank:03d}").write_text(text)
        return 1
    finally:
        # megatron-core's `dist_checkpointing.save` keeps a process, which would outlive the rank. A
        # forked rank knows the processes of the tests before it as well, which it must leave alone.
        for process in multiprocessing.active_children():
            if process._parent_pid == os.getpid():  # type: ignore[attr-defined]
                process.terminate()


def _fork(
    body: Body, layout: Layout, arguments: dict[str, Any], folder: Path, timeout: float
) -> list[str]:
    children = {}
    # megatron-core caches angles under their module, which holds groups. A rank that drops a group
    # of this process waits forever for the group's threads, which are not forked with it.
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
    gc.collect()  # what is frozen is never collected
    gc.freeze()  # as the launcher does
    for rank in range(layout.world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                code = _rank(rank, body, layout, arguments, folder, select())
            finally:
                os._exit(code)
        children[pid] = rank
    return _wait(children, timeout)


def slowdown() -> float:
    """Return how many times as long something may take because the machine does other work."""
    return min(5.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def _wait(children: dict[int, int], timeout: float) -> list[str]:
    """Return sentences about the ranks that failed, none if all went well."""
    failed: list[str] = []
    start = time.monotonic()
    end = start + timeout
    while children:
        ended = [os.waitpid(pid, os.WNOHANG) for pid in children]
        for pid, status in ended:
            if pid:
                rank = children.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                if code and not (failed and code == -signal.SIGKILL):
                    failed.append(f"rank {rank} exited with {code}")
                    end = min(end, time.monotonic() + 2)
        if not children or any(pid for pid, _ in ended):
            continue
        now = time.monotonic()
        if now > end and (failed or now > start + timeout * slowdown()):
            if not failed:
                failed.append(f"ranks {sorted(children.values())} ran past {timeout} s")
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        else:
            time.sleep(0.01)
    return failed


def _spawn(
    body: Body, layout: Layout, arguments: dict[str, Any], folder: Path, timeout: float
) -> list[str]:
    context = torch.multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=_spawned, args=(rank, getattr(body, "by_name", body), layout, arguments, folder)
        )
        for rank in range(layout.world_size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
        if process.is_alive():
            process.kill()
    codes = [process.exitcode for process in processes]
    return [f"rank {rank} exited with {code}" for rank, code in enumerate(codes) if code != 0]


def _spawned(
    rank: int, body: Body, layout: Layout, arguments: dict[str, Any], folder: Path
) -> None:
    body = getattr(body, "__wrapped_body__", body)
    os._exit(_rank(rank, body, layout, arguments, folder, select()))


__all__ = ["ParallelContext", "layout_of", "on_ranks", "ranks", "run_on_ranks"]
