"""The sizes of a GPT run, and the floating-point operations of each pipeline stage."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_ext.config.layers import ATTENTION, DENSE, has_experts, mixer_of, mlp_of
from megatron_ext.config.lora_targets import adapts, trains_whole
from megatron_ext.config.precision import Fp8Config
from megatron_ext.config.run import RunConfig
from megatron_ext.config.training import default_rows, fused_rows
from megatron_ext.planning.network import Flops, Network
from megatron_ext.planning.products import MULTIPLY_AND_ADD, Linear
from megatron_ext.planning.stages import FP32, Ranks, Stage
from megatron_ext.planning.weights import ROUTED, inner_width
from megatron_ext.text.config.attention import AttentionConfig
from megatron_ext.text.config.block import BlockConfig
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.cost.latent import LatentSizes
from megatron_ext.text.cost.mixer import Mixer, mixers_of
from megatron_ext.text.cost.products import (
    attention_matrices,
    mixer_part,
    mlp_matrices,
    mlp_part,
    token_products,
)

WORD_EMBEDDING = "embedding.word_embeddings.weight"

if TYPE_CHECKING:
    from megatron_ext.config.frozen_parts import FrozenParts
    from megatron_ext.planning.kernels import Work


@dataclass(frozen=True)
class Sizes(Ranks):
    """The sizes of a run that the cost formulas need, from the resolved configuration.

    Attributes:
        s, h, f, n, g, d, v: length of the whole sequence, hidden size, MLP width, attention heads,
            query groups, head size, padded vocabulary size.
        layers: number of decoder layers.
        depths: number of MTP depths (prediction modules).
        kinds: the kind of each layer (see `config.layers`).
        depth: the kind of the layer of an MTP depth.
        latent: the sizes of multi-latent attention, with which d is the size of a head's value;
            None for other attention.
        gates: number of heads whose output a gate multiplies: n or 0.
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
    kinds: tuple[str, ...]
    depth: str
    latent: LatentSizes | None = None
    gates: int = 0

    @property
    def projected(self) -> int:
        """Return the channels per token of queries, gates, keys and values, over all heads.

        For multi-latent attention, return the outputs of the two up-projections together.
        """
        if self.latent is not None:
            return self.latent.queries + self.latent.keys_and_values
        return (self.n + self.gates + 2 * self.g) * self.d

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
    def block(self) -> BlockConfig:
        """Return the configuration section for norms and factors of a layer."""
        return self.config.section(BlockConfig)

    @property
    def normalizes_outputs(self) -> bool:
        """Return whether the outputs of attention and MLP are normalized."""
        return self.config.model.sandwich_norm or self.block.reordered_norm

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
    def costs(self) -> list[tuple[object, ...]]:
        """Return a key for each layer, which is the same for layers that cost the same.

        It has the kind of the layer, and says whether a window limits its attention, whether its
        linear layers multiply in 8 bits, and which parts that name it are frozen.
        """
        fp8 = self.config.fp8
        x = self.sizes
        return [
            (kind, windowed, x.in_8_bits(fp8, number), *self._frozen(number))
            for number, (kind, windowed) in enumerate(zip(x.kinds, self.windowed, strict=True))
        ]

    @cached_property
    def mixers(self) -> dict[str, Mixer]:
        """Return the sequence mixers of the model other than attention, by their letters."""
        return mixers_of(self.config)

    def matrices(self, kind: str) -> list[Linear]:
        """Return the linear layers of the sequence mixer of a layer of this kind."""
        letter = mixer_of(kind)
        if letter == ATTENTION:
            return attention_matrices(self.config, self.sizes.tp)
        return self.mixers[letter].matrices(self.sizes.tp) if letter else []

    def kind_at(self, number: int) -> str:
        """Return the kind of a layer, by its number; MTP depths follow the decoder's layers."""
        x = self.sizes
        return x.kinds[number] if number < x.layers else x.depth

    def attends(self, kind: str) -> bool:
        """Return whether the sequence mixer of a layer is attention of any kind."""
        letter = mixer_of(kind)
        return letter == ATTENTION or (letter != "" and self.mixers[letter].attends)

    @cached_property
    def frozen(self) -> "FrozenParts | None":
        """Return the parts that the flags freeze; None without such flags."""
        if not self.config.freeze.is_used:
            return None
        from megatron_ext.config.frozen_parts import FrozenParts

        return FrozenParts(self.config.freeze)

    def freezes(self, name: str) -> bool:
        """Return whether flags freeze a parameter, by its name in the whole model."""
        return self.frozen is not None and self.frozen.freeze(name)

    def updates(self, name: str) -> bool:
        """Return whether a parameter of the model is trained, by its name in the whole model.

        Beside adapters, that is one of ``--lora-modules-to-save``.
        """
        return not self.freezes(name) if self.trains else trains_whole(self.config.lora, name)

    @property
    def head(self) -> str:
        """Return the name of the output layer's weight in the whole model."""
        untied = self.config.model.untie_embeddings_and_output_weights
        return "output_layer.weight" if untied else WORD_EMBEDDING

    def adapted(self, number: int) -> Iterator[tuple[str, Linear, int]]:
        """Yield kind, sizes and number of rows of each linear layer with an adapter.

        The layers are those of decoder layer ``number``, without an MLP that is recomputed. The
        rows are those that a rank multiplies.
        """
        x = self.sizes
        gated = self.config.model.gated
        layer = self.kind_at(number)
        for linear in self.matrices(layer):
            kind = f"self_attention.{linear.name}"
            if adapts(self.config.lora, kind):
                yield kind, linear, x.tokens if linear.is_split else x.residual_tokens
        experts = has_experts(layer)
        if not mlp_of(layer) or self.recomputes("moe" if experts else "mlp"):
            return
        groups = {"mlp": (x.f, x.tp, x.tokens)}
        if experts:
            shared = self.moe.moe_shared_expert_intermediate_size
            groups = {"mlp.experts": (self.expert_width * x.etp, x.etp, self.routed)}
            groups |= {"mlp.shared_experts": (shared, x.tp, x.tokens)} if shared else {}
        for group, (width, ranks, rows) in groups.items():
            hidden = self.routed_hidden if group == "mlp.experts" else x.h
            for linear in mlp_matrices(hidden, width, gated=gated, ranks=ranks):
                if adapts(self.config.lora, f"{group}.{linear.name}"):
                    yield f"{group}.{linear.name}", linear, rows

    def _frozen(self, number: int) -> Sequence[bool]:
        """Return, for each frozen range of layers, whether layer ``number`` is in it."""
        return () if self.frozen is None else self.frozen.ranges_with(number)

    def unlike(self, layers: Sequence[int]) -> list[tuple[int, int]]:
        """Return one layer of each kind among ``layers``, and how many of them are of its kind."""
        first: dict[tuple[object, ...], int] = {}
        for number in layers:
            first.setdefault(self.costs[number], number)
        counts = Counter(self.costs[number] for number in layers)
        return [(number, counts[cost]) for cost, number in first.items()]

    def run_again(self, stage: Stage) -> Sequence[int]:
        """Return the layers of a stage that the backward pass recomputes as a whole."""
        model = self.config.model
        if model.recompute_granularity != "full":
            return ()
        block = model.recompute_method == "block"
        return stage.layers[: model.recompute_num_layers or 0] if block else stage.layers

    @property
    def group_size(self) -> int:
        """Return how many consecutive layers are recomputed together; 1 without groups."""
        model = self.config.model
        grouped = model.recompute_granularity == "full" and model.recompute_method == "uniform"
        return (model.recompute_num_layers or 1) if grouped else 1

    @property
    def recomputes_depths(self) -> bool:
        """Return whether MTP depths are recomputed; megatron-core leaves them out of blocks."""
        model = self.config.model
        return model.recompute_granularity == "full" and model.recompute_method == "uniform"

    @property
    def keeps_tokens(self) -> bool:
        """Return whether recomputed layers keep the tokens that their experts have got."""
        if not self.moe.moe_keep_dispatched_tokens:
            return False
        from megatron_ext.text.config.flex import keeps_tokens, values_of

        return keeps_tokens(values_of(self.moe, self.config))

    @property
    def routed(self) -> int:
        """Return the number of tokens that a rank's experts get from a micro-batch in one layer.

        Every expert is assumed to get the same number. A token counts once for each of its experts.
        """
        return self.sizes.residual_tokens * self.moe.moe_router_topk * self.sizes.etp

    @property
    def routed_hidden(self) -> int:
        """Return the channels of a token that its experts get and return."""
        return self.moe.moe_latent_size or self.sizes.h

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
        linear = self._linear(self.sizes.kinds[number])
        scores = self._scores(number)
        fp8 = self.config.fp8
        weights = self._trained(linear)
        adapters = self._adapter_flops(number)
        if not self.sizes.in_8_bits(fp8, number):
            return Flops(linear + adapters, scores=scores, weights=weights + adapters)
        x = self.sizes
        moved = self._cast_bytes(number)
        return Flops(
            adapters,
            fp8=linear,
            scores=scores,
            weights=adapters + (0.0 if fp8.fp8_wgrad else weights),
            fp8_weights=weights if fp8.fp8_wgrad else 0.0,
            cast=float(moved * x.tokens // x.tp),
        )

    def exchanges(self, stage: Stage) -> tuple[int, float, int]:
        x = self.sizes
        if x.ep == 1:
            return 0, 0.0, 0
        model = self.config.model
        width = (self.moe.moe_ffn_hidden_size or x.f) * self.moe.moe_router_topk
        matrices = mlp_matrices(self.routed_hidden, width, gated=model.gated)
        routed = sum(m.products for m in matrices)
        kinds = [*(x.kinds[number] for number in stage.layers), *[x.depth] * stage.depths]
        parts = self._products
        total = 0
        for kind in kinds:
            names = [*mixer_part(kind).values(), mlp_part(kind)]
            total += sum(parts[name] for name in names if name is not None)
        total += parts["depth"] * stage.depths + parts["logits"] * stage.head
        count = sum(map(has_experts, kinds))
        share = routed * count / max(1, total)
        if self.keeps_tokens:
            return count, share, 0
        again = stage.layers if self.recomputes("moe") else self.run_again(stage)
        twice = sum(has_experts(x.kinds[number]) for number in again)
        if self.recomputes_depths:
            twice += has_experts(x.depth) * stage.depths
        return count, share, twice

    def beside_exchanges(self, stage: Stage) -> "Work | None":
        if not self.moe.moe_shared_expert_overlap or self.sizes.ep == 1:
            return None
        from megatron_ext.planning.kernels import Phase, Work

        x = self.sizes
        width = self.moe.moe_shared_expert_intermediate_size or 0
        products = mlp_matrices(x.h, width, gated=self.config.model.gated)
        layers = [n for n in stage.layers if has_experts(x.kinds[n])]
        count = len(layers) + stage.depths * has_experts(x.depth)
        of_layer = MULTIPLY_AND_ADD * sum(m.products for m in products) * x.tokens / x.tp
        eight = bool(layers) and all(x.in_8_bits(self.config.fp8, number) for number in layers)
        return Work("linear", Phase.FORWARD, count * of_layer, width=1 if eight else x.width)

    def _cast_bytes(self, number: int) -> int:
        """Return the bytes per token that the 8-bit casts of one layer read and write.

        The inputs and the output gradients of the layer's linear layers are cast.
        """
        from megatron_ext.planning.kernels import cast_of

        x = self.sizes
        gated = self.config.model.gated
        each = cast_of(self.config.fp8.fp8_recipe)[0]
        wide = (2 if gated else 1) * x.f
        kind = x.kinds[number]
        around = sum(linear.inputs + linear.outputs for linear in self.matrices(kind))
        if not mlp_of(kind):
            return around * each
        around += 2 * x.h
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
        plain = self.trains and not (model.has_mlp_bias or changed or self.block.xielu)
        given = fp8.fp8_recipe == "delayed" and fp8.fp8_wgrad and self.sizes.in_8_bits(fp8, number)
        return given and plain and mlp_of(self.sizes.kinds[number]) == DENSE

    def _linear(self, kind: str) -> float:
        """Return one rank's forward operations of the linear layers of a layer of this kind."""
        return self.mixer_flops(kind) + self.mlp_flops(kind)

    def mixer_flops(self, kind: str) -> float:
        """Return one rank's forward operations of the linear layers of a sequence mixer."""
        part = mixer_part(kind).get("projections")
        return 0.0 if part is None else self._on_rank(part)

    def mlp_flops(self, kind: str) -> float:
        """Return one rank's forward operations of the linear layers of an MLP or experts."""
        part = mlp_part(kind)
        return 0.0 if part is None else self._on_rank(part)

    def _trained(self, linear: float) -> float:
        """Return the operations for the weight gradients of linear layers.

        They equal ``linear``, the operations of the layers' forward pass, but are 0 if only LoRA
        adapters are trained.
        """
        return linear if self.trains else 0.0

    def _adapter_flops(self, number: int) -> float:
        """Return the operations of the adapters of a decoder layer in the forward pass."""
        lora = self.config.lora
        x = self.sizes
        total = 0.0
        for kind, linear, rows in self.adapted(number) if lora.lora_rank else ():
            width = inner_width(lora, kind, gated=linear.gated)
            # One matrix multiplies what a rank holds of the sequence, the other all that it gets.
            held = rows if ROUTED in f".{kind}" else min(rows, x.residual_tokens)
            of_a, of_b = (rows, held) if linear.columns > 1 else (held, rows)
            inputs = linear.inputs // linear.columns
            total += width * (of_a * inputs + of_b * linear.outputs // linear.rows)
        return MULTIPLY_AND_ADD * total

    def _depth_flops(self) -> Flops:
        """Return the operations of one MTP depth without its logits, all in 16 or 32 bits."""
        linear = self._linear(self.sizes.depth) + self._on_rank("depth")
        scores = self._scores(self.sizes.layers)
        adapters = self._adapter_flops(self.sizes.layers)
        weights = self._trained(linear) + adapters
        return Flops(linear + adapters, scores=scores, weights=weights)

    def logits_flops(self) -> Flops:
        head = self._on_rank("logits") * (1 + self.sizes.depths)
        return Flops(head=head, head_weights=head if self.updates(self.head) else 0.0)

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
        full = model.recompute_granularity == "full"
        layers = self.run_again(stage) if full else stage.layers
        for number, count in self.unlike(layers):
            linear, scores = self._again(number)
            fp8 = linear if self.sizes.in_8_bits(self.config.fp8, number) else 0.0
            total += Flops(again=linear - fp8, fp8_again=fp8, scores_again=scores) * count
        if self.recomputes_depths:
            total += self._depth_flops().recomputed(stage.depths)
        return total

    def _again(self, number: int) -> tuple[float, float]:
        """Return the operations that the backward pass recomputes in layer ``number`` (from 0).

        The result is (operations of linear layers, operations of attention scores).
        """
        model = self.config.model
        kind = self.sizes.kinds[number]
        scores = self._scores(number)
        if model.recompute_granularity == "full":
            return self._linear(kind), scores
        linear = 0.0
        if self.recomputes("moe" if has_experts(kind) else "mlp"):
            linear = self.mlp_flops(kind)
        attends = self.attends(kind)
        latent = self.sizes.latent
        if attends and latent is not None and self.recomputes("mla_up_proj"):
            matrices = latent.matrices(self.sizes.tp)
            of_heads = sum(x.products for x in matrices if not x.name.endswith("down_proj"))
            linear += MULTIPLY_AND_ADD * of_heads * self.sizes.tokens / self.sizes.tp
        return linear, scores if attends and self.recomputes("core_attn") else 0.0

    def _scores(self, number: int) -> float:
        """Return one rank's forward operations of attention scores in layer ``number`` (from 0).

        For another sequence mixer, return those of its products without weights. The layers of
        MTP depths follow those of the decoder, and have the window of the last one.
        """
        windowed = self.windowed[min(number, self.sizes.layers - 1)]
        part = mixer_part(self.kind_at(number), windowed=windowed).get("scores")
        return 0.0 if part is None else self._on_rank(part)

    def _on_rank(self, part: str) -> float:
        """Return one rank's forward operations in a part of the model.

        ``part`` is a key of `token_products`, such as ``logits``.
        """
        return MULTIPLY_AND_ADD * self._products[part] * self.sizes.tokens / self.sizes.tp
