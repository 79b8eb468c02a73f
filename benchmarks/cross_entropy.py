"""Extra memory and time of the cross-entropy of a language-model head, forward and backward.

Each way of computing it runs in a fresh forked process. Extra memory is what the peak exceeds the
inputs by: resident memory on a CPU, torch's allocations on a GPU. All ways give the gradients of
the hidden states and of the weight (dW), which all must hold; the last columns subtract the bytes
of dW (by arithmetic, although eager frees logits before it makes its dW, so they flatter eager).
With ``--tp 2`` two ranks hold half of the vocabulary each; the costs are those of the rank that
needs more. megatron-core's cross-entropy works in place on float32 logits, and copies 16-bit ones.
On a machine that others use too, compare the CPU times.

Targets G3, at ``--gpu-size`` on a GPU: the chunked ways take at most 0.15 times eager's memory and
0.85 times its time, and are no slower than Liger's and torch.compile's where these run.

Examples:
    python benchmarks/cross_entropy.py --tokens 1024 --hidden 512 --vocab 50000 --tp 2
    python benchmarks/cross_entropy.py --gpu-size --out out/cross_entropy.md
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import megatron_ext  # noqa: F401  before megatron-core, two of whose warnings it silences

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor

from benchmarks.gpu_setup import Results, add_result_flags, table_row
from benchmarks.targets import LOSS_MEMORY, LOSS_TIME, LOSS_TIME_OF_OTHERS, Target, over, verdict
from megatron_ext.device import select
from megatron_ext.losses.linear_cross_entropy import weighted_linear_cross_entropy
from megatron_ext.losses.vocabulary import VocabularyHead
from megatron_ext.parallel.context import ParallelContext, init_groups
from megatron_ext.parallel.grid import Layout
from megatron_ext.train.forking import fork_ranks
from megatron_ext.train.rank import run_rank

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class Cost(NamedTuple):
    """The cost of a way: extra bytes, and seconds, CPU seconds and loss of the shortest pass."""

    extra: float
    seconds: float
    cpu_seconds: float
    loss: float


class Setting(NamedTuple):
    """Tokens of a chunk, None for the default, and the ranks that share the vocabulary."""

    chunk_size: int | None
    context: ParallelContext

    @property
    def options(self) -> dict[str, Any]:
        group = self.context.pgs.tp
        return {"block_size": self.chunk_size, "tp_group": group, "sequence_parallel": False}


Way = Callable[[Inputs, Setting], Tensor]


def eager(inputs: Inputs, setting: Setting) -> Tensor:
    """Compute whole logits under autograd; no name holds them longer than torch needs them."""
    hidden, weight, labels, weights = inputs
    if setting.context.pgs.tp.size() > 1:
        head = VocabularyHead(weight, setting.context.pgs.tp)
        entered = copy_to_tensor_model_parallel_region(hidden)[:, 0]
        return torch.dot(-head.log_prob(head.logits(entered), labels[0]), weights[0])
    losses = F.cross_entropy(
        (hidden[:, 0] @ weight.t()).float(), labels[0], reduction="none", ignore_index=-100
    )
    return torch.dot(losses, weights[0])


def core(inputs: Inputs, setting: Setting) -> Tensor:
    hidden, weight, labels, weights = inputs
    entered = copy_to_tensor_model_parallel_region(hidden)
    losses = vocab_parallel_cross_entropy((entered @ weight.t()).float(), labels.t())
    return torch.dot(losses[:, 0], weights[0])


def weighted(inputs: Inputs, setting: Setting) -> Tensor:
    return weighted_linear_cross_entropy(*inputs, **setting.options)[1]


_compiled = torch.compile(eager, dynamic=True)


def compiled(inputs: Inputs, setting: Setting) -> Tensor:
    result: Tensor = _compiled(inputs, setting)
    return result


def liger(inputs: Inputs, _: Setting) -> Tensor:
    """Sum over the tokens; this package takes no token weights."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden, weight, labels, _weights = inputs
    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    result: Tensor = loss(weight, hidden[:, 0], labels[0]) / labels.numel()
    return result


WAYS: dict[str, Way] = {
    "eager": eager,
    "megatron-core": core,
    "torch.compile": compiled,
    "Liger": liger,
    "weighted": weighted,
}

GPU_SIZE = 32_768, 4096, 151_936
CHUNKED = ("weighted",)
OTHERS = ("torch.compile", "Liger")


def make_inputs(
    tokens: int, hidden: int, vocab: int, parts: int, kind: torch.dtype, place: str
) -> Inputs:
    """Make the inputs of one rank in place, so that this leaves no peak of memory."""
    generator = torch.Generator(place).manual_seed(0)
    like: dict[str, Any] = {"device": place, "dtype": kind}
    states = torch.empty(tokens, 1, hidden, **like).normal_(generator=generator)
    weight = torch.empty(vocab // parts, hidden, **like).normal_(0, 0.02, generator=generator)
    labels = torch.randint(0, vocab, (1, tokens), generator=generator, device=place)
    weights = torch.full((1, tokens), 1 / tokens, device=place)
    return states.requires_grad_(), weight.requires_grad_(), labels, weights


def peak_bytes(place: str) -> int:
    """Return the most memory that this process has held."""
    if place == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one_pass(way: Way, inputs: Inputs, setting: Setting) -> tuple[float, float, float]:
    """Return seconds, CPU seconds and loss of a forward and a backward pass."""
    inputs[0].grad = inputs[1].grad = None
    start, cpu_start = time.perf_counter(), time.process_time()
    loss = way(inputs, setting)
    loss.backward()  # type: ignore[no-untyped-call]
    if loss.is_cuda:
        torch.cuda.synchronize()
    taken = time.perf_counter() - start, time.process_time() - cpu_start
    return *taken, float(loss.detach())


def measure(way: Way, args: argparse.Namespace, setting: Setting) -> Cost:
    """Measure extra memory and time of one way on this rank."""
    place, kind = select().kind, getattr(torch, args.dtype)
    # Compilers and libraries set up their buffers here, on too small a problem to leave a peak.
    for tokens, vocab in ((24, 1000), (40, 1500)):
        one_pass(way, make_inputs(tokens, args.hidden, vocab, args.tp, kind, place), setting)
    inputs = make_inputs(args.tokens, args.hidden, args.vocab, args.tp, kind, place)
    before = peak_bytes(place)
    best = min(one_pass(way, inputs, setting) for _ in range(args.repeats))
    return Cost(peak_bytes(place) - before, *best)


def on_rank(name: str, args: argparse.Namespace, chunk_size: int | None, folder: Path) -> int:
    """Call `measure` on one rank, which leaves its figures in a file."""
    layout = Layout(world_size=args.tp, tensor_model_parallel_size=args.tp)
    device = select()
    if device.kind == "cuda":
        device.activate(int(os.environ["LOCAL_RANK"]))
    context = init_groups(layout, device)
    cost = measure(WAYS[name], args, Setting(chunk_size, context))
    (folder / str(context.rank)).write_text(" ".join(map(repr, cost)))
    context.destroy()
    return 0


def spawned(
    rank: int, name: str, args: argparse.Namespace, chunk_size: int | None, folder: Path
) -> None:
    """Run a rank in a process that has not asked for a GPU before."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(args.tp),
        MEGATRON_EXT_INIT_METHOD=f"file://{folder}/../rendezvous",
    )
    os._exit(run_rank(lambda: on_rank(name, args, chunk_size, folder)))


def spawn_ranks(name: str, args: argparse.Namespace, chunk_size: int | None, folder: Path) -> bool:
    """Start the ranks of a GPU, which forking would break; return whether all went well."""
    start = multiprocessing.get_context("spawn").Process
    ranks = [
        start(target=spawned, args=(r, name, args, chunk_size, folder)) for r in range(args.tp)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return all(rank.exitcode == 0 for rank in ranks)


def measure_apart(name: str, args: argparse.Namespace, chunk_size: int | None) -> Cost | None:
    """Call `measure` on fresh ranks; return the highest of each figure, None where it fails."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "costs"
        folder.mkdir()
        if select().kind == "cuda":
            went_well = spawn_ranks(name, args, chunk_size, folder)
        else:
            rank = partial(on_rank, name, args, chunk_size, folder)
            went_well = fork_ranks(rank, args.tp) == 0
        if not went_well:
            return None
        found = [[float(x) for x in file.read_text().split()] for file in folder.iterdir()]
    return Cost(*map(max, zip(*found, strict=True)))


HEAD = (
    "cross-entropy", "chunk", "loss", "extra memory (MB)", "time (s)", "CPU time (s)",
    "memory / eager", "time / eager", "CPU time / eager", "without dW (MB)", "without dW / eager",
    "verdict",
)  # fmt: skip


def cells(found: Cost, whole: Cost, weight_bytes: int) -> list[str]:
    """Return the cells of a way, beside eager."""
    rest = found.extra - weight_bytes
    ratios = [
        over(found.extra, whole.extra),
        found.seconds / whole.seconds,
        found.cpu_seconds / whole.cpu_seconds,
        over(rest, whole.extra - weight_bytes),
    ]
    shown = ["n/a" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
    times = f"{found.seconds:.4g}", f"{found.cpu_seconds:.4g}"
    before = [f"{found.loss:.5f}", f"{found.extra / 1e6:.0f}", *times]
    return [*before, *shown[:3], f"{rest / 1e6:.0f}", shown[3]]


def targets(
    name: str, found: Cost, whole: Cost, others: list[float]
) -> list[tuple[Target, float | None]]:
    """Return the ratios of a chunked way to eager, to Liger and to torch.compile."""
    if name not in CHUNKED:
        return []
    return [
        (LOSS_MEMORY, over(found.extra, whole.extra)),
        (LOSS_TIME, found.seconds / whole.seconds),
        (LOSS_TIME_OF_OTHERS, found.seconds / min(others) if others else None),
    ]


def candidates(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the ways to measure; eager comes first, since all else is compared with it."""
    plain = [(name, 0) for name in ("eager", "megatron-core") if name in args.ways]
    if args.tp > 1:
        print(
            "torch.compile and Liger are left out: they do not cut the vocabulary", file=sys.stderr
        )
        return plain + [(n, size) for size in args.chunk_size for n in CHUNKED if n in args.ways]
    if "torch.compile" in args.ways:
        plain.append(("torch.compile", 0))
    if "Liger" in args.ways:
        if importlib.util.find_spec("liger_kernel") and select().kind == "cuda":
            plain.append(("Liger", 0))
        else:
            print("Liger is left out: not installed, or no GPU", file=sys.stderr)
    chunked = [name for name in CHUNKED if name in args.ways]
    return plain + [(name, size) for size in args.chunk_size for name in chunked]


def measure_all(args: argparse.Namespace, results: Results) -> None:
    """Yield one row for each candidate, as it comes."""
    weight_bytes = args.vocab // args.tp * args.hidden * getattr(torch, args.dtype).itemsize
    whole: Cost | None = None
    others: list[float] = []
    for name, chunk_size in candidates(args):
        label = str(chunk_size or "default") if name in CHUNKED else "-"
        found = measure_apart(name, args, chunk_size or None)
        if found is None:
            results.add(table_row(name, label, "failed"))
            continue
        whole = whole or found
        if name in OTHERS:
            others.append(found.seconds)
        judged = verdict(args, targets(name, found, whole, others))
        results.add(table_row(name, label, *cells(found, whole, weight_bytes), judged))


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the vocabulary")
    parser.add_argument("--chunk-size", type=int, nargs="+", default=[0], help="0: default")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--repeats", type=int, default=1, help="the shortest counts")
    add_result_flags(parser)
    parser.add_argument(
        "--gpu-size",
        action="store_true",
        help="32,768 tokens x 4096 hidden x 151,936 entries in bfloat16, 3 passes: one GPU's share",
    )
    args = parser.parse_args(argv)
    if args.gpu_size:
        args.tokens, args.hidden, args.vocab = GPU_SIZE
        args.dtype, args.repeats = "bfloat16", 3
    args.device, args.tiny = select().kind, not args.gpu_size
    return args


def main(argv: Sequence[str]) -> int:
    """Print the table, and write it where ``--out`` and ``--save`` say."""
    args = parsed(argv)
    results = Results("cross_entropy", argv, args, HEAD, stem=f"cross_entropy_tp{args.tp}")
    measure_all(args, results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
