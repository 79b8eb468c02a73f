"""The video DiT of streaming long-tuning: a causal student, and its bidirectional twin.

Wan 2.1's transformer (arXiv:2503.20314) with a timestep for each frame, made causal over blocks of
latent frames with a window, sink frames and a KV cache (LongLive, arXiv:2509.22622). Critic and
teacher are the same model without a window; weights fit both. The interface:

Build. ``VideoDiTOptions(window=FrameWindow(block=3, window=12, sink=3))`` makes a student,
``VideoDiTOptions()`` critic or teacher. ``config`` is a TransformerConfig with the fields of
``sizes.transformer_fields()``::

    network = build_video_dit_chunk(SIZES["1.3b"], options, config, context)

Forward, keywords only, with whole inputs, the same on all TP, CP and PP ranks of a replica::

    flow = network(
        x=x,                  # [b, t, c, h, w], noised latents
        timesteps=timesteps,  # [b, t] or [b], float32, 0 to 1000
        text=text,            # [b, l, text_width], padding zero
        cache=None,           # or a KVCache
        first_frame=0,        # absolute number of the first of the t frames
        update_cache=True,    # False: read the cache, write nothing
    )                         # flow = noise - x0, [b, t, c, h, w] on every rank (the last stage's)

    x0 = x0_from_flow(x, flow, sigma)        # sigma [b] or [b, t]; in float64
    flow = flow_from_x0(x, x0, sigma)

A causal model takes whole blocks of frames, one or several, at multiples of the block. Without a
cache it runs the whole sequence under the mask, and frames that are not given are not seen.

Cache::

    cache = network.new_cache(b, h, w, chunk_frames=21)   # window + chunk - block frames
    cache.reset()                                         # new sequence
    recache(network, cache, latents=last21, first_frame=cur - 21, timestep=0.0,
            text=new_prompt, sink_latents=first3)         # prompt switch
    cache.state_dict(), cache.load_state_dict(state)      # of this rank, text included

A pass with ``update_cache`` writes its frames' keys and values, cut from the graph: after the
newest frame it appends, and drops the oldest frames but the sinks if the cache is full; on frames
that are held it overwrites them. Denoising steps may run with ``update_cache=False``, the
write-back of the clean block with True; exit steps that are run again with gradient **must** run
with False, or later blocks would see their noised keys.

Passes without gradient reuse the text's keys and values while ``text`` stays the same, and follow
it when it changes (after an optimizer step ``cache.memo.clear()`` makes them fresh); passes with
gradient always compute them, so that text projections and text embedding are trained.

Parallel. Heads are dealt over TP, the tokens of every frame over CP (and over TP once more between
layers with sequence parallelism). Gradients of the parameters are summed over CP as over DP: take
the mean over both, as megatron-core's DDP does. Pipeline stages are for models without a cache;
``boundary_shape(x, timesteps, text)`` is what passes between them.
"""

from megatron_ext.config.video_dit_sizes import SIZES, VideoDiTSizes
from megatron_ext.models.causal_video.cache import KVCache
from megatron_ext.models.causal_video.conversions import flow_from_x0, x0_from_flow
from megatron_ext.models.causal_video.model import VideoDiT, build_video_dit_chunk
from megatron_ext.models.causal_video.options import VideoDiTOptions
from megatron_ext.models.causal_video.recache import recache
from megatron_ext.models.causal_video.window import FrameWindow

__all__ = [
    "SIZES",
    "FrameWindow",
    "KVCache",
    "VideoDiT",
    "VideoDiTOptions",
    "VideoDiTSizes",
    "build_video_dit_chunk",
    "flow_from_x0",
    "recache",
    "x0_from_flow",
]
