"""Which weights a conversion loads, and in which precision it builds the network."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.checkpoint import conversion
from megatron_ext.checkpoint.adapters import FrozenBase
from megatron_ext.checkpoint.stored import CheckpointRef
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.precision import PrecisionConfig
from megatron_ext.config.run import RunConfig

CONFIG = CheckpointConfig(
    load="run", ckpt_step=5, pretrained_checkpoint="base", pretrained_average=True
)


@pytest.mark.parametrize(
    ("flags", "built"),
    [({}, "chunk on cpu"), ({"bf16": True}, "16 bits"), ({"fp16": True}, "16 bits")],
)
def test_a_network_is_built_in_the_precision_of_its_run(
    flags: dict[str, bool], built: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = SimpleNamespace(to=lambda kind: f"chunk on {kind}")
    for name, value in {
        "build_transformer_config": lambda _: "sizes",
        "build_chunks": lambda *_: [chunk],
        "Float16Module": lambda sizes, chunk: {("sizes", "chunk on cpu"): "16 bits"}[sizes, chunk],
    }.items():
        monkeypatch.setattr(conversion, name, value)
    config = RunConfig(precision=PrecisionConfig(**flags))
    none: Any = None
    device: Any = SimpleNamespace(kind="cpu")
    assert conversion._build(config, none, none, device) == [built]


class Loads:
    """Notes what is loaded, and by which configuration."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights = list[Any]()
        self.adapters = list[Any]()
        loads = self

        class Manager:
            def __init__(
                self, config: Any, _context: Any, base: Any = None, section: Any = None
            ) -> None:
                self.about = config, base, section

            def load(self, *, model: Any) -> Any:
                loads.weights.append((*self.about, model))
                return SimpleNamespace(iteration=5, progress={"iteration": 5})

        for name, value in {
            "CheckpointManager": Manager,
            "choose": lambda root, step: {(Path("run"), 5): 5, (Path("run"), None): 9}[root, step],
            "load_adapters": lambda *given: loads.adapters.append(given),
            "stored_progress": lambda path, _: {"of": path},
        }.items():
            monkeypatch.setattr(conversion, name, value)
        monkeypatch.setattr(
            FrozenBase, "given", lambda root, *, average: FrozenBase(root, f"averaged {average}")
        )


def test_the_model_of_a_run_is_loaded_by_its_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Loads(monkeypatch)
    drawn = FrozenBase.drawn(3)
    none: Any = None
    assert conversion._load(CONFIG, none, "chunks", drawn, None) == (5, {"iteration": 5})
    assert loads.weights == [(CONFIG, drawn, None, "chunks")] and loads.adapters == []


@pytest.mark.parametrize("step", [5, None])
def test_a_second_network_gets_the_weights_under_its_adapters_first(
    step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have its names there, and no step is asked of the folder that holds them."""
    loads = Loads(monkeypatch)
    config = dataclasses.replace(CONFIG, ckpt_step=step)
    checkpoint = CheckpointRef(Path("run"), step or 9, weights_only=False)
    none: Any = None
    found = conversion._load(config, none, "chunks", FrozenBase.drawn(3), "critic")
    assert found == (step or 9, {"of": checkpoint.path})
    under = dataclasses.replace(config, load=None, ckpt_step=None)
    assert loads.weights == [(under, None, "critic", "chunks")]
    base = FrozenBase("base", "averaged True")
    assert loads.adapters == [(checkpoint, base, "chunks", "critic", config, None)]
    # Random weights need no folder.
    bare = dataclasses.replace(config, pretrained_checkpoint=None)
    conversion._load(bare, none, "chunks", FrozenBase.drawn(3), "critic")
    assert len(loads.weights) == 1 and loads.adapters[1][1] == FrozenBase.drawn(3)
