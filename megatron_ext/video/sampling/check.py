"""Checks, before a run starts, that clips can be sampled with its flags."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import CodecConfig, ImageEncoderConfig
from megatron_ext.video.config.run import ConditionConfig, SampleConfig, VideoConfig
from megatron_ext.video.networks.lookup import chosen, network_of
from megatron_ext.video.sampling.generate import schedule_of
from megatron_ext.video.sampling.groups import groups_of, shape_of
from megatron_ext.video.sampling.guidance import has_guidance
from megatron_ext.video.sampling.references import reference_parts
from megatron_ext.video.sampling.requests import ClipRequest, requests_of
from megatron_ext.video.sampling.source import FlagSource, SampleSource, source_of


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
    if with_reference is not None and not network_of(config).needs.references:
        raise ConfigError(
            f"The prompt {with_reference.text!r} has a reference ({with_reference.reference}), but "
            "the model is of text to video alone and has no input for it; leave it out, or train "
            "with a condition mode such as `--i2v-head-weight 1`."
        )
    source = source_of(config)
    _check_given(config, requests, source.image_folder)
    led_away = next((x for x in requests if x.negative_prompt), None)
    if led_away is not None and not has_guidance(sample):
        raise ConfigError(
            f"The prompt {led_away.text!r} has a negative prompt ({led_away.negative_prompt!r}), "
            "which has no effect without guidance, that is with `--sample-text-scale 1`; leave it "
            "out, or give a larger scale."
        )
    source.check_text_encoder()
    codec = source.codec()
    channels = getattr(network_of(config).sizes, "channels", codec.channels)
    is_usual = config.section(CodecConfig) == CodecConfig()
    if isinstance(source, FlagSource) and is_usual and codec.channels != channels:
        raise ConfigError(
            f"`--codec` is missing, without which clips are decoded from {codec.channels} channels "
            f"instead of the model's {channels}; give the folder of the model's VAE."
        )
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


def _check_given(config: RunConfig, requests: Sequence[ClipRequest], folder: str | None) -> None:
    """Check that each clip is given the frames that the network needs, and can be guided by them.

    ``folder`` is that of the image encoder, None if there is none.

    Raises:
        ConfigError: a reference or the image encoder is missing, or a flag has no effect.
    """
    needs = network_of(config).needs
    modes = config.section(ConditionConfig).modes
    images = config.section(ImageEncoderConfig).image_encoder
    if needs.masked or needs.image_places:
        without = next((x for x in requests if x.reference is None), None)
        if without is not None and "t2v" not in modes:
            raise ConfigError(
                f"The prompt {without.text!r} has no reference, but the model makes videos of "
                "images; give `--sample-image`, or `image` in its row of `--sample-prompts`."
            )
    scale = config.section(SampleConfig).sample_image_scale
    if needs.masked and scale != 1:
        raise ConfigError.about(
            "--sample-image-scale",
            f"{scale:g}",
            "has no effect on a model that is given frames as input channels",
            "use 1",
        )
    if needs.image_places and folder is None:
        raise ConfigError(
            "`--image-encoder` is missing, since the model is given an embedding of each image; "
            "give the folder of CLIP's vision model."
        )
    if images is not None and not needs.image_places:
        raise ConfigError.about(
            "--image-encoder",
            images,
            "has no effect: the model is given no embeddings of images",
            "leave it out",
        )
