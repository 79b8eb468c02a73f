"""Imports published weights of a video network as a checkpoint, which loads in any layout."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_ext.checkpoint.conversion import (
    one_rank,
    refuse_checkpoints,
    save_streamed,
)
from megatron_ext.checkpoint.safetensors_files import only_dtype, torch_dtype
from megatron_ext.config.flag_line import words_of
from megatron_ext.config.flags import flags_of
from megatron_ext.config.precision import PRECISIONS
from megatron_ext.config.run import RunConfig, engine_sections, named
from megatron_ext.errors import CheckpointError
from megatron_ext.video.config.rules import SECTIONS, resolve_flow
from megatron_ext.video.convert.reading import open_published
from megatron_ext.video.networks.lookup import network_of, streamed_network
from megatron_ext.video.networks.network import STREAMING, Sections
from megatron_ext.video.streaming.config import StreamingConfig


@dataclasses.dataclass(frozen=True)
class Imported:
    """The checkpoint that an import has written.

    Attributes:
        kind: the kind of run whose checkpoint it is: a ``--video-model``, or `STREAMING`.
        sections: the flags, by section and field, that describe the network.
        dtype: dtype of the checkpoint, such as ``"bfloat16"``.
    """

    kind: str
    sections: Sections
    dtype: str

    @property
    def words(self) -> list[str]:
        """Return the flags of a run, of this kind, that trains the network."""
        streams = self.kind == STREAMING
        words = ["--task", STREAMING] if streams else ["--video-model", self.kind]
        for name, section in (engine_sections() | named(SECTIONS)).items():
            values = self.sections.get(name, {})
            for flag in flags_of(name, section):
                words += words_of(flag, values.get(flag.field))
        return words


def import_weights(
    source: Path, save: Path, dtype: str | None = None, entry: str | None = None
) -> Imported:
    """Write published weights as a checkpoint of iteration 0, one parameter at a time.

    Args:
        source: folder with config.json and safetensors, or a file of safetensors or torch.save.
        save: folder for the checkpoint.
        dtype: dtype of the checkpoint; None keeps that of the source.
        entry: key in a torch.save file; None takes the file's only dictionary of tensors.

    Raises:
        CheckpointError: the model cannot be converted, or a folder cannot be read or written.
    """
    refuse_checkpoints(save)
    with open_published(source, entry) as model:
        model.check()
        dtype = dtype or only_dtype(source, model.tensors.dtypes().values())
        if dtype not in PRECISIONS:
            raise CheckpointError(
                f"{source} holds weights in 8 bits, in which none are trained; give the dtype of "
                f"the checkpoint as `--dtype`, such as bfloat16."
            )
        kind = model.conversion.kinds(model.sizes)[0]
        sections = model.conversion.sections(model.sizes, kind)
        config = run_config(sections, kind, dtype, save)
        with one_rank(config.training.seed) as context:
            kept = torch_dtype(dtype)
            transformer_config = TransformerConfig(
                **model.sizes.transformer_fields(),
                params_dtype=kept,
                use_cpu_initialization=True,
                perform_initialization=False,
            )
            network, options = _network(config, kind)
            with torch.device("meta"):
                chunk = network.chunk.build(model.sizes, options, transformer_config, context)
            read = partial(model.parameter, dtype=kept)
            save_streamed(chunk.to(kept), save, context, read, config.to_dict())
    return Imported(kind, sections, dtype)


def _network(config: RunConfig, kind: str) -> tuple[Any, Any]:
    """Return the network of a kind of run, and the options to build it with."""
    if kind == STREAMING:
        network = streamed_network()
        streaming = config.section(StreamingConfig)
        return network, network.options(streaming, config.parallel, causal=False)
    flow = network_of(config)
    return flow, flow.options


def run_config(sections: Sections, kind: str, dtype: str, save: Path) -> RunConfig:
    """Return the configuration to store in the checkpoint that is written to ``save``.

    It is that of a run of this kind whose network the flags ``sections`` describe, in ``dtype``.
    """
    streams = kind == STREAMING
    flags = {word.removeprefix("--"): True for word in PRECISIONS[dtype]}
    config = RunConfig.from_dict(
        {
            **sections,
            "video": {"task": "streaming"} if streams else {"video_model": kind},
            "precision": flags,
            "checkpoint": {"save": str(save), "no_save_optim": True, "no_save_rng": True},
        },
        SECTIONS,
    )
    if not streams:
        return resolve_flow(config)
    model = config.section(StreamingConfig).described(config.model)
    return dataclasses.replace(config, model=model)
