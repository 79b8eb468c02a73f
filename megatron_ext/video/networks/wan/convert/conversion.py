"""Implements `Conversion`, through which the tools import and export public weights, for Wan."""

from __future__ import annotations

from pathlib import Path

from megatron_ext.checkpoint.conversion import PeftLayers
from megatron_ext.video.networks.network import Conversion
from megatron_ext.video.networks.wan.config import VideoDiTSizes
from megatron_ext.video.networks.wan.convert.config import CLASSES
from megatron_ext.video.networks.wan.convert.export import export_wan
from megatron_ext.video.networks.wan.convert.names import Naming, wan_adapters
from megatron_ext.video.networks.wan.convert.weights import import_wan
from megatron_ext.video.weight_files import SUFFIXES


class WanConversion(Conversion):
    """Reads and writes weights of Wan 2.1, named as in diffusers or in the original repository."""

    title = "Wan"
    namings = tuple(naming.value for naming in Naming)
    classes = CLASSES

    def reads_file(self, source: Path) -> bool:
        return source.suffix in SUFFIXES

    def import_weights(
        self, source: Path, save: Path, dtype: str | None, entry: str | None
    ) -> tuple[str, str]:
        return import_wan(source, save, dtype, entry)

    def export_weights(
        self,
        load: Path,
        target: Path,
        *,
        step: int | None,
        dtype: str | None,
        max_shard_size: int | str,
        ema: bool,
        network: str | None,
        naming: str | None,
    ) -> None:
        export_wan(
            load,
            target,
            step=step,
            dtype=dtype,
            max_shard_size=max_shard_size,
            ema=ema,
            network=network,
            naming=Naming(naming or self.namings[0]),
        )

    def adapters(self, sizes: VideoDiTSizes) -> PeftLayers:
        return wan_adapters(sizes.head_dim)


CONVERSION = WanConversion()
