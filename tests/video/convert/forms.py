"""Random weights of each network's published forms, and the places where they are published."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_ext.video.networks.hunyuan.config import SIZES as HUNYUAN
from megatron_ext.video.networks.lookup import conversion_of
from megatron_ext.video.networks.mmdit.config import SIZES as MMDIT
from megatron_ext.video.networks.published import Conversion, Form, Mapped
from megatron_ext.video.networks.wan.config import SIZES as WAN
from megatron_ext.video.networks.wan.config import VideoDiTSizes

WAN_FLF2V = VideoDiTSizes(
    256, 2, 96, 1, 6, text_width=24, condition_channels=10, vision_width=20, vision_positions=6
)
"""First and last frame given as input channels and as vision tokens; sizes without a name."""
_SHORT = replace(MMDIT["tiny"], num_double_blocks=1, num_single_blocks=1)
MODELS: dict[str, tuple[str, Any]] = {
    "wan": ("video-dit", WAN["tiny"]),
    "hunyuan": ("hunyuan-video", replace(HUNYUAN["tiny"], guidance_embed=True)),
    "hunyuan i2v": ("hunyuan-video", replace(HUNYUAN["tiny"], cond_embed=True)),
    "wan flf2v": ("video-dit", WAN_FLF2V),
    "flux dev": ("mmdit", replace(_SHORT, guidance_embed=True)),
    "open-sora": ("mmdit", replace(_SHORT, cond_embed=True)),
}
"""A name -> (a value of ``--video-model``, sizes); a network adds a line for each kind of model."""


@dataclass(frozen=True)
class Model:
    """A model of a network in one of its forms."""

    name: str
    conversion: Conversion
    form: Form
    sizes: Any

    @property
    def forms(self) -> list[Form]:
        """Return the forms that have a place for all of the model's parameters."""
        own = self.conversion.parameters(self.sizes)
        return [
            form
            for form in self.conversion.forms
            if Mapped.of(form, self.sizes, own).parameters.keys() == own.keys()
        ]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the public tensors."""
        return dict(Mapped.of(self.form, self.sizes, self.conversion.parameters(self.sizes)).shapes)

    def tensors(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """Return random public tensors, which no other name gets."""

        def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            return torch.randn(shape, generator=generator).to(dtype)

        return {name: drawn(name, shape) for name, shape in self.shapes.items()}

    def folder(self, path: Path, tensors: dict[str, Tensor], files: int = 1) -> Path:
        """Write a folder with config.json and one or several files."""
        assert self.form.write_config is not None
        path.mkdir()
        (path / "config.json").write_text(json.dumps(self.form.write_config(self.sizes)))
        stem = self.form.stem
        if files == 1:
            save_file(tensors, path / f"{stem}.safetensors")
            return path
        places: dict[str, str] = {}
        for number in range(files):
            name = f"{stem}-{number + 1:05}-of-{files:05}.safetensors"
            part = dict([*tensors.items()][number::files])
            save_file(part, path / name)
            places |= dict.fromkeys(part, name)
        index = {"metadata": {}, "weight_map": places}
        (path / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
        return path


def models() -> Iterator[Model]:
    """Yield each model in each of its forms."""
    for name, (video_model, sizes) in MODELS.items():
        conversion = conversion_of(video_model)
        assert conversion is not None
        for form in conversion.forms:
            model = Model(f"{name}, {form.name}", conversion, form, sizes)
            if form in model.forms:
                yield model


def stored(place: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of safetensors, or of all such files in a folder."""
    paths = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}
