"""Prompts from files as embeddings, and what sequences are given to begin with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_ext.data.video.clips import Clip, decode, probe
from megatron_ext.data.video.codec_base import VideoCodec
from megatron_ext.data.video.codecs import build_codec
from megatron_ext.data.video.draws import generator
from megatron_ext.data.video.text_encoders import TextEncoder, build_text_encoder
from megatron_ext.errors import DataError
from megatron_ext.streaming.first_frame import CodecFirstFrame
from megatron_ext.streaming.prompts import Prompts
from megatron_ext.training.streaming.agreement import on_first_of_replica, share
from megatron_ext.training.streaming.prompt_file import PromptRow, read_prompts

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.layout import ParallelContext


class FilePrompts:
    """Prompts of samples, shuffled anew in each epoch; a `streaming.prompts.PromptSource`.

    Text and given frames are encoded when a sequence begins, by the first rank of each replica,
    which alone holds the encoders. All ranks of the run call each method together.

    Args:
        rows: of the file.
        config: of the run.
        context: of this rank.
        device: where the embeddings go.

    Attributes:
        codec: on the first rank of a replica, where first frames are encoded.

    Raises:
        ConfigError: encoders that cannot be built, on all ranks.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        config: RunConfig,
        context: ParallelContext,
        device: torch.device,
    ) -> None:
        self._rows, self._context, self._device = rows, context, device
        self._seed, self._block = config.training.seed, config.streaming.frame_block
        streaming = config.streaming
        self._latent = (streaming.sizes(None).channels, *streaming.latent_size)
        assert streaming.text_features is not None
        self._text = (config.text_encoder.text_length, streaming.text_features)
        self._encoder: TextEncoder | None = on_first_of_replica(
            lambda: build_text_encoder(config.text_encoder, device), "Loading the text", context
        )
        self.codec: VideoCodec | None = None
        if streaming.encode_first_frame or streaming.given_frames:
            self.codec = on_first_of_replica(
                lambda: build_codec(config.codec, device), "Loading the codec", context
            )

    @classmethod
    def build(
        cls, config: RunConfig, context: ParallelContext, device: torch.device
    ) -> FilePrompts:
        """Those of a run; see `read_prompts` for what is raised."""
        return cls(read_prompts(config.streaming), config, context, device)

    def __call__(self, samples: Sequence[int]) -> Prompts:
        """Prompts of samples, a function of their numbers in the run.

        Raises:
            DataError: a file of given frames that cannot be read, on all ranks.
        """
        rows = [self._row(sample) for sample in samples]
        second = [row.second_text for row in rows if row.second_text is not None]
        text = self.encode([row.text for row in rows] + second)
        after = text[len(rows) :] if second else None
        return Prompts(text[: len(rows)], after, self._start(rows))

    def encode(self, captions: Sequence[str]) -> Tensor:
        """Embeddings, ``[n, l, d]`` float32; one by one, for the memory of large encoders."""

        def encoded() -> Tensor:
            assert self._encoder is not None
            return torch.cat([self._encoder.encode([caption])[0] for caption in captions])

        known = on_first_of_replica(encoded, "Encoding the prompts", self._context)
        return share(known, (len(captions), *self._text), self._context, self._device)

    def first_frame(self, latents: Tensor) -> Tensor:
        """A `streaming.network.FirstFrame`: the same numbers on all ranks of a replica."""

        def image() -> Tensor:
            assert self.codec is not None
            return CodecFirstFrame(self.codec)(latents)

        known = on_first_of_replica(image, "Encoding the first frame", self._context)
        return share(known, (len(latents), 1, *self._latent), self._context, self._device)

    def _start(self, rows: Sequence[PromptRow]) -> Tensor | None:
        """Latents of the given frames, ``[b, block, c, h, w]``."""
        if any(row.start is None for row in rows):
            return None

        def encoded() -> Tensor:
            return torch.cat([self._given(row) for row in rows])

        known = on_first_of_replica(encoded, "Encoding given frames", self._context)
        shape = len(rows), self._block, *self._latent
        return share(known, shape, self._context, self._device)

    @torch.no_grad()
    def _given(self, row: PromptRow) -> Tensor:
        """The first frame block of a sequence, ``[1, block, c, h, w]``.

        A cache holds whole blocks, so an image is shown for as long as a block is.
        """
        assert row.start is not None and self.codec is not None
        codec = self.codec
        clip, count = Clip(row.start, row.text), (self._block - 1) * codec.temporal + 1
        found = probe(clip)
        if 1 < found.num_frames < count:
            raise DataError(
                f"{row.start} has {found.num_frames} frames, but a sequence begins with a block of "
                f"{self._block} latent frames, which are {count}; give a longer video or an image."
            )
        height, width = (size * codec.spatial for size in self._latent[1:])
        shown = min(count, found.num_frames)
        pixels = decode(clip, 0, 1, shown, (height, width))[None].to(self._device)
        pixels = pixels.expand(-1, -1, count, -1, -1) if shown == 1 else pixels
        return codec.encode(pixels).transpose(1, 2)

    def _row(self, sample: int) -> PromptRow:
        epoch, place = divmod(sample, len(self._rows))
        order = generator(self._seed, epoch, "streaming prompts").permutation(len(self._rows))
        return self._rows[int(order[place])]
