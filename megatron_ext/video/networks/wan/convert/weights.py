"""Imports weights of Wan 2.1 as a checkpoint of the video DiT.

The peak memory is one copy of the weights plus the tensors of one parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.transformer import TransformerConfig
from tqdm import tqdm

from megatron_ext.checkpoint.conversion import (
    one_rank,
    only_dtype,
    refuse_checkpoints,
    save_imported,
)
from megatron_ext.checkpoint.safetensors_files import (
    TensorSource,
    torch_dtype,
)
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.precision import PRECISIONS, PrecisionConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.video.config.rules import SECTIONS
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.convert import read_config
from megatron_ext.video.networks.wan.attention import VideoDiTOptions
from megatron_ext.video.networks.wan.config import VideoDiTSizes
from megatron_ext.video.networks.wan.convert.config import (
    WanModel,
    understand,
    understand_shapes,
)
from megatron_ext.video.networks.wan.convert.names import (
    Naming,
    from_wan,
    shapes,
    to_wan,
    wan_names,
)
from megatron_ext.video.networks.wan.model import VideoDiT
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.weight_files import open_weights

STEM = "diffusion_pytorch_model"
"""The beginning of the names of Wan's safetensors files, in diffusers and in the original."""


@contextmanager
def open_wan(source: Path, entry: str | None) -> Iterator[tuple[WanModel, TensorSource]]:
    """Open the model in a folder or file of weights; yield it and its tensors.

    ``entry`` selects the tensors in a file of torch.save (`weight_files.TensorFile`). A folder's
    config.json describes the model; in a file, the shapes do. CheckpointError is raised if the
    model cannot be read or converted.
    """
    with open_weights(source, entry, STEM) as tensors:
        if source.is_file():
            diffusers = any(name.startswith("condition_embedder.") for name in tensors.names)
            naming = Naming.DIFFUSERS if diffusers else Naming.ORIGINAL
            yield understand_shapes(tensors.shapes(), naming, source), tensors
        else:
            yield understand(read_config(source), source / "config.json"), tensors


def import_wan(
    source: Path, save: Path, dtype: str | None = None, entry: str | None = None
) -> tuple[str, str]:
    """Write Wan's weights as a checkpoint of iteration 0, which loads in any parallel layout.

    Args:
        source: folder with config.json and safetensors, or a file of safetensors or torch.save.
        save: folder for the checkpoint.
        dtype: dtype of the checkpoint; None keeps that of the source.
        entry: key in a torch.save file; None takes the file's only dictionary of tensors.

    Returns:
        The named size of the model, and the dtype of the checkpoint, such as ``"bfloat16"``.

    Raises:
        CheckpointError: the model cannot be converted, or a folder cannot be read or written.
    """
    refuse_checkpoints(save)
    with open_wan(source, entry) as (model, tensors):
        check_tensors(model.sizes, model.naming, tensors)
        # Even where a dtype is given, a model that is quantized in another way is refused.
        tensors.dtypes()
        dtype = dtype or only_dtype(tensors)
        if dtype not in PRECISIONS:
            raise CheckpointError(
                f"{source} holds weights in 8 bits, in which none are trained; give the dtype of "
                f"the checkpoint as `--dtype`, such as bfloat16."
            )
        config = run_config(model, dtype, save)
        with one_rank(config.training.seed) as context:
            # The whole model on the CPU, with arbitrary weights.
            kind = torch_dtype(dtype)
            transformer_config = TransformerConfig(
                **model.sizes.transformer_fields(),
                params_dtype=kind,
                use_cpu_initialization=True,
                perform_initialization=False,
            )
            chunk = VideoDiT.build(model.sizes, VideoDiTOptions(), transformer_config, context)
            fill(chunk.to(kind), model.naming, tensors)
            save_imported(chunk, config.checkpoint, context, config.to_dict())
    return model.size, dtype


def run_config(model: WanModel, dtype: str, save: Path) -> RunConfig:
    """Return the configuration to store in the checkpoint that is written to ``save``.

    It is that of a ``--task streaming`` run whose generator is ``model``, in ``dtype``.
    """
    streaming = StreamingConfig(generator_size=model.size, text_features=model.sizes.text_width)
    flags = {word.removeprefix("--"): True for word in PRECISIONS[dtype]}
    config = RunConfig(sections=tuple(kind() for kind in SECTIONS))
    return dataclasses.replace(
        config.with_section(streaming, VideoConfig(task="streaming")),
        model=streaming.described(config.model),
        precision=PrecisionConfig(**flags),
        checkpoint=CheckpointConfig(save=str(save), no_save_optim=True, no_save_rng=True),
    )


@torch.no_grad()
def fill(chunk: VideoDiT, naming: Naming, tensors: TensorSource) -> None:
    """Copy Wan's tensors into an unsharded model, one parameter at a time."""
    parameters = list(chunk.named_parameters())
    bar = tqdm(parameters, "Importing", unit="tensor", delay=1.0, leave=False, disable=None)
    for name, parameter in bar:
        parts = [tensors.tensor(full) for full in wan_names(name, naming)]
        parameter.copy_(from_wan(name, parts, chunk.sizes))


def check_tensors(sizes: VideoDiTSizes, naming: Naming, tensors: TensorSource) -> None:
    """Check that names and shapes of tensors are exactly those of a model of these sizes.

    A CheckpointError names the first tensor that is missing, has another shape, or is unknown.
    """
    actual = tensors.shapes()
    expected = dict[str, tuple[int, ...]]()
    for name, shape in shapes(sizes).items():
        parts = to_wan(name, torch.empty(shape, device="meta"), sizes)
        names = wan_names(name, naming)
        expected |= {full: tuple(part.shape) for full, part in zip(names, parts, strict=True)}
    for full, shape in expected.items():
        if full not in actual:
            raise CheckpointError(
                f"{tensors.folder} holds no `{full}`, which Wan 2.1 has; copy the whole model "
                "again."
            )
        if actual[full] != shape:
            raise CheckpointError(
                f"{tensors.folder} holds `{full}` with shape {list(actual[full])}, but the sizes "
                f"of the model imply {list(shape)}; copy the whole model again."
            )
    extra = sorted(actual.keys() - expected.keys())
    if extra:
        raise CheckpointError(
            f"{tensors.folder} holds `{extra[0]}`, which Wan 2.1 text to video does not have; use "
            "a model without it."
        )
