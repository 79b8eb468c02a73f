"""The cost model of a GPT, with which `planning` estimates memory and time.

This file counts the layers of each pipeline stage, their parameters and the bytes that ranks send.
flops.py has the sizes of a run and its operations, activations.py the bytes kept for the backward
pass, and kernels.py the bytes that kernels move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megatron_ext.config.layers import ATTENTION, has_experts, mixer_of, mlp_of
from megatron_ext.config.lora_targets import kind_of
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.rules.parallel import mtp_stage
from megatron_ext.config.rules.pipeline_layout import stages_of
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.grid import Layout, Placement
from megatron_ext.planning.network import Case, Flops, Volume, fp8_bytes, ring
from megatron_ext.planning.products import FORWARD_AND_BACKWARD, Linear
from megatron_ext.planning.stages import LayerBytes, Ranks, Stage
from megatron_ext.planning.weights import Weight, is_linear, weights_of, with_frozen
from megatron_ext.text.config.attention import AttentionConfig
from megatron_ext.text.config.hybrid import HybridConfig, depth_kind, layer_kinds
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.cost.activations import Activations
from megatron_ext.text.cost.flops import WORD_EMBEDDING, GptFlops, GptRun, Sizes
from megatron_ext.text.cost.latent import LatentSizes
from megatron_ext.text.cost.products import attention_matrices, latent_matrices, mlp_matrices

if TYPE_CHECKING:
    from megatron_ext.planning.kernels import Work
    from megatron_ext.planning.sheet import Sheet

SUMMED = "linear_proj", "out_proj", "mlp.linear_fc2", "shared_experts.linear_fc2"
"""Ends of the names of linear layers whose outputs tensor-parallel ranks sum."""


@lru_cache(maxsize=64)
def _layers_of(layout: str) -> tuple[int, ...]:
    """Return the number of decoder layers in each stage of ``--pipeline-model-parallel-layout``."""
    return tuple(stage.count("t") for stage in stages_of(layout))


def _num_layers(parallel: ParallelConfig, total: int, placement: Placement, index: int) -> int:
    """Return the number of decoder layers that megatron-core assigns to stage ``index``.

    Args:
        parallel: the flags that divide the layers among stages.
        total: number of decoder layers of the model.
        placement: the pipeline rank of each stage.
        index: index among all stages of the model.
    """
    if parallel.pipeline_model_parallel_layout is not None:
        return _layers_of(parallel.pipeline_model_parallel_layout)[index]
    rank = placement.rank_of(index)
    size = placement.pipeline_size
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    with_embedding = parallel.account_for_embedding_in_pipeline_split
    with_loss = parallel.account_for_loss_in_pipeline_split
    if rank == 0 and first is not None:
        of_rank = first
    elif rank == size - 1 and last is not None:
        of_rank = last
    else:
        between = size - (first is not None) - (last is not None)
        dealt = total + with_embedding + with_loss - (first or 0) - (last or 0)
        of_rank = dealt // max(1, between)
    at_end = index == placement.num_stages - 1
    taken = (with_embedding and index == 0) + (with_loss and at_end)
    return of_rank // placement.num_chunks - taken


@dataclass(frozen=True)
class Parameters(GptRun):
    """Lists the names and sizes of a stage's parameters, in the order of the PyTorch module."""

    def weights(self, stage: Stage) -> list[Weight]:
        fp8 = self.config.fp8
        weights = list(self._embedding(stage))
        for position, number in enumerate(stage.layers):
            layer = self._layer_weights(f"decoder.layers.{position}", self.sizes.kinds[number])
            # ``--fp8-param-gather`` holds the matrices of 8-bit layers in 8 bits.
            if fp8.fp8_param_gather and self.sizes.in_8_bits(fp8, number):
                layer = [replace(w, fp8=is_linear(w.name)) for w in layer]
            weights += layer
        if stage.final_norm:
            weights += self.norm_weights("decoder.final_layernorm")
        for depth in range(stage.depths):
            weights += self._depth_weights(f"mtp.layers.{depth}")
        x = self.sizes
        if stage.head and not (self._tied and (stage.embedding or stage.depths)):
            weights.append(Weight("output_layer.weight", self.table, x.tp, shared=self._tied))
        if self.config.freeze.is_used:
            from megatron_ext.planning.frozen import marked

            return marked(self.config.freeze, weights, stage.layers)
        return with_frozen(self.config.lora, weights)

    @property
    def _tied(self) -> bool:
        return not self.config.model.untie_embeddings_and_output_weights

    def _embedding(self, stage: Stage) -> Iterator[Weight]:
        if not (stage.embedding or stage.depths):
            return
        x = self.sizes
        # Copies are kept equal where the model has several stages; see core's LanguageModule.
        copied = x.pp > 1 and (self._tied or x.depths > 0)
        shared = copied and not (stage.embedding and stage.head)
        yield Weight(WORD_EMBEDDING, self.table, x.tp, shared=shared)
        positions = self.config.section(PositionConfig)
        if positions.position_embedding_type == "learned_absolute":
            count = positions.max_position_embeddings or 0
            yield Weight("embedding.position_embeddings.weight", count * x.h)

    def norm_weights(self, name: str, size: int | None = None) -> Iterator[Weight]:
        if not self.block.norm_elementwise_affine:
            return
        size = self.sizes.h if size is None else size
        yield Weight(f"{name}.weight", size)
        if self.config.model.normalization == "LayerNorm" and self.block.norm_bias:
            yield Weight(f"{name}.bias", size)

    def _input_norm_weights(self, name: str) -> Iterator[Weight]:
        return iter(()) if self.block.reordered_norm else self.norm_weights(name)

    def _layer_weights(self, name: str, kind: str) -> list[Weight]:
        weights: list[Weight] = []
        letter = mixer_of(kind)
        if letter:
            weights += self._input_norm_weights(f"{name}.input_layernorm")
        if letter == ATTENTION:
            weights += self.attention_weights(f"{name}.self_attention")
        elif letter:
            weights += self.mixers[letter].weights(self, f"{name}.self_attention")
        if mlp_of(kind) and not self.block.shared_input_norm:
            weights += self._input_norm_weights(f"{name}.pre_mlp_layernorm")
        if has_experts(kind):
            weights += self._expert_weights(f"{name}.mlp")
        elif mlp_of(kind):
            bias = self.config.model.has_mlp_bias
            mlp = self._mlp(self.sizes.f, self.sizes.tp, bias=bias)
            weights += self.linear_weights(f"{name}.mlp", mlp)
            if self.block.xielu:
                names = (f"{name}.mlp.activation_func.alpha_{x}" for x in "pn")
                weights += [Weight(each, 1) for each in names]
        if self.normalizes_outputs:
            if letter:
                weights += self.norm_weights(f"{name}.post_self_attn_layernorm")
            if mlp_of(kind):
                weights += self.norm_weights(f"{name}.post_mlp_layernorm")
        return weights

    def linear_weights(self, name: str, linears: Sequence[Linear]) -> list[Weight]:
        """Return the parameters of ``linears``; ``name`` is the path of the module that holds them.

        Names of parameters begin with this path.
        """
        lora = self.config.lora
        return [weight for x in linears for weight in weights_of(x, lora, f"{name}.")]

    def attention_weights(self, name: str) -> list[Weight]:
        """Return the parameters of an attention module whose path is ``name``."""
        x = self.sizes
        model = self.config.model
        weights: list[Weight] = []
        if self.scoring.softmax_type == "learnable":
            weights.append(Weight(f"{name}.core_attention.softmax_offset", x.n // x.tp, x.tp))
        weights += self.linear_weights(name, attention_matrices(self.config, x.tp))
        if self.block.qk_layernorm_all_heads:
            for part, heads in (("q", x.n), ("k", x.g)):
                weights.append(Weight(f"{name}.{part}_norm.weight", heads * x.d // x.tp, x.tp))
            return weights
        place = "rotated_" if self.block.qk_layernorm_after_rope else ""
        norms = {f"{place}q": x.d, f"{place}k": x.d}
        if x.latent is not None:
            norms = {"q": x.latent.query_rank, "kv": x.latent.rank}
        for part, size in norms.items():
            if model.qk_layernorm and size:
                weights += self.norm_weights(f"{name}.{part}_layernorm", size)
        return weights

    def _mlp(
        self, width: int, ranks: int, *, hidden: int | None = None, **layout: Any
    ) -> list[Linear]:
        """Return the linear layers of an MLP of ``width`` channels.

        The channels are divided among ``ranks`` ranks. The MLP gets and returns ``hidden``
        channels, by default h; ``layout`` has further arguments of `Linear`.
        """
        model = self.config.model
        layout.setdefault("bias", model.add_bias_linear)
        size = hidden or self.sizes.h
        return mlp_matrices(size, width, gated=model.gated, ranks=ranks, **layout)

    def _expert_weights(self, name: str) -> list[Weight]:
        x = self.sizes
        moe = self.moe
        count = moe.num_experts or 0
        width = moe.moe_ffn_hidden_size or x.f
        router = Linear("router", count, x.h, bias=self.config.model.add_bias_linear)
        weights = self.linear_weights(name, [router])
        layout = {"copies": x.ep, "expert": x.ep > 1 or x.etp != x.tp}
        mlp = self._mlp(width, x.etp, hidden=self.routed_hidden, **layout)
        for expert in range(count // x.ep):
            weights += self.linear_weights(f"{name}.experts.local_experts.{expert}", mlp)
        shared = moe.moe_shared_expert_intermediate_size
        if shared:
            if moe.moe_shared_expert_gate:
                gate = Weight(f"{name}.shared_experts.gate_weight", x.h, matrix=(1, x.h))
                weights.append(gate)
            weights += self.linear_weights(f"{name}.shared_experts", self._mlp(shared, x.tp))
        if moe.moe_latent_size:
            weights += self.linear_weights(name, latent_matrices(x.h, moe.moe_latent_size))
        return weights

    def _depth_weights(self, name: str) -> list[Weight]:
        """Return the parameters of the MTP depth whose module has the path ``name``.

        The depth's transformer layer has the same parameters as a decoder layer of its kind.
        """
        x = self.sizes
        weights = [*self.norm_weights(f"{name}.enorm"), *self.norm_weights(f"{name}.hnorm")]
        both = Linear("eh_proj", x.h, 2 * x.h, rows=x.tp, bias=False)
        weights += self.linear_weights(name, [both])
        weights += self._layer_weights(f"{name}.transformer_layer", x.depth)
        weights += self.norm_weights(f"{name}.final_layernorm")
        return weights


@dataclass(frozen=True)
class GptNetwork(Parameters, Activations, GptFlops):
    """The cost formulas of a GPT in one run: parameters, memory, messages and operations."""

    @classmethod
    def of(cls, config: RunConfig) -> GptNetwork:
        """Return the cost formulas for a resolved configuration.

        Raise a ConfigError if the vocabulary size is not set.
        """
        model = config.model
        if not model.padded_vocab_size:
            raise ConfigError("`--padded-vocab-size` is missing; give it, or a tokenizer.")
        h = model.hidden_size or 0
        n = model.num_attention_heads or 0
        sizes = Sizes(
            **vars(Ranks.of(config)),
            s=model.seq_length or 0,
            h=h,
            f=model.ffn_hidden_size or 0,
            n=n,
            g=model.num_query_groups or n,
            d=model.kv_channels or h // max(1, n),
            v=model.padded_vocab_size,
            layers=model.num_layers or 0,
            depths=model.mtp_num_layers or 0,
            kinds=layer_kinds(config),
            depth=depth_kind(config),
            latent=LatentSizes.of(config),
            gates=n if config.section(AttentionConfig).attention_output_gate else 0,
        )
        return cls(config, sizes)

    def _adapters(self, number: int, *, attended: bool) -> int:
        kept = super()._adapters(number, attended=attended)
        if not self.config.lora.lora_use_dora:
            return kept
        widths = {
            kind_of(weight.name.partition(".lora.")[0]): weight.numel
            for weight in self._layer_weights("0", self.sizes.kinds[number])
            if weight.name.endswith(".lora.magnitude")
        }
        for kind, _, rows in self.adapted(number):
            # Magnitudes keep the outputs, which are split along s where they are summed over ranks.
            summed = kind.endswith(SUMMED)
            outputs = (self.sizes.residual_tokens if summed else rows) * widths[f"0.{kind}"]
            kept += outputs * self.sizes.width
        return kept

    def layer_bytes(self, number: int) -> LayerBytes:
        found = super().layer_bytes(number)
        if self.config.lora.lora_quantize_weights is None:
            return found
        # One weight at a time is restored from 4 bits.
        weights = self._layer_weights("0", self.sizes.kinds[number])
        largest = max((x.numel for x in weights if is_linear(x.name)), default=0)
        return LayerBytes(found.kept, found.transient + largest * self.sizes.width)

    @property
    def experts(self) -> tuple[int, int]:
        moe = self.moe
        count = moe.num_experts or 1
        return count, min(count, moe.moe_router_topk)

    def stages(self) -> list[Stage]:
        parallel = self.config.parallel
        total = self.sizes.layers
        depths = self.sizes.depths
        placement = Layout.from_config(parallel).placement
        last = placement.num_stages - 1
        with_depths = mtp_stage(parallel) if depths else None
        stages = []
        first = 0
        for index in range(placement.num_stages):
            count = _num_layers(parallel, total, placement, index)
            layers = tuple(range(first, first + count))
            stage = Stage(
                index=index,
                rank=placement.rank_of(index),
                chunk=placement.chunk_of(index),
                layers=layers,
                depths=depths if index == with_depths else 0,
                embedding=index == 0,
                final_norm=total - 1 in layers if depths else index == last,
                head=index == last,
            )
            stages.append(stage)
            first += count
        return stages

    def layer_flops(self, number: int) -> Flops:
        whole = super().layer_flops(number)
        if not self.config.freeze.is_used:
            return whole
        from megatron_ext.planning.frozen import trained_share, without_frozen

        kind = self.sizes.kinds[number]
        mixer = self.mixer_flops(kind)
        mlp = self.mlp_flops(kind)
        layer = self.weights(Stage.of_layers((number,), 1, 3))
        shares = [
            trained_share(x for x in layer if part in x.name)
            for part in (".self_attention.", ".mlp.")
        ]
        share = (mixer * shares[0] + mlp * shares[1]) / (mixer + mlp)
        return without_frozen(whole, share)

    def kind(self, stage: Stage) -> Hashable:
        layers = tuple(self.costs[number] for number in stage.layers)
        return layers, stage.depths, stage.embedding, stage.final_norm, stage.head

    def fp8_weights(self, stage: Stage) -> int:
        """Return the bytes of the 8-bit copies of weights; layers that stay in bf16 have none."""
        fp8 = self.config.fp8
        if fp8.fp8_format is None:
            return 0
        eight = [n for n, layer in enumerate(stage.layers) if self.sizes.in_8_bits(fp8, layer)]
        names = tuple(f"decoder.layers.{n}." for n in eight)
        return fp8_bytes(fp8, [w for w in self.parameters(stage) if w.name.startswith(names)])

    def other_work(self, stage: Stage) -> list[Work]:
        from megatron_ext.text.cost import kernels

        return kernels.other_work(self, stage)

    def layer(self) -> LayerBytes:
        return self.layer_bytes(self.sizes.layers - 1)

    layer_input = boundary = GptRun.residual

    def step_flops(self) -> float:
        x = self.sizes
        batch = self.config.training.batch_sizes[1]
        forward = sum(self.flops(stage).forward for stage in self.stages()) * x.tp * x.cp
        return FORWARD_AND_BACKWARD * forward / x.b * batch

    @property
    def tokens(self) -> int:
        return self.sizes.s

    def traffic(self, stage: Stage) -> Volume:
        x = self.sizes
        gathers = stage.embedding + stage.depths + (1 + x.depths) * stage.head
        total = Volume(2 * self.gather() * gathers, pipeline=self.messages(stage))
        limit = len(self.run_again(stage))
        layers = Counter((x.kinds[n], place < limit) for place, n in enumerate(stage.layers))
        layers[x.depth, self.recomputes_depths] += stage.depths
        for (kind, again), count in layers.items():
            total += self.layer_traffic(kind, again=again) * count
        return total

    def layer_traffic(self, kind: str, *, again: bool = True) -> Volume:
        """Return the bytes that a rank sends for one layer of a kind and one micro-batch.

        The bytes of forward and backward pass are added. ``again`` tells whether full
        recomputation, if asked for, includes the layer.
        """
        x = self.sizes
        gather = self.gather()
        letter = mixer_of(kind)
        entering = 0.0
        if letter == ATTENTION:
            # Multi-latent attention gathers its small vectors instead of its input.
            entering = gather if x.latent is None else gather * x.latent.small / x.h
        elif letter:
            entering = self.mixers[letter].gathers(self)
        dense = bool(mlp_of(kind)) and not has_experts(kind)
        forward = Volume(
            tensor=entering + (bool(letter) + 2 * dense) * gather,
            context=self.mixer_context(kind),
        )
        # Under sequence parallelism the inputs of two matrices are gathered once more.
        backward = forward + Volume(tensor=entering + dense * gather)
        if not x.sequence_parallel:
            backward = forward
        full = again and self.config.model.recompute_granularity == "full"
        total = forward + backward
        if full:
            total += forward
        elif self.attends(kind) and self.recomputes("core_attn"):
            total += Volume(context=forward.context)
        if has_experts(kind):
            from megatron_ext.text.cost.dispatch import dispatched, dispatched_again

            total += dispatched(self) + dispatched(self, backward=True)
            if full or self.recomputes("moe"):
                total += dispatched_again(self)
        return total

    def mixer_context(self, kind: str) -> float:
        """Return the bytes that a rank sends for context parallelism in a layer's forward pass."""
        letter = mixer_of(kind)
        if letter == ATTENTION:
            return self.context()
        return self.mixers[letter].context(self) if letter else 0.0

    def sheets(self) -> list[Sheet]:
        if self.config.section(HybridConfig).layer_kinds is None:
            return []
        from megatron_ext.text.cost.layer_sheet import layer_sheet

        return [layer_sheet(self)]

    def gather(self) -> float:
        """Return the bytes that a rank sends in one all-gather of hidden states ``[s, b, h]``.

        The ranks of its tensor-parallel group gather them.
        """
        x = self.sizes
        return ring(x.tp) * x.tokens * x.h * x.width

    def context(self) -> float:
        """Return the bytes that a rank sends for context parallelism in attention's forward pass.

        They are keys and values, or those of some heads and queries.
        """
        x = self.sizes
        tokens = x.tokens * x.width // x.tp
        both = x.key + x.d
        if self.config.parallel.cp_comm_type[0] == "a2a":
            return ring(x.cp) * tokens * (x.n + x.g) * both
        return (x.cp - 1) * tokens * x.g * both


def cases(config: RunConfig) -> list[Case]:
    """Return the one `Case` of a GPT, whose samples all have the same length."""
    return [Case(GptNetwork.of(config))]
