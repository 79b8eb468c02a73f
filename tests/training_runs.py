"""Whole training runs inside a test, from flags over forked ranks to rows of metrics."""

import atexit
import functools
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_ext.config.parser import ParsedArgs, parse_args, read_words
from megatron_ext.config.run import RunConfig
from megatron_ext.data.indexed import optimal_dtype
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.device import select
from megatron_ext.errors import ConfigError
from megatron_ext.text.task import TEXT
from megatron_ext.train.forking import fork_ranks
from megatron_ext.train.main import preflight, stored_config
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.reporting import loss_plot
from megatron_ext.train.reporting.files import read_metrics
from megatron_ext.train.run import Run
from megatron_ext.train.task import Task, TaskChoice

ROOT = Path(__file__).resolve().parents[1]

TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 172 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--seq-length 64 --max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 12 --weight-decay 0.01 "
    "--clip-grad 1.0 --seed 1234 --use-cpu-initialization --use-distributed-optimizer "
    "--num-workers 0 --log-interval 1 --split 90,5,5 --eval-iters 0 --eval-interval 100"
).split()
"""The recorded llama model, without its length and data."""
SAME_WEIGHTS = [word for word in TINY if word != "--use-cpu-initialization"]
"""The tiny model, with initial weights that do not depend on the layout."""
SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 "
    "--lr 1e-2 --log-interval 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 32 --attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
    "--split 80,20,0 --eval-interval 1 --eval-iters 2"
).split()
"""A smaller GPT-2, with its data."""

LAYOUTS = {
    "one": (1, ""),
    "dp2": (2, ""),
    "dp2plain": (2, "--no-use-distributed-optimizer"),
    "tp2pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
"""Number of ranks and flags of some layouts."""
NULL = "--tokenizer-type NullTokenizer --vocab-size 90".split()


Rows = list[dict[str, Any]]


def mock_data() -> list[str]:
    """Return flags of made-up samples whose documents end in the middle of sequences."""
    return "--mock-data --tokenizer-type NullTokenizer --vocab-size 2000".split()


def train_on_ranks(
    flags: str | Sequence[str],
    *,
    ranks: int = 1,
    save: Path,
    task: Task | TaskChoice = TEXT,
    defaults: Mapping[str, Any] | None = None,
    prepare: Callable[[Run], None] | None = None,
) -> tuple[int, list[dict[str, Any]]]:
    """Train on forked ranks; return the exit code and the rows of ``metrics.jsonl``.

    No chart is drawn. Runs with the same made-up data shuffle its samples once.
    """
    device = select()
    words = [*split(flags), "--nproc-per-node", str(ranks), "--save", str(save)]
    if "--mock-data" in words and "--data-cache-path" not in words:
        words += ["--data-cache-path", _shuffled()]
    parsed = parse_args(
        words,
        task,
        world_size=0,
        device=device.kind,
        checkpoint_config=stored_config(read_words(words, task)),
        defaults=defaults,
    )
    config, assets = preflight(parsed.config, parsed.task.preflight)
    loaded = parsed.task.loaded()
    run = partial(pretrain, loaded, config, device=device, assets=assets, prepare=prepare)
    # Collections of later tests need not look at what this process has imported by now.
    gc.collect()
    gc.freeze()
    with mock.patch.object(loss_plot.LossPlot, "close"):
        code = fork_ranks(run, ranks)
    return code, read_metrics(save / "metrics.jsonl")


def train(flags: str | Sequence[str], save: Path, ranks: int = 1, **options: Any) -> Rows:
    """Return all rows of a run that ends well."""
    code, rows = train_on_ranks(flags, ranks=ranks, save=save, **options)
    assert code == 0
    return rows


def train_steps(flags: str | Sequence[str], save: Path, ranks: int = 1, **options: Any) -> Rows:
    """Return the rows of the training steps of a run that ends well."""
    return training_rows(train(flags, save, ranks, **options))


def curve(
    flags: str | Sequence[str], save: Path, ranks: int = 1, **options: Any
) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each step of a run that ends well."""
    rows = train_steps(flags, save, ranks, **options)
    return [(row["lm loss"], row["grad_norm"]) for row in rows]


@functools.cache
def _shuffled() -> str:
    """Return a folder for the order of made-up samples, which goes with this process.

    megatron-core shuffles some two million of them for each split, which takes most of the time of
    a short run.
    """
    folder = tempfile.TemporaryDirectory(prefix="made_up_order_")
    atexit.register(folder.cleanup)
    return folder.name


def training_rows(rows: Rows) -> Rows:
    return [row for row in rows if row["kind"] == "train"]


def split(words: str | Sequence[str]) -> Sequence[str]:
    return words.split() if isinstance(words, str) else words


def parsed(
    words: str | Sequence[str],
    task: Any = TEXT,
    *,
    ranks: int = 1,
    device: str = "cpu",
    **options: Any,
) -> ParsedArgs:
    return parse_args(split(words), task, world_size=ranks, device=device, **options)


def prepared(
    words: str | Sequence[str], task: Any = TEXT, **options: Any
) -> tuple[Task, RunConfig, Any]:
    """Return the task, the configuration and the assets of a run, by default of forked ranks."""
    found = parsed(words, task, **{"ranks": 0, **options})
    return found.task, *preflight(found.config, found.task.preflight)


def config_of(words: str | Sequence[str], task: Any = TEXT, **options: Any) -> RunConfig:
    return parsed(words, task, **options).config


def errors_of(words: str | Sequence[str], task: Any = TEXT, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parsed(words, task, **options)
    return caught.value.messages


def check_refused(
    words: str | Sequence[str], sentence: str, task: Any = TEXT, **options: Any
) -> None:
    errors = errors_of(words, task, **options)
    assert any(sentence in error for error in errors), errors


def without(words: Sequence[str], *names: str) -> list[str]:
    kept = list(words)
    for name in names:
        at = kept.index(name)
        del kept[at : at + 2]
    return kept


def run_python(
    *words: str, seconds: float = 300.0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository's root, in a process of its own that must end well."""
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def documents(prefix: Path, number: int) -> str:
    """Write a dataset of different documents of 70 tokens, and return its prefix."""
    rng = np.random.default_rng(0)
    with IndexedWriter(str(prefix), optimal_dtype(90)) as writer:
        for _ in range(number):
            writer.add_document(rng.integers(0, 89, size=70), [70])
    return str(prefix)
