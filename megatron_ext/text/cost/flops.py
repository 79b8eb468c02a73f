"""The sizes of a GPT run, and the floating-point operations per sequence and per pipeline stage.

Almost only matrix products count. A multiply-add counts as two operations, and causal attention as
half of full attention. Like Megatron-LM, the log reports three times the whole model's forward
pass, since the backward pass takes twice as many operations.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_ext.config.precision import Fp8Config
from megatron_ext.config.run import RunConfig
from megatron_ext.config.training import default_rows, fused_rows
from megatron_ext.planning.network import FORWARD_AND_BACKWARD, MULTIPLY_AND_ADD, Flops, Network
from megatron_ext.planning.stages import FP32, Ranks, Stage
from megatron_ext.planning.state import Linear
from megatron_ext.text.config.attention import AttentionConfig
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.cost.latent import LatentSizes


@dataclass(frozen=True)
class Sizes(Ranks):
    """The sizes of a run that the cost formulas need, from the resolved configuration.

    Attributes:
        s, h, f, n, g, d, v: length of the whole sequence, hidden size, MLP width, attention heads,
            query groups, head size, padded vocabulary size.
        layers: number of decoder layers.
        depths: number of MTP depths (prediction modules).
        experts: for each layer, whether it holds experts.
        latent: the sizes of multi-latent attention, with which d is the size of a head's value;
            None for other attention.
    """

    s: int
    h: int
    f: int
    n: int
    g: int
    d: int
    v: int
    layers: int
    depths: int
    experts: tuple[bool, ...]
    latent: LatentSizes | None = None

    @property
    def projected(self) -> int:
        """Return the channels per token of queries, keys and values together, over all heads.

        For multi-latent attention, return the outputs of the two up-projections together.
        """
        if self.latent is not None:
            return self.latent.queries + self.latent.keys_and_values
        return (self.n + 2 * self.g) * self.d

    @property
    def key(self) -> int:
        """Return the channels of one head's key."""
        return self.d if self.latent is None else self.latent.key

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch on a rank, ``s/cp * b``."""
        return self.s // self.cp * self.b

    @property
    def residual_tokens(self) -> int:
        """Return the tokens of a micro-batch in a rank's residual stream.

        Sequence parallelism divides them among the tensor-parallel ranks.
        """
        return self.tokens // self.sequence_size

    def in_8_bits(self, fp8: Fp8Config, number: int) -> bool:
        """Return whether linear layers in decoder layer ``number`` (from 0) multiply in 8 bits."""
        return fp8.fp8_format is not None and not fp8.keeps_bf16(number + 1, self.layers)


def attention_matrices(config: RunConfig, tp: int = 1) -> list[Linear]:
    """Return attention's linear layers, in the order in which the attention module registers them.

    They are sharded over ``tp`` tensor-parallel ranks.
    """
    model = config.model
    h = model.hidden_size or 0
    n = model.num_attention_heads or 0
    d = model.kv_channels or h // max(1, n)
    latent = LatentSizes.of(config)
    proj = Linear("linear_proj", h, n * d, columns=tp, bias=model.add_proj_bias)
    if latent is not None:
        return [proj, *latent.matrices(tp)]
    qkv = n + 2 * (model.num_query_groups or n)
    return [proj, Linear("linear_qkv", qkv * d, h, rows=tp, bias=bool(model.add_qkv_bias))]


def mlp_matrices(h: int, width: int, *, gated: bool, ranks: int = 1, **layout: Any) -> list[Linear]:
    """Return the two linear layers of an MLP, fc1 and fc2.

    Args:
        h: hidden size.
        width: number of channels between the two layers.
        gated: whether fc1 has twice as many outputs, for a gate.
        ranks: number of ranks among which the channels are divided.
        layout: further fields of `Linear`, such as ``bias``.
    """
    return [
        Linear("linear_fc1", width * (2 if gated else 1), h, rows=ranks, **layout),
        Linear("linear_fc2", h, width, columns=ranks, **layout),
    ]


def score_channels(config: RunConfig) -> int:
    """Return the multiplications of a layer's causal attention, per query and sequence token.

    A query's products with the keys and values of all heads are counted, but halved, because a
    causal query attends to half of the tokens on average. The result times the sequence length is
    thus the mean number of multiplications for one query.
    """
    model = config.model
    n = model.num_attention_heads or 0
    d = model.kv_channels or 0
    latent = LatentSizes.of(config)
    return n * d if latent is None else n * (latent.key + latent.value) // 2


def token_products(config: RunConfig, *, gated: bool) -> dict[str, int]:
    """Return the multiplications per token in the forward pass of each part of the model.

    - ``projections``: queries, keys, values and output, in a layer
    - ``scores``: causal attention in a layer, that is products with keys and with values
    - ``windowed``: the same as ``scores``, but with the window of ``--window-size``
    - ``dense``: the MLP of a layer, with a third matrix if ``gated``
    - ``experts``: the routed and shared experts that one token passes, in a layer
    - ``depth``: the projection before the layer of an MTP depth
    - ``logits``: the output layer
    """
    model = config.model
    moe = config.section(MoEConfig)
    h = model.hidden_size or 0
    f = model.ffn_hidden_size or 0
    latent = LatentSizes.of(config)
    # Megatron-LM counts the norms of the small vectors too.
    norms = 0 if latent is None else latent.query_rank + latent.rank
    routed = (moe.moe_ffn_hidden_size or f) * moe.moe_router_topk
    shared = moe.moe_shared_expert_intermediate_size or 0
    return {
        "projections": sum(x.products for x in attention_matrices(config)) + norms,
        "scores": score_channels(config) * (model.seq_length or 0),
        "windowed": score_channels(config) * _keys_in_window(config),
        "dense": sum(x.products for x in mlp_matrices(h, f, gated=gated)),
        "experts": sum(x.products for x in mlp_matrices(h, routed + shared, gated=gated)),
        "depth": 2 * h * h,
        "logits": h * (model.padded_vocab_size or 0),
    }


def _keys_in_window(config: RunConfig) -> int:
    """Return the length of a sequence without window whose queries have as many keys on average.

    Without a window, a query in a sequence of length L has ``(L + 1) / 2`` keys on average. So
    return ``L = 2 m - 1``, where m is this average with the window. If a query sees itself and w
    tokens before it, all s queries together have ``s (w + 1) - w (w + 1) / 2`` keys. Return s if no
    window limits attention.
    """
    length = config.model.seq_length or 0
    window = config.section(AttentionConfig).window_size
    left = -1 if window is None else window[0]
    if not 0 <= left < length:
        return length
    return 2 * left + 1 - left * (left + 1) // length


def flops_per_sample(config: RunConfig) -> float:
    """Return the operations of one sequence in the forward and backward pass of the model.

    Recomputation is not counted, nor are keys outside of an attention window. The formula is
    Megatron-LM's, so that the numbers are comparable. It therefore counts the norms of MTP depths
    and of latent vectors, and the gate of SwiGLU but not of other gated MLPs.
    """
    model = config.model
    attention = config.section(AttentionConfig)
    products = token_products(config, gated=model.swiglu)
    depths = model.mtp_num_layers or 0
    layers = config.section(MoEConfig).expert_layers(model.num_layers or 0)
    layers += layers[-1:] * depths
    windowed = attention.windowed_layers(model)
    windowed += windowed[-1:] * depths
    per_token = len(layers) * products["projections"]
    per_token += sum(products["windowed" if has else "scores"] for has in windowed)
    per_token += sum(products["experts" if experts else "dense"] for experts in layers)
    per_token += depths * (3 * (model.hidden_size or 0) + products["depth"])
    per_token += products["logits"] * (depths + 1)
    sequence = model.seq_length or 0
    return float(FORWARD_AND_BACKWARD * MULTIPLY_AND_ADD * sequence * per_token)


@dataclass(frozen=True)
class GptRun(Network):
    """A GPT in one run: its configuration, its sizes, and numbers that several formulas use."""

    config: RunConfig
    sizes: Sizes

    @property
    def moe(self) -> MoEConfig:
        """Return the configuration section for mixture of experts."""
        return self.config.section(MoEConfig)

    @property
    def scoring(self) -> AttentionConfig:
        """Return the configuration section for attention windows and attention scores."""
        return self.config.section(AttentionConfig)

    @property
    def trains(self) -> bool:
        """Return whether the weights of the model itself are trained, not only adapters."""
        return self.config.lora.lora_rank is None

    @property
    def residual(self) -> int:
        """Return the bytes of one tensor of the residual stream ``[s, b, h]`` on one rank."""
        width = FP32 if self.config.model.fp32_residual_connection else self.sizes.width
        return self.sizes.residual_tokens * self.sizes.h * width

    @property
    def table(self) -> int:
        """Return the number of elements in a rank's shard of the word embedding.

        The output layer's shard has the same number.
        """
        return self.sizes.v // self.sizes.tp * self.sizes.h

    @cached_property
    def windowed(self) -> list[bool]:
        """Return for each layer whether a window limits its attention."""
        return self.scoring.windowed_layers(self.config.model)

    @cached_property
    def layer_kinds(self) -> list[tuple[bool, bool, bool]]:
        """Return a key for each layer, which is the same for layers that cost the same.

        It says whether the layer has experts, whether a window limits its attention, and whether
        its linear layers multiply in 8 bits.
        """
        fp8 = self.config.fp8
        x = self.sizes
        return [
            (experts, windowed, x.in_8_bits(fp8, number))
            for number, (experts, windowed) in enumerate(zip(x.experts, self.windowed, strict=True))
        ]

    def unlike(self, layers: Sequence[int]) -> list[tuple[int, int]]:
        """Return one layer of each kind among ``layers``, and how many of them are of its kind."""
        first: dict[tuple[bool, bool, bool], int] = {}
        for number in layers:
            first.setdefault(self.layer_kinds[number], number)
        counts = Counter(self.layer_kinds[number] for number in layers)
        return [(number, counts[kind]) for kind, number in first.items()]

    @property
    def routed(self) -> int:
        """Return the number of tokens that a rank's experts get from a micro-batch in one layer.

        Every expert is assumed to get the same number. A token counts once for each of its experts.
        """
        return self.sizes.residual_tokens * self.moe.moe_router_topk * self.sizes.etp

    @property
    def expert_width(self) -> int:
        """Return the channels of one expert's MLP on one rank."""
        return (self.moe.moe_ffn_hidden_size or self.sizes.f) // self.sizes.etp

    @property
    def loss_rows(self) -> int:
        """Return the number of tokens per block of the chunked cross-entropy."""
        x = self.sizes
        usual = fused_rows(x.tokens, x.h) if x.gpu else default_rows(x.tokens)
        return self.config.loss.cross_entropy_chunk_size or usual

    def recomputes(self, part: str) -> bool:
        """Return whether the flags for selective recomputation recompute ``part`` of a layer.

        ``part`` is a value of ``--recompute-modules``. ``--recompute-granularity full`` is not
        considered.
        """
        model = self.config.model
        moe = self.moe
        if part == "moe" and moe.num_experts is not None and moe.moe_layer_recompute:
            return True
        modules = model.recompute_modules or ["core_attn"]
        return model.recompute_granularity == "selective" and part in modules


@dataclass(frozen=True)
class GptFlops(GptRun):
    """The floating-point operations of one micro-batch on one rank, layer by layer."""

    @cached_property
    def _products(self) -> dict[str, int]:
        return token_products(self.config, gated=self.config.model.gated)

    def layer_flops(self, number: int) -> Flops:
        """Return the operations of decoder layer ``number`` (from 0), without recomputation."""
        linear = self._linear(self.sizes.experts[number])
        scores = self._scores(number)
        fp8 = self.config.fp8
        weights = self._trained(linear)
        if not self.sizes.in_8_bits(fp8, number):
            return Flops(linear, scores=scores, weights=weights)
        x = self.sizes
        moved = self._cast_bytes(number)
        return Flops(
            fp8=linear,
            scores=scores,
            weights=0.0 if fp8.fp8_wgrad else weights,
            fp8_weights=weights if fp8.fp8_wgrad else 0.0,
            cast=float(moved * x.tokens // x.tp),
        )

    def exchanges(self, stage: Stage) -> tuple[int, float]:
        x = self.sizes
        if x.ep == 1:
            return 0, 0.0
        model = self.config.model
        width = (self.moe.moe_ffn_hidden_size or x.f) * self.moe.moe_router_topk
        routed = sum(m.products for m in mlp_matrices(x.h, width, gated=model.gated))
        layers = [*(x.experts[number] for number in stage.layers), *x.experts[-1:] * stage.depths]
        parts = self._products
        around = parts["projections"] + parts["scores"]
        total = sum(around + parts["experts" if has else "dense"] for has in layers)
        total += parts["depth"] * stage.depths + parts["logits"] * stage.head
        return sum(layers), routed * sum(layers) / max(1, total)

    def _cast_bytes(self, number: int) -> int:
        """Return the bytes per token that the 8-bit casts of one layer read and write.

        The inputs and the output gradients of the layer's linear layers are cast.
        """
        from megatron_ext.planning.kernels import cast_of

        x = self.sizes
        gated = self.config.model.gated
        each = cast_of(self.config.fp8.fp8_recipe)[0]
        wide = (2 if gated else 1) * x.f
        attention = attention_matrices(self.config)
        around = sum(layer.inputs + layer.outputs for layer in attention) + 2 * x.h
        if self.joins_activation(number):
            # The kernels of `layers.fp8.kernels` read what the activation and its gradient read.
            return around * each + x.f * (6 if gated else 4) + wide * (5 if gated else 6)
        return (around + x.f + wide) * each

    def joins_activation(self, number: int) -> bool:
        """Return whether one kernel applies a layer's activation function and casts to 8 bits.

        This kernel is in `layers.fp8.activation`. Layers are numbered from 0.
        """
        fp8 = self.config.fp8
        model = self.config.model
        changed = model.activation_func_clamp_value is not None or model.glu_linear_offset != 0
        plain = self.trains and not (model.has_mlp_bias or changed)
        given = fp8.fp8_recipe == "delayed" and fp8.fp8_wgrad and self.sizes.in_8_bits(fp8, number)
        return given and plain and not self.sizes.experts[number]

    def _linear(self, experts: bool) -> float:
        return self._on_rank("projections") + self._on_rank("experts" if experts else "dense")

    def _trained(self, linear: float) -> float:
        """Return the operations for the weight gradients of linear layers.

        They equal ``linear``, the operations of the layers' forward pass, but are 0 if only LoRA
        adapters are trained.
        """
        return linear if self.trains else 0.0

    def _depth_flops(self) -> Flops:
        """Return the operations of one MTP depth without its logits, all in 16 or 32 bits."""
        linear = self._linear(self.sizes.experts[-1]) + self._on_rank("depth")
        scores = self._scores(self.sizes.layers - 1)
        return Flops(linear, scores=scores, weights=self._trained(linear))

    def logits_flops(self) -> Flops:
        head = self._on_rank("logits") * (1 + self.sizes.depths)
        return Flops(head=head, head_weights=self._trained(head))

    def flops(self, stage: Stage) -> Flops:
        total = Flops()
        for number, count in self.unlike(stage.layers):
            total += self.layer_flops(number) * count
        for _ in range(stage.depths):
            total += self._depth_flops()
        return total + self.recomputed(stage) + (self.logits_flops() if stage.head else Flops())

    def recomputed(self, stage: Stage) -> Flops:
        model = self.config.model
        total = Flops()
        if model.recompute_granularity is None and not self.moe.moe_layer_recompute:
            return total
        layers = stage.layers
        if model.recompute_granularity == "full" and model.recompute_method == "block":
            layers = layers[: model.recompute_num_layers or 0]
        for number, count in self.unlike(layers):
            linear, scores = self._again(number)
            fp8 = linear if self.sizes.in_8_bits(self.config.fp8, number) else 0.0
            total += Flops(again=linear - fp8, fp8_again=fp8, scores_again=scores) * count
        return total

    def _again(self, number: int) -> tuple[float, float]:
        """Return the operations that the backward pass recomputes in layer ``number`` (from 0).

        The result is (operations of linear layers, operations of attention scores).
        """
        model = self.config.model
        experts = self.sizes.experts[number]
        scores = self._scores(number)
        if model.recompute_granularity == "full":
            return self._linear(experts), scores
        linear = 0.0
        if self.recomputes("moe" if experts else "mlp"):
            linear = self._on_rank("experts" if experts else "dense")
        if self.sizes.latent is not None and self.recomputes("mla_up_proj"):
            matrices = self.sizes.latent.matrices(self.sizes.tp)
            of_heads = sum(x.products for x in matrices if not x.name.endswith("down_proj"))
            linear += MULTIPLY_AND_ADD * of_heads * self.sizes.tokens / self.sizes.tp
        return linear, scores if self.recomputes("core_attn") else 0.0

    def _scores(self, number: int) -> float:
        """Return one rank's forward operations of attention scores in layer ``number`` (from 0)."""
        return self._on_rank("windowed" if self.windowed[number] else "scores")

    def _on_rank(self, part: str) -> float:
        """Return one rank's forward operations in a part of the model.

        ``part`` is a key of `token_products`, such as ``logits``.
        """
        return MULTIPLY_AND_ADD * self._products[part] * self.sizes.tokens / self.sizes.tp
