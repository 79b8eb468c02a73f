"""Sparse attention and its indexer: transformers' classes, plain float64 torch, and layouts."""

import math
from typing import Any

import pytest
import torch
from megatron.core.transformer import build_module
from torch import Tensor
from transformers import AutoConfig
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from megatron_ext import core
from megatron_ext.errors import ConfigError
from megatron_ext.layers.auxiliary_loss import INDEXER_LOSS, INDEXER_LOSS_COUNT, AuxiliaryScale
from megatron_ext.layers.context_parallel import gather_sequence
from megatron_ext.layers.mixers import lightning_indexer, sparse_attention
from megatron_ext.layers.mixers.sparse_attention import SparseLatentAttention, spec
from megatron_ext.layers.specs import _attention
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from tests.layers import plain
from tests.layers.plain import drawn, local
from tests.ranks import on_ranks, ranks
from tests.training_runs import SMALL, config_of

S, B, H = 32, 2, 32
HEADS, PLAIN_DIM, ROTATED, VALUE, RANK, QUERY_RANK = 4, 8, 4, 12, 16, 24
INDEX_HEADS, INDEX_DIM, TOPK = 8, 8, 6
ENDS = [[9, 10, 27], [20]]
COEFFICIENT, SCALE = 0.7, 3.0
LATENT = (
    f"--multi-latent-attention --qk-layernorm --q-lora-rank {QUERY_RANK} --kv-lora-rank {RANK} "
    f"--qk-head-dim {PLAIN_DIM} --qk-pos-emb-head-dim {ROTATED} --v-head-dim {VALUE} "
    "--normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope "
    "--disable-bias-linear --padded-vocab-size 128"
).split()


def configured(context: ParallelContext, *words: str, **changes: Any) -> Any:
    """Return a TransformerConfig of sparse attention for the layout of ``context``."""
    layout = context.layout
    tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size
    sizes = ["--tensor-model-parallel-size", str(tp), "--context-parallel-size", str(cp)]
    rope = [] if "--rope-type" in words else ["--rope-type", "rope"]
    flags = [*SMALL, *LATENT, *sizes, *rope, *words]
    transformer_config = build_transformer_config(config_of(flags, ranks=layout.world_size))
    given = {
        "dsa_indexer_n_heads": INDEX_HEADS,
        "dsa_indexer_head_dim": INDEX_DIM,
        "dsa_indexer_topk": TOPK,
        "dsa_indexer_loss_coeff": COEFFICIENT,
        "auxiliary_scale": AuxiliaryScale(SCALE),
        **changes,
    }
    for name, value in given.items():
        assert hasattr(transformer_config, name)
        setattr(transformer_config, name, value)
    return transformer_config


def built(
    context: ParallelContext, transformer_config: Any, kind: Any = None, **options: Any
) -> Any:
    """Return sparse attention, or attention of the spec ``kind``, with weights by their names."""
    module = build_module(
        kind or spec(transformer_config),
        config=transformer_config,
        layer_number=1,
        pg_collection=context.pgs,
        **options,
    )
    plain.fill(module, context)
    return module


def near(found: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    scale = expected.abs().max().item()
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= tolerance * scale, f"{what}: error {error:.2e} of {scale:.2e}"


class PlainSparse:
    """Sparse attention and the loss of its indexer in float64, in one process."""

    def __init__(self, topk: int = TOPK, *, sparse_loss: bool, interleaved: bool = False) -> None:
        self.topk = topk
        self.sparse_loss = sparse_loss
        self.interleaved = interleaved
        self.weights: dict[str, Tensor] = {}

    def weight(self, name: str, *shape: int) -> Tensor:
        if name not in self.weights:
            self.weights[name] = plain.full_weight(name, shape).float().double().requires_grad_()
        return self.weights[name]

    def linear(self, name: str, x: Tensor, outputs: int) -> Tensor:
        return x @ self.weight(f"{name}.weight", outputs, x.size(-1)).T

    def rms(self, name: str, x: Tensor) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x / (mean + 1e-6).sqrt() * self.weight(f"{name}.weight", x.size(-1))

    def turned(self, x: Tensor, interleaved: bool) -> Tensor:
        """Rotate the first channels of ``[s, b, n, d]``."""
        half = ROTATED // 2
        angles = torch.arange(x.size(0)).double()[:, None] / 10000.0 ** (torch.arange(half) / half)
        pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
        columns = list(x.unbind(-1))
        for i, (a, b) in enumerate(pairs):
            cos, sin = angles[:, i].cos()[:, None, None], angles[:, i].sin()[:, None, None]
            columns[a], columns[b] = (
                x[..., a] * cos - x[..., b] * sin,
                x[..., b] * cos + x[..., a] * sin,
            )
        return torch.stack(columns, -1)

    def __call__(self, hidden: Tensor, forbidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output ``[s, b, h]`` and the mean loss."""
        length, batch, _ = hidden.shape
        width = PLAIN_DIM + ROTATED
        c_q = self.rms("q_layernorm", self.linear("linear_q_down_proj", hidden, QUERY_RANK))
        query = torch.unflatten(
            self.linear("linear_q_up_proj", c_q, HEADS * width), -1, (HEADS, -1)
        )
        query = torch.cat(
            (query[..., :PLAIN_DIM], self.turned(query[..., PLAIN_DIM:], True)), dim=-1
        )
        mixed = self.linear("linear_kv_down_proj", hidden, RANK + ROTATED)
        shared = self.turned(mixed[..., None, RANK:], True).expand(-1, -1, HEADS, -1)
        latent = self.rms("kv_layernorm", mixed[..., :RANK])
        heads = self.linear("linear_kv_up_proj", latent, HEADS * (PLAIN_DIM + VALUE))
        heads = torch.unflatten(heads, -1, (HEADS, -1))
        key = torch.cat((heads[..., :PLAIN_DIM], shared), dim=-1)
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * width**-0.5

        prefix = "core_attention.indexer."
        rows = hidden.detach()
        q = self.linear(f"{prefix}linear_wq_b", c_q.detach(), INDEX_HEADS * INDEX_DIM)
        q = self.turned(torch.unflatten(q, -1, (INDEX_HEADS, -1)), self.interleaved)
        k = self.linear(f"{prefix}linear_wk", rows, INDEX_DIM)
        k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        k = k * self.weight(f"{prefix}k_norm.weight", INDEX_DIM)
        k = k + self.weight(f"{prefix}k_norm.bias", INDEX_DIM)
        k = self.turned(k[:, :, None], self.interleaved)[:, :, 0]
        w = self.linear(f"{prefix}linear_weights_proj", rows, INDEX_HEADS)
        w = w * (INDEX_HEADS * INDEX_DIM) ** -0.5
        products = torch.einsum("qbjd,kbd->bqjk", q, k).relu()
        index = torch.einsum("qbj,bqjk->bqk", w, products)

        chosen = torch.zeros(batch, length, length, dtype=torch.bool)
        for b in range(batch):
            for t in range(length):
                keys = [s for s in range(length) if not forbidden[b, t, s]]
                keys.sort(key=lambda s: (-index[b, t, s].item(), s))
                chosen[b, t, keys[: self.topk]] = True
        probabilities = scores.masked_fill(~chosen[:, None], -math.inf).softmax(-1)
        value = heads[..., PLAIN_DIM:]
        attended = torch.einsum("bnqk,kbnd->qbnd", probabilities, value).flatten(2)
        output = self.linear("linear_proj", attended, H)

        within = chosen if self.sparse_loss else ~forbidden
        target = scores.detach().masked_fill(~within[:, None], -math.inf).softmax(-1).mean(1)
        losses = []
        for b in range(batch):
            for t in range(length):
                counted = within[b, t]
                p = target[b, t, counted]
                losses.append((p * (p.log() - index[b, t, counted].log_softmax(-1))).sum())
        return output, torch.stack(losses).mean()


def check_layout(
    context: ParallelContext,
    words: str = "",
    topk: int = TOPK,
    sparse_loss: bool = False,
    with_documents: bool = True,
    interleaved: bool = False,
) -> None:
    """Check output, loss and gradients of a rank against plain float64 torch."""
    transformer_config = configured(
        context,
        *words.split(),
        dsa_indexer_topk=topk,
        dsa_indexer_use_sparse_loss=sparse_loss,
        dsa_indexer_rope_interleaved=interleaved,
    )
    split = transformer_config.sequence_parallel
    module = built(context, transformer_config).train()
    hidden, upstream = drawn(S, B, H), drawn(S, B, H, seed=4)
    documents = plain.document_indices(S, ENDS) if with_documents else None
    own = local(hidden, context, sequence_parallel=split).requires_grad_()
    core.take_auxiliary_losses()
    output, bias = module(own, attention_mask=documents)
    assert bias is None
    (output * local(upstream, context, sequence_parallel=split)).sum().backward()
    logged = core.take_auxiliary_losses()

    truth = PlainSparse(topk, sparse_loss=sparse_loss, interleaved=interleaved)
    whole = hidden.double().requires_grad_()
    forbidden = plain.documents(S, ENDS) if with_documents else plain.causal(S, B)
    expected, loss = truth(whole, forbidden)
    total_loss = (expected * upstream.double()).sum() + COEFFICIENT * SCALE * loss
    total_loss.backward()  # type: ignore[no-untyped-call]

    near(output, local(expected, context, sequence_parallel=split), "output", 1e-6)
    assert whole.grad is not None
    near(own.grad, local(whole.grad, context, sequence_parallel=split), "input's gradient", 1e-5)  # type: ignore[arg-type]
    total = logged[INDEXER_LOSS].double().sum()
    torch.distributed.all_reduce(total, group=context.pgs.cp)
    near(total, loss.detach(), "logged loss", 1e-6)
    count = logged[INDEXER_LOSS_COUNT].double().sum()
    torch.distributed.all_reduce(count, group=context.pgs.cp)
    assert count.item() == pytest.approx(1.0)
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        torch.distributed.all_reduce(gradient, group=context.pgs.cp)
        shared_out = "q_layernorm" in name and not split
        if getattr(parameter, "sequence_parallel", False) or shared_out:
            torch.distributed.all_reduce(gradient, group=context.pgs.tp)
        shard = plain.shard_of(name, parameter, context)
        wanted = truth.weights[name].grad
        assert wanted is not None
        near(gradient, shard.of(wanted), name, 1e-5)


@pytest.mark.parametrize("sparse_loss", [False, True])
def test_one_rank_equals_plain_torch(sparse_loss: bool) -> None:
    for topk in (2, TOPK, S - 1, S):
        on_ranks(check_layout, {}, topk=topk, sparse_loss=sparse_loss)
    on_ranks(check_layout, {}, sparse_loss=sparse_loss, with_documents=False, interleaved=True)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"tp": 2}, ""),
        ({"tp": 2}, "--sequence-parallel"),
        ({"cp": 2}, "--recompute-granularity selective --recompute-modules mla_up_proj"),
        ({"cp": 4}, "--recompute-granularity selective --recompute-modules core_attn"),
        ({"tp": 2, "cp": 2}, "--sequence-parallel"),
    ],
)
def test_layouts_equal_plain_torch(layout: dict[str, int], words: str) -> None:
    on_ranks(check_layout, layout, words=words)
    on_ranks(check_layout, layout, words=words, sparse_loss=True)
    on_ranks(check_layout, layout, words=words, topk=S)


def test_recomputation_changes_nothing() -> None:
    for modules in ("core_attn", "mla_up_proj", "core_attn mla_up_proj"):
        words = f"--recompute-granularity selective --recompute-modules {modules}"
        on_ranks(check_layout, {}, words=words)


@pytest.mark.parametrize("layout", [{}, {"cp": 2}, {"tp": 2}])
def test_blocks_of_queries_change_nothing(
    layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in (1, 3):
        numbers = dict.fromkeys(("cpu", "cuda"), rows * B * INDEX_HEADS * S)
        monkeypatch.setattr(sparse_attention, "BLOCK_NUMBERS", numbers)
        on_ranks(check_layout, layout)
        on_ranks(check_layout, layout, sparse_loss=True)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"cp": 2}])
def test_with_as_many_keys_as_tokens_it_is_dense_attention(layout: dict[str, int]) -> None:
    on_ranks(check_dense, layout)


def check_dense(context: ParallelContext) -> None:
    transformer_config = configured(context, dsa_indexer_topk=S)
    sparse = built(context, transformer_config)
    dense = built(context, transformer_config, _attention(transformer_config)[0])
    hidden = local(drawn(S, B, H), context, sequence_parallel=False)
    found = []
    for module in (sparse, dense):
        own = hidden.clone().requires_grad_()
        output, _ = module.train()(own, attention_mask=None)
        output.square().sum().backward()
        gradients = {name: p.grad for name, p in module.named_parameters()}
        found.append({"output": output, "input": own.grad, **gradients})
    assert all(torch.equal(found[0][name], wanted) for name, wanted in found[1].items())


def test_of_equal_scores_the_earlier_keys_are_chosen() -> None:
    scores = torch.tensor([[[0.0, 2, 0, -1, 0, 9], [0, 0, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0]]])
    allowed = torch.tensor([[[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0]]]).bool()
    chosen = lightning_indexer.chosen_keys(scores, allowed, 3)
    wanted = [[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]]
    assert chosen.int().tolist() == [wanted]
    assert torch.equal(lightning_indexer.chosen_keys(scores, allowed, 6), allowed)


@ranks()
def test_only_the_indexer_is_trained_where_the_rest_is_frozen(context: ParallelContext) -> None:
    """The warm-up: gradients are those of a run that trains everything."""
    found = []
    recomputed = "--recompute-granularity selective --recompute-modules core_attn mla_up_proj"
    for freezes in (False, True):
        words = recomputed.split() if freezes else []
        module = built(context, configured(context, *words)).train()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not freezes or "indexer" in name)
        output, _ = module(drawn(S, B, H), attention_mask=None)
        output.sum().backward()
        found.append({name: parameter.grad for name, parameter in module.named_parameters()})
    for name, gradient in found[1].items():
        if "indexer" in name:
            assert gradient is not None and torch.equal(gradient, found[0][name]), name
        else:
            assert gradient is None and found[0][name] is not None


@ranks()
def test_without_a_loss_the_indexer_is_frozen(context: ParallelContext) -> None:
    for coefficient in (None, 0.0):
        transformer_config = configured(context, dsa_indexer_loss_coeff=coefficient)
        module = built(context, transformer_config).train()
        core.take_auxiliary_losses()
        module(drawn(S, B, H), attention_mask=None)[0].sum().backward()
        for name, parameter in module.named_parameters():
            assert parameter.requires_grad == ("indexer" not in name)
        assert not any(values.any() for values in core.take_auxiliary_losses().values())


NAMES = {
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
    "core_attention.indexer.linear_wq_b": "indexer.wq_b",
    "core_attention.indexer.linear_wk": "indexer.wk",
    "core_attention.indexer.k_norm": "indexer.k_norm",
    "core_attention.indexer.linear_weights_proj": "indexer.weights_proj",
}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
@ranks()
def test_outputs_and_gradients_equal_those_of_transformers(
    context: ParallelContext, model_type: str
) -> None:
    is_glm = model_type == "glm_moe_dsa"
    settings: Any = AutoConfig.for_model(
        model_type, hidden_size=H, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, q_lora_rank=QUERY_RANK, kv_lora_rank=RANK,
        qk_nope_head_dim=PLAIN_DIM, qk_rope_head_dim=ROTATED, v_head_dim=VALUE,
        rms_norm_eps=1e-6, index_topk=TOPK, index_head_dim=INDEX_DIM, index_n_heads=INDEX_HEADS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0} if is_glm else YARN,
        attn_implementation="eager",
    )  # fmt: skip
    library: Any = glm if is_glm else deepseek
    prefix = "GlmMoeDsa" if is_glm else "DeepseekV32"
    theirs = getattr(library, f"{prefix}Attention")(settings, 0)
    words = (
        "--rope-type yarn --rotary-scaling-factor 4 --original-max-position-embeddings 16 "
        "--beta-fast 4 --mscale-all-dim 0.7"
    )
    transformer_config = configured(
        context, *([] if is_glm else words.split()), dsa_indexer_rope_interleaved=is_glm
    )
    ours = built(context, transformer_config).eval()
    state = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    renamed = {}
    for name, value in state.items():
        module, _, kind = name.rpartition(".")
        renamed[f"{NAMES[module]}.{kind}"] = value
    theirs.load_state_dict(renamed)
    hidden, upstream = drawn(S, B, H), drawn(S, B, H, seed=4)
    own = hidden.clone().requires_grad_()
    output, _ = ours(own, attention_mask=None)
    (output * upstream).sum().backward()
    positions = torch.arange(S)[None]
    angles = getattr(library, f"{prefix}RotaryEmbedding")(settings)(hidden, positions)
    causal = torch.zeros(1, 1, S, S).masked_fill(plain.causal(S, 1), -math.inf)
    rows = hidden.transpose(0, 1).clone().requires_grad_()
    expected = theirs(rows, position_embeddings=angles, attention_mask=causal)[0]
    (expected * upstream.transpose(0, 1)).sum().backward()
    near(output, expected.transpose(0, 1), "output", 1e-5)
    assert own.grad is not None and rows.grad is not None
    near(own.grad, rows.grad.transpose(0, 1), "input's gradient", 1e-5)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        module, _, kind = name.rpartition(".")
        wanted = gradients[f"{NAMES[module]}.{kind}"]
        if "indexer" in name:
            assert wanted is None and parameter.grad is None
        else:
            near(parameter.grad, wanted, name, 1e-5)


@ranks(cp=2)
def test_exchanged_heads_are_refused(context: ParallelContext) -> None:
    with pytest.raises(ConfigError, match="`--cp-comm-type` \\(a2a\\) does not go with sparse"):
        built(context, configured(context), cp_comm_type="a2a")


@pytest.mark.parametrize(
    "words", ["--window-size 3 0", "--softmax-type learnable", "--attn-logit-softcapping 20.0"]
)
@ranks()
def test_other_softmaxes_are_refused(context: ParallelContext, words: str) -> None:
    name, value = words.split()[:2]
    with pytest.raises(ConfigError, match=f"`{name}` \\(\\(?{value}.*does not go with sparse"):
        built(context, configured(context, *words.split()))


@ranks()
def test_bf16_attends_as_float32_does(context: ParallelContext) -> None:
    transformer_config = configured(context, "--bf16", dsa_indexer_topk=S // 2)
    module: SparseLatentAttention = built(context, transformer_config).train().bfloat16()
    hidden = drawn(S, B, H).bfloat16().requires_grad_()
    output, _ = module(hidden, attention_mask=plain.document_indices(S, ENDS))
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16 and torch.isfinite(output).all()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)


@ranks(cp=2)
def test_keys_are_gathered_in_sequence_order(context: ParallelContext) -> None:
    blocks = list(sparse_attention.query_blocks(8, context.pgs.cp.rank(), 2, rows=3))
    x = torch.arange(16)
    own = plain.zigzag(x, context.pgs.cp.rank(), 2)
    whole = gather_sequence(own[:, None].float(), context.pgs.cp)[:, 0]
    assert torch.equal(whole, x.float())
    assert torch.equal(torch.cat([own[block.rows] for block in blocks]), own)
    for block in blocks:
        assert torch.equal(own[block.rows], x[block.first : block.end])
