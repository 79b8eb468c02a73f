"""LoRA steps of flow matching are those of peft on diffusers' own class, for each network."""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import FluxPipeline, HunyuanVideoPipeline, WanPipeline
from torch import Tensor

from megatron_ext.errors import CheckpointError
from megatron_ext.layers.initialization import shards_of
from megatron_ext.programs import convert_checkpoint, lora
from megatron_ext.train.run import Run
from megatron_ext.video.convert.adapters import AdapterMap, layers_of
from megatron_ext.video.convert.exporting import Export, export_weights
from megatron_ext.video.data.conditions import text_mask
from megatron_ext.video.networks.hunyuan.config import SIZES as HUNYUAN
from megatron_ext.video.networks.hunyuan.convert.conversion import CONVERSION as HUNYUAN_WEIGHTS
from megatron_ext.video.networks.mmdit.convert.conversion import CONVERSION as FLUX_WEIGHTS
from megatron_ext.video.networks.published import Conversion
from megatron_ext.video.networks.wan.convert.conversion import CONVERSION as WAN_WEIGHTS
from megatron_ext.video.task import VIDEO
from tests.training_runs import training_rows
from tests.video.clips import CHANNELS, POOLED, SHORT, WIDTH, train, write_clips
from tests.video.networks.hunyuan.problem import run_plain
from tests.video.networks.hunyuan.test_convert import network as hunyuan
from tests.video.networks.mmdit.convert.models import flux
from tests.video.networks.mmdit.convert.models import theirs as flux_velocity
from tests.video.networks.mmdit.convert.test_flow import GUIDANCE, SEED, SHIFT, TINY
from tests.video.networks.mmdit.convert.test_flow import microbatch as joint_microbatch
from tests.video.networks.wan.convert.models import network as wan
from tests.video.wan_run import FRAMES, SIZES_OF_CLIPS
from tests.video.wan_run import microbatch as wan_microbatch

RANK, ALPHA, RATE, STEPS = 4, 8.0, 1e-2, 3
EPSILON = 1e-8
"""The epsilon of Adam. The usual 1e-15 would let gradients of rounding size move A by the rate."""
FLAGS = (
    f"--lr {RATE} --lr-warmup-iters 0 --weight-decay 0 --adam-eps {EPSILON} --clip-grad 1 "
    "--micro-batch-size 2 --global-batch-size 4 --log-interval 1 --num-workers 0 "
    f"--seed {SEED} --flow-shift {SHIFT} --text-dropout 0.5"
).split()
JOINT = "--pooled-dropout 0.5 --i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0"
LAYOUTS = {
    "one rank": (1, ""),
    "tp2 pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2 dp2": (4, "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
}


def wan_loss(model: Any, numbers: Sequence[int], samples: Sequence[int]) -> Tensor:
    given, velocity = wan_microbatch(numbers, samples, [0] * FRAMES)
    x, times = given["x"].transpose(1, 2), given["timesteps"][:, 0]
    (flow,) = model(x, times, given["text"], return_dict=False)
    return (flow.transpose(1, 2) - velocity).square().mean()


def flux_loss(model: Any, numbers: Sequence[int], samples: Sequence[int]) -> Tensor:
    given, velocity = joint_microbatch(numbers, samples, "schnell")
    return (flux_velocity(model, given) - velocity).square().mean()


def hunyuan_loss(model: Any, numbers: Sequence[int], samples: Sequence[int]) -> Tensor:
    given, velocity = joint_microbatch(numbers, samples, "schnell")
    given["guidance"] = torch.full_like(given["timesteps"], GUIDANCE)
    mask = text_mask(given["txt"])
    mask[:, 0] = True  # A caption that is dropped keeps its first row.
    given["txt_mask"] = mask
    return (run_plain(model, given, HUNYUAN_SIZES) - velocity).square().mean()


HUNYUAN_SIZES = replace(
    HUNYUAN["tiny"], channels=CHANNELS, text_width=WIDTH, pooled_width=POOLED, guidance_embed=True
)


@dataclass(frozen=True)
class Network:
    """A network of diffusers, the flags of its run, and its loss on clips of these numbers."""

    conversion: Conversion
    sizes: Any
    model: Callable[..., Any]
    loss: Callable[[Any, Sequence[int], Sequence[int]], Tensor]
    pipeline: Any
    words: str


NETWORKS = {
    "wan": Network(WAN_WEIGHTS, SIZES_OF_CLIPS, wan, wan_loss, WanPipeline, ""),
    "flux": Network(
        FLUX_WEIGHTS, TINY, flux, flux_loss, FluxPipeline,
        f"--lora-target-modules attn mlp modulation {JOINT}",
    ),
    "hunyuan": Network(
        HUNYUAN_WEIGHTS, HUNYUAN_SIZES, hunyuan, hunyuan_loss, HunyuanVideoPipeline,
        f"--pooled-dropout 0.5 --guidance {GUIDANCE}",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Start:
    """The weights and clips that the runs of a network start from."""

    network: Network
    weights: Path
    clips: Path
    adapters: dict[str, Tensor]
    steps: list[Any]

    def run(self, save: Path, words: str, **options: Any) -> list[Any]:
        flags = f"--load-weights {self.weights} {words}"
        return training_rows(train(self.clips, save, flags, flags=FLAGS, task=VIDEO, **options))


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


APART = "--lora-separate-projections"


def flags_of(network: Network) -> str:
    return f"--lora-rank {RANK} --lora-alpha {ALPHA:g} {network.words}"


@pytest.fixture(scope="module")
def start_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Start]:
    root = tmp_path_factory.mktemp("peft")
    clips = write_clips(root / "clips", {SHORT: 9})
    known: dict[str, Start] = {}

    def of(name: str) -> Start:
        if name not in known:
            network = NETWORKS[name]
            network.model(network.sizes).save_pretrained(root / name)
            empty = Start(network, root / name, clips, {}, [])
            prepare = partial(record, path=root / f"{name}.pt")
            words = f"{flags_of(network)} {APART} --train-iters 1"
            empty.run(root / f"{name} once", words, prepare=prepare)
            recorded = torch.load(root / f"{name}.pt")
            known[name] = replace(empty, **recorded)
        return known[name]

    return of


def with_peft(network: Network, adapters: dict[str, Tensor]) -> Any:
    """Return diffusers' model with peft's adapters on the public layers that ``adapters`` change.

    Two layers of ours are one of diffusers': its adapter has the products of both, and zeros where
    one of ours has no part. These zeros are not trained.
    """
    # Layers that share a matrix B of zeros would leave as one adapter of the same rank.
    apart = {x: torch.randn(m.shape) if x.endswith("b") else m for x, m in adapters.items()}
    starts = not any(m.any() for x, m in adapters.items() if x.endswith("b"))
    public = layers_of(network.conversion, network.sizes, RANK)
    pairs = public.pairs(apart if starts else adapters)
    joined = {x: len(a) for x, (a, _) in pairs.items() if len(a) != RANK}
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=sorted(pairs), rank_pattern=joined,
        alpha_pattern={x: ALPHA * rank / RANK for x, rank in joined.items()},
    )  # fmt: skip
    model: Any = peft.get_peft_model(network.model(network.sizes), config)
    modules = dict(model.base_model.model.named_modules())
    with torch.no_grad():
        for layer, (a, b) in pairs.items():
            modules[layer].lora_A["default"].weight.copy_(a)
            modules[layer].lora_B["default"].weight.copy_(0 * b if starts else b)
    model.double()
    for layer in joined:
        own = pairs[layer][0].ne(0).double()
        modules[layer].lora_A["default"].weight.register_hook(own.mul)
    return model


def theirs(network: Network, model: Any, steps: list[Any]) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step with torch's AdamW."""
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0)
    rows = []
    for microbatches in steps:
        loss = torch.stack([network.loss(model, *each) for each in microbatches]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        rows.append((float(loss.detach()), float(norm)))
    return rows


def check(rows: list[Any], wanted: list[tuple[float, float]]) -> None:
    """Compare steps; the second one's loss shows the update of B, the third one's that of A."""
    assert len(rows) == len(wanted) == STEPS
    for row, (loss, norm) in zip(rows, wanted, strict=True):
        assert math.isclose(row["loss"], loss, rel_tol=2e-6)
        assert math.isclose(row["grad_norm"], norm, rel_tol=2e-5)


@pytest.fixture(scope="module")
def truth_of(start_of: Callable[[str], Start]) -> Callable[[str], list[tuple[float, float]]]:
    known: dict[str, list[tuple[float, float]]] = {}

    def of(name: str) -> list[tuple[float, float]]:
        if name not in known:
            start, network = start_of(name), NETWORKS[name]
            places = AdapterMap(network.conversion, network.conversion.forms[0], network.sizes)
            layers = {x.removesuffix(".lora.a") for x in start.adapters if x.endswith("a")}
            assert layers == {
                x for x in places.layers if name == "flux" or not re.search("modulation", x)
            }
            model = with_peft(network, start.adapters)
            known[name] = theirs(network, model, start.steps)
        return known[name]

    return of


QUICK = ("wan-tp2 pp2", "flux-tp2 dp2", "hunyuan-tp2 pp2")
CASES = [(name, layout) for name in NETWORKS for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*case, marks=[] if "-".join(case) in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_steps_are_those_of_peft(
    start_of: Callable[[str], Start],
    truth_of: Callable[[str], list[tuple[float, float]]],
    tmp_path: Path,
    name: str,
    layout: str,
) -> None:
    ranks, words = LAYOUTS[layout]
    words = f"{words} {flags_of(NETWORKS[name])} {APART} --train-iters {STEPS}"
    check(start_of(name).run(tmp_path, words, ranks=ranks), truth_of(name))


ONE_TO_ONE = r"(double_blocks|blocks)\.|linear_qkv|single_blocks.*linear_fc1"
"""The layers of ours that are layers of diffusers too."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_run_goes_on_from_a_folder_of_peft(
    start_of: Callable[[str], Start], tmp_path: Path, name: str, layout: str
) -> None:
    """Train adapters on layers that are the same here and there; the last steps change A and B."""
    start, network = start_of(name), NETWORKS[name]
    generator = torch.Generator().manual_seed(11)
    trained = {
        x: 0.1 * torch.randn(m.shape, generator=generator) if x.endswith("b") else m
        for x, m in start.adapters.items()
        if re.search(ONE_TO_ONE, x)
    }
    model = with_peft(network, trained)
    model.float().save_pretrained(tmp_path / "peft")
    wanted = theirs(network, model.double(), start.steps)
    ranks, words = LAYOUTS[layout]
    more = network.words.replace("--lora-target-modules attn mlp modulation", "")
    words = f"{words} {more} --adapter-path {tmp_path / 'peft'} --train-iters {STEPS}"
    check(start.run(tmp_path / "save", words, ranks=ranks), wanted)


@torch.no_grad()
def loss_with(network: Network, model: Any, start: Start) -> float:
    return float(network.loss(model.double(), *start.steps[0][0]))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param(name, more, marks=[] if bool(more) is (name == "flux") else pytest.mark.slow)
        for name in NETWORKS
        for more in ("", APART)
    ],
)
def test_trained_adapters_compute_alike_in_diffusers(
    start_of: Callable[[str], Start], tmp_path: Path, name: str, more: str
) -> None:
    """Load them as peft's, load them in a pipeline, and merge them into the weights."""
    start, network = start_of(name), NETWORKS[name]
    ranks, words = LAYOUTS["tp2 dp2"]
    words = f"{words} {flags_of(network)} {more} --lr 1e-1 --train-iters 2"
    start.run(tmp_path / "run", words, ranks=ranks)
    load = ["--load", str(tmp_path / "run")]
    with pytest.raises(CheckpointError, match="merge the two with `tools/lora.py merge`, and"):
        export_weights(network.conversion, Export(load=tmp_path / "run", target=tmp_path / "whole"))
    for form in ("peft", "diffusers"):
        target = ["--format", form, "--output", str(tmp_path / form)]
        assert lora.main(["export", *load, *target]) == 0
    assert lora.main(["merge", *load, "--save", str(tmp_path / "merged")]) == 0
    words = f"export --load {tmp_path / 'merged'} --hf {tmp_path / 'whole'}"
    assert convert_checkpoint.main(words.split()) == 0
    plain, one, two = (network.model(network.sizes) for _ in range(3))
    merged = type(plain).from_pretrained(tmp_path / "whole")
    weights = {"prefix": "base_model.model", "weight_name": "adapter_model.safetensors"}
    one.load_lora_adapter(tmp_path / "peft", **weights, adapter_name="default")
    kind = network.pipeline
    others = dict.fromkeys(inspect.signature(kind.__init__).parameters.keys() - {"self"})
    given = {x: False for x in others if x == "expand_timesteps"}
    pipeline = kind(**{**others, **given, "transformer": two})
    pipeline.load_lora_weights(tmp_path / "diffusers")
    wanted = loss_with(network, merged, start)
    assert abs(loss_with(network, plain, start) / wanted - 1) > 1e-2
    assert abs(loss_with(network, one, start) / wanted - 1) <= 1e-5
    assert abs(loss_with(network, two, start) / wanted - 1) <= 1e-5
