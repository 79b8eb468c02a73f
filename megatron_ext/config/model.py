"""Flags of the model: its shape, and how its layers are computed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_ext.config.flags import (
    BELOW_ONE,
    COUNT,
    FACTOR,
    FINITE,
    NATURAL,
    RATE,
    SIZE,
    WEIGHT,
    Changeable,
    Range,
    fixed_flag,
    flag,
    resumed_flag,
    said_flag,
)

ACTIVATIONS = {
    "swiglu": "silu",
    "squared_relu": "squared_relu",
    "quick_geglu": "quick_gelu",
    "geglu": "gelu_tanh",
    "openai_gelu": "gelu_tanh",
}
"""Flag that selects the MLP's activation -> the function's name; gelu if no such flag is set."""


def padded_size(vocab_size: int, divisible_by: int, ranks: int) -> int:
    """Return the number of entries of a vocabulary after padding.

    This is ``vocab_size`` rounded up to a multiple of ``divisible_by * ranks``, where ``ranks`` is
    the tensor-parallel size.
    """
    multiple = divisible_by * ranks
    return -(-vocab_size // multiple) * multiple


RECOMPUTED_WITH_TE = ("layernorm", "moe_act")
"""Values of ``--recompute-modules`` that only Transformer Engine's layers support."""


@dataclass(frozen=True)
class ModelConfig(Changeable):
    """Flags for a transformer's layers and how they are computed; names are Megatron-LM's.

    The embedding, the output layer and the depths of multi-token prediction are here too, since
    pipeline stages and tied weights depend on them.
    """

    num_layers: int | None = flag(
        None, "transformer layers", Range(1, 10_000), names="--encoder-num-layers"
    )
    hidden_size: int | None = fixed_flag(None, "width of the residual stream h", SIZE)
    ffn_hidden_size: int | None = flag(
        None, "width of the MLP; default 4 h, or 8/3 h rounded down to 64 with --swiglu", SIZE
    )
    num_attention_heads: int | None = fixed_flag(None, "attention heads n", SIZE)
    kv_channels: int | None = fixed_flag(None, "size of one head d; default h / n", SIZE)
    group_query_attention: bool = fixed_flag(False, "let groups of heads share keys and values")
    num_query_groups: int | None = fixed_flag(
        None, "groups with --group-query-attention; default 1", SIZE
    )
    seq_length: int | None = said_flag(
        None, "sequence length s", COUNT, "tokens", names="--encoder-seq-length"
    )
    make_vocab_size_divisible_by: int = flag(
        128, "round the vocabulary up to a multiple of this times the tensor-parallel size", SIZE
    )
    padded_vocab_size: int | None = said_flag(
        None,
        "entries of the vocabulary with padding; default: computed from the vocabulary of the data",
        COUNT,
        "entries",
    )
    normalization: str = fixed_flag(
        "LayerNorm", "kind of normalization layer", choices="LayerNorm RMSNorm"
    )
    norm_epsilon: float = resumed_flag(
        1e-5, "epsilon of the norms", Range(0, 1, above=True), names="--layernorm-epsilon"
    )
    apply_layernorm_1p: bool = fixed_flag(False, "store the gain of a norm minus one")
    swiglu: bool = fixed_flag(False, "gated SiLU in the MLP")
    squared_relu: bool = fixed_flag(False, "squared ReLU in the MLP")
    quick_geglu: bool = fixed_flag(False, "gated quick GELU in the MLP")
    geglu: bool = fixed_flag(False, "gated GELU, tanh approximation, in the MLP, as in Gemma")
    openai_gelu: bool = fixed_flag(False, "GELU in its tanh approximation in the MLP, as in GPT-2")
    activation_func_clamp_value: float | None = resumed_flag(
        None,
        "largest gate, and largest magnitude of what the gate multiplies, in a gated MLP",
        FACTOR,
    )
    glu_linear_offset: float = resumed_flag(
        0.0, "number added to what the gate of a gated MLP multiplies; 1 in gpt-oss", FINITE
    )
    add_bias_linear: bool = flag(True, "biases in linear layers", negative="--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "a bias in the QKV projection, whatever other layers have")
    add_proj_bias: bool = flag(
        False, "a bias in the output projection of attention, whatever other layers have"
    )
    add_mlp_bias: bool = flag(False, "biases in dense MLPs, whatever other layers have")
    qk_layernorm: bool = flag(False, "normalize queries and keys")
    sandwich_norm: bool = flag(
        False, "normalize the outputs of attention and MLP too, before they are added, as in Gemma"
    )
    embedding_multiplier: float = resumed_flag(
        1.0, "factor of the token embeddings; the square root of h in Gemma", FACTOR
    )
    untie_embeddings_and_output_weights: bool = flag(
        False, "give the output layer a weight of its own instead of the embedding's"
    )
    attention_dropout: float = said_flag(0.1, "dropout probability of attention weights", BELOW_ONE)
    hidden_dropout: float = said_flag(0.1, "dropout probability of hidden states", BELOW_ONE)
    deterministic_dropout: bool = said_flag(
        False, "masks that no layout changes, slower: drawn in full for each sample, then cut"
    )
    init_method_std: float = flag(0.02, "standard deviation of initial weights", RATE)
    embedding_init_method_std: float | None = flag(
        None, "standard deviation of the initial embedding; default: --init-method-std", RATE
    )
    init_method_xavier_uniform: bool = flag(False, "Xavier uniform initial weights")
    final_logit_softcapping: float | None = resumed_flag(
        None, "limit c of the logits z of the output layer, which become c tanh(z / c)", FACTOR
    )
    transformer_impl: str = flag(
        "auto",
        "auto takes Transformer Engine where it is installed on a GPU; local means torch here",
        choices="auto torch local transformer_engine",
    )
    attention_backend: str = flag(
        "auto",
        "the only kernel to take: flash, fused for cuDNN's, unfused or local for none; auto takes "
        "the fastest that fits",
        choices="auto flash fused unfused local",
    )
    # On purpose not Megatron-LM's False: megatron-core's own default, and what SDPA's and flash
    # kernels do anyway; without it bf16 on a CPU would be less exact than on a GPU.
    attention_softmax_in_fp32: bool = flag(True, "softmax of attention in fp32")
    apply_query_key_layer_scaling: bool = flag(False, "scale scores by 1 / layer number")
    apply_residual_connection_post_layernorm: bool = fixed_flag(
        False, "take the residual after the norm, as BERT does"
    )
    fp32_residual_connection: bool = said_flag(False, "keep the residual stream in fp32")
    mtp_num_layers: int | None = flag(None, "depths of multi-token prediction", Range(0, 1000))
    mtp_loss_scaling_factor: float = said_flag(
        0.1, "weight of the losses of all multi-token-prediction depths together", WEIGHT
    )
    use_cpu_initialization: bool = flag(False, "draw whole weights on the CPU, then cut them")
    perform_initialization: bool = flag(
        True,
        "draw initial weights; without it they hold whatever memory held, for runs that load them",
        negative="--no-initialization",
    )
    recompute_granularity: str | None = flag(
        None,
        "recompute activations in the backward pass, to save memory: all of a layer (full) "
        "or parts (selective)",
        choices="full selective",
    )
    recompute_method: str | None = flag(
        None,
        "layers that full recomputation takes: uniform units, or the first of each stage (block)",
        choices="uniform block",
    )
    recompute_num_layers: int | None = flag(
        None,
        "layers of a recomputed unit (uniform), or layers to recompute on each stage (block)",
        SIZE,
    )
    num_microbatches_with_partial_activation_checkpoints: int | None = flag(
        None,
        "micro-batches of those in flight for which --recompute-num-layers holds; the others "
        "recompute all layers",
        NATURAL,
    )
    recompute_modules: list[str] | None = flag(
        None, "what to recompute with selective granularity; default core_attn", nargs="+"
    )
    distribute_saved_activations: bool = flag(
        False, "share saved activations over tensor-parallel ranks"
    )
    masked_softmax_fusion: bool = flag(True, "fuse the mask and the softmax of attention")
    bias_gelu_fusion: bool = flag(
        True, "fuse bias and activation, for activations other than SwiGLU"
    )
    bias_swiglu_fusion: bool = flag(True, "fuse bias and SwiGLU")
    bias_dropout_fusion: bool = flag(True, "fuse bias, dropout and the residual addition")
    apply_rope_fusion: bool = flag(
        True, "fuse the rotary position embedding", negative="--no-rope-fusion"
    )
    gradient_accumulation_fusion: bool = flag(
        True, "products add weight gradients to the gradient buffer"
    )
    persist_layer_norm: bool = flag(True, "compile the norms of the torch layers")
    cross_entropy_loss_fusion: bool = flag(
        False, "fused cross-entropy over whole logits, as in scripts of Megatron-LM"
    )
    cross_entropy_fusion_impl: str = flag(
        "native", "implementation of --cross-entropy-loss-fusion", choices="native te"
    )
    compile: bool = flag(
        True,
        "torch.compile of the pointwise parts of the torch layers, and megatron-core's own",
        negative="--disable-jit-fuser",
    )
    variable_seq_lengths: bool = False
    blocks_dealt_by_cost: bool = False
    """Whether the model consists of the task's own blocks instead of equal decoder layers.

    The task then divides its blocks among any number of stages, by number or by cost, and the data
    decides the sequence length.
    """
    unpadded_vocab_size: int | None = None
    """Entries of the vocabulary before padding; None for a model without a vocabulary."""
    document_masks: bool = False
    """Whether attention stays within documents; if so, every stage needs the token ids."""

    @property
    def gated(self) -> bool:
        """Return whether the MLP multiplies two projections of its input, as SwiGLU does."""
        return self.swiglu or self.quick_geglu or self.geglu

    @property
    def has_mlp_bias(self) -> bool:
        """Return whether the linear layers of MLPs have biases."""
        return self.add_bias_linear or self.add_mlp_bias

    def resolved(self, *, has_te: bool) -> ModelConfig:
        """Return a copy with derived sizes and with the implementation of the layers decided.

        ``--transformer-impl auto`` becomes Transformer Engine if ``has_te``, else torch.
        """
        h = self.hidden_size or 0
        n = self.num_attention_heads or 0
        ffn = self.ffn_hidden_size
        if ffn is None:
            ffn = int((4 * h * 2 / 3) / 64) * 64 if self.swiglu else 4 * h
        impl = self.transformer_impl
        if impl in ("auto", "local", "torch"):
            impl = "transformer_engine" if impl == "auto" and has_te else "torch"
        return dataclasses.replace(
            self,
            ffn_hidden_size=ffn,
            kv_channels=self.kv_channels or (h // n if n else None),
            num_query_groups=(self.num_query_groups or 1) if self.group_query_attention else None,
            add_qkv_bias=self.add_qkv_bias or self.add_bias_linear,
            add_proj_bias=self.add_proj_bias or self.add_bias_linear,
            transformer_impl=impl,
            mtp_num_layers=self.mtp_num_layers or None,
        )

    def on_cpu(self) -> ModelConfig:
        """Return a copy for a CPU: torch's layers replace Transformer Engine's, which need a GPU.

        Torch's layers compute the same. Modules that only Transformer Engine's layers can recompute
        are left out of ``recompute_modules``.
        """
        if self.transformer_impl != "transformer_engine":
            return self
        modules = self.recompute_modules
        if modules is not None:
            modules = [name for name in modules if name not in RECOMPUTED_WITH_TE]
        return dataclasses.replace(self, transformer_impl="torch", recompute_modules=modules)
