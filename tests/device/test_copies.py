"""Copies to the host and back are in order; the stand-in for streams finds what is not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_ext.config.offload import OffloadConfig
from megatron_ext.device.copies import Copies, Copy
from megatron_ext.layers.activation_offload import ActivationOffload
from megatron_ext.optim.offload import HostUpdate
from tests.stream_order import OutOfOrder, StreamOrder

GPU = torch.device("cuda", 0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + torch.sin(self.linear(hidden_states).sigmoid())


class Chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.decoder(x)
        return result


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(hidden_states=x)
        return x


def _pass() -> list[Tensor]:
    """Return the gradients of a chunk whose first three layers wait on the host."""
    torch.manual_seed(1)
    chunk = Chunk()
    flags = OffloadConfig(cpu_offloading_num_layers=3, min_offloaded_tensor_size=1)
    offload = ActivationOffload(chunk, flags, GPU, recomputes=False)
    x = torch.ones(4, 8).to(GPU)
    for _ in range(2):
        outputs = [chunk(x + number) for number in range(2)]  # two micro-batches in flight
        for output in outputs:
            output.sum().backward()
    assert offload.traffic.to_host == offload.traffic.to_device > 0
    return [p.grad for p in chunk.parameters() if p.grad is not None]


def test_activations_go_and_come_back_in_order(order: StreamOrder) -> None:
    found = _pass()
    order.check_freed()
    torch.manual_seed(1)
    chunk = Chunk()
    for _ in range(2):
        for number in range(2):
            chunk(torch.ones(4, 8) + number).sum().backward()
    truth = [p.grad for p in chunk.parameters() if p.grad is not None]
    assert all(torch.equal(x, y) for x, y in zip(found, truth, strict=True))


@pytest.mark.parametrize(
    "left_out",
    [(Copies, "begin"), (Copies, "follow"), (Copy, "precede"), (Tensor, "record_stream")],
)
def test_a_wait_that_is_left_out_is_found(
    left_out: tuple[Any, str], order: StreamOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*left_out, lambda self, *_: None)
    with pytest.raises(OutOfOrder):
        _pass()
        order.check_freed()
    order.shared.clear()


def _update() -> list[Tensor]:
    """Return 16-bit weights after two updates, most of them on the host."""
    models = [torch.full((5 + number,), 1.0).to(GPU).bfloat16() for number in range(4)]
    mains = [model.float() for model in models]
    gradients: list[Tensor] = []

    def take() -> None:
        for main, gradient in zip(mains, gradients, strict=True):
            main.grad = gradient

    inner = torch.optim.AdamW([torch.empty(0)], lr=0.1, foreach=False)
    inner.param_groups = [{**inner.defaults, "params": mains}]
    part: Any = SimpleNamespace(
        optimizer=inner,
        float16_groups=[models],
        fp32_from_float16_groups=[mains],
        _copy_model_grads_to_main_grads=take,
    )
    flags = OffloadConfig(optimizer_offload_fraction=0.6, overlap_cpu_optimizer_d2h_h2d=True)
    HostUpdate(part, flags)
    for step in range(2):
        gradients[:] = [model.float() * (step + 0.5) for model in models]
        part._copy_model_grads_to_main_grads()
        inner.step()
        part._copy_main_params_to_model_params()
    return [model * 2 for model in models]


def test_weights_go_up_and_gradients_down_in_order(order: StreamOrder) -> None:
    assert all(weight.float().isfinite().all() for weight in _update())
    assert len(order.streams) == 3


@pytest.mark.parametrize("left_out", [(Copies, "begin"), (Copies, "end"), (Copy, "wait")])
def test_a_wait_of_an_update_that_is_left_out_is_found(
    left_out: tuple[Any, str], order: StreamOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*left_out, lambda self, *_: None)
    with pytest.raises(OutOfOrder):
        _update()
        order.check_freed()
    order.shared.clear()
