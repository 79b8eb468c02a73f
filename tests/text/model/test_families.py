"""The parts of gpt-oss, Gemma, Phi-3, GLM-4 and Llama against transformers' own classes.

Each model is tiny and random, in float32. Its weights are put into our GPT by the functions below;
logits and the gradients of all weights must agree. Other layouts are compared with one rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.task import GPT
from tests.ranks import on_ranks
from tests.training_runs import config_of, curve

transformers = pytest.importorskip("transformers")

S, B, H, N, G, D, F_SIZE, V, LAYERS, EXPERTS = 24, 2, 64, 4, 2, 16, 40, 64, 4, 4

COMMON = (
    f"--num-layers {LAYERS} --hidden-size {H} --num-attention-heads {N} --group-query-attention "
    f"--num-query-groups {G} --kv-channels {D} --ffn-hidden-size {F_SIZE} --seq-length {S} "
    f"--max-position-embeddings 64 --normalization RMSNorm --norm-epsilon 1e-6 "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 2 --optimizer sgd --lr 0.1 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {V - 1} --padded-vocab-size {V} --num-workers 0 "
    "--log-interval 1 --split 80,20,0 --eval-iters 0 --transformer-impl torch"
).split()
SHAPE: dict[str, Any] = dict(
    vocab_size=V,
    hidden_size=H,
    num_hidden_layers=LAYERS,
    num_attention_heads=N,
    num_key_value_heads=G,
    head_dim=D,
    intermediate_size=F_SIZE,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    attn_implementation="eager",
    pad_token_id=0,
)

YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.3 * i for i in range(6)],
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model of transformers, and our flags of it.

    Attributes:
        kind: name of the class; its configuration's name ends with Config.
        given: arguments of the configuration besides `SHAPE`.
        more: flags besides `COMMON`.
        scaling: the value of ``--rope-scaling``.
    """

    kind: str
    given: dict[str, Any]
    more: str
    scaling: dict[str, Any] | None = None

    @property
    def flags(self) -> list[str]:
        scaling = [] if self.scaling is None else ["--rope-scaling", json.dumps(self.scaling)]
        return [*COMMON, *self.more.split(), *scaling]


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": "default", **more}


FAMILIES = {
    "gpt_oss": Family(
        "GptOss",
        dict(
            num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=6, swiglu_limit=0.5,
            rope_parameters=rope(150000.0, **YARN), tie_word_embeddings=False, attention_bias=True,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        f"--num-experts {EXPERTS} --moe-router-topk 2 --moe-router-load-balancing-type none "
        "--softmax-type learnable --window-size 5 0 --window-attn-skip-freq [1,0]*2 --quick-geglu "
        "--glu-linear-offset 1 --activation-func-clamp-value 0.5 --rotary-base 150000 "
        "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 "
        "--yarn-original-max-position-embeddings 16 --no-yarn-correction-range-round-to-int "
        "--untie-embeddings-and-output-weights",
    ),
    "gemma2": Family(
        "Gemma2",
        dict(
            rope_parameters=rope(10000.0), sliding_window=6, query_pre_attn_scalar=9,
            attn_logit_softcapping=0.8, final_logit_softcapping=1.5,
            hidden_activation="gelu_pytorch_tanh",
        ),
        "--disable-bias-linear --geglu --apply-layernorm-1p --sandwich-norm --embedding-multiplier "
        f"{H**0.5} --window-size 5 0 --window-attn-skip-freq 2 --softmax-scale {9**-0.5} "
        "--attn-logit-softcapping 0.8 --final-logit-softcapping 1.5",
    ),
    "gemma3": Family(
        "Gemma3",
        dict(
            sliding_window=6, query_pre_attn_scalar=16, layer_types=["sliding_attention"] * 3
            + ["full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e6},
                "sliding_attention": rope(10000.0),
            },
        ),
        "--disable-bias-linear --geglu --apply-layernorm-1p --sandwich-norm --qk-layernorm "
        f"--embedding-multiplier {H**0.5} --window-size 5 0 --window-attn-skip-freq 4 "
        "--rotary-base 1000000 --rope-local-base-freq 10000",
        {"rope_type": "linear", "factor": 2.5},
    ),
    "phi3": Family(
        "Phi3",
        dict(
            original_max_position_embeddings=16, tie_word_embeddings=False, sliding_window=None,
            rope_parameters=rope(10000.0, partial_rotary_factor=0.75) | LONG,
        ),
        "--disable-bias-linear --swiglu --rotary-percent 0.75 "
        "--untie-embeddings-and-output-weights", LONG,
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        dict(
            rope_parameters=rope(10000.5, partial_rotary_factor=0.5), attention_bias=True,
            use_qk_norm=True, n_routed_experts=EXPERTS, num_experts_per_tok=2, n_shared_experts=1,
            moe_intermediate_size=24, n_group=1, topk_group=1, first_k_dense_replace=1,
            routed_scaling_factor=1.5, norm_topk_prob=True, tie_word_embeddings=False,
        ),
        f"--disable-bias-linear --add-qkv-bias --swiglu --qk-layernorm --rotary-percent 0.5 "
        f"--rotary-base 10000.5 --num-experts {EXPERTS} --moe-router-topk 2 --moe-ffn-hidden-size "
        "24 --moe-shared-expert-intermediate-size 24 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 1.5 --moe-layer-freq "
        "[0]+[1]*3 --moe-router-load-balancing-type none "
        "--untie-embeddings-and-output-weights",
    ),
    "qwen3_next": Family(
        "Qwen3Next",
        dict(
            rope_parameters=rope(10000.5, partial_rotary_factor=0.25), tie_word_embeddings=False,
            layer_types=["full_attention"] * LAYERS, mlp_only_layers=[1], num_experts=EXPERTS,
            num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
        ),
        "--disable-bias-linear --swiglu --qk-layernorm --attention-output-gate "
        "--apply-layernorm-1p --rotary-percent 0.25 --rotary-base 10000.5 "
        f"--num-experts {EXPERTS} --moe-router-topk 2 --moe-ffn-hidden-size 24 "
        "--moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate --moe-layer-freq "
        "[1,0,1,1] --moe-router-load-balancing-type none --untie-embeddings-and-output-weights",
    ),
    "olmo2": Family(
        "Olmo2",
        dict(rope_parameters=rope(10000.0), tie_word_embeddings=False),
        "--disable-bias-linear --swiglu --qk-layernorm --qk-layernorm-all-heads --reordered-norm "
        "--untie-embeddings-and-output-weights",
    ),
    "granite": Family(
        "Granite",
        dict(
            rope_parameters=rope(10000.0), embedding_multiplier=12.0, residual_multiplier=0.22,
            attention_multiplier=0.07, logits_scaling=6.0, tie_word_embeddings=True,
        ),
        "--disable-bias-linear --swiglu --embedding-multiplier 12 --residual-multiplier 0.22 "
        "--softmax-scale 0.07 --logits-scaling 6",
    ),
    "hunyuan": Family(
        "HunYuanDenseV1",
        dict(rope_parameters=rope(10000.0), tie_word_embeddings=True),
        "--disable-bias-linear --swiglu --qk-layernorm --qk-layernorm-after-rope",
    ),
    "ministral3": Family(
        "Ministral3",
        dict(
            rope_parameters=rope(10000.0, llama_4_scaling_beta=0.3, **YARN),
            tie_word_embeddings=False, sliding_window=None,
        ),
        "--disable-bias-linear --swiglu --llama-4-scaling-beta 0.3 "
        "--untie-embeddings-and-output-weights", YARN,
    ),
    "olmo": Family(
        "Olmo",
        dict(rope_parameters=rope(10000.0), tie_word_embeddings=True),
        "--normalization LayerNorm --norm-epsilon 1e-5 --no-norm-elementwise-affine "
        "--disable-bias-linear --swiglu",
    ),
    "apertus": Family(
        "Apertus",
        dict(rope_parameters=rope(10000.0), tie_word_embeddings=False),
        "--disable-bias-linear --xielu --qk-layernorm --untie-embeddings-and-output-weights",
    ),
    "llama": Family(
        "Llama",
        dict(
            rope_parameters=rope(500000.0) | LLAMA3, attention_bias=True, mlp_bias=True,
            tie_word_embeddings=True,
        ),
        "--disable-bias-linear --add-qkv-bias --add-proj-bias --add-mlp-bias --swiglu "
        "--rotary-base 500000", LLAMA3,
    ),
}  # fmt: skip


def build(family: Family) -> Any:
    """Return the model of transformers with weights of a size that makes every part matter."""
    torch.manual_seed(5)
    text = "Text" if family.kind == "Gemma3" else ""
    config = getattr(transformers, f"{family.kind}{text}Config")(**{**SHAPE, **family.given})
    model = getattr(transformers, f"{family.kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = "norm" in name and not family.kind.startswith(("Gemma", "Qwen3Next"))
            parameter.normal_(float(gain), 0.1 if "norm" in name else 0.15)
    return model


def joined_heads(parts: dict[str, Tensor]) -> Tensor:
    """Return rows of queries, keys and values in Megatron's order, group by group.

    The rows of queries may be followed by those of their gates, head by head.
    """
    query, key, value = (parts[x].unflatten(0, (-1, D)) for x in "qkv")
    queries = [query] if len(query) == N else [query[0::2], query[1::2]]
    groups = zip(*(x.chunk(G) for x in (*queries, key, value)), strict=True)
    return torch.cat([x for group in groups for x in group]).flatten(0, 1)


def attention_of(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the attention's tensors under our names."""
    found = {}
    for kind in ("weight", "bias"):
        fused = layer.get(f"self_attn.qkv_proj.{kind}")
        if fused is not None:
            rows = fused.split([N * D, G * D, G * D])
            found[f"linear_qkv.{kind}"] = joined_heads(dict(zip("qkv", rows, strict=True)))
        elif f"self_attn.q_proj.{kind}" in layer:
            parts = {x: layer[f"self_attn.{x}_proj.{kind}"] for x in "qkv"}
            found[f"linear_qkv.{kind}"] = joined_heads(parts)
        if f"self_attn.o_proj.{kind}" in layer:
            found[f"linear_proj.{kind}"] = layer[f"self_attn.o_proj.{kind}"]
    for x, kind in (("q", "query"), ("k", "key")):
        if f"self_attn.{x}_norm.weight" in layer:
            norm = layer[f"self_attn.{x}_norm.weight"]
            found[f"{x}_norm.weight" if len(norm) > D else f"{x}_layernorm.weight"] = norm
        if f"self_attn.{kind}_layernorm.weight" in layer:
            norm = layer[f"self_attn.{kind}_layernorm.weight"]
            found[f"rotated_{x}_layernorm.weight"] = norm
    if "self_attn.sinks" in layer:
        found["core_attention.softmax_offset"] = layer["self_attn.sinks"]
    return found


def mlp_of(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an MLP or of a mixture of experts under our names."""
    if "mlp.experts.gate_up_proj" not in layer:
        return dense_of({x.removeprefix("mlp."): y for x, y in layer.items() if x[:4] == "mlp."})
    found, up = {}, layer["mlp.experts.gate_up_proj"]
    router = "mlp.router" if "mlp.router.weight" in layer else "mlp.gate"
    for kind in ("weight", "bias"):
        if f"{router}.{kind}" in layer:
            found[f"router.{kind}"] = layer[f"{router}.{kind}"]
    for e in range(EXPERTS):
        own = f"experts.local_experts.{e}"
        if "mlp.experts.gate_up_proj_bias" in layer:  # gpt-oss: transposed, gates at even places
            pair = [up[e, :, 0::2].T, up[e, :, 1::2].T]
            bias = layer["mlp.experts.gate_up_proj_bias"][e]
            found[f"{own}.linear_fc1.bias"] = torch.cat([bias[0::2], bias[1::2]])
            found[f"{own}.linear_fc2.bias"] = layer["mlp.experts.down_proj_bias"][e]
            found[f"{own}.linear_fc1.weight"] = torch.cat(pair)
            found[f"{own}.linear_fc2.weight"] = layer["mlp.experts.down_proj"][e].T
        else:
            found[f"{own}.linear_fc1.weight"] = up[e]
            found[f"{own}.linear_fc2.weight"] = layer["mlp.experts.down_proj"][e]
    if "mlp.shared_expert_gate.weight" in layer:
        found["shared_experts.gate_weight"] = layer["mlp.shared_expert_gate.weight"]
    plural = "s" if "mlp.shared_experts.up_proj.weight" in layer else ""
    shared = f"mlp.shared_expert{plural}."
    own_shared = {x.removeprefix(shared): y for x, y in layer.items() if x.startswith(shared)}
    return found | {f"shared_experts.{x}": y for x, y in dense_of(own_shared).items()}


def dense_of(mlp: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for kind in ("weight", "bias"):
        if f"gate_up_proj.{kind}" in mlp:
            found[f"linear_fc1.{kind}"] = mlp[f"gate_up_proj.{kind}"]
        elif f"gate_proj.{kind}" in mlp:
            pair = mlp[f"gate_proj.{kind}"], mlp[f"up_proj.{kind}"]
            found[f"linear_fc1.{kind}"] = torch.cat(pair)
        elif f"up_proj.{kind}" in mlp:
            found[f"linear_fc1.{kind}"] = mlp[f"up_proj.{kind}"]
        if f"down_proj.{kind}" in mlp:
            found[f"linear_fc2.{kind}"] = mlp[f"down_proj.{kind}"]
    for name in ("alpha_p", "alpha_n"):
        if f"act_fn.{name}" in mlp:
            found[f"activation_func.{name}"] = mlp[f"act_fn.{name}"]
    return found


def ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a transformers model, or their gradients, under our names."""
    found = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
    }
    if "model.norm.weight" in tensors:
        found["decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
    if "lm_head.weight" in tensors:
        found["output_layer.weight"] = tensors["lm_head.weight"]
    for number in range(LAYERS):
        start, own = f"model.layers.{number}.", f"decoder.layers.{number}."
        layer = {x.removeprefix(start): y for x, y in tensors.items() if x.startswith(start)}
        names = {
            "input_layernorm": "input_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
        }
        if "pre_feedforward_layernorm.weight" in layer:
            names |= {
                "pre_mlp_layernorm": "pre_feedforward_layernorm",
                "post_self_attn_layernorm": "post_attention_layernorm",
                "post_mlp_layernorm": "post_feedforward_layernorm",
            }
        if "attention_layernorm.weight" in layer:
            names = {
                "input_layernorm": "attention_layernorm",
                "pre_mlp_layernorm": "feedforward_layernorm",
            }
        elif "input_layernorm.weight" not in layer:
            names = {
                "post_self_attn_layernorm": "post_attention_layernorm",
                "post_mlp_layernorm": "post_feedforward_layernorm",
            }
        known = {x: y for x, y in names.items() if f"{y}.weight" in layer}
        found |= {f"{own}{x}.weight": layer[f"{y}.weight"] for x, y in known.items()}
        found |= {f"{own}self_attention.{x}": y for x, y in attention_of(layer).items()}
        found |= {f"{own}mlp.{x}": y for x, y in mlp_of(layer).items()}
    return found


def check_family(context: ParallelContext, *, name: str) -> None:
    family = FAMILIES[name]
    theirs = build(family)
    config = config_of(family.flags)
    transformer_config = build_transformer_config(config)
    (chunk,) = build_chunks(GPT.model_chunk, config, transformer_config, context)
    tied = config.model.untie_embeddings_and_output_weights is False
    known = {x: y for x, y in theirs.named_parameters() if not (tied and x == "lm_head.weight")}
    parameters = dict(chunk.named_parameters())
    with torch.no_grad():
        filled = ours(dict(known))
        assert filled.keys() == parameters.keys(), filled.keys() ^ parameters.keys()
        for key, value in filled.items():
            parameters[key].copy_(value)
    tokens = torch.randint(1, V, (B, S))
    positions = torch.arange(S).expand(B, -1)
    want = theirs(input_ids=tokens).logits
    got: Tensor = chunk(tokens, positions, None)
    assert near(got, want) <= 1e-5
    for logits in (got, want):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {x: torch.zeros_like(y) if y.grad is None else y.grad for x, y in known.items()}
    for key, gradient in ours(gradients).items():
        own = parameters[key].grad
        assert own is not None and own.abs().max() > 0, key
        # The gradient of a single number is a sum of terms that cancel out.
        limit = 1e-4 if own.numel() == 1 else 1e-5
        assert near(own, gradient) <= limit, (key, near(own, gradient))


def near(got: Tensor, want: Tensor) -> float:
    """Return the greatest difference over the greatest magnitude."""
    return float((got - want).detach().abs().max() / want.detach().abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    on_ranks(check_family, {}, name=name)


LAYOUTS = {
    "gpt_oss": (
        (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
         "--expert-tensor-parallel-size 1 --expert-model-parallel-size 2 "
         "--moe-token-dispatcher-type alltoall"),
        (2, "--context-parallel-size 2 --cp-comm-type a2a"),
    ),
    "gemma2": (
        (2, "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform "
         "--recompute-num-layers 1"),
    ),
    "gemma3": (
        (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
        (2, "--context-parallel-size 2"),
    ),
    "phi3": ((2, "--context-parallel-size 2"),),
    "olmo2": (
        (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
        (4, "--tensor-model-parallel-size 2 --context-parallel-size 2 --recompute-granularity "
         "full --recompute-method uniform --recompute-num-layers 1"),
    ),
    "qwen3_next": (
        (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
         "--moe-token-dispatcher-type alltoall"),
        (4, "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel "
         "--recompute-granularity selective --recompute-modules core_attn"),
    ),
    "hunyuan": (
        (2, "--tensor-model-parallel-size 2 --recompute-granularity selective"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    ),
    "granite": (
        (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
         "--num-virtual-stages-per-pipeline-rank 2"),
    ),
    "apertus": (
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity selective "
         "--recompute-modules mlp"),
    ),
    "ministral3": ((4, "--context-parallel-size 2 --tensor-model-parallel-size 2"),),
    "olmo": ((2, "--tensor-model-parallel-size 2 --sequence-parallel"),),
    "llama": ((4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
               "--sequence-parallel"),),
}  # fmt: skip
"""Family -> ranks and flags of the layouts in which it must train as on one rank."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_rank(name: str, tmp_path: Path) -> None:
    flags = [*FAMILIES[name].flags, "--reset-attention-mask"]
    truth = curve(flags, tmp_path / "one")
    for number, (count, layout) in enumerate(LAYOUTS[name]):
        mine = curve([*flags, *layout.split()], tmp_path / str(number), count)
        pairs = [
            (a, b)
            for one, two in zip(mine, truth, strict=True)
            for a, b in zip(one, two, strict=True)
        ]
        assert len(pairs) == 4
        assert max(abs(a / b - 1) for a, b in pairs) <= 1e-6, (layout, pairs)


def test_the_blockwise_loss_caps_the_logits_of_every_depth(tmp_path: Path) -> None:
    """The truth is the loss of whole logits, which the model itself caps."""
    flags = [*FAMILIES["gemma2"].flags, *"--mtp-num-layers 1 --train-iters 1".split()]
    found = {
        kind: curve([*flags, "--cross-entropy-impl", kind], tmp_path / kind)[0]
        for kind in ("chunked", "eager")
    }
    assert found["chunked"] == pytest.approx(found["eager"], rel=1e-6)
