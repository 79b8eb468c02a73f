"""Losses and gradients of multi-token prediction against a dense model in plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.core import MTP_LAYER
from megatron_ext.data.batch import Batch
from megatron_ext.device import select
from megatron_ext.inspect import parity
from megatron_ext.inspect.layouts import parse_layout
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.initialization import shards_of
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext, embedding_ranks
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.task import GPT
from megatron_ext.train.main import preflight
from megatron_ext.train.run import Run
from megatron_ext.train.setup import build_run
from tests.layers.plain import PlainBlock, causal
from tests.ranks import run_on_ranks
from tests.training_runs import mock_data, prepared

LENGTH, ROWS = 32, 16
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 48 --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type none "
    f"--seq-length {LENGTH} --max-position-embeddings {LENGTH} --attention-dropout 0 "
    f"--hidden-dropout 0 --micro-batch-size 2 --global-batch-size {ROWS} --lr 1e-3 "
    "--num-workers 0 --split 90,5,5 --eval-iters 0"
).split()
RAGGED = "--mtp-num-layers 2 --eod-mask-loss".split()
LOSSES = ("lm loss", "mtp_1 loss", "mtp_2 loss")
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def config_of(*more: str, num_ranks: int = 1) -> RunConfig:
    flags = [*MODEL, *mock_data(), *more, "--train-iters", "1", "--nproc-per-node", str(num_ranks)]
    return prepared(flags)[1]


def run_layout(name: str, folder: Path, *more: str) -> parity.Recording:
    found = parity.record(
        GPT, [*MODEL, *mock_data(), *more], parse_layout(name), 1, folder, select()
    )
    assert found.failure is None, found.failure
    return found


def on_one_rank(body: Any, config: RunConfig, **arguments: Any) -> None:
    """Call ``body(run, **arguments)`` with a run of one rank."""

    def with_run(context: ParallelContext) -> None:
        tokenizer = preflight(config, GPT.preflight)[1]
        body(build_run(config, GPT, context, torch.device("cpu"), tokenizer), **arguments)

    run_on_ranks(with_run, Layout(world_size=1), {})


def whole_batch(run: Run) -> Batch:
    batches = run.train_source.next_step(run.batch_size.num_microbatches)
    names = ("tokens", "labels", "loss_weights", "position_ids")
    return Batch(*(torch.cat([getattr(batch, name) for batch in batches]) for name in names))


class DenseModel:
    """The whole model in float64, by the formulas of DeepSeek-V3's report (2.2)."""

    def __init__(self, parameters: dict[str, Tensor], config: RunConfig) -> None:
        self.leaves = {
            name: parameter.detach().double().requires_grad_()
            for name, parameter in parameters.items()
        }
        model = config.model
        self.sizes: Any = (
            model.hidden_size,
            model.num_attention_heads,
            model.num_query_groups,
            model.ffn_hidden_size,
        )
        self.layers, self.depths = model.num_layers, model.mtp_num_layers or 0

    def block(self, prefixes: dict[str, str], layers: int) -> PlainBlock:
        """A stack of layers with the weights under these prefixes, each replaced by its value."""
        weights = {
            new + name.removeprefix(old): leaf
            for old, new in prefixes.items()
            for name, leaf in self.leaves.items()
            if name.startswith(old)
        }
        return PlainBlock(*self.sizes, layers=layers, weights=weights)

    def embed(self, tokens: Tensor) -> Tensor:
        """Map ``[b, s]`` to ``[s, b, h]``."""
        return self.leaves["embedding.word_embeddings.weight"][tokens].transpose(0, 1)

    def token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return cross-entropy ``[b, s]``."""
        logits = hidden @ self.leaves["output_layer.weight"].T
        return F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")

    def means(self, batch: Batch) -> list[Tensor]:
        size, length = batch.tokens.shape
        forbidden = causal(length, size)
        hidden = self.block({"decoder.": ""}, self.layers)(self.embed(batch.tokens), forbidden)
        losses = self.token_losses(hidden, batch.labels)
        means = [(losses * batch.loss_weights).sum() / batch.loss_weights.sum()]
        for depth in range(1, self.depths + 1):
            kept = length - depth
            prefix = f"mtp.layers.{depth - 1}."
            layer = {
                f"{prefix}{MTP_LAYER}.": "layers.0.",
                f"{prefix}final_layernorm": "final_layernorm",
            }
            block = self.block({**layer, prefix: ""}, 1)
            later = torch.zeros_like(batch.tokens)
            later[:, :kept] = batch.tokens[:, depth:]
            both = (block.norm("enorm", self.embed(later)), block.norm("hnorm", hidden))
            joined = torch.cat(both, dim=-1) @ self.leaves[f"{prefix}eh_proj.weight"].T
            hidden = block(joined, forbidden)
            losses = self.token_losses(hidden[:kept], batch.labels[:, depth:])
            mask = batch.loss_weights[:, depth:]
            means.append((losses * mask).sum() / mask.sum())
        return means


def save_dense(run: Run, path: Path) -> None:
    (chunk,) = [wrapped.module for wrapped in run.chunks]
    parameters = dict(chunk.named_parameters())
    dense = DenseModel(parameters, run.config)
    means = dense.means(whole_batch(run))
    factor = run.config.model.mtp_loss_scaling_factor / dense.depths
    torch.autograd.backward(means[0] + factor * sum(means[1:]))
    gradients = {id(p): dense.leaves[name].grad.float() for name, p in parameters.items()}
    shards = shards_of(chunk, lambda parameter: gradients[id(parameter)])
    named = {shard.name: shard.tensor for shard in shards}
    torch.save({"means": [float(mean.detach()) for mean in means], "gradients": named}, path)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("dense") / "dense.pt"
    on_one_rank(save_dense, config_of(*RAGGED), path=path)
    return dict(torch.load(path))


@pytest.mark.parametrize("layout", ["mbs1", "mbs8", "cp2", "dp2", "pp2"])
def test_losses_and_gradients_are_those_of_a_dense_model(
    layout: str, dense: dict[str, Any], tmp_path: Path
) -> None:
    mine = run_layout(layout, tmp_path / "run", *RAGGED)
    assert [mine.rows[0][key] for key in LOSSES] == pytest.approx(dense["means"], rel=1e-5)
    gradients = parity.read_gradients(mine.folder, 1)
    assert gradients.keys() == dense["gradients"].keys()
    worst = {
        name: parity.gradient_difference(grad, dense["gradients"][name])
        for name, grad in gradients.items()
    }
    assert max(worst.values()) <= 1e-5, max(worst, key=lambda name: worst[name])


def test_d11_full_recomputation_changes_nothing(tmp_path: Path) -> None:
    truth = run_layout("dp1", tmp_path / "kept", *RAGGED)
    mine = run_layout("dp1", tmp_path / "again", *RAGGED, *RECOMPUTE.split())
    found = parity.compare(mine, truth, parity.Tolerances(loss=1e-6, gradient=1e-6))
    assert found.passed, (found.problem, found.first)


PIPELINE = "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Ett|mm|L"


def build(context: ParallelContext, config: RunConfig) -> Any:
    transformer_config = build_transformer_config(config)
    (chunk,) = build_chunks(GPT.model_chunk, config, transformer_config, context)
    return chunk


def tokens_and_positions() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 2000, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    return tokens, torch.arange(LENGTH).expand(2, -1)


def save_logits(context: ParallelContext, config: RunConfig, path: Path) -> None:
    chunk = build(context, config)
    tokens, positions = tokens_and_positions()
    logits = chunk(tokens, positions, None)
    losses = chunk(tokens, positions, None, labels=tokens)
    assert torch.equal(chunk.eval()(tokens, positions, None), logits)
    plain = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    assert torch.allclose(losses, plain, rtol=1e-5, atol=1e-6)
    torch.save(logits.detach(), path)


def check_pipeline_logits(context: ParallelContext, config: RunConfig, path: Path) -> None:
    chunk = build(context, config)
    tokens, positions = tokens_and_positions()
    for training in (True, False):
        chunk.train(training)
        parts = 3 if training and context.is_last_stage else 1
        if not context.is_first_stage:
            entering = torch.empty(parts * LENGTH, 2, 32)
            torch.distributed.recv(entering, context.rank - 1)
            chunk.set_input_tensor(entering)
        output = chunk(tokens, positions, None).detach()
        if not context.is_last_stage:
            torch.distributed.send(output, context.rank + 1)
        else:
            assert torch.allclose(output, torch.load(path), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("depths", ["0", "2"])
def test_d12_without_labels_a_model_gives_the_logits_of_one_without_depths(
    depths: str, tmp_path: Path
) -> None:
    logits = []
    for name, flags in (("without", []), ("with", ["--mtp-num-layers", depths])):
        path = tmp_path / name
        run_on_ranks(save_logits, Layout(world_size=1), {"config": config_of(*flags), "path": path})
        logits.append(torch.load(path))
    assert torch.equal(*logits)


def test_d12_without_labels_on_a_stage_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "one.pt"
    run_on_ranks(save_logits, Layout(world_size=1), {"config": config_of(), "path": path})
    config = config_of("--mtp-num-layers", "2", *PIPELINE.split(), num_ranks=3)
    run_on_ranks(
        check_pipeline_logits,
        Layout.from_config(config.parallel),
        {"config": config, "path": path},
        get_embedding_ranks=embedding_ranks(config.model, config.parallel),
    )
