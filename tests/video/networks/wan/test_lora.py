"""Adapters of a Wan network in flow matching: as peft's in every layout, merged and exported."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from megatron_ext.errors import CheckpointError
from megatron_ext.layers.initialization import shards_of
from megatron_ext.programs import lora
from megatron_ext.train.run import Run
from megatron_ext.video.convert.adapters import layers_of
from megatron_ext.video.networks.wan.convert.conversion import CONVERSION
from megatron_ext.video.networks.wan.convert.names import BLOCK_MODULES
from tests.training_runs import training_rows
from tests.video.clips import SHORT, write_clips
from tests.video.networks.harness import relative
from tests.video.networks.wan.convert.models import exported, imported, inputs, network
from tests.video.networks.wan.convert.models import theirs as flow_of
from tests.video.wan_run import FRAMES, KINDS, SIZES_OF_CLIPS, microbatch, train

RANK, ALPHA, RATE = 4, 8.0, 1e-2
ADAPTERS = f"--lora-rank {RANK} --lora-alpha {ALPHA:g} --weight-decay 0 --lr {RATE} --clip-grad 1"
APART = "--lora-separate-projections"
STEPS = 3
LAYOUTS = {
    "one rank": (1, ""),
    "tp2 pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2 dp2": (4, "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of diffusers, the checkpoint made of it, and clips."""
    root = tmp_path_factory.mktemp("lora")
    network(SIZES_OF_CLIPS).save_pretrained(root / "diffusers")
    imported(root / "diffusers", root / "ours")
    write_clips(root / "clips", {SHORT: 9})
    return root


def tuned(root: Path, save: Path, steps: int, words: str = "", **options: Any) -> list[Any]:
    flags = (
        f"{KINDS['video-dit']} --pretrained-checkpoint {root / 'ours'} {ADAPTERS} "
        f"--train-iters {steps} {words}"
    )
    return training_rows(train(root / "clips", save, flags, **options))


def record(run: Run, path: Path) -> None:
    """Write down the adapters that a run on one rank starts from, and the clips of its steps."""
    plan: Any = run.train_source
    (chunk,) = run.chunks
    adapters = {
        s.name: s.tensor.detach().clone() for s in shards_of(chunk.module) if ".lora." in s.name
    }
    planned = [plan.video_plan.microbatches(step, 0, 4 * step) for step in range(STEPS)]
    steps = [[(members, list(samples)) for _, members, samples in each] for each in planned]
    torch.save({"adapters": adapters, "steps": steps}, path)


def with_peft(adapters: dict[str, Tensor]) -> Any:
    """Return diffusers' model with peft's adapters on all linear layers of its blocks."""
    pairs = layers_of(CONVERSION, SIZES_OF_CLIPS, RANK).pairs(adapters)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=sorted(pairs))
    model: Any = peft.get_peft_model(network(SIZES_OF_CLIPS), config)
    modules = dict(model.base_model.model.named_modules())
    with torch.no_grad():
        for layer, (a, b) in pairs.items():
            modules[layer].lora_A["default"].weight.copy_(a)
            modules[layer].lora_B["default"].weight.copy_(b)
    return model.double()


def theirs(model: Any, steps: list[Any]) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step with torch's AdamW."""
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, RATE, betas=(0.9, 0.95), eps=1e-15, weight_decay=0)
    rows = []
    for microbatches in steps:
        found = []
        for numbers, samples in microbatches:
            given, velocity = microbatch(numbers, samples, [0] * FRAMES)
            x, times = given["x"].transpose(1, 2), given["timesteps"][:, 0]
            (flow,) = model(x, times, given["text"], return_dict=False)
            found.append((flow.transpose(1, 2) - velocity).square().mean())
        loss = torch.stack(found).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        rows.append((float(loss.detach()), float(norm)))
    return rows


@pytest.fixture(scope="module")
def start(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("truth")
    tuned(root, folder / "save", 1, APART, prepare=partial(record, path=folder / "start.pt"))
    recorded: dict[str, Any] = torch.load(folder / "start.pt")
    return recorded


@pytest.fixture(scope="module")
def truth(start: dict[str, Any]) -> list[tuple[float, float]]:
    assert len(start["adapters"]) == 2 * 2 * sum(
        not re.search("norm|vision", name) for name in BLOCK_MODULES
    )
    return theirs(with_peft(start["adapters"]), start["steps"])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "tp2 pp2" else pytest.mark.slow) for n in LAYOUTS]
)
def test_steps_are_those_of_peft(
    root: Path, truth: list[tuple[float, float]], tmp_path: Path, name: str
) -> None:
    """The second step's loss shows the update of B, the third step's that of A."""
    ranks, words = LAYOUTS[name]
    rows = tuned(root, tmp_path / "save", STEPS, f"{words} {APART}", ranks=ranks)
    for row, (loss, norm) in zip(rows, truth, strict=True):
        assert math.isclose(row["loss"], loss, rel_tol=2e-6)
        assert math.isclose(row["grad_norm"], norm, rel_tol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one rank", "tp2 pp2"])
def test_a_run_goes_on_from_a_folder_of_peft(
    root: Path, start: dict[str, Any], tmp_path: Path, name: str
) -> None:
    generator = torch.Generator().manual_seed(11)
    trained = {
        x: 0.1 * torch.randn(m.shape, generator=generator) if x.endswith("b") else m
        for x, m in start["adapters"].items()
    }
    model = with_peft(trained)
    model.float().save_pretrained(tmp_path / "peft")
    wanted = theirs(model.double(), start["steps"])
    ranks, words = LAYOUTS[name]
    words = f"{words} --adapter-path {tmp_path / 'peft'}"
    rows = tuned(root, tmp_path / "save", STEPS, words, ranks=ranks)
    for row, (loss, norm) in zip(rows, wanted, strict=True):
        assert math.isclose(row["loss"], loss, rel_tol=2e-6)
        assert math.isclose(row["grad_norm"], norm, rel_tol=2e-5)


@pytest.mark.parametrize("more", ["", pytest.param(APART, marks=pytest.mark.slow)])
def test_adapters_leave_alone_and_merged(root: Path, tmp_path: Path, more: str) -> None:
    """Diffusers computes the same with adapters as with weights that they are merged into."""
    ranks, words = LAYOUTS["tp2 dp2"]
    tuned(root, tmp_path / "run", 2, f"{words} {more}", ranks=ranks)
    load = ["--load", str(tmp_path / "run")]
    with pytest.raises(CheckpointError, match="merge the two with `tools/lora.py merge`, and"):
        exported(tmp_path / "run", tmp_path / "whole")
    assert lora.main(["export", *load, "--output", str(tmp_path / "adapter")]) == 0
    assert lora.main(["merge", *load, "--save", str(tmp_path / "merged")]) == 0
    whole = exported(tmp_path / "merged", tmp_path / "whole")
    given = inputs(SIZES_OF_CLIPS)
    model = network(SIZES_OF_CLIPS)
    before = flow_of(model, given)
    weights = {"prefix": "base_model.model", "weight_name": "adapter_model.safetensors"}
    model.load_lora_adapter(tmp_path / "adapter", **weights, adapter_name="default")
    wanted = flow_of(model, given)
    assert relative(before, wanted) > 1e-2
    found = flow_of(WanTransformer3DModel.from_pretrained(whole), given)
    assert relative(found, wanted) <= 1e-5
