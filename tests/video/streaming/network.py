"""A causal network of a few layers with a real KV cache, in plain torch."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ext.errors import ConfigError
from megatron_ext.video.config.window import FrameBlocks
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.rollout import Generator, StreamClip
from megatron_ext.video.streaming.sequence import Prompts, Replica, StreamingSequence

TEXT, WIDTH = 4, 16
OPTIONS = StreamingConfig(
    chunk_frames=9, min_new_frames=6, max_new_frames=6, sequence_lengths=(27,), recache_frames=9,
    switches=True,
)  # fmt: skip
PLAIN = dataclasses.replace(OPTIONS, switches=False)
ALONE = dataclasses.replace(
    OPTIONS, independent_first_frame=True, chunk_frames=10, sequence_lengths=(28,)
)
"""Options under which the first frame is a block of its own; clips end at 10, 16, 22 and 28."""
PAPER = StreamingConfig(switches=True)


@dataclass(frozen=True)
class Window(FrameBlocks):
    window: int = 6
    sink: int = 3

    def seen(self, start: int) -> list[int]:
        end = start + (1 if self.first_alone and start == 0 else self.block)
        local = max(self.sink, end - (self.window - self.sink))
        return sorted({*range(min(self.sink, end)), *range(local, end)})


@dataclass
class Cache:
    """Keys and values by layer and frame."""

    window: Window
    capacity_frames: int
    layers: int
    held: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    end: int = 0
    absent_before: int = 0

    def reset(self, *, keep_sink: bool = False) -> None:
        self.held = {f: x for f, x in self.held.items() if keep_sink and f < self.window.sink}
        self.end = max(self.held, default=-1) + 1
        self.absent_before = 0

    def skip_to(self, frame: int) -> None:
        self.held = {f: x for f, x in self.held.items() if f < self.window.sink}
        self.end = self.absent_before = frame

    def past(self, start: int) -> list[int]:
        wanted = [f for f in self.window.seen(start) if f < start]
        wanted = [f for f in wanted if not self.window.sink <= f < self.absent_before]
        lost = [f for f in wanted if f not in self.held]
        if lost:
            raise ConfigError(f"frame {lost[0]} is not in the cache, but frame {start} sees it.")
        return wanted

    def write(self, frame: int, keys_values: list[tuple[Tensor, Tensor]]) -> None:
        assert frame == self.end or frame in self.held, "frames come in order"
        self.held[frame] = [(k.detach().clone(), v.detach().clone()) for k, v in keys_values]
        self.end = max(self.end, frame + 1)
        while len(self.held) > self.capacity_frames:
            del self.held[min(f for f in self.held if f >= self.window.sink)]

    def state_dict(self) -> dict[str, Any]:
        return {"held": dict(self.held), "end": self.end, "absent_before": self.absent_before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held = dict(state["held"])
        self.end, self.absent_before = state["end"], state["absent_before"]


def sinusoids(x: Tensor, size: int) -> Tensor:
    angles = x[..., None].to(x) * torch.exp(-torch.arange(size // 2, device=x.device) * 0.7).to(x)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.text_kv = nn.Linear(width, 3 * width), nn.Linear(TEXT, 2 * width)
        wide = 2 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, text: Tensor, past: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the output for ``x`` [b, n, width], and its keys and values."""
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        seen = [tuple(self.text_kv(text).chunk(2, dim=-1)), *past, (k, v)]
        keys, values = (torch.cat(part, dim=1) for part in zip(*seen, strict=True))
        x = x + torch.softmax(q @ keys.transpose(1, 2) / math.sqrt(q.size(-1)), dim=-1) @ values
        return x + self.mlp(self.norms[1](x)), k, v


class TinyDiT(nn.Module):
    """A network that is causal over blocks with a window; without one all frames see each other."""

    def __init__(self, window: Window | None, channels: int) -> None:
        super().__init__()
        self.window = window
        self.embed, self.head = nn.Linear(channels, WIDTH), nn.Linear(WIDTH, channels)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(2))
        self.calls: list[tuple[int, bool]] = []

    def forward(
        self, *, x: Tensor, timesteps: Tensor, text: Tensor, cache: Cache | None = None,
        first_frame: int = 0, update_cache: bool = True,
    ) -> Tensor:  # fmt: skip
        self.calls.append((first_frame, torch.is_grad_enabled()))
        if timesteps.dim() == 1:
            timesteps = timesteps[:, None].expand(x.shape[:2])
        starts = self._starts(first_frame, x.size(1))
        times = torch.tensor_split(timesteps, starts, dim=1)
        parts = [
            self._block(part, t, text, cache, first_frame + start, update_cache)
            for start, part, t in zip(
                (0, *starts), torch.tensor_split(x, starts, dim=1), times, strict=True
            )
        ]
        return torch.cat(parts, dim=1)

    def _starts(self, first_frame: int, num_frames: int) -> list[int]:
        """Return the places among the frames at which blocks after the first begin."""
        if self.window is None:
            return []
        first = 1 if self.window.first_alone and first_frame == 0 else self.window.block
        return [*range(first, num_frames, self.window.block)]

    def _block(
        self, x: Tensor, t: Tensor, text: Tensor, cache: Cache | None, start: int, update: bool
    ) -> Tensor:
        b, f, c, h, w = x.shape
        frames = torch.arange(start, start + f, device=x.device).to(x)
        tokens = self.embed(x.permute(0, 1, 3, 4, 2).reshape(b, f, h * w, c))
        tokens = tokens + sinusoids(frames, WIDTH)[None, :, None]
        tokens = tokens + self.time(sinusoids(t.to(x) / 100, WIDTH))[:, :, None]
        tokens = tokens.reshape(b, f * h * w, WIDTH)
        past = cache.past(start) if cache is not None else []
        new: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(f)]
        for number, layer in enumerate(self.layers):
            before = [cache.held[p][number] for p in past] if cache is not None else []
            tokens, k, v = layer(tokens, text, before)
            for i in range(f):
                part = slice(i * h * w, (i + 1) * h * w)
                new[i].append((k[:, part], v[:, part]))
        if cache is not None and update:
            for i in range(f):
                cache.write(start + i, new[i])
        return self.head(tokens).view(b, f, h, w, c).permute(0, 1, 4, 2, 3)


@torch.no_grad()
def recache(
    model: TinyDiT, cache: Cache, *, latents: Tensor, first_frame: int, timestep: float,
    text: Tensor, sink_latents: Tensor | None = None, keep_sink: bool = False,
) -> None:  # fmt: skip
    assert not keep_sink or first_frame >= cache.window.sink
    cache.reset(keep_sink=keep_sink)
    if first_frame and cache.window.sink and not keep_sink:
        assert sink_latents is not None
        t = torch.full(sink_latents.shape[:2], timestep)
        model(x=sink_latents, timesteps=t, text=text, cache=cache)
    if first_frame:
        cache.skip_to(first_frame)
    if latents.size(1):
        t = torch.full(latents.shape[:2], timestep)
        model(x=latents, timesteps=t, text=text, cache=cache, first_frame=first_frame)


def text_of(sample: int, which: str) -> Tensor:
    number = torch.Generator().manual_seed(2 * sample + (which == "after"))
    return torch.randn(3, TEXT, generator=number, dtype=torch.float64)


def prompts(samples: Sequence[int]) -> Prompts:
    text, after = (torch.stack([text_of(s, x) for s in samples]) for x in ("text", "after"))
    return Prompts(text, after)


def network(window: Window | None = None, *, seed: int = 0, channels: int = 2) -> TinyDiT:
    torch.manual_seed(seed)
    return TinyDiT(window, channels).double()


def build(
    options: StreamingConfig = OPTIONS, *, window: Window | None = None,
    replica: Replica | None = None, capacity: int | None = None,
    source: Callable[[Sequence[int]], Prompts] = prompts,
    shape: tuple[int, int, int] = (2, 2, 2), **others: Any,
) -> StreamingSequence:  # fmt: skip
    window = window or Window(options.frame_block, first_alone=options.independent_first_frame)
    capacity = capacity or window.window + options.chunk_frames - window.block
    model = network(window, channels=shape[0])
    cache = Cache(window, capacity, len(model.layers))
    others["like"] = torch.empty(0, 0, *shape, dtype=torch.float64)
    others["replica"] = replica or Replica(seed=1, batch=2)
    generator = Generator(model, cache, NoiseSchedule(options), recache)
    return StreamingSequence(options, generator, prompts=source, **others)


PAPER_WINDOW = Window(window=12)


def paper(options: StreamingConfig = PAPER, **others: Any) -> StreamingSequence:
    others.setdefault("replica", Replica(seed=1))
    return build(options, window=PAPER_WINDOW, shape=(1, 1, 1), **others)


def switching_at(frame: int, options: StreamingConfig = OPTIONS) -> StreamingConfig:
    return dataclasses.replace(options, switch_frames=(frame,))


def cache_of(sequence: StreamingSequence) -> Cache:
    cache = sequence.generator.cache
    assert isinstance(cache, Cache)
    return cache


def clips_of(sequence: StreamingSequence, number: int) -> list[StreamClip]:
    return [sequence.next_clip(trains_generator=False) for _ in range(number)]


def new_of(clip: StreamClip) -> Tensor:
    return clip.latents[:, -(clip.end - clip.first_new) :]
