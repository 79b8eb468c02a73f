"""Maps our LoRA adapters to the layers of a Hugging Face model, under the names of peft."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron_ext.checkpoint.adapter_files import Part, PublicLayers, joined_parts
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.config import fitting_family
from megatron_ext.text.convert.families.llama import FAMILY as LLAMA
from megatron_ext.text.convert.family import Gpt

_ADAPTER = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<linear>(?:self_attention|mlp)\.linear_\w+)"
    r"\.lora\.(?P<matrix>[ab])$"
)


def peft_layers(config: RunConfig, root: Path) -> PublicLayers:
    """Return the map from our LoRA adapters to the layers of the model's Hugging Face family.

    If the model fits no family, its layers get Llama's names; adapters on an MLP without
    ``--swiglu`` then raise a CheckpointError, since Llama has no such MLP. ``root`` is the folder
    of the checkpoints, which error messages name.
    """
    gpt = Gpt.of(config)
    model = config.model
    try:
        family = fitting_family(gpt)
    except CheckpointError:
        family = LLAMA
    table = family.table(gpt, 1)
    num_layers = model.num_layers or 0

    def parts(name: str, matrix: Tensor) -> Iterator[Part]:
        match = _ADAPTER.match(name)
        assert match is not None
        linear = match["linear"]
        kind = match["matrix"].upper()
        if family is LLAMA and linear.startswith("mlp.") and not model.swiglu:
            raise CheckpointError(
                f"`--load` ({root}) has adapters on an MLP without `--swiglu`, for which peft's "
                "models have no gate_proj and up_proj; merge them with `tools/lora.py merge` "
                "instead."
            )
        stacked = match["layer"] is None
        first = 0 if stacked else int(match["layer"])
        for layer, values in enumerate(matrix if stacked else matrix[None], first):
            ours = f"decoder.layers.{layer}.{linear}.weight"
            runs = table.runs(ours, values.shape[0], num_layers) or []
            tensors = list(dict.fromkeys(run.tensor for run in runs))
            rank = config.lora.lora_rank or 0
            separate = len(values) == len(tensors) * rank
            if kind == "A" and not separate and len(values) > rank:
                raise CheckpointError(
                    f"`--load` ({root}) has an adapter each for the projections of `{linear}` "
                    f"(`--lora-separate-projections`), but a model of `{family.model_type}` has "
                    "one layer for them; merge the adapters with `tools/lora.py merge` instead."
                )
            for index, tensor in enumerate(tensors):
                own = [run for run in runs if run.tensor == tensor]
                # safetensors refuses tensors that share memory.
                piece = (values[index * rank :][:rank] if separate else values).clone()
                if kind == "B":
                    piece = values.new_empty(sum(run.count for run in own), values.shape[1])
                    for run in own:
                        rows = slice(run.start, run.start + run.count * run.step, run.step)
                        piece[rows] = values[run.row : run.row + run.count]
                yield tensor.removesuffix(".weight"), kind, piece

    return PublicLayers(
        _ADAPTER, partial(joined_parts, parts), lambda path: path.rpartition(".")[2], "CAUSAL_LM"
    )
