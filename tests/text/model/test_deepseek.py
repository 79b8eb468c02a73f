"""DeepSeek-V3's architecture: transformers' own class, and one rank against many layouts."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.initialization import shards_of
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.programs.parity import main
from megatron_ext.text.model.gpt import build_gpt_chunk
from tests.checkpoint.tiny import whole_tensors
from tests.ranks import on_ranks
from tests.text.convert.models import tokens
from tests.training_runs import config_of, train_steps

SIZES: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_shared_experts": 2, "n_routed_experts": 8,
    "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
MODEL = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --swiglu "
    "--normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --seq-length 32 "
    "--max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 319 --padded-vocab-size 320 "
    "--multi-latent-attention --qk-layernorm --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 12"
)
EXPERTS = (
    "--num-experts 8 --moe-ffn-hidden-size 16 --moe-layer-freq ([0]*1+[1]*2) --moe-router-topk 4 "
    "--moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall"
)
TRAINED = (
    f"{MODEL} --num-layers 4 --num-attention-heads 8 --global-batch-size 8 --lr 1 --adam-eps 1 "
    "--init-method-std 0.1 --q-lora-rank 24 --rotary-scaling-factor 4 --mscale-all-dim 0.7 "
    "--original-max-position-embeddings 16 --num-workers 0"
)
"""A model to train. An epsilon of 1 keeps Adam from turning rounding errors into steps."""
RECIPE = (
    f"{TRAINED} {EXPERTS} --moe-layer-freq ([0]*1+[1]*3) --moe-router-bias-update-rate 0.01 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --mtp-num-layers 1"
)
"""The whole recipe, in which the bias of the experts changes and every loss counts."""
FEW = "tp2spep2etp1,pp2vpp2cp2ep2"
MANY = (
    "tp2sp,tp2spep2etp2dp2,tp4spep4etp1,pp2ep2dp2do,pp4dp2,pp2vpp2tp2spep2etp1,cp2agep2,"
    "cp2a2aep4dp2,cp2tp2spep4etp1,pp2zbh1tp2spep2etp1,pp2cp2tp2spep2etp1,dp8ep8do,"
    "pp2dp2[--recompute-granularity full --recompute-method uniform --recompute-num-layers 1],"
    "tp2spcp2[--recompute-granularity selective --recompute-modules core_attn moe]"
)
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "YaRN": (
        {"rope_scaling": YARN},
        "--q-lora-rank 24 --rotary-scaling-factor 4 --original-max-position-embeddings 16 "
        "--beta-fast 4 --mscale-all-dim 0.7",
    ),
    "queries of the hidden state": ({"q_lora_rank": None}, "--rope-type rope"),
    "no positions": (
        {
            "model_type": "kimi_linear",
            "num_experts": 8,
            "layer_types": ["full_attention"] * 3,
            "q_lora_rank": None,
            "pad_token_id": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "--position-embedding-type none",
    ),
}


def weight_of(name: str, weights: dict[str, Tensor]) -> Tensor:
    """Return the full tensor of a parameter of ours, from those of transformers."""
    indices = [int(number) for number in re.findall(r"\[(\d+)\]", name)]
    name = re.sub(r"\[\d+\]", "", name)
    outside = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    if name in outside:
        return weights[outside[name]]
    parts = name.removeprefix("decoder.layers.").split(".")
    layer = int(parts.pop(0)) if parts[0].isdigit() else indices.pop(0)
    prefix, part = f"model.layers.{layer}.", ".".join(parts)
    if "experts.experts" in part:
        kind = "gate_up_proj" if "fc1" in part else "down_proj"
        return weights[f"{prefix}mlp.experts.{kind}"][indices[0]]
    if part.endswith("linear_fc1.weight"):
        of_mlp = prefix + part.removesuffix("linear_fc1.weight")
        return torch.cat([weights[f"{of_mlp}{x}_proj.weight"] for x in ("gate", "up")])
    return weights[prefix + NAMES.get(part, part.replace("linear_fc2", "down_proj"))]


NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
}


def theirs(changes: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the weights of a random model of transformers, and its logits ``[b, s, v]``."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **changes}))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(0.2 * torch.randn_like(tensor) + ("norm" in name))
        logits = model(tokens()).logits
    return model.state_dict(), logits


def check_logits(
    context: ParallelContext, words: str, weights: dict[str, Tensor], expected: Tensor
) -> None:
    layout = context.layout
    sizes = f"--tensor-model-parallel-size {layout.tensor_model_parallel_size} --sequence-parallel "
    sizes += f"--expert-model-parallel-size {layout.expert_model_parallel_size} "
    sizes += "--expert-tensor-parallel-size 1 --skip-train --seq-length 24"
    config = config_of(f"{MODEL} {EXPERTS} {words} {sizes}".split(), ranks=layout.world_size)
    (chunk,) = build_chunks(build_gpt_chunk, config, build_transformer_config(config), context)
    with torch.no_grad():
        for shard in shards_of(chunk):
            shard.tensor.copy_(shard.cut(weight_of(shard.name, weights)))
        for number, layer in enumerate(chunk.decoder.layers):  # type: ignore[union-attr,arg-type]
            if number >= 1:
                bias = weights[f"model.layers.{number}.mlp.gate.e_score_correction_bias"]
                layer.mlp.router.expert_bias.copy_(bias)
        ids = tokens()
        logits = chunk.eval()(ids, torch.arange(ids.size(1)).expand_as(ids), None)
    parts = [torch.empty_like(logits) for _ in range(context.pgs.tp.size())]
    torch.distributed.all_gather(parts, logits, group=context.pgs.tp)
    scale = expected.abs().max().item()
    torch.testing.assert_close(torch.cat(parts, dim=-1), expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str) -> None:
    changes, words = VARIANTS[variant]
    weights, expected = theirs(changes)
    check = partial(check_logits, words=words, weights=weights, expected=expected)
    for layout in ({}, {"tp": 2, "ep": 2, "etp": 1}):
        on_ranks(check, layout)


def train_alike(layouts: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Check that losses and norms of three steps agree to 1e-6, and gradients to 1e-5."""
    limits = "--steps 3 --loss-tolerance 1e-6 --gradient-tolerance 1e-5".split()
    code = main(["--layouts", layouts, *limits, "--", *words.split()])
    assert code == 0, capfd.readouterr().out


@pytest.mark.parametrize("layouts", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_layouts_train_alike(layouts: str, capfd: pytest.CaptureFixture[str]) -> None:
    train_alike(layouts, RECIPE, capfd)


def test_layouts_without_positions_train_alike(capfd: pytest.CaptureFixture[str]) -> None:
    words = f"{TRAINED} --position-embedding-type none --reset-attention-mask"
    train_alike("tp2spcp2,tp2pp2", words, capfd)


@pytest.mark.slow
def test_documents_dropout_and_recomputation_without_experts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Ranks share heads without sequence parallelism too; attention keeps all probabilities."""
    dropout = "--attention-dropout 0.1 --hidden-dropout 0.1 --deterministic-dropout"
    recomputed = "--recompute-granularity selective --recompute-modules mla_up_proj"
    layouts = f"tp2,cp2tp2sp,tp2sp[{recomputed}],pp2zbh1cp2[{recomputed} core_attn]"
    train_alike(layouts, f"{TRAINED} {dropout} --reset-attention-mask", capfd)


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    """Norms have the names in the checkpoint that Transformer Engine's layers give them."""
    words = f"{RECIPE} --train-iters 3 --log-interval 1 --eval-iters 0 --save-interval 2".split()
    saved = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
    first = [*words, *saved.split(), "--expert-tensor-parallel-size", "1"]
    whole = train_steps(first, tmp_path / "run", ranks=2)
    goes_on = f"--pipeline-model-parallel-size 2 --load {tmp_path / 'run'} --ckpt-step 2"
    (step,) = train_steps([*words, *goes_on.split()], tmp_path / "again", ranks=2)
    for name in ("lm loss", "mtp_1 loss", "grad_norm"):
        assert step[name] == pytest.approx(whole[2][name], rel=1e-6), name
    names = whole_tensors(tmp_path / "run" / "iter_0000002", tmp_path / "whole.pt")
    assert "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight" in names
