"""Maps LoRA adapters of a video network to the layers of its published form, as peft names them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_ext.checkpoint.conversion import Part, PeftLayers
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.convert.find import writer_of
from megatron_ext.video.networks.lookup import network_of
from megatron_ext.video.networks.published import Conversion, Mapped
from megatron_ext.video.streaming.config import Role, StreamingConfig

_BLOCK = re.compile(r"^.*?\.\d+\.")
"""The beginning of a layer's name that differs between blocks, such as ``blocks.3.``."""


def adapters_of(run: RunConfig, network: str | None = None) -> PeftLayers:
    """Return how the adapters of a video run map to peft's.

    ``network`` chooses a network of a streaming run, ``"generator"`` (None) or ``"critic"``.

    Raises:
        CheckpointError: the run's network has no public form.
    """
    conversion = writer_of(run.to_dict())
    assert conversion is not None
    streams = run.section(VideoConfig).streams
    role: Role = "critic" if network == "critic" else "generator"
    sizes = run.section(StreamingConfig).sizes(role) if streams else network_of(run).sizes
    return layers_of(conversion, sizes)


def layers_of(conversion: Conversion, sizes: Any) -> PeftLayers:
    """Return the mapping of our LoRA adapters to the layers of the network's first form.

    Adapters of a form of diffusers, exported with it, are loaded by the method
    ``load_lora_adapter`` with ``prefix="base_model.model"``.
    """
    if conversion.adapted is None:
        raise CheckpointError(
            f"Adapters of {conversion.title} cannot be exported, since none of its layers takes "
            "any."
        )
    mapped = Mapped.of(conversion.forms[0], sizes, conversion.parameters(sizes))
    layer = conversion.adapted.pattern.removesuffix("$")
    name = re.compile(rf"(?:critic\.)?(?P<layer>{layer})\.lora\.(?P<matrix>[ab])$")

    def parts(adapter: str, matrix: Tensor) -> Iterator[Part]:
        """Split our LoRA matrix into one for each public layer that our layer fuses.

        The kind is "A" for LoRA's matrix ``[r, in]``, "B" for ``[out, r]``. Each public layer gets
        its own rows of B and a copy of A.
        """
        match = name.match(adapter)
        assert match is not None
        kind = match["matrix"].upper()
        own = mapped.parts[f"{match['layer']}.weight"]
        for tensor in dict.fromkeys(part.tensor for part in own):
            # safetensors refuses tensors that share memory.
            values = matrix.clone()
            if kind == "B":
                values = matrix.new_zeros(mapped.shapes[tensor][0], matrix.size(1))
                for part in (part for part in own if part.tensor == tensor):
                    rows = slice(part.start, part.start + part.count * part.step, part.step)
                    values[rows] = matrix[part.row : part.row + part.count]
            yield tensor.removesuffix(".weight"), kind, values

    # A layer is called alike in all blocks, such as ``attn1.to_q``.
    return PeftLayers(name, parts, lambda path: _BLOCK.sub("", path), None)
