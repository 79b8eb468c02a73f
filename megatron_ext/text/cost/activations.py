"""Bytes that autograd keeps for one micro-batch of a GPT, layer by layer, with our torch layers.

The count follows "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198,
section 4). Each operation keeps the tensors that its backward pass needs; a tensor that two
operations share counts once. The count differs from the paper where our layers do: SDPA keeps
queries, keys, values, its output and a log-sum-exp instead of the scores; RMSNorm and SwiGLU
replace LayerNorm and GELU; the cross-entropy is chunked. On a CPU some kernels are not fused and
keep more. Tests compare the sums with the memory that training allocates.

A linear layer keeps its input to compute the gradient of its weight: one byte per element if that
product runs in 8 bits (`layers.fp8`). A layer with a frozen weight keeps no input, but its LoRA
adapter (`layers.lora`) does.
"""

from collections import Counter
from dataclasses import dataclass, replace

from megatron_ext.config.layers import ATTENTION, has_experts, mixer_of, mlp_of
from megatron_ext.config.lora_targets import adapts
from megatron_ext.planning.stages import (
    FP32,
    INT64,
    LayerBytes,
    Stage,
    in_order,
    layer_norm,
    recomputed,
    rms_norm,
)
from megatron_ext.planning.weights import inner_width
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.cost.flops import GptRun
from megatron_ext.text.cost.latent import LatentSizes


@dataclass(frozen=True)
class Activations(GptRun):
    """Formulas for activation memory: bytes on one rank for one micro-batch."""

    def norm(self, tokens: int, size: int) -> int:
        """Return the bytes that a norm keeps besides its input, which is ``[tokens, size]``."""
        if self.config.model.normalization == "LayerNorm":
            return layer_norm(tokens)
        trained = self.updates("decoder.final_layernorm.weight")
        return rms_norm(self.sizes, tokens, size, frozen=not trained)

    def input_norm(self) -> int:
        """Return the bytes kept for the norm before attention or an MLP, including its output."""
        if self.block.reordered_norm:
            return 0
        return self.residual + self.norm(self.sizes.residual_tokens, self.sizes.h)

    def output_norm(self) -> int:
        """Return the bytes kept for the norm after attention or an MLP, including the norm's input.

        Return 0 without ``--sandwich-norm`` and ``--reordered-norm``, which add this norm.
        """
        if not self.normalizes_outputs:
            return 0
        return self.residual + self.norm(self.sizes.residual_tokens, self.sizes.h)

    def dropout(self, elements: int, probability: float) -> int:
        """Return the bytes of a dropout mask of ``elements`` elements; 0 without dropout.

        An element takes 1 byte on a GPU; on a CPU, as many as an element of the activations.
        """
        return elements * (1 if self.sizes.gpu else self.sizes.width) if probability else 0

    def latent(self, latent: LatentSizes) -> int:
        """Return the bytes that multi-latent attention keeps before it computes scores.

        They are the bytes of the latent vectors and their norms, and of queries, keys and values.
        Recomputing ``mla_up_proj`` frees queries, keys and values, but not what other ranks have
        sent, nor the padded copies that a CPU's fused kernel gets.
        """
        sizes = self.sizes
        kept = sizes.residual_tokens * latent.kept * sizes.width
        for rank in (latent.query_rank, latent.rank):
            kept += self.norm(sizes.residual_tokens, rank) if latent.norms and rank else 0
        gathers = self._exchange == "gather"
        channels = latent.key + (latent.key + latent.value) * (sizes.cp if gathers else 1)
        if latent.key != latent.value and not (sizes.gpu or self.attends_eagerly):
            # The fused kernel of a CPU gets copies with heads of one size, and so is its output.
            channels = (2 + 2 * (sizes.cp if gathers else 1)) * max(latent.key, latent.value)
        elif self.recomputes("mla_up_proj"):
            # Queries, keys and values are freed, but not what other ranks have sent.
            channels = (latent.key + latent.value) * sizes.cp if gathers else 0
        return kept + sizes.tokens * sizes.n // sizes.tp * sizes.width * channels

    def qk(self) -> int:
        """Return the bytes kept for queries, keys, values, their norms and their rotary angles."""
        model = self.config.model
        sizes = self.sizes
        if sizes.latent is not None:
            return self.latent(sizes.latent)
        of_head = sizes.tokens * sizes.d * sizes.width
        queries = of_head * sizes.n // sizes.tp
        keys = of_head * sizes.g // sizes.tp
        gates = of_head * sizes.gates // sizes.tp
        mixed = queries + gates + 2 * keys
        gathered = 2 * keys * sizes.cp
        rotates = self.config.section(PositionConfig).position_embedding_type == "rope"
        # Where groups of heads share keys, the queries are cut out of the projection by a copy,
        # unless a rank has one group.
        copied = queries if sizes.g not in (sizes.n, sizes.tp) else 0
        kept = 4 * sizes.s // sizes.cp * sizes.d * sizes.width if rotates else 0
        if model.qk_layernorm:
            kept += mixed + (queries + keys if self.block.qk_layernorm_after_rope else copied)
            kept += self.qk_norms()
        kept += self.gates() if gates else 0
        if sizes.gpu and model.apply_rope_fusion and rotates and not (model.qk_layernorm or gates):
            # One kernel copies all three out of the projection, whose memory is then freed. All
            # layers share the rotary tables.
            return queries + gathered if self._exchange == "gather" else mixed
        fresh = rotates or model.qk_layernorm
        viewed = 0 if model.qk_layernorm else mixed
        if self._exchange == "gather":
            return kept + gathered + (queries if fresh or copied else viewed)
        if self._exchange == "trade":
            return kept + queries + 2 * keys
        if self.attends_eagerly and sizes.g != sizes.n:
            # Keys and values of a group are copied for each of its heads, see `scores`.
            return kept + queries
        return kept + viewed + (queries + keys if fresh else copied)

    def gates(self) -> int:
        """Return the bytes that the gates of heads keep, besides attention's own output.

        They are the sigmoids and their products with the output. A compiled function computes the
        sigmoids again, from the gates.
        """
        x = self.sizes
        channels = x.tokens * x.gates * x.d // x.tp
        fused = x.gpu and self.config.model.apply_rope_fusion
        return channels * (x.width + (x.width if fused else max(x.width, FP32)))

    def qk_norms(self) -> int:
        """Return the bytes that the norms of queries and keys keep besides their inputs."""
        x = self.sizes
        if not self.block.qk_layernorm_all_heads:
            heads = (x.n // x.tp, x.g // x.tp)
            return sum(self.norm(x.tokens * count, x.d) for count in heads)
        # Separate functions compute these norms, on a GPU too, and keep what they return.
        channels = (x.n + x.g) * x.d // x.tp
        wide = FP32 - x.width if x.half else 0
        return x.tokens * (channels * (FP32 + wide) + 2 * FP32)

    @property
    def _exchange(self) -> str | None:
        """Return how context parallelism exchanges keys and values: "trade", "gather" or None.

        "trade" is an all-to-all, after which a rank has the whole sequence of some heads; "gather"
        is any other way. None means that autograd keeps nothing of an exchange, since there is no
        context parallelism or attention is recomputed.
        """
        if self.sizes.cp == 1 or self.recomputes("core_attn"):
            return None
        return "trade" if self.config.parallel.cp_comm_type[0] == "a2a" else "gather"

    @property
    def attends_eagerly(self) -> bool:
        """Return whether attention runs without a fused kernel, so that it keeps all its scores."""
        model = self.config.model
        drops = model.attention_dropout > 0
        if self.sizes.gpu:
            d = self.sizes.d
            flex = self.sizes.half and not drops and d >= 16 and d & (d - 1) == 0
            return (drops and model.deterministic_dropout) or (
                self.scoring.changes_scores and not flex
            )
        return self.sizes.half or drops or self.scoring.changes_scores

    def scores(self) -> int:
        """Return the bytes that attention keeps besides queries, keys, values and its output."""
        sizes = self.sizes
        model = self.config.model
        heads = sizes.n // sizes.tp
        if not self.attends_eagerly:
            # The outputs of two parts, or of other heads, are copied into one.
            kept = sizes.tokens * heads * (FP32 + (sizes.d * sizes.width if sizes.cp > 1 else 0))
            if sizes.cp > 1 and self.config.parallel.cp_comm_type[0] != "a2a" and not sizes.gpu:
                # A CPU kernel writes out the causal masks of parts i and 2c - 1 - i together, but
                # for the first part of all, which is square.
                part = sizes.s // (2 * sizes.cp)
                kept += part * part * (2 * sizes.cp + 1) * sizes.width
            return kept
        elements = sizes.tokens * heads * sizes.s
        kept = elements * (FP32 if sizes.half else sizes.width) + sizes.s // sizes.cp * sizes.s
        kept += elements * sizes.width if sizes.half else 0
        if self.scoring.attn_logit_softcapping is not None:
            kept += elements * (FP32 if sizes.half else sizes.width)  # the hyperbolic tangents
        if model.attention_dropout:
            kept += elements * sizes.width + self.dropout(elements, model.attention_dropout)
        if sizes.g != sizes.n:
            kept += 2 * sizes.s * sizes.b * heads * sizes.d * sizes.width
        return kept

    def attention(self) -> LayerBytes:
        sizes = self.sizes
        model = self.config.model
        out = sizes.tokens * sizes.n // sizes.tp * sizes.d * sizes.width
        kept = self.residual + self.input_norm() + self.qk() + out + self.output_norm()
        kept += self.dropout(sizes.residual_tokens * sizes.h, model.hidden_dropout)
        scores = self.scores()
        if self.recomputes("core_attn"):
            return LayerBytes(kept, self.attention_transient() + scores + out)
        return LayerBytes(kept + scores, self.attention_transient())

    def attention_transient(self) -> int:
        """Return the bytes that attention needs besides those that it keeps."""
        sizes = self.sizes
        qkv = sizes.projected // sizes.tp
        weight = qkv * sizes.h * sizes.width  # the output projection's is smaller
        scores = 0
        if self.attends_eagerly:
            elements = sizes.tokens * sizes.n // sizes.tp * sizes.s
            scores = 2 * elements * (FP32 if sizes.half else sizes.width)
        return self.residual + max(weight, 2 * sizes.tokens * qkv * sizes.width + scores)

    def mlp(self, experts: bool) -> LayerBytes:
        sizes = self.sizes
        model = self.config.model
        shared = self.block.shared_input_norm
        kept = (0 if shared else self.residual + self.input_norm()) + self.output_norm()
        if self.block.use_parallel_residual and not shared:
            # Attention keeps the input of both norms.
            kept -= self.residual
        kept += self.dropout(sizes.residual_tokens * sizes.h, model.hidden_dropout)
        dense = self._inner(sizes.tokens, sizes.f // sizes.tp, scaled=False)
        inner = self._experts() if experts else dense
        if self.recomputes("moe" if experts else "mlp"):
            kept += self.kept_tokens if experts else 0
            return LayerBytes(kept, self.residual + inner.kept + inner.transient)
        return LayerBytes(kept + inner.kept, self.residual + inner.transient)

    @property
    def kept_tokens(self) -> int:
        """Return the bytes of tokens that a recomputed layer of experts keeps."""
        if not self.keeps_tokens:
            return 0
        from megatron_ext.text.cost.dispatch import kept_tokens

        return kept_tokens(self)

    @property
    def joins_experts(self) -> bool:
        """Return whether a CPU computes a rank's experts together, in float32 (`JointExperts`)."""
        return not (self.sizes.gpu or self.sizes.half)

    def _inner(
        self, tokens: int, width: int, *, scaled: bool, hidden: int | None = None
    ) -> LayerBytes:
        """Return the memory of an MLP from the output of fc1 to the input of fc2.

        Args:
            tokens: number of tokens that the MLP gets.
            width: number of the MLP's channels on this rank.
            scaled: whether the MLP is an expert. Without a fused kernel, autograd then keeps one
                more tensor, since the router's weights multiply the result.
            hidden: channels that the MLP gets and returns; by default h.
        """
        model = self.config.model
        sizes = self.sizes
        hidden = hidden or sizes.h
        tensor = tokens * width * sizes.width
        fused = sizes.gpu and (model.bias_swiglu_fusion if model.swiglu else model.bias_gelu_fusion)
        # Gated: both halves of fc1's output, the activated half, the other one plus core's offset,
        # and their product. One kernel (`layers.pointwise.activated`) keeps only its input and its
        # result, and computes the others again. Experts computed together add no offset of 0.
        adds_offset = not (scaled and self.joins_experts) or model.glu_linear_offset != 0
        gated = 3 if fused else 4 + adds_offset + (not model.swiglu)
        tensors = (gated if model.gated else 2) + (scaled and not fused)
        inner = 2 * width if model.gated else width
        of_fc2 = tensor + width * hidden * sizes.width
        of_product = (2 if model.gated else 1) * tensor
        of_fc1 = inner * hidden * sizes.width + tokens * hidden * sizes.width
        of_fc1 += (inner // width - tensors) * tensor
        return LayerBytes(tensors * tensor, max(of_fc2, of_product, of_fc1))

    def _experts(self) -> LayerBytes:
        """Return the memory of an MoE layer's router, token dispatch, local and shared experts.

        Every routed expert is assumed to get the same number of tokens.
        """
        sizes = self.sizes
        moe = self.moe
        count = moe.num_experts or 1
        width = sizes.width
        seen = sizes.residual_tokens
        if moe.moe_token_dispatcher_type == "allgather":
            seen *= sizes.ep * sizes.etp
        routed = self.routed
        part = self.expert_width
        local = max(1, count // sizes.ep)
        hidden = self.routed_hidden
        inner = self._inner(routed, part, scaled=True, hidden=hidden)
        # Permuted inputs with their places and weights; the map of the tokens that are seen; what
        # the router keeps of its choice and of its balancing loss.
        kept = inner.kept + routed * (hidden * width + INT64 + FP32)
        kept += seen * local * (FP32 + 1)
        kept += sizes.residual_tokens * (moe.moe_router_topk * (INT64 + FP32) + 2 * count * FP32)
        # One expert after the other, with the gradients of all tokens there and back.
        transient = self._inner(routed // local, part, scaled=True, hidden=hidden).transient
        transient += (seen + routed) * hidden * width
        if moe.moe_latent_size:
            # The sums of the experts' outputs, which are projected back.
            kept += sizes.residual_tokens * hidden * width
        if moe.moe_shared_expert_intermediate_size:
            part = moe.moe_shared_expert_intermediate_size // sizes.tp
            shared = self._inner(sizes.tokens, part, scaled=False)
            kept = kept + shared.kept
            transient = max(transient, shared.transient)
        return LayerBytes(kept, transient)

    def mixed(self, letter: str) -> LayerBytes:
        """Return the memory of the sequence mixer with this letter, its norm and its addition."""
        sizes = self.sizes
        kept = self.residual + self.input_norm() + self.output_norm()
        kept += self.dropout(sizes.residual_tokens * sizes.h, self.config.model.hidden_dropout)
        inner = self.mixers[letter].kept(self)
        return LayerBytes(kept + inner.kept, self.residual + inner.transient)

    def halves(self, kind: str) -> list[LayerBytes]:
        """Return the memory of the parts of a layer of this kind: mixer, and MLP or experts."""
        letter = mixer_of(kind)
        found = []
        if letter:
            found.append(self.attention() if letter == ATTENTION else self.mixed(letter))
        if mlp_of(kind):
            found.append(self.mlp(has_experts(kind)))
        return found

    def layer_bytes(self, number: int) -> LayerBytes:
        parts = in_order(*self.halves(self.sizes.kinds[number]))
        return LayerBytes(parts.kept + self._linear_inputs(number), parts.transient)

    def _linear_inputs(self, number: int) -> int:
        """Return the difference that 8-bit products or LoRA make to the bytes that a layer keeps.

        The result is relative to training of all weights in 16 or 32 bits, and is often negative.
        Layers are numbered from 0.
        """
        fp8 = self.config.fp8
        width = self.sizes.width
        # Attention keeps its output, which is the input of linear_proj, unless it is run again.
        attended = not (self.attends_eagerly or self.recomputes("core_attn"))
        if not self.trains:
            return self._adapters(number, attended=attended)
        inputs = self._inputs(number)
        saved = self._inputs_of_frozen(inputs, number, attended=attended)
        if not (self.sizes.in_8_bits(fp8, number) and fp8.fp8_wgrad):
            return -saved * width
        proj = inputs.pop("linear_proj", 0)
        proj_kept = proj if attended else -proj * (width - 1)
        return proj_kept - sum(inputs.values()) * (width - 1) - saved

    def _inputs_of_frozen(self, inputs: dict[str, int], number: int, *, attended: bool) -> int:
        """Return the number of elements that frozen linear layers of a layer do not keep.

        The arguments are those of `_adapters`, and the layer's number in the model.
        """
        experts = ".experts" if has_experts(self.sizes.kinds[number]) else ""
        modules = {"linear_fc1": f"mlp{experts}", "linear_fc2": f"mlp{experts}"}
        return sum(
            numbers
            for name, numbers in inputs.items()
            if not (name == "linear_proj" and attended)
            and self.freezes(
                f"decoder.layers.{number}.{modules.get(name, 'self_attention')}.{name}.weight"
            )
        )

    def _idle(self, stage: Stage) -> int | None:
        """Return how many layers of a stage come before all that is trained, and keep nothing.

        None says that this is so of the whole stage. Layers that are recomputed as a whole keep
        their inputs whatever is trained.
        """
        if self.frozen is None or not stage.embedding:
            return 0
        if all(weight.frozen for weight in self.parameters(stage)):
            return None
        nothing = stage.only()
        ends = self.weights(replace(nothing, embedding=True))
        if self.config.model.recompute_granularity == "full" or not all(x.frozen for x in ends):
            return 0
        frozen = [all(x.frozen for x in self.weights(stage.only(n))) for n in stage.layers]
        return next((n for n, each in enumerate(frozen) if not each), len(frozen))

    def _inputs(self, number: int) -> dict[str, int]:
        """Return the number of elements in the input of each linear layer of layer ``number``.

        Keys are names such as ``linear_qkv``, without latent attention's down-projections. The
        numbers are those of one rank, and 0 in a recomputed MLP.
        """
        sizes = self.sizes
        kind = self.sizes.kinds[number]
        letter = mixer_of(kind)
        found: dict[str, int] = {}
        if letter == ATTENTION:
            found = self.attention_inputs()
        elif letter:
            found = self.mixers[letter].inputs(self)
        if not mlp_of(kind):
            return found
        experts = has_experts(kind)
        fc1 = sizes.residual_tokens * sizes.h
        fc2 = sizes.tokens * sizes.f // sizes.tp
        if experts:
            fc1 = self.routed * self.routed_hidden
            fc2 = self.routed * self.expert_width
        if self.recomputes("moe" if experts else "mlp"):
            fc1 = fc2 = 0
        return {**found, "linear_fc1": fc1, "linear_fc2": fc2}

    def attention_inputs(self) -> dict[str, int]:
        """Return the number of elements in the inputs of attention's linear layers, by name."""
        sizes = self.sizes
        proj = sizes.tokens * sizes.n // sizes.tp * sizes.d
        first = {"linear_qkv": sizes.residual_tokens * sizes.h}
        if sizes.latent is not None:
            # Two projections keep the hidden state: once in 16 bits, or each in 8.
            ranks = {"q": sizes.latent.query_rank, "kv": sizes.latent.rank}
            first = {f"linear_{x}_up_proj": sizes.residual_tokens * n for x, n in ranks.items()}
        return {**first, "linear_proj": proj}

    def _adapters(self, number: int, *, attended: bool) -> int:
        """Return the bytes that LoRA adapters add, minus the inputs that frozen layers do not keep.

        Args:
            number: index of the layer, from 0.
            attended: whether attention keeps its output, the input of ``linear_proj``. If so, this
                input is kept even if ``linear_proj`` has no adapter.
        """
        lora = self.config.lora
        sizes = self.sizes
        total = 0
        for kind, linear, rows in self.adapted(number):
            total += rows * inner_width(lora, kind, gated=linear.gated) * sizes.width
        mlp = "mlp.experts" if has_experts(sizes.kinds[number]) else "mlp"
        for name, numbers in self._inputs(number).items():
            kind = f"{mlp if 'fc' in name else 'self_attention'}.{name}"
            if adapts(lora, kind):
                # With dropout, the adapter keeps the dropped input instead, and what was dropped.
                total += self.dropout(numbers, lora.lora_dropout)
            elif not (name == "linear_proj" and attended):
                total -= numbers * sizes.width
        return total

    def activations(self, stage: Stage) -> LayerBytes:
        sizes = self.sizes
        parts = []
        idle = self._idle(stage)
        if idle is None:
            # Its forward pass has the tensors of half a layer at a time.
            kinds = {sizes.kinds[number] for number in stage.layers}
            halves = [half.kept for kind in kinds for half in self.halves(kind)]
            return LayerBytes(0, self.residual + max(halves, default=0))
        layers = self._layers(stage)
        layers[:idle] = [LayerBytes(0, 0)] * idle
        if self.config.offload.moves_activations:
            from megatron_ext.text.cost.offload import with_moved

            layers = with_moved(self, layers, stage)
        if stage.embedding:
            probability = self.config.model.hidden_dropout
            dropped = self.dropout(sizes.residual_tokens * sizes.h, probability)
            parts.append(LayerBytes(dropped + sizes.tokens * INT64, self.table * sizes.width))
        parts += layers
        norm = self.norm(sizes.residual_tokens, sizes.h)
        if stage.final_norm:
            parts.append(LayerBytes(self.residual + norm, 2 * self.residual))
        # An MTP depth: two norms, a projection of both normed inputs together, a layer, a norm.
        layer = in_order(*self.halves(sizes.depth))
        depth = LayerBytes(layer.kept + 3 * norm + (3 + 2) * self.residual, layer.transient)
        if self.recomputes_depths:
            tokens = self.kept_tokens if has_experts(sizes.depth) else 0
            # The hidden states and the embeddings that the depth gets.
            depth = LayerBytes(2 * self.residual + tokens, depth.kept + depth.transient)
        parts += [depth] * stage.depths
        parts += [self.loss()] * stage.head
        return in_order(*parts)

    def _layers(self, stage: Stage) -> list[LayerBytes]:
        """Return the memory of a stage's layers, or of groups of them that are recomputed."""
        costs = self.costs
        counted = {costs[x]: self.layer_bytes(x) for x, _ in self.unlike(stage.layers)}
        layers = [counted[costs[number]] for number in stage.layers]
        limit = len(self.run_again(stage))
        tokens = self.kept_tokens
        kinds = self.sizes.kinds
        besides = [tokens if has_experts(kinds[number]) else 0 for number in stage.layers]
        return recomputed(layers, self.residual, size=self.group_size, limit=limit, besides=besides)

    def hosted(self, stage: Stage) -> int:
        if not self.config.offload.moves_activations:
            return 0
        from megatron_ext.text.cost.offload import hosted

        return hosted(self, self._layers(stage), stage)

    def deferred(self, stage: Stage) -> int:
        """Return the bytes that a stage's linear layers keep to compute weight gradients later.

        A zero-bubble schedule computes the gradients of inputs first and those of weights later.
        Until then the linear layers keep their inputs and the gradients of their outputs.
        """
        kinds = Counter(self.sizes.kinds[number] for number in stage.layers)
        return sum(count * self._deferred(kind) for kind, count in kinds.items())

    def _deferred(self, kind: str) -> int:
        """Return the bytes that `deferred` counts of a layer of this kind."""
        sizes = self.sizes
        letter = mixer_of(kind)
        num_values = 0
        if letter == ATTENTION:
            num_values = self.attention_deferred()
        elif letter:
            num_values = self.mixers[letter].deferred(self)
        if mlp_of(kind):
            tokens = sizes.tokens
            width = sizes.f // sizes.tp
            if has_experts(kind):
                tokens = self.routed
                width = self.expert_width
            inner = 3 if self.config.model.gated else 2
            num_values += tokens * inner * width + 2 * sizes.residual_tokens * sizes.h
        return num_values * sizes.width

    def attention_deferred(self) -> int:
        """Return the elements in the inputs and outputs of attention's linear layers."""
        sizes = self.sizes
        heads = sizes.projected + sizes.n * sizes.d
        num_values = sizes.tokens * heads // sizes.tp + 2 * sizes.residual_tokens * sizes.h
        if sizes.latent is not None:
            small = 2 * sizes.latent.small - sizes.latent.rotated
            num_values += sizes.residual_tokens * small
        return num_values

    def loss(self) -> LayerBytes:
        sizes = self.sizes
        loss = self.config.loss
        vocabulary = sizes.v // sizes.tp
        losses = 1 + sizes.depths
        hidden = sizes.tokens * sizes.h * sizes.width
        if loss.cross_entropy_impl != "chunked":
            logits = sizes.tokens * vocabulary
            copies = FP32 + sizes.width if sizes.half else FP32
            kept = losses * (logits * copies + self.residual)
            return LayerBytes(kept, logits * sizes.width + self.table * sizes.width + hidden)
        width = sizes.width if sizes.gpu else FP32 + (FP32 if sizes.half else 0)
        block = min(self.loss_rows, sizes.tokens) * vocabulary * width
        gradients = self.table * FP32 * self.updates(self.head) + self.residual
        return LayerBytes(losses * gradients, block + losses * hidden)
