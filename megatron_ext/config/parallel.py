"""How the ranks are shared out."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from megatron_ext.config.flags import flag
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.sizes import rank_errors

CHUNKS = {"no-pipelining": 1, "1f1b": 1, "zb-h1": 1, "zb-v": 2}
"""Virtual chunks that a schedule has; interleaved has any number."""
SCHEDULES = (
    "no-pipelining",
    "1f1b",
    "interleaved",
    "zb-h1",
    "zb-v",
    "core-no-pipelining",
    "core-1f1b",
    "core-interleaved",
)


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel sizes; the data-parallel size is what is left of the ranks."""

    tensor_model_parallel_size: int = flag(1, "share each matrix over this many", unit="ranks")
    pipeline_model_parallel_size: int = flag(1, "cut the layers into this many", unit="stages")
    context_parallel_size: int = flag(1, "share each sequence over this many", unit="ranks")
    expert_model_parallel_size: int = flag(1, "share the experts over this many", unit="ranks")
    expert_tensor_parallel_size: int | None = flag(
        None, "share each expert over this many; default: the tensor-parallel size", unit="ranks"
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "interleave chunks of this many layers on each pipeline stage", unit="layers"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "interleave this many chunks on each pipeline stage", unit="chunks"
    )
    pipeline_schedule: str | None = flag(
        None,
        "order of the pipeline's passes; default: the first of no-pipelining, interleaved and "
        "1f1b that fits the stages and chunks; core-: megatron-core's own function",
        choices=SCHEDULES,
    )
    microbatch_group_size_per_vp_stage: int | None = flag(
        None,
        "micro-batches that a chunk handles before the next; default: the pipeline size",
        names=("--microbatch-group-size-per-virtual-pipeline-stage",),
    )
    sequence_parallel: bool = flag(False, "share norms and dropout along the sequence too")
    cp_comm_type: list[str] = flag(
        ["p2p"],
        "how context-parallel attention communicates; the torch layers gather keys for p2p",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
        nargs="+",
    )
    decoder_first_pipeline_num_layers: int | None = flag(None, "layers of the first stage")
    decoder_last_pipeline_num_layers: int | None = flag(None, "layers of the last stage")
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
    distributed_timeout_minutes: float = flag(10, "how long a collective may take", unit="minutes")
    nproc_per_node: int = flag(1, "ranks to start here, when torchrun did not", unit="ranks")
    virtual_pipeline_model_parallel_size: int | None = None
    world_size: int = 1
    data_parallel_size: int = 1

    def resolved(self, model: ModelConfig, world_size: int) -> ParallelConfig:
        """With the derived sizes filled in."""
        return dataclasses.replace(
            self,
            sequence_parallel=self.sequence_parallel and self.tensor_model_parallel_size > 1,
            virtual_pipeline_model_parallel_size=self._virtual_size(model),
            pipeline_schedule=self._schedule(self._virtual_size(model)),
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

    def _virtual_size(self, model: ModelConfig) -> int | None:
        if self.pipeline_model_parallel_size < 2:
            return None
        if self.pipeline_schedule == "zb-v":
            count = CHUNKS["zb-v"]
        elif self.num_virtual_stages_per_pipeline_rank is not None:
            count = self.num_virtual_stages_per_pipeline_rank
        elif self.num_layers_per_virtual_pipeline_stage:
            per_stage = (model.num_layers or 0) // self.pipeline_model_parallel_size
            count = per_stage // self.num_layers_per_virtual_pipeline_stage
        else:
            return None
        return count if count > 1 else None

    def _schedule(self, virtual_size: int | None) -> str:
        if self.pipeline_schedule is not None:
            return self.pipeline_schedule
        if self.pipeline_model_parallel_size < 2:
            return "no-pipelining"
        return "1f1b" if virtual_size is None else "interleaved"

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
        found.extend(self._stage_errors(model))
        found.extend(self._schedule_errors())
        found.extend(self._zero_bubble_errors(model))
        found.extend(self._share_errors(model))
        if len(self.cp_comm_type) != 1:
            found.append(
                f"`--cp-comm-type` has {len(self.cp_comm_type)} values, but one for all layers is "
                "supported; give one of p2p, all_gather and a2a."
            )
        started = int(os.environ.get("WORLD_SIZE", "0"))
        if started and self.nproc_per_node > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
            found.append(
                f"`--nproc-per-node` ({self.nproc_per_node}) is for a run without torchrun, which "
                f"has started {started} ranks; give it to torchrun instead."
            )
        return found

    def _schedule_errors(self) -> list[str]:
        """Stages and chunks that the schedule cannot have."""
        found = []
        schedule = (self.pipeline_schedule or "").removeprefix("core-")
        stages, chunks = (
            self.pipeline_model_parallel_size,
            self.virtual_pipeline_model_parallel_size or 1,
        )
        if schedule == "no-pipelining" and stages > 1:
            found.append(
                f"`--pipeline-schedule {self.pipeline_schedule}` is for one stage, but "
                f"`--pipeline-model-parallel-size` is {stages}; use 1f1b."
            )
        if schedule in ("interleaved", "zb-v") and stages < 2:
            found.append(
                f"`--pipeline-schedule {self.pipeline_schedule}` needs "
                f"`--pipeline-model-parallel-size` ({stages}) of at least 2; use no-pipelining."
            )
        elif schedule == "interleaved" and chunks < 2:
            found.append(
                f"`--pipeline-schedule {self.pipeline_schedule}` needs virtual chunks; give "
                "`--num-virtual-stages-per-pipeline-rank 2`."
            )
        elif schedule in CHUNKS and chunks != CHUNKS[schedule]:
            found.append(
                f"`--pipeline-schedule {self.pipeline_schedule}` has {CHUNKS[schedule]} chunk(s) "
                f"on each rank, but the flags of virtual stages ask for {chunks}; drop them."
            )
        if (group := self.microbatch_group_size_per_vp_stage) is not None and group < stages:
            found.append(
                f"`--microbatch-group-size-per-virtual-pipeline-stage` ({group}) must be at least "
                f"`--pipeline-model-parallel-size` ({stages}); use {stages}."
            )
        return found

    def _zero_bubble_errors(self, model: ModelConfig) -> list[str]:
        """What a model cannot have under a schedule that defers weight gradients."""
        schedule = self.pipeline_schedule or ""
        found = []
        if schedule.startswith("zb-") and model.transformer_impl == "transformer_engine":
            found.append(
                f"`--pipeline-schedule {schedule}` defers the weight gradients of our own layers, "
                "which `--transformer-impl transformer_engine` replaces; use "
                "`--transformer-impl local`, or 1f1b."
            )
        if schedule == "zb-v":
            same_rank = {
                "tied embeddings": not model.untie_embeddings_and_output_weights,
                "`--mtp-num-layers`": bool(model.mtp_num_layers),
                "an uneven split of the layers": bool(
                    self.decoder_first_pipeline_num_layers
                    or self.decoder_last_pipeline_num_layers
                    or self.account_for_embedding_in_pipeline_split
                    or self.account_for_loss_in_pipeline_split
                ),
            }
            found += [
                f"`--pipeline-schedule zb-v` keeps the first and the last stage on one rank, which "
                f"does not go with {name}; use zb-h1."
                for name, given in same_rank.items()
                if given
            ]
        return found

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

    def _stage_errors(self, model: ModelConfig) -> list[str]:
        found = []
        layers, stages = model.num_layers or 0, self.pipeline_model_parallel_size
        if self.num_layers_per_virtual_pipeline_stage is not None:
            if self.num_virtual_stages_per_pipeline_rank is not None:
                found.append(
                    "`--num-layers-per-virtual-pipeline-stage` and "
                    "`--num-virtual-stages-per-pipeline-rank` exclude each other; give one."
                )
            if stages < 2:
                found.append(
                    "`--num-layers-per-virtual-pipeline-stage` needs "
                    f"`--pipeline-model-parallel-size` ({stages}) of at least 2; use 2."
                )
        extra = self.account_for_embedding_in_pipeline_split
        extra_last = self.account_for_loss_in_pipeline_split
        uneven = self.decoder_first_pipeline_num_layers or self.decoder_last_pipeline_num_layers
        if stages < 1 or uneven:
            return found
        units = layers + extra + extra_last
        count = CHUNKS["zb-v"] if self.pipeline_schedule == "zb-v" else None
        chunks = stages * (count or self.num_virtual_stages_per_pipeline_rank or 1)
        if self.num_layers_per_virtual_pipeline_stage and stages > 1:
            chunks = stages * self.num_layers_per_virtual_pipeline_stage
        if chunks and units % chunks:
            found.append(
                f"`--num-layers` ({layers}) must be divisible by pipeline stages × virtual chunk "
                f"({chunks}); use {-(-units // chunks) * chunks - extra - extra_last}."
            )
        return found
