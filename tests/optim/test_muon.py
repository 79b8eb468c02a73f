"""Muon by its formulas in plain torch, and the same update in every layout."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import Tensor

from megatron_ext.checkpoint.files import folder_of
from megatron_ext.config.optimizer import QUINTIC_STEPS
from megatron_ext.layers.chunks import wrap_chunks
from megatron_ext.layers.fused_rows import fused_rows
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.optim import dealing
from megatron_ext.optim.builder import build_optimizer
from megatron_ext.optim.matrices import Matrix, matrices_of
from megatron_ext.optim.muon import Muon
from megatron_ext.optim.newton_schulz import POLYNOMIALS, orthogonalize, polynomials
from megatron_ext.optim.schedule import build_scheduler
from megatron_ext.optim.shards import Shard
from megatron_ext.optim.update import parts_of
from megatron_ext.parallel.context import ParallelContext
from tests.checkpoint.tiny import whole_tensors
from tests.layers.test_lora import CONSTANT, bare_chunk, loss_of, near
from tests.numerics.stock import gpt_config
from tests.ranks import ranks
from tests.training_runs import train_steps

QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
SIMPLE = [(3.4445, -4.7750, 2.0315)] * 6
POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]
"""The coefficients of the paper, without its safety factor."""


@pytest.mark.parametrize(
    ("kind", "steps", "low", "high"),
    [("simple", 10, 0.65, 1.25), ("quintic", 5, 0.7, 1.2), ("polar_express", 8, 0.999, 1.001)],
)
def test_singular_values_become_about_one_and_vectors_stay(
    kind: str, steps: int, low: float, high: float
) -> None:
    matrices = torch.randn(2, 12, 40, generator=torch.Generator().manual_seed(1))
    found = orthogonalize(matrices, polynomials(kind, steps))
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    values = left.mT @ found @ right.mT
    diagonal = values.diagonal(dim1=1, dim2=2)
    assert diagonal.min() > low and diagonal.max() < high
    assert (values - torch.diag_embed(diagonal)).abs().max() < 1e-5
    turned = orthogonalize(matrices.mT.contiguous(), polynomials(kind, steps))
    torch.testing.assert_close(turned.mT, found, rtol=0, atol=1e-5)


def test_the_quintic_polynomials_are_as_many_as_the_flags_say() -> None:
    assert len(POLYNOMIALS["quintic"]) == QUINTIC_STEPS
    assert not orthogonalize(torch.zeros(1, 3, 4), polynomials("quintic", 5)).any()


def test_more_steps_start_again_or_repeat_the_last_polynomial() -> None:
    assert polynomials("quintic", 7) == [*QUINTIC, *QUINTIC[:2]]
    assert polynomials("simple", 6) == SIMPLE
    # All but the last step are made for singular values up to 1.01.
    *early, last = POLAR_EXPRESS
    safe = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in early]
    for steps in (2, 10):
        wanted = [*safe, last, last, last][:steps]
        found = polynomials("polar_express", steps)
        assert len(found) == steps
        for mine, want in zip(found, wanted, strict=True):
            assert mine == pytest.approx(want, abs=1.01e-4)


def plain_direction(momentum: Tensor, polynomials: Any, scale: str) -> Tensor:
    """Return the scaled and orthogonalized matrix, in double precision."""
    rows, columns = momentum.shape
    x = momentum.double() / momentum.double().norm()
    for a, b, c in polynomials:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    factors = {
        "spectral": math.sqrt(max(rows, columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
        "shape_scaling": math.sqrt(max(1, rows / columns)),
    }
    return factors[scale] * x


def parts_of_weight(name: str, weight: Tensor, config: Any, split_qkv: bool) -> list[Tensor]:
    """Return the rows of each matrix that a weight fuses: queries, keys, values; gate, up."""
    rows = torch.arange(weight.size(0))
    if "linear_fc1" in name:
        return list(rows.chunk(2))
    if "linear_qkv" in name and split_qkv:
        d = config.kv_channels
        n = config.num_attention_heads // config.num_query_groups
        return [x.flatten() for x in rows.view(-1, (n + 2) * d).split([n * d, d, d], dim=1)]
    return [rows]


@pytest.mark.parametrize(
    ("flags", "scale", "factor", "split"),
    [
        ("--muon-extra-scale-factor 0.2", "spectral", 0.2, True),
        ("--muon-nesterov --muon-scale-mode unit_rms_norm", "unit_rms_norm", 1.0, True),
        (
            "--muon-use-nesterov --muon-no-split-qkv --muon-scale-mode shape_scaling "
            "--muon-coefficient-type simple --muon-num-ns-steps 6 --muon-momentum 0.8",
            "shape_scaling",
            1.0,
            False,
        ),
    ],
)
@ranks()
def test_three_steps_are_those_of_plain_torch(
    context: ParallelContext, flags: str, scale: str, factor: float, split: bool
) -> None:
    run = gpt_config("--optimizer", "muon", *flags.split(), *CONSTANT, "--weight-decay", "0.1")
    transformer_config = build_transformer_config(run)
    chunk = bare_chunk(run, context)
    own = dict(chunk.named_parameters())
    truth = {name: weight.detach().clone().requires_grad_() for name, weight in own.items()}
    tables = ("embedding", "output_layer")
    names = [k for k, v in truth.items() if v.dim() == 2 and not k.startswith(tables)]
    assert len(names) == 4 * run.model.num_layers
    rest = [truth[name] for name in truth if name not in names]
    decays = [[x for x in rest if x.dim() == 2], [x for x in rest if x.dim() == 1]]
    adam = torch.optim.AdamW(
        [{"params": decays[0]}, {"params": decays[1], "weight_decay": 0}], lr=1e-2, weight_decay=0.1
    )
    (ddp,) = wrap_chunks([chunk], run, transformer_config, context, torch.device("cpu"))
    optimizer = build_optimizer(run, [ddp], context.pgs)
    build_scheduler(run, optimizer)
    momenta = {name: torch.zeros_like(truth[name]) for name in names}
    beta, steps = run.optimizer.muon_momentum, SIMPLE if "simple" in flags else QUINTIC
    for _ in range(3):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss_of(ddp, run).backward()
        for name, weight in truth.items():
            weight.grad = own[name].main_grad.clone()
        optimizer.step()
        adam.step()
        for name, momentum in momenta.items():
            weight = truth[name].detach()
            gradient = own_gradient(truth[name])
            momentum.mul_(beta).add_(gradient, alpha=1 - beta)
            ahead = beta * momentum + (1 - beta) * gradient if "nesterov" in flags else momentum
            weight.mul_(1 - 1e-2 * 0.1)
            for rows in parts_of_weight(name, weight, transformer_config, split):
                move = plain_direction(ahead[rows], steps, scale) * factor
                weight[rows] -= (1e-2 * move).float()
    for name, want in truth.items():
        near(own[name], want, name, 2e-6)


def own_gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --disable-bias-linear --normalization RMSNorm --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 "
    "--lr 1e-2 --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 32 "
    "--num-workers 0 --log-interval 1 --eval-iters 0 --save-interval 2 "
    "--optimizer muon --muon-use-nesterov --muon-extra-scale-factor 0.2"
).split()
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48"
SHARED = "--use-distributed-optimizer"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
DEPTH = "--mtp-num-layers 1 --position-embedding-type rope"
LATENT = (
    f"{EXPERTS} --multi-latent-attention --no-group-query-attention --qk-layernorm --qk-head-dim 8 "
    "--q-lora-rank 24 --kv-lora-rank 16 --qk-pos-emb-head-dim 4 --v-head-dim 12 "
    "--position-embedding-type rope --moe-shared-expert-intermediate-size 32"
)
DEEP, CHUNKS = "--num-layers 4", "--num-layers-per-virtual-pipeline-stage 1"


def tensors(flags: str, folder: Path, ranks: int = 1) -> dict[str, Tensor]:
    """Train, and return all tensors of the last checkpoint: weights and the optimizer's state."""
    train_steps([*MODEL, *flags.split()], folder, ranks)
    return whole_tensors(folder_of(folder, 4), folder / "whole.pt")


def check_same(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name in want:
        if not name.startswith("optimizer"):
            torch.testing.assert_close(found[name], want[name], rtol=0, atol=1e-6, msg=name)


OneRank = Callable[[str], dict[str, Tensor]]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    """Return a function from the flags of a model to the tensors of one rank."""
    return functools.cache(lambda model: tensors(model, tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize(
    ("model", "layout", "size"),
    [
        ("", f"{TP2} --sequence-parallel", 2),
        ("", f"{TP2} --muon-tp-mode distributed {SHARED}", 2),
        ("", "", 2),
        ("", SHARED, 2),
        ("", f"{TP2} {SHARED}", 4),
        (EXPERTS, f"--expert-model-parallel-size 2 {SHARED}", 2),
        (EXPERTS, f"{TP2} --sequence-parallel --expert-model-parallel-size 2", 4),
        (DEPTH, f"{PP2} {SHARED}", 2),
        pytest.param(
            LATENT,
            f"{TP2} --sequence-parallel --expert-model-parallel-size 2 {SHARED}",
            4,
            id="latent attention and shared experts",
        ),
        pytest.param(DEEP, f"{PP2} {CHUNKS}", 2, marks=pytest.mark.slow),
    ],
)
def test_a_layout_updates_as_one_rank_does(
    model: str, layout: str, size: int, one_rank: OneRank, tmp_path: Path
) -> None:
    check_same(tensors(f"{model} {layout}", tmp_path, size), one_rank(model))


def test_blocks_of_ranks_are_another_update(one_rank: OneRank, tmp_path: Path) -> None:
    found = tensors(f"{TP2} --muon-tp-mode blockwise", tmp_path, 2)
    name = "decoder.layers.mlp.linear_fc2.weight"
    assert (found[name] - one_rank("")[name]).abs().max() > 1e-3


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_layout(one_rank: OneRank, tmp_path: Path) -> None:
    """It holds a momentum for each matrix, and no second moment, from any optimizer."""
    first = tmp_path / "first"
    both = [tensors(SHARED, first, 2), one_rank("")]
    for found in both:
        kept = [name for name in found if name.startswith("optimizer.state.exp_avg_sq")]
        assert kept and not any("linear" in name and "layer_norm" not in name for name in kept)
        assert "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight" in found
    load = f"--load {first} --ckpt-step 2"
    check_same(tensors(f"{TP2} {SHARED} {load}", tmp_path / "again", 2), one_rank(""))


def muon_of(weight: Tensor, **given: Any) -> Muon:
    """Return Muon with one matrix, on one rank."""
    parameter = torch.nn.Parameter(weight.clone())
    muon = Muon([parameter], lr=0.1, weight_decay=0.5, **given)
    matrix = Matrix(parameter, (weight.size(0),), None, 0)
    flags = gpt_config("--optimizer", "muon").optimizer
    muon.take([Shard(parameter, parameter)], {parameter: matrix}, flags)
    return muon


def test_the_device_divides_gradients_and_skips_updates() -> None:
    """They are given as torch's fused Adam is given them."""
    random = torch.Generator().manual_seed(3)
    weight, gradient = (torch.randn(6, 4, generator=random) for _ in range(2))
    plain, told = muon_of(weight), muon_of(weight, fused=True)
    (a,), (b,) = (muon.param_groups[0]["params"] for muon in (plain, told))
    a.grad, b.grad = gradient.clone(), 4 * gradient
    plain.step()
    told.grad_scale, told.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    told.step()
    torch.testing.assert_close(b, a)
    before = b.clone(), told.state[b]["exp_avg"].clone()
    b.grad, told.found_inf = torch.full_like(b, math.nan), torch.tensor(1.0)
    told.step()
    assert torch.equal(b, before[0]) and torch.equal(told.state[b]["exp_avg"], before[1])
    assert told.state[b]["step"] == 1


def test_work_is_dealt_evenly_and_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealing, "ROUND", 90)  # Two matrices of 5 rows fill a round exactly.
    shards = []
    for rows in (12, 9, 5, 5, 3, 2):
        parameter = torch.nn.Parameter(torch.zeros(rows, 9))
        shards.append((Matrix(parameter, (rows,), None, 0), Shard(parameter, parameter)))
    rounds = dealing.deal(shards, None)
    found = [[each.matrix.parameter.size(0) for each in one] for one in rounds]
    assert found == [[12], [9], [5, 5], [3, 2]]
    pieces = (slice(0, 0), slice(0, 0))
    dealt = [dealing.Dealt(matrix, shard, pieces) for matrix, shard in shards]
    queues = dealing._queues(dealt, 2)
    work = [sum(each.matrix.operations for each in queue) for queue in queues]
    assert max(work) < 1.1 * min(work)


@ranks(dp=3)
def test_pieces_of_three_ranks_become_whole_matrices_and_pieces_again(
    context: ParallelContext,
) -> None:
    group, rank = context.pgs.dp, context.dp_rank
    whole = [torch.arange(size * 4.0).view(size, 4) + size for size in (5, 3, 4, 2)]
    # The last matrix, of the rank with the least work, lies on its owner alone.
    ends = [(0, 7, 7, 20), (0, 0, 1, 12), (0, 16, 16, 16), (0, 0, 0, 8)]
    shards = []
    for tensor, at in zip(whole, ends, strict=True):
        parameter = torch.nn.Parameter(tensor)
        piece = tensor.flatten()[at[rank] : at[rank + 1]]
        matrix = Matrix(parameter, (tensor.size(0),), None, 0)
        shards.append((matrix, Shard(parameter, piece, at[rank], group)))
    (dealt,) = dealing.deal(shards, group)
    assert sorted(each.owner for each in dealt) == [0, 1, 2, 2]
    assert [each.is_whole for each in dealt] == [False, False, False, True]
    found = dealing.gather(dealt, [each.shard.main for each in dealt], group)
    owned = [each for each in dealt if each.owner == rank]
    for each, tensor in zip(owned, found, strict=True):
        assert torch.equal(tensor, each.matrix.parameter.detach().flatten())
    pieces = dealing.scatter(dealt, [-tensor for tensor in found], group, torch.float32)
    for each, piece in zip(dealt, pieces, strict=True):
        assert torch.equal(piece, -each.shard.main)


class _Ranks:
    """A group of a size, without communication."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def test_work_is_that_of_the_whole_matrices_of_all_ranks() -> None:
    """A product with a Gram matrix of the shorter side takes short * short * long operations."""

    def work(rows: tuple[int, ...], columns: int, dim: int, ranks: int) -> int:
        parameter = torch.nn.Parameter(torch.zeros(sum(rows), columns))
        group: Any = _Ranks(ranks) if ranks > 1 else None
        return Matrix(parameter, rows, group, dim).operations

    assert work((3,), 8, 0, 1) == 3 * 3 * 8
    assert work((3,), 8, 0, 2) == 6 * 6 * 8
    assert work((3,), 8, 1, 2) == 3 * 3 * 16
    assert work((6, 2, 2), 4, 0, 2) == 4 * 4 * 12 + 2 * (4 * 4 * 4)


class _Fused(torch.nn.Module):
    """A module with everything that decides what Muon updates."""

    fused_parts = (4, 2)

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6, 3))
        self.bias = torch.nn.Parameter(torch.zeros(6))
        self.table = torch.nn.Parameter(torch.zeros(5, 3))
        self.table.is_table = True
        self.words = torch.nn.Embedding(7, 3)
        self.frozen = torch.nn.Linear(3, 2).requires_grad_(False)
        self.plain = torch.nn.Linear(3, 4)


def _groups(tp: int, expt_tp: int) -> Any:
    return SimpleNamespace(tp=_Ranks(tp), expt_tp=_Ranks(expt_tp))


def test_trained_matrices_that_are_no_tables_are_those_of_muon() -> None:
    chunk = _Fused()
    for split, rows in ((True, (4, 2)), (False, (6,))):
        found = matrices_of(chunk, _groups(2, 2), split_qkv=split)
        assert {id(weight) for weight in found} == {id(chunk.weight), id(chunk.plain.weight)}
        assert found[chunk.weight].rows == rows and found[chunk.plain.weight].rows == (4,)
        assert all(matrix.group is None for matrix in found.values())


class _MoELayer(BaseMoELayer):  # type: ignore[misc]
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.experts = torch.nn.Linear(3, 4, bias=False)
        self.dense = torch.nn.Linear(3, 4, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


def test_experts_are_shared_by_ranks_of_their_own_group() -> None:
    layer = _MoELayer()
    expert, dense = layer.experts.weight, layer.dense.weight
    for weight in (expert, dense):
        weight.tensor_model_parallel, weight.partition_dim = True, 1  # type: ignore[attr-defined]
    groups = _groups(2, 4)
    found = matrices_of(layer, groups, split_qkv=True)
    assert (found[expert].group, found[expert].dim) == (groups.expt_tp, 1)
    assert (found[dense].group, found[dense].dim) == (groups.tp, 1)
    whole = matrices_of(layer, _groups(2, 1), split_qkv=True)[expert]
    assert (whole.group, whole.dim) == (None, 0)


class _MLP(torch.nn.Module):
    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(gated_linear_unit=gated)
        self.linear_fc1 = torch.nn.Linear(3, 8)


def test_only_gated_layers_fuse_two_matrices() -> None:
    for gated, rows in ((True, (4, 4)), (False, (8,))):
        (matrix,) = matrices_of(_MLP(gated=gated), _groups(1, 1), split_qkv=True).values()
        assert matrix.rows == rows


@pytest.mark.parametrize(("gated", "rows"), [(False, (6, 2, 2)), (True, (6, 6, 2, 2))])
def test_gates_of_heads_are_a_matrix_of_their_own(gated: bool, rows: tuple[int, ...]) -> None:
    layer = torch.nn.Module()
    sizes = {"num_attention_heads": 6, "num_query_groups": 2, "attention_output_gate": gated}
    layer.config = SimpleNamespace(**sizes)  # type: ignore[assignment]
    layer.hidden_size_per_attention_head = 2  # type: ignore[assignment]
    layer.linear_qkv = torch.nn.Linear(3, 2 * sum(rows))
    (matrix,) = matrices_of(layer, _groups(1, 1), split_qkv=True).values()
    assert matrix.rows == rows
    # An adapter of the queries is that of their gates, too.
    ((_, of_adapters),) = fused_rows(layer, split_qkv=True, split_gates=False)
    assert of_adapters == (sum(rows) - 4, 2, 2)


def test_a_run_with_kernels_writes_the_copies_in_16_bits() -> None:
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    muon = muon_of(weight, make_kernel=lambda: lambda _entries, _settings: None)
    (main,) = muon.param_groups[0]["params"]
    muon.copies = {main: torch.zeros(6, 4, dtype=torch.bfloat16)}
    main.grad = torch.ones(6, 4)
    muon.step()
    assert not torch.equal(main, weight)
    assert torch.equal(muon.copies[main], main.bfloat16())


@ranks()
def test_the_matrices_of_every_virtual_chunk_are_updated(context: ParallelContext) -> None:
    run = gpt_config("--optimizer", "muon", *CONSTANT)
    transformer_config = build_transformer_config(run)
    chunks = wrap_chunks(
        [bare_chunk(run, context) for _ in range(2)],
        run,
        transformer_config,
        context,
        torch.device("cpu"),
    )
    optimizer = build_optimizer(run, chunks, context.pgs)
    weights = set().union(*(part.optimizer.weights for part in parts_of(optimizer)))
    for chunk in chunks:
        own = {w for name, w in chunk.named_parameters() if ".linear_" in name and w.dim() == 2}
        assert own and own <= weights
