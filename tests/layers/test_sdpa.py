"""Which kernels are tried, that none is fed copies, and the numbers of those that run on a CPU."""

import contextlib
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.errors import ConfigError
from megatron_ext.layers import sdpa
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.parallel.context import ParallelContext
from tests.layers import plain
from tests.layers.test_attention import build, config
from tests.ranks import ranks

S, B, N, G, D = 12, 2, 4, 2, 8


def heads(device: str = "cpu", dtype: torch.dtype = torch.float32, s: int = S) -> list[Tensor]:
    """Return queries, keys and values: ``[s, b, n, d]`` and ``[s, b, g, d]``."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(s, B, n, D, generator=generator) for n in (N, G, G)]
    return [x.to(device, dtype).requires_grad_() for x in made]


@pytest.mark.parametrize("mask", ["causal", "documents", None])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_equals_plain_arithmetic(mask: str | None, scale: float | None) -> None:
    forbidden = {
        "causal": plain.causal(S, B),
        "documents": plain.documents(S, [[5], [3, 9]]),
        None: torch.zeros(B, S, S, dtype=torch.bool),
    }[mask]
    qkv = heads()
    seen = ~forbidden[:, None] if mask == "documents" else None
    q, k, v = (x.permute(1, 2, 0, 3) for x in qkv)
    out = sdpa.attend(q, k, v, mask=seen, causal=mask == "causal", scale=scale)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    truth = plain.attention(*exact, forbidden, scale)
    torch.testing.assert_close(
        out.permute(2, 0, 1, 3).flatten(2).double(), truth, rtol=0, atol=1e-6
    )
    out.square().sum().backward()
    truth.square().sum().backward()
    for mine, theirs in zip(qkv, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "version", "lengths", "prefers"),
    [
        ((9, 0), 91501, (8192, 8192), True),
        ((9, 0), 91501, (8191, 77), True),
        ((10, 0), 92000, (100, 100), True),
        ((9, 0), 91500, (8191, 8191), False),
        ((9, 0), 91500, (8192, 8191), False),
        ((9, 0), 91002, (8192, 256), True),
        ((9, 0), 90800, (8192, 8192), False),
        ((9, 0), 0, (8192, 8192), False),
        ((8, 0), 92000, (8192, 8192), False),
        ((12, 0), 92000, (8192, 8192), False),
    ],
)
def test_cudnn_goes_first_where_it_is_fast_and_trusted(
    capability: tuple[int, int], version: int, lengths: tuple[int, int], prefers: bool
) -> None:
    assert sdpa.prefers_cudnn(capability, version, lengths) is prefers


class Cuda:
    is_cuda = True
    device = torch.device("cuda", 0)

    def size(self, dim: int) -> int:
        return (B, N, 256, D)[dim]


@pytest.mark.parametrize(
    ("backend", "first", "count"),
    [
        ("auto", SDPBackend.CUDNN_ATTENTION, 4),
        ("flash", SDPBackend.FLASH_ATTENTION, 1),
        ("fused", SDPBackend.CUDNN_ATTENTION, 1),
        ("unfused", SDPBackend.MATH, 1),
    ],
)
def test_the_flag_names_the_kernel(
    backend: str, first: SDPBackend, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    query: Any = Cuda()
    kernels = sdpa.kernels_for(query, query, AttnBackend[backend])
    assert (kernels[0], len(kernels)) == (first, count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert (sdpa.kernels_for(query, query, AttnBackend.auto)) == ()


def test_a_cpu_leaves_the_kernel_to_torch() -> None:
    q, k, _ = (x.permute(1, 2, 0, 3) for x in heads())
    assert [sdpa.kernels_for(q, k, backend) for backend in AttnBackend] == [()] * len(AttnBackend)


def test_the_order_holds_within_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "kernels_for", lambda *given: sdpa.CUDNN_FIRST)
    seen: list[Any] = []
    genuine = sdpa.sdpa_kernel

    @contextlib.contextmanager
    def watched(kernels: Any, set_priority: bool) -> Any:
        seen.append((tuple(kernels), set_priority))
        with genuine(kernels, set_priority=set_priority):
            yield

    monkeypatch.setattr(sdpa, "sdpa_kernel", watched)
    q, k, v = (x.permute(1, 2, 0, 3) for x in heads())
    sdpa.attend(q, k, v)
    assert seen == [(sdpa.CUDNN_FIRST, True)]


def test_a_kernel_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuses)
    q, k, v = (x.permute(1, 2, 0, 3) for x in heads())
    message = (
        r"`--attention-backend` \(flash\) has no kernel for torch.float32 queries of shape "
        r"\[2, 4, 12, 8\] with a mask and with dropout 0.0, .* use auto"
    )
    with pytest.raises(ConfigError, match=message):
        sdpa.attend(q, k, v, mask=torch.ones(1), backend=AttnBackend.flash)


class Copies(TorchDispatchMode):
    """Names of the operations that make a tensor of the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.name().partition(".")[0]
        if name in ("aten::clone", "aten::copy_", "aten::_to_copy", "aten::cat", "aten::stack"):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make SDPA call one kernel's operation, whose shapes and strides torch knows without a GPU."""

    def call(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **_: Any) -> Tensor:
        operation = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
        given = (q, k, v, None, True) if name == "cudnn" else (q, k, v)
        out: Tensor = operation(*given, is_causal=is_causal)[0]
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", call)


@pytest.mark.parametrize("name", ["cudnn", "flash"])
@ranks()
def test_nothing_is_copied_around_a_kernel(
    context: ParallelContext, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are a view of a fused projection, as megatron-core cuts it."""
    through(name, monkeypatch)
    transformer_config = config(num_query_groups=G, bf16=True)
    module = build(DotProductAttention, transformer_config, context)
    query, key, value = heads("meta", torch.bfloat16)
    fused = torch.cat((key, value), dim=-1).detach().requires_grad_()
    with Copies() as copies:
        out = module(query, key, fused[..., D:], None)
        assert out.is_contiguous()
        out.backward(torch.empty_like(out))
    assert copies.found == []
    assert query.grad is not None and query.grad.is_contiguous()
