"""Families with recurrent layers train in every layout as on one rank.

A step is one of plain gradient descent, so that weights change by their gradients, times a rate so
large that the rounding of the weights does not matter.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.text.convert.models import make_tiny
from tests.text.convert.settings.mixers import SETTINGS
from tests.training_runs import curve

FAMILIES = ("qwen3_next", "kimi_linear", "qwen3_5_text", "qwen3_5_moe_text")
RATE = 1000
FLAGS = (
    "--seq-length 32 --micro-batch-size 1 --global-batch-size 4 --mock-data --split 100,0,0 "
    "--tokenizer-type NullTokenizer --vocab-size 299 --num-workers 0 --eval-iters 0 "
    f"--log-interval 1 --train-iters 1 --optimizer sgd --sgd-momentum 0 --lr {RATE} "
    f"--min-lr {RATE} --lr-decay-style constant --weight-decay 0 --clip-grad 0 "
    "--attention-dropout 0 "
    "--hidden-dropout 0 --accumulate-allreduce-grads-in-fp32 --moe-router-bias-update-rate 0 "
    "--moe-router-load-balancing-type none --reset-attention-mask --eod-mask-loss"
).split()
TP, SP, PP, CP = (
    "--tensor-model-parallel-size 2", "--sequence-parallel", "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
)  # fmt: skip
EP, ETP = "--expert-model-parallel-size 2", "--expert-tensor-parallel-size 1"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
VPP = "--num-virtual-stages-per-pipeline-rank 2"
LAYOUTS = {
    "tp2": (2, TP),
    "tp2sp": (2, f"{TP} {SP}"),
    "pp2": (2, PP),
    "pp2vpp2": (2, f"{PP} {VPP}"),
    "cp2": (2, CP),
    "cp4": (4, f"--context-parallel-size 4 {FULL}"),
    "dp2": (2, ""),
    "ep2": (2, EP),
    "tp2cp2": (4, f"{TP} {SP} {CP}"),
    "tp2pp2ep2": (4, f"{TP} {SP} {PP} {EP} {ETP}"),
    "pp2cp2ep2": (4, f"{PP} {CP} {EP}"),
    "tp2pp2cp2": (8, f"{TP} {SP} {PP} {VPP} {CP}"),
    "cp2pp2dp2": (8, f"{CP} {PP} {FULL}"),
}
"""Ranks and flags of layouts, which cut sequences with several documents."""
QUICK = {("qwen3_next", "tp2cp2"), ("kimi_linear", "cp4"), ("qwen3_next", "tp2pp2ep2")}


def trained(source: Path, root: Path, words: str, ranks: int) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a step, and the weights after it; check its gradient norm."""
    flags = ["--load-hf", str(source), *FLAGS, *words.split(), "--save-hf", str(root / "hf")]
    ((loss, norm),) = curve(flags, root, ranks)
    before = load_file(source / "model.safetensors")
    after = load_file(root / "hf" / "iter_0000001" / "model.safetensors")
    gradients = {x: (before[x].double() - after[x].double()) / RATE for x in before}
    total = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    assert norm == pytest.approx(total, rel=1e-6)
    return loss, {**gradients, "norm": torch.tensor(norm, dtype=torch.float64)}


def compare(source: Path, tmp_path: Path, layouts: list[str]) -> None:
    loss, gradients = trained(source, tmp_path / "one", "", 1)
    for layout in layouts:
        ranks, words = LAYOUTS[layout]
        if source.name == "dense":
            words = words.replace(EP, "").replace(ETP, "")
        elif layout == "tp2":
            words += f" {SP} {ETP}"
        found, own = trained(source, tmp_path / layout, words, ranks)
        assert found == pytest.approx(loss, rel=1e-6), layout
        assert float(own["norm"]) == pytest.approx(float(gradients["norm"]), rel=1e-6), layout
        for name, gradient in gradients.items():
            error = float((own[name] - gradient).abs().max())
            assert error <= 1e-5 * float(gradient.abs().max()), (layout, name)


def made(name: str, folder: Path) -> Path:
    kind = "dense" if name == "qwen3_5_text" else "moe"
    return make_tiny({"model_type": name, **SETTINGS[name][0]}, folder / kind)


@pytest.mark.parametrize(("name", "layout"), sorted(QUICK))
def test_a_step_is_that_of_one_rank(name: str, layout: str, tmp_path: Path) -> None:
    compare(made(name, tmp_path), tmp_path, [layout])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_in_every_layout_is_that_of_one_rank(name: str, tmp_path: Path) -> None:
    compare(made(name, tmp_path), tmp_path, list(LAYOUTS))
