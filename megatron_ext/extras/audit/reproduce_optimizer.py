"""Reproduces defects D21 and D38 to D41 of `defects.yaml`.

They are in megatron-core's optimizers and their checkpoints. A function such as `d21` returns the
figure of the installed megatron-core and the right figure.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import AdamOptimizerConfig, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.extras.audit.reproduced import Reproduced, Reproductions, on_ranks
from megatron_ext.parallel.context import ParallelContext

LR, DECOUPLED_LR = 1e-2, 1e-3
LOSS_SCALE = 8.0


class Network(MegatronModule):  # type: ignore[misc]
    """An embedding ``[6, 4]`` and a matrix ``[6, 4]`` for six logits, 48 weights in total."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.embedding = torch.nn.Parameter(torch.linspace(-1, 1, 24).view(6, 4))
        self.matrix = torch.nn.Parameter(torch.linspace(2, -1, 24).view(6, 4))
        # megatron-core recognizes a parameter with a decoupled learning rate by this mark.
        self.embedding.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[b, 6]`` of tokens ``[b]``."""
        return self.embedding[tokens] @ self.matrix.T


def network(dtype: torch.dtype = torch.float32) -> Network:
    """Build a `Network` with weights of ``dtype``."""
    halves = {"bf16": dtype is torch.bfloat16, "fp16": dtype is torch.float16}
    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, params_dtype=dtype, **halves
    )
    made: Network = Network(config).to(dtype)
    return made


def trainer(
    net: Network, *, shard: bool = False, **flags: Any
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Wrap a network and build its Adam optimizer, as Megatron-LM does.

    Args:
        shard: whether the ranks shard the optimizer state (``--use-distributed-optimizer``).
        flags: fields of the optimizer's configuration; unknown ones are left out.
    """
    config = net.config
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=shard, grad_reduce_in_fp32=True),
        net,
    )
    names = {field.name for field in dataclasses.fields(AdamOptimizerConfig)}
    core = AdamOptimizerConfig(
        **{"lr": LR, **{name: value for name, value in flags.items() if name in names}},
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=shard,
    )
    return model, get_megatron_optimizer(core, [model], use_gloo_process_groups=False)


def scheduler(optimizer: MegatronOptimizer, **flags: Any) -> OptimizerParamScheduler:
    """Build Megatron-LM's scheduler, which keeps the rate of each parameter group constant.

    ``flags`` replace arguments of OptimizerParamScheduler.
    """
    phases = {"lr_warmup_steps": 0, "lr_decay_steps": 100, "lr_decay_style": "constant"}
    decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 100, "wd_incr_style": "constant"}
    rates = {"init_lr": 0.0, "max_lr": LR, "min_lr": 0.0}
    return OptimizerParamScheduler(optimizer, **{**rates, **phases, **decay, **flags})


def backward(model: DistributedDataParallel) -> None:
    """Compute the gradients of a cross-entropy over six tokens, in the model's gradient buffers."""
    model.zero_grad_buffer()
    tokens = torch.arange(6)
    loss = F.cross_entropy(model(tokens).float(), tokens.roll(1))
    loss.backward()  # type: ignore[no-untyped-call]
    model.finish_grad_sync()


def _nan_gradient(_context: ParallelContext) -> tuple[int, int]:
    model, optimizer = trainer(network(), clip_grad=1.0, grad_norm_skip_threshold=10.0)
    schedule = scheduler(optimizer)
    left = []
    for bad in (True, False):
        backward(model)
        if bad:
            model.module.matrix.main_grad[0, 0] = math.nan
        optimizer.step()
        schedule.step(1)
        left.append(sum(int(weight.isfinite().sum()) for weight in model.parameters()))
    return left[0], left[1]


def d21() -> Reproduced:
    """Measure D21 of `defects.yaml`: how many of 48 weights are finite after two steps.

    In the first of them, one gradient is NaN.
    """
    ((after_one, stock),) = on_ranks(_nan_gradient)
    what = (
        "weights of 48 that are numbers after a step in fp32 with --clip-grad 1 and one NaN among "
        f"its gradients, and a step more; after the first they are {after_one}"
    )
    return Reproduced(float(stock), 48.0, what)


def resumed_rate(*, shard: bool, decoupled: bool, lr: float = LR, override: bool = False) -> float:
    """Save an optimizer after a step, load it into a new one, and return its rate for the matrix.

    The result is the learning rate that the new optimizer has after loading.

    Args:
        shard: whether the ranks shard the optimizer state.
        decoupled: whether the embedding has its own learning rate.
        lr: learning rate of the loading run; the saving run has 1e-2.
        override: whether the loading run has ``--override-opt-param-scheduler``.
    """
    rates = {"decoupled_lr": DECOUPLED_LR, "decoupled_min_lr": 0.0} if decoupled else {}
    model, optimizer = trainer(network(), shard=shard, **rates)
    schedule = scheduler(optimizer)
    backward(model)
    optimizer.step()
    schedule.step(1)
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))

    _, optimizer = trainer(network(), shard=shard, lr=lr, **rates)
    of_matrix = next(i for i, group in enumerate(optimizer.param_groups) if group["max_lr"] == lr)
    using = {"use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": override}
    schedule = scheduler(optimizer, max_lr=lr, **using)
    optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    return float(optimizer.param_groups[of_matrix]["lr"])


def _rate_or_error(context: ParallelContext, **resume: Any) -> tuple[float, str]:
    """Return the result of `resumed_rate` and "", or NaN and a clause about its error."""
    try:
        return resumed_rate(**resume), ""
    except (ValueError, KeyError) as error:
        first = str(error).splitlines()[0]
        return math.nan, f"raises {type(error).__name__}: {first}"


def both_rates(**resume: Any) -> tuple[float, str]:
    """Resume a run with sharded optimizer state, and one in which every rank holds all of it.

    ``resume`` are arguments of `resumed_rate`. Return the matrix's learning rate in the run with
    sharded state, and a clause that compares both runs.
    """
    results = {
        shard: on_ranks(partial(_rate_or_error, shard=shard, **resume))[0]
        for shard in (True, False)
    }
    clauses = [results[shard][1] or f"gives {results[shard][0]:.4g}" for shard in (True, False)]
    clause = f"the distributed optimizer {clauses[0]}; the other {clauses[1]}"
    return results[True][0], clause


def d38() -> Reproduced:
    """Measure D38 of `defects.yaml`: the learning rate of a matrix in a resumed run.

    The run has ``--decoupled-lr``, another rate for the embedding.
    """
    stock, clause = both_rates(decoupled=True)
    what = f"learning rate of a matrix after a resume with --lr 0.01 --decoupled-lr 0.001: {clause}"
    return Reproduced(stock, LR, what)


def d40() -> Reproduced:
    """Measure D40 of `defects.yaml`: the learning rate after a resume with a new ``--lr``.

    The resumed run has ``--override-opt-param-scheduler``, which should apply the new rate.
    """
    stock, clause = both_rates(decoupled=False, lr=3 * LR, override=True)
    what = (
        "learning rate after a resume of a run of --lr 0.01 with --lr 0.03 "
        f"--override-opt-param-scheduler: {clause}"
    )
    return Reproduced(stock, 3 * LR, what)


def with_a_dense_overflow() -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Build an fp16 network whose embedding counts as an expert, and its optimizer.

    The gradients of all other weights are infinite, so they overflow.
    """
    net = network(torch.float16)
    net.embedding.allreduce = False  # type: ignore[attr-defined]  # the mark of experts' weights
    model, optimizer = trainer(net, initial_loss_scale=LOSS_SCALE, hysteresis=1)
    model.zero_grad_buffer()
    for weight, gradient in ((net.matrix, math.inf), (net.embedding, 0.5)):
        weight.main_grad.fill_(gradient)  # type: ignore[attr-defined]
    return model, optimizer


def _loss_scales(_context: ParallelContext) -> list[float]:
    _, optimizer = with_a_dense_overflow()
    optimizer.step()
    return [float(part.get_loss_scale()) for part in optimizer.chained_optimizers]


def d39() -> Reproduced:
    """Measure D39 of `defects.yaml`: the scale that experts' gradients are divided by in fp16.

    The gradients of all other weights have just overflowed.
    """
    dense, experts = on_ranks(_loss_scales, dp=2, ep=2)[0]
    what = (
        "scale by which gradients of experts are divided with --fp16 and "
        f"--expert-model-parallel-size 2, after an overflow of the dense ones at {LOSS_SCALE:.0f}; "
        f"the loss is multiplied by {dense:.0f}"
    )
    return Reproduced(experts, LOSS_SCALE / 2, what)


def _padded_buckets(_context: ParallelContext) -> tuple[float, float, float]:
    net = network()
    # megatron-core starts a new bucket for the copy of an embedding on another stage.
    net.matrix.shared_embedding = True  # type: ignore[attr-defined]
    model, optimizer = trainer(net, shard=True)
    scheduler(optimizer)
    backward(model)
    optimizer.step()
    (part,) = optimizer.chained_optimizers
    metadata = {"distrib_optim_fully_reshardable_mem_efficient": False}
    state = part.sharded_param_state_fully_reshardable(net.sharded_state_dict(), metadata=metadata)
    saved = {entry["param"].key: entry["param"].data for entry in state.values()}
    # In fp32 the network's weights are the optimizer's own weights, which the checkpoint holds.
    right = {f"optimizer.state.param.{name}": p.detach() for name, p in net.named_parameters()}
    mine, truth = (torch.cat([each[key].flatten() for key in right]) for each in (saved, right))
    worst = int((mine - truth).abs().argmax())
    return float(mine[worst]), float(truth[worst]), float((mine != truth).float().mean())


def d41() -> Reproduced:
    """Measure D41 of `defects.yaml`: the weight that is farthest off in an optimizer checkpoint.

    The checkpoint is the fully reshardable one of ``--use-distributed-optimizer``.
    """
    stock, right, share = on_ranks(_padded_buckets, dp=2)[0]
    what = (
        "weight that is farthest off in the fully reshardable checkpoint of "
        "--use-distributed-optimizer, where a bucket of gradients ends with padding; "
        f"{share:.0%} of 48 weights are wrong"
    )
    return Reproduced(stock, right, what)


REPRODUCTIONS: Reproductions = {"D21": d21, "D38": d38, "D39": d39, "D40": d40, "D41": d41}
