"""Clips of a list, planned as preprocessing plans them, and encoded in the data loader."""

from __future__ import annotations

import sys

from megatron_ext.data.video.clips import read_list
from megatron_ext.data.video.codecs import build_codec
from megatron_ext.data.video.dataset import OnlineVideos
from megatron_ext.data.video.encode import ClipEncoder
from megatron_ext.data.video.manifest import make_manifest
from megatron_ext.data.video.options import VideoPreprocessOptions
from megatron_ext.data.video.planning import check_codec, plan_clips, report
from megatron_ext.data.video.text_encoders import build_text_encoder


def open_online(options: VideoPreprocessOptions, *, tell: bool) -> OnlineVideos:
    """Look at every clip of a list, and say which ones are left out.

    Args:
        options: as for preprocessing; nothing is written.
        tell: print the dropped clips.

    Raises:
        ConfigError, DataError: as preprocessing.
    """
    codec = build_codec(options.codec, seed=options.encode.clip_seed)
    check_codec(options.plan, codec, options.encode.reference_lengths)
    clips = read_list(options.input)
    planned, dropped = plan_clips(clips, options.plan, options.encode, workers=options.workers)
    if tell:
        for line in report(dropped, len(clips)):
            print(f"> {line}", file=sys.stderr)
    text_encoder = build_text_encoder(options.text_encoder)
    manifest = make_manifest(options, clips, planned, codec, text_encoder)
    encoder = ClipEncoder(options.encode, codec, text_encoder)
    return OnlineVideos(planned, encoder, options.plan, manifest)
