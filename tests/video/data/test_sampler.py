from __future__ import annotations

from itertools import chain

import pytest

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.data.geometry import Bucket, sizes
from megatron_ext.video.data.sampler import BucketSteps, Members

SMALL, LONG = Bucket("256px", 1, 256, 256), Bucket("256px", 17, 192, 336)


def steps(mixed: bool = False, pipeline_size: int = 1) -> BucketSteps:
    members = {SMALL: Members(range(50), 4), LONG: Members(range(50, 77), 2)}
    return BucketSteps(members, 2, 3, 7, mixed, pipeline_size)


@pytest.mark.parametrize("mixed", [False, True])
def test_ranks_are_disjoint_and_equal(mixed: bool) -> None:
    table = {(256, 256), (224, 288), (208, 320), (192, 336), (176, 368), (160, 400)}
    assert set(sizes("256px")) == table | {(w, h) for h, w in table}
    plan = steps(mixed)
    for epoch in range(2):
        seen: list[int] = []
        for step in range(plan.steps_per_epoch):
            by_rank = [plan.microbatches(epoch * plan.steps_per_epoch + step, r) for r in (0, 1)]
            assert [len(rank) for rank in by_rank] == [3, 3]
            for bucket, clips in chain(*by_rank):
                members = plan.buckets[bucket]
                assert len(clips) == members.micro_batch_size and set(clips) <= set(members.clips)
                seen += clips
        assert len(seen) == len(set(seen))


def test_one_bucket_for_each_global_step_and_the_rest_is_counted() -> None:
    plan = steps()
    for step in range(2 * plan.steps_per_epoch):
        assert len({b for r in (0, 1) for b, _ in plan.microbatches(step, r)}) == 1
    assert plan.steps_per_epoch == 50 // 24 + 27 // 12
    assert plan.left_out == {SMALL: 2, LONG: 3}
    assert {plan.num_samples(step) for step in range(plan.steps_per_epoch)} == {24, 12}


def test_epochs_differ() -> None:
    plan = steps()
    assert plan.microbatches(0, 0) != plan.microbatches(plan.steps_per_epoch, 0)


def test_mixed_refuses_pipeline_stages_and_too_few_clips_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Mixed buckets need .* 1, but it is 2"):
        steps(mixed=True, pipeline_size=2)
    with pytest.raises(DataError, match=r"No bucket holds the clips of one step"):
        BucketSteps({SMALL: Members(range(5), 4)}, 2, 1, 0)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (1, 3), (2, 2), (4, 1)])
def test_an_epoch_sees_every_clip_once_but_those_left_out(
    num_ranks: int, num_microbatches: int, mixed: bool
) -> None:
    members = {SMALL: Members(range(50), 4), LONG: Members(range(50, 77), 2)}
    plan = BucketSteps(members, num_ranks, num_microbatches, 3, mixed)
    for epoch in range(3):
        seen = [
            clip
            for step in range(plan.steps_per_epoch)
            for rank in range(num_ranks)
            for _, clips in plan.microbatches(epoch * plan.steps_per_epoch + step, rank)
            for clip in clips
        ]
        assert len(set(seen)) == len(seen)
        # Mixed steps also leave out whole micro-batches that fill no step.
        whole_left_out = 77 - len(seen) - sum(plan.left_out.values())
        assert 0 <= whole_left_out < (num_ranks * num_microbatches * 4 if mixed else 1)


def test_what_an_epoch_leaves_out_changes() -> None:
    plan = BucketSteps({SMALL: Members(range(10), 4)}, 1, 1, 3)
    left = set()
    for epoch in range(20):
        seen = {
            c
            for step in (0, 1)
            for _, clips in plan.microbatches(2 * epoch + step, 0)
            for c in clips
        }
        left |= set(range(10)) - seen
    assert plan.left_out == {SMALL: 2} and left == set(range(10))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("first", [0, 1, 3, 4, 9, 25])
def test_resumes_at_any_step_in_a_new_process(first: int, mixed: bool) -> None:
    """Nothing but the number of steps is needed, also in the middle of a later epoch."""
    whole = [steps(mixed).microbatches(step, 1) for step in range(30)]
    fresh = steps(mixed)
    assert [fresh.microbatches(step, 1) for step in range(first, 30)] == whole[first:]


def test_the_order_of_the_mapping_decides_nothing() -> None:
    members = {SMALL: Members(range(50), 4), LONG: Members(range(50, 77), 2)}
    turned = BucketSteps(dict(reversed(members.items())), 2, 3, 7)
    assert all(turned.microbatches(s, 0) == steps().microbatches(s, 0) for s in range(10))


def test_seeds_differ_and_buckets_alternate() -> None:
    members = {SMALL: Members(range(400), 2), LONG: Members(range(400, 800), 2)}
    plan, other = (BucketSteps(members, 2, 1, seed) for seed in (1, 2))
    assert plan.microbatches(0, 0) != other.microbatches(0, 0)
    kinds = [plan.microbatches(step, 0)[0][0] for step in range(plan.steps_per_epoch)]
    assert len(kinds) == 200 and kinds.count(SMALL) == 100
    changes = sum(a != b for a, b in zip(kinds, kinds[1:], strict=False))
    # A shuffle of 100 of each changes about 100 times, with a standard deviation of 7.
    assert 70 < changes < 130


def test_micro_batches_of_each_bucket_have_its_size() -> None:
    plan = steps()
    sizes = {b: {len(c)} for step in range(9) for b, c in plan.microbatches(step, 0)}
    assert sizes == {SMALL: {4}, LONG: {2}}
    mixed = [steps(mixed=True).microbatches(step, rank) for step in range(3) for rank in (0, 1)]
    assert {b: {len(c)} for rank in mixed for b, c in rank} == {SMALL: {4}, LONG: {2}}
    assert len({b for b, _ in mixed[0] + mixed[1]}) == 2
    assert all(plan.num_samples(step) in (24, 12) for step in range(9))
