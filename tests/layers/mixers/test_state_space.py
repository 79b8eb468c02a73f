"""Mamba-2's recurrence in chunks against the recurrence token by token in float64."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.mixers.state_space import StateSpace, step, time_steps
from tests.layers import plain


@dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    heads: int
    groups: int
    state: int
    head_dim: int
    chunk: int
    ends: tuple[int, ...] | None = None
    """Where documents of the first sample begin, after the first; None is no document at all."""


SHAPES = [
    Shape(1, 1, 1, 1, 16, 32, 64),
    Shape(2, 1, 4, 2, 16, 32, 64, ()),
    Shape(1, 2, 2, 1, 32, 32, 64, (1,)),
    Shape(2, 63, 4, 4, 16, 32, 64, (1, 2, 3)),
    Shape(1, 64, 4, 2, 64, 64, 64, (63,)),
    Shape(1, 65, 4, 1, 16, 32, 64, (64,)),
    Shape(2, 127, 2, 1, 128, 64, 64, (1, 63, 64, 65, 126)),
    Shape(1, 128, 8, 2, 32, 64, 64),
    Shape(1, 130, 1, 1, 256, 64, 64, (100,)),
    Shape(1, 129, 1, 1, 256, 32, 128),
    Shape(3, 33, 6, 3, 16, 32, 16, (16, 32)),
    Shape(1, 40, 6, 2, 48, 32, 16, tuple(range(1, 40))),
    Shape(1, 17, 3, 1, 20, 5, 16, (3,)),
    Shape(1, 100, 2, 2, 16, 64, 32, (32, 64, 96)),
    Shape(2, 97, 2, 1, 64, 32, 32, (31, 33)),
    Shape(1, 31, 8, 8, 16, 32, 7, (6, 7, 8)),
    Shape(1, 200, 2, 1, 16, 32, 128, (150,)),
    Shape(2, 256, 2, 2, 16, 32, 128, (1,)),
    Shape(1, 9, 4, 2, 16, 1, 2, (4,)),
    Shape(1, 11, 2, 1, 1, 3, 1, (5, 6)),
]


def drawn(shape: Shape) -> dict[str, Tensor]:
    """Return inputs; one token in eight takes a step after which little is left of the state."""
    generator = torch.Generator().manual_seed(shape.length)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    tokens = (shape.batch, shape.length)
    dt = torch.rand(*tokens, shape.heads, generator=generator) * 0.1
    dt[:, ::8] *= 100
    return {
        "x": normal(*tokens, shape.heads, shape.head_dim),
        "dt": dt,
        "a": -1 - 15 * torch.rand(shape.heads, generator=generator),
        "b": normal(*tokens, shape.groups, shape.state) / shape.state**0.5,
        "c": normal(*tokens, shape.groups, shape.state),
        "d": normal(shape.heads),
        "initial_state": normal(shape.batch, shape.heads, shape.state, shape.head_dim),
    }


def documents_of(shape: Shape) -> Tensor | None:
    if shape.ends is None:
        return None
    ends = [list(shape.ends), *[[shape.length // 2]] * (shape.batch - 1)]
    return plain.document_indices(shape.length, ends)


def recurrent(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    initial_state: Tensor,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state, token by token."""
    repeats = x.size(2) // b.size(2)
    outputs = []
    state = initial_state
    for t in range(x.size(1)):
        if documents is not None and t:
            goes_on = documents[:, t] == documents[:, t - 1]
            state = torch.where(goes_on[:, None, None, None], state, torch.zeros_like(state))
        write, read = (each[:, t].repeat_interleave(repeats, dim=1) for each in (b, c))
        decay = (dt[:, t] * a).exp()[..., None, None]
        state = decay * state + dt[:, t, :, None, None] * write[..., None] * x[:, t, :, None]
        outputs.append((state * read[..., None]).sum(dim=2) + d[:, None] * x[:, t])
    return torch.stack(outputs, dim=1), state


def chunked(inputs: dict[str, Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
    documents = documents_of(shape)
    segments = None if documents is None else documents - documents[:, :1]
    given = {name: tensor for name, tensor in inputs.items() if name != "initial_state"}
    recurrence = StateSpace(**given, segments=segments, chunk=shape.chunk)
    return recurrence.outputs(inputs["initial_state"])


def assert_near(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Compare relative to the largest number of ``want``."""
    scale = max(1.0, float(want.detach().abs().max()))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_recurrence_token_by_token(shape: Shape) -> None:
    single = {name: each.requires_grad_() for name, each in drawn(shape).items()}
    double = {name: each.detach().double().requires_grad_() for name, each in single.items()}
    want = recurrent(**double, documents=documents_of(shape))
    got = chunked(single, shape)
    for mine, other in zip(got, want, strict=True):
        assert_near(mine, other, 1e-6)
    change = [torch.randn(each.shape, dtype=torch.float64) for each in want]
    theirs = torch.autograd.grad(want, list(double.values()), change)
    ours = torch.autograd.grad(got, list(single.values()), [each.float() for each in change])
    for mine, other in zip(ours, theirs, strict=True):
        assert_near(mine, other, 1e-5)


def test_float64_stays_float64() -> None:
    shape = SHAPES[6]
    inputs = {name: each.double() for name, each in drawn(shape).items()}
    got = chunked(inputs, shape)
    for mine, other in zip(got, recurrent(**inputs, documents=documents_of(shape)), strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_half_precision_is_computed_in_single() -> None:
    shape = SHAPES[6]
    inputs = drawn(shape)
    for name in ("x", "b", "c"):
        inputs[name] = inputs[name].bfloat16()
    y, state = chunked(inputs, shape)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    single = chunked({name: each.float() for name, each in inputs.items()}, shape)
    assert torch.equal(y, single[0].bfloat16()) and torch.equal(state, single[1])


def test_another_document_changes_nothing() -> None:
    shape = Shape(1, 100, 4, 2, 16, 32, 32, (40, 70))
    inputs = drawn(shape)
    want, state = chunked(inputs, shape)
    for name in ("x", "b", "c"):
        inputs[name][:, :70] = 1e12
    inputs["initial_state"][:] = 1e30
    got, same_state = chunked(inputs, shape)
    assert torch.equal(got[:, 70:], want[:, 70:]) and torch.equal(same_state, state)


def test_summary_gives_the_state_after_a_sequence() -> None:
    """The factor of the state before is zero if a document begins."""
    for ends in (None, (), (20,)):
        shape = Shape(2, 70, 4, 2, 16, 8, 32, ends)
        inputs = {name: each.double() for name, each in drawn(shape).items()}
        inputs["dt"] *= 0.01
        initial = inputs.pop("initial_state")
        segments = documents_of(shape)
        if segments is not None and ends == ():
            segments[1] = 0
        recurrence = StateSpace(**inputs, segments=segments, chunk=shape.chunk)
        transition, final = recurrence.summary()
        assert bool(transition.any()) is (ends != (20,))
        want = recurrence.outputs(initial)[1]
        got = transition[..., None, None] * initial + final
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        torch.testing.assert_close(recurrence.outputs()[1], final)


def test_a_step_continues_a_sequence() -> None:
    shape = Shape(2, 20, 4, 2, 16, 8, 8)
    inputs = {name: each.double() for name, each in drawn(shape).items()}
    want, last = recurrent(**inputs)
    parts = {
        name: each[:, :17] if name in (*"xbc", "dt") else each for name, each in inputs.items()
    }
    _, state = chunked(parts, shape)
    for t in range(17, 20):
        now = {name: inputs[name][:, t] for name in ("x", "dt", "b", "c")}
        y, state = step(**now, a=inputs["a"], d=inputs["d"], state=state)
        torch.testing.assert_close(y, want[:, t], rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def test_time_steps_are_limited() -> None:
    dt = torch.tensor([[-30.0, 0.0, 5.0]])
    bias = torch.tensor([0.0, 1.0, 1.0])
    free = torch.log1p((dt + bias).double().exp())
    torch.testing.assert_close(time_steps(dt, bias, (0.0, float("inf"))).double(), free)
    got = time_steps(dt.bfloat16(), bias.bfloat16(), (0.1, 3.0))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), free.clamp(0.1, 3.0))
