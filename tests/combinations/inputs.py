"""Small data for every kind of run, made once in a folder that the commands name."""

import fcntl
import json
import os
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import torch
from PIL import Image
from safetensors.torch import save_file

from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.video.networks.hunyuan.config import SIZES as HUNYUAN
from megatron_ext.video.networks.mmdit.config import SIZES as MMDIT
from megatron_ext.video.networks.mmdit.convert.table import parameters
from megatron_ext.video.networks.wan.config import SIZES as WAN
from tests.text import tiny
from tests.text.sft import tiny as chats
from tests.video.clips import (
    CHANNELS,
    IMAGE,
    IMAGE_WIDTH,
    LONG,
    POOLED,
    SHORT,
    WIDTH,
    write_clips,
)
from tests.video.networks.hunyuan.test_convert import network as hunyuan
from tests.video.networks.mmdit.convert.models import flux, public_of
from tests.video.networks.wan.convert.models import network as wan
from tests.video.streaming.runs import write_prompts

VOCABULARY = 127
USUAL_PLACE = Path(tempfile.gettempdir()) / "megatron_ext_combinations_11"
"""The folder of the inputs; its number changes when they do."""


def make(folder: Path = USUAL_PLACE) -> Path:
    """Write the inputs, where they are not there yet, and return their folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            fresh = Path(tempfile.mkdtemp(prefix=".combinations_", dir=folder.parent))
            _write_text(fresh, folder)
            _write_documents(fresh)
            _write_chats(fresh)
            _write_video(fresh)
            _write_weights(fresh / "weights")
            os.rename(fresh, folder)
    return folder


def _write_text(folder: Path, final: Path) -> None:
    """Write two indexed datasets of short documents, and the files that name them."""
    dice = random.Random(3)
    lengths = {}
    for name, documents in (("text", 800), ("other", 700)):
        with IndexedWriter(folder / name, np.dtype(np.uint16)) as writer:
            for _ in range(documents):
                tokens = [dice.randrange(VOCABULARY) for _ in range(dice.randint(3, 50))]
                tokens.append(VOCABULARY)  # the end of a document
                writer.add_document(np.asarray(tokens, np.int64), [len(tokens)])
        lengths[str(final / name)] = [documents, documents + 1]
    (folder / "blend.txt").write_text(f"0.5 {final / 'text'}\n0.5 {final / 'other'}\n")
    stages = [
        {"samples": 6, "weights": {str(final / "text"): 1}},
        {"samples": 6, "weights": {str(final / "other"): 1}, "ramp": True},
        {"weights": {str(final / "text"): 1, str(final / "other"): 2}},
    ]
    # JSON is YAML too.
    (folder / "schedule.yaml").write_text(json.dumps({"stages": stages}))
    splits = {"train": [str(final / "text")], "valid": [str(final / "other")]}
    (folder / "splits.json").write_text(json.dumps({**splits, "test": [str(final / "other")]}))
    (folder / "sequences.json").write_text(json.dumps(lengths))


def _write_documents(folder: Path) -> None:
    documents = tiny.corpus(90)
    dice = random.Random(4)
    for document in documents:
        document["numbers"] = " ".join(str(dice.randrange(500)) for _ in range(5))
    tiny.write_jsonl(folder / "documents.jsonl", documents)
    shutil.copy(tiny.sentencepiece_model(), folder / "sentencepiece.model")
    shutil.copy(tiny.tiktoken_file(), folder / "tiktoken.json")
    for name, path in zip(("vocab.json", "merges.txt"), tiny.gpt2_files(), strict=True):
        shutil.copy(path, folder / name)


def _write_chats(folder: Path) -> None:
    """Write conversations in each format of rows, and a tokenizer with a chat template."""
    chats.save(folder / "tokenizer")
    kinds = {"user": "human", "assistant": "gpt"}
    for name, count, seed in (("chats", 40, 0), ("more_chats", 12, 1)):
        rows = chats.chats(count, turns=2, words=3, seed=seed)
        chats.write_jsonl(folder / f"{name}.jsonl", rows)
        asked, shared, instructed, completed = [], [], [], []
        for row in rows:
            question, answer = (message["content"] for message in row["messages"][:2])
            asked.append({"question": question, "answer": answer})
            instructed.append({"instruction": question, "input": "", "output": answer})
            completed.append({"prompt": row["messages"][:-1], "completion": row["messages"][-1:]})
            turns = [{"from": kinds[m["role"]], "value": m["content"]} for m in row["messages"]]
            shared.append({"conversations": turns})
        chats.write_jsonl(folder / f"{name}_questions.jsonl", asked)
        chats.write_jsonl(folder / f"{name}_shared.jsonl", shared)
        chats.write_jsonl(folder / f"{name}_alpaca.jsonl", instructed)
        chats.write_jsonl(folder / f"{name}_completions.jsonl", completed)
    texts = [{"text": f"line {i} " + "ab " * (i % 7)} for i in range(60)]
    chats.write_jsonl(folder / "texts.jsonl", texts)
    for name in ("chatml_generation", "zephyr"):
        shutil.copy(chats.TEMPLATES / f"{name}.jinja", folder)


def _write_video(folder: Path) -> None:
    write_clips(folder / "clips", {IMAGE: 9, SHORT: 19, LONG: 17})
    write_clips(folder / "one_bucket", {SHORT: 24})
    write_clips(folder / "given_frames", {SHORT: 19, LONG: 17}, images=3)
    write_clips(folder / "valid_clips", {SHORT: 8, LONG: 9})
    Image.new("RGB", (64, 64), (200, 50, 120)).save(folder / "start.png")
    write_prompts(folder)


def _write_weights(folder: Path) -> None:
    """Write published weights and adapters of networks that fit the clips."""
    folder.mkdir()
    widths = {"channels": CHANNELS, "text_width": WIDTH}
    joint = {**widths, "pooled_width": POOLED}
    t2v = replace(WAN["tiny"], **widths)
    i2v = replace(t2v, condition_channels=CHANNELS + 4, vision_width=IMAGE_WIDTH)
    models = {
        "flux": flux(replace(MMDIT["tiny"], **joint)),
        "wan": wan(t2v),
        "wan32": wan(replace(t2v, text_width=32)),
        "wan_i2v": wan(i2v),
        "wan_flf2v": wan(replace(i2v, vision_positions=6)),
        "hunyuan": hunyuan(replace(HUNYUAN["tiny"], **joint, guidance_embed=True)),
        "hunyuan_i2v": hunyuan(replace(HUNYUAN["tiny"], **joint, cond_embed=True)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
    sizes = replace(MMDIT["tiny"], **joint, cond_embed=True)
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: 0.1 * torch.randn(shape, generator=generator)
        for name, shape in parameters(sizes).items()
    }
    save_file(public_of(weights, sizes, "open-sora"), folder / "open_sora.safetensors")
    for name in ("flux", "wan", "wan32", "hunyuan"):
        endings = (".to_q", ".to_k", ".to_v", ".net.2")
        layers = [layer for layer, _ in models[name].named_modules() if layer.endswith(endings)]
        # A run adapts no layer outside of the blocks.
        targets = [layer for layer in layers if "refiner" not in layer]
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)
        peft.get_peft_model(models[name], config).save_pretrained(folder / f"{name}_adapter")
