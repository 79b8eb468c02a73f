"""Updates against plain torch arithmetic, and steps that a bad gradient must not spoil."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import AdamOptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from megatron_ext.optim import update
from megatron_ext.optim.builder import choose_kernels
from megatron_ext.parallel.context import ParallelContext
from tests.checkpoint import tiny
from tests.ranks import ranks


class _Net(MegatronModule):  # type: ignore[misc]
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(6, 4, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(6, generator=generator))


def _optimizer(context: ParallelContext, *, distributed: bool, **options: Any) -> tuple[Any, Any]:
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    model = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=distributed),
        module=_Net(config),
    )
    core = AdamOptimizerConfig(
        lr=0.1, use_distributed_optimizer=distributed, clip_grad=1.0, **options
    )
    optimizer = get_megatron_optimizer(core, [model], use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    return model, optimizer


def _fill(model: Any, value: float, *given: torch.Tensor) -> list[torch.Tensor]:
    """Give every parameter a known gradient, reduce it, and return the mean over replicas."""
    parameters = list(model.parameters())
    grads = list(given) or [torch.full_like(p, value) + i for i, p in enumerate(parameters)]
    model.zero_grad_buffer()
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.main_grad.copy_(grad)
    model.finish_grad_sync()
    return grads


@pytest.mark.parametrize("distributed", [False, True])
@ranks(dp=2)
def test_norm_is_that_of_the_mean_gradient(context: ParallelContext, distributed: bool) -> None:
    model, optimizer = _optimizer(context, distributed=distributed)
    grads = _fill(model, 0.25)
    optimizer.prepare_grads()
    want = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    assert math.isclose(update.global_grad_norm(optimizer), want, rel_tol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@ranks(dp=2)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(
    context: ParallelContext, distributed: bool, bad: float, fused: bool
) -> None:
    model, optimizer = _optimizer(context, distributed=distributed)
    choose_kernels(optimizer, fused=fused)
    before = [p.detach().clone() for p in model.parameters()]
    _fill(model, bad if context.rank == 1 else 0.5)
    result = update.update_parameters(optimizer, clip_grad=1.0)
    assert not result.applied
    assert not math.isfinite(result.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    _fill(model, 0.5)
    assert update.update_parameters(optimizer, clip_grad=1.0).applied
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
@ranks(tp=2)
def test_a_bad_gradient_of_a_copy_that_no_norm_counts_skips_the_step_on_all(
    context: ParallelContext, distributed: bool, fused: bool
) -> None:
    model, optimizer = _optimizer(context, distributed=distributed)
    choose_kernels(optimizer, fused=fused)
    before = [p.detach().clone() for p in model.parameters()]
    # Both ranks hold all of the weights, and the norm counts those of rank 0.
    grads = _fill(model, 0.5)
    optimizer.prepare_grads()
    want = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    assert math.isclose(update.global_grad_norm(optimizer), want, rel_tol=1e-7)
    _fill(model, math.nan if context.rank == 1 else 0.5)
    result = update.update_parameters(optimizer, clip_grad=1.0)
    assert not result.applied
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@ranks(dp=2)
def test_the_update_is_torchs_adam_on_the_clipped_gradient(context: ParallelContext) -> None:
    model, optimizer = _optimizer(context, distributed=True)
    reference = [p.detach().clone().requires_grad_() for p in model.parameters()]
    plain = torch.optim.AdamW(
        [
            {"params": reference[:1], "weight_decay": 0.01},
            {"params": reference[1:], "weight_decay": 0.0},
        ],
        lr=0.1,
    )
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.01 * group.get("wd_mult", 1.0)
    for value in (0.5, -2.0):
        grads = _fill(model, value)
        result = update.update_parameters(optimizer, clip_grad=1.0)
        for parameter, grad in zip(reference, grads, strict=True):
            parameter.grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(reference, 1.0)
        plain.step()
        assert math.isclose(result.grad_norm, float(norm), rel_tol=1e-6)
    for mine, want in zip(model.parameters(), reference, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [0.05, 3.0])
@ranks(dp=2)
def test_a_tiny_epsilon_and_the_unclipped_norm(context: ParallelContext, value: float) -> None:
    """Take one step with the published eps of 1e-15 and betas: torch's AdamW on min(norm, 1)."""
    betas, eps, decay = (0.9, 0.95), 1e-15, 0.01
    model, optimizer = _optimizer(
        context, distributed=True, adam_beta1=betas[0], adam_beta2=betas[1], adam_eps=eps
    )
    for group in optimizer.param_groups:
        group["weight_decay"] = decay
    reference = [p.detach().clone().requires_grad_() for p in model.parameters()]
    plain = torch.optim.AdamW(reference, lr=0.1, betas=betas, eps=eps, weight_decay=decay)
    generator = torch.Generator().manual_seed(1)
    grads = [value * torch.randn(p.shape, generator=generator) for p in model.parameters()]
    grads[0][0] *= 1e-12  # With the usual eps of 1e-8 these would hardly move.
    _fill(model, 0, *grads)
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
    result = update.update_parameters(optimizer, clip_grad=1.0)
    assert math.isclose(result.grad_norm, norm, rel_tol=1e-6)
    for parameter, grad in zip(reference, grads, strict=True):
        parameter.grad = grad * min(1.0, 1.0 / norm)
    plain.step()
    for mine, want in zip(model.parameters(), reference, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("clip_grad", [0.0, 1.0])
@ranks(dp=2)
def test_the_fused_update_is_that_of_a_host(context: ParallelContext, clip_grad: float) -> None:
    """Clipped inside of the kernel, with bad gradients in between; float32's rounding apart.

    The last norm is below the limit: such gradients are not enlarged.
    """
    models = {fused: _optimizer(context, distributed=True) for fused in (False, True)}
    choose_kernels(models[True][1], fused=True)
    for value in (0.5, math.nan, -2.0, math.inf, 0.01):
        updates = {}
        for fused, (model, optimizer) in models.items():
            assert update.decides_on_device(optimizer) == fused
            _fill(model, 0, *(torch.full_like(p, value) for p in model.parameters()))
            updates[fused] = update.update_parameters(optimizer, clip_grad)
            assert updates[fused].is_read == (not fused)
        assert updates[True].applied == updates[False].applied == math.isfinite(value)
        assert str(updates[True].grad_norm) == str(updates[False].grad_norm)
    assert updates[True].grad_norm == pytest.approx(0.01 * math.sqrt(30))
    for mine, want in zip(models[True][0].parameters(), models[False][0].parameters(), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-6, atol=1e-7)
    states, others = (
        models[fused][1].chained_optimizers[0].optimizer.state.values() for fused in (True, False)
    )
    assert {float(state["step"]) for state in states} == {3.0}
    # Adam's step hides a factor of all gradients, which its moments show.
    for state, other in zip(states, others, strict=True):
        torch.testing.assert_close(state["exp_avg"], other["exp_avg"], rtol=1e-6, atol=0)
    # A rank without such a kernel makes all ranks decide on their hosts.
    optimizer = models[True][1]
    assert update.all_decide_on_device(optimizer)
    choose_kernels(optimizer, fused=context.rank == 1)
    assert update.decides_on_device(optimizer) == (context.rank == 1)
    assert not update.all_decide_on_device(optimizer)


@pytest.mark.parametrize("distributed", [False, True])
@ranks(dp=2)
def test_zeros_are_megatron_cores(context: ParallelContext, distributed: bool) -> None:
    model, optimizer = _optimizer(context, distributed=distributed, log_num_zeros_in_grad=True)
    _fill(model, -1.0)  # The bias is the second parameter: its gradients are 0.
    optimizer.prepare_grads()
    assert float(update.count_zeros(optimizer)) == optimizer.count_zeros() == 6
    assert update.update_parameters(optimizer, clip_grad=1.0).num_zeros == 6
    _fill(model, math.nan)
    assert update.update_parameters(optimizer, clip_grad=1.0).num_zeros is None
    optimizer.config.log_num_zeros_in_grad = False
    _fill(model, -1.0)
    uncounted = update.update_parameters(optimizer, clip_grad=1.0)
    assert uncounted.applied and uncounted.num_zeros is None


@pytest.mark.parametrize("fused", [False, True])
@ranks()
def test_the_kernel_is_not_the_checkpoints(context: ParallelContext, fused: bool) -> None:
    _, saved = _optimizer(context, distributed=False)
    _, optimizer = _optimizer(context, distributed=False)
    choose_kernels(saved, fused=not fused)
    choose_kernels(optimizer, fused=fused)
    inner, other = (each.chained_optimizers[0].optimizer for each in (optimizer, saved))
    for group in other.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    other.step()
    inner.load_state_dict(other.state_dict())
    assert {bool(group["fused"]) for group in inner.param_groups} == {fused}
    assert update.decides_on_device(optimizer) == fused
    assert {bool(group["fused"]) for group in other.param_groups} == {not fused}


@ranks()
def test_who_approves_sees_every_norm_and_can_only_forbid(context: ParallelContext) -> None:
    """Gradients that are not finite are never applied, nor those whose norm is refused."""
    model, optimizer = _optimizer(context, distributed=False)
    scaled = tiny.build(context, layers=1, precision="fp16")
    norms = list[float]()

    def approve(answer: bool) -> Any:
        def answered(norm: torch.Tensor) -> torch.Tensor:
            norms.append(float(norm))
            return torch.tensor(answer)

        return answered

    before = [p.detach().clone() for p in model.parameters()]
    for value, answer in ((math.nan, True), (0.5, False)):
        _fill(model, value)
        assert not update.update_parameters(optimizer, 1.0, approve=approve(answer)).applied
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    _fill(model, 0.5)
    assert update.update_parameters(optimizer, 1.0, approve=approve(True)).applied
    # The norm of a chain, such as of dense weights and experts, is that of all its gradients.
    other, second = _optimizer(context, distributed=False)
    for each, its, value in ((model, optimizer, 0.5), (other, second, -2.0)):
        _fill(each, value)
        its.prepare_grads()
    parts = [*update.parts_of(optimizer), *update.parts_of(second)]
    chain: Any = SimpleNamespace(chained_optimizers=parts)
    squares = 24 * 0.5**2 + 6 * 1.5**2 + 24 * 2.0**2 + 6 * 1.0**2
    assert float(update.global_grad_norm(chain)) == pytest.approx(math.sqrt(squares))
    for parameter in scaled.model[0].parameters():
        parameter.main_grad.fill_(math.inf)
    # The gradients of 16-bit floats have overflown before there is a norm.
    overflow = update.update_parameters(scaled.optimizer, 0.0, approve=approve(True))
    assert not overflow.applied
    norm = math.sqrt(24 * 0.5**2 + 6 * 1.5**2)
    assert math.isnan(norms[0]) and norms[1:] == pytest.approx([norm, norm, math.inf])


class _Scaler:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


@pytest.mark.parametrize("overflown", [(), (0,), (1,), (0, 1)])
def test_optimizers_of_a_chain_keep_one_loss_scale(overflown: tuple[int, ...]) -> None:
    """megatron-core halves the scale of those whose gradients have overflown, and of no other."""
    parts = [
        SimpleNamespace(
            grad_scaler=_Scaler(4.0 if number in overflown else 8.0),
            found_inf=torch.tensor([float(number in overflown)]),
        )
        for number in range(2)
    ]
    chain: Any = SimpleNamespace(chained_optimizers=[*parts, SimpleNamespace(grad_scaler=None)])
    update._share_loss_scale(chain)
    assert [part.grad_scaler.scale for part in parts] == [4.0 if overflown else 8.0] * 2


class _Chunk:
    """Notes what is done to the hooks that gather a chunk's parameters."""

    def __init__(self) -> None:
        self.done = list[str]()

    def disable_forward_pre_hook(self, *, param_sync: bool) -> None:
        self.done.append("off and gathered" if param_sync else "off")

    def enable_forward_pre_hook(self) -> None:
        self.done.append("on")


def test_the_hooks_that_gather_parameters_return_to_what_they_were() -> None:
    chunks: Any = [_Chunk(), _Chunk()]
    sync = object()
    settings: Any = SimpleNamespace(param_sync_func=sync)
    gather = update.ParameterGather(chunks, settings, overlap=True)
    with pytest.raises(KeyError), gather.paused():
        assert settings.param_sync_func is None
        raise KeyError
    assert settings.param_sync_func is sync
    gather.switch_off(gather=False)
    with gather.paused():
        pass
    assert settings.param_sync_func is None  # It was off before the pause.
    gather.switch_on()
    gather.switch_on()
    assert settings.param_sync_func is sync
    for chunk in chunks:
        assert chunk.done == ["off and gathered", "on", "off", "on"]
    without: Any = _Chunk()
    gather = update.ParameterGather([without], settings, overlap=False)
    with gather.paused():
        pass
    gather.switch_on()
    assert without.done == [] and settings.param_sync_func is sync


def test_a_long_gradient_has_the_norm_of_all_its_elements() -> None:
    """Squares are summed in blocks of 1024 elements, and the rest after them."""
    for size in (1, 1023, 1024, 1025, 3000):
        gradient = torch.arange(1.0, size + 1)
        wanted = size * (size + 1) * (2 * size + 1) / 6
        assert float(update._square(gradient)) == pytest.approx(wanted, rel=1e-6)
