"""Three steps of every feature on a GPU, at a small size, to see at once what does not run.

Each feature trains, or is refused, or fails by itself: its row has the losses, or the whole text of
the error, and the next one is tried. Nothing here is timed for comparison.

The whole script ends within ``--seconds``, its imports included, and a feature within
``--feature-seconds``. The most important features come first; those that are not reached are listed
as not tried. A feature that hangs where Python cannot interrupt it ends the script.

    python benchmarks/gpu_try.py --out out/try.md
    python benchmarks/gpu_try.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

START = time.monotonic()
"""The time before the imports that take seconds."""
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.gpu_setup import (
    LLAMAS,
    Llama,
    Results,
    add_device_flags,
    built_run,
    device_of,
    freed,
    loss_of_step,
    one_rank,
    table_row,
)
from benchmarks.mmdit_block import Case, work_of
from megatron_ext.errors import MegatronExtError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.networks.mmdit.config import SIZES

STEPS = 3
SMALL = Llama(layers=2, hidden=1024, ffn=2816, heads=8, groups=4, vocab=32000)
LENGTH = 1024
FP8 = "--fp8-format hybrid --fp8-recipe"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 512 --moe-router-topk 2"
VIDEO = "a block of a video transformer"
CONTEXT = "context parallelism"
FEATURES = {
    "bf16": "",
    "fp8 delayed": f"{FP8} delayed",
    "several micro-batches": "--global-batch-size 4",
    "CUDA graphs": "--cuda-graph-impl local --cuda-graph-warmup-steps 1",
    "masks of documents": "--reset-attention-mask --reset-position-ids",
    VIDEO: "",
    "grouped experts": f"{EXPERTS} --moe-grouped-gemm",
    "fp8 tensorwise": f"{FP8} tensorwise",
    "fp8 rowwise": f"{FP8} rowwise",
    "recomputation": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "GPT-3's layers": "--no-swiglu --add-bias-linear --normalization LayerNorm "
    "--hidden-dropout 0.1 --attention-dropout 0.1",
    "norms of queries and keys": "--qk-layernorm",
    "adapters": "--lora-rank 8",
    "experts": EXPERTS,
    "multi-token prediction": "--mtp-num-layers 1",
    "moments in bf16": "--use-precision-aware-optimizer --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16",
    "a window": "--window-size 128 0",
    "averaged weights": "--ema-decay 0.9",
    "whole logits": "--cross-entropy-impl eager",
    "no clipping": "--clip-grad 0",
    "nothing compiled": "--no-compile",
    "Transformer Engine": "--transformer-impl transformer_engine",
}
"""Flags of pretrain_gpt.py by feature, the most important first: those that others rest on, and
those whose failure would change most. `--no-compile` is last but one, since it holds for the rest
of the process."""
STOPPED = "STOPPED: its time was over"
NOT_TRIED = "not tried: no time was left"
HEAD = ("feature", "result", "loss of each step", "seconds")


def train_steps(
    words: Sequence[str], context: ParallelContext, device: torch.device
) -> list[float]:
    """Return the losses of `STEPS` steps of a run.

    Raises:
        ConfigError: it cannot run here.
    """
    run = built_run(words, context, device)
    return [loss_of_step(run) for _ in range(STEPS)]


def video_steps(size: str, context: ParallelContext, device: torch.device) -> list[float]:
    """Return a norm of the output of each of `STEPS` passes through a double block."""
    work = work_of(Case("double", SIZES[size], num_image=256, num_text=64), context, device)
    return [float(work().float().norm()) for _ in range(STEPS)]


class OutOfTime(BaseException):
    """Raised in a feature that takes too long; code that tries something else does not catch it."""


class Deadlines:
    """Ends a feature, and the whole script, when their time is over.

    Args:
        start: the time from which the script's seconds count, of `time.monotonic`.
        seconds: the time of the whole script.
        of_feature: the most that one feature gets.
        on_end: called before the process ends because a feature cannot be interrupted.
    """

    def __init__(
        self, start: float, seconds: float, of_feature: float, on_end: Callable[[], None]
    ) -> None:
        self._end, self._of_feature, self._on_end = start + seconds, of_feature, on_end
        signal.signal(signal.SIGALRM, self._interrupt)
        self._watchdog = threading.Timer(self.left, self._stop)
        self._watchdog.daemon = True
        self._watchdog.start()

    @property
    def left(self) -> float:
        """Return the seconds that are left for features; one is kept to leave the script."""
        return max(0.0, self._end - 1 - time.monotonic())

    @contextmanager
    def feature(self) -> Iterator[None]:
        """Raise `OutOfTime` in the block when its time is over."""
        # A moment earlier than the watchdog.
        signal.setitimer(signal.ITIMER_REAL, max(0.01, min(self._of_feature, self.left - 0.5)))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def finish(self) -> None:
        """Let the process end by itself."""
        self._watchdog.cancel()

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        raise OutOfTime

    def _stop(self) -> None:
        self._on_end()
        os._exit(1)


def row(name: str, steps: Callable[[], list[float]], deadlines: Deadlines) -> tuple[str, bool]:
    """Return the line of a feature, and whether it ran or was refused in words."""
    start = time.perf_counter()
    try:
        with deadlines.feature():
            losses = steps()
        went_well = all(map(math.isfinite, losses))
        result = "ran" if went_well else "NOT FINITE"
        shown = ", ".join(f"{loss:.3f}" for loss in losses)
    except MegatronExtError as error:
        result, shown, went_well = "refused: " + " ".join(error.messages), "", True
    except OutOfTime:
        result, shown, went_well = STOPPED, "", False
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split()).replace("|", "\\|")
        result, shown, went_well = f"FAILED: {type(error).__name__}: {text}", "", False
    return table_row(name, result, shown, f"{time.perf_counter() - start:.1f}"), went_well


class Trial:
    """Tries features one after the other, and adds their rows to a table.

    Attributes:
        failed: whether a feature failed or was stopped.
    """

    def __init__(self, args: argparse.Namespace, results: Results, start: float) -> None:
        self.args, self.results, self.device = args, results, device_of(args)
        wanted = args.only or FEATURES
        self.pending = [name for name in FEATURES if name in wanted]
        self.failed = False
        self.deadlines = Deadlines(start, args.seconds, args.feature_seconds, self._hangs)

    def run(self, context: ParallelContext) -> None:
        """Try all features for which there is time."""
        while self.pending and self.deadlines.left > 1:
            name = self.pending[0]
            with freed(self.device):
                line, went_well = row(name, self._steps_of(name, context), self.deadlines)
            self.pending.pop(0)
            self.results.add(line)
            self.failed |= not went_well
        self._list_rest()
        self.deadlines.finish()

    def _steps_of(self, name: str, context: ParallelContext) -> Callable[[], list[float]]:
        tiny = self.args.tiny
        if name == VIDEO:
            return lambda: video_steps("tiny" if tiny else "11b", context, self.device)
        sizes, length = (LLAMAS["tiny"], 32) if tiny else (SMALL, LENGTH)
        words = [*sizes.flags(length, 1), "--bf16", *FEATURES[name].split()]
        return lambda: train_steps(words, context, self.device)

    def _list_rest(self) -> None:
        for name in self.pending:
            self.results.add(table_row(name, NOT_TRIED, "", ""))
        self.results.add(table_row(CONTEXT, "not tried: needs two GPUs", "", ""))

    def _hangs(self) -> None:
        """Name the feature that hangs, and those that are not reached."""
        if self.pending:
            self.results.add(table_row(self.pending.pop(0), STOPPED, "", ""))
        self._list_rest()


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list(FEATURES), help="features to try")
    parser.add_argument("--seconds", type=float, default=600, help="for the whole script")
    parser.add_argument("--feature-seconds", type=float, default=20, help="for one feature")
    add_device_flags(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str], start: float | None = None) -> int:
    """Print the table row by row; return 1 if a feature failed or was stopped."""
    args = parsed(argv)
    results = Results("gpu_try", argv, args, HEAD)
    trial = Trial(args, results, time.monotonic() if start is None else start)
    with one_rank() as context:
        trial.run(context)
    return int(trial.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], START))
