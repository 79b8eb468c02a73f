"""The programs whose flags are combined: the smallest run of each, and the options it may take."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.train.main import main
from tests.combinations import layouts
from tests.combinations.layouts import Layout
from tests.combinations.options import Option, joined, networks_of, options_of

ENGINE = (
    "precision fp8 cuda_graphs engine training optimizer offload ema checkpoint fault_tolerance "
    "logging planning parallel"
).split()
"""Sections that every program shares."""
LAYERS = ("model", "positions", "attention", "latent_attention", "block", "moe")
"""Sections that describe a GPT."""


@dataclass(frozen=True)
class Program:
    """One kind of run: the script that a user would start, its smallest flags, and its sections.

    Flags of its own sections are drawn more often than those of ``others``. A run has so many
    iterations and goes on from the step ``saved_at``.
    """

    name: str
    script: str
    base: str
    main: Callable[[list[str]], int]
    sections: tuple[str, ...]
    others: tuple[str, ...] = ()
    layout: Callable[[random.Random, bool], Layout] = lambda dice, experts: layouts.draw(
        dice, experts=experts
    )
    iterations: int = 4
    saved_at: int = 2

    @property
    def options(self) -> tuple[Option, ...]:
        return options_of((*self.sections, *self.others), self.script)

    @property
    def networks(self) -> tuple[Option, ...]:
        return networks_of(self.name)


def _gpt(words: list[str]) -> int:
    from megatron_ext.text.task import TEXT

    return main(TEXT, words)


def _video(words: list[str]) -> int:
    from megatron_ext.video.task import VIDEO

    return main(VIDEO, words)


_MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --lr 3e-3 "
    "--log-interval 1 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 "
    "--init-method-std 0.1 --num-workers 0 "
)

GPT = Program(
    "gpt",
    "pretrain_gpt.py",
    _MODEL + "--train-iters 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 16",
    _gpt,
    ("whole", *LAYERS, "lora", "freeze", "loss", "data", "tokenizer", "text_sample", *ENGINE),
)

_CHATS = (
    "--no-mock-data --sft --train-data-path {data}/chats.jsonl --tokenizer-type "
    "HuggingFaceTokenizer --tokenizer-model {data}/tokenizer --seq-length 128 "
    "--max-position-embeddings 128 --position-embedding-type rope --padded-vocab-size 272"
)

SFT = Program(
    "sft",
    "pretrain_gpt.py",
    " ".join(joined([GPT.base.split(), _CHATS.split()])),
    _gpt,
    ("whole sft", "sft", "lora", "freeze", "loss"),
    (*LAYERS, "data", "tokenizer", "text_sample", *ENGINE),
)


def _flow_layout(dice: random.Random, experts: bool) -> Layout:
    """Draw a layout; blocks are dealt to stages by cost, so that only few flags share them out."""
    return _without_experts(layouts.draw(dice, limits=(2, 2, 2), stages=("plain", "vpp", "zb-h1")))


def _without_experts(layout: Layout) -> Layout:
    return dataclasses.replace(layout, model="")


FLOW = Program(
    "flow",
    "pretrain_video.py",
    "--mmdit-size tiny --no-adaln-zero --train-iters 4 --lr 1e-3 --lr-warmup-iters 1 "
    "--micro-batch-size 1 --global-batch-size 4 --log-interval 1 --num-workers 0 "
    "--video-data-path {data}/clips --eval-iters 0",
    _video,
    (
        "whole flow",
        *"video joint mmdit hunyuan video_dit flow conditions text_dropout sample".split(),
        *"lora freeze".split(),
    ),
    ("codec", "text_encoder", "encode", *ENGINE),
    _flow_layout,
)

STREAMING = Program(
    "streaming",
    "pretrain_video.py",
    "--task streaming --generator-size tiny --no-zero-head --latent-size 4 4 --frame-block 3 "
    "--window-frames 6 --sink-frames 3 --chunk-frames 9 --min-new-frames 6 --max-new-frames 6 "
    "--sequence-lengths 21 --recache-frames 9 --generator-interval 2 --micro-batch-size 1 "
    "--text-length 8 --text-width 32 --lr 1e-3 --critic-lr 2e-3 --ema-decay 0.8 --ema-start 1 "
    "--log-interval 1 --seed 7 --codec-spatial 2 --codec-channels 4 --global-batch-size 2 "
    "--prompts-path {data}/prompts.txt --train-iters 4",
    _video,
    ("whole streaming", "streaming", "streaming_sample", "lora"),
    ("sample", "codec", "text_encoder", *ENGINE),
    lambda dice, experts: _without_experts(
        layouts.draw(dice, ranks=(1, 2, 2, 4), limits=(2, 1, 2))
    ),
)

PROGRAMS = {program.name: program for program in (GPT, SFT, FLOW, STREAMING)}
