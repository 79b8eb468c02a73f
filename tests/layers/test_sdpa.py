"""Which kernels are tried, that none is fed copies, and the numbers of those that run on a CPU."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.precision import Fp8Config
from megatron_ext.errors import ConfigError
from megatron_ext.layers import sdpa
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.reporting.start import implementation_line
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


@pytest.mark.parametrize("value_size", [D // 2, 2 * D])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_values_of_another_size_leave_the_scale_alone(scale: float | None, value_size: int) -> None:
    query, key, _ = heads()
    value = torch.randn(S, B, G, value_size, generator=torch.Generator().manual_seed(4))
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    for masked in (False, True):
        forbidden = plain.documents(S, [[5], [3, 9]]) if masked else plain.causal(S, B)
        seen = ~forbidden[:, None] if masked else None
        out = sdpa.attend(q, k, v, mask=seen, causal=not masked, scale=scale)
        exact = (x.detach().double() for x in (query, key, value))
        torch.testing.assert_close(
            out.permute(2, 0, 1, 3).flatten(2).double(),
            plain.attention(*exact, forbidden, scale),
            rtol=0,
            atol=1e-6,
        )


@pytest.mark.parametrize(
    ("capability", "version", "lengths", "plainly", "masked"),
    [
        ((9, 0), 91501, (8192, 8192), True, True),
        ((9, 0), 91501, (8191, 77), True, False),
        ((10, 0), 92000, (100, 100), True, False),
        # With a mask the gradients of these are NaN, see pytorch/pytorch, issue 196678.
        ((9, 0), 91900, (64, 64), True, False),
        ((9, 0), 91900, (8256, 8256), True, False),
        ((9, 0), 91900, (8192, 8256), True, False),
        ((9, 0), 91500, (8191, 8191), False, False),
        ((9, 0), 91500, (8192, 8191), False, False),
        ((9, 0), 91002, (8192, 256), True, True),
        ((9, 0), 90800, (8192, 8192), False, False),
        ((9, 0), 0, (8192, 8192), False, False),
        ((8, 0), 92000, (8192, 8192), False, False),
        ((12, 0), 92000, (8192, 8192), False, False),
    ],
)
def test_cudnn_goes_first_where_it_is_fast_and_trusted(
    capability: tuple[int, int],
    version: int,
    lengths: tuple[int, int],
    plainly: bool,
    masked: bool,
) -> None:
    assert sdpa.prefers_cudnn(capability, version, lengths) is plainly
    assert sdpa.prefers_cudnn(capability, version, lengths, masked=True) is masked


class Cuda:
    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, length: int = 256) -> None:
        self.length = length

    def size(self, dim: int) -> int:
        return (B, N, self.length, D)[dim]


def on_hopper(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


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
    on_hopper(monkeypatch)
    query: Any = Cuda()
    kernels = sdpa.kernels_for(query, query, AttnBackend[backend])
    assert (kernels[0], len(kernels)) == (first, count)
    on_hopper(monkeypatch, (8, 0))
    assert (sdpa.kernels_for(query, query, AttnBackend.auto)) == ()


@pytest.mark.parametrize("generation", [8, 9, 10, 12])
@pytest.mark.parametrize("lengths", [(64, 64), (8256, 8256), (256, 8000), (8000, 256)])
def test_cudnn_never_gets_a_mask_whose_gradients_may_be_nan(
    lengths: tuple[int, int], generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to itself, torch may take cuDNN's kernel too."""
    on_hopper(monkeypatch, (generation, 0))
    query, key = (Cuda(length) for length in lengths)
    given: Any = (query, key)
    kernels = sdpa.kernels_for(*given, AttnBackend.auto, masked=True)
    assert kernels and SDPBackend.CUDNN_ATTENTION not in kernels
    message = (
        r"`--attention-backend` \(fused\) takes cuDNN, whose gradients with a mask may be NaN "
        rf"unless 128 divides the numbers of queries \({lengths[0]}\) and keys \({lengths[1]}\)"
    )
    with pytest.raises(ConfigError, match=message):
        sdpa.kernels_for(*given, AttnBackend.fused, masked=True)
    assert sdpa.kernels_for(*given, AttnBackend.fused) == (SDPBackend.CUDNN_ATTENTION,)


def test_a_mask_is_told_to_the_choice_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sdpa, "kernels_for", lambda *_, **options: told.append(options) or ())
    q, k, v = (x.permute(1, 2, 0, 3) for x in heads())
    for mask in (None, torch.ones(S, S, dtype=torch.bool), causal_lower_right(S, S)):
        sdpa.attend(q, k, v, mask=mask)
    assert [options["masked"] for options in told] == [False, True, True]


FLASH_3 = """
import torch
library = torch.library.Library("flash_attn_3", "FRAGMENT")
for name in ("fwd", "bwd"):
    library.define(f"{name}(Tensor x) -> Tensor")
"""


@pytest.fixture
def flash_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a stand-in of FlashAttention 3 on a machine with a Hopper GPU."""
    on_hopper(monkeypatch)
    file = tmp_path / "flash_attn_interface.py"
    file.write_text(FLASH_3)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sdpa, "_try_flash", lambda device: None)
    yield file
    sys.modules.pop("flash_attn_interface", None)
    if sdpa.flash_3_in_use():
        torch.nn.attention.restore_flash_attention_impl()


CUDA = torch.device("cuda", 0)
NO_DROPOUT = ModelConfig(attention_dropout=0.0)


@pytest.mark.parametrize("backend", ["auto", "flash"])
def test_flash_attention_3_goes_first_where_it_is_installed(flash_3: Path, backend: str) -> None:
    query: Any = Cuda(8256)
    auto = AttnBackend.auto
    before = sdpa.kernels_for(query, query, auto)
    assert before[0] == SDPBackend.CUDNN_ATTENTION
    model = dataclasses.replace(NO_DROPOUT, attention_backend=backend)
    assert "FlashAttention" not in implementation_line(model, Fp8Config(), None)
    assert sdpa.use_flash_3(model, CUDA)
    assert torch.nn.attention.current_flash_attention_impl() == "FA3"
    assert "; attention: torch SDPA, FlashAttention 3; " in implementation_line(
        model, Fp8Config(), None
    )
    assert sdpa.kernels_for(query, query, auto)[0] == SDPBackend.FLASH_ATTENTION
    assert set(sdpa.kernels_for(query, query, auto)) == set(before)
    masked = sdpa.kernels_for(query, query, auto, masked=True)
    assert masked[0] == SDPBackend.FLASH_ATTENTION and masked == sdpa.WITHOUT_CUDNN
    dropping = sdpa.kernels_for(query, query, auto, dropout=0.1)
    assert dropping and SDPBackend.FLASH_ATTENTION not in dropping


@pytest.mark.parametrize(
    ("changes", "device", "capability"),
    [
        ({"attention_dropout": 0.1}, "cuda", (9, 0)),
        ({"attention_backend": "fused"}, "cuda", (9, 0)),
        ({"attention_backend": "unfused"}, "cuda", (9, 0)),
        ({}, "cpu", (9, 0)),
        ({}, "cuda", (8, 0)),
        ({}, "cuda", (10, 0)),
    ],
)
def test_flash_attention_3_stays_away_where_it_does_not_fit(
    flash_3: Path,
    changes: dict[str, Any],
    device: str,
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_hopper(monkeypatch, capability)
    model = dataclasses.replace(NO_DROPOUT, **changes)
    assert not sdpa.use_flash_3(model, torch.device(device))
    assert "flash_attn_interface" not in sys.modules
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_without_the_package_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper(monkeypatch)
    assert not sdpa.use_flash_3(NO_DROPOUT, CUDA)
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("raise ImportError('undefined symbol: _ZN3c10')", "undefined symbol: _ZN3c10"),
        (FLASH_3, "expected 22 arguments"),
    ],
)
def test_a_build_that_does_not_work_is_told_and_left(
    flash_3: Path,
    content: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(device: torch.device) -> None:
        raise TypeError("expected 22 arguments\nand more")

    flash_3.write_text(content)
    monkeypatch.setattr(sdpa, "_try_flash", fails)
    assert not sdpa.use_flash_3(NO_DROPOUT, CUDA)
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert caplog.messages == [
        f"FlashAttention 3 is installed but does not work with torch {torch.__version__} "
        f"({reason}); attention takes torch's own kernels."
    ]


def test_a_cpu_leaves_the_kernel_to_torch() -> None:
    q, k, _ = (x.permute(1, 2, 0, 3) for x in heads())
    assert [sdpa.kernels_for(q, k, backend) for backend in AttnBackend] == [()] * len(AttnBackend)


def test_the_order_holds_within_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "kernels_for", lambda *_, **options: sdpa.CUDNN_FIRST)
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
