"""Parts of a step: what they count, scale and pass on."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext import core
from megatron_ext.data.batch import Batch
from megatron_ext.layers.auxiliary_loss import INDEXER_LOSS, INDEXER_LOSS_COUNT
from megatron_ext.losses.contract import StepCounts
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.recorder import Recorder
from megatron_ext.train import auxiliary_losses, core_schedule
from megatron_ext.train import step as module
from megatron_ext.train.auxiliary_losses import take_auxiliary_losses
from megatron_ext.train.step import (
    StepInputs,
    StepLosses,
    StepRunner,
    count_targets,
    mean_of,
    means_of,
    reduce_reports,
    reduce_step,
)
from tests.ranks import ranks


def runner_with(**attributes: Any) -> Any:
    """Return a runner that has nothing but these attributes."""
    runner: Any = StepRunner.__new__(StepRunner)
    training = SimpleNamespace(empty_unused_memory_level=0, calculate_per_token_loss=True, seed=77)
    config = SimpleNamespace(
        training=training,
        optimizer=SimpleNamespace(clip_grad=1.0),
        model=SimpleNamespace(seq_length=48, deterministic_dropout=False),
    )
    usual: dict[str, Any] = {
        "config": config,
        "context": SimpleNamespace(recorder=Recorder()),
        "approvals": [],
        "observer": None,
        "check_zeroed": None,
        "step_guard": None,
        "amax_histories": None,
        "device": torch.device("cpu"),
        "_unsettled": [],
        "_micro_batch_size": 2,
        "_shards_gradients": False,
    }
    vars(runner).update({**usual, **attributes})
    return runner


def groups(rank: int = 0, **sizes: int) -> Any:
    return SimpleNamespace(
        **{
            name: SimpleNamespace(size=lambda size=size: size)
            for name, size in {"tp": 1, "cp": 1, "dp": 1, "pp": 1, **sizes}.items()
        }
    )


def test_means_of_losses_with_few_or_no_targets() -> None:
    assert mean_of(torch.tensor([0.3, 0.5])).item() == pytest.approx(0.6)
    assert mean_of(torch.tensor([0.0, 0.0])).item() == 0.0
    assert means_of({"first": torch.zeros(2), "other": torch.zeros(2)}) == {"first": 0.0}
    assert means_of({"first": torch.tensor([3.0, 2.0]), "other": torch.tensor([1.0, 0.5])}) == {
        "first": 1.5,
        "other": 2.0,
    }


@ranks(dp=2, cp=2)
def test_targets_are_counted_over_all_ranks_and_weights_beside_them(
    context: ParallelContext,
) -> None:
    """Rank r has r + 1 targets in each of two micro-batches, of weight 0.5 each."""
    none: Any = None

    def batch(depth: float) -> Batch:
        weights = torch.zeros(1, 8)
        weights[0, : context.rank + 1] = 0.5
        return Batch(
            none, none, weights, none, mtp_loss_weights=(weights * 3, torch.full((1, 8), depth))
        )

    counts = count_targets([batch(1.0), batch(0.25)], context)
    assert float(counts.main) == 2 * (1 + 2 + 3 + 4)
    assert float(counts.weight) == 10.0
    assert counts.mtp.tolist() == [30.0, 4 * 8 * 1.25]
    assert counts.num_microbatches == 2
    # Sums of large counts are exact.
    large = float(2**24)
    reports = [{"lm loss": torch.tensor([large, x]), "b": torch.tensor([1.0, 2.0])}
               for x in (large, 1.0)]  # fmt: skip
    totals = reduce_reports(reports, context)
    assert {name: total.tolist() for name, total in totals.items()} == {
        "lm loss": [8 * large, 4 * (large + 1)],
        "b": [8.0, 16.0],
    }
    totals, scale = reduce_step(reports, torch.tensor(5), context)
    assert totals["b"].tolist() == [8.0, 16.0]
    assert scale is not None and float(scale) == pytest.approx(1 / 20)


def plain_hooks() -> Any:
    """Return a configuration whose hooks are not set, of a model that follows no logits."""
    return SimpleNamespace(qk_clip=False, log_max_attention_logit=False)


class Pending:
    """An update that the host has not read yet."""

    is_read = False

    def __init__(self, applied: bool) -> None:
        self.applied = applied


def test_schedules_advance_for_applied_updates_in_their_order() -> None:
    runner = runner_with()
    steps: list[tuple[str, int]] = []

    def scheduler(name: str) -> Any:
        return SimpleNamespace(step=lambda increment: steps.append((name, increment)))

    for name, applied, samples in (("a", True, 4), ("b", False, 5), ("c", True, 6)):
        runner._follow(Pending(applied), scheduler(name), samples)
    assert not runner.settled and steps == []
    read: Any = SimpleNamespace(is_read=True, applied=True)
    runner._follow(read, scheduler("d"), 7)
    assert runner.settled
    assert steps == [("a", 4), ("c", 6), ("d", 7)]


@pytest.mark.parametrize("answers", [(True, True), (True, False), (False, True)])
def test_every_approval_must_agree_to_an_update(
    answers: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def approval(answer: bool) -> Any:
        return lambda totals, norm: asked.append((totals, float(norm))) or torch.tensor(answer)

    given: list[Any] = []

    def update(optimizer: Any, clip: float, scale: Any, approve: Any) -> Any:
        given.append((optimizer, clip, scale))
        return bool(approve(torch.tensor(2.0)))

    monkeypatch.setattr(module, "update_parameters", update)
    runner = runner_with(optimizer="optimizer", approvals=[approval(x) for x in answers])
    losses = StepLosses([], {"lm loss": torch.ones(2)}, torch.tensor(0.5))
    assert runner.update(losses) is all(answers)
    assert given == [("optimizer", 1.0, losses.gradient_scale)]
    assert asked == [(losses.totals, 2.0)] * 2


@pytest.mark.parametrize(("level", "times"), [(0, []), (1, ["after"]), (2, ["before", "after"])])
def test_levels_of_giving_memory_back(
    level: int, times: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    monkeypatch.setattr(module, "update_parameters", lambda *_: events.append("update"))
    runner = runner_with(optimizer="optimizer")
    runner.config.training.empty_unused_memory_level = level
    runner.update(StepLosses([], {}))
    expected = ["empty" if name in times else "" for name in ("before", "after")]
    assert events == [word for word in (expected[0], "update", expected[1]) if word]


@pytest.mark.parametrize(
    ("engine", "sharded", "checked", "overwrites"),
    [
        (SimpleNamespace(graphs=[]), False, False, True),
        (SimpleNamespace(graphs=[]), False, True, False),
        (SimpleNamespace(graphs=[1]), False, False, False),
        (SimpleNamespace(graphs=[]), True, False, False),
        (None, False, False, False),
    ],
)
def test_when_the_first_product_may_overwrite_the_gradients(
    engine: Any, sharded: bool, checked: bool, overwrites: bool
) -> None:
    events: list[Any] = []
    runner = runner_with(
        engine=engine,
        chunks=["chunk"],
        optimizer=SimpleNamespace(zero_grad=lambda: events.append("zero")),
        check_zeroed=events.append if checked else None,
        _shards_gradients=sharded,
        _gradients=SimpleNamespace(start=lambda overwrite: events.append(overwrite)),
    )
    runner.zero_gradients()
    assert events == [overwrites, "zero", *[["chunk"]] * checked]


class Engine:
    """Stands in for the pipeline; a chunk of it notes its scale."""

    def __init__(self) -> None:
        self.num_targets = torch.tensor(8)
        self.graphs: list[Any] = []
        self.given: dict[str, Any] = {}
        self.scales: list[float] = []

    def run(self, forward: Any, batches: Any, number: int, shape: Any, **named: Any) -> list[Any]:
        self.given = {"batches": len(batches), "number": number, "shape": shape, **named}
        return [{"lm loss": torch.tensor([6.0, 3.0])}] * number

    def scale_gradients(self, scale: Tensor) -> None:
        self.scales.append(float(scale))


@pytest.mark.parametrize(
    ("observes", "in_update", "scaled"),
    [(False, True, False), (False, False, True), (True, True, True)],
)
def test_who_divides_the_gradients(
    observes: bool, in_update: bool, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    engine = Engine()
    seen: list[list[float]] = []
    advanced: list[bool] = []
    context = SimpleNamespace(
        recorder=Recorder(), is_last_stage=False, pgs=SimpleNamespace(dp_cp=None, **vars(groups()))
    )
    runner = runner_with(
        engine=engine,
        pipeline=engine,
        chunks=[SimpleNamespace(scale_gradients=engine.scale_gradients, modules=list)],
        context=context,
        scales_in_update=in_update,
        observer=(lambda: seen.append(list(engine.scales))) if observes else None,
        amax_histories=SimpleNamespace(advance=lambda: advanced.append(True)),
        transformer_config=SimpleNamespace(
            calculate_per_token_loss=True, sequence_parallel=False, hidden_size=4
        ),
        task=SimpleNamespace(prepare_batches=None, boundary_shape=None),
        _forward_step="forward",
        _has_auxiliary_losses=False,
        _weights_kept=module.nullcontext,
    )
    found = runner.compute_gradients(StepInputs(None, 3))
    assert found.totals["lm loss"].tolist() == [18.0, 9.0]
    assert engine.given["batches"] == engine.given["number"] == 3
    assert engine.given["force_all_reduce"] is observes
    assert engine.given["shape"] == (48, 2, 4)
    assert engine.scales == [0.125] * scaled
    assert (found.gradient_scale is None) is scaled
    if observes:
        # It sees what has been divided.
        assert seen == [[0.125]]
    assert advanced == [True]
    assert len(runner.evaluate(None, 4)) == 4
    assert engine.given["batches"] == engine.given["number"] == 4
    assert engine.given["forward_only"]


@pytest.mark.parametrize(
    ("cp", "tp", "parallel", "given", "length"),
    [(1, 4, False, None, 48), (2, 4, False, None, 24), (2, 4, True, None, 6), (1, 4, True, 32, 8)],
)
def test_the_shape_between_stages(
    cp: int, tp: int, parallel: bool, given: int | None, length: int
) -> None:
    runner = runner_with(
        context=SimpleNamespace(pgs=groups(cp=cp, tp=tp)),
        task=SimpleNamespace(boundary_shape=None),
        transformer_config=SimpleNamespace(sequence_parallel=parallel, hidden_size=5),
    )
    assert runner.shape_of(None, given) == (length, 2, 5)


def test_dropout_masks_follow_the_number_of_the_first_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three replicas take turns with micro-batches of two samples."""
    monkeypatch.setattr(
        "megatron_ext.layers.dropout.microbatch_masks", lambda seed, first: (seed, first)
    )
    runner = runner_with(context=SimpleNamespace(pgs=groups(dp=3), dp_rank=1))
    assert runner._masks(100) is None
    runner.config.model.deterministic_dropout = True
    masks = runner._masks(100)
    assert [masks(number) for number in (0, 1)] == [(77, 102), (77, 108)]


@pytest.mark.parametrize(("last", "prepared"), [(True, True), (False, False)])
def test_a_task_prepares_the_batches_of_the_last_stage(last: bool, prepared: bool) -> None:
    task = SimpleNamespace(prepare_batches=lambda config, batches, context: [*batches, "more"])
    runner = runner_with(task=task, context=SimpleNamespace(is_last_stage=last))
    assert runner.prepared(StepInputs(None, 1)) is None
    assert runner.prepared(StepInputs(["a"], 1)) == ["a", *["more"] * prepared]


@pytest.mark.parametrize(
    ("per_token", "scale"),
    # 120 targets over 5 micro-batches of 3 replicas, or a mean of means over two slices.
    [(True, 120 / (5 * 3)), (False, 2 / 5)],
)
def test_the_scale_of_auxiliary_losses(
    per_token: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = StepCounts(torch.tensor(120.0), torch.tensor(60.0), torch.zeros(0), 5)
    monkeypatch.setattr(module, "count_targets", lambda batches, context: counts)
    sources: list[int] = []

    def broadcast(tensor: Tensor, group: Any, group_src: int) -> None:
        sources.append(group_src)
        tensor.fill_(120.0)

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    layout = SimpleNamespace(data_parallel_size=3)
    for last in (True, False):
        context = SimpleNamespace(
            is_last_stage=last, last_stage_pp_rank=1, pgs=groups(cp=2, dp=3), layout=layout
        )
        runner = runner_with(
            context=context,
            _has_auxiliary_losses=True,
            _auxiliary=SimpleNamespace(value=None),
        )
        runner.config.training.calculate_per_token_loss = per_token
        assert runner._count(["batch"] * 5, 5) is (counts if last else None)
        assert float(runner._auxiliary.value) == pytest.approx(scale)
    assert sources == [1, 1] * per_token


def test_megatron_cores_schedule_gets_the_length_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}

    def schedule(**named: Any) -> list[Any]:
        given.update(named)
        steps = [named["forward_step_func"](named["data_iterator"][0], "chunk") for _ in range(2)]
        assert [loss for _, loss in steps] == ["checked loss"] * 2
        return [output for output, _ in steps]

    masked: list[int] = []

    def masks(microbatch: int) -> Any:
        masked.append(microbatch)
        return nullcontext()

    monkeypatch.setattr(core_schedule, "get_forward_backward_func", lambda: schedule)
    monkeypatch.setattr(core_schedule, "checked", lambda loss: f"checked {loss}")
    context: Any = SimpleNamespace(
        recorder=Recorder(),
        pgs=SimpleNamespace(cp=SimpleNamespace(size=lambda: 2), tp=SimpleNamespace(size=lambda: 3)),
    )
    chunks: Any = ["one", "two"]

    def forward(batch: Any, chunk: Any, counts: Any) -> Any:
        return (batch, chunk, counts), "loss"

    batches: Any = ["a", "b"]
    counted: Any = "counts"
    for cut, whole, given_masks in ((False, 16, None), (True, 48, masks)):
        config: Any = SimpleNamespace(sequence_parallel=cut)
        schedule_of_core = core_schedule.CoreSchedule(chunks, config, context)
        outputs = schedule_of_core.run(
            forward, batches, 2, (8, 2, 4), counts=counted, masks=given_masks, forward_only=False
        )
        assert outputs == [("a", "chunk", "counts"), ("b", "chunk", "counts")]
        assert given["seq_length"] == given["decoder_seq_length"] == whole
        assert (given["micro_batch_size"], given["num_microbatches"]) == (2, 2)
        assert (given["model"], given["forward_only"]) == (["one", "two"], False)
    assert masked == [0, 1]


@pytest.mark.parametrize(
    ("words", "hooks"),
    [
        ("", set()),
        ("align_grad_reduce align_param_gather", set()),
        ("overlap_grad_reduce", {"no_sync_func"}),
        ("overlap_grad_reduce align_grad_reduce", {"no_sync_func", "grad_sync_func"}),
        ("overlap_grad_reduce align_grad_reduce shards_gradients", set()),
        ("overlap_param_gather", set()),
        ("overlap_param_gather align_param_gather", {"param_sync_func"}),
    ],
)
def test_which_hooks_of_megatron_core_a_run_sets(
    words: str, hooks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "all_decide_on_device", lambda optimizer: True)
    names = "overlap_grad_reduce align_grad_reduce shards_gradients overlap_param_gather"
    flags = {name: name in words.split() for name in [*names.split(), "align_param_gather"]}
    flags["gathers_in_forward"] = flags["overlap_param_gather"]
    chunk = SimpleNamespace(no_sync="no_sync_func", start_grad_sync="grad_sync_func",
                            start_param_sync="param_sync_func")  # fmt: skip
    for chunks in ([chunk], [chunk, chunk]):
        runner = runner_with(engine="engine", chunks=chunks, transformer_config=plain_hooks())
        runner.config.optimizer = SimpleNamespace(**flags)
        runner._connect(SimpleNamespace(scale_loss="scale"))
        found = dict(vars(runner.transformer_config))
        assert not (found.pop("qk_clip") or found.pop("log_max_attention_logit"))
        assert found.pop("grad_scale_func") == "scale"
        assert found.pop("finalize_model_grads_func") is module.finalize_model_grads
        assert found == {name: name if len(chunks) == 1 else [name, name] for name in hooks}
        assert runner.scales_in_update
    runner = runner_with(engine=None, chunks=[chunk], transformer_config=plain_hooks())
    runner.config.optimizer = SimpleNamespace(**flags)
    runner._connect(SimpleNamespace(scale_loss="scale"))
    assert not runner.scales_in_update


def test_the_losses_of_routers_count_as_one_target_each(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    def routers(config: Any, context: Any, number: int) -> dict[str, Tensor]:
        numbers.append(number)
        return {"z_loss": torch.tensor(0.25)}

    monkeypatch.setattr(auxiliary_losses, "take_auxiliary_losses", routers)
    update: Any = SimpleNamespace(is_read=True, applied=True)
    losses = StepLosses([], {"lm loss": torch.tensor([6.0, 4.0])})
    advanced: list[int] = []
    runner = runner_with(
        scheduler=SimpleNamespace(step=lambda increment: advanced.append(increment)),
        step_guard=lambda inputs: (losses, update),
        transformer_config=SimpleNamespace(num_moe_experts=4),
        _has_layer_losses=True,
    )
    found = runner.train(StepInputs(None, 3), 12)
    assert {name: float(x) for name, x in found.losses.items()} == {"lm loss": 1.5, "z_loss": 0.25}
    assert {name: float(x) for name, x in found.counts.items()} == {"lm loss": 4.0, "z_loss": 1.0}
    assert (numbers, advanced) == ([3], [12])
    assert found.update is found.model_update is update


@ranks(pp=2)
def test_losses_of_routers_are_means_over_the_layers_of_all_stages(
    context: ParallelContext,
) -> None:
    """The second stage has no routers, and has logged nothing."""
    config: Any = SimpleNamespace(
        num_layers=2,
        mtp_num_layers=None,
        num_moe_experts=4,
        moe_layer_freq=1,
        moe_router_load_balancing_type=["aux_loss", "sinkhorn"],
        moe_z_loss_coeff=0.1,
        dsa_indexer_loss_coeff=None,
    )
    core.take_auxiliary_losses()
    if context.pp_rank == 0:
        for layer, loss in ((1, 3.0), (2, 9.0), (2, 6.0)):
            router: Any = SimpleNamespace(config=config, layer_number=layer)
            core.log_auxiliary_loss(router, "load_balancing_loss", torch.tensor(loss))
            core.log_auxiliary_loss(router, "z_loss", torch.tensor(2 * loss))
    found = take_auxiliary_losses(config, context, 3)
    # A sum of 18 over two layers and three micro-batches.
    assert {name: float(x) for name, x in found.items()} == {
        "load_balancing_loss": 3.0,
        "z_loss": 6.0,
    }
    # The depths of multi-token prediction are like the last layer.
    for frequency, layers in (([1, 0], 1), ([0, 1], 1 + 3), ([0, 0], 1), ([1, 1], 2 + 3)):
        config.moe_layer_freq, config.mtp_num_layers = frequency, 3
        if context.pp_rank == 0:
            router = SimpleNamespace(config=config, layer_number=1)
            core.log_auxiliary_loss(router, "z_loss", torch.tensor(60.0))
        found = take_auxiliary_losses(config, context, 3)
        assert float(found["z_loss"]) == 60.0 / (layers * 3)


@ranks(pp=2, cp=2)
def test_the_indexers_loss_is_averaged_over_those_that_were_logged(
    context: ParallelContext,
) -> None:
    """Context-parallel ranks log parts of a loss; only the second stage has such layers."""
    config: Any = SimpleNamespace(
        num_layers=4, mtp_num_layers=None, num_moe_experts=None, dsa_indexer_loss_coeff=0.1
    )
    core.take_auxiliary_losses()
    found = take_auxiliary_losses(config, context, 2)
    assert {name: float(x) for name, x in found.items()} == {"indexer loss": 0.0}
    if context.pp_rank == 1:
        for layer, loss in ((3, 3.0), (4, 9.0), (3, 6.0), (4, 2.0)):
            attention: Any = SimpleNamespace(config=config, layer_number=layer)
            part = torch.tensor(loss * (0.25 if context.pgs.cp.rank() else 0.75))
            core.log_auxiliary_loss(attention, INDEXER_LOSS, part)
            core.log_auxiliary_loss(attention, INDEXER_LOSS_COUNT, torch.tensor(0.5))
    found = take_auxiliary_losses(config, context, 2)
    assert {name: float(x) for name, x in found.items()} == {"indexer loss": 5.0}


@pytest.mark.parametrize(
    ("experts", "indexer", "of_task", "scales"),
    [
        (None, None, False, False),
        (4, None, False, True),
        (None, 0.1, False, True),
        (None, 0.0, True, True),
    ],
)
def test_which_runs_scale_auxiliary_losses(
    experts: int | None,
    indexer: float | None,
    of_task: bool,
    scales: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "StepGradients", lambda chunks: None)
    config: Any = SimpleNamespace(
        fp8=SimpleNamespace(fp8_format=None),
        parallel=SimpleNamespace(pipeline_schedule="core-1f1b"),
        optimizer=SimpleNamespace(shards_gradients=False),
        training=SimpleNamespace(batch_sizes=(2, 8)),
    )
    task: Any = SimpleNamespace(forward_step=None, auxiliary_losses=of_task)
    hooks: Any = SimpleNamespace(
        auxiliary_scale="scale",
        num_moe_experts=experts,
        dsa_indexer_loss_coeff=indexer,
        sequence_parallel=False,
    )
    chunks: Any = [torch.nn.Linear(1, 1)]
    context: Any = SimpleNamespace(
        recorder=None, pgs=SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    )
    runner = StepRunner(config, task, context, hooks, chunks, None, None)
    assert runner._has_auxiliary_losses is scales
    assert (runner.engine, runner.trained_chunks, runner.schedules) == (None, chunks, [])
