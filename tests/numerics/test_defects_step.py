"""Defects of megatron-core's schedules (docs/numerics.md), and what we do instead."""

import pytest

from megatron_ext.extras.audit import reproduce_losses as losses
from megatron_ext.extras.audit import reproduce_schedules as schedules
from megatron_ext.layers.transformer_config import build_transformer_config
from tests.numerics.reproductions import RELEASE, check_ratio
from tests.training_runs import TINY, config_of, errors_of, mock_data


def test_d15_stock_swaps_batched_messages_between_two_stages() -> None:
    check_ratio(schedules.batched_messages, {"0.16": 0.98302, "0.19": 0.98302})


def test_d15_d16_stock_is_exact_with_neither() -> None:
    check_ratio(schedules.neither, {"0.16": 1.0, "0.19": 1.0}, rel=1e-6)


def test_d16_stock_frees_outputs_that_are_being_sent() -> None:
    """A race: most steps lose it."""
    found = schedules.deallocated_outputs()
    wrong = not abs(found.ratio - 1) <= 1e-6
    assert wrong == {"0.16": True, "0.19": False}[RELEASE], found


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("chunks", ["", "--num-virtual-stages-per-pipeline-rank 2"])
@pytest.mark.parametrize("core", ["", "core-"])
def test_d15_d16_no_run_has_either_configuration(stages: int, chunks: str, core: str) -> None:
    """Batched messages of virtual chunks are left to our own runtime, which does not use them."""
    schedule = core + ("interleaved" if chunks else "1f1b")
    words = f"--pipeline-model-parallel-size {stages} {chunks} --pipeline-schedule {schedule} "
    words += "--train-iters 1 --num-layers 8"
    made = build_transformer_config(config_of([*TINY, *mock_data(), *words.split()], ranks=stages))
    assert not (made.overlap_p2p_comm and made.deallocate_pipeline_outputs)
    if core and chunks:
        assert not made.batch_p2p_comm


def test_d20_stock_takes_a_flag_for_a_size_of_a_group() -> None:
    """`collect_non_loss_data`, False, is the factor of the loss in 0.16."""
    check_ratio(losses.d20, {"0.16": 0.0, "0.19": 1.0})


def test_d20_hybrid_context_parallelism_is_refused() -> None:
    words = [*TINY, *mock_data(), "--train-iters", "1", "--hybrid-context-parallel"]
    (error,) = errors_of(words)
    assert "`--hybrid-context-parallel`" in error and "refused here" in error
