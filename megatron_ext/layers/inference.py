"""The layers of a decoder as a few torch functions each, for inference with a key-value cache.

With one new token a sequence, calling modules takes longer than their arithmetic. So what a pass
needs of them is looked up once, by `inference_decoder`: weights, norms, and the cosines and sines
of all positions. A pass then calls torch alone, on hidden states ``[T, h]``. A part of a layer of
which this module knows nothing, such as experts, multi-latent attention or a linear layer with an
adapter, is called as the module that it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlock as CoreTransformerBlock
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers import onednn, sdpa
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.kv_cache import KeyValueCache
from megatron_ext.layers.latent_attention import LatentAttention
from megatron_ext.layers.linear import (
    BiasedColumnParallelLinear,
    BiasedRowParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
)
from megatron_ext.layers.norms import LayerNorm, RMSNorm, norm, spec_of
from megatron_ext.layers.transformer_layer import (
    MLP,
    SelfAttention,
    TransformerLayer,
    WithBias,
    get_bias_dropout_add,
)

OnRows = Callable[[Tensor], Tensor]
"""A function of hidden states ``[T, h]`` that returns as many rows."""

COLUMN = (ColumnParallelLinear, BiasedColumnParallelLinear)
ROW = (RowParallelLinear, BiasedRowParallelLinear)

ONEDNN_FROM = 2**19
"""The fewest products of numbers, tokens × inputs × outputs, that oneDNN multiplies faster.

It takes about 10 µs more a call than MKL, and on AMD's processors half as long a product."""


class Product:
    """Multiplies by a weight ``[out, in]``, and adds a bias.

    Args:
        tp_group: the ranks over which the products are summed before the bias is added; None for
            this rank alone.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, tp_group: ProcessGroup | None = None
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.tp_group = tp_group
        fits = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.fewest_rows = ONEDNN_FROM / weight.numel() if fits and onednn.IS_AVAILABLE else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[T, out]`` for ``[T, in]``."""
        if self.tp_group is not None:
            sums = self._multiplied(x, None)
            torch.distributed.all_reduce(sums, group=self.tp_group)
            return sums if self.bias is None else sums + self.bias
        return self._multiplied(x, self.bias)

    def _multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.fewest_rows is not None and x.size(0) >= self.fewest_rows:
            product: Tensor = onednn.multiply(x, self.weight, B=bias)
            return product
        return F.linear(x, self.weight, bias)


def _product(layer: Any) -> OnRows:
    """Return a function that multiplies by a linear layer's weight and adds its bias."""
    is_row = type(layer) in ROW
    changed = any(x is not None for x in (layer.lora, layer.fp8, layer.quantized))
    if changed or not (is_row or type(layer) in COLUMN):
        return _called(layer)
    sums = is_row and layer.tp_group.size() > 1
    return Product(layer.weight, layer.bias, layer.tp_group if sums else None)


def _called(module: Callable[[Tensor], WithBias]) -> OnRows:
    """Return a function that calls a module and adds the bias that it returns, if any.

    The module gets hidden states ``[T, 1, h]``.
    """

    def call(x: Tensor) -> Tensor:
        output, bias = module(x.unsqueeze(1))
        return (output if bias is None else output + bias).squeeze(1)

    return call


def _norm(module: Any) -> OnRows | None:
    """Return a norm as a function; None if there is none, or if it changes nothing."""
    if module is None or isinstance(module, IdentityOp):
        return None
    if type(module) not in (LayerNorm, RMSNorm):
        called: OnRows = module
        return called
    return functools.partial(
        norm, weight=module.weight, bias=getattr(module, "bias", None), spec=spec_of(module)
    )


class Rotations:
    """The cosines and sines of all positions, in the form in which `Rotations.turn` uses them.

    Args:
        angles: ``[s, 1, 1, d]``, each twice, as megatron-core's rotary embedding returns them.
        head_dim: number of channels of a head; those from d on are not rotated.
        interleaved: whether neighbouring channels form a pair; otherwise channels i and i + d / 2.
        magnitude: factor of the cosines and sines.
    """

    def __init__(
        self, angles: Tensor, head_dim: int, *, interleaved: bool, magnitude: float
    ) -> None:
        count = angles.size(0)
        width = angles.size(-1)
        channels = torch.arange(head_dim, device=angles.device)
        if interleaved:
            is_first = channels % 2 == 0
            partner = channels + torch.where(is_first, 1, -1)
        else:
            is_first = channels < width // 2
            partner = channels + torch.where(is_first, width // 2, -(width // 2))
        self.partner = torch.where(channels < width, partner, channels)
        self.shift = head_dim // 2 if width == head_dim and not interleaved else None
        self.cos = angles.new_ones(count, 1, 1, head_dim)
        self.sin = angles.new_zeros(count, 1, 1, head_dim)
        self.cos[..., :width] = angles.cos() * magnitude
        self.sin[..., :width] = angles.sin() * magnitude * torch.where(is_first, -1, 1)[:width]

    def of(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines ``[T, 1, 1, head_dim]`` of the tokens of a pass."""
        return self.cos[rows].to(dtype), self.sin[rows].to(dtype)

    def turn(self, heads: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate heads ``[T, g, n, head_dim]`` by what `of` returns."""
        cos, sin = table
        if self.shift is None:
            partners = heads.index_select(-1, self.partner)
        else:
            partners = heads.roll(self.shift, -1)
        return torch.addcmul(heads * cos, partners, sin)


class RotaryTables:
    """The `Rotations` that the layers of a model share.

    Args:
        embedding: megatron-core's rotary embedding, or ours.
    """

    def __init__(
        self, embedding: Any, transformer_config: TransformerConfig, cache: KeyValueCache
    ) -> None:
        self._cache = cache
        self._interleaved = transformer_config.rotary_interleaved
        self._head_dim = transformer_config.kv_channels
        self._made: dict[tuple[int, float], Rotations] = {}
        angles = embedding.forward(cache.max_length)
        # LongRoPE has other angles for short sequences; they follow the others.
        self._short: int | None = getattr(embedding, "short_length", None)
        if self._short is not None and self._short < cache.max_length:
            angles = torch.cat((angles, embedding.forward(self._short)))
        else:
            self._short = None
        self._angles = angles

    def rotations(self, index: int, magnitude: float) -> Rotations:
        """Return the rotations by the angles with this index (see `LayerRotary`)."""
        key = index, magnitude
        if key not in self._made:
            index = min(index, self._angles.size(2) - 1)
            self._made[key] = Rotations(
                self._angles[:, :, index : index + 1],
                self._head_dim,
                interleaved=self._interleaved,
                magnitude=magnitude,
            )
        return self._made[key]

    def table(self, rotations: Rotations, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the tokens of this pass; layers share them."""
        tokens = self._cache.tokens
        rows = tokens.kept("rotary rows", self._rows)
        return tokens.kept((id(rotations), dtype), lambda: rotations.of(rows, dtype))

    def _rows(self) -> Tensor:
        """Return the row of angles of each token, ``[T]``."""
        tokens = self._cache.tokens
        if self._short is None:
            return tokens.positions
        short_rows = self._cache.max_length + tokens.positions
        return torch.where(tokens.lengths > self._short, tokens.positions, short_rows)


class InferenceAttention:
    """A `SelfAttention` over the new tokens of a pass, whose core attention has a cache."""

    def __init__(
        self, attention: SelfAttention, cache: KeyValueCache, tables: RotaryTables | None
    ) -> None:
        self._cache = cache
        self._core: DotProductAttention = attention.core_attention
        self._input = _product(attention.linear_qkv)
        self._output = _product(attention.linear_proj)
        self._norms = _norm(attention.q_layernorm), _norm(attention.k_layernorm)
        self._groups = attention.num_query_groups_per_partition
        self._queries = attention.num_attention_heads_per_partition // self._groups
        self._tables = tables
        self._rotations: Rotations | None = None
        rotary = attention.rotary
        if tables is not None and rotary.index is not None:
            self._rotations = tables.rotations(rotary.index, rotary.magnitude)
        self._has_kernel = self._core.has_kernel(attention.linear_qkv.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output ``[T, h]`` of the normalized hidden states ``[T, h]``."""
        mixed = self._input(x).view(len(x), self._groups, self._queries + 2, -1)
        turned = self._normed(mixed)
        if self._rotations is not None:
            assert self._tables is not None
            table = self._tables.table(self._rotations, x.dtype)
            turned = self._rotations.turn(turned, table)
        query = turned[:, :, :-1]
        key = turned[:, :, -1]
        return self._output(self._attended(query, key, mixed[:, :, -1]))

    def _normed(self, mixed: Tensor) -> Tensor:
        """Return the queries and the key of each group, ``[T, g, n / g + 1, d]``, normalized."""
        query_norm, key_norm = self._norms
        if query_norm is None and key_norm is None:
            return mixed[:, :, :-1]
        query = mixed[:, :, :-2]
        key = mixed[:, :, -2:-1]
        query = query if query_norm is None else query_norm(query)
        return torch.cat((query, key if key_norm is None else key_norm(key)), dim=2)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention ``[T, n * d]`` of queries ``[T, g, n / g, d]``."""
        core = self._core
        cache = core.cache
        assert cache is not None
        tokens = self._cache.tokens
        if not (self._has_kernel and tokens.only_singles and self._cache.num_slots):
            queries = query.flatten(1, 2).unsqueeze(1)
            whole = cache.attend(queries, key.unsqueeze(1), value.unsqueeze(1), core.attend_locally)
            return whole.flatten(1)
        cache.store(key, value)
        keys, values = cache.of_singles()
        # The queries of a group are those of one head, so that its keys are read once.
        attended = sdpa.attend(
            query,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            mask=tokens.allowed(cache.capacity),
            scale=core.softmax_scale,
            backend=core.backend,
        )
        return attended.flatten(1)


class InferenceMLP:
    """A dense MLP over the new tokens of a pass."""

    def __init__(self, mlp: MLP) -> None:
        config = mlp.config
        self._first = _product(mlp.linear_fc1)
        self._second = _product(mlp.linear_fc2)
        self._gated = config.gated_linear_unit
        self._activation = config.activation_func
        self._limit: float | None = config.activation_func_clamp_value
        self._offset: float = config.glu_linear_offset

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output ``[T, h]`` of the normalized hidden states ``[T, h]``."""
        wide = self._first(x)
        if not self._gated:
            return self._second(self._activation(wide))
        gate, linear = wide.chunk(2, dim=-1)
        if self._limit is not None:
            gate = gate.clamp(max=self._limit)
            linear = linear.clamp(min=-self._limit, max=self._limit)
        if self._offset:
            linear = linear + self._offset
        return self._second(self._activation(gate) * linear)


class InferenceLayer:
    """A `TransformerLayer` over the new tokens of a pass."""

    def __init__(
        self, layer: TransformerLayer, cache: KeyValueCache, tables: RotaryTables | None
    ) -> None:
        attention = layer.self_attention
        self._attention: OnRows = _called(lambda x: attention(x, None))
        if _is_known(attention):
            self._attention = InferenceAttention(attention, cache, tables)
        self._mlp: OnRows = _called(layer.mlp)
        if type(layer.mlp) is MLP and not layer.config.bias_activation_fusion:
            self._mlp = InferenceMLP(layer.mlp)
        self._input_norm = _norm(layer.input_layernorm)
        self._attention_norm = _norm(getattr(layer, "post_self_attn_layernorm", None))
        self._mlp_input_norm = _norm(layer.pre_mlp_layernorm)
        self._mlp_norm = _norm(getattr(layer, "post_mlp_layernorm", None))
        self._factor: float = getattr(layer.config, "residual_multiplier", 1.0)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the hidden states ``[T, h]`` after this layer."""
        attended = self._attention(x if self._input_norm is None else self._input_norm(x))
        x = self._added(x, attended, self._attention_norm)
        output = self._mlp(x if self._mlp_input_norm is None else self._mlp_input_norm(x))
        return self._added(x, output, self._mlp_norm)

    def _added(self, x: Tensor, output: Tensor, output_norm: OnRows | None) -> Tensor:
        """Return ``x`` plus the output of attention or MLP, normalized and multiplied."""
        output = output if output_norm is None else output_norm(output)
        return x + output if self._factor == 1.0 else x + output * self._factor


def _is_known(attention: torch.nn.Module) -> bool:
    """Tell whether `InferenceAttention` can compute what this module does."""
    if type(attention) is not SelfAttention:
        return False
    config = attention.config
    return (
        type(attention.core_attention) is DotProductAttention
        # With fewer groups than tensor-parallel ranks, megatron-core gathers them.
        and config.num_query_groups >= attention.world_size
        and not (getattr(config, "attention_output_gate", False) or config.test_mode)
    )


class InferenceDecoder:
    """The layers and the final norm of a model chunk that is a whole decoder."""

    def __init__(self, layers: Sequence[InferenceLayer], final_norm: OnRows | None) -> None:
        self._layers = layers
        self._final_norm = final_norm

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the hidden states ``[T, 1, h]`` before the output head for those embedded."""
        x = hidden.squeeze(1)
        for layer in self._layers:
            x = layer(x)
        return (x if self._final_norm is None else self._final_norm(x)).unsqueeze(1)


def inference_decoder(
    decoder: Any, cache: KeyValueCache, rotary: torch.nn.Module | None
) -> InferenceDecoder | None:
    """Return an `InferenceDecoder`; None if the decoder must be called as a module.

    Its attention layers must have their caches, and it must be in evaluation mode. The result calls
    no hooks of modules.

    Args:
        decoder: the decoder of a model chunk that holds all layers.
        rotary: the rotary embedding whose angles its layers get; None without one.
    """
    if type(decoder).forward is not CoreTransformerBlock.forward:
        return None
    if decoder.config.sequence_parallel or not all(map(_is_usual, decoder.layers)):
        return None
    tables = None if rotary is None else RotaryTables(rotary, decoder.config, cache)
    layers = [InferenceLayer(layer, cache, tables) for layer in decoder.layers]
    return InferenceDecoder(layers, _norm(decoder.final_layernorm))


def _is_usual(layer: torch.nn.Module) -> bool:
    """Tell whether a layer is attention and an MLP or experts, each added to the residual."""
    if type(layer) is not TransformerLayer:
        return False
    parts = layer.self_attention, layer.mlp
    adds = layer.self_attn_bda, layer.mlp_bda
    # Without dropout, which evaluation mode has not, these add in the same way.
    changed = any(
        getattr(layer.config, name, False) for name in ("deterministic_dropout", "changes_outputs")
    )
    attention = layer.self_attention
    return (
        # Other attention needs the rotary angles, which only the decoder as a module gives it.
        (isinstance(attention, LatentAttention) or _is_known(attention))
        and not any(isinstance(part, IdentityOp) for part in parts)
        and isinstance(layer.cross_attention, IdentityOp)
        and (changed or all(add is get_bias_dropout_add for add in adds))
    )
