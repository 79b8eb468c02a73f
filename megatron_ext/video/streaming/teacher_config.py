"""Where the frozen teacher of streaming long-tuning lies, if not as the run's own networks do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.config.parallel import ParallelConfig
    from megatron_ext.video.config.wan import VideoDiTSizes
    from megatron_ext.video.streaming.config import StreamingConfig

TENSOR, PIPELINE = "--teacher-tensor-model-parallel-size", "--teacher-pipeline-model-parallel-size"


@dataclass(frozen=True)
class TeacherSizes:
    """Consecutive ranks that hold one copy of the teacher; they share no sequence.

    Attributes:
        tensor: ranks that share each matrix.
        pipeline: stages.
    """

    tensor: int
    pipeline: int

    @property
    def ranks(self) -> int:
        """Return the ranks of a group that holds the teacher once."""
        return self.tensor * self.pipeline


def teacher_sizes(streaming: StreamingConfig, parallel: ParallelConfig) -> TeacherSizes | None:
    """The teacher's own layout; None if it lies as the run's networks do."""
    tensor = streaming.teacher_tensor_model_parallel_size
    stages = streaming.teacher_pipeline_model_parallel_size
    run = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if stages == 1 and (tensor is None or (tensor, 1) == run):
        return None
    return TeacherSizes(run[0] if tensor is None else tensor, stages)


def teacher_errors(streaming: StreamingConfig, parallel: ParallelConfig) -> list[str]:
    """Return a sentence for everything that keeps the teacher from its layout."""
    given = {
        TENSOR: streaming.teacher_tensor_model_parallel_size,
        PIPELINE: streaming.teacher_pipeline_model_parallel_size,
    }
    found = [
        f"`{name}` ({value}) must be at least 1."
        for name, value in given.items()
        if value is not None and value < 1
    ]
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if found or min(tensor, context) < 1 or parallel.world_size % (tensor * context):
        return found
    own = teacher_sizes(streaming, parallel) or TeacherSizes(tensor, 1)
    sizes = streaming.sizes(streaming.teacher_size)
    found += _rank_errors(own, parallel) if teacher_sizes(streaming, parallel) else []
    if own.pipeline > sizes.num_blocks:
        found.append(
            f"`{PIPELINE}` ({own.pipeline}) must be at most the number of the teacher's blocks "
            f"({sizes.num_blocks}); use {sizes.num_blocks} or fewer."
        )
    return [*found, *_share_errors(own.tensor, streaming, parallel, sizes)]


def _rank_errors(own: TeacherSizes, parallel: ParallelConfig) -> list[str]:
    """Groups that do not fill the ranks, or that replicas of the run and groups cut across."""
    world = parallel.world_size
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    replica = tensor * context
    fitting = [
        size
        for size in range(1, world + 1)
        if world % size == 0 and (replica % size == 0 or size % replica == 0)
    ]
    if own.ranks in fitting:
        return []
    return [
        f"`{TENSOR}` × `{PIPELINE}` ({own.tensor} × {own.pipeline} = {own.ranks}) must divide the "
        f"number of ranks ({world}), and divide or be a multiple of the run's tensor × context "
        f"parallel size ({tensor} × {context} = {replica}); use sizes whose product is "
        f"{_any_of(fitting)}."
    ]


def _share_errors(
    tensor: int, streaming: StreamingConfig, parallel: ParallelConfig, sizes: VideoDiTSizes
) -> list[str]:
    """Matrices and frames of the teacher that its tensor-parallel ranks cannot share."""
    given = streaming.teacher_tensor_model_parallel_size is not None
    name = TENSOR if given else "--tensor-model-parallel-size"
    widths = {"attention heads": sizes.num_heads, "feed-forward width": sizes.ffn_size}
    if teacher_sizes(streaming, parallel) is not None and parallel.sequence_parallel:
        height, width = (x // sizes.patch_size for x in streaming.latent_size)
        widths["tokens of a frame with `--sequence-parallel`"] = height * width
    wrong = [f"{what} ({x})" for what, x in widths.items() if x % tensor]
    if not wrong or not (given or streaming.teacher_size):
        # As large as the generator and laid out alike, it has the generator's errors.
        return []
    fitting = [n for n in range(1, sizes.num_heads + 1) if not any(x % n for x in widths.values())]
    return [
        f"`{name}` ({tensor}) must divide the teacher's {' and '.join(wrong)}; use "
        f"{_any_of(fitting)}."
    ]


def _any_of(sizes: list[int]) -> str:
    """Such as "1, 2 or 4"."""
    *before, last = map(str, sizes)
    return f"{', '.join(before)} or {last}" if before else last
