"""How the ranks are shared out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import PROCESSES, SIZE, IfChanged, Range, flag

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

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    tensor_model_parallel_size: int = flag(
        1, "ranks that share each matrix (tensor parallelism)", unit="ranks", bounds=SIZE
    )
    pipeline_model_parallel_size: int = flag(
        1, "pipeline stages that the layers are cut into", unit="stages", bounds=SIZE
    )
    context_parallel_size: int = flag(
        1, "ranks that share each sequence (context parallelism)", unit="ranks", bounds=SIZE
    )
    expert_model_parallel_size: int = flag(
        1, "ranks that share the experts (expert parallelism)", unit="ranks", bounds=SIZE
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        "ranks that share each expert; default: the tensor-parallel size",
        unit="ranks",
        bounds=SIZE,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "layers of each virtual chunk; several chunks on each pipeline stage take turns",
        unit="layers",
        bounds=SIZE,
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "virtual chunks on each pipeline stage, which take turns", unit="chunks", bounds=SIZE
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
        "micro-batches that a virtual chunk handles before the next chunk; default: the pipeline"
        " size",
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
        10,
        "longest duration of a collective; a run whose ranks wait longer ends",
        unit="minutes",
        bounds=Range(0.01, 1e6),
    )
    nproc_per_node: int = flag(
        1, "ranks to start here, when torchrun did not", unit="ranks", bounds=PROCESSES
    )
    virtual_pipeline_model_parallel_size: int | None = None
    world_size: int = 1
    data_parallel_size: int = 1
