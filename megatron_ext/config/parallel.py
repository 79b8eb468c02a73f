"""Flags of parallel sizes, the pipeline schedule, and the start and communication of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.flags import PROCESSES, SIZE, Changeable, Range, flag

SCHEDULES = (
    "no-pipelining 1f1b interleaved zb-h1 zb-v dualpipe-v "
    "core-no-pipelining core-1f1b core-interleaved"
).split()
STAGES = "--pipeline-model-parallel-size"
"""The flag of the number of pipeline ranks, which errors name."""
V_SHAPED = ("zb-v", "dualpipe-v")
"""The schedules with two chunks on each rank, whose stages go there and back."""
SPLIT_SCHEDULES = ("zb-h1", *V_SHAPED)
"""The schedules that compute gradients of weights apart from those of inputs."""
PAIRED_SCHEDULES = ("no-pipelining", "1f1b", "interleaved", "dualpipe-v")
"""The schedules whose forward and backward passes can be paired."""
ABBREVIATIONS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "sp": "--sequence-parallel",
    "mbs": "--micro-batch-size",
    "gbs": "--global-batch-size",
}
"""The flags of parallel and batch sizes by their usual abbreviations."""


@dataclass(frozen=True)
class ParallelConfig(Changeable):
    """Flags of parallel sizes and pipeline schedules.

    The data-parallel size is ranks / (tensor × pipeline × context).
    """

    tensor_model_parallel_size: int = flag(
        1, "ranks that share each matrix (tensor parallelism)", SIZE, "ranks"
    )
    pipeline_model_parallel_size: int = flag(
        1, "pipeline stages that the layers are cut into", SIZE, "stages"
    )
    context_parallel_size: int = flag(
        1, "ranks that share each sequence (context parallelism)", SIZE, "ranks"
    )
    expert_model_parallel_size: int = flag(
        1, "ranks that share the experts (expert parallelism)", SIZE, "ranks"
    )
    expert_tensor_parallel_size: int | None = flag(
        None, "ranks that share each expert; default: the tensor-parallel size", SIZE, "ranks"
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "layers of each virtual chunk; several chunks on each pipeline stage take turns",
        SIZE,
        "layers",
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "virtual chunks on each pipeline stage, which take turns", SIZE, "chunks"
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
        "micro-batches that a virtual chunk handles before the next chunk; default: the "
        "pipeline size",
        SIZE,
        names="--microbatch-group-size-per-virtual-pipeline-stage",
    )
    overlap_moe_expert_parallel_comm: bool = flag(
        False,
        "run the forward pass of one micro-batch and the backward pass of another in turns, so "
        "that each computes while the other's experts exchange tokens; holds more micro-batches",
    )
    delay_wgrad_compute: bool = flag(
        False,
        "compute weight gradients only when the backward pass waits for the exchange of its "
        "experts' tokens; needs --overlap-moe-expert-parallel-comm",
    )
    ep_overlap_early_attn_memory_release: bool = flag(
        False,
        "compute attention's backward pass before the experts of the other micro-batch's forward "
        "pass, to free its activations; needs --overlap-moe-expert-parallel-comm",
    )
    sequence_parallel: bool = flag(False, "share norms and dropout along the sequence too")
    cp_comm_type: list[str] = flag(
        ["p2p"],
        "how context-parallel attention communicates, once or for each layer; the torch layers "
        "gather keys for p2p",
        choices="p2p all_gather a2a a2a+p2p",
        nargs="+",
    )
    decoder_first_pipeline_num_layers: int | None = flag(None, "layers of the first stage", SIZE)
    decoder_last_pipeline_num_layers: int | None = flag(None, "layers of the last stage", SIZE)
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "count the embedding as a layer when the stages are cut"
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "count the output layer as a layer when the stages are cut"
    )
    use_tp_pp_dp_mapping: bool = flag(False, "number pipeline stages before replicas")
    distributed_backend: str | None = flag(
        None, "collective library; default: the one that fits the device", choices="nccl gloo"
    )
    allow_untested_core: bool = flag(
        False, "start with a release of megatron-core that the tests did not run with"
    )
    distributed_timeout_minutes: float = flag(
        10, "longest duration of a collective before the run ends", Range(0.01, 1e6), "minutes"
    )
    nproc_per_node: int = flag(1, "ranks to start here, when torchrun did not", PROCESSES, "ranks")
    virtual_pipeline_model_parallel_size: int | None = None
    world_size: int = 1
    data_parallel_size: int = 1

    @property
    def defers_weight_gradients(self) -> bool:
        """Return whether our own linear layers compute the gradients of their weights later."""
        return self.delay_wgrad_compute or self.pipeline_schedule in SPLIT_SCHEDULES

    @property
    def counted_ends(self) -> int:
        """Return how many layers (0 to 2) embedding and loss count as when stages are formed.

        Each ``--account-for-…-in-pipeline-split`` flag that is set adds one.
        """
        ends = self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
        return sum(ends)
