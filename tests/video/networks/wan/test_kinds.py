"""Networks of Wan that take given frames train in every layout as diffusers' own class does.

They are Wan 2.1 I2V and FLF2V (input channels, and tokens of a vision encoder with keys and values
of their own), Wan 2.2 I2V-A14B (input channels alone) and TI2V-5B (a timestep for each frame).
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_ext.errors import DataError
from megatron_ext.layers.initialization import shards_of
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from megatron_ext.video.convert.exporting import public_tensor
from megatron_ext.video.convert.reading import fill, open_published
from megatron_ext.video.networks.published import Mapped
from megatron_ext.video.networks.wan.blocks import check_inputs
from megatron_ext.video.networks.wan.config import SIZES, VideoDiTSizes
from megatron_ext.video.networks.wan.convert.config import config_json
from megatron_ext.video.networks.wan.convert.conversion import CONVERSION
from megatron_ext.video.networks.wan.convert.names import Naming, shapes
from tests.ranks import on_ranks, run_on_ranks
from tests.video.networks.harness import (
    Tensors,
    Truth,
    check_step,
    layout_of,
    train_step,
    truth,
    write_weights,
)
from tests.video.networks.wan.convert.models import (
    STEM,
    bare,
    inputs,
    network,
    options_of,
    original_names,
    tensors_of,
    theirs,
)
from tests.video.networks.wan.convert.test_convert import check_flow
from tests.video.networks.wan.plain import sinusoid
from tests.video.networks.wan.problem import BIDIRECTIONAL, Problem, loss_of

I2V = dataclasses.replace(SIZES["tiny"], condition_channels=8)
KINDS = {
    "ti2v": SIZES["tiny"],
    "i2v": I2V,
    "i2v-clip": dataclasses.replace(I2V, vision_width=20),
    "flf2v-clip": dataclasses.replace(I2V, vision_width=20, vision_positions=6),
}
NUM_VISION = {"i2v-clip": 5, "flf2v-clip": 6}
TEXT_ROWS = 512
"""The rows of text that diffusers' class takes a network with vision tokens to have."""


class Sinusoid(nn.Module):
    """The sinusoids of diffusers, but in float64."""

    def forward(self, timesteps: Tensor) -> Tensor:
        return sinusoid(timesteps)


class Diffusers(nn.Module):
    """diffusers' class, which takes the inputs of `VideoDiT` and computes in double precision."""

    def __init__(self, z: VideoDiTSizes) -> None:
        super().__init__()
        self.model = WanTransformer3DModel(**options_of(z))
        self.model.condition_embedder.timesteps_proj = Sinusoid()
        self.positions = z.vision_positions

    def forward(
        self, x: Tensor, timesteps: Tensor, text: Tensor, condition: Tensor | None = None,
        vision: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        if condition is not None:
            x = torch.cat([x, condition], dim=2)
        if timesteps.dim() == 2:
            tokens = x.size(-2) * x.size(-1) // 4
            timesteps = timesteps.repeat_interleave(tokens, dim=1)
        if vision is not None and self.positions:
            vision = vision.reshape(2 * vision.size(0), -1, vision.size(2))
        with patch.object(torch.Tensor, "float", torch.Tensor.double):
            (flow,) = self.model(
                x.transpose(1, 2), timesteps.double(), text, vision, return_dict=False
            )
        return flow.transpose(1, 2)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class KindProblem(Problem):
    """A step of two micro-batches of clips with given frames."""

    options: Any = BIDIRECTIONAL
    kind: str = "i2v-clip"
    frames: int = 3
    num_text: int = TEXT_ROWS

    plain = Diffusers

    def inputs(self, number: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        given = super().inputs(number, dtype)
        generator = torch.Generator().manual_seed(500 + number)
        b, t, _, height, width = given["x"].shape
        z = self.sizes
        if z.condition_channels:
            shape = (b, t, z.condition_channels, height, width)
            given["condition"] = torch.randn(shape, generator=generator).to(dtype)
        if z.vision_width:
            shape = (b, NUM_VISION[self.kind], z.vision_width)
            given["vision"] = torch.randn(shape, generator=generator).to(dtype)
        return given

    def boundary_arguments(self, batch: dict[str, Any]) -> Sequence[Any]:
        names = ("x", "timesteps", "text", "condition", "vision")
        return [batch.get(name) for name in names]

    def plain_losses(self, model: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for i in range(self.num_microbatches):
            flow = model(**self.inputs(i, torch.float64))
            total, count, _ = loss_of(flow, self.target(i).double())
            yield total, count, flow

    def to_plain(self, weights: Tensors) -> Tensors:
        mapped = Mapped.of(CONVERSION.forms[0], self.sizes, shapes(self.sizes))
        dtype = next(iter(weights.values())).dtype
        return {
            f"model.{name}": public_tensor(mapped, name, dtype, weights.__getitem__)
            for name in mapped.shapes
        }

    @torch.no_grad()
    def prepare(self, chunk: Any) -> None:
        super().prepare(chunk)
        embedder = chunk.embedder
        if embedder is not None and self.sizes.vision_positions:
            positions = embedder.vision_in.positions
            positions.copy_(torch.sin(torch.arange(positions.numel())).view_as(positions))


def problem_of(kind: str, **fields: Any) -> KindProblem:
    whole = {"timestep_per_frame": kind == "ti2v", "num_text": 5 if kind == "ti2v" else TEXT_ROWS}
    return KindProblem(sizes=KINDS[kind], kind=kind, **{**whole, **fields})


@pytest.fixture(scope="module")
def truth_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Truth]:
    path = tmp_path_factory.mktemp("truths") / "weights"

    @cache
    def of(kind: str) -> Truth:
        problem = problem_of(kind)
        on_ranks(write_weights, {}, problem=problem, path=path)
        return truth(problem, torch.load(path))

    return of


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one": ({}, {}),
    "tp2sp": ({"tp": 2}, {"sequence_parallel": True}),
    "pp2": ({"pp": 2}, {}),
    "cp2": ({"cp": 2}, {}),
    "tp2 dp2": ({"tp": 2, "dp": 2}, {}),
}
CASES = [
    *(("flf2v-clip", layout) for layout in LAYOUTS),
    *((kind, "one") for kind in ("i2v-clip", "i2v", "ti2v")),
    *(pytest.param("i2v-clip", x, marks=pytest.mark.slow) for x in LAYOUTS if x != "one"),
    *(pytest.param(kind, "pp2", marks=pytest.mark.slow) for kind in ("i2v", "ti2v")),
]


def check(context: ParallelContext, problem: Any, want: Truth) -> None:
    step = train_step(problem, context)
    assert abs(step.loss - want.loss) <= 2e-6 * abs(want.loss)
    check_step(step, want, 1e-5)


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_layouts_train_as_diffusers(
    truth_of: Callable[[str], Truth], kind: str, layout: str
) -> None:
    sizes, fields = LAYOUTS[layout]
    problem = problem_of(kind, **fields)
    want = truth_of(kind)
    run_on_ranks(check, layout_of(sizes), {"problem": problem, "want": want})


ODD = VideoDiTSizes(256, 2, 300, 3, channels=6, text_width=24)
"""Sizes without a name, whose heads have 128 features as in all published models."""
PUBLISHED = {
    "t2v": ODD,
    "i2v": dataclasses.replace(ODD, condition_channels=10),
    "i2v-clip": dataclasses.replace(ODD, condition_channels=10, vision_width=20),
    "flf2v-clip": dataclasses.replace(
        ODD, condition_channels=10, vision_width=20, vision_positions=6
    ),
}
SHAPES = [(1, 4, 4), (3, 4, 6), (5, 8, 2)]


def written(kind: str, folder: Path) -> tuple[list[Path], WanTransformer3DModel]:
    """Write a model as a folder of diffusers, a folder of the original, and a file of ComfyUI's."""
    sizes = PUBLISHED[kind]
    model = network(sizes)
    diffusers, original, single = folder / "diffusers", folder / "original", folder / "one"
    model.save_pretrained(diffusers)
    original.mkdir()
    single.mkdir()
    content = {**config_json(sizes, Naming.ORIGINAL), "text_dim": sizes.text_width}
    (original / "config.json").write_text(json.dumps(content))
    names = original_names(sizes)
    tensors = {names[name]: tensor for name, tensor in tensors_of(diffusers).items()}
    save_file(tensors, original / f"{STEM}.safetensors")
    path = single / "wan.safetensors"
    tensors["model_type.Wan2_1-FLF2V-14B-720P"] = torch.zeros(1)
    save_file({f"model.diffusion_model.{name}": x for name, x in tensors.items()}, path)
    return [diffusers, original, path], model


@torch.no_grad()
def check_forms(
    context: ParallelContext, kind: str, sources: Sequence[Path], wanted: Sequence[Tensor]
) -> None:
    for source in sources:
        with open_published(source) as model:
            model.check()
            assert model.sizes == PUBLISHED[kind]
            chunk = bare(context, model.sizes)
            fill(shards_of(chunk), model)
        for shape, want in zip(SHAPES, wanted, strict=True):
            for per_frame, flow in enumerate(want):
                got = chunk(**inputs(model.sizes, per_frame=bool(per_frame), shape=shape))
                check_flow(got, flow)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_weights_compute_what_diffusers_does(tmp_path: Path, kind: str) -> None:
    """Read three forms, and compare at three shapes, with a timestep a clip and one a frame."""
    sources, model = written(kind, tmp_path)
    sizes = PUBLISHED[kind]
    wanted = [
        [theirs(model, inputs(sizes, per_frame=per, shape=shape)) for per in (False, True)]
        for shape in SHAPES
    ]
    run_on_ranks(check_forms, Layout(1), {"kind": kind, "sources": sources, "wanted": wanted})


@pytest.mark.parametrize("kind", ["i2v-clip", "flf2v-clip"])
def test_inputs_of_given_frames_are_checked(kind: str) -> None:
    sizes = PUBLISHED[kind]
    given = inputs(sizes)
    check_inputs(sizes, **given)
    for name, wrong, said in (
        (
            "condition",
            None,
            r"`condition` has the shape None, but the model takes \[2, 3, 10, 4, 6",
        ),
        ("condition", given["condition"][:, :2], "takes"),
        ("vision", None, "`vision` has the shape None, but the model takes"),
        ("vision", given["vision"][:, :, :4], "takes"),
        ("vision", given["vision"][:1], "takes"),
    ):
        with pytest.raises(DataError, match=said):
            check_inputs(sizes, **{**given, name: wrong})
    if sizes.vision_positions:
        with pytest.raises(DataError, match=r"\[2, 4, 20\], but the model takes \[2, 6, 20\]"):
            check_inputs(sizes, **{**given, "vision": given["vision"][:, :4]})
    with pytest.raises(DataError, match="takes None"):
        check_inputs(ODD, **inputs(ODD), vision=given["vision"])
