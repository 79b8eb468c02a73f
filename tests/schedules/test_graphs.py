"""Steps with CUDA graphs, run on the CPU: what is replayed when, and that nothing else changes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

from megatron_ext.config.precision import CudaGraphConfig
from megatron_ext.errors import ConfigError
from megatron_ext.schedules.orders import build_plan
from megatron_ext.schedules.runtime import most_in_flight, step_graphs
from megatron_ext.train.run import Run
from tests.graph_stand_in import CpuGraph, graphs_on_a_cpu
from tests.training_runs import TINY, curve, mock_data

STEPS, MICROBATCHES = 3, 4
SIZE = f"--eod-mask-loss --train-iters {STEPS} --global-batch-size 8"
FLAGS = [*TINY, *mock_data(), *SIZE.split()]
PIPELINE = "--pipeline-model-parallel-size 2"
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"


def keep_replays(run: Run, *, folder: Path) -> None:
    train, steps = run.runner.train, list[list[int]]()

    def kept(*args: Any) -> Any:
        before = len(CpuGraph.replays)
        result = train(*args)
        steps.append(CpuGraph.replays[before:])
        (folder / f"{run.context.rank}.json").write_text(json.dumps(steps))
        return result

    run.runner.train = kept  # type: ignore[method-assign]


def losses_and_norms(words: str, ranks: int, folder: Path) -> list[tuple[float, float]]:
    folder.mkdir(parents=True)
    prepare = partial(keep_replays, folder=folder)
    return curve([*FLAGS, *words.split()], folder / "run", ranks, prepare=prepare)


def check(words: str, ranks: int, folder: Path) -> list[list[list[int]]]:
    """Check that graphs change no bit of a run, and return each rank's replays of each step."""
    without = losses_and_norms(words, ranks, folder / "without")
    with graphs_on_a_cpu():
        recorded = losses_and_norms(f"{words} --cuda-graph-impl local", ranks, folder / "with")
    assert len(recorded) == STEPS
    assert recorded == without
    files = [folder / "with" / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files]


def orders(replays: list[int], slots: list[int], layers: int) -> list[int]:
    """Return replays in megatron-core's notation: c + 1 for chunk c's forward pass, else -(c + 1).

    `torch.cuda.make_graphed_callables` makes the graphs of the layers' forward passes, and then
    those of their backward passes, for each slot of each chunk.
    """
    found, free, held = list[int](), set(range(sum(slots))), dict[int, list[int]]()
    chunk_of = [chunk for chunk, count in enumerate(slots) for _ in range(count)]
    assert len(replays) % layers == 0
    for first in range(0, len(replays), layers):
        slot, number = divmod(replays[first], 2 * layers)
        chunk, forward = chunk_of[slot], number == 0
        ascending = list(range(layers)) if forward else list(range(2 * layers - 1, layers - 1, -1))
        assert replays[first : first + layers] == [2 * layers * slot + i for i in ascending]
        if forward:
            free.remove(slot)
            held.setdefault(chunk, []).append(slot)
        else:
            assert held[chunk].pop(0) == slot  # the micro-batch that came first
            free.add(slot)
        found.append(chunk + 1 if forward else -(chunk + 1))
    assert len(free) == sum(slots)
    return found


def core_order(
    rank: int, chunks: int, *, stages: int = 2, microbatches: int = MICROBATCHES
) -> list[int]:
    later = stages - 1 - rank
    warmup = later if chunks == 1 else later * 2 + (chunks - 1) * stages
    group = microbatches if chunks == 1 else stages
    table = get_schedule_table(microbatches, chunks, group)
    first = min(warmup, microbatches * chunks)
    return convert_schedule_table_to_order(first, chunks, table)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "chunks", [pytest.param(1, marks=pytest.mark.slow, id="1f1b"), pytest.param(2, id="virtual")]
)
def test_pipelines_replay_in_the_order_of_core(chunks: int, tmp_path: Path) -> None:
    words = PIPELINE if chunks == 1 else f"{PIPELINE} {CHUNKS} --hidden-dropout 0.1"
    schedule = "1f1b" if chunks == 1 else "interleaved"
    plan = build_plan(schedule, pipeline_size=2, num_microbatches=MICROBATCHES, num_chunks=chunks)
    for rank, steps in enumerate(check(words, 2, tmp_path)):
        slots = most_in_flight(plan.ranks[rank], plan.placement)
        assert steps[0] == []
        for replays in steps[1:]:
            assert orders(replays, slots, layers=4 // (2 * chunks)) == core_order(rank, chunks)


def test_one_stage_replays_one_microbatch_at_a_time(tmp_path: Path) -> None:
    words = "--reset-attention-mask --hidden-dropout 0.1 --eval-iters 1 --eval-interval 1"
    (steps,) = check(words, 1, tmp_path)
    passes = [*range(4), *range(7, 3, -1)]
    assert steps == [[], *[passes * MICROBATCHES] * (STEPS - 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "--tensor-model-parallel-size 2"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --hidden-dropout 0.1 "
            "--attention-dropout 0.1 --bf16"),
        (2, "--context-parallel-size 2 --cp-comm-type a2a"),
        (2, "--overlap-grad-reduce --overlap-param-gather --bf16"),
        (4, f"{PIPELINE} --overlap-grad-reduce --overlap-param-gather"),
        (1, "--mtp-num-layers 1"),
    ],
)  # fmt: skip
def test_graphs_change_nothing_on_other_layouts(words: str, ranks: int, tmp_path: Path) -> None:
    for steps in check(words, ranks, tmp_path):
        assert all(steps[1:])


@pytest.mark.slow
def test_a_batch_that_grows_adds_graphs(tmp_path: Path) -> None:
    """Two micro-batches in flight from the second step on, where there was one."""
    words = f"{PIPELINE} --rampup-batch-size 1 3 2 --micro-batch-size 1 --global-batch-size 4"
    first, _ = check(words, 2, tmp_path)
    assert [len(set(step)) for step in first] == [0, 4, 8]


@pytest.mark.parametrize(("chunks", "microbatches"), [(1, 2), (1, 8), (2, 8)])
def test_microbatches_in_flight(chunks: int, microbatches: int) -> None:
    schedule = "1f1b" if chunks == 1 else "interleaved"
    plan = build_plan(schedule, pipeline_size=4, num_microbatches=microbatches, num_chunks=chunks)
    for rank, actions in enumerate(plan.ranks):
        now, most = [0] * chunks, [0] * chunks
        for entry in core_order(rank, chunks, stages=4, microbatches=microbatches):
            now[abs(entry) - 1] += 1 if entry > 0 else -1
            most = list(map(max, most, now))
        assert most_in_flight(actions, plan.placement) == most


def test_a_model_of_other_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="records the TransformerLayers of a model's `decoder`"):
        step_graphs(CudaGraphConfig(cuda_graph_impl="local"), "cuda", [torch.nn.Linear(1, 1)])
