"""Networks of Wan that take given frames train in every layout as diffusers' own class does.

They are Wan 2.1 I2V and FLF2V (input channels, and tokens of a vision encoder with keys and values
of their own), Wan 2.2 I2V-A14B (input channels alone) and TI2V-5B (a timestep for each frame).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.networks.wan.config import SIZES, VideoDiTSizes
from megatron_ext.video.networks.wan.convert.names import Naming, to_wan, wan_names
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
        self.model = WanTransformer3DModel(
            num_attention_heads=z.num_heads, attention_head_dim=z.head_dim,
            in_channels=z.channels + z.condition_channels, out_channels=z.channels,
            text_dim=z.text_width, ffn_dim=z.ffn_size, num_layers=z.num_blocks,
            image_dim=z.vision_width or None,
            added_kv_proj_dim=z.hidden_size if z.vision_width else None,
            pos_embed_seq_len=z.vision_positions or None,
        )  # fmt: skip
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
        out: Tensors = {}
        for name, tensor in weights.items():
            names = wan_names(name, Naming.DIFFUSERS)
            parts = to_wan(name, tensor, self.sizes)
            out |= {f"model.{x}": part for x, part in zip(names, parts, strict=True)}
        return out

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
    *((kind, layout) for kind in ("i2v-clip", "flf2v-clip") for layout in LAYOUTS),
    *((kind, layout) for kind in ("i2v", "ti2v") for layout in ("one", "pp2")),
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
