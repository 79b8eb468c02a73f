"""Builds the networks of a streaming run, loads their weights, and updates the trained ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.checkpoint.adapters import FrozenBase
from megatron_ext.checkpoint.conversion import Network
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.state import CRITIC
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.layers.chunks import build_chunks, wrap_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.optim.builder import build_optimizer
from megatron_ext.optim.schedule import Schedule, build_scheduler
from megatron_ext.optim.update import UpdateResult, update_parameters
from megatron_ext.train.task import later
from megatron_ext.video.config.weights import FILL, is_published
from megatron_ext.video.model.chunk import VideoChunk
from megatron_ext.video.networks.lookup import streamed_network
from megatron_ext.video.streaming.config import Role, StreamingConfig

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext

CRITIC_LR = 1 / 5
"""The critic's default learning rate as a fraction of the generator's: 2e-6 / 1e-5 in LongLive
(arXiv:2509.22622)."""


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network with its gradients, optimizer and learning rate schedule.

    Attributes:
        chunks: a list with one item: the network, wrapped for data parallelism.
        clip_grad: largest global norm of the gradient; 0 for no clipping.
        base: which frozen weights the LoRA adapters are for, if checkpoints leave these weights
            out; else None.
    """

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: Schedule
    clip_grad: float
    base: FrozenBase | None = None

    @property
    def network(self) -> Any:
        """Return the wrapped module, on which forward passes are called."""
        return self.chunks[0]

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reduce(self, num_frames: Tensor | None, *, everywhere: bool) -> None:
        """Sum or average the gradients over the replicas; all ranks call this together.

        Args:
            num_frames: number of this rank's frames with a loss. Gradients are summed, and divided
                by the number of such frames in all replicas. None averages the gradients instead.
            everywhere: whether every rank gets whole gradients, even with a distributed optimizer.
        """
        finalize_model_grads(self.chunks, num_frames, force_all_reduce=everywhere)

    def update(self) -> UpdateResult:
        """Clip the reduced gradients and update the weights; all ranks call this together."""
        return update_parameters(self.optimizer, self.clip_grad)


def build_network(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    *,
    role: Role = "generator",
    vp_stage: int | None = None,
    **stage: bool,
) -> VideoChunk:
    """Build generator, critic or teacher; only the generator has causal attention.

    ``vp_stage`` is the index of the virtual chunk, None if the rank has only one. ``stage`` is
    ignored, because the model takes its pipeline stage from ``context``.
    """
    streaming = config.section(StreamingConfig)
    network = streamed_network()
    options = network.options(streaming, config.parallel, causal=role == "generator")
    sizes = streaming.sizes(role)
    return network.chunk.build(sizes, options, transformer_config, context, vp_stage=vp_stage)


def build_critic(
    config: RunConfig, context: ParallelContext, device: torch.device
) -> TrainedNetwork:
    """Build the critic, its optimizer and schedule; load ``--critic-checkpoint``, if given."""
    streaming = config.section(StreamingConfig)
    lr = config.optimizer.lr
    assert lr is not None
    ratio = CRITIC_LR if streaming.critic_lr is None else streaming.critic_lr / lr
    optimizer = dataclasses.replace(
        config.optimizer, lr=lr * ratio, min_lr=config.optimizer.min_lr * ratio,
        lr_warmup_init=config.optimizer.lr_warmup_init * ratio,
    )  # fmt: skip
    own = dataclasses.replace(of_role(config, "critic"), optimizer=optimizer)
    transformer_config = build_transformer_config(own)
    bare = build_chunks(partial(build_network, role="critic"), own, transformer_config, context)
    chunks = wrap_chunks(bare, own, transformer_config, context, device)
    built = build_optimizer(own, chunks, context.pgs)
    path = streaming.critic_checkpoint
    checkpoint = config.checkpoint
    load_weights(own, context, path, chunks, built, section=CRITIC)
    base = FrozenBase.of_run(config.lora, config.training.seed)
    if base is not None and path is not None:
        base = base_of(path, checkpoint)
    scheduler = build_scheduler(own, built)
    return TrainedNetwork(chunks, built, scheduler, streaming.critic_clip_grad, base)


def of_role(config: RunConfig, role: Role) -> RunConfig:
    """Return ``config`` with the section ``model`` set to the sizes of the network ``role``."""
    model = config.section(StreamingConfig).described(config.model, role)
    return dataclasses.replace(config, model=model)


def base_of(path: str, checkpoint: CheckpointConfig) -> FrozenBase:
    """Return the identity of the weights of ``--critic-checkpoint``, for adapters on them."""
    if not is_published(path):
        return FrozenBase.given(path, average=checkpoint.pretrained_average)
    look = later("megatron_ext.video.convert.training:base_of")
    published: FrozenBase = look(path, "--critic-checkpoint")
    return published


def load_weights(
    config: RunConfig,
    context: ParallelContext,
    path: str | None,
    chunks: list[Any],
    optimizer: MegatronOptimizer | None,
    section: str | None = None,
) -> None:
    """Load the weights in ``path`` into ``chunks``; do nothing if ``path`` is None.

    They are a checkpoint, or published weights of the network.

    Args:
        config: the configuration of the network; in the section ``checkpoint``, flags on how
            checkpoints are read, whose paths are not used.
        optimizer: None, or the optimizer of ``chunks``, whose fp32 copies of the weights are
            replaced too.
        section: `CRITIC` to load the critic of a streaming run; None to load the generator, or the
            model of another run.

    Raises:
        CheckpointError: ``path`` has no checkpoint and no published weights, or those of another
            model.
    """
    if path is None:
        return
    if is_published(path):
        sizes = unwrap_model(chunks)[0].sizes
        load = later("megatron_ext.video.convert.training:load_weights")
        done = load(config, chunks, Path(path), None, sizes)
        if optimizer is not None:
            optimizer.reload_model_params()
        _tell(done.notes, context)
        return
    checkpoint = config.checkpoint
    kept = (
        "pretrained_average", "ckpt_format", "ckpt_fully_parallel_load", "dist_ckpt_strictness",
    )  # fmt: skip
    same = {name: getattr(checkpoint, name) for name in kept}
    flags = CheckpointConfig(pretrained_checkpoint=path, **same)
    manager = CheckpointManager(flags, context, section=section)
    loaded = manager.load(model=chunks, optimizer=optimizer, scheduler=None)
    _tell([] if loaded is None else loaded.notes, context)


def _tell(notes: Sequence[str], context: ParallelContext) -> None:
    for note in notes if context.is_reporting_rank else ():
        print(f"> {note}", flush=True)


def network_of(name: str | None) -> Network:
    """Tell `merge_checkpoint` how to build the generator or critic of a streaming checkpoint.

    A ``name`` of "critic" selects the critic; any other value, such as None, the generator.
    """
    published: dict[str, Any] = {"fill": FILL, "is_published": is_published}
    if name != CRITIC:
        return Network(build_network, **published)
    return Network(
        partial(build_network, role="critic"),
        lambda config: of_role(config, "critic"),
        CRITIC,
        lambda config: config.section(StreamingConfig).critic_checkpoint,
        **published,
    )
