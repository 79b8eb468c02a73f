"""The frozen teacher, which may have another parallel layout than the trained networks.

Every rank of a replica has whole latents, timesteps, texts and predictions. Therefore a copy of the
teacher can span any group of consecutive ranks. If a group covers several replicas, it predicts the
samples of all of them. If a replica has several groups, they divide its samples.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.config.rules.parallel import resolve_parallel
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import peers, secondary_groups
from megatron_ext.parallel.grid import Layout
from megatron_ext.schedules.forward import collect_outputs, forward_engine
from megatron_ext.video.networks.lookup import streamed_network
from megatron_ext.video.sampling.velocity import from_last_stage
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.networks import build_network, load_weights, of_role
from megatron_ext.video.streaming.rules import TeacherSizes, teacher_sizes

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext


def build_teacher(
    config: RunConfig, context: ParallelContext, device: torch.device
) -> torch.nn.Module:
    """Build this rank's stage of the teacher, which predicts the flow.

    The teacher is frozen, without gradient buffers and optimizer. All ranks call this together. The
    random state of the run does not change. Without a checkpoint the teacher's random weights are
    the same in any layout, and their seed differs from that of generator and critic.

    Raises:
        CheckpointError: ``--teacher-checkpoint`` does not exist, or holds another model.
    """
    sizes = teacher_sizes(config.section(StreamingConfig), config.parallel)
    own = _config_of(config, sizes)
    if sizes is None:
        return _network(own, build_transformer_config(own), context, device)
    run = context.layout
    minutes = config.parallel.distributed_timeout_minutes
    # Consecutive ranks must form a group, so the teacher's data-parallel rank varies slowest.
    layout = Layout(run.world_size, sizes.tensor, sizes.pipeline, use_tp_pp_dp_mapping=True)
    lies = secondary_groups(layout, timeout_minutes=minutes, recorder=context.recorder)
    transformer_config = build_transformer_config(own)
    step, block = sorted((run.model_parallel_size, sizes.ranks))
    return ParallelTeacher(
        _network(own, transformer_config, lies, device),
        transformer_config,
        lies,
        peers(step, block, run.world_size, timeout_minutes=minutes),
        num_replicas=max(1, sizes.ranks // run.model_parallel_size),
    )


def _config_of(config: RunConfig, sizes: TeacherSizes | None) -> RunConfig:
    """Return the configuration of a run whose model is the teacher in the layout ``sizes``.

    None as ``sizes`` keeps the layout of the run.
    """
    parallel = config.parallel
    if sizes is not None:
        own = dataclasses.replace(
            parallel, tensor_model_parallel_size=sizes.tensor, context_parallel_size=1,
            pipeline_model_parallel_size=sizes.pipeline, pipeline_schedule=None,
        )  # fmt: skip
        parallel = resolve_parallel(own, config.model, parallel.world_size)
    return dataclasses.replace(
        of_role(config, "teacher"),
        parallel=parallel,
        training=dataclasses.replace(config.training, seed=config.training.seed + 1),
        lora=LoraConfig(),
    )


def _network(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    device: torch.device,
) -> torch.nn.Module:
    """Build this rank's stage of the teacher and load its weights."""
    build = partial(build_network, role="teacher")
    (bare,) = build_chunks(build, config, transformer_config, context)
    bare = bare.to(device).requires_grad_(False).eval()
    network: Any = Float16Module(transformer_config, bare) if config.precision.bf16 else bare
    path = config.section(StreamingConfig).teacher_checkpoint
    load_weights(config, context, path, [network], None)
    return network  # type: ignore[no-any-return]


class ParallelTeacher(torch.nn.Module):
    """A teacher with a parallel layout of its own; it predicts the flow.

    Ranks that hold one copy of the teacher are a teacher group.

    Args:
        network: this rank's stage.
        context: parallel groups of the teacher; each teacher group is a data-parallel replica.
        peers: the ranks with which this rank exchanges samples. If a teacher group covers several
            replicas, these are the ranks at the same position in each of the replicas. If a replica
            has several teacher groups, these are the ranks at the same position in each group.
        num_replicas: number of replicas of the run that a teacher group covers; 1 if the group is
            within a replica.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        transformer_config: TransformerConfig,
        context: ParallelContext,
        peers: ProcessGroup,
        *,
        num_replicas: int,
    ) -> None:
        super().__init__()
        self.network = network
        self._engine = forward_engine([network], transformer_config, context)
        self._context = context
        self._peers = peers
        self._num_replicas = num_replicas

    @property
    def _model(self) -> Any:
        (model,) = unwrap_model([self.network])
        return model

    @torch.no_grad()
    def forward(self, *, x: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        """Return the flow that the teacher predicts for noised latents ``x``, in float32.

        All ranks of the run call this together, with the same number of samples. All ranks of a
        replica have the same samples.

        Raises:
            DataError: the inputs do not fit the model (raised on all ranks).
        """
        # Check this before a rank waits for another, so that all ranks raise the error.
        streamed_network().check_inputs(self._model.sizes, x, timesteps, text)
        own = x, timesteps, text
        if self._num_replicas > 1:
            # Predict the samples of all replicas of the group; keep those of this replica.
            rows = tuple(_gathered(part, self._peers) for part in own)
            flow = self._predicted(rows, self._num_replicas)
            return flow.chunk(self._num_replicas)[self._peers.rank()]
        # The groups of a replica divide its samples. If their number does not divide the samples,
        # some groups compute the same part.
        num_parts = gcd(x.size(0), self._peers.size())
        number = self._peers.rank() % num_parts
        flow = self._predicted(tuple(part.chunk(num_parts)[number] for part in own), 1)
        return _gathered(flow, self._peers)[: x.size(0)]

    def _predicted(self, rows: tuple[Tensor, ...], num_microbatches: int) -> Tensor:
        """Return the flow of n samples on every rank of the teacher group.

        ``rows`` are (latents, timesteps, texts), each ``[n, ...]``. The samples are run in
        ``num_microbatches`` micro-batches, but one by one if the teacher has pipeline stages.
        """
        x = rows[0]
        staged = self._context.layout.pipeline_model_parallel_size > 1
        # With pipeline stages, each sample is a micro-batch, to keep all stages busy.
        parts = [part.chunk(x.size(0) if staged else num_microbatches) for part in rows]
        names = "x", "timesteps", "text"
        inputs = [dict(zip(names, batch, strict=True)) for batch in zip(*parts, strict=True)]
        flows = collect_outputs(self._engine, inputs, self._model.boundary_shape(**inputs[0]))
        flow = torch.cat(flows).float() if flows else torch.empty_like(x).float()
        return from_last_stage(flow, self._context) if staged else flow


def _gathered(part: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tensors ``part`` of all ranks of a group, joined along the first dimension."""
    if group.size() == 1:
        return part
    whole = part.new_empty(group.size() * part.size(0), *part.shape[1:])
    torch.distributed.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole
