"""Flags of the model: its shape, and how its layers are computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.config.flags import (
    BELOW_ONE,
    COUNT,
    FACTOR,
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

REQUIRED = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig(Changeable):
    """Architecture of a GPT model; names and defaults are Megatron-LM's."""

    num_layers: int | None = flag(
        None, "transformer layers", Range(1, 10_000), names="--encoder-num-layers"
    )
    hidden_size: int | None = flag(None, "width of the residual stream h", SIZE)
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
    max_position_embeddings: int | None = flag(
        None, "longest position that the model may see", COUNT, "tokens"
    )
    position_embedding_type: str = fixed_flag(
        "learned_absolute", "kind of position embedding", choices="learned_absolute rope none"
    )
    rotary_base: int = resumed_flag(10000, "base of the rotary frequencies", Range(1, 10**12))
    rotary_percent: float = fixed_flag(1.0, "share of each head to rotate", Range(0, 1, above=True))
    rotary_interleaved: bool = fixed_flag(False, "rotate neighbouring channels instead of halves")
    rotary_seq_len_interpolation_factor: int | None = resumed_flag(
        None, "divide rotary positions by this factor", SIZE
    )
    use_rope_scaling: bool = resumed_flag(False, "scale rotary frequencies as Llama 3.1 does")
    rope_scaling_factor: float = resumed_flag(8.0, "factor of --use-rope-scaling", FACTOR)
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
    add_bias_linear: bool = flag(True, "biases in linear layers", negative="--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "a bias in the QKV projection alone")
    qk_layernorm: bool = flag(False, "normalize queries and keys")
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
    window_size: tuple[int, int] | None = resumed_flag(
        None, "sliding window: tokens to the left and right, -1 unlimited", Range(-1), nargs=2
    )
    window_attn_skip_freq: int | None = resumed_flag(
        None, "full attention in every n-th layer", SIZE
    )
    multi_latent_attention: bool = fixed_flag(
        False, "compute keys and values of all heads from one small vector per token (DeepSeek)"
    )
    q_lora_rank: int | None = fixed_flag(
        None, "width of the vector that queries are computed from; default: the hidden state", SIZE
    )
    kv_lora_rank: int = fixed_flag(
        32, "width of the vector that keys and values are computed from", SIZE
    )
    qk_head_dim: int = fixed_flag(128, "channels of a head's query and key without rotation", SIZE)
    qk_pos_emb_head_dim: int = fixed_flag(64, "channels of a head's query and key to rotate", SIZE)
    v_head_dim: int = fixed_flag(128, "channels of a head's value", SIZE)
    rope_type: str = resumed_flag(
        "yarn", "rotary embedding of --multi-latent-attention", choices="rope yarn"
    )
    rotary_scaling_factor: float = resumed_flag(
        1.0, "length to train for over --original-max-position-embeddings", Range(1, 1e6)
    )
    original_max_position_embeddings: int = resumed_flag(
        4096, "longest sequence that the model was trained for before", COUNT, "tokens"
    )
    beta_fast: float = resumed_flag(32, "turns beyond which a frequency stays as it is", FACTOR)
    beta_slow: float = resumed_flag(1, "turns below which a frequency is divided in full", FACTOR)
    mscale: float = resumed_flag(1.0, "weight of the rotary embedding's growth by scaling", WEIGHT)
    mscale_all_dim: float = resumed_flag(
        0.0, "weight of the growth of attention's scores by scaling", WEIGHT
    )
    softmax_type: str = fixed_flag(
        "vanilla", "kind of softmax in attention", choices="vanilla off-by-one learnable"
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
    """The task's model has its own kinds of blocks, dealt to any number of stages by cost; the data
    decides its sequence length."""
    unpadded_vocab_size: int | None = None
    """Entries of the vocabulary before padding; None for a model without a vocabulary."""
    document_masks: bool = False
    """Attention does not cross the ends of documents, so every stage needs the token ids."""

    @property
    def gated(self) -> bool:
        """Return whether the MLP multiplies two projections of its input, as SwiGLU does."""
        return self.swiglu or self.quick_geglu

    def resolved(self, *, has_te: bool) -> ModelConfig:
        """Return a copy with derived sizes; "auto" layers use Transformer Engine if ``has_te``."""
        h, n = self.hidden_size or 0, self.num_attention_heads or 0
        ffn = self.ffn_hidden_size
        if ffn is None:
            ffn = int((4 * h * 2 / 3) / 64) * 64 if self.swiglu else 4 * h
        latent = self.multi_latent_attention
        grouped = self.group_query_attention and not latent
        channels = self.v_head_dim if latent else self.kv_channels
        impl = self.transformer_impl
        if impl in ("auto", "local", "torch"):
            impl = "transformer_engine" if impl == "auto" and has_te else "torch"
        return dataclasses.replace(
            self,
            ffn_hidden_size=ffn,
            kv_channels=channels or (h // n if n else None),
            num_query_groups=(self.num_query_groups or 1) if grouped else None,
            add_qkv_bias=(self.add_qkv_bias or self.add_bias_linear) and not latent,
            transformer_impl=impl,
            mtp_num_layers=self.mtp_num_layers or None,
        )

    def errors(self) -> Iterator[str]:
        """Yield a sentence for each fault in the flags of the model."""
        if self.blocks_dealt_by_cost:
            yield from self._recompute_errors()
            return
        missing = [name for name in REQUIRED if getattr(self, name) is None]
        for name in missing:
            yield f"`--{name.replace('_', '-')}` is missing; give the size of the model."
        if missing:
            return
        h, n = self.hidden_size or 1, self.num_attention_heads or 1
        latent = self.multi_latent_attention
        if h % n and self.kv_channels == h // n and not latent:
            yield (
                f"`--hidden-size` ({h}) must be divisible by `--num-attention-heads` ({n}); use "
                f"{-(-h // n) * n}, or give `--kv-channels`."
            )
        if (self.max_position_embeddings or 0) < (self.seq_length or 0):
            yield (
                f"`--max-position-embeddings` ({self.max_position_embeddings}) must be at least "
                f"`--seq-length` ({self.seq_length}); use {self.seq_length}."
            )
        if self.position_embedding_type == "rope" and self.kv_channels and not latent:
            yield from self._rotary_errors(self.kv_channels)
        yield from self._layer_errors(n)
        yield from self._recompute_errors()

    def _rotary_errors(self, size: int) -> Iterator[str]:
        """Yield a sentence if rotary embeddings cannot pair the ``size`` channels of a head."""
        if self.rotary_percent == 1 and size % 2:
            yield (
                f"`--kv-channels` ({size}) must be even with `--position-embedding-type rope`, "
                f"which rotates channels in pairs; use {size + 1}."
            )
        elif int(size * self.rotary_percent) < 1:
            yield (
                f"`--rotary-percent` ({self.rotary_percent}) leaves no channel of a head of "
                f"{size} to rotate; use {2 / size:g} or more."
            )

    def _layer_errors(self, heads: int) -> Iterator[str]:
        if self.num_query_groups and heads % self.num_query_groups:
            yield (
                f"`--num-attention-heads` ({heads}) must be divisible by `--num-query-groups` "
                f"({self.num_query_groups}); use {heads // max(1, heads // self.num_query_groups)}"
                " groups."
            )
        activations = [x for x in ("swiglu", "squared_relu", "quick_geglu") if getattr(self, x)]
        if len(activations) > 1:
            flags = " and ".join(f"`--{x.replace('_', '-')}`" for x in activations)
            yield f"{flags} exclude each other; give one."
        if self.deterministic_dropout and self.transformer_impl == "transformer_engine":
            yield (
                "`--deterministic-dropout` needs our own layers, which `--transformer-impl "
                "transformer_engine` replaces; use `--transformer-impl torch`."
            )
        if self.softmax_type != "vanilla" and self.transformer_impl == "torch":
            yield (
                f"`--softmax-type` ({self.softmax_type}) needs Transformer Engine; use vanilla, "
                "or `--transformer-impl transformer_engine`."
            )

    def _recompute_errors(self) -> Iterator[str]:
        if self.recompute_granularity == "full" and self.recompute_method is None:
            yield (
                "`--recompute-granularity full` needs `--recompute-method`; use uniform with "
                "`--recompute-num-layers 1`."
            )
        if self.recompute_granularity == "full" and self.recompute_num_layers is None:
            yield "`--recompute-granularity full` needs `--recompute-num-layers`; use 1."
        if self.recompute_granularity == "selective" and self.recompute_method is not None:
            yield (
                f"`--recompute-method` ({self.recompute_method}) goes with "
                "`--recompute-granularity full`; leave it out."
            )
