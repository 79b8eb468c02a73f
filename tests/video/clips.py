"""Tiny folders of made-up latents, as tools/preprocess_video.py would write them, and their runs.

C = 4, 8 × 8 latents of 1, 3 and 5 frames, 8 text tokens.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.train.run import Run
from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig, TextEncoderConfig
from megatron_ext.video.data.encode import VideoSample, reference_names
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.data.shards import FORMAT, ShardWriter, shard_name, write_json, write_null
from megatron_ext.video.data.text_encoders import build_text_encoder
from megatron_ext.video.task import FLOW
from tests.training_runs import train_on_ranks, training_rows

CHANNELS, SIDE, TEXT, WIDTH, POOLED = 4, 8, 8, 12, 6
IMAGE, SHORT, LONG = (Bucket("64px", frames, 64, 64) for frames in (1, 9, 17))
HASHED = TextEncoderConfig(text_length=TEXT, text_width=WIDTH, pooled_width=POOLED)
FLAGS = (
    "--mmdit-size tiny --no-adaln-zero --train-iters 3 --lr 1e-3 --lr-warmup-iters 1 "
    "--micro-batch-size 2 --global-batch-size 8 --log-interval 1 --num-workers 0"
).split()
"""A run of three steps in which every weight takes part from the first one on."""
Rows = list[dict[str, Any]]


def latent_frames(bucket: Bucket) -> int:
    return (bucket.num_frames - 1) // 4 + 1


IMAGE_WIDTH = 20
MASKED = ("masked_none", "masked_head1", "masked_tail1", "masked_loop1")


def clip(
    bucket: Bucket, number: int, lengths: Sequence[int] = (1,), *, text: int = TEXT, images: int = 0
) -> VideoSample:
    """Return a clip whose latents, caption and references of these lengths its number decides.

    With ``images``, tokens of an image encoder, it also has those of its first and last frame, and
    latents of copies that are zero at all other frames.
    """
    random = torch.Generator().manual_seed(1000 + number)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    t = latent_frames(bucket)
    latents = normal(CHANNELS, t, SIDE, SIDE)
    references = {}
    for length in lengths:
        if length < t:
            # Encoded by themselves, the frames are not quite those of the whole clip.
            references[f"head{length}"] = 0.9 * latents[:, :length]
            references[f"tail{length}"] = 0.9 * latents[:, -length:]
    caption, pooled = normal(text, WIDTH), normal(POOLED)
    fps = 24 if t > 1 else 0
    embeds = {}
    if images:
        references |= {name: normal(*latents.shape) for name in MASKED}
        embeds = {side: normal(images, IMAGE_WIDTH) for side in ("head", "tail")}
    name = f"clip {number}"
    return VideoSample(latents, caption, pooled, references, fps, number, name, embeds)


def write_clips(
    folder: Path, counts: Mapping[Bucket, int], sizes: Mapping[Bucket, int] | None = None, *,
    distinct: int | None = None, lengths: Sequence[int] = (1,), storage: str = "float32",
    text: int = TEXT, images: int = 0, **manifest: Any,
) -> Path:  # fmt: skip
    """Write a folder of clips, numbered bucket by bucket; after ``distinct`` ones they repeat."""
    folder.mkdir(parents=True)
    names = reference_names(EncodeConfig(reference_lengths=lengths))
    others = names
    if images:
        names = (*names, *MASKED)
        others = (*names, "image_head", "image_tail")
        sides = {"sides": ["head", "tail"], "tokens": images, "width": IMAGE_WIDTH}
        manifest = {"image_encoder": {}, "image_embeds": sides, **manifest}
    buckets = sorted(counts)
    numbered = [(i, bucket) for i, bucket in enumerate(buckets) for _ in range(counts[bucket])]
    with ShardWriter(folder, shard_name(0), others, storage) as writer:
        for number, (index, bucket) in enumerate(numbered):
            place = number % (distinct or len(numbered))
            writer.add(clip(bucket, place, lengths, text=text, images=images), index)
    write_null(folder, torch.zeros(text, WIDTH), torch.zeros(POOLED), storage)
    sizes = sizes or {}
    entries = [{"shape": asdict(b), "micro_batch_size": sizes.get(b)} for b in buckets]
    content = {
        "format": FORMAT,
        "codec": asdict(CodecConfig(codec_channels=CHANNELS)),
        "text_encoder": build_text_encoder(HASHED).identity,
        "encode": {"fps_cap": 24, "reference_lengths": list(lengths)},
        "plan": {"64px": {str(bucket.num_frames): [1.0, None] for bucket in buckets}},
        "buckets": entries,
        "storage": storage, "references": list(names), "latent_channels": CHANNELS,
        "text_length": text, "text_width": WIDTH, "pooled_width": POOLED, "fps": 24,
        "shards": [{"name": shard_name(0), "clips": len(numbered)}],
        **manifest,
    }  # fmt: skip
    deciding = json.dumps(content, sort_keys=True).encode()
    fingerprint = hashlib.sha256(deciding).hexdigest()
    write_json(folder / "manifest.json", {**content, "fingerprint": fingerprint})
    return folder


def attempt(
    data: Path, save: Path, words: str = "", *, flags: Sequence[str] = FLAGS, ranks: int = 1,
    **options: Any,
) -> tuple[int, Rows]:  # fmt: skip
    flags = [*flags, "--video-data-path", str(data), *words.split()]
    return train_on_ranks(flags, ranks=ranks, save=save, **{"task": FLOW, **options})


def train(data: Path, save: Path, words: str = "", **options: Any) -> Rows:
    code, rows = attempt(data, save, words, **options)
    assert code == 0
    return rows


def steps(data: Path, save: Path, words: str = "", **options: Any) -> Rows:
    return training_rows(train(data, save, words, **options))


def record_steps(run: Run, folder: Path) -> None:
    """Let rank 0 save the inputs and targets of each training step as ``folder/STEP.pt``."""
    if run.context.rank != 0:
        return
    folder.mkdir(exist_ok=True)
    next_step = run.train_source.next_step

    def recorded(num_microbatches: int, seq_length: int | None) -> Any:
        batches: Any = next_step(num_microbatches, seq_length)
        targets = [{} if batch.targets is None else vars(batch.targets) for batch in batches]
        content = [{**batch.inputs, **own} for batch, own in zip(batches, targets, strict=True)]
        torch.save(content, folder / f"{run.progress.iteration + 1}.pt")
        return batches

    run.train_source.next_step = recorded  # type: ignore[method-assign]


def recorded_steps(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the micro-batches of each step, by the step's number from 1 on."""
    return {int(path.stem): torch.load(path) for path in folder.iterdir()}
