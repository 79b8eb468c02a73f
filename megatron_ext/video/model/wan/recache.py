"""History encoded anew under a new prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.model.wan.cache import KVCache
from megatron_ext.video.model.wan.model import VideoDiT


@torch.no_grad()
def recache(
    model: VideoDiT,
    cache: KVCache,
    *,
    latents: Tensor,
    first_frame: int,
    timestep: float,
    text: Tensor,
    sink_latents: Tensor | None = None,
    keep_sink: bool = False,
) -> None:
    """Fill a cache anew from clean frames, block by block, so that each sees only its own past.

    Nothing that was made under the old prompt is left: frames before ``first_frame`` are seen no
    more, but for the sinks, which are made anew from their latents. The next frame is the one after
    the last of ``latents``.

    Args:
        model: causal, without wrappers.
        latents: clean frames up to the newest, ``[b, t, c, h, w]``.
        first_frame: absolute number of the first of them.
        timestep: timestep that the model is told, the context noise.
        text: the new prompt, ``[b, l, text_width]``.
        sink_latents: clean frames from frame 0 on, at least the sinks before ``first_frame``;
            needed only if there are such.
        keep_sink: leave the sinks as the old prompt made them, as LongLive's sampling does;
            ``first_frame`` must then lie behind them.

    Raises:
        ConfigError: sinks are neither given nor kept, or both, or too few.
        DataError: the frames are not whole blocks.
    """
    window = cache.window
    num_sinks = min(window.sink, first_frame)
    _check_sinks(num_sinks, first_frame, sink_latents, keep_sink, cache)
    pieces = [(first_frame, latents)]
    if num_sinks and sink_latents is not None:
        whole_blocks = -(-num_sinks // window.block) * window.block
        pieces.insert(0, (0, sink_latents[:, :whole_blocks]))
    # All frames are checked before the cache is touched.
    starts = [list(window.blocks(start, frames.size(1))) for start, frames in pieces]
    cache.reset(keep_sink=keep_sink)
    for (start, frames), blocks in zip(pieces, starts, strict=True):
        if start:
            cache.skip_to(start)
        for block in blocks:
            x = frames[:, block - start : block - start + window.block]
            t = torch.full(x.shape[:2], timestep, dtype=torch.float32, device=x.device)
            model(x=x, timesteps=t, text=text, cache=cache, first_frame=block)


def _check_sinks(
    num_sinks: int,
    first_frame: int,
    sink_latents: Tensor | None,
    keep_sink: bool,
    cache: KVCache,
) -> None:
    window = cache.window
    if keep_sink and first_frame < window.sink:
        raise ConfigError(
            f"`keep_sink` keeps frames 0 to {window.sink - 1}, but `latents` begin at frame "
            f"{first_frame} and would overwrite them; begin at frame {window.sink} or later."
        )
    given = 0 if sink_latents is None else sink_latents.size(1)
    if keep_sink and given:
        raise ConfigError("`sink_latents` were given, but `keep_sink` ignores them; drop one.")
    if keep_sink and num_sinks and not set(range(num_sinks)) <= set(cache.frames):
        raise ConfigError(
            f"`keep_sink` needs the sink frames (0 to {num_sinks - 1}) in the cache; give "
            "`sink_latents` instead."
        )
    blocks = -(-num_sinks // window.block) * window.block
    if not keep_sink and given < blocks:
        raise ConfigError(
            f"`sink_latents` ({given} frames) must hold the first {blocks} frames, or no frame "
            "after the switch would see a sink; keep them from the start of the sequence, or set "
            "`keep_sink`."
        )
