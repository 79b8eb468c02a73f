"""Mamba-2 as a sequence mixer: transformers' classes, plain float64 torch, and every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer import build_module
from torch import Tensor
from transformers import AutoConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from megatron_ext.errors import ConfigError
from megatron_ext.layers.initialization import initialize_by_name, mark_methods, unmark_methods
from megatron_ext.layers.mixers.mamba import MambaMixer, spec
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from tests.layers import plain
from tests.layers.mixers.messages import SentBytes
from tests.layers.mixers.test_state_space import recurrent
from tests.layers.plain import drawn, local
from tests.ranks import on_ranks, ranks
from tests.training_runs import SMALL, config_of

S, B, H = 48, 2, 32
HEADS, GROUPS, HEAD, STATE, WIDTH = 8, 4, 8, 16, 4
ENDS = [[1, 2, 13, 30], [24]]
PATTERN = (
    f"--hybrid-layer-pattern M- --mamba-num-heads {HEADS} --mamba-head-dim {HEAD} "
    f"--mamba-state-dim {STATE} --normalization RMSNorm --norm-epsilon 1e-6 "
    "--disable-bias-linear --padded-vocab-size 128"
)
LAYOUTS: list[tuple[dict[str, int], str]] = [
    ({}, ""),
    ({"tp": 2}, ""),
    ({"tp": 2}, "--sequence-parallel"),
    ({"cp": 2}, ""),
    ({"cp": 4}, ""),
    ({"tp": 2, "cp": 2}, "--sequence-parallel"),
]


def configured(context: ParallelContext, *words: str, groups: int = GROUPS) -> Any:
    """Return a TransformerConfig for the layout of ``context``."""
    layout = context.layout
    tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size
    sizes = ["--tensor-model-parallel-size", str(tp), "--context-parallel-size", str(cp)]
    small = [*SMALL[2:], *PATTERN.split(), "--mamba-num-groups", str(groups)]
    return build_transformer_config(config_of([*small, *sizes, *words], ranks=layout.world_size))


def built(context: ParallelContext, transformer_config: Any) -> MambaMixer:
    """Return a mixer with weights by their names."""
    module = build_module(
        spec(transformer_config),
        config=transformer_config,
        layer_number=1,
        pg_collection=context.pgs,
    )
    plain.fill(module, context)
    assert isinstance(module, MambaMixer)
    return module


def relative(got: Tensor, want: Tensor) -> float:
    """Return the largest error, as a share of the largest number."""
    error = (got.detach().double() - want.detach().double()).abs().max()
    return float(error / want.detach().abs().max())


def theirs_of(name: str, groups: int = GROUPS, limits: tuple[float, float] | None = None) -> Any:
    """Return a module of transformers."""
    if name == "nemotron_h":
        settings = AutoConfig.for_model(
            name, hidden_size=H, mamba_num_heads=HEADS, mamba_head_dim=HEAD, ssm_state_size=STATE,
            n_groups=groups, conv_kernel=WIDTH, chunk_size=8, layer_norm_epsilon=1e-6,
            layers_block_type=["mamba"], time_step_min=0.0 if limits is None else limits[0],
        )  # fmt: skip
        return NemotronHMamba2Mixer(settings, 0)
    settings = AutoConfig.for_model(
        name, hidden_size=H, mamba_n_heads=HEADS, mamba_d_head=HEAD, mamba_d_state=STATE,
        mamba_n_groups=groups, mamba_d_conv=WIDTH, mamba_expand=HEADS * HEAD // H,
        mamba_chunk_size=8, rms_norm_eps=1e-6, num_hidden_layers=1,
    )  # fmt: skip
    if limits is not None:
        settings.time_step_limit = limits
    kind: Any = BambaMixer if name == "bamba" else GraniteMoeHybridMambaLayer
    return kind(settings, 0)


class PlainMixer:
    """The mixer in float64, one document after another, token by token."""

    def __init__(self) -> None:
        inner = HEADS * HEAD
        self.mixed = inner // GROUPS + 2 * STATE
        channels = GROUPS * self.mixed
        shapes = {
            "in_proj.weight": (inner + channels + HEADS, H),
            "out_proj.weight": (H, inner),
            "out_norm.weight": (inner,),
            "conv_weight": (channels, WIDTH),
            "conv_bias": (channels,),
            "dt_bias": (HEADS,),
            "A_log": (HEADS,),
            "D": (HEADS,),
        }
        self.weights = {
            name: plain.full_weight(name, shape).float().double().requires_grad_()
            for name, shape in shapes.items()
        }

    def __call__(self, hidden: Tensor, documents: Tensor | None) -> Tensor:
        """Return ``[s, b, h]``."""
        samples = []
        for row in range(hidden.size(1)):
            own = torch.zeros(len(hidden)) if documents is None else documents[row]
            parts = [self.document(hidden[own == each, row]) for each in torch.unique(own)]
            samples.append(torch.cat(parts))
        return torch.stack(samples, dim=1)

    def document(self, hidden: Tensor) -> Tensor:
        """Return the outputs ``[s, h]`` of one document."""
        weights = self.weights
        inner = HEADS * HEAD // GROUPS
        rows = (hidden @ weights["in_proj.weight"].T).view(len(hidden), GROUPS, -1)
        gate, mixed, steps = torch.split(rows, [inner, self.mixed, HEADS // GROUPS], dim=-1)
        padded = F.pad(mixed.flatten(1).T, (WIDTH - 1, 0))
        taps = weights["conv_weight"][:, None]
        convolved = F.silu(F.conv1d(padded, taps, weights["conv_bias"], groups=len(taps)))
        by_group = convolved.T.reshape(len(hidden), GROUPS, -1)
        x, b, c = torch.split(by_group, [inner, STATE, STATE], dim=-1)
        dt = F.softplus(steps.flatten(1) + weights["dt_bias"])
        y, _ = recurrent(
            x.reshape(1, len(hidden), HEADS, HEAD),
            dt[None],
            -weights["A_log"].exp(),
            b[None],
            c[None],
            weights["D"],
            hidden.new_zeros(1, HEADS, STATE, HEAD),
        )
        gated = y.view(len(hidden), GROUPS, inner) * F.silu(gate)
        scale = (gated.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return (
            (gated * scale).flatten(1) * weights["out_norm.weight"] @ weights["out_proj.weight"].T
        )


def renamed(own: dict[str, Tensor], groups: int = GROUPS) -> dict[str, Tensor]:
    """Return weights, or their gradients, under transformers' names and in its order."""
    inner = HEADS * HEAD // groups

    def by_part(x: Tensor, *sizes: int) -> Tensor:
        parts = torch.split(x.view(groups, -1, *x.shape[1:]), list(sizes), dim=1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    mixed = inner, STATE, STATE
    found = {"out_proj.weight": own["out_proj.weight"], "norm.weight": own["out_norm.weight"]}
    found |= {name: own[name] for name in ("dt_bias", "A_log", "D")}
    return found | {
        "in_proj.weight": by_part(own["in_proj.weight"], inner, *mixed, HEADS // groups),
        "conv1d.weight": by_part(own["conv_weight"], *mixed)[:, None],
        "conv1d.bias": by_part(own["conv_bias"], *mixed),
    }


def check_layout(context: ParallelContext, words: str = "", with_documents: bool = True) -> None:
    """Check outputs and gradients of a rank against plain float64 torch."""
    transformer_config = configured(context, *words.split())
    split = transformer_config.sequence_parallel
    module = built(context, transformer_config)
    hidden, upstream = drawn(S, B, H), drawn(S, B, H, seed=4)
    documents = plain.document_indices(S, ENDS) if with_documents else None
    own = local(hidden, context, sequence_parallel=split).requires_grad_()
    output, bias = module(own, attention_mask=documents)
    assert bias is None
    (output * local(upstream, context, sequence_parallel=split)).sum().backward()

    truth = PlainMixer()
    whole = hidden.double().requires_grad_()
    expected = truth(whole, documents)
    (expected * upstream.double()).sum().backward()  # type: ignore[no-untyped-call]

    assert own.grad is not None and whole.grad is not None
    assert relative(output, local(expected, context, sequence_parallel=split)) < 1e-6
    assert relative(own.grad, local(whole.grad, context, sequence_parallel=split)) < 1e-5
    assert {name for name, _ in module.named_parameters()} == set(truth.weights)
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        wanted = truth.weights[name].grad
        assert gradient is not None and wanted is not None, name
        torch.distributed.all_reduce(gradient, group=context.pgs.cp)
        shard = plain.shard_of(name, parameter, context)
        error = (gradient.double() - shard.of(wanted)).abs().max().item()
        assert error < 1e-5 * wanted.abs().max().item(), name


@pytest.mark.parametrize(("layout", "words"), LAYOUTS)
def test_layouts_equal_plain_torch(layout: dict[str, int], words: str) -> None:
    on_ranks(check_layout, layout, words=words)
    on_ranks(check_layout, layout, words=words, with_documents=False)


@pytest.mark.parametrize("name", ["nemotron_h", "bamba", "granitemoehybrid"])
@ranks()
def test_outputs_and_gradients_equal_those_of_transformers(
    context: ParallelContext, name: str
) -> None:
    highest = "" if name == "nemotron_h" else " --mamba-time-step-max 1.5"
    limits = (0.5, 1.5 if highest else float("inf"))
    for groups, words, limit in (
        (GROUPS, f"--mamba-time-step-min 0.5{highest}", limits),
        (1, "", None),
    ):
        ours = built(context, configured(context, *words.split(), groups=groups))
        theirs = theirs_of(name, groups, limit)
        own = {each: parameter.detach() for each, parameter in ours.named_parameters()}
        theirs.load_state_dict(renamed(own, groups))
        hidden, upstream = drawn(S, B, H), drawn(S, B, H, seed=4)
        mine = hidden.clone().requires_grad_()
        output, _ = ours(mine)
        (output * upstream).sum().backward()
        rows = hidden.transpose(0, 1).clone().requires_grad_()
        expected = theirs(rows)
        (expected * upstream.transpose(0, 1)).sum().backward()
        assert mine.grad is not None and rows.grad is not None
        assert relative(output, expected.transpose(0, 1)) < 1e-5
        assert relative(mine.grad, rows.grad.transpose(0, 1)) < 1e-5
        gradients = {each: p.grad for each, p in ours.named_parameters() if p.grad is not None}
        renamed_gradients = renamed(gradients, groups)
        assert renamed_gradients.keys() == dict(theirs.named_parameters()).keys()
        for each, parameter in theirs.named_parameters():
            assert relative(renamed_gradients[each], parameter.grad) < 1e-5, each


@ranks(cp=2)
def test_context_parallel_messages_do_not_grow_with_the_sequence(context: ParallelContext) -> None:
    module = built(context, configured(context))
    counts = []
    for length in (S, 4 * S):
        for ends in (None, [[5], [7, 60]]):
            documents = None if ends is None else plain.document_indices(length, ends)
            hidden = drawn(length // 2, B, H).requires_grad_()
            with SentBytes() as sent:
                module(hidden, attention_mask=documents)[0].sum().backward()
            counts.append(sent.count)
    assert len(set(counts)) == 1
    # Of two slices of each sequence: states and transitions, and inputs of the convolution; this
    # rank's and those of both ranks, and the same of their gradients.
    states = HEADS * (STATE * HEAD + 1)
    inputs = (WIDTH - 1) * len(module.conv_weight)
    assert counts[0] == 2 * 3 * 2 * B * (states + inputs) * 4


@ranks()
def test_tokens_one_by_one_equal_a_whole_sequence(context: ParallelContext) -> None:
    module = built(context, configured(context))
    hidden = drawn(20, B, H)
    want, _ = module(hidden)
    projected = module.in_proj(hidden)[0].transpose(0, 1)
    outputs = []
    states = None
    # Two shorter than the convolution, and two parts of several tokens.
    for part in torch.split(projected, [1, 2, 9, 1, 5, 1, 1], dim=1):
        out, states = module.recur(part, states)
        outputs.append(out)
    got, _ = module.out_proj(torch.cat(outputs, dim=1).transpose(0, 1))
    assert relative(got, want) < 1e-6


@ranks()
def test_half_precision_is_near_single(context: ParallelContext) -> None:
    """The recurrence and the norm compute in float32."""
    module = built(context, configured(context))
    hidden = drawn(S, B, H)
    documents = plain.document_indices(S, ENDS)
    want, _ = module(hidden, attention_mask=documents)
    module.bfloat16()
    got, _ = module(hidden.bfloat16(), attention_mask=documents)
    assert got.dtype == torch.bfloat16 and relative(got, want) < 0.05


@ranks(tp=2)
def test_initial_values_are_megatrons_and_the_same_in_all_layouts(context: ParallelContext) -> None:
    transformer_config = configured(context)
    mark_methods(transformer_config)
    module: Any = build_module(
        spec(transformer_config),
        config=transformer_config,
        layer_number=1,
        pg_collection=context.pgs,
    )
    initialize_by_name([module], transformer_config, seed=7)
    unmark_methods(transformer_config)
    rates = module.A_log.exp()
    assert (rates >= 1).all() and (rates <= 16).all() and len(set(rates.tolist())) == HEADS // 2
    steps = F.softplus(module.dt_bias)
    assert (
        (steps > 0.00099).all() and (steps < 0.101).all() and len(set(steps.tolist())) == HEADS // 2
    )
    assert (module.D == 1).all() and (module.out_norm.weight == 1).all()
    bound = WIDTH**-0.5
    for drawn_by in (module.conv_weight, module.conv_bias):
        assert 0.8 * bound < drawn_by.abs().max() <= bound
    shards = module.sharded_state_dict("mixer.")
    cut = {name: shard for name, shard in shards.items() if isinstance(shard, ShardedTensor)}
    assert set(cut) == {f"mixer.{name}" for name, _ in module.named_parameters()}
    for name, shard in cut.items():
        axis = 1 if "out_proj" in name else 0
        assert shard.global_shape[axis] == 2 * shard.local_shape[axis]
        assert shard.global_offset[axis] == context.pgs.tp.rank() * shard.local_shape[axis]
    whole = [torch.empty_like(module.A_log) for _ in range(2)]
    torch.distributed.all_gather(whole, module.A_log.detach(), group=context.pgs.tp)
    assert not torch.equal(*whole)


@ranks()
def test_a_dense_mask_must_be_causal(context: ParallelContext) -> None:
    module = built(context, configured(context))
    hidden = drawn(6, B, H)
    causal = plain.causal(6, B)[:, None]
    assert torch.equal(module(hidden, attention_mask=causal)[0], module(hidden)[0])
    window = causal.clone()
    window[..., 5, 0] = True
    with pytest.raises(ConfigError, match="that is not causal does not go with Mamba-2"):
        module(hidden, attention_mask=window)
