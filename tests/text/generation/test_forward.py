"""Forward passes over packed texts: formats, vocabularies, and layouts without a cache."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.optimizer import LATENT_TARGETS, LoraConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers.chunks import build_chunks, wrap_chunks
from megatron_ext.layers.kv_cache import Segment
from megatron_ext.layers.lora import attach_adapters
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.config.hugging_face import HuggingFaceConfig
from megatron_ext.text.generation.forward import NewTokens, PackedForward, check_model
from megatron_ext.text.generation.run import build_frozen_chunk
from tests.ranks import ParallelContext, ranks
from tests.text.convert.models import SIZES
from tests.training_runs import SMALL, config_of

VOCABULARY = 40
IDS = (3, 1, 4, 1, 5)


def forward_of(context: ParallelContext, *words: str) -> PackedForward:
    """Return the forward passes of a small random model, whose vocabulary has padding."""
    config = config_of([*SMALL, "--padded-vocab-size", "64", *words])
    model = dataclasses.replace(config.model, unpadded_vocab_size=VOCABULARY)
    config = dataclasses.replace(config, model=model)
    transformer_config = build_transformer_config(config)
    torch.manual_seed(3)
    chunks = build_chunks(build_frozen_chunk, config, transformer_config, context, VOCABULARY)
    device = torch.device("cpu")
    wrapped = wrap_chunks(chunks, config, transformer_config, context, device)
    assert not any(p.requires_grad for chunk in wrapped for p in chunk.parameters())
    return PackedForward(wrapped, transformer_config, config, context, device)


def next_logits(forward: PackedForward) -> Tensor:
    """Return the logits after a text whose first tokens are cached before the last ones."""
    with forward.ready(1, len(IDS)):
        forward.next_logits([NewTokens(Segment(0, 0, 3), IDS[:3])])
        return forward.next_logits([NewTokens(Segment(0, 3, 2), IDS[3:])])[0]


@ranks()
def test_models_in_16_bits_write_as_those_in_32(context: ParallelContext) -> None:
    exact = next_logits(forward_of(context))
    assert exact.shape == (VOCABULARY,) and exact.dtype == torch.float32
    for flag, near in (("--bf16", 2e-2), ("--fp16", 3e-3)):
        found = next_logits(forward_of(context, flag))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact, rtol=0, atol=near * float(exact.abs().max()))


@ranks()
def test_a_model_is_after_generation_as_it_was_before(context: ParallelContext) -> None:
    """Training goes on with dropout, without a cache and with its own rotary angles."""
    words = "--position-embedding-type rope --hidden-dropout 0.5 --attention-dropout 0.5"
    forward = forward_of(context, *words.split())
    modules = [module for chunk in forward.chunks for module in chunk.modules()]
    for module in modules:
        module.train()
    assert torch.equal(next_logits(forward), next_logits(forward))
    assert all(module.training for module in modules)
    assert not any(getattr(module, "cache", None) for module in modules)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    with pytest.raises(ZeroDivisionError), forward.ready(1, 4):
        assert not any(module.training for module in modules)
        raise ZeroDivisionError
    assert all(module.training for module in modules)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 12 --disable-bias-linear --position-embedding-type rope"
)
ROTARY = "--position-embedding-type rope"
LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 3.0, 4.0],
}
MODELS = {
    "plain": "",
    "texts of both lengths of LongRoPE": (
        f"{ROTARY} --rotary-percent 0.75 --rope-scaling {json.dumps(LONG, separators=(',', ':'))}"
    ),
    "groups, norms of heads, SwiGLU, a window": (
        f"{ROTARY} --group-query-attention --num-query-groups 2 --qk-layernorm --swiglu "
        "--normalization RMSNorm --window-size 3 0 --window-attn-skip-freq 2"
    ),
    "half of a head rotated by neighbours": f"{ROTARY} --rotary-percent 0.5 --rotary-interleaved",
    "norms after parts, a gain minus one": (
        f"{ROTARY} --sandwich-norm --apply-layernorm-1p --untie-embeddings-and-output-weights"
    ),
    "outputs and all heads normalized, factors of branches and logits": (
        f"{ROTARY} --reordered-norm --qk-layernorm --qk-layernorm-all-heads --normalization "
        "RMSNorm --disable-bias-linear --residual-multiplier 0.3 --logits-scaling 6"
    ),
    "factors beside norms after parts, norms without weights": (
        f"{ROTARY} --sandwich-norm --residual-multiplier 0.3 --no-norm-elementwise-affine"
    ),
    "heads normalized after rotation, queries that grow": (
        "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --qk-layernorm "
        "--yarn-original-max-position-embeddings 2 --llama-4-scaling-beta 0.5 "
        "--qk-layernorm-after-rope"
    ),
    "gates of heads": (
        f"{ROTARY} --attention-output-gate --group-query-attention --num-query-groups 2 "
        "--qk-layernorm"
    ),
    "soft caps": f"{ROTARY} --attn-logit-softcapping 2 --final-logit-softcapping 1",
    "16 bits": f"{ROTARY} --bf16 --fp32-residual-connection --group-query-attention "
    "--num-query-groups 2",
    "with adapters": ROTARY,
    "experts": "--num-experts 4 --moe-ffn-hidden-size 24 --disable-bias-linear",
    "experts on small vectors": (
        "--num-experts 4 --moe-ffn-hidden-size 24 --moe-latent-size 12 --disable-bias-linear "
        "--squared-relu"
    ),
    "latent attention": LATENT,
    "latent attention with adapters": LATENT,
    "latent attention without positions": f"{LATENT} --position-embedding-type none",
    "latent attention, queries too": f"{LATENT} --q-lora-rank 24 --window-size 3 0",
}


PASSES = ((5, 1, 0), (1, 1, 4), (1, 1, 2), (1, 1, 1), (1, 0, 1), (1, 1, 1))
"""Numbers of new tokens of three texts; one begins beside two that go on, some by several."""


def logits_of_passes(forward: PackedForward, *, by_modules: bool) -> list[Tensor]:
    """Return the logits ``[texts, v]`` after each pass."""
    lengths = [0, 0, 0]
    found = []
    short = forward.short_length
    with forward.ready(3, 16):
        assert (forward._decoder is None) == forward._config.varies_attention
        if by_modules:
            forward._forget_decoder()
        for counts in PASSES:
            texts = []
            for slot, count in enumerate(counts):
                start = lengths[slot]
                lengths[slot] += count
                if short is not None and start <= short < lengths[slot]:
                    start = 0  # All keys are rotated in another way.
                new = lengths[slot] - start
                if count:
                    texts.append(NewTokens(Segment(slot, start, new), ids_of(slot)[start:][:new]))
            logits = forward.next_logits(texts)
            found.append(torch.stack([logits[slot] for slot in sorted(logits)]))
    return found


def ids_of(slot: int) -> list[int]:
    return [(7 * position + 11 * slot) % VOCABULARY for position in range(16)]


def logits_of_whole_texts(forward: PackedForward) -> list[Tensor]:
    """Return what `logits_of_passes` should, by forward passes without a cache."""
    lengths = [0, 0, 0]
    found = []
    (chunk,) = forward.chunks
    chunk.eval()
    for counts in PASSES:
        lengths = [a + b for a, b in zip(lengths, counts, strict=True)]
        logits = []
        for slot, count in enumerate(counts):
            if count:
                ids = torch.tensor([ids_of(slot)[: lengths[slot]]])
                with torch.no_grad():
                    whole = chunk(ids, torch.arange(ids.size(1))[None], None)
                logits.append(whole[0, -1, :VOCABULARY].float())
        found.append(torch.stack(logits))
    return found


@ranks()
def test_passes_over_new_tokens_give_the_logits_of_whole_texts(context: ParallelContext) -> None:
    for name, flags in MODELS.items():
        forward = forward_of(context, *flags.split())
        if "with adapters" in name:
            targets = [*LATENT_TARGETS, "linear_qkv"]
            lora = LoraConfig(lora_rank=2, lora_alpha=8, lora_target_modules=targets)
            attach_adapters(forward.chunks, lora, 1)
            for chunk in forward.chunks:
                for key, parameter in chunk.named_parameters():
                    if key.endswith("lora.b"):
                        torch.nn.init.normal_(parameter)
        truth = logits_of_whole_texts(forward)
        near = 2e-2 if name == "16 bits" else 1e-5
        for by_modules in (False, True):
            passes = logits_of_passes(forward, by_modules=by_modules)
            for found, expected in zip(passes, truth, strict=True):
                atol = near * float(expected.abs().max())
                torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=name)


@ranks()
def test_a_model_with_hooks_or_other_layers_is_called_as_it_is(context: ParallelContext) -> None:
    forward = forward_of(context)
    model = forward._model
    seen = []
    handle = model.decoder.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    next_logits(forward)
    assert len(seen) == 2
    handle.remove()
    model.has_changed_layers = True
    with forward.ready(1, 4):
        assert forward._decoder is None
    model.has_changed_layers = False
    with forward.ready(1, 4):
        assert forward._decoder is not None and forward._head is not None


@ranks()
def test_latent_attention_keeps_small_vectors_and_a_window_its_own_tokens(
    context: ParallelContext,
) -> None:
    """A token takes 16 + 4 numbers, not 4 heads of 12 + 12."""
    flags = f"{LATENT} --window-size 3 0 --window-attn-skip-freq 2"
    forward = forward_of(context, *flags.split())
    with forward.ready(2, 10):
        forward.next_logits([NewTokens(Segment(1, 0, 5), IDS)])
        layers = [layer.self_attention for layer in forward._model.decoder.layers]
        sizes = [layer.cache.vectors.stored.shape for layer in layers]
        windows = [layer.core_attention.window_size for layer in layers]
        assert sizes == [(2, 10 if window is None else 4, 20) for window in windows]
        assert len(set(windows)) == 2
        assert not any(layer.core_attention.cache.keys.stored.numel() for layer in layers)


@ranks()
def test_scores_take_the_vocabulary_of_the_model_from_which_the_weights_come(
    context: ParallelContext, tmp_path: Path
) -> None:
    """lm-eval's own class normalizes over all of the model's rows, texts over the tokenizer's."""
    forward = forward_of(context)
    states = torch.randn(3, 1, forward._config.hidden_size)
    assert forward.model_vocab_size == VOCABULARY
    assert forward.logits(states).shape == (3, VOCABULARY)
    assert forward.logits(states, 50).shape == (3, 50)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    for given in (HuggingFaceConfig(load_hf=str(tmp_path)), HuggingFaceConfig()):
        config = forward._run_config.with_section(given)
        other: Any = SimpleNamespace(_run_config=config)
        size = PackedForward.model_vocab_size.func(other)  # type: ignore[attr-defined]
        assert size == (VOCABULARY if given.load_hf is None else 300)


@ranks()
def test_replicas_that_share_experts_run_in_step(context: ParallelContext) -> None:
    """Experts are spread over replicas if they have more ranks than a tensor-parallel group."""
    forward = forward_of(context)
    group = SimpleNamespace(size=lambda: 1)
    for tp, ep, etp, in_step in (
        (1, 1, 1, False), (1, 2, 1, True), (2, 1, 2, False), (2, 2, 2, True), (2, 2, 1, False),
        (4, 2, 1, False), (2, 4, 1, True),
    ):  # fmt: skip
        layout = Layout(
            8,
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        other: Any = SimpleNamespace(pgs=SimpleNamespace(tp=group), layout=layout)
        engine: Any = object()
        parts = forward.chunks, forward._config, forward._run_config, other, forward.device, engine
        assert PackedForward(*parts)._in_step is in_step


def test_a_model_without_a_cache_is_refused() -> None:
    config = config_of(SMALL)
    check_model(config)
    model = dataclasses.replace(config.model, transformer_impl="transformer_engine")
    parallel = dataclasses.replace(config.parallel, context_parallel_size=4)
    with pytest.raises(ConfigError) as caught:
        check_model(dataclasses.replace(config, model=model, parallel=parallel))
    first, second = caught.value.messages
    assert first.startswith("`--context-parallel-size` (4) must be 1 where text is generated")
    assert second.startswith("`--transformer-impl` (transformer_engine) has no cache of keys and")
