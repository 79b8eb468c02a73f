"""One import of torch and megatron-core for the whole session; ranks are forked from it."""

import ctypes
import gc
import os
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import megatron.core.dist_checkpointing
import megatron.core.models.gpt
import megatron.core.optimizer
import megatron.core.pipeline_parallel  # noqa: F401 - all four, for their side effects
import pytest
import torch
import torch._dynamo

from megatron_ext.device import cuda_shim

torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores Ctrl-C in what it starts in the background, and so would the runs of tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """Undo what a test sets: megatron-core's models choose `NVTE_*` for their whole process.

    A run of one rank leaves the stand-in for `torch.cuda` installed, which others cannot compile
    with. TorchDynamo makes its table of torch's functions anew after each start of process groups,
    and does not find those that a test had replaced meanwhile.
    """
    with mock.patch.dict(os.environ):
        yield
    cuda_shim.uninstall()
    torch._dynamo.trace_rules.clear_lru_cache()


@pytest.fixture(scope="module", autouse=True)
def _huge_pages() -> None:
    """Put the heap into huge pages, of which a fork copies some hundred entries.

    It would copy a hundred thousand entries of small pages, which takes longer than what many tests
    do on their ranks. `tests/run.sh` asks for huge pages, but a heap that grows while memory is
    scattered gets few, and what is written while ranks run is split again. Linux before 6.1 refuses
    and keeps the small pages.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if line.endswith("[heap]"):
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            first = -(-start // HUGE_PAGE) * HUGE_PAGE
            size = max(0, end - first) // HUGE_PAGE * HUGE_PAGE
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_COLLAPSE)


HUGE_PAGE = 2**21
MADV_COLLAPSE = 25
"""Linux's number, which Python's `mmap` does not name yet."""
SLOW_CASES = Path(__file__).with_name("slow_cases.txt")
"""Cases of parametrized tests that are slow, most of them beside quicker ones of the same test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-share", metavar="I/N", help="run the Ith of N shares of the slow tests, from 1"
    )


def _slow_elsewhere(item: pytest.Item, share: str) -> bool:
    """Return whether a slow test belongs to another share than ``share``, such as "3/10"."""
    index, count = map(int, share.split("/"))
    return "slow" in item.keywords and zlib.crc32(item.nodeid.encode()) % count != index - 1


def pytest_collection_finish() -> None:
    """Freeze what was imported and collected, so that no collection looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow cases, drop those of other shares, and skip tests marked ``gpu`` without a GPU.

    Raises:
        pytest.UsageError: a file of tests has no case of a listed name any more.
    """
    slow = set(SLOW_CASES.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    if not any("::" in argument for argument in config.args):
        files = {item.nodeid.partition("::")[0] for item in items}
        gone = slow - {item.nodeid for item in items}
        gone = {name for name in gone if name.partition("::")[0] in files}
        if gone:
            raise pytest.UsageError(f"{SLOW_CASES} names tests that are gone: {sorted(gone)}")
    if share := config.getoption("--slow-share"):
        elsewhere = {item for item in items if _slow_elsewhere(item, share)}
        config.hook.pytest_deselected(items=list(elsewhere))
        items[:] = [item for item in items if item not in elsewhere]
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
