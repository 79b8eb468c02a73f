"""The rank grid, in pure Python: which ranks form which group, and which rank holds which stage.

Ranks are numbered with tensor parallelism innermost, then context, data and pipeline parallelism
(pipeline before data with ``--use-tp-pp-dp-mapping``). This is the dense grid. Experts use a second
grid over the same ranks, with expert-tensor, expert, expert-data and pipeline parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from math import gcd, prod

from megatron_ext.config.parallel import V_SHAPED, ParallelConfig
from megatron_ext.config.rules.parallel import rank_errors
from megatron_ext.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """The pipeline rank and the virtual chunk that hold each stage.

    With interleaved virtual chunks, the pipeline ranks of consecutive stages are 0 1 2 0 1 2. In a
    V shape with two chunks on each rank, they are 0 1 2 2 1 0.
    """

    pipeline_size: int
    num_chunks: int = 1
    v_shape: bool = False

    @property
    def num_stages(self) -> int:
        """Return the number of stages on all pipeline ranks together."""
        return self.pipeline_size * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage."""
        turn, position = divmod(stage, self.pipeline_size)
        return self.pipeline_size - 1 - position if self.v_shape and turn == 1 else position

    def chunk_of(self, stage: int) -> int:
        """Return the index of a stage among the chunks of the pipeline rank that holds it."""
        return stage // self.pipeline_size

    def stage_of(self, rank: int, chunk: int) -> int:
        """Return the stage that pipeline rank ``rank`` holds as its chunk ``chunk``."""
        position = self.pipeline_size - 1 - rank if self.v_shape and chunk == 1 else rank
        return chunk * self.pipeline_size + position


DENSE_GROUPS = ("tp", "cp", "dp", "pp", "tp-pp", "tp-cp", "dp-cp", "tp-dp-cp")
EXPERT_GROUPS = ("ep", "tp-ep", "tp-ep-pp", "dp")


def groups_of(order: tuple[str, ...], sizes: dict[str, int], varying: set[str]) -> list[list[int]]:
    """Return all groups whose ranks differ only in their position along the ``varying`` axes.

    ``order`` lists the axes of the grid, innermost first: ranks are consecutive along the first.
    ``sizes`` has the number of ranks along each axis.
    """
    stride = {}
    step = 1
    for axis in order:
        stride[axis] = step
        step *= sizes[axis]

    def offsets(axes: list[str]) -> list[int]:
        # product() changes its last factor fastest, so the axes go in from the slowest to the
        # fastest.
        ranges = [range(0, sizes[a] * stride[a], stride[a]) for a in reversed(axes)]
        return [sum(point) for point in product(*ranges)]

    inside = offsets([axis for axis in order if axis in varying])
    outside = offsets([axis for axis in order if axis not in varying])
    return [[base + offset for offset in inside] for base in outside]


@dataclass(frozen=True)
class Layout:
    """The parallel sizes of a run; the data-parallel size follows from the others.

    Attributes:
        expert_tensor_parallel_size: ranks that share each expert; None means
            ``tensor_model_parallel_size``.
        virtual_pipeline_model_parallel_size: number of chunks on each rank, None without
            interleaving.
        v_shape: whether stages are placed in a V shape (see `Placement`), which the schedules
            zb-v and dualpipe-v need.

    Raises:
        ConfigError: the sizes do not divide the number of ranks.
    """

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    use_tp_pp_dp_mapping: bool = False
    v_shape: bool = False

    def __post_init__(self) -> None:
        errors = rank_errors(
            self.world_size,
            tensor=self.tensor_model_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            context=self.context_parallel_size,
            expert=self.expert_model_parallel_size,
            expert_tensor=self.expert_tp,
        )
        if messages := list(errors):
            raise ConfigError(messages)

    @classmethod
    def from_config(cls, parallel: ParallelConfig) -> Layout:
        """Return the layout that a run's parallel flags describe."""
        shared = {x.name: getattr(parallel, x.name) for x in fields(cls) if x.name != "v_shape"}
        return cls(**shared, v_shape=parallel.pipeline_schedule in V_SHAPED)

    @cached_property
    def placement(self) -> Placement:
        """Return the mapping of stages to pipeline ranks and chunks."""
        return Placement(
            self.pipeline_model_parallel_size,
            self.virtual_pipeline_model_parallel_size or 1,
            self.v_shape,
        )

    @property
    def model_parallel_size(self) -> int:
        """Return the number of ranks of one replica of the model."""
        tp = self.tensor_model_parallel_size
        pp = self.pipeline_model_parallel_size
        return tp * pp * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Return the number of replicas of the model."""
        return self.world_size // self.model_parallel_size

    @property
    def expert_tp(self) -> int:
        """Return the number of ranks that share each expert."""
        size = self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if size is None else size

    @property
    def order(self) -> str:
        """Return the order of the axes, innermost first, in megatron-core's notation "tp-cp-…"."""
        return "tp-cp-ep-pp-dp" if self.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"

    def sizes(self) -> dict[str, int]:
        """Return the number of ranks along each axis ("tp", "cp", …) of the dense grid."""
        return {
            "tp": self.tensor_model_parallel_size,
            "cp": self.context_parallel_size,
            "ep": 1,
            "dp": self.data_parallel_size,
            "pp": self.pipeline_model_parallel_size,
        }

    def expert_sizes(self) -> dict[str, int]:
        """Return the number of ranks along each axis ("tp", "ep", …) of the experts' grid."""
        fixed = {
            "tp": self.expert_tp,
            "cp": 1,
            "ep": self.expert_model_parallel_size,
            "pp": self.pipeline_model_parallel_size,
        }
        return {**fixed, "dp": self.world_size // prod(fixed.values())}

    def groups(self, axes: str) -> list[list[int]]:
        """Return the groups of the dense grid along axes such as ``"tp"`` or ``"dp-cp"``."""
        return groups_of(tuple(self.order.split("-")), self.sizes(), set(axes.split("-")))

    def expert_groups(self, axes: str) -> list[list[int]]:
        """Return the groups of the experts' grid along axes such as ``"ep"`` or ``"tp-ep"``."""
        return groups_of(tuple(self.order.split("-")), self.expert_sizes(), set(axes.split("-")))

    def experts_in_node(self, ranks_per_node: int) -> int:
        """Return the number of consecutive expert-parallel ranks that surely share a node.

        A node has ``ranks_per_node`` consecutive ranks. If a node holds a whole expert-parallel
        group, the result is the size of this group; it is 1 if an expert's parts do not fit a node.
        """
        if ranks_per_node % self.expert_tp:
            return 1
        return gcd(self.expert_model_parallel_size, ranks_per_node // self.expert_tp)

    def group_of(self, rank: int, axes: str) -> list[int]:
        """Return the group of ``groups(axes)`` with ``rank`` in it, without the other groups."""
        own = self.position(rank)
        sizes = self.sizes()
        varying = [axis for axis in self.order.split("-") if axis in axes.split("-")]
        places = product(*(range(sizes[axis]) for axis in reversed(varying)))
        varied = (dict(zip(reversed(varying), place, strict=True)) for place in places)
        return [self.rank_at({**own, **place}) for place in varied]

    def rank_at(self, position: dict[str, int]) -> int:
        """Return the rank at a position of the dense grid, the reverse of `position`."""
        sizes = self.sizes()
        rank = 0
        for axis in reversed(self.order.split("-")):
            rank = rank * sizes[axis] + position[axis]
        return rank

    def position(self, rank: int) -> dict[str, int]:
        """Return the index of a rank along each axis ("tp", "cp", …) of the dense grid."""
        sizes = self.sizes()
        index = {}
        for axis in self.order.split("-"):
            index[axis] = rank % sizes[axis]
            rank //= sizes[axis]
        return index
