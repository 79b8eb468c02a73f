from __future__ import annotations

from itertools import chain, islice

import pytest

from megatron_ext.data.video.geometry import Bucket, sizes
from megatron_ext.data.video.sampler import BucketSteps, BucketStepSampler, Members
from megatron_ext.errors import ConfigError, DataError

SMALL, LONG = Bucket("256px", 1, 256, 256), Bucket("256px", 17, 192, 336)


def steps(mixed: bool = False, pipeline_size: int = 1) -> BucketSteps:
    members = {SMALL: Members(range(50), 4), LONG: Members(range(50, 77), 2)}
    return BucketSteps(members, 2, 3, 7, mixed, pipeline_size)


@pytest.mark.parametrize("mixed", [False, True])
def test_criterion_19_ranks_are_disjoint_equal_and_resume_exactly(mixed: bool) -> None:
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
    for rank in (0, 1):
        whole = list(islice(BucketStepSampler(steps(mixed), rank, 0), 30))
        assert list(islice(BucketStepSampler(steps(mixed), rank, 4), 18)) == whole[12:]


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
