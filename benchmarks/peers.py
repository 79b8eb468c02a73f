"""The same Llama in other people's code, each as a training step: what `gpu_peers.py` compares.

A peer takes sizes and a device, and gives a function from token ids ``[b, s]`` and labels
``[b, s]`` to the loss of a whole step: forward, backward, clipping and AdamW. Weights of peers
without mixed precision of their own are kept in float32 and computed with in bfloat16 (autocast);
megatron-core keeps bfloat16 weights beside float32 ones, as ours does. All are compiled, but for
megatron-core, which compiles its own pointwise functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from benchmarks.gpu_setup import Llama, built_run, version_of
from benchmarks.torch_llama import EPSILON, THETA, TorchLlama, token_loss
from megatron_ext.data.batch import Batch
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.task import GPT
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepInputs

LEARNING_RATE = 1e-5
CLIP = 1.0
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Place:
    """The device and sizes that a peer computes with.

    Attributes:
        context: groups of the only rank.
        device: cuda or cpu.
        compiled: ``torch.compile`` the peers.
        length, batch: tokens of a sequence and sequences of a step.
        flags: more flags of pretrain_gpt.py, for ours.
    """

    context: ParallelContext
    device: torch.device
    compiled: bool
    length: int
    batch: int
    flags: tuple[str, ...] = ()

    def compile(self, function: Any) -> Any:
        return torch.compile(function) if self.compiled else function


@dataclass(frozen=True)
class Peer:
    """A training step and the number of weights that it trains."""

    step: Step
    parameters: int


def _adam(model: nn.Module, *, fused: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=fused)


def of_module(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
    *,
    half: bool = True,
    fused: bool | None = None,
) -> Peer:
    """Make the usual training step around a module and its loss.

    With ``half`` it computes in bfloat16. ``fused`` asks for torch's fused AdamW, which is the
    default on a GPU.
    """
    optimizer = _adam(model, fused=device.type == "cuda" if fused is None else fused)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = loss_of(tokens, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        return loss.detach()

    return Peer(step, sum(p.numel() for p in model.parameters()))


def plain_torch(sizes: Llama, place: Place) -> Peer:
    """Build `TorchLlama`, compiled together with its loss."""
    with place.device:
        model = TorchLlama(sizes)
    loss = place.compile(lambda tokens, labels: token_loss(model(tokens), labels))
    return of_module(model, loss, place.device)


def hugging_face(sizes: Llama, place: Place) -> Peer:
    """Build transformers' LlamaForCausalLM with its own loss, compiled."""
    from transformers import LlamaForCausalLM

    with place.device:
        model = LlamaForCausalLM(hugging_face_config(sizes, place.length)).float()
    run = place.compile(model)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = run(
            input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False
        ).loss
        return result

    return of_module(model, loss_of, place.device)


def hugging_face_config(sizes: Llama, length: int) -> Any:
    """Return the sizes in transformers' words."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.groups,
        max_position_embeddings=length,
        rms_norm_eps=EPSILON,
        rope_theta=THETA,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )


def core_chunk(config: Any, core: Any, context: ParallelContext, **position: Any) -> GPTModel:
    """Build megatron-core's GPTModel with its local layers; a model provider of `Task`."""
    model = config.model
    positions = config.section(PositionConfig)
    return GPTModel(
        config=core,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=core.normalization),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=positions.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=positions.rotary_base,
        pg_collection=context.pgs,
        **position,
    )


def run_of(sizes: Llama, place: Place, task: Any, flags: tuple[str, ...]) -> Run:
    """Build a run of this project, without reports."""
    words = [*sizes.flags(place.length, place.batch), "--bf16", *flags]
    return built_run(words, place.context, place.device, task)


def parameters_of(run: Run) -> int:
    """Return the number of weights that are trained."""
    return sum(p.numel() for chunk in run.chunks for p in chunk.parameters())


def megatron_core(sizes: Llama, place: Place) -> Peer:
    """Build megatron-core alone: its local layers, schedule, data parallelism and optimizer."""
    task = dataclasses.replace(GPT, model_chunk=core_chunk)
    flags = ("--transformer-impl", "torch", "--cross-entropy-impl", "eager")
    run = run_of(sizes, place, task, flags)
    schedule = get_forward_backward_func()

    def forward(batches: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> Any:
        tokens, labels = next(batches)
        positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        losses = model(tokens, positions, None, labels=labels)
        count = torch.full((), labels.numel(), dtype=torch.int, device=labels.device)

        def loss(losses: Tensor) -> Any:
            total = losses.float().sum()
            return total, count, total.detach() / count

        return losses, loss

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        assert run.optimizer is not None
        chunk = run.chunks[0]
        chunk.zero_grad_buffer()
        run.optimizer.zero_grad()
        reports = schedule(
            forward_step_func=forward,
            data_iterator=iter([(tokens, labels)]),
            model=chunk,
            num_microbatches=1,
            seq_length=place.length,
            micro_batch_size=place.batch,
            forward_only=False,
        )
        run.optimizer.step()
        loss: Tensor = reports[0]
        return loss

    return Peer(step, parameters_of(run))


def ours(sizes: Llama, place: Place) -> Peer:
    """Build this project's own step, with the torch layers unless the flags say otherwise."""
    run = run_of(sizes, place, GPT, ("--transformer-impl", "torch", *place.flags))
    return Peer(step_of(run), parameters_of(run))


def step_of(run: Run) -> Step:
    """Return the training step of a run of this project."""

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        weights = torch.ones(labels.shape, device=labels.device)
        inputs = StepInputs([Batch(tokens, labels, weights, positions)], 1)
        result = run.runner.train(inputs, len(tokens))
        return next(iter(result.losses.values()))

    return step


def torchtitan(sizes: Llama, place: Place) -> Peer:
    """Build torchtitan's Llama 3 with flex attention, compiled by blocks as its trainer does.

    Raises:
        Exception: another version than 0.3, whose parts have other names.
    """
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers

    init = {"weight": lambda weight: nn.init.normal_(weight, std=0.02)}
    ones = {"weight": nn.init.ones_}
    rope = ComplexRoPE.Config(
        dim=sizes.head_size, max_seq_len=place.length, theta=THETA, scaling="none"
    )
    model = Llama3Model.Config(
        dim=sizes.hidden,
        vocab_size=sizes.vocab,
        tok_embeddings=Embedding.Config(
            num_embeddings=sizes.vocab, embedding_dim=sizes.hidden, param_init=init
        ),
        norm=RMSNorm.Config(normalized_shape=sizes.hidden, param_init=ones),
        lm_head=Linear.Config(in_features=sizes.hidden, out_features=sizes.vocab, param_init=init),
        layers=_build_llama3_layers(
            n_layers=sizes.layers,
            dim=sizes.hidden,
            n_heads=sizes.heads,
            n_kv_heads=sizes.groups,
            hidden_dim=sizes.ffn,
            rope=rope,
            attn_backend="flex",
        ),
    ).build()
    model.to(place.device)
    model.init_states(buffer_device=place.device)
    if place.compiled:
        for layer in model.layers.values():
            layer.compile(fullgraph=True)
    loss = place.compile(token_loss)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        masks = model.get_attention_masks(positions)
        result: Tensor = loss(model(tokens, positions, masks), labels)
        return result

    return of_module(model, loss_of, place.device)


OURS = "ours"
PEERS: dict[str, Callable[[Llama, Place], Peer]] = {
    OURS: ours,
    "plain torch": plain_torch,
    "Hugging Face": hugging_face,
    "megatron-core": megatron_core,
    "torchtitan": torchtitan,
}
PACKAGES = {
    OURS: "megatron-ext",
    "plain torch": "torch",
    "Hugging Face": "transformers",
    "megatron-core": "megatron-core",
    "torchtitan": "torchtitan",
}


def version_of_peer(name: str) -> str | None:
    """Return a peer's version, None where it is not installed; ours need not be."""
    return version_of(PACKAGES[name]) or ("from its folder" if name == OURS else None)
