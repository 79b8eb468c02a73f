"""Values of streaming's flags exactly at their limits, and what flags leave to each other."""

import dataclasses
from typing import Any

import pytest

from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import CodecConfig
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.networks.wan.config import SIZES
from megatron_ext.video.streaming.config import DEFAULT_FPS, StreamingConfig, StreamingSampleConfig
from megatron_ext.video.streaming.prepare import _check_latents, _check_layout, _check_sequences
from megatron_ext.video.streaming.rules import (
    check_options,
    sample_errors,
    streaming_errors,
    teacher_errors,
    teacher_sizes,
)

USUAL = StreamingConfig(prompts_path="p")


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        ({"max_new_frames": 21}, {"max_new_frames": 24}),
        ({"sequence_lengths": (21,)}, {"sequence_lengths": (20,)}),
        ({"recache_frames": 21}, {"recache_frames": 24}),
        ({"min_timestep": 980.0}, {"min_timestep": 980.5}),
        ({"denoising_steps": (1000, 999)}, {"denoising_steps": (999, 999)}),
        ({"window_frames": 6}, {"window_frames": 5}),
        (
            {"train_first_chunk": False, "sequence_lengths": (39, 57)},
            {"train_first_chunk": False, "sequence_lengths": (38, 57)},
        ),
        (
            {"independent_first_frame": True, "chunk_frames": 4, "recache_frames": 3,
             "min_new_frames": 3, "max_new_frames": 3},
            {"independent_first_frame": True, "chunk_frames": 1, "recache_frames": 3,
             "min_new_frames": 3, "max_new_frames": 3},
        ),
    ],
)  # fmt: skip
def test_limits_may_be_reached_and_not_passed(taken: Any, refused: Any) -> None:
    check_options(StreamingConfig(**taken))
    name = next(key for key in reversed(refused) if refused[key] != taken[key])
    name = "train_first_chunk" if "train_first_chunk" in refused else name
    with pytest.raises(ConfigError, match=f"`--{name.replace('_', '-')}` "):
        check_options(StreamingConfig(**refused))


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"teacher_pipeline_model_parallel_size": 2, "distribution_loss": "sid"}, ["sid"]),
        ({"teacher_tensor_model_parallel_size": 1, "distribution_loss": "sid"}, ["sid"]),
        ({"ts_schedule_max": True, "same_exit_across_blocks": False}, ["ts-schedule-max"]),
        ({"ts_schedule": True, "same_exit_across_blocks": False}, ["ts-schedule"]),
        ({"ts_schedule_max": True, "ts_schedule": True}, []),
        ({"sid_alpha": 0.5, "distribution_loss": "sid"}, []),
        ({"negative_prompt": "blur", "guidance_scale": 1.5}, []),
        ({"chunk_frames": 1, "encode_first_frame": False}, []),
        ({"last_step_only": True}, []),
    ],
)
def test_flags_without_effect_are_those_of_these_pairs(changes: Any, flags: list[str]) -> None:
    errors = streaming_errors(StreamingConfig(prompts_path="p", **changes))
    assert len(errors) == len(flags)
    for error, flag in zip(errors, flags, strict=True):
        assert flag in str(error)


def test_captions_switch_at_the_last_block_at_the_latest() -> None:
    """Sample 12 frames, whose last block begins at frame 9."""
    sample = SampleConfig(sample_texts=["a"])
    for frame, fits in ((1, True), (9, True), (10, False), (0, False)):
        own = StreamingSampleConfig(12, ["b"], frame)
        assert (sample_errors(own, sample, USUAL) == []) is fits, frame
    # A switch in the middle of an odd number of blocks of one frame comes after the middle.
    single = StreamingConfig(frame_block=1, sequence_lengths=(3, 5))
    own = StreamingSampleConfig(None, ["b"])
    assert (own.num_frames(single), own.switch_frame(single)) == (5, 3)
    assert DEFAULT_FPS == 16


def test_networks_share_channels_and_text_and_have_their_own_other_sizes() -> None:
    streaming = StreamingConfig(
        generator_size="small", critic_size="tiny", teacher_size="mini", text_features=48
    )
    for role, name in (("generator", "small"), ("critic", "tiny"), ("teacher", "mini")):
        sizes = streaming.sizes(role)  # type: ignore[arg-type]
        assert (sizes.channels, sizes.text_width) == (SIZES["small"].channels, 48)
        assert sizes.hidden_size == SIZES[name].hidden_size
        described = streaming.described(RunConfig().model, role)  # type: ignore[arg-type]
        assert described.hidden_size == SIZES[name].hidden_size
    assert not streaming.starts_others
    assert StreamingConfig(critic_checkpoint="c").starts_others
    assert StreamingConfig(teacher_checkpoint="t").starts_others
    # Lists, as a file of flags has them, equal the tuples of the command line.
    lists: dict[str, Any] = {"latent_size": [4, 6], "sequence_lengths": [27], "switch_frames": [9]}
    tuples = {name: tuple(value) for name, value in lists.items()}
    given = StreamingConfig(**lists, denoising_steps=[1000, 500])  # type: ignore[arg-type]
    assert given == StreamingConfig(**tuples, denoising_steps=(1000, 500))


def test_defaults_are_those_of_longlive() -> None:
    usual = StreamingConfig()
    lengths = (usual.chunk_frames, usual.min_new_frames, usual.max_new_frames, usual.recache_frames)
    assert lengths == (21, 18, 18, 21) and usual.sequence_lengths == (240,)
    assert (usual.frame_block, usual.window_frames, usual.sink_frames) == (3, 12, 3)
    assert (usual.generator_interval, usual.guidance_scale, usual.critic_clip_grad) == (5, 4, 10)
    assert usual.denoising_steps == (1000, 750, 500, 250) and usual.warp_denoising_steps
    assert (usual.timestep_shift, usual.min_timestep, usual.max_timestep) == (5, 20, 980)
    assert (usual.distribution_loss, usual.denoising_loss, usual.sid_alpha) == ("dmd", "flow", 1)
    assert usual.sink_at_switch == "rebuild" and usual.train_first_chunk and usual.two_phase
    assert usual.encode_first_frame and usual.decode_history and usual.same_exit_across_blocks
    off = (usual.ts_schedule, usual.ts_schedule_max, usual.last_step_only, usual.context_noise)
    assert not any(off) and not usual.context_noise_from_table


def layout(tp: int = 1, cp: int = 1, world: int = 1, **others: Any) -> ParallelConfig:
    sizes = {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
    return ParallelConfig(**sizes, world_size=world, **others)


def teacher(tensor: int | None = None, stages: int = 1, **others: Any) -> StreamingConfig:
    return StreamingConfig(
        teacher_tensor_model_parallel_size=tensor,
        teacher_pipeline_model_parallel_size=stages,
        **{"latent_size": (4, 4), **others},
    )


@pytest.mark.parametrize(
    ("streaming", "parallel", "said"),
    [
        # The teacher has two blocks, four heads and four tokens in a frame.
        (teacher(stages=2), layout(world=2), []),
        (teacher(tensor=4), layout(world=4), []),
        (teacher(tensor=4), layout(tp=2, world=4, sequence_parallel=True), []),
        (teacher(tensor=4, latent_size=(4, 6)), layout(tp=2, world=4), []),
        (teacher(tensor=4, latent_size=(4, 6)), layout(tp=2, world=4, sequence_parallel=True),
         ["tokens of a frame with `--sequence-parallel` (6); use 1 or 2."]),
        (teacher(stages=3), layout(world=3),
         ["`--teacher-pipeline-model-parallel-size` (3) must be at most the number of the "
          "teacher's blocks (2); use 2 or fewer."]),
        # Without a layout of its own, the run's frames are checked elsewhere.
        (teacher(teacher_size="tiny", latent_size=(2, 6)),
         layout(tp=2, world=2, sequence_parallel=True), []),
        (teacher(teacher_size="small"), layout(tp=4, world=4), ["attention heads (6)"]),
        (teacher(), layout(tp=3, world=3), []),
        (teacher(tensor=2), layout(world=3), ["use sizes whose product is 1 or 3"]),
        (teacher(tensor=4), layout(tp=2, world=6), ["use sizes whose product is 1, 2 or 6"]),
        # Another rule tells that the run's own ranks do not fit.
        (teacher(tensor=4), layout(tp=2, cp=3, world=4), []),
    ],
)  # fmt: skip
def test_teachers_that_ranks_can_hold(streaming: Any, parallel: Any, said: list[str]) -> None:
    errors = [str(error) for error in teacher_errors(streaming, parallel)]
    assert len(errors) == len(said), errors
    assert all(part in error for part, error in zip(said, errors, strict=True)), errors


def test_a_teacher_takes_the_sizes_that_its_flags_leave_open() -> None:
    """Keep the run's tensor ranks on stages; drop context ranks where tensor ranks are given."""
    (alone, staged, same) = (
        teacher_sizes(streaming, layout(tp=2, cp=2, world=4))
        for streaming in (teacher(tensor=2), teacher(stages=2), teacher())
    )
    assert alone is not None and (alone.tensor, alone.pipeline, alone.ranks) == (2, 1, 2)
    assert staged is not None and (staged.tensor, staged.pipeline, staged.ranks) == (2, 2, 4)
    assert same is None


def refusal(check: Any, *args: Any, **options: Any) -> str:
    try:
        check(*args, **options)
    except ConfigError as error:
        return str(error)
    return ""


def test_given_frames_leave_a_chunk_something_to_generate() -> None:
    full, fits = (
        StreamingConfig(chunk_frames=n, given_frames=3, sequence_lengths=(21,)) for n in (3, 6)
    )
    assert "must exceed the frame block (3)" in refusal(_check_sequences, full)
    assert refusal(_check_sequences, fits) == ""
    # One of several lengths suffices for a switch.
    switching = StreamingConfig(switches=True, switch_frames=(30,), sequence_lengths=(27, 33))
    assert refusal(_check_sequences, switching) == ""


def test_a_codec_is_given_if_and_only_if_something_uses_it() -> None:
    codec = CodecConfig()
    given = CodecConfig(codec_channels=16, codec_spatial=4)
    bare = StreamingConfig(generator_size="small", encode_first_frame=False)
    assert "leaves nothing for the codec" in refusal(_check_latents, bare, given, samples=False)
    assert refusal(_check_latents, bare, codec, samples=False) == ""
    assert refusal(_check_latents, bare, given, samples=True) == ""
    begun = dataclasses.replace(bare, given_frames=3)
    assert refusal(_check_latents, begun, given, samples=False) == ""


def test_ranks_divide_heads_and_tokens_as_their_layout_says() -> None:
    def said(parallel: ParallelConfig, **changes: Any) -> str:
        return refusal(_check_layout, StreamingConfig(latent_size=(4, 6), **changes), parallel)

    # Six tokens in a frame, four heads.
    assert said(layout(tp=4, world=4)) == ""
    assert "4 ranks" in said(layout(tp=4, world=4, sequence_parallel=True))
    assert said(layout(tp=2, cp=3, world=6)) == ""
    assert "12 ranks" in said(layout(tp=4, cp=3, world=12, sequence_parallel=True))
    a2a: dict[str, Any] = {"cp_comm_type": ["a2a"]}
    assert said(layout(tp=2, cp=2, world=4, **a2a)) == ""
    assert "trades the 4 heads" in said(layout(tp=4, cp=2, world=8, **a2a))
    # A teacher that tensor ranks cannot share is told of with its own flags.
    assert said(layout(tp=4, world=4), teacher_size="small") == ""
    assert "`--critic-size small` has 6 heads" in said(layout(tp=4, world=4), critic_size="small")
    # The run's ranks hold the teacher too, unless it has a layout of its own.
    own: dict[str, Any] = {"teacher_size": "small", "generator_size": "tiny"}
    four = layout(cp=2, tp=2, world=4, **a2a)
    assert "6 heads of `--teacher-size small`" in said(four, **own)
    assert said(four, **own, teacher_tensor_model_parallel_size=1) == ""
