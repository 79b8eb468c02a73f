"""Weights of Wan 2.1 as a checkpoint of the video DiT.

One copy of the weights is in memory, and one parameter's tensors beside it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.transformer import TransformerConfig
from tqdm import tqdm

from megatron_ext.checkpoint.huggingface.importing import only_dtype
from megatron_ext.checkpoint.huggingface.read import TensorSource, torch_dtype
from megatron_ext.checkpoint.huggingface.single_rank import PRECISIONS, one_rank
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.paths import published
from megatron_ext.checkpoint.wan.config import WanModel
from megatron_ext.checkpoint.wan.names import Naming, from_wan, shapes, to_wan, wan_names
from megatron_ext.checkpoint.wan.read import open_wan
from megatron_ext.config import RunConfig
from megatron_ext.config.checkpoint import CheckpointConfig
from megatron_ext.config.precision import PrecisionConfig
from megatron_ext.config.streaming import StreamingConfig
from megatron_ext.config.video import VideoConfig
from megatron_ext.config.video_dit_sizes import VideoDiTSizes
from megatron_ext.errors import CheckpointError
from megatron_ext.layout import ParallelContext
from megatron_ext.models.causal_video import VideoDiT, VideoDiTOptions, build_video_dit_chunk


@dataclass(frozen=True)
class WanImport:
    """How to import weights.

    Attributes:
        source: folder with config.json and safetensors, or a file of torch.save.
        save: folder for the checkpoint.
        dtype: of the weights; None keeps the source's.
        entry: of a file of torch.save, such as ``"generator_ema"``; None takes the only one.
    """

    source: Path
    save: Path
    dtype: str | None = None
    entry: str | None = None


def import_wan(order: WanImport) -> tuple[str, str]:
    """Write weights as the checkpoint of iteration 0, for any layout.

    Returns:
        Named size of the model, and dtype of the weights such as ``"bfloat16"``.

    Raises:
        CheckpointError: a model that cannot be converted, or a folder that cannot be read or
            written.
    """
    if published(order.save):
        raise CheckpointError(f"`--save` ({order.save}) holds checkpoints; give a new folder.")
    with open_wan(order.source, order.entry) as (model, tensors):
        check_tensors(model.sizes, model.naming, tensors)
        # Also where a dtype is asked for: numbers of a quantized model mean nothing without scales.
        tensors.dtypes()
        dtype = order.dtype or only_dtype(tensors)
        config = run_config(model, dtype, order.save)
        with one_rank(config) as context:
            chunk = build_bare(model.sizes, dtype, context)
            fill(chunk, model.naming, tensors)
            CheckpointManager(config.checkpoint, context).save(
                0,
                model=[chunk],
                optimizer=None,
                scheduler=None,
                progress={"iteration": 0, "consumed_train_samples": 0},
                run_config=config.to_dict(),
            )
    return model.size, dtype


def run_config(model: WanModel, dtype: str, save: Path) -> RunConfig:
    """What the checkpoint says of itself, as one of a streaming run does."""
    streaming = StreamingConfig(generator_size=model.size, text_features=model.sizes.text_width)
    run = RunConfig()
    flags = {word.removeprefix("--"): True for word in PRECISIONS[dtype]}
    return dataclasses.replace(
        run,
        model=streaming.described(run.model),
        streaming=streaming,
        precision=PrecisionConfig(**flags),
        video=VideoConfig(task="streaming", video=True),
        checkpoint=CheckpointConfig(save=str(save), no_save_optim=True, no_save_rng=True),
    )


def build_bare(sizes: VideoDiTSizes, dtype: str, context: ParallelContext) -> VideoDiT:
    """The whole model on one rank on the CPU, with arbitrary weights."""
    config = TransformerConfig(
        **sizes.transformer_fields(),
        params_dtype=torch_dtype(dtype),
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    chunk: VideoDiT = build_video_dit_chunk(sizes, VideoDiTOptions(), config, context)
    chunk.to(torch_dtype(dtype))
    return chunk


@torch.no_grad()
def fill(chunk: VideoDiT, naming: Naming, tensors: TensorSource) -> None:
    """Copy tensors of Wan into the whole model, one parameter at a time."""
    parameters = list(chunk.named_parameters())
    bar = tqdm(parameters, "Importing", unit="tensor", delay=1.0, leave=False, disable=None)
    for name, parameter in bar:
        found = [tensors.tensor(full) for full in wan_names(name, naming)]
        parameter.copy_(from_wan(name, found, chunk.sizes))


def check_tensors(sizes: VideoDiTSizes, naming: Naming, tensors: TensorSource) -> None:
    """Nothing is missing, nothing would be lost, and all of it fits.

    Raises:
        CheckpointError: naming the first tensor of which that is not so.
    """
    found, wanted = tensors.shapes(), dict[str, tuple[int, ...]]()
    for name, shape in shapes(sizes).items():
        parts = to_wan(name, torch.empty(shape, device="meta"), sizes)
        names = wan_names(name, naming)
        wanted |= {full: tuple(part.shape) for full, part in zip(names, parts, strict=True)}
    for full, shape in wanted.items():
        if full not in found:
            raise CheckpointError(
                f"{tensors.folder} holds no `{full}`, which Wan 2.1 has; copy the whole model "
                "again."
            )
        if found[full] != shape:
            raise CheckpointError(
                f"{tensors.folder} holds `{full}` with shape {list(found[full])}, but the sizes of "
                f"the model imply {list(shape)}; copy the whole model again."
            )
    extra = sorted(found.keys() - wanted.keys())
    if extra:
        raise CheckpointError(
            f"{tensors.folder} holds `{extra[0]}`, which Wan 2.1 text to video does not have; use "
            "a model without it."
        )
