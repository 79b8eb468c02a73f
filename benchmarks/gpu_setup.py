"""Parts that the benchmarks of GPUs share: device, shapes of models, ceilings, memory, results."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from benchmarks.streaming_setup import heading, one_rank, saved_as, show, table_head, table_row
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.device import select
from megatron_ext.device.gpus import peak_flops
from megatron_ext.device.rates import has_fp8, matrix_rate
from megatron_ext.errors import MegatronExtError
from megatron_ext.parallel.context import ParallelContext, seed_everything
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.main import preflight
from megatron_ext.train.run import Run
from megatron_ext.train.setup import build_run
from megatron_ext.train.step import StepInputs
from megatron_ext.train.task import Task

__all__ = [
    "LLAMAS",
    "Ceiling",
    "Llama",
    "Results",
    "add_device_flags",
    "ceiling",
    "config_of",
    "device_of",
    "freed",
    "loss_of_step",
    "one_rank",
    "outcome_of",
    "parsed_with_flags",
    "peak_memory",
    "built_run",
    "table_row",
]

PACKAGES = ("triton", "transformer-engine", "flash-attn", "liger-kernel", "transformers")
"""Packages whose versions stand above a table."""


@dataclass(frozen=True)
class Llama:
    """Sizes of a Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases, untied.

    Attributes:
        layers, hidden, ffn, heads, groups: as the flags of pretrain_gpt.py name them.
        vocab: entries of the embedding.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocab: int

    @property
    def head_size(self) -> int:
        """Return the entries of a head."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.groups)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.vocab * self.hidden + self.hidden

    def flops_per_token(self, length: int) -> float:
        """Return the operations of a forward and a backward pass, causal attention counted half.

        Only matrix products count, as in Megatron-LM and in ``flops_per_sample``.
        """
        products = self.hidden * self.head_size * (2 * self.heads + 2 * self.groups)
        products += 3 * self.hidden * self.ffn + self.heads * self.head_size * length
        return 6.0 * (self.layers * products + self.vocab * self.hidden)

    def flags(self, length: int, batch: int) -> list[str]:
        """Return the flags of pretrain_gpt.py, for one micro-batch a step."""
        # NullTokenizer adds an id for the end of a document; 128 divides the size as it does ours.
        words = (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {self.ffn} "
            f"--num-attention-heads {self.heads} --group-query-attention "
            f"--num-query-groups {self.groups} --swiglu --normalization RMSNorm "
            "--disable-bias-linear --untie-embeddings-and-output-weights "
            "--position-embedding-type rope --rotary-base 500000 "
            f"--seq-length {length} --max-position-embeddings {length} "
            f"--micro-batch-size {batch} --global-batch-size {batch} "
            "--attention-dropout 0 --hidden-dropout 0 --train-iters 10000 --lr 1e-5 "
            "--lr-decay-style constant --clip-grad 1.0 --use-distributed-optimizer "
            "--num-workers 0 --log-interval 1000000 --eval-iters 0 --mock-data "
            f"--tokenizer-type NullTokenizer --vocab-size {self.vocab - 1}"
        )
        return words.split()


LLAMAS = {
    "tiny": Llama(layers=2, hidden=64, ffn=128, heads=4, groups=2, vocab=256),
    "1b": Llama(layers=16, hidden=2048, ffn=8192, heads=32, groups=8, vocab=128256),
    "3b": Llama(layers=28, hidden=3072, ffn=8192, heads=24, groups=8, vocab=128256),
    "4b": Llama(layers=16, hidden=4096, ffn=14336, heads=32, groups=8, vocab=128256),
}
"""The widths of Llama 3.2 1B and 3B, and of 3.1 8B with half of its layers, which fits one GPU."""


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, ``--tiny``, ``--out`` and ``--save``, the same for all these scripts."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a run of seconds, to try the script")
    add_result_flags(parser)


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where results go, beside the output."""
    parser.add_argument("--out", type=Path, help="write the table to this file, row by row")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")


def parsed_with_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return a script's flags; ``flags`` are the words after ``--``, for pretrain_gpt.py."""
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:split])
    args.flags = tuple(words[split + 1 :])
    return args


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the device that was asked for.

    Raises:
        SystemExit: it is not there, or cannot be avoided.
    """
    if args.device == "cpu":
        # Heeded until torch asks the driver for the first time.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    kind = select().kind
    if kind != args.device:
        advice = "give `--device cpu`" if kind == "cpu" else "set `CUDA_VISIBLE_DEVICES=`"
        raise SystemExit(f"error: this process computes on {kind}, not {args.device}; {advice}")
    return torch.device(kind)


@dataclass(frozen=True)
class Ceiling:
    """The rate that a matrix product reaches, in operations per second.

    Attributes:
        measured: in this very run.
        datasheet: the maker's figure, None where it is not known.
    """

    measured: float
    datasheet: float | None

    def shares(self, flops: float) -> tuple[str, str]:
        """Return a rate as shares of both."""
        of_sheet = f"{flops / self.datasheet:.1%}" if self.datasheet else "n/a"
        return f"{flops / self.measured:.1%}", of_sheet


@cache
def ceiling(device: torch.device, dtype: torch.dtype, *, tiny: bool = False) -> Ceiling:
    """Return the ceiling of a dtype on the device, measured once.

    Datasheets give fp8 at twice bf16's rate on all GPUs that have it.
    """
    measured = matrix_rate(device, dtype, 256 if tiny else 8192)
    sheet = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if sheet is not None and dtype == torch.float8_e4m3fn:
        sheet *= 2
    return Ceiling(measured, sheet if dtype in (torch.bfloat16, torch.float8_e4m3fn) else None)


def ceiling_dtype(device: torch.device, precision: str) -> torch.dtype:
    """Return the dtype whose matrix rate a run of a precision is compared with."""
    fp8 = precision.startswith("fp8") and has_fp8(device)
    return torch.float8_e4m3fn if fp8 else torch.bfloat16


def config_of(flags: Sequence[str], device: torch.device) -> tuple[RunConfig, Tokenizer]:
    """Return the run that flags of pretrain_gpt.py describe, its weights left to `draw_weights`.

    Raises:
        ConfigError: it cannot be run here.
    """
    config, tokenizer = preflight(
        parse_args(list(flags), TEXT, world_size=1, device=device.type).config,
        GPT.preflight,
    )
    model = dataclasses.replace(config.model, perform_initialization=False)
    return dataclasses.replace(config, model=model), tokenizer


def built_run(
    flags: Sequence[str], context: ParallelContext, device: torch.device, task: Task = GPT
) -> Run:
    """Build the run that flags of pretrain_gpt.py describe, its weights drawn on the device.

    Raises:
        ConfigError: it cannot be run here.
    """
    config, tokenizer = config_of(flags, device)
    seed_everything(context, config.training.seed)
    run = build_run(config, task, context, device, tokenizer)
    draw_weights(run)
    return run


def loss_of_step(run: Run) -> float:
    """Train a step on the run's next batches, and return its loss."""
    micro, batch = run.config.training.batch_sizes
    number = batch // micro
    batches = run.train_source.next_step(number)
    inputs = StepInputs(batches, number, run.progress.consumed_train_samples)
    result = run.runner.train(inputs, batch)
    return float(next(iter(result.losses.values())))


@contextmanager
def freed(device: torch.device) -> Iterator[None]:
    """Give back what was allocated in the block, and count its peak from zero."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    finally:
        # What was compiled would keep the model that it was compiled for.
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def peak_memory(device: torch.device) -> str:
    """Return the most that tensors held since `freed` began, in GiB; unknown on a CPU."""
    if device.type != "cuda":
        return "n/a"
    return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f}"


def outcome_of(measure: Callable[[], list[str]]) -> list[str]:
    """Return the cells that a measurement gives, or one that says why there are none."""
    try:
        return measure()
    except MegatronExtError as error:
        return [f"refused: {error.messages[0]}"]
    except torch.OutOfMemoryError:
        return ["out of memory"]


class Results:
    """A table that is printed, and written to files, as its rows come.

    A script that is stopped leaves the rows that it had.

    Args:
        script: name of the script.
        argv: its flags, for the heading.
        args: with ``out`` and ``save``.
        head: names of the columns.
        stem: of the file that ``save`` writes; None for the script's name.
    """

    def __init__(
        self,
        script: str,
        argv: Sequence[str],
        args: argparse.Namespace,
        head: Sequence[str],
        stem: str | None = None,
    ) -> None:
        self._paths = [args.out] if args.out is not None else []
        if args.save:
            self._paths.append(saved_as(stem or script, ".md"))
        self._lines: list[str] = []
        date, command, empty = heading(script, argv)
        self.add(date, *versions(), command, empty, *table_head(*head))

    def add(self, *lines: str) -> None:
        """Print lines and keep them."""
        show(lines)
        self._lines += lines
        for path in self._paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")


def versions() -> list[str]:
    """Return a line with what decides speed on a GPU; none without one."""
    if not torch.cuda.is_available():
        return []
    named = {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
    named |= {name: version_of(name) for name in PACKAGES}
    return ["  ".join(f"{name} {version}" for name, version in named.items() if version)]


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@torch.no_grad()
def draw_weights(run: Run, deviation: float = 0.02) -> None:
    """Fill matrices and biases of a run of `config_of`, on its own device.

    A run draws every weight on the CPU, in one thread, so that no layout changes it; for billions
    of weights that takes longer than the measurement.
    """
    torch.manual_seed(run.config.training.seed)
    for chunk in run.chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, deviation)
            elif name.endswith(".bias"):
                parameter.zero_()
    assert run.optimizer is not None
    run.optimizer.reload_model_params()
