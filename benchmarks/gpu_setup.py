"""What the benchmarks of GPUs share: the device, shapes of models, ceilings, memory, results."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.streaming_setup import heading, one_rank, saved_as, show, table_head, table_row
from megatron_ext.config import RunConfig, parse_args
from megatron_ext.data.tokenizers import Tokenizer
from megatron_ext.device import select
from megatron_ext.device.rates import has_fp8, matrix_rate
from megatron_ext.errors import MegatronExtError
from megatron_ext.training.flops import peak_flops
from megatron_ext.training.preflight import preflight

__all__ = [
    "LLAMAS",
    "Ceiling",
    "Llama",
    "add_device_flags",
    "ceiling",
    "config_of",
    "device_of",
    "freed",
    "heading",
    "one_rank",
    "outcome_of",
    "peak_memory",
    "save",
    "show",
    "table_head",
    "table_row",
]


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
        """Entries of a head."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Number of weights."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.groups)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.vocab * self.hidden + self.hidden

    def flops_per_token(self, length: int) -> float:
        """Of a forward and a backward pass, matrix products only, causal attention counted half.

        The count of Megatron-LM and of ``training.flops.flops_per_sample``.
        """
        products = self.hidden * self.head_size * (2 * self.heads + 2 * self.groups)
        products += 3 * self.hidden * self.ffn + self.heads * self.head_size * length
        return 6.0 * (self.layers * products + self.vocab * self.hidden)

    def flags(self, length: int, batch: int) -> list[str]:
        """Of pretrain_gpt.py, for one micro-batch a step."""
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
    """``--device``, ``--tiny`` and ``--save``, the same for all these scripts."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a run of seconds, to try the script")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")


def device_of(args: argparse.Namespace) -> torch.device:
    """The device that was asked for.

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
    """What a matrix product reaches, in operations per second.

    Attributes:
        measured: in this very run.
        datasheet: the maker's figure, None where it is not known.
    """

    measured: float
    datasheet: float | None

    def shares(self, flops: float) -> tuple[str, str]:
        """A rate as shares of both."""
        of_sheet = f"{flops / self.datasheet:.1%}" if self.datasheet else "n/a"
        return f"{flops / self.measured:.1%}", of_sheet


@cache
def ceiling(device: torch.device, dtype: torch.dtype, *, tiny: bool = False) -> Ceiling:
    """Of a dtype on the device, measured once.

    Datasheets give fp8 at twice bf16's rate on all GPUs that have it.
    """
    measured = matrix_rate(device, dtype, 256 if tiny else 8192)
    sheet = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if sheet is not None and dtype == torch.float8_e4m3fn:
        sheet *= 2
    return Ceiling(measured, sheet if dtype in (torch.bfloat16, torch.float8_e4m3fn) else None)


def ceiling_dtype(device: torch.device, precision: str) -> torch.dtype:
    """Whose matrix rate a run in ``bf16`` or ``fp8`` is held against."""
    fp8 = precision == "fp8" and has_fp8(device)
    return torch.float8_e4m3fn if fp8 else torch.bfloat16


def config_of(flags: Sequence[str], device: torch.device) -> tuple[RunConfig, Tokenizer]:
    """The run that flags of pretrain_gpt.py describe.

    Raises:
        ConfigError: it cannot be run here.
    """
    return preflight(parse_args(list(flags), world_size=1, device=device.type).config)


@contextmanager
def freed(device: torch.device) -> Iterator[None]:
    """Give back what was allocated in the block, and count its peak from zero."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def peak_memory(device: torch.device) -> str:
    """The most that tensors held since `freed` began, in GiB; a CPU's is not known."""
    if device.type != "cuda":
        return "n/a"
    return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f}"


def outcome_of(measure: Callable[[], list[str]]) -> list[str]:
    """The cells that a measurement gives, or one that says why there are none."""
    try:
        return measure()
    except MegatronExtError as error:
        return [f"refused: {error.messages[0]}"]
    except torch.OutOfMemoryError:
        return ["out of memory"]


def save(script: str, lines: Sequence[str]) -> None:
    """Keep the lines beside the script, under today's date."""
    saved_as(script, ".md").write_text("\n".join(lines) + "\n")
