"""One pipeline chunk of a Wan network, causal or bidirectional.

All blocks need the embedded timesteps, text and vision tokens. Only the first stage embeds them;
stages pass them on as extra rows of the hidden states, and their gradients return in the same
messages.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.model.attention import frame_rotary_table
from megatron_ext.video.model.cache import CachePass, CacheShape, KVCache
from megatron_ext.video.model.chunk import Blocks, Blueprint, Part, VideoChunk, stage_blocks
from megatron_ext.video.model.linear import mark_replicated, start_at_zero
from megatron_ext.video.model.tokens import FrameTokens, frames_first, grid, positions, unpack
from megatron_ext.video.networks.wan.attention import AttentionPlan
from megatron_ext.video.networks.wan.blocks import Block, Conditioning, Embedder, Run, check_inputs
from megatron_ext.video.networks.wan.pointwise import ModulationTable, modulated_frames_alone


class Head(Part):
    """The output head: LayerNorm modulated by a learned table and time, then a linear layer."""

    def __init__(self, plan: Blueprint) -> None:
        super().__init__(plan)
        self.modulation = ModulationTable(plan.config, 2)
        self.linear = torch.nn.Linear(plan.sizes.hidden_size, plan.sizes.token_width)
        if plan.options.zero_head:
            start_at_zero(self.linear)
        mark_replicated(self.linear, plan.config)

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        """Return the predicted patches ``[s, b, c * p * p]`` for tokens ``[s, b, h]`` of f frames.

        ``time`` holds their embedded timesteps, ``[f, b, h]``, or ``[1, b, h]`` for all frames.
        """
        shift, scale = self.modulation(time.unsqueeze(2))
        return self.linear(modulated_frames_alone(hidden, shift, scale))  # type: ignore[no-any-return]


class VideoDiT(VideoChunk):
    """One pipeline chunk of a Wan network, causal if its options have a ``window`` of frames.

    The first chunk holds the embedder, the last chunk the head.

    Raises:
        ConfigError: there are more stages than blocks, or the ranks that trade heads for tokens
            (``cp_comm_type`` "a2a") cannot divide the heads equally.
    """

    title = "video DiT"

    def __init__(self, plan: Blueprint, stage: int, num_stages: int) -> None:
        super().__init__(plan, stage, num_stages)
        self.embedder = Embedder(plan) if self.pre_process else None
        self.blocks = Blocks()
        for number in stage_blocks(plan.sizes.num_blocks, num_stages)[stage]:
            self.blocks[str(number)] = Block(plan, number)
        self.head = Head(plan) if self.post_process else None

    def boundary_shape(
        self,
        x: Tensor,
        timesteps: Tensor,
        text: Tensor,
        condition: Tensor | None = None,
        vision: Tensor | None = None,
    ) -> list[int]:
        """Return the shape of the tensor that stages send each other, ``[s + 7 f + l + k, b, h]``.

        The rows are s image tokens, f timesteps with 7 rows each (`Conditioning.rows`), l text
        tokens and k vision tokens.
        """
        part = self._tokens(x, 0).held
        rows = x.size(1) * (part.stop - part.start)
        extra = 7 * _per_frame(timesteps).size(1) + text.size(1) + _count(vision)
        return [rows + extra, x.size(0), self.sizes.hidden_size]

    def new_cache(
        self,
        batch_size: int,
        height: int,
        width: int,
        *,
        chunk_frames: int | None = None,
        capacity_frames: int | None = None,
    ) -> KVCache:
        """Return an empty cache for latents ``[b, t, c, height, width]``.

        Args:
            chunk_frames: how many of the newest frames may be run again, to train on them or to
                recompute them; the frames before them that they attend to stay cached. None means
                one block of frames, as in sampling.
            capacity_frames: number of frames that the cache holds; None means the fewest that
                ``chunk_frames`` allows.

        Raises:
            ConfigError: the model is not causal, is on several pipeline stages, or the capacity is
                too small.
        """
        window = self.options.window
        if window is None or self.num_stages > 1:
            raise ConfigError(
                "a cache needs a causal model on one pipeline stage; give the options a `window`, "
                "and use tensor and context parallelism instead of pipeline stages."
            )
        chunk = window.block if chunk_frames is None else chunk_frames
        capacity = window.capacity_for(chunk) if capacity_frames is None else capacity_frames
        weight = next(self.parameters())
        shape = self._cache_shape(batch_size, height, width)
        return KVCache(
            window, shape, capacity_frames=capacity, chunk_frames=chunk, dtype=weight.dtype,
            device=weight.device,
        )  # fmt: skip

    def forward(
        self,
        *,
        x: Tensor,
        timesteps: Tensor,
        text: Tensor,
        condition: Tensor | None = None,
        vision: Tensor | None = None,
        cache: KVCache | None = None,
        first_frame: int = 0,
        update_cache: bool = True,
    ) -> Tensor:
        """Run this chunk on whole inputs, which are the same on all ranks of a replica.

        Arguments are passed by keyword, so that megatron-core's 16-bit wrapper does not cast the
        timesteps. Stages after the first read only the shapes of latents, timesteps and text. The
        backward pass sums the gradients of all context-parallel ranks' losses; the gradient of
        ``x`` is zero at tokens that other ranks hold.

        Args:
            x: noised latents, ``[b, t, c, h, w]``; a causal model needs whole frame blocks.
            timesteps: for each frame ``[b, t]`` or for each sample ``[b]``, float32, 0 to 1000.
            text: ``[b, l, text_width]``, with zeros as padding.
            condition: mask and latents of given frames, ``[b, t, condition_channels, h, w]``; None
                for a model without such channels.
            vision: tokens of a vision encoder, ``[b, k, vision_width]``; None for a model without
                keys and values for them.
            cache: keys and values of earlier frames; with None, frames attend only to each other.
            first_frame: absolute number of the first frame.
            update_cache: whether to write the keys and values of these frames, detached, to the
                cache.

        Returns:
            On the last stage the flow ``noise - x0``, ``[b, t, c, h, w]``, on every rank. On other
            stages hidden states, timesteps and text in the shape of `boundary_shape`.

        Raises:
            ConfigError: the cache was built for another model or size, or dropped frames
                that the pass needs.
            DataError: an input has a wrong shape, or earlier frames are not in the cache.
        """
        check_inputs(self.sizes, x, timesteps, text, condition, vision)
        tokens = self._tokens(x, first_frame)
        reading = self._open_cache(cache, x, first_frame, update_cache)
        text_key_values = None
        if cache is not None and not torch.is_grad_enabled():
            text = text[:, :0] if cache.memo.begin(text) else text
            text_key_values = cache.memo.key_values
        read = x if condition is None else torch.cat((x, condition.to(x.dtype)), dim=2)
        hidden, given = self._enter(read, _per_frame(timesteps), text, vision, tokens)
        ids = positions(tokens, hidden.device)
        num_frames = x.size(1)
        table = frame_rotary_table(ids, self.sizes.axes_dim, self.sizes.rope_theta, hidden.dtype)
        if self.options.window is None:
            plan = AttentionPlan.bidirectional(num_frames)
        else:
            past = () if reading is None else reading.past
            plan = AttentionPlan.causal(self.options.window, first_frame, num_frames, past)
        run = Run(num_frames, tokens.tp_size, table, plan, reading, text_key_values)
        for block in self.blocks.values():
            assert isinstance(block, Block)
            if block.number < self.options.recompute_blocks and torch.is_grad_enabled():
                # Inputs alone are kept, and need not require a gradient.
                hidden = torch.utils.checkpoint.checkpoint(
                    block, hidden, given, run, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = block(hidden, given, run)
        if reading is not None:
            reading.finish()
        if self.head is None:
            return torch.cat((hidden, given.rows()))
        return self._flow(self.head(hidden, given.time), tokens, x)

    def _tokens(self, x: Tensor, first_frame: int) -> FrameTokens:
        _, t, _, height, width = x.shape
        _, rows, columns = grid((t, height, width), self.sizes.patch_size)
        groups = [self.cp_group, *([self.tp_group] if self.config.sequence_parallel else [])]
        shares = [share for group in groups for share in (group.rank(), group.size())]
        return FrameTokens(first_frame, t, rows, columns, *shares)

    def _cache_shape(self, batch: int, height: int, width: int) -> CacheShape:
        _, rows, columns = grid((1, height, width), self.sizes.patch_size)
        cp = self.cp_group.size()
        tokens = FrameTokens(0, 1, rows, columns, 0, cp).per_frame
        heads = self.sizes.num_heads // self.tp_group.size()
        if self.options.cp_comm_type == "a2a":
            heads //= cp
        else:
            tokens //= cp
        return CacheShape(self.sizes.num_blocks, tokens, batch, heads, self.sizes.head_dim)

    def _open_cache(
        self, cache: KVCache | None, x: Tensor, first_frame: int, update: bool
    ) -> CachePass | None:
        if cache is None:
            return None
        b, t, _, height, width = x.shape
        own = self._cache_shape(b, height, width)
        if cache.window != self.options.window or cache.shape != own:
            raise ConfigError(
                f"the cache ({cache.window}, {cache.shape}) must be that of the model and its "
                f"inputs ({self.options.window}, {own}); build it by `new_cache`."
            )
        return CachePass(cache, first_frame, t, updates=update)

    def _enter(
        self, x: Tensor, timesteps: Tensor, text: Tensor, vision: Tensor | None, tokens: FrameTokens
    ) -> tuple[Tensor, Conditioning]:
        """Return (hidden states, conditioning), embedded here or received."""
        if self.embedder is not None:
            hidden = self.embedder.tokens(x, tokens)
            return hidden, self.embedder.conditioning(timesteps, text, vision)
        assert self.entering is not None
        num_times = timesteps.size(1)
        num_vision = _count(vision)
        split = self.entering.size(0) - 7 * num_times - text.size(1) - num_vision
        hidden, rows = self.entering.tensor_split((split,))
        return hidden, Conditioning.from_rows(rows, num_times, num_vision)

    def _flow(self, output: Tensor, tokens: FrameTokens, x: Tensor) -> Tensor:
        """Gather the ranks' tokens ``[s, b, c * p * p]`` and return latents ``[b, t, c, h, w]``."""
        for size, group, sums in (
            (tokens.tp_size, self.tp_group, False),
            (tokens.cp_size, self.cp_group, True),
        ):
            if size > 1:
                output = gather_from_sequence_parallel_region(
                    output, tensor_parallel_output_grad=sums, group=group
                )
                output = frames_first(output, size, tokens.num_frames).flatten(0, 1)
        _, t, _, height, width = x.shape
        packed = output.transpose(0, 1)
        return unpack(packed, (t, height, width), self.sizes.patch_size).transpose(1, 2)


def _per_frame(timesteps: Tensor) -> Tensor:
    """Return timesteps ``[b]`` as ``[b, 1]``, and timesteps ``[b, t]`` unchanged."""
    return timesteps.unsqueeze(1) if timesteps.dim() == 1 else timesteps


def _count(vision: Tensor | None) -> int:
    """Return the number of vision tokens of ``[b, k, vision_width]``; 0 for None."""
    return 0 if vision is None else vision.size(1)
