"""The kernels of a recorded step beside the times that tools/plan.py expects of them, by class.

Reads a trace that torch's profiler wrote (``--profile`` of pretrain_gpt.py, ``--trace`` of
benchmarks/gpu_throughput.py), sorts its kernels into the classes of `planning.kernels` by their
names, and prints planned beside measured milliseconds of a step, then the longest kernels.

    python benchmarks/compare_profile.py trace.json --steps 2 --gpu H200 -- <pretrain_gpt flags>
    python benchmarks/compare_profile.py trace.json --steps 2      # without a plan

A product belongs to the head if one of its factors has as many rows or columns as the vocabulary,
which needs the shapes that ``record_shapes`` records. Float32 sums of weight gradients are part of
a product, so they are planned and measured together with it. ``--gpu`` also takes the file that
``tools/doctor.py --json`` wrote.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.streaming_setup import show, table_head, table_row
from megatron_ext.config.flags import SIZE
from megatron_ext.config.parser import parse_args
from megatron_ext.errors import DataError, MegatronExtError
from megatron_ext.planning.budget import budget
from megatron_ext.planning.hardware import gpu_named
from megatron_ext.planning.kernels import KINDS
from megatron_ext.planning.network import Network
from megatron_ext.planning.step_time import estimate
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.text.run import with_tokenizer
from megatron_ext.text.task import TEXT

OTHER = "other"
NAMES = {
    "communication": r"nccl",
    "attention": r"sdpa|flash|fmha|flex_attention|attn",
    "optimizer": r"adam|multi_tensor_apply|lpnorm|foreach|update_kernel",
    "logits": r"softmax|triton.*max.*exp|triton.*arange.*(eq|where)|triton.*exp.*where",
    "linear": r"nvjet|gemm|cutlass|xmma|cublas|scaled_mm|splitk|matmul",
    "casts": r"quanti[sz]e|cast_|_(activation|gradient)_kernel|fp8|float8|"
    r"triton.*(clamp|abs_a?max)",
    "plumbing": r"fill|memset|memcpy|embedding.*backward|addcmul|functor_add|copy_kernel",
    "pointwise": r"triton|norm|elementwise|vectorized|index_?select|gather|reduce_kernel|dropout",
}
"""Patterns of kernels' names by class; the first that matches decides."""


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in a step.

    Attributes:
        kind: a class of `KINDS`, or `OTHER`.
        seconds, count: per step.
    """

    name: str
    kind: str
    seconds: float
    count: float


@dataclass(frozen=True)
class Profile:
    """Kernels of a step, longest first, and the idle seconds between the first and the last."""

    kernels: list[Kernel]
    idle: float

    def seconds(self, kind: str) -> float:
        """Return the seconds of a class."""
        if kind == "gaps":
            return self.idle
        return sum(kernel.seconds for kernel in self.kernels if kernel.kind == kind)


def kind_of(name: str, shapes: Sequence[Any] = (), vocabulary: int | None = None) -> str:
    """Return the class of a kernel.

    Args:
        shapes: shapes of the inputs of the operation that launched it, as the profiler writes them.
        vocabulary: rows of the head on a rank.
    """
    found = next((kind for kind, x in NAMES.items() if re.search(x, name, re.IGNORECASE)), OTHER)
    of_head = any(vocabulary in x for x in shapes if isinstance(x, list))
    return "head" if found == "linear" and of_head else found


def read_profile(path: Path, steps: int, vocabulary: int | None = None) -> Profile:
    """Return the kernels of a trace of ``steps`` steps.

    Raises:
        DataError: the file is no trace of torch's profiler, or has no kernels.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"The trace ({path}) cannot be read as one of torch's profiler; give the file that "
            "`--profile` or `export_chrome_trace` wrote."
        ) from error
    work = ("kernel", "gpu_memcpy", "gpu_memset")
    launched = [x for x in events if x.get("cat") in work and "dur" in x]
    if not launched:
        raise DataError(f"The trace ({path}) has no kernels; record a run on a GPU.")
    shapes = {
        x["args"]["External id"]: x["args"]["Input Dims"]
        for x in events
        if x.get("cat") == "cpu_op" and "Input Dims" in x.get("args", {})
    }
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in launched:
        dims = shapes.get(event.get("args", {}).get("External id"), ())
        times[event["name"], kind_of(event["name"], dims, vocabulary)].append(event["dur"])
    kernels = [
        Kernel(name, kind, 1e-6 * sum(each) / steps, len(each) / steps)
        for (name, kind), each in times.items()
    ]
    kernels.sort(key=lambda kernel: -kernel.seconds)
    return Profile(kernels, _idle(launched) / steps)


def _idle(events: Iterable[dict[str, Any]]) -> float:
    """Return the seconds between the first and the last kernel in which none runs."""
    idle, end = 0.0, None
    for start, duration in sorted((float(x["ts"]), float(x["dur"])) for x in events):
        if end is not None and start > end:
            idle += start - end
        end = max(end or start, start + duration)
    return 1e-6 * idle


def planned(network: Network, gpu: str) -> dict[str, float]:
    """Return the planned seconds of each class on a GPU, float32 sums with the products."""
    found = {line.kind: line.seconds for line in budget(estimate(network, gpu_named(gpu)))}
    found["linear"] += found.pop("weight gradients", 0.0)
    return found


def class_rows(profile: Profile, plan: dict[str, float]) -> list[str]:
    """Return a line for each class, and one for the sum."""
    lines, sums = [], [0.0, 0.0]
    for kind in (*KINDS, "waiting", OTHER):
        both = plan.get(kind, 0.0), profile.seconds(kind)
        if not any(both):
            continue
        own = [kernel for kernel in profile.kernels if kernel.kind == kind]
        count, longest = sum(kernel.count for kernel in own), own[0].name if own else ""
        lines.append(table_row(kind, *_times(*both), f"{count:.0f}", _short(longest)))
        sums = [total + part for total, part in zip(sums, both, strict=True)]
    return [*lines, table_row("sum", *_times(*sums), "", "")]


def _times(plan: float, measured: float) -> tuple[str, ...]:
    ratio = f"{measured / plan:.2f}" if plan and measured else "n/a"
    return f"{1e3 * plan:.1f}" if plan else "n/a", f"{1e3 * measured:.1f}", ratio


def _short(name: str, length: int = 90) -> str:
    """Return the beginning of a name, fit for a cell."""
    cut = name if len(name) <= length else f"{name[:length]}…"
    return cut.replace("|", "\\|")


CLASS_HEAD = ("class", "planned ms", "measured ms", "measured / planned", "kernels", "longest")
KERNEL_HEAD = ("kernel", "class", "ms per step", "launches per step")


def kernel_rows(profile: Profile, count: int) -> list[str]:
    """Return a line for each of the longest kernels."""
    return [
        table_row(_short(x.name), x.kind, f"{1e3 * x.seconds:.3f}", f"{x.count:.1f}")
        for x in profile.kernels[:count]
    ]


def network_of(words: Sequence[str], gpu: str) -> GptNetwork:
    """Return the network of a run on one GPU that flags of pretrain_gpt.py describe.

    Raises:
        ConfigError: with one sentence for every error.
    """
    given = {"dry_run": True, "dry_run_gpu": gpu}
    config = parse_args(list(words), TEXT, world_size=1, device="cuda", defaults=given).config
    if not config.model.padded_vocab_size:
        config, _ = with_tokenizer(config)
    return GptNetwork.of(config)


def print_comparison(
    trace: Path,
    words: Sequence[str],
    *,
    gpu: str,
    steps: int,
    longest: int = 40,
    out: Path | None = None,
) -> bool:
    """Print both tables, and write them to ``out``; return False after a sentence about an error.

    Args:
        words: flags of pretrain_gpt.py; without any, nothing is planned.
        gpu: kind of GPU, or a file of the doctor.
    """
    try:
        network = network_of(words, gpu) if words else None
        vocabulary = None if network is None else network.sizes.v // network.sizes.tp
        profile = read_profile(trace, steps, vocabulary)
        plan = {} if network is None else planned(network, gpu)
    except MegatronExtError as error:
        print("\n".join(f"error: {text}" for text in error.messages), file=sys.stderr)
        return False
    lines = [*table_head(*CLASS_HEAD), *class_rows(profile, plan), ""]
    lines += [*table_head(*KERNEL_HEAD), *kernel_rows(profile, longest)]
    show(lines)
    if out is not None:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return True


def main(argv: Sequence[str]) -> int:
    """Print both tables; return the exit code."""
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="what torch's profiler wrote")
    parser.add_argument("--steps", type=SIZE.integer, default=1, help="recorded steps (1)")
    parser.add_argument("--gpu", default="H200", help="kind of GPU, or a .json file (H200)")
    parser.add_argument("--longest", type=SIZE.integer, default=40, help="kernels to list (40)")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    args = parser.parse_args(words[:split])
    went_well = print_comparison(
        args.trace,
        words[split + 1 :],
        gpu=args.gpu,
        steps=args.steps,
        longest=args.longest,
        out=args.out,
    )
    return 0 if went_well else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
