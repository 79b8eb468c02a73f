"""What streaming needs of networks, caches and codecs.

`models.causal_video` has networks and a cache of this kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class Window(Protocol):
    """Which frames a frame sees, see `models.causal_video.FrameWindow`."""

    @property
    def block(self) -> int:
        """Frames that see each other."""

    @property
    def window(self) -> int:
        """Frames that a frame sees at most, its block and the sinks among them."""

    @property
    def sink(self) -> int:
        """First frames of the video, which are always seen."""


class FrameCache(Protocol):
    """Keys and values of past frames. It holds no graph."""

    @property
    def window(self) -> Window:
        """Of the network."""

    @property
    def capacity_frames(self) -> int:
        """Frames that it holds."""

    def reset(self, *, keep_sink: bool = False) -> None:
        """Begin a new sequence: nothing of the old one is seen, nor its text."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors and numbers, for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""


class FlowNetwork(Protocol):
    """Critic or teacher: predicts the flow, noise - x0, of noised latents."""

    def __call__(self, *, x: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        """Flow of ``x``.

        Args:
            x: noised latents, ``[b, t, c, h, w]``.
            timesteps: of samples ``[b]`` or of frames ``[b, t]``, float32, 0 to 1000.
            text: embeddings of prompts, ``[b, l, d]``.
        """


class CausalNetwork(Protocol):
    """Generator: a flow network that sees past frames through a cache."""

    def __call__(
        self,
        *,
        x: Tensor,
        timesteps: Tensor,
        text: Tensor,
        cache: Any = None,
        first_frame: int = 0,
        update_cache: bool = True,
    ) -> Tensor:
        """Flow of whole blocks of frames; the other arguments as of `FlowNetwork`.

        Args:
            x: noised latents, ``[b, t, c, h, w]``.
            timesteps: of frames ``[b, t]``.
            text: embeddings of prompts, ``[b, l, d]``.
            cache: of the frames before, a `FrameCache`.
            first_frame: absolute number of the first of the t frames.
            update_cache: write these frames into the cache.
        """


class Recache(Protocol):
    """Fills a cache anew, block by block, see `models.causal_video.recache`."""

    def __call__(
        self,
        model: Any,
        cache: Any,
        /,
        *,
        latents: Tensor,
        first_frame: int,
        timestep: float,
        text: Tensor,
        sink_latents: Tensor | None = None,
        keep_sink: bool = False,
    ) -> None:
        """Leave nothing in the cache that was made under another prompt.

        Args:
            model: the generator.
            cache: to be filled.
            latents: frames up to the newest, ``[b, t, c, h, w]``.
            first_frame: absolute number of the first of them.
            timestep: that the model is told.
            text: the new prompt, ``[b, l, d]``.
            sink_latents: whole blocks of frames from frame 0 on, where ``first_frame`` is above 0.
            keep_sink: leave the sink frames as they are.
        """


class FirstFrame(Protocol):
    """Turns the newest of some latent frames into the latent of an image."""

    def __call__(self, latents: Tensor) -> Tensor:
        """``[b, 1, c, h, w]`` of frames in order, ``[b, t, c, h, w]``."""
