"""A GPT as megatron-core's HybridModel trains as our GPTModel does, in any layout.

The truth is GPTModel on one rank: a run of its own, with other classes of layers and blocks.
"""

from pathlib import Path

import pytest

from megatron_ext.text.hybrid import HAS_HYBRID_MODEL
from tests.training_runs import SMALL, curve, train_steps, without

pytestmark = pytest.mark.skipif(
    not HAS_HYBRID_MODEL, reason="this release of megatron-core has no HybridModel"
)

BASE = [
    *without(
        SMALL, "--num-layers", "--train-iters", "--lr", "--attention-dropout", "--hidden-dropout"
    ),
    *"--train-iters 3 --lr 1e-3 --eval-iters 0 --attention-dropout 0.1".split(),
    *"--hidden-dropout 0.1 --deterministic-dropout --position-embedding-type rope".split(),
]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-aux-loss-coeff 0.01"
DENSE, MIXED, MTP = "*-*-*-*-", "*-*E*-*E", "*-*-*-*-/*-/*-"
GPT = {
    DENSE: "--num-layers 4",
    MIXED: f"--num-layers 4 {EXPERTS} --moe-layer-freq [0,1,0,1]",
    MTP: "--num-layers 4 --mtp-num-layers 2",
}
"""Pattern -> the flags of the same GPT."""

TP, PP, CP = (f"--{axis}-parallel-size 2" for axis in ("tensor-model", "pipeline-model", "context"))
PLAIN = "--no-use-distributed-optimizer"
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[float, float]]]:
    """Return losses and gradient norms of the GPTs by their flags, filled as they are asked for."""
    return {}


@pytest.mark.parametrize(
    ("ranks", "pattern", "layout"),
    [
        (1, DENSE, ""),
        (2, DENSE, TP),
        (2, DENSE, f"{TP} --sequence-parallel"),
        (2, "*-*-|*-*-", PP),
        pytest.param(2, "*-|*-*-*-", PP, marks=pytest.mark.slow),
        (2, "*-|*-|*-|*-", PP),
        (2, DENSE, f"{PP} --num-virtual-stages-per-pipeline-rank 2"),
        pytest.param(2, DENSE, f"{PP} --pipeline-schedule zb-h1", marks=pytest.mark.slow),
        (2, DENSE, f"{PP} --pipeline-schedule zb-v {UNTIED}"),
        (2, DENSE, CP),
        (2, DENSE, f"{CP} --cp-comm-type a2a"),
        (2, DENSE, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        pytest.param(2, DENSE, PLAIN, marks=pytest.mark.slow),
        (4, DENSE, f"{TP} {PP} --sequence-parallel"),
        pytest.param(4, "*-*-|*-*-", f"{CP} {PP} {PLAIN}", marks=pytest.mark.slow),
        (1, DENSE, "--recompute-granularity full --recompute-method uniform "
         "--recompute-num-layers 3"),
        (1, DENSE, "--recompute-granularity selective --recompute-modules core_attn mlp"),
        (1, MIXED, ""),
        (2, MIXED, f"{TP} --sequence-parallel"),
        (2, MIXED, "--expert-model-parallel-size 2"),
        pytest.param(2, "*-*E|*-*E", PP, marks=pytest.mark.slow),
        (1, MTP, ""),
        (2, MTP, f"{TP} --sequence-parallel"),
        (2, "*-|*-|*-|*-/*-/*-", PP),
        pytest.param(2, MTP, CP, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_layout_trains_as_the_gpt_on_one_rank(
    ranks: int,
    pattern: str,
    layout: str,
    truths: dict[str, list[tuple[float, float]]],
    tmp_path: Path,
) -> None:
    plain = pattern.replace("|", "")
    experts = EXPERTS if "E" in plain else ""
    tied = UNTIED if UNTIED in layout else ""
    flags = f"{GPT[plain]} {tied}"
    if flags not in truths:
        truths[flags] = curve([*BASE, *flags.split()], tmp_path / "gpt")
    words = [*BASE, "--hybrid-layer-pattern", pattern, *experts.split(), *layout.split()]
    mine = curve(words, tmp_path / "hybrid", ranks)
    worst = [
        max(abs(a / b - 1) for a, b in zip(one, two, strict=True))
        for one, two in zip(zip(*mine, strict=True), zip(*truths[flags], strict=True), strict=True)
    ]
    assert len(mine) == 3
    assert max(worst) <= 1e-6, worst


@pytest.mark.parametrize(
    "options",
    [
        "--softmax-type learnable --embedding-multiplier 4 --window-size 7 0 "
        "--window-attn-skip-freq [1,0]*2 --rope-local-base-freq 500 --no-rope-freq 3 "
        '--rope-scaling {"rope_type":"linear","factor":2.5} --attn-logit-softcapping 2',
        "--use-rope-scaling --rotary-interleaved --rotary-percent 0.5 --normalization RMSNorm "
        "--swiglu --qk-layernorm --window-size 7 0 --window-attn-skip-freq 2",
        "--bf16 --fp32-residual-connection --apply-query-key-layer-scaling --lora-rank 2",
        "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --num-layers-at-start-in-bf16 1 "
        "--first-last-layers-bf16 --cross-entropy-impl chunked",
        "--position-embedding-type learned_absolute --use-cpu-initialization --ema-decay 0.9",
        "--reset-attention-mask --reset-position-ids --init-method-xavier-uniform --untie-"
        "embeddings-and-output-weights",
    ],
)
def test_options_of_layers_do_what_they_do_in_the_gpt(options: str, tmp_path: Path) -> None:
    pattern = [*BASE, "--hybrid-layer-pattern", DENSE, *options.split()]
    truth = curve([*BASE, *GPT[DENSE].split(), *options.split()], tmp_path / "gpt")
    assert curve(pattern, tmp_path / "hybrid") == truth


def _in_turns(folder: Path, *runs: str) -> list[tuple[float, float]]:
    """Run a step of each of the given flags on two ranks, each from the checkpoint before."""
    rows = []
    for step, flags in enumerate(runs, start=1):
        load = ["--load", str(folder)] if step > 1 else []
        words = [*BASE, *flags.split(), *load, "--exit-interval", str(step)]
        rows = train_steps(words, folder, 2)
    return [(row["lm loss"], row["grad_norm"]) for row in rows]


def _hybrid(pattern: str) -> str:
    return f"--hybrid-layer-pattern {pattern} {EXPERTS if 'E' in pattern else ''}"


@pytest.mark.parametrize("pattern", [DENSE, MIXED, pytest.param(MTP, marks=pytest.mark.slow)])
def test_either_loads_the_checkpoints_of_the_other(pattern: str, tmp_path: Path) -> None:
    """In one layout, GPT, hybrid and GPT in turns are equal to the bit to GPT alone."""
    layout = f"{TP} --sequence-parallel --use-distributed-optimizer"
    gpt, hybrid = f"{GPT[pattern]} {layout}", f"{_hybrid(pattern)} {layout}"
    mixed = _in_turns(tmp_path / "mixed", gpt, hybrid, gpt)
    assert len(mixed) == 3
    assert mixed == _in_turns(tmp_path / "alone", gpt, gpt, gpt)


def test_checkpoints_go_to_the_other_model_in_another_layout(tmp_path: Path) -> None:
    tensor, cut = f"{TP} --sequence-parallel", f"{_hybrid('*-*E|*-*E')} {PP}"
    mixed = _in_turns(tmp_path / "mixed", f"{_hybrid(MIXED)} {tensor}", f"{GPT[MIXED]} {PP}", cut)
    alone = _in_turns(tmp_path / "alone", *[f"{GPT[MIXED]} {CP}"] * 3)
    assert len(mixed) == 3
    for mine, want in zip(mixed, alone, strict=True):
        assert mine == pytest.approx(want, rel=1e-6)
