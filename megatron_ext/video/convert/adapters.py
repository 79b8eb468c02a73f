"""Maps LoRA adapters of a video network to the layers of its published form, as peft names them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_ext.checkpoint.conversion import Part, PeftLayers
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.video.convert.find import sizes_of, writer_of
from megatron_ext.video.networks.published import Conversion, Mapped

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
    return layers_of(conversion, sizes_of(run, network), run.lora.lora_rank or 0)


def layers_of(conversion: Conversion, sizes: Any, rank: int) -> PeftLayers:
    """Return the mapping of our LoRA adapters, of rank ``rank``, to layers of the first form.

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
    pattern = re.compile(rf"(?:critic\.)?(?P<layer>{layer})\.lora\.(?P<matrix>[ab])$")

    def parts(adapter: str, matrix: Tensor) -> Iterator[Part]:
        """Yield our LoRA matrix as one for each public layer that our layer is made of.

        The kind is "A" for LoRA's matrix ``[r, in]``, "B" for ``[out, r]``. Features that only the
        public layer has are zero: inputs of A, outputs of B.
        """
        match = pattern.match(adapter)
        assert match is not None
        kind = match["matrix"].upper()
        own = mapped.parts[f"{match['layer']}.weight"]
        tensors = list(dict.fromkeys(part.tensor for part in own))
        separate = kind == "A" and len(matrix) == len(tensors) * rank
        for index, tensor in enumerate(tensors):
            outputs, inputs = mapped.shapes[tensor]
            some = [part for part in own if part.tensor == tensor]
            if kind == "A":
                rows_of_a = matrix[index * rank :][:rank] if separate else matrix
                values = matrix.new_zeros(len(rows_of_a), inputs)
                values[:, some[0].column : some[0].column + matrix.size(1)] = rows_of_a
            else:
                values = matrix.new_zeros(outputs, matrix.size(1))
                for part in some:
                    rows = slice(part.start, part.start + part.count * part.step, part.step)
                    values[rows] = matrix[part.row : part.row + part.count]
            yield tensor.removesuffix(".weight"), kind, values

    outside = {
        tensor.removesuffix(".weight") for tensor in mapped.shapes if not _BLOCK.match(tensor)
    }

    def target(path: str) -> str:
        """Return a layer's name in all blocks, such as ``attn1.to_q``; else its whole path."""
        short = _BLOCK.sub("", path)
        return path if short in outside else short

    return PeftLayers(pattern, parts, target, None)
