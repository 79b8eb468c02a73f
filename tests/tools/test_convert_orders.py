"""Options of convert_checkpoint.py reach the import and the export, or are refused."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.programs import convert_checkpoint
from megatron_ext.text.convert.huggingface import Export, Import


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the tool's module, which hides all GPUs when it runs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return convert_checkpoint


def test_options_of_an_import_are_its_order(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    orders: list[Import] = []

    def imported(order: Import) -> tuple[list[str], list[str]]:
        orders.append(order)
        return ["--num-layers", "2"], ["a note"]

    monkeypatch.setattr(tool, "holds_video_weights", lambda path: False)
    monkeypatch.setattr(tool, "import_model", imported)
    source, target = Path("/hf"), Path("/ours")
    words = ["import", "--hf", str(source), "--save", str(target)]
    assert tool.main(words) == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert capsys.readouterr().out.splitlines() == [
        "> a note",
        "/hf -> /ours. Train it with these flags, in any layout:",
        "--pretrained-checkpoint /ours --num-layers 2",
    ]
    more = "--target-tensor-parallel-size 4 --make-vocab-size-divisible-by 8 --seq-length 32"
    assert tool.main([*words, *more.split(), "--dtype", "float16", "--verify"]) == 0
    assert orders == [
        Import(source, target),
        Import(source, target, "float16", 4, 8, 32, verify=True),
    ]


def test_options_of_an_export_are_its_order(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[Export] = []

    def exported(order: Export) -> list[str]:
        orders.append(order)
        return []

    asked: list[tuple[Path, int | None]] = []
    monkeypatch.setattr(tool, "read_run_config", lambda *given: asked.append(given))
    monkeypatch.setattr(tool, "writer_of", lambda stored: None)
    monkeypatch.setattr(tool, "export_model", exported)
    load, target = Path("/ours"), Path("/back")
    words = ["export", "--load", str(load), "--hf", str(target)]
    assert tool.main(words) == 0
    more = "--ckpt-step 0 --ema --max-shard-size 1GB --hf-like /like --vocab-size 9"
    assert tool.main([*words, *more.split(), "--dtype", "bfloat16"]) == 0
    assert orders == [
        Export(load, target),
        Export(load, target, 0, Path("/like"), "bfloat16", 9, "1GB", ema=True),
    ]
    assert asked == [(load, None), (load, 0)]


def test_a_streaming_run_has_networks_and_names(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []
    conversion = SimpleNamespace(title="Wan", namings=("diffusers", "original"))
    monkeypatch.setattr(tool, "read_run_config", lambda *_: {})
    monkeypatch.setattr(tool, "writer_of", lambda stored: conversion)
    monkeypatch.setattr(tool, "export_video", lambda _, order: given.append(order))
    words = ["export", "--load", "/ours", "--hf", "/back"]
    assert tool.main(words) == 0
    more = "--network critic --naming original --ckpt-step 7 --ema --max-shard-size 2GB"
    assert tool.main([*words, *more.split()]) == 0
    assert tool.main([*words, "--naming", "other"]) == 2
    said = "error: `--naming` (other) must be one of diffusers, original.\n"
    assert capsys.readouterr().err == said
    assert [(order.network, order.naming) for order in given] == [
        (None, None),
        ("critic", "original"),
    ]
    assert (given[1].step, given[1].ema, given[1].max_shard_size) == (7, True, "2GB")


def test_options_without_effect_and_all_errors_are_told(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["import", "--hf", "/hf", "--save", "/ours"]
    monkeypatch.setattr(tool, "holds_video_weights", lambda path: True)
    assert tool.main([*words, "--verify"]) == 2
    assert capsys.readouterr().err == "error: `--verify` is for language models; leave it out.\n"
    assert tool.main([*words, "--seq-length", "8"]) == 2
    assert "`--seq-length` has no effect on a video model, which" in capsys.readouterr().err
    monkeypatch.setattr(tool, "holds_video_weights", lambda path: False)

    def refuse(order: Import) -> None:
        raise ConfigError(["one is wrong.", "two is wrong."])

    monkeypatch.setattr(tool, "import_model", refuse)
    assert tool.main(words) == 2
    assert capsys.readouterr().err == "error: one is wrong.\nerror: two is wrong.\n"
    for option in ("entry", "network", "naming"):
        with pytest.raises(CheckpointError, match=f"`--{option}` has no effect on a language mode"):
            tool._refuse(SimpleNamespace(**{option: "x"}), tool._VIDEO, "a language model")
