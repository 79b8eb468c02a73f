"""How the ranks are shared out.

Whether the ranks can be shared out; used by the configuration and by the rank grid.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import PROCESSES, SIZE, IfChanged, Range, flag
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.pipeline import SCHEDULES, default_schedule, stage_errors, virtual_size


def rank_errors(
    world_size: int, *, tensor: int, pipeline: int, context: int, expert: int, expert_tensor: int
) -> list[str]:
    """What keeps a number of ranks from being laid out, one sentence each."""
    sizes = {
        "--tensor-model-parallel-size": tensor,
        "--pipeline-model-parallel-size": pipeline,
        "--context-parallel-size": context,
        "--expert-model-parallel-size": expert,
        "--expert-tensor-parallel-size": expert_tensor,
        "--world-size": world_size,
    }
    found = [
        f"`{name}` ({value}) must be at least 1." for name, value in sizes.items() if value < 1
    ]
    if found:
        return found
    products = {
        "tensor × pipeline × context": tensor * pipeline * context,
        "expert-tensor × expert × pipeline": expert_tensor * expert * pipeline,
    }
    refused: set[int] = set()
    for what, size in products.items():
        if world_size % size and size not in refused:
            refused.add(size)
            found.append(
                f"The number of ranks ({world_size}) must be divisible by {what} parallel size "
                f"({size}); start {-(-world_size // size) * size} ranks, or lower one of the "
                "sizes."
            )
    return found


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel sizes; the data-parallel size is what is left of the ranks."""

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    tensor_model_parallel_size: int = flag(
        1, "share each matrix over this many", unit="ranks", bounds=SIZE
    )
    pipeline_model_parallel_size: int = flag(
        1, "cut the layers into this many", unit="stages", bounds=SIZE
    )
    context_parallel_size: int = flag(
        1, "share each sequence over this many", unit="ranks", bounds=SIZE
    )
    expert_model_parallel_size: int = flag(
        1, "share the experts over this many", unit="ranks", bounds=SIZE
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        "share each expert over this many; default: the tensor-parallel size",
        unit="ranks",
        bounds=SIZE,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "interleave chunks of this many layers on each pipeline stage",
        unit="layers",
        bounds=SIZE,
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "interleave this many chunks on each pipeline stage", unit="chunks", bounds=SIZE
    )
    pipeline_schedule: str | None = flag(
        None,
        "order of the pipeline's passes; default: the first of no-pipelining, interleaved and "
        "1f1b that fits the stages and chunks; core-: megatron-core's own function",
        choices=SCHEDULES,
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "layers of each stage, such as Et*3|t*4|m|L: E embedding, t layer, m multi-token "
        "prediction, L loss; as many stages as ranks, or a multiple for virtual chunks",
    )
    microbatch_group_size_per_vp_stage: int | None = flag(
        None,
        "micro-batches that a chunk handles before the next; default: the pipeline size",
        names=("--microbatch-group-size-per-virtual-pipeline-stage",),
        bounds=SIZE,
    )
    sequence_parallel: bool = flag(False, "share norms and dropout along the sequence too")
    cp_comm_type: list[str] = flag(
        ["p2p"],
        "how context-parallel attention communicates, once or for each layer; the torch layers "
        "gather keys for p2p",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
        nargs="+",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first stage", bounds=SIZE
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers of the last stage", bounds=SIZE
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "count the embedding as a layer when the stages are cut"
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "count the output layer as a layer when the stages are cut"
    )
    use_tp_pp_dp_mapping: bool = flag(False, "number pipeline stages before replicas")
    distributed_backend: str | None = flag(
        None, "collective library; default: the one that fits the device", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(
        10, "how long a collective may take", unit="minutes", bounds=Range(0.01, 1e6)
    )
    nproc_per_node: int = flag(
        1, "ranks to start here, when torchrun did not", unit="ranks", bounds=PROCESSES
    )
    virtual_pipeline_model_parallel_size: int | None = None
    world_size: int = 1
    data_parallel_size: int = 1

    def resolved(self, model: ModelConfig, world_size: int) -> ParallelConfig:
        """With the derived sizes filled in."""
        chunks = virtual_size(self, model)
        return dataclasses.replace(
            self,
            sequence_parallel=self.sequence_parallel and self.tensor_model_parallel_size > 1,
            virtual_pipeline_model_parallel_size=chunks,
            pipeline_schedule=self.pipeline_schedule
            or default_schedule(self.pipeline_model_parallel_size, chunks),
            world_size=world_size,
            data_parallel_size=max(
                1,
                world_size
                // max(
                    1,
                    self.tensor_model_parallel_size
                    * self.pipeline_model_parallel_size
                    * self.context_parallel_size,
                ),
            ),
        )

    def errors(self, model: ModelConfig) -> list[str]:
        """What cannot be run, one sentence each."""
        expert_tensor = self.expert_tensor_parallel_size
        found = rank_errors(
            self.world_size,
            tensor=self.tensor_model_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            context=self.context_parallel_size,
            expert=self.expert_model_parallel_size,
            expert_tensor=expert_tensor or self.tensor_model_parallel_size,
        )
        if not found:
            found.extend(self._mapping_errors())
        found.extend(stage_errors(self, model))
        found.extend(self._share_errors(model))
        layers = 1 if model.blocks_dealt_by_cost else model.num_layers
        if len(self.cp_comm_type) not in (1, layers):
            found.append(
                f"`--cp-comm-type` has {len(self.cp_comm_type)} values, but must have one for all "
                f"layers or one for each of the {layers}."
            )
        started = int(os.environ.get("WORLD_SIZE", "0"))
        if started and self.nproc_per_node > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
            found.append(
                f"`--nproc-per-node` ({self.nproc_per_node}) is for a run without torchrun, which "
                f"has started {started} ranks; give it to torchrun instead."
            )
        return found

    def _mapping_errors(self) -> list[str]:
        """Replicas that megatron-core's groups cannot number after the stages."""
        tp, cp = self.tensor_model_parallel_size, self.context_parallel_size
        etp = self.expert_tensor_parallel_size or tp
        ep = self.expert_model_parallel_size
        staged = self.use_tp_pp_dp_mapping and self.pipeline_model_parallel_size > 1
        if not staged or tp * cp == etp * ep:
            return []
        return [
            "`--use-tp-pp-dp-mapping` with pipeline stages needs as many replicas of the experts "
            f"as of the other layers, but tensor × context parallel size is {tp} × {cp} and "
            f"expert-tensor × expert parallel size is {etp} × {ep}, also in a model without "
            "experts; leave the flag out, or make the products equal."
        ]

    def _share_errors(self, model: ModelConfig) -> list[str]:
        """Heads and sequences that the ranks cannot share."""
        found = []
        tp, cp = max(1, self.tensor_model_parallel_size), max(1, self.context_parallel_size)
        for name, heads in (
            ("--num-attention-heads", model.num_attention_heads),
            ("--num-query-groups", model.num_query_groups),
        ):
            if heads and heads % tp:
                found.append(
                    f"`{name}` ({heads}) must be divisible by `--tensor-model-parallel-size` "
                    f"({tp}); use {-(-heads // tp) * tp}."
                )
        length = model.seq_length or 0
        if cp > 1 and length % (2 * cp):
            found.append(
                f"`--seq-length` ({length}) must be divisible by 2 × `--context-parallel-size` "
                f"(2 × {cp} = {2 * cp}); use {-(-length // (2 * cp)) * 2 * cp}."
            )
        if self.sequence_parallel and length % (tp * cp):
            found.append(
                f"`--seq-length` ({length}) must be divisible by tensor × context parallel size "
                f"({tp} × {cp} = {tp * cp}) with `--sequence-parallel`; use "
                f"{-(-length // (tp * cp)) * tp * cp}."
            )
        return found
