"""Build and train generator and critic, and give the teacher what it shares with them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.checkpoint.adapters import FrozenBase
from megatron_ext.checkpoint.lora import Network
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.state import CRITIC
from megatron_ext.config.checkpoint import CheckpointConfig
from megatron_ext.layers.chunks import build_chunks, wrap_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.optim.builder import build_optimizer, build_scheduler
from megatron_ext.optim.update import UpdateResult, update_parameters
from megatron_ext.video.model.wan.attention import FrameWindow
from megatron_ext.video.model.wan.flow import WAN
from megatron_ext.video.model.wan.model import VideoDiT
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.rules import window_of

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext

CRITIC_LR = 1 / 5
"""Share of the generator's learning rate, as 2e-6 to 1e-5 (arXiv:2509.22622)."""


@dataclass(frozen=True)
class TrainedNetwork:
    """A network with its gradients and its optimizer.

    Attributes:
        chunks: the network, wrapped for data parallelism, the only one of a list.
        optimizer: updates this network alone.
        scheduler: sets its learning rate.
        clip_grad: largest global norm of its gradient, 0 for no clipping.
        base: the weights under its adapters, where its checkpoints hold only adapters.
    """

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    clip_grad: float
    base: FrozenBase | None = None

    @property
    def network(self) -> Any:
        """Return the wrapped module, which is called."""
        return self.chunks[0]

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reduce(self, num_frames: Tensor | None, *, everywhere: bool) -> None:
        """Sum or average the gradients over the replicas; all ranks call this together.

        Args:
            num_frames: frames that counted on this rank; the gradients are divided by their sum
                over all ranks. None if the losses were means already.
            everywhere: leave whole gradients on every rank, also with a distributed optimizer.
        """
        finalize_model_grads(self.chunks, num_frames, force_all_reduce=everywhere)

    def update(self) -> UpdateResult:
        """Clip and apply the reduced gradients; all ranks call this together."""
        return update_parameters(self.optimizer, self.clip_grad)


def build_generator_chunk(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
) -> VideoDiT:
    """Build the generator of a run; see `Task.model_chunk`."""
    window = window_of(config.section(StreamingConfig))
    return build_network(
        config, transformer_config, context, size=None, window=window, vp_stage=vp_stage
    )


def build_network(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    *,
    size: str | None,
    window: FrameWindow | None = None,
    vp_stage: int | None = None,
    **stage: bool,
) -> VideoDiT:
    """Build one network; ``context`` tells the model that it has but one stage.

    Args:
        size: named size of the network; None for the generator's.
        window: frames that a causal network sees; None for critic and teacher.
    """
    options = dataclasses.replace(WAN.options(config), window=window)
    sizes = config.section(StreamingConfig).sizes(size)
    return VideoDiT.build(sizes, options, transformer_config, context, vp_stage=vp_stage)


def build_critic(
    config: RunConfig, context: ParallelContext, device: torch.device
) -> TrainedNetwork:
    """Build the critic, with its own optimizer and its own schedule of the learning rate."""
    streaming, lr = config.section(StreamingConfig), config.optimizer.lr
    assert lr is not None
    ratio = CRITIC_LR if streaming.critic_lr is None else streaming.critic_lr / lr
    optimizer = dataclasses.replace(
        config.optimizer, lr=lr * ratio, min_lr=config.optimizer.min_lr * ratio,
        lr_warmup_init=config.optimizer.lr_warmup_init * ratio,
    )  # fmt: skip
    own = dataclasses.replace(of_size(config, streaming.critic_size), optimizer=optimizer)
    transformer_config = build_transformer_config(own)
    build = partial(build_network, size=streaming.critic_size)
    bare = build_chunks(build, own, transformer_config, context)
    chunks = wrap_chunks(bare, own, transformer_config, context, device)
    built = build_optimizer(own, chunks)
    load_weights(config, context, streaming.critic_checkpoint, chunks, built, section=CRITIC)
    base = FrozenBase.of_run(config)
    if base is not None and streaming.critic_checkpoint is not None:
        average = config.checkpoint.pretrained_average
        base = FrozenBase.given(streaming.critic_checkpoint, average=average)
    scheduler = build_scheduler(own.optimizer, own.training, built)
    return TrainedNetwork(chunks, built, scheduler, streaming.critic_clip_grad, base)


def of_size(config: RunConfig, size: str | None) -> RunConfig:
    """Return the configuration of a run whose model has a named size, None for the generator's."""
    return dataclasses.replace(
        config, model=config.section(StreamingConfig).described(config.model, size)
    )


def load_weights(
    config: RunConfig,
    context: ParallelContext,
    path: str | None,
    chunks: list[Any],
    optimizer: MegatronOptimizer | None,
    section: str | None = None,
) -> None:
    """Start from the weights of a checkpoint, where one is given.

    Args:
        path: folder of the checkpoint; None leaves the network as it is.
        chunks: the network.
        optimizer: updates the network; None where it is not trained.
        section: network to take from the checkpoint of a streaming run; None for the generator.

    Raises:
        CheckpointError: none is there, or it holds another model.
    """
    if path is None:
        return
    asked = CheckpointConfig(
        pretrained_checkpoint=path,
        pretrained_average=config.checkpoint.pretrained_average,
        ckpt_format=config.checkpoint.ckpt_format,
        ckpt_fully_parallel_load=config.checkpoint.ckpt_fully_parallel_load,
        dist_ckpt_strictness=config.checkpoint.dist_ckpt_strictness,
    )
    manager = CheckpointManager(asked, context, section=section)
    loaded = manager.load(model=chunks, optimizer=optimizer, scheduler=None)
    if loaded is not None and context.is_reporting_rank:
        print("\n".join(f"> {note}" for note in loaded.notes), end="\n" * bool(loaded.notes))


def network_of(name: str | None) -> Network:
    """Return what `checkpoint.lora` needs to know of the critic, or by default of the generator."""
    return _CRITIC if name == CRITIC else Network(build_generator_chunk)


def _build_critic_chunk(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
) -> VideoDiT:
    return build_network(
        config, transformer_config, context, size=config.section(StreamingConfig).critic_size
    )


def _described_critic(run: RunConfig) -> RunConfig:
    return of_size(run, run.section(StreamingConfig).critic_size)


_CRITIC = Network(
    _build_critic_chunk,
    _described_critic,
    CRITIC,
    lambda run: run.section(StreamingConfig).critic_checkpoint,
)
