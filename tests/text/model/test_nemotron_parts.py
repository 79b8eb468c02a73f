"""Attention without positions and Nemotron 3's experts, against transformers and between layouts.

The experts have no gate and apply the squared ReLU, beside a shared expert; tokens are projected to
fewer channels for them. The models of this file have no Mamba-2 layers.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.initialization import Shard, memory_key, shards_of
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.task import GPT
from tests.ranks import on_ranks
from tests.text.convert.models import tokens
from tests.text.model.test_deepseek import train_alike
from tests.training_runs import config_of

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=32,
    layers_block_type=["full_attention", "moe", "full_attention", "mlp"] * 2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    intermediate_size=48,
    n_routed_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=16,
    moe_shared_expert_intermediate_size=20,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    max_position_embeddings=64,
    pad_token_id=None,
)
MODEL = (
    "--hybrid-layer-pattern *E*-*E*- --hidden-size 32 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --kv-channels 12 --ffn-hidden-size 48 "
    "--squared-relu --normalization RMSNorm --disable-bias-linear --position-embedding-type none "
    "--untie-embeddings-and-output-weights --max-position-embeddings 64 --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 319 --padded-vocab-size 320 --num-experts 8 --moe-ffn-hidden-size 16 "
    "--moe-router-topk 4 --moe-shared-expert-intermediate-size 20 --moe-router-dtype fp32 "
    "--moe-router-score-function sigmoid --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias "
    "--moe-token-dispatcher-type alltoall"
)
TRAINED = (
    f"{MODEL} --moe-latent-size 24 --seq-length 32 --global-batch-size 8 --lr 1 --adam-eps 1 "
    "--init-method-std 0.1 --num-workers 0 --moe-router-load-balancing-type none"
)
"""A model to train. An epsilon of 1 keeps Adam from turning rounding errors into steps."""


def theirs(latent_size: int | None) -> Any:
    """Return a random model of transformers."""
    torch.manual_seed(1)
    config = transformers.NemotronHConfig(**SIZES, moe_latent_size=latent_size)
    model = transformers.NemotronHForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(0.2 * torch.randn_like(tensor) + ("norm" in name))
    return model


OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embeddings.weight",
    "decoder.final_layernorm.weight": "model.norm_f.weight",
    "output_layer.weight": "lm_head.weight",
}
NAMES = {
    "linear_fc1": "up_proj",
    "linear_fc2": "down_proj",
    "linear_proj": "o_proj",
    "router": "gate",
}


def in_our_rows(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """Return the full tensor of a parameter of ours from tensors by the names of transformers.

    ``name`` is that of a `Shard`. Each layer of ours is two layers of theirs.
    """
    indices = [int(number) for number in re.findall(r"\[(\d+)\]", name)]
    name = re.sub(r"\[\d+\]", "", name)
    if name in OUTSIDE:
        return tensors[OUTSIDE[name]]
    number, _, rest = name.removeprefix("decoder.layers.").partition(".")
    layer = 2 * int(number)
    if "self_attention" not in rest and "input_layernorm" not in rest:
        layer += 1
    own = f"model.layers.{layer}"
    if "layernorm" in rest or "layer_norm" in rest:
        return tensors[f"{own}.norm.weight"]
    *path, module, _ = rest.split(".")
    if module == "linear_qkv":
        parts = [tensors[f"{own}.mixer.{x}_proj.weight"].unflatten(0, (2, -1)) for x in "qkv"]
        return torch.cat(parts, dim=1).flatten(0, 1)
    if "experts" in path:
        return tensors[f"{own}.mixer.experts.{NAMES[module]}"][indices[0]]
    shared = "shared_experts." if "shared_experts" in path else ""
    return tensors[f"{own}.mixer.{shared}{NAMES.get(module, module)}.weight"]


def check(context: ParallelContext, *, words: str, model: Any) -> None:
    """Compare logits on all layouts, and gradients on one rank."""
    layout = context.layout
    sizes = f"--tensor-model-parallel-size {layout.tensor_model_parallel_size} --sequence-parallel "
    sizes += f"--expert-model-parallel-size {layout.expert_model_parallel_size} "
    sizes += "--expert-tensor-parallel-size 1 --skip-train --seq-length 24"
    config = config_of(f"{MODEL} {words} {sizes}".split(), ranks=layout.world_size)
    (chunk,) = build_chunks(GPT.model_chunk, config, build_transformer_config(config), context)
    weights = model.state_dict()
    shards: list[Shard] = list(shards_of(chunk))
    with torch.no_grad():
        for shard in shards:
            shard.tensor.copy_(shard.cut(in_our_rows(shard.name, weights)))
        for number, layer in enumerate(chunk.decoder.layers):  # type: ignore[union-attr,arg-type]
            if number % 2 == 0:
                bias = weights[f"model.layers.{2 * number + 1}.mixer.gate.e_score_correction_bias"]
                layer.mlp.router.expert_bias.copy_(bias)
    ids = tokens()
    want = model(ids).logits
    got = chunk.eval()(ids, torch.arange(ids.size(1)).expand_as(ids), None)
    parts = [torch.empty_like(got) for _ in range(context.pgs.tp.size())]
    torch.distributed.all_gather(parts, got.detach(), group=context.pgs.tp)
    assert near(torch.cat(parts, dim=-1), want) <= 1e-5
    if layout.world_size > 1:
        return
    for logits in (got, want):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {
        name: torch.zeros_like(x) if x.grad is None else x.grad
        for name, x in model.named_parameters()
    }
    ours: dict[Any, Any] = {memory_key(x): x.grad for x in chunk.parameters()}
    for shard in shards:
        found = ours[memory_key(shard.tensor)]
        assert near(found, in_our_rows(shard.name, gradients)) <= 1e-5, shard.name


def near(got: Tensor, want: Tensor) -> float:
    """Return the greatest difference over the greatest magnitude."""
    return float((got - want).detach().abs().max() / want.detach().abs().max())


@pytest.mark.parametrize("latent_size", [None, 24])
def test_logits_and_gradients_are_those_of_transformers(latent_size: int | None) -> None:
    words = "" if latent_size is None else f"--moe-latent-size {latent_size}"
    compare = partial(check, words=words, model=theirs(latent_size))
    for layout in ({}, {"tp": 2, "ep": 2, "etp": 1}):
        on_ranks(compare, layout)


FEW = "tp2spep2etp1,pp2vpp2cp2ep2"
MANY = (
    "tp2spep2etp2dp2,pp2ep2dp2do,cp2tp2spep4etp1,pp2zbh1tp2spep2etp1,"
    "pp2dp2[--recompute-granularity full --recompute-method uniform --recompute-num-layers 1],"
    "ep2dp2[--recompute-granularity selective --recompute-modules moe "
    "--moe-keep-dispatched-tokens],tp2spep2etp1[--moe-token-dispatcher-type flex]"
)


@pytest.mark.parametrize("layouts", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_layouts_train_alike(layouts: str, capfd: pytest.CaptureFixture[str]) -> None:
    train_alike(layouts, TRAINED, capfd)
