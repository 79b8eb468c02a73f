"""Whole training steps on fake tensors, built and run by the package's own functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from benchmarks.gpu_setup import LLAMAS, Llama
from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import StepLoader
from megatron_ext.layers.chunks import build_chunks, wrap_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.optim.builder import build_optimizer
from megatron_ext.optim.schedule import build_scheduler
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.task import GPT
from megatron_ext.train.step import StepInputs, StepRunner
from megatron_ext.train.task import Task
from tests.gpu_proof.fake_cuda import DEVICE
from tests.gpu_proof.fake_ranks import one_rank_of
from tests.gpu_proof.trace import Trace
from tests.training_runs import prepared

LAYERS, LENGTH = 2, 8192
END_OF_DOCUMENT = 0
REPLACED = {
    "--multi-latent-attention": ("--group-query-attention", "--num-query-groups"),
    "--geglu": ("--swiglu",),
}
"""Flags of a Llama that do not go with another flag."""


def llama(size: str = "3b") -> Llama:
    """Return a Llama of two layers."""
    return dataclasses.replace(LLAMAS[size], layers=LAYERS)


def flags(words: str = "", *, size: str = "3b", length: int = LENGTH, batch: int = 1) -> list[str]:
    """Return flags of pretrain_gpt.py in bf16; weights start on the host, where fakes are free."""
    given = [*llama(size).flags(length, batch), *"--bf16 --use-cpu-initialization".split()]
    own = words.split()
    for name in (name for other in own for name in REPLACED.get(other, ())):
        at = given.index(name)
        end = at + 1 if given[at + 1].startswith("--") else at + 2
        del given[at:end]
    return given + own


def samples(batch: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Yield what a data loader yields, on the host."""
    while True:
        ids = {name: torch.zeros(batch, length, dtype=torch.int64) for name in KEYS}
        yield {**ids, "loss_mask": torch.ones(batch, length)}


KEYS = ("tokens", "labels", "position_ids")


@dataclass
class Step:
    """A run of one rank, ready to take steps.

    Attributes:
        num_weights: parameters on this rank.
        num_tokens: tokens that this rank computes in a step.
    """

    config: RunConfig
    context: ParallelContext
    runner: StepRunner
    num_weights: int

    @property
    def num_tokens(self) -> int:
        training, layout = self.config.training, self.context.layout
        assert self.config.model.seq_length is not None and training.global_batch_size is not None
        sharing = layout.world_size // layout.pipeline_model_parallel_size
        return self.config.model.seq_length * training.global_batch_size // sharing

    def take(self, *, documents: bool = False) -> Trace:
        """Read a batch, train on it, and return what the device was asked for."""
        model, training = self.config.model, self.config.training
        batch, _ = training.batch_sizes
        assert model.seq_length is not None and model.padded_vocab_size is not None
        number = training.global_batch_size // (batch * self.context.layout.data_parallel_size)  # type: ignore[operator]
        loader = StepLoader(
            samples(batch, model.seq_length),
            self.context,
            (batch, model.seq_length),
            DEVICE,
            mask_documents_at=END_OF_DOCUMENT if documents else None,
            mtp_depths=model.mtp_num_layers or 0,
        )
        vocabulary = model.padded_vocab_size // self.context.pgs.tp.size()
        trace = Trace(
            vocabulary,
            alone=self.context.layout.world_size == 1,
            routed=self.num_tokens * self.config.section(MoEConfig).moe_router_topk,
        )
        with trace:
            batches = loader.next_step(number)
            self.runner.train(StepInputs(batches, number), training.global_batch_size)  # type: ignore[arg-type]
        return trace


@contextmanager
def built(
    words: Sequence[str], *, ranks: int = 1, rank: int = 0, task: Task = GPT
) -> Iterator[Step]:
    """Yield a run of pretrain_gpt.py on one of so many fake ranks; call it under a fake mode."""
    _, config, _ = prepared(words, task, ranks=ranks, device="cuda")
    with one_rank_of(config, rank) as context:
        # What waits before the first step does not matter; the trace answers.
        with Trace(0, alone=True):
            runner = _runner(config, context, task)
        count = sum(p.numel() for chunk in runner.chunks for p in chunk.parameters())
        yield Step(config, context, runner, count)


def _runner(config: RunConfig, context: ParallelContext, task: Task) -> StepRunner:
    """Build model, optimizer and runner as `train.setup.build_run` does, without data."""
    transformer_config: Any = build_transformer_config(config)
    vocabulary = config.model.unpadded_vocab_size
    bare = build_chunks(task.model_chunk, config, transformer_config, context, vocabulary)
    for chunk in bare:
        _number_chunks_of_experts(chunk)
    chunks = wrap_chunks(bare, config, transformer_config, context, DEVICE)
    optimizer = build_optimizer(config, chunks, context.pgs)
    scheduler = build_scheduler(config, optimizer)
    return StepRunner(config, task, context, transformer_config, chunks, optimizer, scheduler)


def _number_chunks_of_experts(chunk: torch.nn.Module) -> None:
    """Give dispatchers real numbers for the order of tokens by rank and by expert; fakes have none.

    megatron-core sorts the parts of a rank's tokens by them, on the host.
    """
    for module in chunk.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
            local = dispatcher.num_local_experts
            with unset_fake_temporarily():
                numbers = torch.arange(dispatcher.num_experts * dispatcher.tp_size)
                by_expert, by_rank = numbers.view(-1, local).T, numbers.view(local, -1).T
                dispatcher.sort_input_by_local_experts = by_expert.ravel()
                dispatcher.restore_output_by_local_experts = by_rank.ravel()
