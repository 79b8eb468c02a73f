"""GPT-2: learned positions, LayerNorm, biases, and projections that are stored ``[in, out]``."""

from megatron_ext.text.convert.entries import TIED, Choice, Dropout, Heads, Translated, copies
from megatron_ext.text.convert.family import Family
from megatron_ext.text.convert.weights import Weights, fused_qkv_of, vocabulary, whole

TANH = {"openai_gelu": True}
GELUS = {"gelu_new": TANH, "gelu": {"openai_gelu": False}, "gelu_pytorch_tanh": TANH}
"""transformers' names of GELU, of which two stand for its tanh approximation."""
WIDTH = Translated(
    ("ffn_hidden_size",),
    ("n_inner",),
    lambda settings: {"ffn_hidden_size": settings["n_inner"] or 4 * settings["n_embd"]},
    lambda gpt: {"n_inner": gpt.model.ffn_hidden_size},
)
"""The width of the MLP; by default four times the hidden size."""
WEIGHTS = Weights.of(
    "transformer.h.{layer}",
    outer={
        "embedding.word_embeddings.weight": vocabulary("transformer.wte.weight"),
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
        "decoder.final_layernorm.{kind}": "transformer.ln_f.{kind}",
        "output_layer.{kind}": vocabulary("lm_head.{kind}"),
    },
    layer={
        "self_attention.linear_qkv.layer_norm_{kind}": "ln_1.{kind}",
        "self_attention.linear_qkv.{kind}": fused_qkv_of("attn.c_attn.{kind}", transposed=True),
        "self_attention.linear_proj.{kind}": whole("attn.c_proj.{kind}", transposed=True),
        "mlp.linear_fc1.layer_norm_{kind}": "ln_2.{kind}",
        "mlp.linear_fc1.{kind}": whole("mlp.c_fc.{kind}", transposed=True),
        "mlp.linear_fc2.{kind}": whole("mlp.c_proj.{kind}", transposed=True),
    },
)
FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    says="learned positions, LayerNorm, weights stored `[in, out]`, both kinds of GELU",
    entries=(
        *copies(
            {
                "num_layers": "n_layer",
                "hidden_size": "n_embd",
                "max_position_embeddings": "n_positions",
                "norm_epsilon": "layer_norm_epsilon",
            }
        ),
        Heads("n_head", groups=None, size=None, hidden="n_embd"),
        WIDTH,
        Choice("activation_function", GELUS),
        TIED,
        Dropout("attention_dropout", "attn_pdrop"),
        Dropout("hidden_dropout", "resid_pdrop"),
    ),
    fixed={
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    only={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    weights=WEIGHTS,
)
