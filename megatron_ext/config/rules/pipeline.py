"""How the layers are cut into pipeline stages, and which schedule runs them."""

from __future__ import annotations

import re

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.training import TrainingConfig

CHUNKS = {"no-pipelining": 1, "1f1b": 1, "zb-h1": 1, "zb-v": 2}
"""Virtual chunks that a schedule has; interleaved has any number."""


MOST_REPETITIONS = 10_000
"""The most repetitions of a part of a layout, which is written out before it is looked at."""


def stages_of(layout: str) -> list[str]:
    """Return the stages of ``--pipeline-model-parallel-layout``, each as its layers' letters.

    Raises:
        ValueError: a letter that is not known, or more repetitions than any model has layers.
    """
    if any(int(times) > MOST_REPETITIONS for times in re.findall(r"\*(\d+)", layout)):
        raise ValueError(f"no part can be repeated more than {MOST_REPETITIONS} times")
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {
        LayerType.embedding: "E",
        LayerType.decoder: "t",
        LayerType.mtp: "m",
        LayerType.loss: "L",
    }
    try:
        stages = PipelineParallelLayerLayout.parse_str_to_list(layout)
    except AssertionError as error:
        raise ValueError(str(error)) from None
    return ["".join(letters[layer] for layer in stage) for stage in stages]


def mtp_stage(parallel: ParallelConfig) -> int:
    """Return the stage that holds multi-token prediction, counted along the model."""
    if parallel.pipeline_model_parallel_layout is not None:
        stages = stages_of(parallel.pipeline_model_parallel_layout)
        return next(index for index, stage in enumerate(stages) if "m" in stage)
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    return parallel.pipeline_model_parallel_size * chunks - 1


def virtual_size(parallel: ParallelConfig, model: ModelConfig) -> int | None:
    """Return the number of virtual chunks on each rank; None without."""
    size = parallel.pipeline_model_parallel_size
    if size < 2:
        return None
    count = 1
    if parallel.pipeline_schedule == "zb-v":
        count = CHUNKS["zb-v"]
    elif parallel.pipeline_model_parallel_layout is not None:
        try:
            count = len(stages_of(parallel.pipeline_model_parallel_layout)) // size
        except ValueError:
            return None
    elif parallel.num_virtual_stages_per_pipeline_rank is not None:
        count = parallel.num_virtual_stages_per_pipeline_rank
    elif parallel.num_layers_per_virtual_pipeline_stage:
        per_stage = (model.num_layers or 0) // size
        count = per_stage // parallel.num_layers_per_virtual_pipeline_stage
    return count if count > 1 else None


def default_schedule(pipeline_size: int, virtual_size: int | None) -> str:
    """Return the schedule that Megatron-LM would choose."""
    if pipeline_size < 2:
        return "no-pipelining"
    return "1f1b" if virtual_size is None else "interleaved"


def stage_errors(parallel: ParallelConfig, model: ModelConfig) -> list[str]:
    """Return a sentence for each fault of the stages and their schedule."""
    return [
        *_split_errors(parallel, model),
        *_layout_errors(parallel, model),
        *_schedule_errors(parallel),
        *_zero_bubble_errors(parallel, model),
    ]


def _split_errors(parallel: ParallelConfig, model: ModelConfig) -> list[str]:
    """Return a sentence where layers do not divide."""
    found = []
    layers, stages = model.num_layers or 0, parallel.pipeline_model_parallel_size
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        if parallel.num_virtual_stages_per_pipeline_rank is not None:
            found.append(
                "`--num-layers-per-virtual-pipeline-stage` and "
                "`--num-virtual-stages-per-pipeline-rank` exclude each other; give one."
            )
        if stages < 2:
            found.append(
                "`--num-layers-per-virtual-pipeline-stage` needs "
                f"`--pipeline-model-parallel-size` ({stages}) of at least 2; use 2."
            )
    extra = parallel.account_for_embedding_in_pipeline_split
    extra_last = parallel.account_for_loss_in_pipeline_split
    uneven = parallel.decoder_first_pipeline_num_layers or parallel.decoder_last_pipeline_num_layers
    whole = parallel.pipeline_model_parallel_layout is None and not model.blocks_dealt_by_cost
    if stages < 1 or uneven or not whole:
        return found
    units = layers + extra + extra_last
    count = CHUNKS["zb-v"] if parallel.pipeline_schedule == "zb-v" else None
    chunks = stages * (count or parallel.num_virtual_stages_per_pipeline_rank or 1)
    if parallel.num_layers_per_virtual_pipeline_stage and stages > 1:
        chunks = stages * parallel.num_layers_per_virtual_pipeline_stage
    if chunks and units % chunks:
        found.append(
            f"`--num-layers` ({layers}) must be divisible by pipeline stages × virtual chunk "
            f"({chunks}); use {-(-units // chunks) * chunks - extra - extra_last}."
        )
    return found


def _layout_errors(parallel: ParallelConfig, model: ModelConfig) -> list[str]:
    """Refuse a layout that does not hold the model, or that another flag contradicts."""
    layout, size = parallel.pipeline_model_parallel_layout, parallel.pipeline_model_parallel_size
    if layout is None:
        return []
    name = f"`--pipeline-model-parallel-layout` ({layout})"
    try:
        stages = stages_of(layout)
    except ValueError:
        return [f"{name} may hold only E, t, m, L, |, *, brackets and numbers; write Et*2|t*2L."]
    if size < 2:
        return [f"{name} needs `--pipeline-model-parallel-size` ({size}) of at least 2; use 2."]
    other = {
        "--num-layers-per-virtual-pipeline-stage": parallel.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": parallel.num_virtual_stages_per_pipeline_rank,
        "--decoder-first-pipeline-num-layers": parallel.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": parallel.decoder_last_pipeline_num_layers,
        "--account-for-embedding-in-pipeline-split": (
            parallel.account_for_embedding_in_pipeline_split
        ),
        "--account-for-loss-in-pipeline-split": parallel.account_for_loss_in_pipeline_split,
    }
    found = _content_errors(name, stages, size, model)
    found += [
        f"{name} says which layers each stage holds, and so does `{flag}`; give one of them."
        for flag, value in other.items()
        if value
    ]
    return found


def _content_errors(name: str, stages: list[str], size: int, model: ModelConfig) -> list[str]:
    """Refuse stages that do not hold the model, or hold it where it cannot run."""
    found = []
    if len(stages) % size:
        found.append(
            f"{name} has {len(stages)} stages, which must be a multiple of "
            f"`--pipeline-model-parallel-size` ({size}); write {-(-len(stages) // size) * size}."
        )
    layers, depths = model.num_layers or 0, model.mtp_num_layers or 0
    wanted = "E" + "t" * layers + "m" * depths + "L"
    if "".join(stages) != wanted or "E" not in stages[0] or "L" not in stages[-1]:
        found.append(
            f"{name} must hold E in its first stage, then t {layers} times (`--num-layers`), then "
            f"m {depths} times (`--mtp-num-layers`), then L in its last stage; move, add or remove "
            "layers."
        )
    bare = [rank for rank in range(size) if not any(stages[rank::size])]
    if bare:
        found.append(
            f"{name} leaves pipeline rank {bare[0]} without any layer; give it one, or use fewer "
            "ranks."
        )
    holding = [index for index, stage in enumerate(stages) if "m" in stage]
    if len(holding) > 1 or (holding and holding[0] < len(stages) - size):
        found.append(f"{name} must hold every m in one of its last {size} stages; move them.")
    if holding and holding[0] % size == 0:
        found.append(f"{name} must not hold m on the first pipeline rank; move it to a later one.")
    return found


def _schedule_errors(parallel: ParallelConfig) -> list[str]:
    """Refuse stages and chunks that the schedule cannot have."""
    found = []
    schedule = (parallel.pipeline_schedule or "").removeprefix("core-")
    stages = parallel.pipeline_model_parallel_size
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    name = f"`--pipeline-schedule {parallel.pipeline_schedule}`"
    if schedule == "no-pipelining" and stages > 1:
        found.append(
            f"{name} is for one stage, but `--pipeline-model-parallel-size` is {stages}; use 1f1b."
        )
    if schedule in ("interleaved", "zb-v") and stages < 2:
        found.append(
            f"{name} needs `--pipeline-model-parallel-size` ({stages}) of at least 2; use "
            "no-pipelining."
        )
    elif schedule == "interleaved" and chunks < 2:
        found.append(
            f"{name} needs virtual chunks; give `--num-virtual-stages-per-pipeline-rank 2`."
        )
    elif schedule in CHUNKS and chunks != CHUNKS[schedule]:
        found.append(
            f"{name} has {CHUNKS[schedule]} chunk(s) on each rank, but the flags of virtual stages "
            f"ask for {chunks}; drop them."
        )
    group = parallel.microbatch_group_size_per_vp_stage
    if group is not None and group < stages:
        found.append(
            f"`--microbatch-group-size-per-virtual-pipeline-stage` ({group}) must be at least "
            f"`--pipeline-model-parallel-size` ({stages}); use {stages}."
        )
    return found


def interleaving_errors(parallel: ParallelConfig, training: TrainingConfig) -> list[str]:
    """Refuse numbers of micro-batches that megatron-core's own schedule cannot share out."""
    replicas = parallel.data_parallel_size
    if parallel.pipeline_schedule != "core-interleaved" or training.errors(replicas):
        return []
    stages = parallel.pipeline_model_parallel_size
    group = parallel.microbatch_group_size_per_vp_stage or stages
    for count in training.microbatch_counts(replicas):
        if count < group or 0 < count % group < stages:
            return [
                f"`--pipeline-schedule core-interleaved` needs steps whose micro-batches divide "
                f"into groups of {group} with none or at least {stages} left over, but one has "
                f"{count}; use interleaved, or another `--global-batch-size`."
            ]
    return []


def _zero_bubble_errors(parallel: ParallelConfig, model: ModelConfig) -> list[str]:
    """Refuse parts of a model that a schedule with deferred weight gradients cannot have."""
    schedule = parallel.pipeline_schedule or ""
    found = []
    if schedule.startswith("zb-") and model.transformer_impl == "transformer_engine":
        found.append(
            f"`--pipeline-schedule {schedule}` defers the weight gradients of our own layers, "
            "which `--transformer-impl transformer_engine` replaces; use "
            "`--transformer-impl torch`, or 1f1b."
        )
    if schedule != "zb-v":
        return found
    same_rank = {
        "tied embeddings": not model.untie_embeddings_and_output_weights,
        "`--mtp-num-layers`": bool(model.mtp_num_layers),
        "`--pipeline-model-parallel-layout`": bool(parallel.pipeline_model_parallel_layout),
        "an uneven split of the layers": bool(
            parallel.decoder_first_pipeline_num_layers
            or parallel.decoder_last_pipeline_num_layers
            or parallel.account_for_embedding_in_pipeline_split
            or parallel.account_for_loss_in_pipeline_split
        ),
    }
    return found + [
        f"`--pipeline-schedule zb-v` keeps the first and the last stage on one rank, which does "
        f"not go with {name}; use zb-h1."
        for name, given in same_rank.items()
        if given
    ]
