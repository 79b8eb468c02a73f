"""Multi-latent attention: its angles by each flag, its norms, and their names in checkpoints.

Its arithmetic is compared with transformers in tests/text/model/test_deepseek.py.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding

from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.latent_attention import LatentAttention, rotary_embedding
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.model.gpt import build_gpt_chunk
from tests.ranks import ranks
from tests.training_runs import SMALL, config_of

CHANNELS = 8
LATENT = (
    "--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
    f"--qk-pos-emb-head-dim {CHANNELS} --v-head-dim 12 --normalization RMSNorm "
    "--position-embedding-type rope --norm-epsilon 1e-3 --padded-vocab-size 128"
).split()


@ranks()
def test_each_flag_of_the_angles_counts(context: ParallelContext) -> None:
    given: dict[str, Any] = dict(
        qk_pos_emb_head_dim=CHANNELS,
        rotary_base=500,
        rotary_percent=0.5,
        rotary_scaling_factor=4,
        original_max_position_embeddings=64,
        beta_fast=5,
        beta_slow=2,
        mscale=0.9,
        mscale_all_dim=0.3,
    )
    cp = context.pgs.cp
    plain: Any = rotary_embedding(SimpleNamespace(**given, rope_type="rope"), cp)  # type: ignore[arg-type]
    rotated = CHANNELS // 2
    want = 1.0 / 500 ** (torch.arange(0, rotated, 2) / rotated)
    torch.testing.assert_close(plain.inv_freq, want)
    yarn: Any = rotary_embedding(SimpleNamespace(**given, rope_type="yarn"), cp)  # type: ignore[arg-type]
    assert isinstance(yarn, YarnRotaryEmbedding)
    angles, factor = yarn(16)
    # Pairs that turn more often than beta_fast within the original length stay, those that turn
    # less often than beta_slow are divided, and a ramp joins them (arXiv:2309.00071).
    once = 1.0 / 500 ** (torch.arange(0, CHANNELS, 2) / CHANNELS)
    low, high = (
        CHANNELS * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(500)) for turns in (5, 2)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), CHANNELS - 1)
    kept = 1 - ((torch.arange(CHANNELS // 2) - low) / (high - low)).clamp(0, 1)
    want = once * kept + once / 4 * (1 - kept)
    torch.testing.assert_close(angles[1, 0, 0, : CHANNELS // 2], want)
    ratio = (0.1 * 0.9 * math.log(4) + 1) / (0.1 * 0.3 * math.log(4) + 1)
    assert math.isclose(factor, ratio, rel_tol=1e-6)
    growing: Any = rotary_embedding(
        SimpleNamespace(**given, rope_type="yarn", llama_4_scaling_beta=0.3),
        cp,  # type: ignore[arg-type]
    )
    both, _ = growing(200)
    torch.testing.assert_close(both[:16, :, :1], angles)
    for position in (0, 63, 64, 128, 199):
        want = torch.tensor(1 + 0.3 * math.log(1 + position // 64))
        torch.testing.assert_close(both[position, 0, 1, 0], want)


@ranks()
def test_norms_of_small_vectors_have_the_models_epsilon_and_engines_names(
    context: ParallelContext,
) -> None:
    """Transformer Engine's layers save them as parts of the layers that follow."""
    own = config_of([*SMALL, *LATENT, "--latent-norm-epsilon", "1e-4"])
    (chunk,) = build_chunks(build_gpt_chunk, own, build_transformer_config(own), context)
    layer = next(module for module in chunk.modules() if isinstance(module, LatentAttention))
    assert layer.q_layernorm.eps == layer.kv_layernorm.eps == 1e-4
    config = config_of([*SMALL, *LATENT])
    (chunk,) = build_chunks(build_gpt_chunk, config, build_transformer_config(config), context)
    layers = [module for module in chunk.modules() if isinstance(module, LatentAttention)]
    assert len(layers) == 2
    for layer in layers:
        assert layer.q_layernorm.eps == layer.kv_layernorm.eps == 1e-3
        assert layer.q_layernorm.weight.numel() == 24 and layer.kv_layernorm.weight.numel() == 16
    keys = {entry.key for entry in chunk.sharded_state_dict().values()}
    for name in ("q", "kv"):
        assert f"decoder.layers.self_attention.linear_{name}_up_proj.layer_norm_weight" in keys
    assert not any("q_layernorm" in key or "kv_layernorm" in key for key in keys)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@ranks(tp=2)
def test_the_gradient_of_the_query_norm_is_shared_out_where_ranks_see_all_tokens(
    context: ParallelContext, sequence_parallel: bool
) -> None:
    """megatron-core sums it over the ranks, which hold parts of it only if tokens are cut."""
    words = ["--tensor-model-parallel-size", "2", *["--sequence-parallel"] * sequence_parallel]
    config = config_of([*SMALL, *LATENT, *words], ranks=2)
    (chunk,) = build_chunks(build_gpt_chunk, config, build_transformer_config(config), context)
    layer = next(module for module in chunk.modules() if isinstance(module, LatentAttention))
    share = 1 if sequence_parallel else 2
    for norm, divisor in ((layer.q_layernorm, share), (layer.kv_layernorm, 1)):
        x = torch.randn(3, 2, norm.weight.numel(), generator=torch.Generator().manual_seed(1))
        norm(x).sum().backward()
        want = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-3).sum((0, 1))
        torch.testing.assert_close(norm.weight.grad, want / divisor)
        assert norm.weight.sequence_parallel is sequence_parallel
