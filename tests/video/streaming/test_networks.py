"""The critic's learning rates, and the flags with which weights of other checkpoints are loaded."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.state import CRITIC
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.streaming import networks
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.networks import (
    TrainedNetwork,
    build_critic,
    build_network,
    load_weights,
    of_role,
)
from tests.ranks import ranks
from tests.video.streaming.test_prompts import configured


@ranks()
def test_all_rates_of_the_critic_are_scaled_alike(context: ParallelContext, tmp_path: Path) -> None:
    words = "--lr 1e-3 --min-lr 1e-4 --lr-warmup-init 2e-4 --critic-clip-grad 3"
    config = configured(tmp_path, words)
    streaming = config.section(StreamingConfig)
    # Nine frames of four tokens; the text encoder tells the width of the text.
    assert (config.model.seq_length, config.model.padded_vocab_size) == (9 * 4, None)
    assert streaming.text_features == streaming.sizes().text_width == 32
    usual = config.with_section(dataclasses.replace(streaming, critic_lr=None))
    for own, ratio in ((config, 2.0), (usual, 0.2)):
        critic = build_critic(own, context, torch.device("cpu"))
        rates = critic.scheduler.max_lr, critic.scheduler.min_lr, critic.scheduler.init_lr
        assert rates == pytest.approx((1e-3 * ratio, 1e-4 * ratio, 2e-4 * ratio))
        assert critic.clip_grad == 3.0


@ranks()
def test_only_the_generator_is_causal_and_each_network_has_its_size(
    context: ParallelContext, tmp_path: Path
) -> None:
    config = configured(tmp_path, "--critic-size mini --recompute-blocks 1")
    for role, hidden in (("generator", 64), ("critic", 128), ("teacher", 64)):
        own = of_role(config, role)  # type: ignore[arg-type]
        transformer_config = build_transformer_config(own)
        chunk = build_network(config, transformer_config, context, role=role)  # type: ignore[arg-type]
        window = chunk.options.window
        assert (window is not None) == (role == "generator")
        assert window is None or (window.block, window.window, window.sink) == (3, 6, 3)
        assert (chunk.sizes.hidden_size, own.model.hidden_size) == (hidden, hidden)
        assert chunk.options.recompute_blocks == 1 and not chunk.options.zero_head


@pytest.mark.parametrize("everywhere", [False, True])
def test_gradients_are_reduced_as_they_are_asked_for(
    everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(networks, "finalize_model_grads", lambda *x, **y: asked.append((x, y)))
    chunks: Any = ["chunk"]
    trained = TrainedNetwork(chunks, None, None, 1.0)  # type: ignore[arg-type]
    for count in (None, torch.tensor(3)):
        trained.reduce(count, everywhere=everywhere)
    wanted = {"force_all_reduce": everywhere}
    assert asked == [((chunks, None), wanted), ((chunks, torch.tensor(3)), wanted)]


def test_weights_are_loaded_with_the_runs_flags_and_notes_are_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    class Manager:
        def __init__(self, flags: CheckpointConfig, context: Any, section: str | None) -> None:
            asked.append((flags, section))

        def load(self, **given: Any) -> Any:
            asked.append(given)
            return SimpleNamespace(notes=["one", "two"])

    monkeypatch.setattr(networks, "CheckpointManager", Manager)
    changes: dict[str, Any] = {
        "pretrained_average": True,
        "ckpt_fully_parallel_load": not CheckpointConfig().ckpt_fully_parallel_load,
        "dist_ckpt_strictness": "log_all",
    }
    flags = CheckpointConfig(load="elsewhere", save="there", finetune=True, **changes)
    run = RunConfig(checkpoint=flags)
    for is_first in (True, False):
        context: Any = SimpleNamespace(is_reporting_rank=is_first)
        load_weights(run, context, "weights", ["chunk"], None, section=CRITIC)
        assert capsys.readouterr().out == ("> one\n> two\n" if is_first else "")
    wanted = CheckpointConfig(pretrained_checkpoint="weights", **changes)
    assert asked[0] == (wanted, CRITIC)
    assert asked[1] == {"model": ["chunk"], "optimizer": None, "scheduler": None}
    load_weights(run, context, None, ["chunk"], None)
    assert len(asked) == 4
