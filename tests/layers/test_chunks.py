"""Chunks of a model: what wraps them, how their gradients are cut, and how weights are named."""

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers import chunks as chunks_module
from megatron_ext.layers.chunks import (
    _ddp_config,
    _In16Bits,
    build_chunks,
    check_chunk,
    named_parameters,
    wrap_chunks,
)
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.model.gpt import build_gpt_chunk
from tests.ranks import ranks
from tests.training_runs import SMALL, config_of

MILLION = 1_000_000
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.mark.parametrize(
    ("flags", "replicas", "size"),
    [
        ({}, 2, None),
        ({"overlap_grad_reduce": True}, 2, 40 * MILLION),
        ({"overlap_grad_reduce": True}, 41, 41 * MILLION),
        ({"data_parallel_sharding_strategy": "optim_grads"}, 2, 40 * MILLION),
        ({"overlap_grad_reduce": True, "ddp_bucket_size": 77}, 50, 77),
        ({"overlap_grad_reduce": True, "ddp_num_buckets": 3}, 50, 33),
        ({"data_parallel_sharding_strategy": "optim_grads", "ddp_num_buckets": 4}, 2, 25),
        ({"ddp_bucket_size": 77}, 2, None),
    ],
)
def test_a_bucket_is_as_large_as_the_flags_say(
    flags: dict[str, Any], replicas: int, size: int | None
) -> None:
    """By default at least 40 million parameters, and a million for each replica."""
    optimizer = dataclasses.replace(OptimizerConfig(), **flags)
    assert optimizer.bucket_size(100, replicas) == size


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("on", [False, True])
@ranks()
def test_flags_of_gradients_reach_megatron_core(
    context: ParallelContext, on: bool, overlap: bool
) -> None:
    config = config_of([*SMALL, "--bf16"])
    optimizer = dataclasses.replace(
        config.optimizer,
        use_distributed_optimizer=True,
        ddp_average_in_collective=on,
        align_param_gather=on,
        overlap_param_gather=overlap,
        overlap_grad_reduce=overlap,
        ddp_num_buckets=7,
    )
    precision = dataclasses.replace(config.precision, accumulate_allreduce_grads_in_fp32=on)
    fp8 = dataclasses.replace(config.fp8, fp8_param_gather=on)
    made = _ddp_config(optimizer, precision, fp8, context, 77)
    assert made.fp8_param_gather == on
    assert (made.average_in_collective, made.grad_reduce_in_fp32) == (on, on)
    assert (made.overlap_grad_reduce, made.overlap_param_gather) == (overlap, overlap)
    assert made.align_param_gather == (on and overlap)
    assert made.bucket_size == (11 if overlap else None)
    assert made.use_distributed_optimizer and not made.check_for_nan_in_grad
    shards = dataclasses.replace(optimizer, data_parallel_sharding_strategy="optim_grads")
    assert not _ddp_config(shards, precision, config.fp8, context, 77).overlap_grad_reduce


def chunks_of(context: ParallelContext, words: str, *, overlap: bool = False) -> list[Any]:
    """Return this rank's wrapped chunks; with ``overlap``, which Gloo can do as well."""
    config = config_of(
        [*SMALL, "--padded-vocab-size", "128", *words.split()], ranks=context.layout.world_size
    )
    optimizer = dataclasses.replace(config.optimizer, overlap_grad_reduce=overlap)
    config = dataclasses.replace(config, optimizer=optimizer)
    transformer_config = build_transformer_config(config)
    chunks = build_chunks(build_gpt_chunk, config, transformer_config, context)
    device = torch.device("cpu")
    return list(wrap_chunks(chunks, config, transformer_config, context, device))


@ranks(dp=2)
def test_weights_that_replicas_draw_apart_are_made_equal(context: ParallelContext) -> None:
    """The first replica's weights count with --data-parallel-random-init."""
    torch.manual_seed(context.rank)
    words = "--data-parallel-random-init --use-cpu-initialization"
    (chunk,) = chunks_of(context, words)
    for name, parameter in chunk.named_parameters():
        first = parameter.detach().clone()
        torch.distributed.broadcast(first, src=0)
        assert torch.equal(parameter, first), name


@ranks(pp=2, vpp=2)
def test_weights_are_named_after_their_chunk_where_there_are_several(
    context: ParallelContext,
) -> None:
    """Only the first chunk of a rank has several buckets, which overlap needs nowhere else."""
    words = "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank"
    words = f"{words} 2 --bf16 {UNTIED}"
    chunks = chunks_of(context, words, overlap=True)
    assert [chunk.module.module.vp_stage for chunk in chunks] == [0, 1]
    several = [chunk.bucket_size is not None for chunk in chunks]
    assert several == [context.pp_rank == 0, False]
    names = [name for name, _ in named_parameters(chunks)]
    assert len(names) == sum(1 for chunk in chunks for _ in chunk.parameters())
    for index, chunk in enumerate(chunks):
        own = [f"chunk {index}: {name}" for name, _ in chunk.named_parameters()]
        assert own == [name for name in names if name.startswith(f"chunk {index}: ")]
        is_last = context.pp_rank == 1 and index == 1
        assert chunk.module._is_last is is_last
    alone = [name for name, _ in named_parameters(chunks[:1])]
    assert alone == [name for name, _ in chunks[0].named_parameters()]
    frozen = next(iter(chunks[0].parameters()))
    frozen.requires_grad_(False)
    assert len(named_parameters(chunks[:1])) == len(alone) - 1


@ranks()
def test_without_virtual_stages_a_chunk_has_no_number(context: ParallelContext) -> None:
    (chunk,) = chunks_of(context, "--bf16")
    assert chunk.module.module.vp_stage is None and chunk.module._is_last


@ranks()
def test_buckets_are_cut_from_the_parameters_that_train(context: ParallelContext) -> None:
    words = "--lora-rank 4 --ddp-num-buckets 3"
    (chunk,) = chunks_of(context, words, overlap=True)
    trained = sum(p.numel() for p in chunk.parameters() if p.requires_grad)
    assert chunk.ddp_config.bucket_size == trained // 3


class Same(torch.nn.Module):
    """A module that returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("is_last", [False, True])
@ranks()
def test_only_the_last_stage_returns_float32(context: ParallelContext, is_last: bool) -> None:
    transformer_config = build_transformer_config(config_of([*SMALL, "--bf16"]))
    chunk = _In16Bits(transformer_config, Same(), is_last=is_last)
    x = torch.ones(2, dtype=torch.bfloat16)
    assert chunk(x).dtype == (torch.float32 if is_last else torch.bfloat16)
    assert chunk(x, fp32_output=False).dtype == torch.bfloat16


def test_what_a_users_model_lacks_is_said_in_a_sentence_each() -> None:
    """Attributes of a tied embedding are only asked for where two stages share one."""
    methods = {"sharded_state_dict": None, "set_input_tensor": None}
    tied = {"pre_process": True, "share_embeddings_and_output_weights": False}
    bare: Any = SimpleNamespace(**methods)
    check_chunk(bare, tied_stages=False)
    check_chunk(SimpleNamespace(**methods, **tied), tied_stages=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        check_chunk(bare, tied_stages=True)
    assert [text.split("`")[3] for text in caught.value.messages] == list(tied)
    with pytest.raises(ConfigError, match="has no `set_input_tensor`, by which a pipeline stage"):
        check_chunk(SimpleNamespace(sharded_state_dict=None), tied_stages=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("words", "tied"), [("", True), (UNTIED, False)])
@ranks(pp=2)
def test_stages_that_share_an_embedding_ask_more_of_a_model(
    context: ParallelContext, words: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = mock.Mock()
    monkeypatch.setattr(chunks_module, "check_chunk", record)
    chunks_of(context, f"--pipeline-model-parallel-size 2 {words}")
    assert record.call_args.kwargs == {"tied_stages": tied}
