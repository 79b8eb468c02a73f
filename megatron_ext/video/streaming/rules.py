"""Checks the flags of streaming runs, of the videos they sample, and of the teacher's layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.errors import ConfigError, FlagError
from megatron_ext.video.model.window import window_of
from megatron_ext.video.streaming.config import StreamingConfig, StreamingSampleConfig

if TYPE_CHECKING:
    from megatron_ext.config.parallel import ParallelConfig
    from megatron_ext.video.config.run import SampleConfig

TENSOR, PIPELINE = "--teacher-tensor-model-parallel-size", "--teacher-pipeline-model-parallel-size"


def streaming_errors(streaming: StreamingConfig) -> list[FlagError]:
    """Return an error for each streaming flag that is missing, breaks a rule or has no effect."""
    errors = []
    tensor = streaming.teacher_tensor_model_parallel_size
    own_layout = tensor is not None or streaming.teacher_pipeline_model_parallel_size > 1
    if streaming.prompts_path is None:
        errors.append(
            FlagError("--prompts-path", None, "is missing", "give a file with one prompt a line")
        )
    if streaming.encode_first_frame and streaming.chunk_frames == 1:
        errors.append(
            FlagError(
                "--chunk-frames",
                "1",
                "leaves no frame to train, since the codec makes a chunk's first",
                "give longer chunks, or `--no-encode-first-frame`",
            )
        )
    if streaming.distribution_loss == "sid" and own_layout:
        errors.append(
            FlagError(
                "--distribution-loss sid",
                None,
                "needs gradients through the teacher, which has none in a layout of its own",
                f"leave out `{TENSOR}` and `{PIPELINE}`",
            )
        )
    differs = not streaming.same_exit_across_blocks
    rules = (
        ("no-decode-history", not streaming.decode_history, "no-encode-first-frame",
         not streaming.encode_first_frame),
        ("no-same-exit-across-blocks", differs, "last-step-only", streaming.last_step_only),
        ("negative-prompt", streaming.negative_prompt != "", "guidance-scale 1",
         streaming.guidance_scale == 1),
        ("sid-alpha", streaming.sid_alpha != 1, "distribution-loss dmd",
         streaming.distribution_loss == "dmd"),
        ("ts-schedule", streaming.ts_schedule, "no-same-exit-across-blocks", differs),
        ("ts-schedule-max", streaming.ts_schedule_max, "no-same-exit-across-blocks", differs),
    )  # fmt: skip
    return errors + [
        FlagError(f"--{name}", None, f"has no effect with `--{other}`", "leave one of them out")
        for name, given, other, works in rules
        if given and works
    ]


def check_options(streaming: StreamingConfig) -> None:
    """Check that lengths, window and noise levels fit together; ranges have been checked before.

    Raises:
        ConfigError: a rule is broken; the error names only the first broken rule.
    """
    low = streaming.min_new_frames
    high = streaming.max_new_frames
    size = streaming.chunk_frames
    lengths = streaming.sequence_lengths
    block = streaming.frame_block
    layout = streaming.blocks
    steps = streaming.denoising_steps
    longlive = "the defaults are those of LongLive"
    falls = bool(steps) and all(x > y for x, y in zip(steps, steps[1:], strict=False))
    blocks = f"a positive multiple of block ({block})"
    chunks = blocks
    usual = longlive
    if layout.first_alone:
        shorter = max(1 + block, layout.at_or_before(size))
        chunks = f"1 + {blocks} with `--independent-first-frame`"
        usual = f"use {shorter} or {shorter + block}"
    rules = (
        ("chunk_frames", chunks, size >= block and layout.begins(size), usual),
        *((name, blocks, getattr(streaming, name) % block == 0, longlive)
          for name in ("min_new_frames", "max_new_frames", "recache_frames")),
        ("max_new_frames", f"{low} (min_new_frames) to {size}", low <= high <= size, longlive),
        ("recache_frames", f"at most chunk_frames ({size}), which is what is kept",
         streaming.recache_frames <= size, longlive),
        ("sequence_lengths", f"one or more of at least chunk_frames ({size})",
         bool(lengths) and min(lengths) >= size, longlive),
        ("train_first_chunk", "on where a sequence may have no second chunk (sequence_lengths)",
         streaming.train_first_chunk or all(streaming.can_grow(size, x) for x in lengths),
         longlive),
        ("denoising_steps", "falling numbers from 1000 or less to above 0", falls,
         "leave it out to get the default"),
        ("min_timestep", "above 0 and at most max_timestep",
         streaming.min_timestep <= streaming.max_timestep, "leave it out to get the default"),
    )  # fmt: skip
    for name, rule, fits, advice in rules:
        if not fits:
            raise ConfigError.about(
                f"--{name.replace('_', '-')}",
                getattr(streaming, name),
                f"must be {rule}",
                advice,
            )
    window_of(streaming)


def sample_errors(
    own: StreamingSampleConfig, sample: SampleConfig, streaming: StreamingConfig
) -> list[FlagError]:
    """Return an error for each wrong length, switch or second prompt of the videos to sample."""
    errors = []
    blocks = streaming.blocks
    length = own.sample_latent_frames
    texts = sample.sample_texts or ()
    if length is not None and (length < 1 or not blocks.begins(length)):
        errors.append(
            FlagError(
                "--sample-latent-frames",
                length,
                f"must be {blocks.rule}, since blocks are denoised together",
            )
        )
    second = own.sample_second_texts
    switch = own.sample_switch_frame
    if switch is not None and second is None:
        errors.append(
            FlagError(
                "--sample-switch-frame",
                switch,
                "needs `--sample-second-texts`",
                "give the captions after the switch",
            )
        )
    if second is None:
        return errors
    if len(second) != len(texts):
        errors.append(
            FlagError(
                "--sample-second-texts",
                None,
                f"has {len(second)} captions, but must have {len(texts)}, one for each of "
                "`--sample-texts`",
                "a jsonl as `--sample-prompts` may hold `switches` of its own",
            )
        )
    start = own.switch_frame(streaming)
    last = blocks.at_or_before(own.num_frames(streaming) - 1)
    if not 1 <= start <= last:
        errors.append(
            FlagError(
                "--sample-switch-frame",
                start,
                f"must lie between 1 and the start of the last frame block ({last})",
                "sample longer videos with `--sample-latent-frames`, or switch earlier",
            )
        )
    return errors


@dataclass(frozen=True)
class TeacherSizes:
    """The tensor- and pipeline-parallel size of a copy of the teacher.

    The teacher has no context parallelism.
    """

    tensor: int
    pipeline: int

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline


def teacher_sizes(streaming: StreamingConfig, parallel: ParallelConfig) -> TeacherSizes | None:
    """Return the teacher's own layout; None if it has the layout of the other networks."""
    tensor = streaming.teacher_tensor_model_parallel_size
    stages = streaming.teacher_pipeline_model_parallel_size
    run = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if stages == 1 and (tensor is None or (tensor, 1) == run):
        return None
    return TeacherSizes(run[0] if tensor is None else tensor, stages)


def teacher_errors(streaming: StreamingConfig, parallel: ParallelConfig) -> list[FlagError]:
    """Return an error for each reason why the teacher cannot have the layout given by flags.

    The result is [] if the layout of the run itself is invalid.
    """
    tensor = parallel.tensor_model_parallel_size
    context = parallel.context_parallel_size
    if min(tensor, context) < 1 or parallel.world_size % (tensor * context):
        return []
    own = teacher_sizes(streaming, parallel)
    sizes = streaming.sizes("teacher")
    errors = [] if own is None else _rank_errors(own, parallel)
    stages = streaming.teacher_pipeline_model_parallel_size
    if stages > sizes.num_blocks:
        errors.append(
            FlagError(
                PIPELINE,
                stages,
                f"must be at most the number of the teacher's blocks ({sizes.num_blocks})",
                f"use {sizes.num_blocks} or fewer",
            )
        )
    # Find matrices and frames that the teacher's tensor-parallel ranks cannot divide. A teacher
    # with the generator's size and layout needs no check, since the generator is checked.
    given = streaming.teacher_tensor_model_parallel_size is not None
    shared = tensor if own is None else own.tensor
    widths = {"attention heads": sizes.num_heads, "feed-forward width": sizes.ffn_size}
    if own is not None and parallel.sequence_parallel:
        height, width = (x // sizes.patch_size for x in streaming.latent_size)
        widths["tokens of a frame with `--sequence-parallel`"] = height * width
    wrong = [f"{what} ({x})" for what, x in widths.items() if x % shared]
    if wrong and (given or streaming.teacher_size):
        counts = range(1, sizes.num_heads + 1)
        fitting = [n for n in counts if not any(x % n for x in widths.values())]
        errors.append(
            FlagError(
                TENSOR if given else "--tensor-model-parallel-size",
                shared,
                f"must divide the teacher's {' and '.join(wrong)}",
                f"use {_any_of(fitting)}",
            )
        )
    return errors


def _rank_errors(own: TeacherSizes, parallel: ParallelConfig) -> list[FlagError]:
    """Return a list with one error if the teacher's layout ``own`` does not fit the ranks, else [].

    The number of ranks of one copy of the teacher must divide the number of all ranks. It must also
    be a divisor or a multiple of the number of ranks of a replica.
    """
    world = parallel.world_size
    tensor = parallel.tensor_model_parallel_size
    context = parallel.context_parallel_size
    replica = tensor * context
    counts = range(1, world + 1)
    fitting = [n for n in counts if world % n == 0 and (replica % n == 0 or n % replica == 0)]
    if own.ranks in fitting:
        return []
    return [
        FlagError(
            TENSOR,
            None,
            f"× `{PIPELINE}` ({own.tensor} × {own.pipeline} = {own.ranks}) must divide the number "
            f"of ranks ({world}), and divide or be a multiple of the run's tensor × context "
            f"parallel size ({tensor} × {context} = {replica})",
            f"use sizes whose product is {_any_of(fitting)}",
        )
    ]


def _any_of(sizes: list[int]) -> str:
    """Return sizes as text, such as "1, 2 or 4"."""
    *before, last = map(str, sizes)
    return f"{', '.join(before)} or {last}" if before else last
