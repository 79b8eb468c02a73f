"""The files that flow matching needs; encoded clips are looked for without importing torch.

A refused run reports missing files together with the mistakes in its flags, so these checks must be
quick.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.train.task import later
from megatron_ext.video.config.encoding import CodecConfig, ImageEncoderConfig, TextEncoderConfig
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.config.weights import weights_inputs
from megatron_ext.video.data.blend import blend_of

DATA = "megatron_ext.video.data"


def video_inputs(config: RunConfig) -> list[Callable[[], Any]]:
    """Return a check for each list or folder of clips, weights, and folder of an encoder.

    A check is a function that reads the file or folder and raises an error if that is not possible.
    Encoders are checked only for ``--online-encoding`` and ``--dry-run-shape``.
    """
    video = config.section(VideoConfig)
    encoder = config.section(TextEncoderConfig)
    encoder_checks = later(f"{DATA}.text_encoders:encoder_checks")
    weights = weights_inputs(config)
    codec = partial(later(f"{DATA}.codecs:check_codec_folder"), config.section(CodecConfig))
    if video.dry_run_shape is not None:
        checks: list[Callable[[], Any]] = encoder_checks(encoder)
        return [*weights, *checks]
    if video.video_data_path is None and weights and config.training.skip_train:
        # Only tools/sample_video.py, which sets ``skip_train``, needs no data.
        return [*weights, *encoder_checks(encoder), codec]
    blend = partial(blend_of, video.video_data_path or ())
    try:
        paths = blend().paths
    except ConfigError:
        return [*weights, blend]
    given = [("--video-data-path", path) for path in paths]
    if video.video_valid_path is not None:
        given += [("--video-valid-path", path) for path in video.video_valid_path]
    if not video.online_encoding:
        read_manifest = later(f"{DATA}.manifest:read_manifest")
        return [*weights, *(partial(read_manifest, Path(path)) for _, path in given)]
    read_list = later(f"{DATA}.clips:read_list")
    lists = [partial(read_list, path, flag=flag) for flag, path in given]
    image = config.section(ImageEncoderConfig).image_encoder
    images = (
        []
        if image is None
        else [partial(later(f"{DATA}.image_encoder:check_image_encoder"), image)]
    )
    return [*weights, *lists, *encoder_checks(encoder), codec, *images]
