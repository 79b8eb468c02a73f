"""Folders of made-up runs: rows of metrics, events of faults, checkpoints and post-mortems."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.extras.report.tables import changed_settings
from megatron_ext.train.reporting.files import MetricsFile, as_json
from tests.training_runs import config_of, mock_data

BEGAN = 1_790_000_000.0
"""When the launcher of the made-up runs started, in seconds since the epoch."""
Row = dict[str, Any]
STEP = {
    "data": 0.02,
    "forward": 0.3,
    "backward": 0.5,
    "bubble": 0.1,
    "reduce": 0.05,
    "update": 0.03,
}
"""Seconds of one step by phase; a step takes 1 second."""
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 "
    "--train-iters 400 --eval-iters 2 --eval-interval 50 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --clip-grad 1.0 --save run --save-interval 100"
).split()


def time_row(
    begin: float, end: float, before: int, iteration: int, *, generation: int = 0,
    launched_at: float = BEGAN, **seconds: float,
) -> Row:  # fmt: skip
    row: Row = {"kind": "time", "iteration": iteration, "before": before, "from": begin, "to": end}
    row |= {"launched_at": launched_at, "generation": generation}
    return row | {f"seconds/{name}": value for name, value in seconds.items()}


def steps_of(count: int) -> dict[str, float]:
    return {name: count * value for name, value in STEP.items()}


def train_row(iteration: int, total: int, random: np.random.Generator) -> Row:
    loss = 2.2 + 5.4 * math.exp(-iteration / (total / 6)) + 0.08 * random.standard_normal()
    norm = 0.4 + 2.0 * math.exp(-iteration / (total / 15)) + 0.05 * abs(random.standard_normal())
    rate = 1e-3 * min(1.0, iteration / (total / 20)) * (0.55 + 0.45 * math.cos(
        math.pi * iteration / total))  # fmt: skip
    row: Row = {"kind": "train", "iteration": iteration, "consumed_samples": 16 * iteration}
    row |= {"lm loss": loss, "learning_rate": rate, "grad_norm": norm, "loss_scale": 1.0}
    row |= {"global_batch_size": 16, "seconds_per_iteration": 1.0}
    row |= {"tokens_per_second": 1024.0 + 20 * random.standard_normal(), "skipped_iterations": 0}
    return row | {"train/loss": loss, "train/lr": rate, "train/grad_norm": norm}


def launched_row(time: float, iteration: int, generation: int) -> Row:
    row: Row = {"kind": "launched", "iteration": iteration, "time": time, "launched_at": BEGAN}
    row |= {"generation": generation, "world_size": 4, "num_iterations": 400, "host": "node-07"}
    row |= {"device": "cpu", "command": "python pretrain_gpt.py --num-layers 4 --save run"}
    versions = {"megatron_ext": "0.1.0", "megatron-core": "0.16.1", "torch": "2.13.0"}
    flags = [*FLAGS, *mock_data()]
    given = {word.removeprefix("--").replace("-", "_") for word in flags if word[:2] == "--"}
    settings = changed_settings(config_of(flags, ranks=4), given)
    return row | {"versions": versions, "commit": "7b714f7c0ffee", "settings": settings}


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(as_json, rows)), encoding="utf-8")


def faulty_run(folder: Path) -> float:
    """Write the folder of a run of 400 steps with three faults, and return its wall time.

    It starts for 5 s and takes a second for each step, reports every 10 steps, saves every 100 for
    2 s, and evaluates every 50 for 1 s.
    """
    random = np.random.default_rng(1)
    rows: list[Row] = [launched_row(BEGAN + 3, 0, 0)]
    events: list[Row] = []
    rows.append(time_row(BEGAN, BEGAN + 5, 0, 0, start=4.8, other=0.2))
    now, generation, step = BEGAN + 5, 0, 0
    faults = {143: ("SIGKILL", 2, 0.06, "backward of micro-batch 3, stage 1", "memory"),
              217: ("hang", 0, 2.1, "all-reduce 812 of the data-parallel group", "peer"),
              305: ("exception", 3, 0.05, "OSError: disk is full", "checkpoint")}  # fmt: skip
    while step < 400:
        begun, seconds, before = now, steps_of(10), step
        ahead = next((at for at in faults if before < at <= before + 10), None)
        if ahead is not None:
            cause, rank, seen_after, where, source = faults.pop(ahead)
            now += (ahead - before) * 1.0 + seen_after
            events.append(
                {"time": now, "kind": "fault", "rank": rank, "cause": cause, "where": where,
                 "iteration": ahead, "seen_after": seen_after, "generation": generation}
            )  # fmt: skip
            restored = 300 if source == "checkpoint" else ahead - 1
            generation += 1
            events.append(
                {"time": now + 1.5, "kind": "restart", "generation": generation,
                 "restored_iteration": restored, "restored_from": source, "seconds": 1.5,
                 "steps_lost": ahead - restored, "world_size": 4}
            )  # fmt: skip
            rows = [r for r in rows if r["kind"] != "train" or r["iteration"] <= restored]
            rows.append(launched_row(now + 0.9, restored, generation))
            rows.append({"kind": "resumed", "iteration": restored})
            start = time_row(now + 0.8, now + 1.5, restored, restored, start=0.7,
                             generation=generation)  # fmt: skip
            rows.append(start)
            now, step = now + 1.5, restored
            rest = 10 - restored % 10
            seconds, begun, before = steps_of(rest), now, step
            now += rest
            step += rest
        else:
            now, step = now + 10, step + 10
        rows.append(train_row(step, 400, random))
        if step % 50 == 0:
            seconds["evaluate"] = 1.0
            now += 1.0
            rows.append(
                {"kind": "evaluation", "split": "validation", "iteration": step, "final": False,
                 "consumed_samples": 16 * step, "lm loss": rows[-1]["lm loss"] + 0.1}
            )  # fmt: skip
        if step % 100 == 0:
            seconds["save"] = 2.0
            now += 2.0
            events.append(
                {"time": now, "kind": "saved", "iteration": step, "seconds": 2.0, "stall": 0.1,
                 "asynchronous": True}
            )  # fmt: skip
            checkpoint(folder, step)
        rows.append(time_row(begun, now, before, step, generation=generation, **seconds))
    events.append(
        {"time": BEGAN + 200, "kind": "spike", "iteration": 185, "loss": 9.1, "usual": 3.2,
         "samples": [2960, 2961, 2962], "generation": 1}
    )  # fmt: skip
    ended: Row = {"kind": "ended", "iteration": 400, "time": now + 0.5, "launched_at": BEGAN}
    rows.append(ended | {"exit_code": 0, "reason": "finished"})
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "faults.jsonl", events)
    config = config_of([*FLAGS, *mock_data()], ranks=4)
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    return now + 0.5 - BEGAN


def checkpoint(folder: Path, iteration: int) -> None:
    """Write a folder that looks like a whole checkpoint."""
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"x" * 12345)
    files = {"__0_0.distcp": {"bytes": 12345, "blake2b": "0"}}
    (path / "manifest.json").write_text(json.dumps({"version": 1, "files": files}))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def long_run(folder: Path, count: int) -> None:
    """Write the metrics of a run of many steps, of which each one is reported."""
    random = np.random.default_rng(2)
    rows: list[Row] = []
    for step in range(1, count + 1):
        rows.append(train_row(step, count, random))
        rows.append(time_row(BEGAN + step - 1, BEGAN + step, step - 1, step, **STEP))
    write_lines(folder / "metrics.jsonl", rows)


def resumed(folder: Path, iteration: int) -> None:
    """Open the metrics as a run does that goes on after ``iteration``."""
    MetricsFile(folder, iteration).close()
