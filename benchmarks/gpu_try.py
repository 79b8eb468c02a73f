"""Three steps of every feature on a GPU, at a small size, to see at once what does not run.

Each feature trains, or is refused, or fails by itself: its row has the losses, or the whole text of
the error, and the next one is tried. Nothing here is timed for comparison.

    python benchmarks/gpu_try.py --out out/try.md
    python benchmarks/gpu_try.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.gpu_setup import (
    LLAMAS,
    Llama,
    Results,
    add_device_flags,
    config_of,
    device_of,
    draw_weights,
    freed,
    one_rank,
    table_row,
)
from benchmarks.mmdit_block import Case, work_of
from megatron_ext.errors import MegatronExtError
from megatron_ext.parallel.context import ParallelContext, seed_everything
from megatron_ext.text.task import GPT
from megatron_ext.train.setup import build_run
from megatron_ext.video.config.mmdit import SIZES

STEPS = 3
SMALL = Llama(layers=2, hidden=1024, ffn=2816, heads=8, groups=4, vocab=32000)
LENGTH = 1024
FP8 = "--fp8-format hybrid --fp8-recipe"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 512 --moe-router-topk 2"
FEATURES = {
    "bf16": "",
    "fp8 delayed": f"{FP8} delayed",
    "fp8 tensorwise": f"{FP8} tensorwise",
    "fp8 rowwise": f"{FP8} rowwise",
    "several micro-batches": "--global-batch-size 4",
    "masks of documents": "--reset-attention-mask --reset-position-ids",
    "a window": "--window-size 128 0",
    "CUDA graphs": "--cuda-graph-impl local --cuda-graph-warmup-steps 1",
    "experts": EXPERTS,
    "grouped experts": f"{EXPERTS} --moe-grouped-gemm",
    "norms of queries and keys": "--qk-layernorm",
    "GPT-3's layers": "--no-swiglu --add-bias-linear --normalization LayerNorm "
    "--hidden-dropout 0.1 --attention-dropout 0.1",
    "multi-token prediction": "--mtp-num-layers 1",
    "recomputation": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "adapters": "--lora-rank 8",
    "averaged weights": "--ema-decay 0.9",
    "moments in bf16": "--use-precision-aware-optimizer --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16",
    "no clipping": "--clip-grad 0",
    "whole logits": "--cross-entropy-impl eager",
    "nothing compiled": "--no-compile",
    "Transformer Engine": "--transformer-impl transformer_engine",
}
"""Flags of pretrain_gpt.py by feature, those first that most others rest on. `--no-compile` is last
but one, since it holds for the rest of the process."""
VIDEO = "a block of a video transformer"
CONTEXT = "context parallelism"
HEAD = ("feature", "result", "loss of each step", "seconds")


def train_steps(
    words: Sequence[str], context: ParallelContext, device: torch.device
) -> list[float]:
    """Return the losses of `STEPS` steps of a run.

    Raises:
        ConfigError: it cannot run here.
    """
    config, tokenizer = config_of(words, device)
    seed_everything(context, config.training.seed)
    run = build_run(config, GPT, context, device, tokenizer)
    draw_weights(run)
    micro, batch = config.training.batch_sizes
    losses = []
    for _ in range(STEPS):
        batches = run.train_source.next_step(batch // micro)
        result = run.runner.train(
            batches, batch // micro, run.progress.consumed_train_samples, batch
        )
        losses.append(float(next(iter(result.losses.values()))))
    return losses


def video_steps(size: str, context: ParallelContext, device: torch.device) -> list[float]:
    """Return a norm of the output of each of `STEPS` passes through a double block."""
    work = work_of(Case("double", SIZES[size], num_image=256, num_text=64), context, device)
    return [float(work().float().norm()) for _ in range(STEPS)]


def row(name: str, steps: Callable[[], list[float]]) -> tuple[str, bool]:
    """Return the line of a feature, and whether it ran or was refused in words."""
    start = time.perf_counter()
    try:
        losses = steps()
        went_well = all(map(math.isfinite, losses))
        result = "ran" if went_well else "NOT FINITE"
        shown = ", ".join(f"{loss:.3f}" for loss in losses)
    except MegatronExtError as error:
        result, shown, went_well = "refused: " + " ".join(error.messages), "", True
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split()).replace("|", "\\|")
        result, shown, went_well = f"FAILED: {type(error).__name__}: {text}", "", False
    return table_row(name, result, shown, f"{time.perf_counter() - start:.1f}"), went_well


def main(argv: Sequence[str]) -> int:
    """Print the table row by row; return 1 if a feature failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=[*FEATURES, VIDEO], help="features to try")
    add_device_flags(parser)
    args = parser.parse_args(argv)
    device, failed = device_of(args), False
    results = Results("gpu_try", argv, args, HEAD)
    sizes, length = (LLAMAS["tiny"], 32) if args.tiny else (SMALL, LENGTH)
    wanted = args.only or [*FEATURES, VIDEO]
    with one_rank() as context:

        def attempt(name: str) -> None:
            nonlocal failed

            def steps() -> list[float]:
                if name == VIDEO:
                    return video_steps("tiny" if args.tiny else "11b", context, device)
                words = [*sizes.flags(length, 1), "--bf16", *FEATURES[name].split()]
                return train_steps(words, context, device)

            with freed(device):
                line, went_well = row(name, steps)
            results.add(line)
            failed |= not went_well

        for name in (x for x in (VIDEO, *FEATURES) if x in wanted):
            attempt(name)
        results.add(table_row(CONTEXT, "not tried: needs two GPUs", "", ""))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
