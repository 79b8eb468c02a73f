"""The functions that hide the differences between releases of megatron-core."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext import core


def test_depths_are_numbered_after_the_layers_of_the_decoder() -> None:
    config: Any = SimpleNamespace(num_layers=6)
    new = {"is_mtp_layer": True, "layer_number": 2, "submodules": "s"}
    assert core.numbered_after_the_decoder(config, new) == {
        "layer_number": 8,
        "add_layer_offset": False,
        "submodules": "s",
    }
    assert new["layer_number"] == 2
    unnumbered = core.numbered_after_the_decoder(config, {"is_mtp_layer": True})
    assert unnumbered["layer_number"] == 7
    old = {"layer_number": 8, "is_mtp_layer": False}
    assert core.numbered_after_the_decoder(config, old) == {"layer_number": 8}


@pytest.mark.parametrize("forgets", [False, True])
def test_each_layer_finds_its_kind_and_depths_have_that_of_the_last(
    forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "config.cp_comm_type[self.layer_number]" if forgets else "config.cp_comm_type"
    monkeypatch.setattr(core.inspect, "getsource", lambda function: source)
    for depths in (None, 2):
        config: Any = SimpleNamespace(mtp_num_layers=depths)
        found = core.kinds_by_layer(["p2p", "a2a", "allgather"], config)
        first = 1 if forgets else 0
        numbers = range(first, first + 3 + (depths or 0))
        assert [found[number] for number in numbers] == [
            "p2p", "a2a", "allgather", *["allgather"] * (depths or 0),
        ]  # fmt: skip
        assert len(found) == numbers[-1] + 1


def test_depths_are_looked_for_on_one_chunk_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()

    def newer(config: Any, ignore_virtual: bool = True, vp_stage: Any = None) -> int:
        asked.append((config.mtp_num_layers, ignore_virtual, vp_stage))
        return vp_stage == 1

    def older(
        layout: Any, mtp_num_layers: Any, ignore_virtual: bool = True, vp_stage: Any = None
    ) -> int:
        asked.append((layout, mtp_num_layers, ignore_virtual, vp_stage))
        return vp_stage == 1

    config: Any = SimpleNamespace(mtp_num_layers=2, pipeline_model_parallel_layout="Et|tmL")
    for function, about in ((newer, (2,)), (older, ("Et|tmL", 2))):
        asked.clear()
        monkeypatch.setattr(multi_token_prediction, "mtp_on_this_rank", function)
        found = [core.mtp_on_this_chunk(config, chunk) for chunk in (0, 1, None)]
        assert found == [False, True, False]
        assert asked == [(*about, False, chunk) for chunk in (0, 1, None)]


@pytest.mark.parametrize("name", ["values", "loss_values"])
def test_losses_of_depths_are_taken_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker: dict[str, Any] = {}
    helper = multi_token_prediction.MTPLossLoggingHelper
    monkeypatch.setattr(helper, "tracker", tracker)
    assert core.take_mtp_losses() is None
    logged = tracker[name] = torch.tensor([2.0, 3.0])
    taken = core.take_mtp_losses()
    assert taken is not None and taken.tolist() == [2.0, 3.0]
    # The log itself goes on in the same memory.
    assert logged is tracker[name] and logged.tolist() == [0.0, 0.0]


def test_losses_of_routers_are_logged_by_layer_and_taken_once() -> None:
    """The layers of multi-token prediction follow the decoder's."""
    config: Any = SimpleNamespace(num_layers=2, mtp_num_layers=1)
    core.take_auxiliary_losses()

    def log(number: int, loss: float, **more: bool) -> None:
        router: Any = SimpleNamespace(config=config, layer_number=number, **more)
        core.log_auxiliary_loss(router, "made_up_loss", torch.tensor(loss))

    log(1, 1.0)
    log(2, 3.0, is_mtp_layer=False)
    log(2, 0.5)
    log(1, 5.0, is_mtp_layer=True)
    assert core.take_auxiliary_losses()["made_up_loss"].tolist() == [1.0, 3.5, 5.0]
    assert core.take_auxiliary_losses()["made_up_loss"].tolist() == [0.0, 0.0, 0.0]
    log(1, 2.0)
    assert core.take_auxiliary_losses()["made_up_loss"].tolist() == [2.0, 0.0, 0.0]


def test_only_layers_with_a_router_are_of_experts() -> None:
    experts = SimpleNamespace(router="r")
    dense = SimpleNamespace(linear_fc1="f")
    for submodules, found in ((experts, experts), (dense, None), (None, None)):
        spec = SimpleNamespace(submodules=submodules)
        partial = functools.partial(print, submodules=submodules)
        assert core.moe_submodules(spec) is core.moe_submodules(partial) is found
    assert core.moe_submodules(None) is None
    assert core.moe_submodules(functools.partial(print)) is None


def test_parameters_are_found_by_name() -> None:
    assert core.takes(TransformerLayer.__init__, "layer_number")
    assert not core.takes(TransformerLayer.__init__, "no_such_name")
