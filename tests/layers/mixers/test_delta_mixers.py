"""Gated DeltaNet and Kimi Delta Attention: transformers' classes, plain float64 torch, layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer import build_module
from torch import Tensor
from transformers import AutoConfig
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from megatron_ext.errors import ConfigError
from megatron_ext.layers.initialization import initialize_by_name, mark_methods, unmark_methods
from megatron_ext.layers.mixers import gated_delta_net, kimi_delta
from megatron_ext.layers.mixers.delta_mixer import DeltaMixer
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from tests.layers import plain
from tests.layers.mixers.delta_plain import recurrence, relative
from tests.layers.mixers.messages import SentBytes
from tests.layers.plain import drawn, local
from tests.ranks import on_ranks, ranks
from tests.training_runs import SMALL, config_of

S, B, H = 48, 2, 32
KEY, VALUE, WIDTH = 8, 12, 4
ENDS = [[1, 2, 13, 30], [24]]
KINDS = {"G": gated_delta_net, "K": kimi_delta}
LAYOUTS: list[tuple[dict[str, int], str]] = [
    ({}, ""),
    ({"tp": 2}, ""),
    ({"tp": 2}, "--sequence-parallel"),
    ({"cp": 2}, ""),
    ({"cp": 4}, ""),
    ({"tp": 2, "cp": 2}, "--sequence-parallel"),
]


def key_heads(kind: str) -> int:
    """Return the number of heads of keys; there are four of values."""
    return 2 if kind == "G" else 4


def configured(context: ParallelContext, kind: str, *words: str, **changes: Any) -> Any:
    """Return a TransformerConfig of a mixer for the layout of ``context``."""
    layout = context.layout
    tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size
    sizes = ["--tensor-model-parallel-size", str(tp), "--context-parallel-size", str(cp)]
    more = "--normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear"
    flags = [*SMALL, *sizes, *more.split(), "--padded-vocab-size", "128", *words]
    transformer_config = build_transformer_config(config_of(flags, ranks=layout.world_size))
    given = {
        "linear_conv_kernel_dim": WIDTH,
        "linear_key_head_dim": KEY,
        "linear_value_head_dim": VALUE,
        "linear_num_key_heads": key_heads(kind),
        "linear_num_value_heads": 4,
        **changes,
    }
    for name, value in given.items():
        assert hasattr(transformer_config, name)
        setattr(transformer_config, name, value)
    return transformer_config


def built(context: ParallelContext, kind: str, transformer_config: Any) -> DeltaMixer:
    """Return a mixer with weights by their names."""
    module = build_module(
        KINDS[kind].spec(transformer_config),
        config=transformer_config,
        layer_number=1,
        pg_collection=context.pgs,
    )
    plain.fill(module, context)
    assert isinstance(module, DeltaMixer)
    return module


class PlainMixer:
    """A mixer in float64, one document after another."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.weights: dict[str, Tensor] = {}

    def weight(self, name: str, *shape: int) -> Tensor:
        if name not in self.weights:
            self.weights[name] = plain.full_weight(name, shape).float().double().requires_grad_()
        return self.weights[name]

    def linear(self, name: str, x: Tensor, outputs: int) -> Tensor:
        return x @ self.weight(f"{name}.weight", outputs, x.size(-1)).T

    def __call__(self, hidden: Tensor, documents: Tensor | None) -> Tensor:
        """Return ``[s, b, h]``."""
        length, batch, _ = hidden.shape
        heads = key_heads(self.kind)
        group = 4 // heads
        mixed_size = 2 * KEY + group * VALUE
        if self.kind == "G":
            rows = self.linear("in_proj", hidden, heads * (mixed_size + group * (VALUE + 2)))
            sizes = [mixed_size, group * VALUE, group, group]
            mixed, gate, beta, rise = torch.split(rows.view(length, batch, heads, -1), sizes, -1)
            gate = F.silu(gate.reshape(length, batch, 4, VALUE))
            rise = rise.flatten(2) + self.weight("dt_bias", 4)
            decays = -self.weight("A_log", 4).exp() * F.softplus(rise)
        else:
            rows = self.linear("in_proj", hidden, heads * (mixed_size + 1))
            mixed, beta = torch.split(rows.view(length, batch, heads, -1), [mixed_size, 1], -1)
            low = self.linear("g_a_proj", hidden, VALUE)
            gate = self.linear("g_b_proj", low, 4 * VALUE).view(length, batch, 4, VALUE).sigmoid()
            low = self.linear("f_a_proj", hidden, VALUE)
            rise = self.linear("f_b_proj", low, 4 * KEY) + self.weight("dt_bias", 4 * KEY)
            steps = F.softplus(rise).view(length, batch, 4, KEY)
            decays = -self.weight("A_log", 4).exp()[:, None] * steps
        outputs = []
        for row in range(batch):
            parts = []
            own = torch.zeros(length) if documents is None else documents[row]
            for document in torch.unique(own):
                at = own == document
                parts.append(
                    self.document(mixed[at, row], decays[at, row], beta.flatten(2)[at, row])
                )
            outputs.append(torch.cat(parts))
        out = torch.stack(outputs, dim=1)
        scale = (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        normed = out * scale * self.weight("out_norm.weight", VALUE)
        return self.linear("out_proj", (normed * gate).flatten(2), H)

    def document(self, mixed: Tensor, decays: Tensor, beta: Tensor) -> Tensor:
        """Return the outputs ``[s, h, v]`` of one document."""
        heads = key_heads(self.kind)
        channels = mixed.flatten(1)
        weight = self.weight("conv_weight", channels.size(1), WIDTH)
        padded = F.pad(channels.T, (WIDTH - 1, 0))
        mixed = F.silu(F.conv1d(padded, weight[:, None], groups=len(weight)).T)
        group = 4 // heads
        by_head = mixed.view(-1, heads, 2 * KEY + group * VALUE)
        query, key, value = torch.split(by_head, [KEY, KEY, group * VALUE], -1)
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        rows = (query, key, value.reshape(-1, 4, VALUE), decays, beta.sigmoid())
        state = mixed.new_zeros(1, 4, KEY, VALUE)
        return recurrence(*(x[None] for x in rows), state=state)[0][0]


def check_layout(
    context: ParallelContext, kind: str, words: str = "", with_documents: bool = True
) -> None:
    """Check outputs and gradients of a rank against plain float64 torch."""
    transformer_config = configured(context, kind, *words.split())
    split = transformer_config.sequence_parallel
    module = built(context, kind, transformer_config)
    hidden, upstream = drawn(S, B, H), drawn(S, B, H, seed=4)
    documents = plain.document_indices(S, ENDS) if with_documents else None
    own = local(hidden, context, sequence_parallel=split).requires_grad_()
    output, bias = module(own, attention_mask=documents)
    assert bias is None
    (output * local(upstream, context, sequence_parallel=split)).sum().backward()

    truth = PlainMixer(kind)
    whole = hidden.double().requires_grad_()
    expected = truth(whole, documents)
    (expected * upstream.double()).sum().backward()  # type: ignore[no-untyped-call]

    assert own.grad is not None and whole.grad is not None
    assert relative(output, local(expected, context, sequence_parallel=split)) < 1e-6
    assert relative(own.grad, local(whole.grad, context, sequence_parallel=split)) < 1e-5
    names = {name for name, _ in module.named_parameters()}
    assert names == set(truth.weights)
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        torch.distributed.all_reduce(gradient, group=context.pgs.cp)
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(gradient, group=context.pgs.tp)
        shard = plain.shard_of(name, parameter, context)
        wanted = truth.weights[name].grad
        assert wanted is not None
        error = (gradient.double() - shard.of(wanted)).abs().max().item()
        assert error < 1e-5 * wanted.abs().max().item(), name


@pytest.mark.parametrize(("layout", "words"), LAYOUTS)
@pytest.mark.parametrize("kind", ["G", "K"])
def test_layouts_equal_plain_torch(kind: str, layout: dict[str, int], words: str) -> None:
    on_ranks(check_layout, layout, kind=kind, words=words)
    on_ranks(check_layout, layout, kind=kind, words=words, with_documents=False)


def theirs_of(kind: str) -> Any:
    """Return transformers' module."""
    sizes: dict[str, Any] = dict(hidden_size=H, num_hidden_layers=1, rms_norm_eps=1e-6)
    if kind == "G":
        settings: Any = AutoConfig.for_model(
            "qwen3_next", linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=KEY, linear_value_head_dim=VALUE, linear_conv_kernel_dim=WIDTH,
            layer_types=["linear_attention"], **sizes,
        )  # fmt: skip
        return qwen.Qwen3NextGatedDeltaNet(settings, 0)
    settings = AutoConfig.for_model(
        "kimi_linear", linear_num_heads=4, linear_head_dim=VALUE, linear_conv_kernel_dim=WIDTH,
        layer_types=["linear_attention"], **sizes,
    )  # fmt: skip
    return kimi.KimiLinearDeltaAttention(settings, 0)


def their_weights(kind: str, module: DeltaMixer) -> dict[str, Tensor]:
    """Return parameters, or their gradients, under transformers' names and in its order."""
    own = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return renamed(kind, own, module)


def renamed(kind: str, own: dict[str, Tensor], module: DeltaMixer) -> dict[str, Tensor]:
    heads, key, value, group = module.key_heads, module.key_size, module.value_size, module.group

    def of_heads(x: Tensor, *sizes: int) -> list[Tensor]:
        parts = torch.split(x.view(heads, -1, *x.shape[1:]), list(sizes), dim=1)
        return [part.flatten(0, 1) for part in parts]

    convolved = of_heads(own["conv_weight"], key, key, group * value)
    found = {"conv1d.weight": torch.cat(convolved)[:, None]}
    if kind == "G":
        rows = own["in_proj.weight"].view(heads, -1, H)
        wide = module.mixed_size + group * value
        return found | {
            "in_proj_qkvz.weight": rows[:, :wide].flatten(0, 1),
            "in_proj_ba.weight": rows[:, wide:].flatten(0, 1),
            "dt_bias": own["dt_bias"],
            "A_log": own["A_log"],
            "norm.weight": own["out_norm.weight"],
            "out_proj.weight": own["out_proj.weight"],
        }
    query, keys, values, beta = of_heads(own["in_proj.weight"], key, key, value, 1)
    found |= {"q_proj.weight": query, "k_proj.weight": keys, "v_proj.weight": values}
    found |= {
        "b_proj.weight": beta,
        "forget_gate.f_a_proj.weight": own["f_a_proj.weight"],
        "forget_gate.f_b_proj.weight": own["f_b_proj.weight"],
        "forget_gate.dt_bias": own["dt_bias"],
        "forget_gate.A_log": own["A_log"].view(1, 1, -1, 1),
        "g_a_proj.weight": own["g_a_proj.weight"],
        "g_b_proj.weight": own["g_b_proj.weight"],
        "o_norm.weight": own["out_norm.weight"],
        "o_proj.weight": own["out_proj.weight"],
    }
    return found


@pytest.mark.parametrize("kind", ["G", "K"])
@ranks()
def test_outputs_and_gradients_equal_those_of_transformers(
    context: ParallelContext, kind: str
) -> None:
    sizes = {} if kind == "G" else {"linear_key_head_dim": VALUE}
    ours = built(context, kind, configured(context, kind, **sizes))
    theirs = theirs_of(kind)
    theirs.load_state_dict(their_weights(kind, ours))
    hidden, upstream = drawn(S, B, H), drawn(S, B, H, seed=4)
    own = hidden.clone().requires_grad_()
    output, _ = ours(own)
    (output * upstream).sum().backward()
    rows = hidden.transpose(0, 1).clone().requires_grad_()
    expected = theirs(rows)
    (expected * upstream.transpose(0, 1)).sum().backward()
    assert own.grad is not None and rows.grad is not None
    assert relative(output, expected.transpose(0, 1).double()) < 1e-5
    assert relative(own.grad, rows.grad.transpose(0, 1).double()) < 1e-5
    own_gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    gradients = renamed(kind, own_gradients, ours)
    for name, parameter in theirs.named_parameters():
        assert relative(gradients[name], parameter.grad.double()) < 1e-5, name


@pytest.mark.parametrize("kind", ["G", "K"])
@ranks(cp=2)
def test_context_parallel_messages_do_not_grow_with_the_sequence(
    context: ParallelContext, kind: str
) -> None:
    module = built(context, kind, configured(context, kind))
    counts = []
    for length in (S, 4 * S):
        for ends in (None, [[5], [7, 60]]):
            documents = None if ends is None else plain.document_indices(length, ends)
            hidden = drawn(length // 2, B, H).requires_grad_()
            with SentBytes() as sent:
                module(hidden, attention_mask=documents)[0].sum().backward()
            counts.append(sent.count)
    assert counts[0] > 0 and len(set(counts)) == 1
    # Of two slices of each sequence: states and transitions, and inputs of the convolution; this
    # rank's and those of both ranks, and the same of their gradients.
    states = 4 * KEY * (KEY + VALUE)
    inputs = (WIDTH - 1) * len(module.conv_weight)
    assert counts[0] == 2 * 3 * 2 * B * (states + inputs) * 4


@pytest.mark.parametrize("kind", ["G", "K"])
@ranks()
def test_tokens_one_by_one_equal_a_whole_sequence(context: ParallelContext, kind: str) -> None:
    module = built(context, kind, configured(context, kind))
    hidden = drawn(20, B, H)
    want, _ = module(hidden)
    projected = module.projected(hidden).transpose(0, 1)
    outputs = []
    states = None
    # Two shorter than the convolution, and two parts of several tokens.
    for part in torch.split(projected, [1, 2, 9, 1, 5, 1, 1], dim=1):
        out, states = module.recur(part, states)
        outputs.append(out)
    got, _ = module.out_proj(torch.cat(outputs, dim=1).transpose(0, 1))
    assert relative(got, want.double()) < 1e-6


@pytest.mark.parametrize("kind", ["G", "K"])
@ranks(tp=2)
def test_initial_values_are_megatrons_and_the_same_in_all_layouts(
    context: ParallelContext, kind: str
) -> None:
    transformer_config = configured(context, kind)
    mark_methods(transformer_config)
    module = build_module(
        KINDS[kind].spec(transformer_config),
        config=transformer_config,
        layer_number=1,
        pg_collection=context.pgs,
    )
    initialize_by_name([module], transformer_config, seed=7)
    unmark_methods(transformer_config)
    rates = module.A_log.exp()
    assert (rates >= 1).all() and (rates <= 16).all() and len(rates.unique()) == len(rates)
    assert (module.dt_bias == 1).all() and (module.out_norm.weight == 1).all()
    bound = WIDTH**-0.5
    assert 0.8 * bound < module.conv_weight.abs().max() <= bound
    state = module.sharded_state_dict("mixer.")
    shards = {name: x for name, x in state.items() if isinstance(x, ShardedTensor)}
    assert set(shards) == {f"mixer.{name}" for name, _ in module.named_parameters()}
    cut = {"conv_weight", "A_log", "dt_bias", "in_proj.weight"}
    for name in cut | ({"f_b_proj.weight"} if kind == "K" else set()):
        shard = shards[f"mixer.{name}"]
        assert shard.global_shape[0] == 2 * shard.local_shape[0]
        assert shard.global_offset[0] == context.pgs.tp.rank() * shard.local_shape[0]
    whole = [torch.empty_like(module.A_log) for _ in range(2)]
    torch.distributed.all_gather(whole, module.A_log.detach(), group=context.pgs.tp)
    assert not torch.equal(*whole)


@pytest.mark.parametrize("kind", ["G", "K"])
@ranks()
def test_a_dense_mask_must_be_causal(context: ParallelContext, kind: str) -> None:
    module = built(context, kind, configured(context, kind))
    hidden = drawn(6, B, H)
    causal = plain.causal(6, B)[:, None]
    assert torch.equal(module(hidden, attention_mask=causal)[0], module(hidden)[0])
    window = causal.clone()
    window[..., 5, 0] = True
    with pytest.raises(ConfigError, match="that is not causal does not go with .*Delta"):
        module(hidden, attention_mask=window)
