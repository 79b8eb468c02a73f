"""Video models: parameters and state exactly, and the peak of a step within a tenth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.config.lora import LoraConfig
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import GPUS
from megatron_ext.planning.memory import fullest, memory
from megatron_ext.planning.stages import Stage
from megatron_ext.planning.state import distinct
from megatron_ext.planning.step_time import estimate
from megatron_ext.video.config.mmdit import SIZES as MMDIT_SIZES
from megatron_ext.video.config.mmdit import MMDiTConfig
from megatron_ext.video.config.wan import SIZES as DIT_SIZES
from megatron_ext.video.cost.clip import Clip
from megatron_ext.video.cost.flops import flops_of_clip
from megatron_ext.video.cost.flow import network_of, with_recomputation
from megatron_ext.video.cost.wan import dit_weights
from megatron_ext.video.data.setup import planned_clips
from megatron_ext.video.task import VIDEO
from tests.planning.measure import check_peak, check_state, configuration, measure
from tests.video.clips import LONG, write_clips
from tests.video.cost.layouts import COMMON, LAYOUTS, flags_of

QUICK = ("mmdit recomputed", "mmdit tp2 sp", "dit", "causal")


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of one bucket, which fill two steps."""
    return write_clips(tmp_path_factory.mktemp("clips") / "long", {LONG: 16})


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in LAYOUTS]
)
def test_state_exactly_and_peak_within_a_tenth(name: str, clips: Path, tmp_path: Path) -> None:
    program, flags = LAYOUTS[name][0], flags_of(name, clips)
    ranks, config = measure(flags, tmp_path, program), configuration(flags, program)
    (clip,) = planned_clips(config)
    network = network_of(config, clip)
    check_state(network, ranks)
    check_peak(network, ranks)


@pytest.mark.parametrize("name", DIT_SIZES)
def test_parameters_of_video_dits_in_any_layout(name: str) -> None:
    """Sizes count their parameters themselves; tests of the model compare that with its modules."""
    sizes = DIT_SIZES[name]
    for tp in (1, 2, 4):
        if sizes.num_heads % tp:
            continue
        stage = Stage.of_layers(range(sizes.num_blocks), 0, 1)
        assert distinct([dit_weights(LoraConfig(), sizes, tp, stage)]) == sizes.num_parameters


def _mmdit(words: str) -> RunConfig:
    """Return a run of the size of Open-Sora on eight GPUs, with the widths of its data."""
    own = "--video-data-path x --mmdit-size 11b --bf16 --global-batch-size 16"
    flags = [*COMMON.split(), *own.split(), *words.split()]
    config = parse_args(flags, VIDEO, world_size=8, device="cuda").config
    return config.with_section(replace(config.section(MMDiTConfig), cond_embed=True))


CLIP = Clip("256px 129x192x336", 33, 12, 21, num_text=512, micro_batch_size=1)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--tensor-model-parallel-size 4 --sequence-parallel",
        "--pipeline-model-parallel-size 4",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ],
)
def test_parameters_and_operations_of_open_sora_in_any_layout(words: str) -> None:
    network = network_of(_mmdit(words), CLIP)
    planned = memory(network)
    sizes = replace(MMDIT_SIZES["11b"], cond_embed=True)
    assert distinct(x for rank in planned for x in rank.weights) == sizes.num_parameters
    # The embedders and the last layer, which are in the log's count alone, are little.
    x = network.sizes
    forward = sum(network.flops(stage).forward for stage in network.stages())
    counted = 3 * forward * x.tp * x.cp
    wanted = flops_of_clip(sizes, CLIP.num_text, CLIP.num_image)
    assert 0.95 * wanted < counted < 1.10 * wanted


def test_longer_clips_and_no_recomputation_take_more() -> None:
    config = _mmdit("--use-distributed-optimizer")
    longer = replace(CLIP, frames=65)
    peaks = [
        fullest(memory(network_of(run, clip))).total
        for run, clip in (
            (config, CLIP),
            (config, longer),
            (with_recomputation(config, "none"), longer),
        )
    ]
    assert peaks == sorted(peaks) and peaks[0] < peaks[1] < peaks[2]
    gpu = GPUS["H200"]
    times = [estimate(network_of(config, x), gpu) for x in (CLIP, longer)]
    assert times[1].seconds > 1.9 * times[0].seconds
    assert 0 < times[0].mfu < 0.7
