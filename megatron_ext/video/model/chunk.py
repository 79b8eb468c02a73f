"""Base classes of a video network's pipeline chunks, and of the modules in them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from typing_extensions import Self

from megatron_ext.errors import ConfigError
from megatron_ext.parallel.context import ParallelContext


class Blueprint(NamedTuple):
    """The values from which every module of a network is built.

    Attributes:
        config: megatron-core's configuration, with the values of ``sizes.transformer_fields()``.
        sizes: sizes of the whole model, a `config.sizes.Sizes`.
        options: settings of the network that do not change the shape of any parameter.
        groups: this rank's process groups.
    """

    config: TransformerConfig
    sizes: Any
    options: Any
    groups: ProcessGroupCollection


class Part(MegatronModule):  # type: ignore[misc]
    """Base class of a network's modules.

    It sets ``tp_group``, which megatron-core reads when it saves a module in a checkpoint.
    """

    def __init__(self, plan: Blueprint) -> None:
        super().__init__(config=plan.config)
        self.tp_group = plan.groups.tp


class Blocks(torch.nn.ModuleDict):
    """The transformer blocks of a pipeline chunk.

    The key of a block is its index, as a string, among the whole model's blocks of the same kind.
    The key is part of the names of the block's parameters.
    """

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the sharded tensors of all blocks for megatron-core's checkpoints."""
        state: dict[str, Any] = {}
        for number, block in self.items():
            named: Any = block
            state |= named.sharded_state_dict(f"{prefix}{number}.", sharded_offsets, metadata)
        return state


class VideoChunk(Part):
    """One pipeline chunk of a video network: the first embeds inputs, the last predicts velocities.

    Args:
        stage: index of this chunk among all ``num_stages`` stages, virtual stages included.

    Attributes:
        entering: the hidden tensor received from the previous stage; None on the first stage.

    Raises:
        ConfigError: the configuration differs from ``sizes.transformer_fields()``.
    """

    title: ClassVar[str]
    """Name of the network in messages."""
    share_embeddings_and_output_weights = False

    def __init__(self, plan: Blueprint, stage: int, num_stages: int) -> None:
        super().__init__(plan)
        config, self.sizes, self.options, self.pg_collection = plan
        for name, value in self.sizes.transformer_fields().items():
            if getattr(config, name) != value:
                fields = f"{type(self.sizes).__name__}.transformer_fields()"
                raise ConfigError(
                    f"`{name}` ({getattr(config, name)}) must be {value} for this {self.title}; "
                    f"build the configuration from `{fields}`."
                )
        self.cp_group = plan.groups.cp
        self.num_stages = num_stages
        self.pre_process = stage == 0
        self.post_process = stage == num_stages - 1
        self.entering: Tensor | None = None

    @classmethod
    def build(
        cls,
        sizes: Any,
        options: Any,
        transformer_config: TransformerConfig,
        context: ParallelContext,
        *,
        vp_stage: int | None = None,
    ) -> Self:
        """Build chunk ``vp_stage`` of this rank, or its only chunk if ``vp_stage`` is None."""
        placement = context.placement
        plan = Blueprint(transformer_config, sizes, options, context.pgs)
        return cls(plan, placement.stage_of(context.pp_rank, vp_stage or 0), placement.num_stages)

    def set_input_tensor(self, tensors: Tensor | Sequence[Tensor | None] | None) -> None:
        """Store the hidden tensor from the previous pipeline stage, alone or in a list of one.

        On the first stage it is None.
        """
        self.entering = tensors if tensors is None or isinstance(tensors, Tensor) else tensors[0]


def stage_blocks(num_blocks: int, num_stages: int) -> list[range]:
    """Return the range of block indices of each stage; stages differ by at most one block.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    if num_stages > num_blocks:
        raise ConfigError(
            f"the pipeline has {num_stages} stages, but the model only {num_blocks} blocks; use a "
            "smaller `--pipeline-model-parallel-size`."
        )
    ends = [stage * num_blocks // num_stages for stage in range(num_stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]
