"""Every reader of a file that may come from a stranger: how to call it, and a whole file for it."""

from __future__ import annotations

import functools
import json
import pickle
import struct
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_ext.checkpoint import files, stored
from megatron_ext.checkpoint.manifest import read_manifest
from megatron_ext.checkpoint.run_record import RECORD, own_checkpoints
from megatron_ext.checkpoint.safetensors_files import TensorFolder
from megatron_ext.checkpoint.snapshot import SnapshotFile
from megatron_ext.checkpoint.unpickling import stored_entries
from megatron_ext.config.parser import parse_args
from megatron_ext.config.rules.transformer_engine import read_overlap_settings
from megatron_ext.data.indexed import check_cached_indices, check_indexed_dataset
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.data.order import check_recorded
from megatron_ext.disk.events import read_events
from megatron_ext.extras.audit.recipe import read_recipe
from megatron_ext.extras.ledger.ledger import Ledger
from megatron_ext.extras.ledger.step_record import RecordWriter, StepRecord
from megatron_ext.extras.report.page import write_report
from megatron_ext.extras.report.run_folder import read_run_folder
from megatron_ext.extras.resilience.elastic import REQUESTED_NODES, requested_nodes
from megatron_ext.planning.hardware import gpu_named
from megatron_ext.text.convert.config import read_model
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.prefixes import read_blend
from megatron_ext.text.data.schedule import read_schedule
from megatron_ext.text.generation.config import GenerationConfig
from megatron_ext.text.generation.requests import read_prompts
from megatron_ext.text.preprocess.encode import BadLine, parse_line
from megatron_ext.text.preprocess.inputs import Part, blocks
from megatron_ext.text.preprocess.parts import (
    PartMarker,
    WorkDirectory,
    failure_of,
    marker_path,
    read_marker,
)
from megatron_ext.text.sft.store import SftStore
from megatron_ext.text.task import GPT
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.train.reporting.files import MetricsFile, read_metrics
from megatron_ext.video.convert.find import read_config as read_wan
from megatron_ext.video.data.clips import read_list
from megatron_ext.video.data.manifest import read_manifest as read_video_manifest
from megatron_ext.video.data.register import read_register
from megatron_ext.video.data.text_encoders import read_settings as read_encoder_settings
from megatron_ext.video.networks.wan.convert.conversion import CONVERSION as WAN_WEIGHTS
from megatron_ext.video.sampling.requests import read_lines, read_row
from tests.extras.report.made_runs import faulty_run
from tests.text.tiny import hf_folder
from tests.training_runs import SMALL, TINY, mock_data
from tests.video.data.test_shards import MANIFEST as VIDEO_MANIFEST


@dataclass(frozen=True)
class Reader:
    """One reader.

    Attributes:
        name: the file below the folder that ``read`` gets.
        whole: the content of a whole file.
        read: reads the folder's file as a program does.
        survives: whether a damaged file may be passed over instead of being refused.
        prepare: makes what else the folder needs.
    """

    name: str
    whole: bytes
    read: Callable[[Path], object]
    survives: bool = False
    prepare: Callable[[Path], object] = lambda _: None


def _json(content: object) -> bytes:
    return json.dumps(content).encode()


def _lines(*rows: object) -> bytes:
    return b"".join(_json(row) + b"\n" for row in rows)


def _config() -> dict[str, Any]:
    flags = [*TINY, *mock_data(), *"--train-iters 2".split()]
    return parse_args(flags, GPT, world_size=1, device="cpu").config.to_dict()


def _use_arguments(folder: Path) -> None:
    flags = [*mock_data(), *"--use-checkpoint-args --micro-batch-size 2 --lr 1e-3".split()]
    flags += "--train-iters 2 --load x".split()
    found = stored.read_settings(folder)
    parse_args(flags, GPT, world_size=1, device="cpu", checkpoint_config=found)


def _progress(folder: Path) -> None:
    order = stored.read_progress(folder).get("data_order")
    if order is not None:
        check_recorded(order, "progress.json")


ORDER = {
    "seed": 1,
    "window": 8,
    "tokens": {"a": 80},
    "stages": [{"start": 0, "seq_length": 8, "weights": {"a": "1"}}],
}
PROGRESS = {
    "iteration": 3, "consumed_train_samples": 12, "consumed_valid_samples": 0, "epoch": None,
    "lowest_loss": 2.5, "best_checkpoints": [{"iteration": 2, "loss": 2.5, "regular": True}],
    "data_plan": "", "recent_values": [[1.0, 2.0]], "data_order": ORDER,
}  # fmt: skip


def _ledger_lines() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        writer = RecordWriter(folder)
        writer.order({**ORDER, "first_tokens": {"a": 0}, "split": "1"})
        writer.start(0, 0, None, None, time=1.0, generation=0)
        return (Path(folder) / "data_ledger.jsonl").read_bytes() + _lines(
            {"kind": "steps", "iteration": 0, "sample": 0, "batch": 4, "done": 3, "begun": 3},
            {"kind": "left_out", "first": 2, "last": 2, "why": "no update"},
        )


def _ask_the_ledger(folder: Path) -> None:
    record = StepRecord(folder)
    record.history()
    assert record.own_start >= 0
    assert isinstance(record.taken_from, str | None)
    ledger = Ledger(folder)
    for steps in ledger.steps(with_lost=True):
        if steps.order is not None:
            ledger.order_of(steps)


def _report(folder: Path) -> None:
    read_events(folder)
    write_report(read_run_folder(folder))


def _metrics(folder: Path) -> None:
    read_metrics(folder / "metrics.jsonl")
    MetricsFile(folder, 3).close()
    _report(folder)


def _made_run(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        faulty_run(Path(folder))
        content = (Path(folder) / name).read_bytes()
    return b"".join(content.splitlines(keepends=True)[:20]) if "jsonl" in name else content


def _section(folder: Path) -> None:
    (folder / "data_ledger.jsonl").write_bytes(_ledger_lines())
    Ledger(folder).section(DataConfig)


def _with_config(folder: Path) -> None:
    parse_args([*SMALL, "--config", str(folder / "run.yaml")], GPT, world_size=1, device="cpu")


def _tensors(folder: Path) -> None:
    with TensorFolder(folder) as tensors:
        tensors.shapes()
        for name in tensors.names:
            tensors.dtype(name)
            tensors.tensor(name)


def _index_of_tensors(folder: Path) -> None:
    (folder / "one.safetensors").write_bytes(_TENSORS)


_TENSORS = save({"a": torch.ones(2, 3), "b": torch.ones(4)})


def _dataset() -> tuple[bytes, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "docs"
        with IndexedWriter(prefix, np.dtype(np.int32)) as writer:
            for length in (3, 0, 5):
                writer.add_document(np.arange(length), [length] if length else [])
        return (Path(folder) / "docs.idx").read_bytes(), (Path(folder) / "docs.bin").read_bytes()


def _cached(folder: Path) -> None:
    check_cached_indices([], str(folder), "x")


def _array() -> bytes:
    file = BytesIO()
    np.save(file, np.arange(20))
    return file.getvalue()


MARKER = asdict(
    PartMarker(
        "p000000.1", "key", lines=1, documents=1, tokens=1, rejected=0, skipped=0, sizes={},
        host="a", seconds=1.0, ended=2.0,
    )
)  # fmt: skip


def _plan(folder: Path) -> None:
    (folder / "lock").touch()
    work = WorkDirectory(str(folder).removesuffix(".parts"))
    try:
        work.resumed_parts({"format": 2})
    finally:
        work._lock.release()


def _preprocess(folder: Path) -> None:
    path = str(folder / "docs.jsonl")
    for block, _ in blocks(Part(path, path, 0, (folder / "docs.jsonl").stat().st_size, "plain", 1)):
        for line in block.splitlines():
            with suppress(BadLine):
                parse_line(line, ["text"])


def _tokenizer(folder: Path) -> None:
    settings = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    build_tokenizer(settings).tokenize("Hello, world")


def _rest_of_the_tokenizer(name: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        for path in hf_folder().iterdir():
            if path.name != name:
                (folder / path.name).write_bytes(path.read_bytes())

    return prepare


def _snapshot(folder: Path) -> None:
    found = SnapshotFile(folder / "snapshot").read()
    assert found is None or found.iteration >= 0


def _metadata() -> bytes:
    entry = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32),
        torch.Size([2]),
        [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))],
    )
    places = {MetadataIndex("a", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 8)}
    return pickle.dumps(Metadata({"a": entry}, storage_data=places))


def _header() -> bytes:
    text = _json({"iteration": 3, "facts": {}, "tensors": 0, "skeleton": 0, "digest": ""})
    return (struct.pack("<II", len(text), zlib.crc32(text)) + text).ljust(4096, b"\0")


def _prompts(folder: Path) -> None:
    for number, line in read_lines(folder / "prompts.jsonl", "the prompts"):
        read_row(line, folder / "prompts.jsonl", number, ("text", "mode"), texts=("mode",))


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 96,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
WAN = {"_class_name": "WanTransformer3DModel", "num_layers": 2, "patch_size": [1, 2, 2]}
GPUS = {"gpus": [{"name": "NVIDIA H100", "memory": 80 << 30,
                  "rates": {"bf16": 6e14, "fp8": None, "copy": 2e12}}]}  # fmt: skip


@functools.cache
def readers() -> dict[str, Reader]:
    """Return all readers by name."""
    idx, data = _dataset()
    manifest = {"version": 2, "files": {"__0_0.distcp": {"bytes": 3, "crc32": 0}}}
    return {
        "manifest": Reader("manifest.json", _json(manifest), read_manifest),
        "run_config": Reader("run_config.json", _json(_config()), _use_arguments),
        "progress": Reader("progress.json", _json(PROGRESS), _progress),
        "tracker": Reader("latest_checkpointed_iteration.txt", b"12\n", files.read_tracker),
        "announcement": Reader(files.ANNOUNCEMENT, b"12", files.announced, survives=True),
        "run record": Reader(
            RECORD,
            _json({"run": "none", "checkpoints": {"3": 1}}),
            lambda x: own_checkpoints(x, again=True),
            survives=True,
        ),
        "wanted nodes": Reader(
            REQUESTED_NODES, b"3", lambda x: requested_nodes(str(x)), survives=True
        ),
        "ledger": Reader("data_ledger.jsonl", _ledger_lines(), _ask_the_ledger, survives=True),
        "ledger's settings": Reader("config.yaml", yaml.safe_dump(_config()).encode(), _section),
        "metrics": Reader("metrics.jsonl", _made_run("metrics.jsonl"), _metrics, survives=True),
        "faults": Reader("faults.jsonl", _made_run("faults.jsonl"), _report, survives=True),
        "config.yaml": Reader("config.yaml", _made_run("config.yaml"), _report, survives=True),
        "--config": Reader("run.yaml", b"seed: 3\ntraining: {train_iters: 4}\n", _with_config),
        "overlap": Reader(
            "overlap.yaml",
            b"qkv_fprop: {method: ring_exchange}\n",
            lambda x: read_overlap_settings(str(x / "overlap.yaml")),
        ),
        "schedule": Reader(
            "schedule.yaml",
            b"stages:\n- {weights: {a: 1}, tokens: 1000}\n- {weights: {a: 1}}\n",
            lambda x: read_schedule(str(x / "schedule.yaml"), 8),
        ),
        "recipe": Reader(
            "model_config.yaml",
            b"MODEL_ARGS: {--num-layers: 2}\n",
            lambda x: read_recipe(x / "model_config.yaml"),
        ),
        "config.json": Reader("config.json", _json(LLAMA), read_model),
        "Wan's config.json": Reader(
            "config.json",
            _json(WAN),
            lambda x: WAN_WEIGHTS.form("diffusers").read_config(read_wan(x), x / "config.json"),
        ),
        "text encoder": Reader(
            "config.json", _json({"d_model": 4}), lambda x: read_encoder_settings("t5", str(x))
        ),
        "index of tensors": Reader(
            "model.safetensors.index.json",
            _json({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}),
            _tensors,
            prepare=_index_of_tensors,
        ),
        "tensors": Reader("model.safetensors", _TENSORS, _tensors),
        ".idx": Reader(
            "docs.idx",
            idx,
            lambda x: check_indexed_dataset(x / "docs"),
            prepare=lambda x: (x / "docs.bin").write_bytes(data),
        ),
        "cached index": Reader("0-document_index.npy", _array(), _cached),
        "video manifest": Reader("manifest.json", _json(VIDEO_MANIFEST), read_video_manifest),
        "marker of a part": Reader(
            marker_path(Path(), "key", 0).name,
            _json(MARKER),
            lambda x: read_marker(x, "key", 0),
            survives=True,
        ),
        "failure of a task": Reader(
            "failed.0.json",
            _json({"kind": "refused", "messages": ["a"], "key": "k"}),
            lambda x: failure_of(x / "failed.0.json"),
        ),
        "documents": Reader(
            "docs.jsonl", _lines({"text": "a b"}, {"text": "c"}), _preprocess, survives=True
        ),
        "clips": Reader(
            "clips.jsonl",
            _lines({"path": "a.mp4", "text": "a"}),
            lambda x: read_list(str(x / "clips.jsonl")),
        ),
        "register of clips": Reader(
            "clips.jsonl",
            _lines(
                {"format": 1, "options": {}, "buckets": []}, {"key": "a", "number": 0, "path": "a"}
            ),
            read_register,
        ),
        "prompts of videos": Reader("prompts.jsonl", _lines({"text": "a"}), _prompts),
        "prompts": Reader(
            "prompts.jsonl",
            _lines({"prompt": "a"}),
            lambda x: read_prompts(GenerationConfig(prompt_file=str(x / "prompts.jsonl"))),
        ),
        "blend": Reader(
            "blend.json",
            _json({"train": ["a"], "valid": None, "test": None}),
            lambda x: read_blend(DataConfig(per_split_data_args_path=str(x / "blend.json"))),
        ),
        "store of conversations": Reader(
            "a_sft.json",
            _json({"format": 1, "files": [["a", 1]]}),
            lambda x: SftStore(str(x / "a")),
        ),
        "GPU": Reader(
            "gpu.json", _json(GPUS), lambda x: gpu_named(str(x / "gpu.json")), survives=True
        ),
        ".metadata": Reader(".metadata", _metadata(), stored_entries),
        "tokenizer.json": Reader(
            "tokenizer.json",
            (hf_folder() / "tokenizer.json").read_bytes(),
            _tokenizer,
            prepare=_rest_of_the_tokenizer("tokenizer.json"),
        ),
        "tokenizer_config.json": Reader(
            "tokenizer_config.json",
            (hf_folder() / "tokenizer_config.json").read_bytes(),
            _tokenizer,
            prepare=_rest_of_the_tokenizer("tokenizer_config.json"),
        ),
        "snapshot": Reader("snapshot", _header(), _snapshot, survives=True),
    }
