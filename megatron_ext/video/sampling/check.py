"""Checks, before a run starts, that clips can be sampled with its flags."""

from __future__ import annotations

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.run import ConditionConfig, SampleConfig, VideoConfig
from megatron_ext.video.networks.lookup import chosen, network_of
from megatron_ext.video.sampling.encoding import reference_parts
from megatron_ext.video.sampling.generate import schedule_of
from megatron_ext.video.sampling.groups import groups_of, shape_of
from megatron_ext.video.sampling.guidance import has_guidance
from megatron_ext.video.sampling.requests import requests_of
from megatron_ext.video.sampling.source import SampleSource, source_of


def check_sampling(config: RunConfig) -> SampleSource:
    """Check that clips can be sampled with the flags of a run, and return its encoders.

    Raises:
        ConfigError, DataError: prompts or references cannot be read, the size does not fit codec or
            model, or encoders or the scheduler cannot be built.
    """
    sample = config.section(SampleConfig)
    requests = requests_of(sample)
    model = config.section(VideoConfig).video_model
    with_reference = next((x for x in requests if x.reference is not None), None)
    if with_reference is not None and not chosen(config).is_given_references(config):
        raise ConfigError(
            f"The prompt {with_reference.text!r} has a reference ({with_reference.reference}), but "
            f"`--video-model {model}` is given no reference frames; leave it out."
        )
    led_away = next((x for x in requests if x.negative_prompt), None)
    if led_away is not None and not has_guidance(sample):
        raise ConfigError(
            f"The prompt {led_away.text!r} has a negative prompt ({led_away.negative_prompt!r}), "
            "which has no effect without guidance, that is with `--sample-text-scale 1`; leave it "
            "out, or give a larger scale."
        )
    source = source_of(config)
    source.check_text_encoder()
    codec = source.codec()
    for group in groups_of(requests, shape_of(sample, source.manifest), sample):
        shape = group.shape
        latent = codec.latent_shape(shape.num_frames, shape.height, shape.width)[1:]
        network = network_of(config)
        network.check_clips(latent, "Sampled clips")
        schedule_of(config, group.sampling).solver(latent, network.patch_size)
        for request in group.requests:
            if request.reference is not None:
                reference_parts(request, shape, codec, config.section(ConditionConfig))
    return source
