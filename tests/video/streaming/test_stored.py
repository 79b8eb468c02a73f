"""The sequence in a checkpoint of a streaming run, and the changes that begin it anew."""

import copy
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.state import CRITIC
from megatron_ext.video.streaming import stored
from megatron_ext.video.streaming.sequence import Replica, StreamingSequence
from megatron_ext.video.streaming.stored import CACHE, PROGRESS, SEQUENCE, StreamingState
from megatron_ext.video.task import VIDEO
from tests.training_runs import config_of
from tests.video.streaming.network import PLAIN, build, clips_of
from tests.video.streaming.runs import flags_of

REPLICA = Replica(seed=1, batch=2, dp_size=3)


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def state_of(
    sequence: StreamingSequence, words: str = "", *, cp: int = 0, tp: int = 0, size: int = 1
) -> StreamingState:
    """Return the state of a run whose critic is nothing, on one of ``size`` x ``size`` ranks."""
    flags = flags_of(Path(), f"--train-iters 1 --prompts-path x {words}", micro=2, batch=2)
    config = config_of(flags, VIDEO, ranks=2 if "parallel" in words else 1)
    groups = SimpleNamespace(dp=group(0, 1), cp=group(cp, size), tp=group(tp, size))
    critic: Any = SimpleNamespace(base=None, chunks=[], optimizer=None, scheduler=None)
    return StreamingState(critic, sequence, SimpleNamespace(pgs=groups), config)  # type: ignore[arg-type]


OF_CRITIC = StreamingState._critic_state


@pytest.fixture(autouse=True)
def no_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamingState, "_critic_state", lambda *_, **__: {CRITIC: {}})
    monkeypatch.setattr(stored, "apply_state", lambda *_, **__: None)


def begun(num_clips: int = 2) -> StreamingSequence:
    sequence = build(PLAIN, replica=REPLICA)
    clips_of(sequence, num_clips)
    return sequence


def saved(state: StreamingState) -> dict[str, Any]:
    """Return what `StreamingState.load` is given of a checkpoint of this state."""
    entries = state.state_to_save({}, with_optimizer=True)
    return {name: getattr(entry, "data", entry) for name, entry in entries.items()}


def loaded(
    content: dict[str, Any], words: str = "", without: tuple[str, ...] = ()
) -> tuple[StreamingState, StreamingSequence, list[str]]:
    sequence = build(PLAIN, replica=REPLICA)
    state = state_of(sequence, words)
    notes = list[str]()
    kept = {name: entry for name, entry in content.items() if name not in without}
    state.load(copy.deepcopy(kept), with_optimizer=True, notes=notes)
    return state, sequence, notes


def test_a_sequence_goes_on_from_what_it_was_when_it_was_saved() -> None:
    """Generate on after the save, which a save in the background may not notice."""
    sequence = begun()
    state = state_of(sequence)
    state.steps = 5
    content = saved(state)
    before = copy.deepcopy(content)
    assert sequence.state is not None
    sequence.state.previous.zero_()
    for pairs in sequence.generator.cache.state_dict()["held"].values():
        for key, value in pairs:
            key.zero_()
            value.zero_()
    for name in (SEQUENCE, CACHE):
        torch.testing.assert_close(content[name], before[name], rtol=0, atol=0)
    again, other, notes = loaded(content)
    assert (again.steps, notes) == (5, [])
    for a, b in zip(clips_of(begun(), 2), clips_of(other, 2), strict=True):
        assert a.number == b.number and torch.equal(a.latents, b.latents)


SEQUENCES = {
    "--latent-size 4 8": "`--latent-size` was [4, 4] and is [4, 8]",
    "--text-length 9": "`--text-length` was 8 and is 9",
    "--chunk-frames 12 --sequence-lengths 30": "`--chunk-frames` was 9 and is 12",
    "--frame-block 1 --sink-frames 1": "`--frame-block` was 3 and is 1",
    "--independent-first-frame --chunk-frames 10": "`--independent-first-frame` was False and is",
}
"""Changes after which a stored sequence cannot go on."""
CACHES = {
    "--window-frames 9": "`--window-frames` was 6 and is 9",
    "--sink-frames 0": "`--sink-frames` was 3 and is 0",
    "--cp-comm-type a2a --context-parallel-size 2": "`--cp-comm-type` was",
}
"""Changes after which frames stay and their keys and values do not."""


@pytest.mark.parametrize("words", SEQUENCES)
def test_other_sizes_begin_a_sequence_behind_all_that_were_begun(words: str) -> None:
    """Go on with sample 6 of the run: three replicas have begun two videos each."""
    _, sequence, notes = loaded(saved(state_of(begun())), words)
    assert sequence.state is None and sequence.coming == (1, 6)
    (note,) = notes
    assert note.startswith(SEQUENCES[words]) and note.endswith("so that new video sequences begin.")


@pytest.mark.parametrize("words", CACHES)
def test_another_window_or_layout_keeps_the_frames(words: str) -> None:
    content = saved(state_of(begun()))
    _, sequence, notes = loaded(content, words)
    assert sequence.state is not None
    assert torch.equal(sequence.state.previous, content[SEQUENCE]["previous"])
    (note,) = notes
    assert note.startswith(CACHES[words])
    assert note.endswith("so that the cache of past frames is made anew.")


def test_what_a_checkpoint_lacks_is_made_anew() -> None:
    content = saved(state_of(begun()))
    _, sequence, notes = loaded(content, without=(SEQUENCE,))
    assert sequence.state is None and sequence.coming == (1, 6)
    assert notes == [
        "The number of data-parallel replicas has changed, so that new video sequences begin."
    ]
    _, sequence, notes = loaded(content, without=(CACHE,))
    assert sequence.state is not None
    assert notes == ["The layout has changed, so that the cache of past frames is made anew."]
    # Checkpoints of earlier versions do not say whether the first frame is a block of its own.
    older = copy.deepcopy(content)
    del older[PROGRESS]["settings"]["--independent-first-frame"]
    _, sequence, notes = loaded(older)
    assert sequence.state is not None and notes == []
    _, sequence, notes = loaded(older, "--independent-first-frame --chunk-frames 10")
    assert sequence.state is None and len(notes) == 1
    # A run that was saved before its first sequence has no cache to lose.
    empty = saved(state_of(build(PLAIN, replica=REPLICA)))
    _, sequence, notes = loaded(empty, "--window-frames 9")
    assert sequence.state is None and notes == [] and sequence.coming == (0, 0)


def test_weights_that_the_critic_lacks_are_told_first() -> None:
    state = state_of(build(PLAIN, replica=REPLICA), "--window-frames 9")
    state._left_out = ["Some weights of the critic are left out."]
    notes = ["before"]
    state.load(saved(state_of(begun())), with_optimizer=True, notes=notes)
    assert notes[:2] == ["before", "Some weights of the critic are left out."] and len(notes) == 3


def test_one_rank_of_a_replica_writes_the_sequence_and_each_its_cache() -> None:
    sequence = begun()
    entries = [
        state_of(sequence, cp=cp, tp=tp, size=2).state_to_save({}, with_optimizer=True)
        for cp, tp in product(range(2), repeat=2)
    ]
    assert sorted(entry[SEQUENCE].replica_id for entry in entries) == [0, 1, 2, 3]
    assert len({entry[SEQUENCE].unique_key for entry in entries}) == 1
    assert len({entry[CACHE].unique_key for entry in entries}) == 4


@pytest.mark.parametrize("is_loading", [False, True])
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_the_critics_optimizer_is_saved_and_loaded_where_that_of_the_run_is(
    with_optimizer: bool, is_loading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read the schedule of its learning rate from what was loaded, as it has no tensors."""
    asked: list[Any] = []

    def sharded(chunks: Any, optimizer: Any, **options: Any) -> dict[str, Any]:
        asked.append((chunks, optimizer, options))
        return {"model": "weights"}

    prefixes: list[str] = []
    monkeypatch.setattr(stored, "sharded_state", sharded)
    monkeypatch.setattr(
        stored, "add_prefix_for_sharding", lambda _, prefix: prefixes.append(prefix)
    )
    state = state_of(build(PLAIN, replica=REPLICA))
    schedule = SimpleNamespace(state_dict=lambda: "schedule")
    state._critic = SimpleNamespace(  # type: ignore[assignment]
        base=None, chunks=["critic"], optimizer="optimizer", scheduler=schedule
    )
    found = OF_CRITIC(state, {"a": 1}, with_optimizer=with_optimizer, is_loading=is_loading)
    optimizer = "optimizer" if with_optimizer else None
    assert asked == [(["critic"], optimizer, {"metadata": {"a": 1}, "is_loading": is_loading})]
    saved = {"opt_param_scheduler": "schedule"} if with_optimizer and not is_loading else {}
    assert found == {CRITIC: {"model": "weights", **saved}} and prefixes == ["critic."]


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_the_critic_is_restored_with_or_without_its_optimizer(
    with_optimizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the critic have adapters, whose frozen weights are put back before they are loaded."""
    asked: list[Any] = []
    monkeypatch.setattr(stored, "put_back_base", lambda *given: asked.append(("base", given)))
    monkeypatch.setattr(stored, "apply_state", lambda *x, **named: asked.append((x, named)))
    state = state_of(build(PLAIN, replica=REPLICA))
    content = {**saved(state_of(begun())), CRITIC: "of the critic"}
    state._critic = SimpleNamespace(  # type: ignore[assignment]
        base="base", chunks=["critic"], optimizer="optimizer", scheduler="schedule"
    )
    state.load(content, with_optimizer=with_optimizer, notes=[])
    given = ("of the critic", ["critic"], "optimizer", "schedule")
    assert asked == [
        ("base", ("of the critic", ["critic"])), (given, {"with_optimizer": with_optimizer})
    ]  # fmt: skip
