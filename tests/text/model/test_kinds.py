"""Layers of any kind train alike on every layout, and go on in another one.

The truth of single parts is a GPT, whose layers compute the same with the same weights. The
mixers' own truths are in `tests.layers.mixers`, and those of whole models in
`tests.text.convert`.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.config.hybrid import HybridConfig
from megatron_ext.text.model.gpt import build_gpt_chunk
from tests.ranks import ranks
from tests.text.model.test_gpt import built, losses_of
from tests.training_runs import SMALL, config_of, curve, train_steps, without

BASE = [
    *without(
        SMALL, "--num-layers", "--train-iters", "--lr", "--attention-dropout", "--hidden-dropout"
    ),
    *"--train-iters 3 --lr 1e-3 --eval-iters 0 --attention-dropout 0.1".split(),
    *"--hidden-dropout 0.1 --deterministic-dropout --position-embedding-type rope".split(),
]
HEADS = (
    "--linear-num-key-heads 2 --linear-num-value-heads 2 --linear-key-head-dim 8 "
    "--linear-value-head-dim 8 --mamba-num-heads 4 --mamba-num-groups 2 --mamba-head-dim 8 "
    "--mamba-state-dim 8"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-aux-loss-coeff 0.01"
SPARSE = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --rope-type rope --dsa-indexer-n-heads 2 "
    "--dsa-indexer-head-dim 8 --dsa-indexer-topk 4 --dsa-indexer-loss-coeff 0.1"
)
FLAGS = {
    "M-*G-K-/*-": HEADS,
    "ME-GE*E/GE": f"{HEADS} {EXPERTS}",
    "D-*-D-D-": SPARSE,
}
"""Pattern -> the flags that it needs."""
TP, PP, CP = (f"--{axis}-parallel-size 2" for axis in ("tensor-model", "pipeline-model", "context"))
PACKED = "--reset-attention-mask --reset-position-ids"


@pytest.fixture(scope="module")
def truths() -> dict[str, list[tuple[float, float]]]:
    """Return losses and gradient norms on one rank by flags, filled as they are asked for."""
    return {}


@pytest.mark.parametrize(
    ("number", "pattern", "layout"),
    [
        (2, "M-*G-K-/*-", f"{TP} --sequence-parallel"),
        (2, "M-|*G-K-/*-", PP),
        pytest.param(2, "M-|*|G-|K-", PP, marks=pytest.mark.slow),
        (4, "M-*G-K-/*-", f"{TP} {CP} {PACKED}"),
        (2, "M-*G-K-/*-", "--recompute-granularity full --recompute-method uniform "
         "--recompute-num-layers 2"),
        pytest.param(
            2, "ME-GE*E/GE",
            f"{TP} --sequence-parallel --expert-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1", marks=pytest.mark.slow,
        ),
        (4, "ME-|GE*E/GE", f"{PP} {CP} --expert-model-parallel-size 2"),
        (2, "D-*-D-D-", f"{CP} {PACKED}"),
        pytest.param(2, "D-*-D-D-", f"{TP} --sequence-parallel", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_layout_trains_as_one_rank(
    number: int,
    pattern: str,
    layout: str,
    truths: dict[str, list[tuple[float, float]]],
    tmp_path: Path,
) -> None:
    plain = pattern.replace("|", "")
    flags = FLAGS.get(plain, HEADS)
    packed = PACKED if PACKED in layout else ""
    truth = f"--hybrid-layer-pattern {plain} {flags} {packed}"
    if truth not in truths:
        truths[truth] = curve([*BASE, *truth.split()], tmp_path / "one")
    words = [*BASE, "--hybrid-layer-pattern", pattern, *flags.split(), *layout.split()]
    mine = curve(words, tmp_path / "many", number)
    assert len(mine) == 3
    for row, want in zip(mine, truths[truth], strict=True):
        assert row == pytest.approx(want, rel=1e-6)


def _in_turns(folder: Path, *runs: str) -> list[tuple[float, float]]:
    """Run a step of each of the given flags on two ranks, each from the checkpoint before."""
    rows = []
    for step, flags in enumerate(runs, start=1):
        load = ["--load", str(folder)] if step > 1 else []
        words = [*BASE, *flags.split(), *load, "--exit-interval", str(step)]
        rows = train_steps(words, folder, 2)
    return [(row["lm loss"], row["grad_norm"]) for row in rows]


@pytest.mark.parametrize("pattern", ["M-*G-K-/*-", "D-*-D-D-"])
def test_a_run_goes_on_in_another_layout(pattern: str, tmp_path: Path) -> None:
    flags = f"--hybrid-layer-pattern {pattern} {FLAGS[pattern]} --use-distributed-optimizer"
    tensor = f"{flags} {TP} --sequence-parallel"
    mixed = _in_turns(tmp_path / "mixed", tensor, f"{flags} {PP}", f"{flags} {CP}")
    alone = _in_turns(tmp_path / "alone", tensor, tensor, tensor)
    assert len(mixed) == 3
    for mine, want in zip(mixed, alone, strict=True):
        assert mine == pytest.approx(want, rel=1e-6)


@ranks()
def test_layers_with_one_part_compute_what_those_of_a_gpt_do(context: ParallelContext) -> None:
    """Layers 2i and 2i + 1 have the attention and the MLP of the GPT's layer i."""
    words = [*SMALL, "--padded-vocab-size", "128"]
    whole = built(context, *words)
    config = config_of(words)
    kinds = ("*", "-") * (config.model.num_layers or 0)
    model = replace(config.model, num_layers=len(kinds))
    config = replace(config, model=model).with_section(HybridConfig(layer_kinds=kinds))
    (parts,) = build_chunks(build_gpt_chunk, config, build_transformer_config(config), context)
    own = dict(parts.named_parameters())

    def twin(name: str) -> str:
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer is None:
            return name
        of_mlp = ".mlp." in name or "pre_mlp" in name
        return name.replace(layer[0], f"layers.{2 * int(layer[1]) + of_mlp}.")

    pairs = [(x, own.pop(twin(name))) for name, x in whole.named_parameters()]
    assert not own
    with torch.no_grad():
        for theirs, mine in pairs:
            mine.copy_(theirs)
    assert torch.equal(losses_of(parts), losses_of(whole))
    for theirs, mine in pairs:
        assert torch.equal(mine.grad, theirs.grad)
