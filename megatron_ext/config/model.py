"""The shape of the model and how its layers are computed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import (
    BELOW_ONE,
    COUNT,
    FACTOR,
    RATE,
    SIZE,
    WEIGHT,
    IfChanged,
    Range,
    flag,
)

FUSED = "a fused kernel of a GPU"


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a GPT model; names and defaults are Megatron-LM's."""

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    num_layers: int | None = flag(
        None, "transformer layers", names=("--encoder-num-layers",), bounds=Range(1, 10_000)
    )
    hidden_size: int | None = flag(None, "width of the residual stream h", bounds=SIZE)
    ffn_hidden_size: int | None = flag(
        None,
        "width of the MLP; default 4 h, or 8/3 h rounded down to 64 with --swiglu",
        bounds=SIZE,
    )
    num_attention_heads: int | None = flag(
        None, "attention heads n", bounds=SIZE, if_changed="refuse"
    )
    kv_channels: int | None = flag(
        None, "size of one head d; default h / n", bounds=SIZE, if_changed="refuse"
    )
    group_query_attention: bool = flag(
        False, "let groups of heads share keys and values", if_changed="refuse"
    )
    num_query_groups: int | None = flag(
        None, "groups with --group-query-attention; default 1", bounds=SIZE, if_changed="refuse"
    )
    seq_length: int | None = flag(
        None,
        "sequence length s",
        unit="tokens",
        names=("--encoder-seq-length",),
        bounds=COUNT,
        if_changed="say",
    )
    max_position_embeddings: int | None = flag(
        None, "longest position that the model may see", unit="tokens", bounds=COUNT
    )
    position_embedding_type: str = flag(
        "learned_absolute",
        "kind of position embedding",
        choices=("learned_absolute", "rope", "none"),
        if_changed="refuse",
    )
    rotary_base: int = flag(
        10000,
        "base of the frequencies of rotary positions",
        bounds=Range(1, 10**12),
        if_changed="refuse_to_resume",
    )
    rotary_percent: float = flag(
        1.0,
        "share of each head that is rotated",
        bounds=Range(0, 1, above=True),
        if_changed="refuse",
    )
    rotary_interleaved: bool = flag(
        False, "rotate neighbouring channels instead of halves", if_changed="refuse"
    )
    rotary_seq_len_interpolation_factor: int | None = flag(
        None, "divide rotary positions by this factor", bounds=SIZE, if_changed="refuse_to_resume"
    )
    use_rope_scaling: bool = flag(
        False, "scale rotary frequencies as Llama 3.1 does", if_changed="refuse_to_resume"
    )
    rope_scaling_factor: float = flag(
        8.0, "factor of --use-rope-scaling", bounds=FACTOR, if_changed="refuse_to_resume"
    )
    make_vocab_size_divisible_by: int = flag(
        128,
        "round the vocabulary up to a multiple of this times the tensor-parallel size",
        bounds=SIZE,
    )
    padded_vocab_size: int | None = flag(
        None,
        "entries of the vocabulary with padding; default: computed from the vocabulary of the data",
        unit="entries",
        bounds=COUNT,
        if_changed="say",
    )
    normalization: str = flag(
        "LayerNorm",
        "kind of normalization layer",
        choices=("LayerNorm", "RMSNorm"),
        if_changed="refuse",
    )
    norm_epsilon: float = flag(
        1e-5,
        "epsilon of the norms",
        names=("--layernorm-epsilon",),
        bounds=Range(0, 1, above=True),
        if_changed="refuse_to_resume",
    )
    apply_layernorm_1p: bool = flag(
        False, "store the gain of a norm minus one", if_changed="refuse"
    )
    swiglu: bool = flag(False, "gated SiLU in the MLP", if_changed="refuse")
    squared_relu: bool = flag(False, "squared ReLU in the MLP", if_changed="refuse")
    quick_geglu: bool = flag(False, "gated quick GELU in the MLP", if_changed="refuse")
    add_bias_linear: bool = flag(
        True, "biases in all linear layers", negative=("--disable-bias-linear",)
    )
    add_qkv_bias: bool = flag(False, "a bias in the QKV projection alone")
    qk_layernorm: bool = flag(False, "normalize queries and keys")
    untie_embeddings_and_output_weights: bool = flag(
        False, "give the output layer a weight of its own instead of the embedding's"
    )
    attention_dropout: float = flag(
        0.1, "dropout probability of attention weights", bounds=BELOW_ONE, if_changed="say"
    )
    hidden_dropout: float = flag(
        0.1, "dropout probability of hidden states", bounds=BELOW_ONE, if_changed="say"
    )
    deterministic_dropout: bool = flag(
        False,
        "masks that no layout changes, slower: drawn in full for each sample, then cut",
        if_changed="say",
    )
    init_method_std: float = flag(0.02, "standard deviation of initial weights", bounds=RATE)
    embedding_init_method_std: float | None = flag(
        None,
        "standard deviation of the embedding's initial weights; default: --init-method-std",
        bounds=RATE,
    )
    init_method_xavier_uniform: bool = flag(False, "Xavier uniform initial weights")
    window_size: tuple[int, int] | None = flag(
        None,
        "sliding window: tokens to the left and right, -1 unlimited",
        nargs=2,
        bounds=Range(-1),
        if_changed="refuse_to_resume",
    )
    window_attn_skip_freq: int | None = flag(
        None, "full attention in every n-th layer", bounds=SIZE, if_changed="refuse_to_resume"
    )
    softmax_type: str = flag(
        "vanilla",
        "kind of softmax in attention",
        choices=("vanilla", "off-by-one", "learnable"),
        if_changed="refuse",
    )
    transformer_impl: str = flag(
        "auto",
        "auto takes Transformer Engine where it is installed on a GPU; local means torch here",
        choices=("auto", "torch", "local", "transformer_engine"),
    )
    attention_backend: str = flag(
        "auto",
        "the only kernel to take: flash, fused for cuDNN's, unfused or local for none; auto takes "
        "the fastest that fits",
        choices=("auto", "flash", "fused", "unfused", "local"),
        gpu_only="attention is computed there as megatron-core's own layers do or by torch's SDPA",
    )
    # On purpose not Megatron-LM's False: megatron-core's own default, and what SDPA's and flash
    # kernels do anyway; without it bf16 on a CPU would be less exact than on a GPU.
    attention_softmax_in_fp32: bool = flag(True, "softmax of attention in fp32")
    apply_query_key_layer_scaling: bool = flag(False, "scale scores by 1 / layer number")
    apply_residual_connection_post_layernorm: bool = flag(
        False, "take the residual after the norm, as BERT does", if_changed="refuse"
    )
    fp32_residual_connection: bool = flag(
        False, "keep the residual stream in fp32", if_changed="say"
    )
    mtp_num_layers: int | None = flag(
        None, "depths of multi-token prediction", bounds=Range(0, 1000)
    )
    mtp_loss_scaling_factor: float = flag(
        0.1,
        "weight of the losses of all multi-token-prediction depths together",
        bounds=WEIGHT,
        if_changed="say",
    )
    use_cpu_initialization: bool = flag(False, "draw whole weights on the CPU, then cut them")
    perform_initialization: bool = flag(
        True,
        "draw initial weights; without it they hold whatever memory held, for runs that load them",
        negative=("--no-initialization",),
    )
    recompute_granularity: str | None = flag(
        None,
        "recompute activations in the backward pass, to save memory: all of a layer (full) or "
        "parts (selective)",
        choices=("full", "selective"),
    )
    recompute_method: str | None = flag(
        None,
        "layers that full recomputation takes: uniform units, or the first of each stage (block)",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(
        None,
        "layers of a recomputed unit (uniform), or layers to recompute on each stage (block)",
        bounds=SIZE,
    )
    recompute_modules: list[str] | None = flag(
        None, "what to recompute with selective granularity; default core_attn", nargs="+"
    )
    distribute_saved_activations: bool = flag(
        False, "share saved activations over tensor-parallel ranks"
    )
    masked_softmax_fusion: bool = flag(True, "fuse the mask and the softmax of attention")
    bias_gelu_fusion: bool = flag(
        True, "fuse bias and activation, for activations other than SwiGLU", gpu_only=FUSED
    )
    bias_swiglu_fusion: bool = flag(True, "fuse bias and SwiGLU", gpu_only=FUSED)
    bias_dropout_fusion: bool = flag(
        True, "fuse bias, dropout and the residual addition", gpu_only=FUSED
    )
    apply_rope_fusion: bool = flag(
        True, "fuse the rotary position embedding", negative=("--no-rope-fusion",), gpu_only=FUSED
    )
    gradient_accumulation_fusion: bool = flag(
        True, "products add weight gradients to the gradient buffer", gpu_only=FUSED
    )
    persist_layer_norm: bool = flag(True, "compile the norms of the torch layers", gpu_only=FUSED)
    cross_entropy_loss_fusion: bool = flag(
        False, "fused cross-entropy over whole logits, as in scripts of Megatron-LM", gpu_only=FUSED
    )
    cross_entropy_fusion_impl: str = flag(
        "native",
        "implementation of --cross-entropy-loss-fusion",
        choices=("native", "te"),
        gpu_only=FUSED,
    )
    compile: bool = flag(
        True,
        "torch.compile of the pointwise parts of the torch layers, and megatron-core's own",
        negative=("--disable-jit-fuser",),
        gpu_only="nothing is compiled there",
    )
    variable_seq_lengths: bool = False
    blocks_dealt_by_cost: bool = False
    """The task's model has blocks of its own: any number of stages, a length that data decides."""
    unpadded_vocab_size: int | None = None
    """Entries of the vocabulary before padding; None of a model without one."""
    document_masks: bool = False
    """Attention stops where documents end, so that every stage needs the ids of the tokens."""

    @property
    def gated(self) -> bool:
        """Return whether the MLP multiplies two projections."""
        return self.swiglu or self.quick_geglu

    def resolved(self, *, has_te: bool) -> ModelConfig:
        """Return the section with the derived sizes filled in."""
        h, n = self.hidden_size or 0, self.num_attention_heads or 0
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
            transformer_impl=impl,
            mtp_num_layers=self.mtp_num_layers or None,
        )

    def errors(self) -> list[str]:
        """Return a sentence for everything that cannot be built."""
        if self.blocks_dealt_by_cost:
            return self._recompute_errors()
        found = [
            f"`--{name.replace('_', '-')}` is missing; give the size of the model."
            for name in (
                "num_layers",
                "hidden_size",
                "num_attention_heads",
                "seq_length",
                "max_position_embeddings",
            )
            if getattr(self, name) is None
        ]
        if found:
            return found
        h, n = self.hidden_size or 1, self.num_attention_heads or 1
        if h % n and self.kv_channels == h // n:
            found.append(
                f"`--hidden-size` ({h}) must be divisible by `--num-attention-heads` ({n}); use "
                f"{-(-h // n) * n}, or give `--kv-channels`."
            )
        if (self.max_position_embeddings or 0) < (self.seq_length or 0):
            found.append(
                f"`--max-position-embeddings` ({self.max_position_embeddings}) must be at least "
                f"`--seq-length` ({self.seq_length}); use {self.seq_length}."
            )
        return [*found, *self._rotary_errors(), *self._layer_errors(n)]

    def _rotary_errors(self) -> list[str]:
        """Return a sentence where channels of a head cannot be rotated in pairs."""
        size = self.kv_channels or 0
        if self.position_embedding_type != "rope" or not size:
            return []
        if self.rotary_percent == 1 and size % 2:
            return [
                f"`--kv-channels` ({size}) must be even with `--position-embedding-type rope`, "
                f"which rotates channels in pairs; use {size + 1}."
            ]
        if int(size * self.rotary_percent) < 1:
            return [
                f"`--rotary-percent` ({self.rotary_percent}) leaves no channel of a head of "
                f"{size} to rotate; use {2 / size:g} or more."
            ]
        return []

    def _layer_errors(self, heads: int) -> list[str]:
        found = []
        if self.num_query_groups and heads % self.num_query_groups:
            found.append(
                f"`--num-attention-heads` ({heads}) must be divisible by `--num-query-groups` "
                f"({self.num_query_groups}); use {heads // max(1, heads // self.num_query_groups)}"
                " groups."
            )
        activations = [x for x in ("swiglu", "squared_relu", "quick_geglu") if getattr(self, x)]
        if len(activations) > 1:
            flags = " and ".join(f"`--{x.replace('_', '-')}`" for x in activations)
            found.append(f"{flags} exclude each other; give one.")
        if self.deterministic_dropout and self.transformer_impl == "transformer_engine":
            found.append(
                "`--deterministic-dropout` needs our own layers, which `--transformer-impl "
                "transformer_engine` replaces; use `--transformer-impl torch`."
            )
        if self.softmax_type != "vanilla" and self.transformer_impl == "torch":
            found.append(
                f"`--softmax-type` ({self.softmax_type}) needs Transformer Engine; use vanilla, "
                "or `--transformer-impl transformer_engine`."
            )
        return [*found, *self._recompute_errors()]

    def _recompute_errors(self) -> list[str]:
        found = []
        if self.recompute_granularity == "full" and self.recompute_method is None:
            found.append(
                "`--recompute-granularity full` needs `--recompute-method`; use uniform with "
                "`--recompute-num-layers 1`."
            )
        if self.recompute_granularity == "full" and self.recompute_num_layers is None:
            found.append("`--recompute-granularity full` needs `--recompute-num-layers`; use 1.")
        if self.recompute_granularity == "selective" and self.recompute_method is not None:
            found.append(
                f"`--recompute-method` ({self.recompute_method}) goes with "
                "`--recompute-granularity full`; leave it out."
            )
        return found
