"""Tables and pictures of a plan: what stands in which cell, in which unit."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.precision import Fp8Config
from megatron_ext.device.gpus import GB, GPUS, Gpu, Measured
from megatron_ext.errors import WIDEST_LINE
from megatron_ext.planning import budget, report
from megatron_ext.planning.budget import Line, budget_sheet
from megatron_ext.planning.hardware import FLASH_3, size
from megatron_ext.planning.memory import fullest, memory
from megatron_ext.planning.network import Case
from megatron_ext.planning.report import (
    assumption_sheet,
    bucket_sheet,
    headline,
    memory_sheet,
    recomputation_sheet,
    report_cases,
    reserve_sheet,
    save_pictures,
    stage_sheet,
    time_lines,
    volume_sheet,
)
from megatron_ext.planning.sheet import Column, Report, Sheet
from megatron_ext.planning.step_time import estimate
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.text.cost.task_cost import GPT_COST
from tests.planning.measure import configuration
from tests.text.cost import layouts
from tests.text.cost.layouts import llama_network

H100 = GPUS["H100"]
SHARED = "--use-distributed-optimizer"


def network_of(name: str = "", more: str = "") -> GptNetwork:
    flags = [*(layouts.flags_of(name) if name else layouts.MODEL), *more.split()]
    return GptNetwork.of(configuration(flags))


def rows_of(sheet: Sheet) -> list[dict[str, str]]:
    """Return the printed cells of each row by the heading of their column."""
    table = sheet.table()
    headings = [str(column.header) for column in table.columns]
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return [dict(zip(headings, row, strict=True)) for row in zip(*columns, strict=True)]


def test_the_headline_names_layout_size_and_numbers() -> None:
    shared = llama_network("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    assert headline(shared, memory(shared)) == (
        "plan: 8 ranks (tp 2 × pp 2 × dp 2), 8,030.3 M parameters, 64 micro-batches of 1 × 8192 "
        "tokens, bf16"
    )
    for flags, numbers in (("", "fp32"), ("--fp16", "fp16"), ("--bf16", "bf16")):
        small = network_of(more=flags)
        assert headline(small, memory(small)) == (
            f"plan: 1 rank, 0.3 M parameters, 4 micro-batches of 2 × 128 tokens, {numbers}"
        )
    config = dataclasses.replace(
        layouts.llama(), fp8=Fp8Config(fp8_format="hybrid", fp8_recipe="rowwise")
    )
    eight = GptNetwork.of(config)
    assert headline(eight, memory(eight)).endswith("bf16, layers in fp8 (hybrid, rowwise)")
    layers = dataclasses.replace(config.model, transformer_impl="transformer_engine")
    engine = GptNetwork.of(dataclasses.replace(config, model=layers))
    assert headline(engine, memory(engine)).endswith(
        "bf16, layers in fp8 (hybrid, rowwise); Transformer Engine's layers priced as the torch "
        "layers"
    )


LAYER = (4 + 2 * 2) * 16 * 64 + 64 * 64 + 3 * 64 * 192 + 2 * 64
TABLE = 512 * 64


def test_stages_hold_their_layers_and_parameters_in_the_order_of_the_model() -> None:
    stages = rows_of(stage_sheet(memory(network_of("pp2vpp2"))))
    assert [tuple(row.values()) for row in stages] == [
        ("0", "0", "embedding, layer 0", f"{TABLE + LAYER:,}"),
        ("1", "1", "layer 1", f"{LAYER:,}"),
        ("2", "0", "layer 2", f"{LAYER:,}"),
        ("3", "1", "layer 3, output", f"{LAYER + 64 + TABLE:,}"),
    ]
    depth = rows_of(stage_sheet(memory(network_of("mtp1 pp2"))))
    assert [row["holds"] for row in depth] == ["embedding, layers 0-1", "layers 2-3, 1 MTP, output"]


def test_the_memory_of_each_rank_is_in_its_column() -> None:
    """A bf16 weight of Llama 3 8B has a gradient and, with its fp32 copy, 12 bytes of state."""
    network = llama_network("--ema-decay 0.9")
    (row,) = rows_of(memory_sheet(network, ranks := memory(network)))
    billion = 8_030_261_248 / GB
    assert [row[name] for name in ("weights", "gradients", "optimizer", "EMA")] == [
        f"{count * billion:,.2f} GB" for count in (2, 4, 12, 4)
    ]
    moving = [row[name] for name in ("activations", "transient", "peak")]
    counts = (ranks[0].activations, ranks[0].transient, ranks[0].total)
    assert moving == [size(count) for count in counts]
    assert row["in flight"] == "1"
    stages = llama_network("--pipeline-model-parallel-size 4")
    found = rows_of(memory_sheet(stages, memory(stages)))
    assert [row["in flight"] for row in found] == ["4", "3", "2", "1"]


def test_a_caption_says_what_sharding_the_state_would_leave() -> None:
    def caption(more: str) -> str | None:
        network = llama_network(more)
        _, *saving = memory_sheet(network, memory(network)).caption.splitlines()
        return saving[0] if saving else None

    eighth = f"{12 * 8_030_261_248 / 8 / GB:,.2f} GB"
    for more in ("", "--context-parallel-size 8"):
        assert caption(more) == f"with --use-distributed-optimizer: optimizer {eighth}"
    # The last stage has as many layers as the first and, like it, a table of the vocabulary.
    last = (16 * 218_112_000 + 128256 * 4096 + 4096) * 12 / 4 / GB
    assert caption("--pipeline-model-parallel-size 2") == (
        f"with --use-distributed-optimizer: optimizer {last:,.2f} GB"
    )
    sharded = layouts.llama_network(f"{SHARED} --data-parallel-sharding-strategy optim_grads")
    gradients = memory(sharded)[0].state.gradients
    assert caption(SHARED) == (
        f"with --data-parallel-sharding-strategy optim_grads: gradients {size(gradients)}"
    )
    strategy = "--data-parallel-sharding-strategy optim_grads_params"
    weights = memory(layouts.llama_network(f"{SHARED} {strategy}"))[0].state.parameters
    saving = caption(f"{SHARED} --data-parallel-sharding-strategy optim_grads")
    assert saving == f"with {strategy}: weights {size(weights)}"
    # An eighth of all weights, and the embedding beside the first layer.
    gathered = 128256 * 4096 + 218_112_000
    assert weights == pytest.approx(2 * (8_030_261_248 / 8 + gathered), rel=1e-4)
    assert caption(f"{SHARED} {strategy}") is None
    slices = caption(f"{SHARED} --context-parallel-size 8")
    assert slices is not None and slices.startswith("with --data-parallel-sharding-strategy")
    assert caption("--tensor-model-parallel-size 8") is None
    # With weight gradients put off, gradients cannot be sharded.
    deferred = "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"
    assert caption(f"{SHARED} {deferred}") is None


def test_recomputation_keeps_less_of_a_layer_and_its_input_at_least() -> None:
    network = llama_network(SHARED)
    table = recomputation_sheet(network, GPT_COST)
    none, selective, full = rows_of(table)
    loss = network.loss()
    assert str(table.caption) == (
        f"of them logits and loss: {size(loss.kept)}, transient {size(loss.transient)}"
    )
    assert [row["recomputation"] for row in (none, selective, full)] == [*GPT_COST.modes]
    assert none["a layer keeps"] == size(network.layer().kept)
    assert full["a layer keeps"] == size(8192 * 4096 * 2)
    (rank,) = memory(network)
    assert none["fullest rank: activations"] == size(rank.activations + rank.transient)
    assert none["peak"] == size(rank.total)
    graphed = llama_network(f"{SHARED} --cuda-graph-impl local")
    assert len(rows_of(recomputation_sheet(graphed, GPT_COST))) == 1


def test_bytes_are_those_of_a_whole_step() -> None:
    """Two stages of four replicas: 32 micro-batches, each of a bf16 tensor [8192, 4096]."""
    network = llama_network("--pipeline-model-parallel-size 2")
    ranks = memory(network)
    rows = volume_sheet(network, ranks).records()
    for row, rank in zip(rows, ranks, strict=True):
        assert row["pipeline_bytes"] == 32 * 8192 * 4096 * 2
        assert row["data_bytes"] == 2 * 3 / 4 * rank.state.gradients
        assert row["tensor_bytes"] == row["context_bytes"] == row["expert_bytes"] == 0


def test_lines_of_time_and_memory_name_the_same_step() -> None:
    gpu = GPUS["H200"]
    found = estimate(llama_network(SHARED), gpu)
    fits, time = time_lines(found, GPT_COST)
    assert f"estimated on {gpu.name}: {found.seconds:.3g} s a step" in time
    assert f"{128 * 8192 / found.seconds:,.0f} tokens/s" in time
    assert f"MFU {found.mfu:.1%} of {gpu.bf16 / 1e12:.0f} TFLOP/s, bubble 0.0%" in time
    reserve = sum(found.reserve.values())
    assert fits == (
        f"fits: {size(found.peak)} and a reserve of {size(reserve)} make "
        f"{size(found.peak + reserve)} of {size(gpu.memory)}"
    )
    tight = dataclasses.replace(gpu, memory=round(found.needed / 0.96))
    fits = time_lines(estimate(llama_network(SHARED), tight), GPT_COST)[0]
    assert "; this leaves 4.0%, so a small error" in fits
    kept = {row["reserve (assumed)"]: row["bytes"] for row in rows_of(reserve_sheet(found))}
    assert kept == {name: size(count) for name, count in found.reserve.items()}


DISTRIBUTED = "--use-distributed-optimizer"
SELECTIVE, FULL = "selective recomputation", "full recomputation"
NOTHING = "neither the distributed optimizer nor recomputation suffices; use more ranks (--search)"


@pytest.mark.parametrize(
    ("more", "fitting", "spare", "remedy"),
    [
        ("", DISTRIBUTED, 0, f"it would fit with {DISTRIBUTED}"),
        (SHARED, SELECTIVE, 0, f"it would fit with {SELECTIVE}"),
        (SHARED, SELECTIVE, -1, f"it would fit with {FULL}"),
        (SHARED, FULL, -1, NOTHING),
        (f"{SHARED} --cuda-graph-impl local", SELECTIVE, 0,
         f"it would fit with {SELECTIVE} in place of --cuda-graph-impl"),
    ],
)  # fmt: skip
def test_a_run_that_does_not_fit_gets_the_first_remedy(
    more: str, fitting: str, spare: int, remedy: str
) -> None:
    """The GPU has as much memory as one of the remedies needs, or a byte less."""
    network = llama_network(more)
    config = network.config
    runs = {
        DISTRIBUTED: layouts.llama(f"{more} {SHARED}"),
        SELECTIVE: GPT_COST.recompute(config, "selective"),
        FULL: GPT_COST.recompute(config, "full"),
    }
    needed = fullest(memory(network.with_config(runs[fitting]))).total
    needed += sum(estimate(network, H100).reserve.values())
    gpu = dataclasses.replace(H100, memory=needed + spare)
    _, advice, _ = time_lines(estimate(network, gpu), GPT_COST)
    assert advice == remedy


def test_exactly_enough_memory_fits() -> None:
    network = llama_network(SHARED)
    found = estimate(network, H100)
    needed = found.peak + sum(found.reserve.values())
    for spare, fits in ((0, True), (-1, False)):
        gpu = dataclasses.replace(H100, memory=needed + spare)
        assert estimate(network, gpu).fits is fits
        assert report_cases([Case(network)], gpu, GPT_COST).fits is fits


def test_the_parts_of_a_report_are_in_order() -> None:
    def titles(cases: list[Case], gpu: Gpu | None) -> list[str]:
        report = report_cases(cases, gpu, GPT_COST)
        return [*(line.split()[0] for line in report.lines), *(x.title for x in report.sheets)]

    network = llama_network(SHARED)
    lines = ["plan:", "schedule", "the"]
    plan = ["stages of the pipeline", "memory of a rank", "activations by recomputation"]
    plan += ["bytes that a rank sends in a step"]
    assert titles([Case(network)], None) == lines + plan
    named = titles([Case(network, "wide", 0.5), Case(network, "high", 0.5)], None)
    assert named == [*lines, "buckets", *plan]
    timed = titles([Case(network)], GPUS["H200"])
    assert timed == [
        "fits:", "estimated", *lines, *plan,
        "time of a step on the slowest rank, by class of kernels", "kept free on each GPU",
        "what the time rests on",
    ]  # fmt: skip


def test_rows_of_the_budget_have_units_and_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    found = estimate(llama_network(SHARED), GPUS["H200"])
    lines = [
        Line("linear", found.seconds / 4, "500 TFLOP/s", 3e15, 5e9, 1234.0),
        Line("waiting", found.seconds / 2, "for others"),
    ]
    monkeypatch.setattr(budget, "budget", lambda _: lines)
    table = budget_sheet(found)
    first, second = rows_of(table)
    assert (first["TFLOP"], first["GB"], first["kernels"]) == ("3,000.0", "5.0", "1,234")
    assert (first["ms"], first["share"]) == (f"{250 * found.seconds:.1f}", "25.0%")
    assert (second["TFLOP"], second["GB"], second["kernels"], second["share"]) == (
        "",
        "",
        "",
        "50.0%",
    )
    other = estimate(llama_network(SHARED), GPUS["H200"], FLASH_3)
    assert str(table.caption).endswith(
        f"; where flash attention 3 is installed, {other.matrix_share:.1%} of "
        f"{1e3 * other.seconds:.1f} ms"
    )


def test_measured_rates_are_marked() -> None:
    measured = Measured(8e14, 1.4e15, 4.2e12, "machine.json")
    gpu = dataclasses.replace(H100, measured=measured)
    table = assumption_sheet(gpu)
    shares = {row["assumed"]: row["share"] for row in rows_of(table)}
    assert {name for name, share in shares.items() if share == "measured"} == {
        "products", "fp8_products", "copies",
    }  # fmt: skip
    assert str(table.caption) == (
        "measured (machine.json): bf16 800 TFLOP/s, fp8 1400 TFLOP/s, copy 4.20 TB/s; links are "
        "the datasheet's"
    )
    assert "measured" not in {row["share"] for row in rows_of(assumption_sheet(H100))}
    older = assumption_sheet(dataclasses.replace(H100, measured=Measured(8e14, None, 4.2e12, "x")))
    marked = {row["assumed"] for row in rows_of(older) if row["share"] == "measured"}
    assert marked == {"products", "copies"}
    assert str(older.caption).startswith("measured (x): bf16 800 TFLOP/s, copy 4.20 TB/s; ")


def test_equal_rows_are_joined_and_empty_columns_left_out_but_not_in_json(
    capfd: pytest.CaptureFixture[str],
) -> None:
    columns = [Column("rank", "rank"), Column("sent", "sent_bytes", size)]
    columns.append(Column("none", "none_bytes", size, optional=True))
    rows = [(0, 5, 0), (1, 7 * GB, 0), (2, 7 * GB, 0), (3, 5, 0)]
    sheet = Sheet("sent", "bytes", columns, rows, "x" * 150, merges=True)
    assert rows_of(sheet) == [
        {"rank": "0", "sent": "0.00 MB"},
        {"rank": "1-2", "sent": "7.00 GB"},
        {"rank": "3", "sent": "0.00 MB"},
    ]
    assert sheet.records()[2] == {"rank": 2, "sent_bytes": 7 * GB, "none_bytes": 0}
    Report(True, ["y" * 150], {}, [sheet]).show()
    assert max(map(len, capfd.readouterr().out.splitlines())) <= WIDEST_LINE


def test_the_worst_and_the_most_frequent_kind_of_batch_are_marked() -> None:
    small, large = (llama_network(f"{SHARED} --micro-batch-size {x}") for x in (1, 2))
    columns: Mapping[str, str] = {"length": "9"}
    cases = [
        Case(small, "rare", 0.1, columns),
        Case(large, "wide", 0.3, columns),
        Case(small, "usual", 0.6, columns),
    ]
    rows = rows_of(bucket_sheet(cases, H100))
    assert [(row["bucket"], row["share of steps"], row[""]) for row in rows] == [
        ("rare", "10.0%", ""),
        ("wide", "30.0%", "worst"),
        ("usual", "60.0%", "typical"),
    ]
    peaks = [size(fullest(memory(case.network)).total) for case in cases]
    assert [row["peak"] for row in rows] == peaks
    assert rows[1]["step (s)"] == f"{estimate(large, H100).seconds:.3g}"
    assert [row["step (s)"] for row in rows_of(bucket_sheet(cases, None))] == ["", "", ""]
    report = report_cases(cases, None, GPT_COST)
    assert report.lines[0] == headline(large, memory(large))


def test_bars_of_the_picture_stand_on_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(report, "write_figure", lambda figure, path: figures.append((figure, path)))
    monkeypatch.setattr(report, "save_schedule", lambda *_: None)
    network = llama_network("--pipeline-model-parallel-size 2")
    paths = save_pictures(network, tmp_path / "plan.svg", H100)
    assert paths == [tmp_path / "plan.svg", tmp_path / "plan_memory.svg"]
    ((figure, path),) = figures
    assert path == paths[1]
    (axes,) = figure.axes
    tops = [0.0, 0.0]
    for bars in axes.containers:
        for index, bar in enumerate(bars):
            assert bar.get_y() == pytest.approx(tops[index])
            tops[index] += bar.get_height()
    assert tops == pytest.approx([rank.total / GB for rank in memory(network)])
    (limit,) = axes.lines
    assert set(limit.get_ydata()) == {H100.memory / GB}
