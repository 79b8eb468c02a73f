"""The matrix products of a GPT per token, and the floating-point operations of one sequence.

Almost only matrix products count. A multiply-add counts as two operations, and causal attention as
half of full attention. Like Megatron-LM, the log reports three times the whole model's forward
pass, since the backward pass takes twice as many operations.
"""

from typing import Any

from megatron_ext.config.layers import ATTENTION, has_experts, mixer_of, mlp_of
from megatron_ext.config.run import RunConfig
from megatron_ext.planning.products import FORWARD_AND_BACKWARD, MULTIPLY_AND_ADD, Linear
from megatron_ext.text.config.attention import AttentionConfig
from megatron_ext.text.config.hybrid import HybridConfig, depth_kind, layer_kinds
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.cost.latent import LatentSizes


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
    gates = n if config.section(AttentionConfig).attention_output_gate else 0
    qkv = n + gates + 2 * (model.num_query_groups or n)
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
        Linear("linear_fc1", width * (2 if gated else 1), h, rows=ranks, gated=gated, **layout),
        Linear("linear_fc2", h, width, columns=ranks, **layout),
    ]


def latent_matrices(h: int, width: int) -> list[Linear]:
    """Return the projections of tokens to ``width`` channels for routed experts, and back to h."""
    return [
        Linear("fc1_latent_proj", width, h, bias=False),
        Linear("fc2_latent_proj", h, width, bias=False),
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
    - ``M projections``, ``M scores`` and so on: the linear layers of each other sequence mixer of
      the model, and the rest of its products, by its letter
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
    small = moe.moe_latent_size
    experts = [
        *mlp_matrices(small or h, routed, gated=gated),
        *mlp_matrices(h, shared, gated=gated),
        *(latent_matrices(h, small) if small else ()),
    ]
    return {
        "projections": sum(x.products for x in attention_matrices(config)) + norms,
        "scores": score_channels(config) * (model.seq_length or 0),
        "windowed": score_channels(config) * _keys_in_window(config),
        "dense": sum(x.products for x in mlp_matrices(h, f, gated=gated)),
        "experts": sum(x.products for x in experts),
        "depth": 2 * h * h,
        "logits": h * (model.padded_vocab_size or 0),
        **_mixer_products(config),
    }


def _mixer_products(config: RunConfig) -> dict[str, int]:
    """Return the entries of `token_products` for sequence mixers other than attention."""
    if config.section(HybridConfig).layer_kinds is None:
        return {}
    from megatron_ext.text.cost.mixer import mixers_of

    products = {}
    for letter, mixer in mixers_of(config).items():
        products[f"{letter} projections"] = mixer.products
        products[f"{letter} scores"] = mixer.mixing
    return products


def mixer_part(kind: str, *, windowed: bool = False) -> dict[str, str]:
    """Return the keys of `token_products` for the sequence mixer of a layer of this kind.

    They are "projections" for its linear layers and "scores" for its other products; none if the
    layer has no sequence mixer. ``windowed`` says whether a window limits attention.
    """
    letter = mixer_of(kind)
    if letter == ATTENTION:
        return {"projections": "projections", "scores": "windowed" if windowed else "scores"}
    return {part: f"{letter} {part}" for part in ("projections", "scores") if letter}


def mlp_part(kind: str) -> str | None:
    """Return the key of `token_products` for the MLP or experts of a layer; None without."""
    if has_experts(kind):
        return "experts"
    return "dense" if mlp_of(kind) else None


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
    kinds = [*layer_kinds(config), *[depth_kind(config)] * depths]
    windowed = attention.windowed_layers(model)
    windowed += windowed[-1:] * depths
    per_token = 0
    for kind, has in zip(kinds, windowed, strict=True):
        parts = [*mixer_part(kind, windowed=has).values(), mlp_part(kind)]
        per_token += sum(products[part] for part in parts if part is not None)
    per_token += depths * (3 * (model.hidden_size or 0) + products["depth"])
    per_token += products["logits"] * (depths + 1)
    sequence = model.seq_length or 0
    return float(FORWARD_AND_BACKWARD * MULTIPLY_AND_ADD * sequence * per_token)
