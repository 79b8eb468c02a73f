"""Memory and operations of video runs: state exactly, operations, and peaks within a tenth."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import GPUS
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.planning.memory import fullest, memory
from megatron_ext.planning.stages import Stage
from megatron_ext.planning.step_time import estimate
from megatron_ext.planning.weights import Weight, distinct
from megatron_ext.train.main import main
from megatron_ext.video.config.joint import JointConfig
from megatron_ext.video.cost.clip import Clip
from megatron_ext.video.cost.joint import flops_of_clip
from megatron_ext.video.data.setup import planned_clips
from megatron_ext.video.networks.lookup import network_of
from megatron_ext.video.networks.mmdit.config import SIZES as MMDIT_SIZES
from megatron_ext.video.networks.wan.config import SIZES as DIT_SIZES
from megatron_ext.video.networks.wan.cost import dit_weights
from megatron_ext.video.networks.wan.flops import flops_of_pass
from megatron_ext.video.streaming import cost
from megatron_ext.video.task import VIDEO
from tests.planning import fake_world
from tests.planning.measure import (
    KINDS,
    Measured,
    check_peak,
    check_state,
    configuration,
    measure,
    slow_but,
)
from tests.ranks import ranks
from tests.video.clips import CHANNELS, LONG, POOLED, SIDE, TEXT, WIDTH, write_clips
from tests.video.networks.harness import one
from tests.video.networks.wan.plain import num_parameters
from tests.video.networks.wan.problem import ALONE, BIDIRECTIONAL, Problem, cached, frames_of
from tests.video.networks.wan.test_kinds import problem_of
from tests.video.streaming.runs import flags_of

COMMON = (
    "--train-iters 1 --lr 1e-3 --lr-warmup-iters 0 --micro-batch-size 2 --global-batch-size 8 "
    "--log-interval 1 --num-workers 0"
).split()
NO_RECOMPUTATION = "--recompute-double-blocks 0 --recompute-single-blocks 0"
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
MUON = "--optimizer muon --bf16 --use-distributed-optimizer"
DIT = "--video-model video-dit"
HUNYUAN = "--video-model hunyuan-video"
CAUSAL = "--video-model causal-video-dit --frame-block 1 --window-frames 3 --sink-frames 1"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --nproc-per-node 2"
PP2 = "--pipeline-model-parallel-size 2 --nproc-per-node 2"
CP2 = "--context-parallel-size 2 --nproc-per-node 2"
LAYOUTS = {
    "mmdit": NO_RECOMPUTATION,
    "mmdit recomputed": "",
    "mmdit tp2 sp": f"{NO_RECOMPUTATION} {TP2}",
    "mmdit pp2": f"{NO_RECOMPUTATION} {PP2}",
    "mmdit cp2": f"{NO_RECOMPUTATION} {CP2}",
    "mmdit t2v bf16 dp2": f"{NO_RECOMPUTATION} --bf16 --use-distributed-optimizer "
    "--nproc-per-node 2 --i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0",
    "mmdit adapters": f"{NO_RECOMPUTATION} --lora-rank 4",
    "mmdit adapters tp2 sp": f"{NO_RECOMPUTATION} --lora-rank 4 {TP2}",
    "mmdit adapters pp2": f"--lora-rank 4 {PP2}",
    "mmdit fp8": f"{NO_RECOMPUTATION} {FP8}",
    "dit": DIT,
    "dit fp8": f"{DIT} {FP8}",
    "dit recomputed": f"{DIT} --recompute-blocks 2",
    "dit tp2 sp": f"{DIT} {TP2}",
    "dit pp2": f"{DIT} {PP2}",
    "dit flf2v": f"{DIT} --dit-condition flf2v-clip",
    "dit i2v tp2 sp": f"{DIT} --dit-condition i2v-clip {TP2}",
    "dit i2v adapters": f"{DIT} --dit-condition i2v-clip --lora-rank 4",
    "dit ti2v pp2": f"{DIT} --dit-condition ti2v {PP2}",
    "mmdit muon dp2": f"{NO_RECOMPUTATION} {MUON} --nproc-per-node 2",
    "dit muon tp2": f"{DIT} {MUON} {TP2}",
    "causal": CAUSAL,
    "causal cp2": f"{CAUSAL} {CP2}",
}
LAYOUTS |= {
    "hunyuan": f"{HUNYUAN} {NO_RECOMPUTATION}",
    "hunyuan tp2 sp": f"{HUNYUAN} {NO_RECOMPUTATION} {TP2}",
    "hunyuan i2v pp2": f"{HUNYUAN} --i2v-head-weight 1 --guidance-embed {PP2}",
}
QUICK = ("mmdit recomputed", "mmdit tp2 sp", "dit", "dit flf2v", "causal")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("clips") / "long", {LONG: 16}, images=30)


@pytest.mark.parametrize("name", slow_but(QUICK, LAYOUTS))
def test_state_exactly_and_peak_within_a_tenth(name: str, long: Path, tmp_path: Path) -> None:
    flags = [*COMMON, *LAYOUTS[name].split(), "--video-data-path", str(long)]
    ranks, config = measure(flags, tmp_path, VIDEO), configuration(flags, VIDEO)
    (clip,) = planned_clips(config)
    network = network_of(config).planned(clip)
    check_state(network, ranks)
    check_peak(network, ranks)


@ranks()
def test_weights_and_state_are_exact_in_every_layout(context: ParallelContext, long: Path) -> None:
    for words in LAYOUTS.values():
        config = configuration([*COMMON, *words.split(), "--video-data-path", str(long)], VIDEO)
        (clip,) = planned_clips(config)
        fake_world.check_state(VIDEO.choose(config), network_of(config).planned(clip))


@pytest.mark.parametrize("number", [1, 2])
def test_only_the_first_blocks_of_a_model_are_run_again_on_its_stages(
    number: int, long: Path
) -> None:
    """Recompute the block of the first of two stages, or those of both."""
    flags = [*COMMON, *f"{DIT} {PP2} --video-data-path {long}".split()]
    kept, again = (
        configuration([*flags, "--recompute-blocks", str(count)], VIDEO) for count in (0, number)
    )
    (clip,) = planned_clips(kept)
    without, recomputed = (network_of(x).planned(clip) for x in (kept, again))
    assert [list(stage.layers) for stage in recomputed.stages()] == [[0], [1]]
    for stage in recomputed.stages():
        plain, flops = without.flops(stage), recomputed.flops(stage)
        if stage.layers[0] < number:
            assert flops.again == plain.linear and flops.scores_again == plain.scores
            assert recomputed.activations(stage).kept < without.activations(stage).kept / 2
        else:
            assert flops == plain
            assert recomputed.activations(stage) == without.activations(stage)


@pytest.mark.parametrize("network", ["", DIT, f"{CAUSAL} {CP2}"])
def test_a_shape_is_priced_as_data_of_this_shape(network: str, long: Path) -> None:
    of_data = configuration([*COMMON, *network.split(), "--video-data-path", str(long)], VIDEO)
    encoders = (
        f"--dry-run --dry-run-shape 64x64x17 --codec-channels {CHANNELS} --codec-spatial "
        f"{64 // SIDE} --text-length {TEXT} --text-width {WIDTH} --pooled-width {POOLED}"
    )
    of_flags = configuration([*COMMON, *network.split(), *encoders.split()], VIDEO)
    (wanted,), (clip,) = planned_clips(of_data), planned_clips(of_flags)
    assert replace(clip, name=wanted.name) == wanted
    assert of_flags.model == of_data.model
    # Without data nothing is evaluated.
    assert of_flags.training.eval_iters == of_data.training.eval_iters == 0
    networks = [network_of(x).planned(wanted) for x in (of_data, of_flags)]
    assert memory(networks[0]) == memory(networks[1])


def test_a_shape_that_is_wider_than_high_is_priced_so() -> None:
    words = "--dry-run --dry-run-shape 64x96x17 --codec-spatial 8 --text-length 5"
    (clip,) = planned_clips(configuration([*COMMON, *words.split()], VIDEO))
    assert (clip.name, clip.frames, clip.rows, clip.columns) == ("64x96x17", 5, 4, 6)
    assert (clip.num_text, clip.micro_batch_size) == (5, 2)
    # Text is padded until the whole sequence divides among ranks.
    for frames, image in ((13, 60), (17, 75)):
        words = f"--dry-run --dry-run-shape 48x80x{frames} --codec-spatial 8 --text-length 6 {CP2}"
        config = configuration([*COMMON, *words.split()], VIDEO)
        (clip,) = planned_clips(config)
        multiple = network_of(config).sequence_multiple
        assert clip.num_image == image and multiple > 1
        assert clip.num_text == 6 + -(6 + image) % multiple


@pytest.mark.parametrize("name", DIT_SIZES)
def test_parameters_of_video_dits_in_any_layout(name: str) -> None:
    """Compare with the sizes' own count, which tests of the model compare with its modules."""
    sizes = DIT_SIZES[name]
    for tp in (1, 2, 4):
        if sizes.num_heads % tp:
            continue
        stage = Stage.of_layers(range(sizes.num_blocks), 0, 1)
        assert distinct([dit_weights(LoraConfig(), sizes, tp, stage)]) == num_parameters(sizes)


def _mmdit(words: str) -> RunConfig:
    own = "--video-data-path x --mmdit-size 11b --bf16 --global-batch-size 16"
    flags = [*COMMON, *own.split(), *words.split()]
    config = parse_args(flags, VIDEO, world_size=8, device="cuda").config
    return config.with_section(replace(config.section(JointConfig), cond_embed=True))


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
    network = network_of(_mmdit(words)).planned(CLIP)
    planned = memory(network)
    sizes = replace(MMDIT_SIZES["11b"], cond_embed=True)
    assert distinct(x for rank in planned for x in rank.weights) == num_parameters(sizes)
    # The embedders and the last layer, which are in the log's count alone, are little.
    x = network.sizes
    forward = sum(network.flops(stage).forward for stage in network.stages())
    counted = 3 * forward * x.tp * x.cp
    wanted = flops_of_clip(sizes, CLIP.num_text, CLIP.num_image)
    assert 0.95 * wanted < counted < 1.10 * wanted


def test_longer_clips_and_no_recomputation_take_more() -> None:
    config = _mmdit("--use-distributed-optimizer")
    longer = replace(CLIP, frames=65)
    kept = network_of(config).recomputing("none")
    runs = ((config, CLIP), (config, longer), (kept, longer))
    peaks = [fullest(memory(network_of(run).planned(clip))).total for run, clip in runs]
    assert peaks == sorted(peaks) and peaks[0] < peaks[1] < peaks[2]
    gpu = GPUS["H200"]
    times = [estimate(network_of(config).planned(x), gpu) for x in (CLIP, longer)]
    assert times[1].seconds > 1.9 * times[0].seconds
    assert 0 < times[0].mfu < 0.7


STREAMING_LAYOUTS = {
    "plain": "--latent-size 8 8",
    "adapters": "--lora-rank 4 --bf16 --use-distributed-optimizer --nproc-per-node 2",
    "tp2 sp": TP2,
    "others": f"{CP2} --critic-size mini --teacher-size mini --latent-size 8 8",
    "recomputed": "--latent-size 16 16 --recompute-blocks 1",
    "own teacher": "--teacher-size mini --teacher-pipeline-model-parallel-size 2 "
    "--nproc-per-node 2",
}


def _state(held: cost.NetworkMemory) -> dict[str, int]:
    return {kind: getattr(held.state, kind) for kind in KINDS}


def _names(weights: tuple[Weight, ...]) -> list[list[object]]:
    return [[weight.name, weight.numel] for weight in weights]


def _check_networks(planned: cost.StreamingMemory, rank: Measured) -> None:
    generator, critic, teacher = planned.networks
    assert _names(generator.weights) == rank.weights[0]
    assert _names(critic.weights) == rank.networks["critic weights"]
    assert _state(critic) == rank.networks["critic"]
    # Keys and values of the frames; the plan counts those of the text too.
    assert rank.networks["cache"] < planned.cache < 2 * rank.networks["cache"]
    if rank.place["dp_cp"] == 0:
        assert _state(generator) == rank.state
    if _names(teacher.weights) == rank.networks["teacher weights"]:
        assert teacher.state.parameters == rank.networks["teacher"]
    else:
        assert rank.networks["teacher"] < teacher.state.parameters


@pytest.mark.parametrize("name", slow_but(("plain", "adapters"), STREAMING_LAYOUTS))
def test_networks_of_streaming_exactly_and_largest_pass_nearly(name: str, tmp_path: Path) -> None:
    replicas = 2 if name in ("adapters", "own teacher") else 1
    words = f"--train-iters 1 {STREAMING_LAYOUTS[name]}"
    flags = flags_of(tmp_path / "prompts", words, batch=replicas)
    ranks = measure(flags, tmp_path, VIDEO)
    planned = cost.streaming_memory(configuration(flags, VIDEO))
    for rank in ranks:
        _check_networks(planned, rank)
        assert planned.largest[1] == pytest.approx(rank.peak, rel=0.10)
    if name == "own teacher":
        last = ranks[-1].networks["teacher"], ranks[0].networks["teacher"]
        assert planned.networks[2].state.parameters == max(last)


def test_a_dry_run_says_what_is_unknown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = [*flags_of(tmp_path, "--train-iters 1"), "--dry-run", "--dry-run-gpu", "H100"]
    assert main(VIDEO, flags) == 0
    shown = " ".join(capfd.readouterr().out.split())
    for name in ("generator", "critic", "teacher"):
        assert name in shown
    assert "fits on H100" in shown
    said = cost.not_estimated(configuration(flags, VIDEO))
    assert len(said) == 3 and all(text in shown for text in said)


def counted(chunk: Any, inputs: dict[str, Any]) -> tuple[float, float]:
    ours = flops_of_pass(chunk, **inputs)
    # Torch counts no fused attention of a CPU.
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        chunk(**inputs)
    return ours, float(counter.get_total_flops())


@ranks()
def test_products_count_and_keys_of_the_cache_but_not_its_text(context: ParallelContext) -> None:
    for problem in (
        Problem(),
        Problem(options=BIDIRECTIONAL),
        Problem(options=BIDIRECTIONAL, timestep_per_frame=False, batch=1, frames=5),
        problem_of("flf2v-clip", num_text=9),
    ):
        ours, theirs = counted(one(problem, context), dict(problem.inputs()))
        assert ours == theirs
    problem = Problem(options=ALONE, frames=7)
    chunk, inputs, cache = cached(problem, context)
    for first, count in ((0, 1), (1, 3), (4, 3)):
        ours, theirs = counted(chunk, {**frames_of(inputs, first, count), "cache": cache})
        assert ours == theirs, first
    problem = dataclasses.replace(Problem(), frames=18)
    chunk, inputs, cache = cached(problem, context)
    seen = []
    for first in range(0, 18, 3):
        part = frames_of(inputs, first, 3)
        ours, theirs = counted(chunk, {**part, "cache": cache})
        assert ours == theirs, first
        seen.append(ours)
    # The first computes the text; then the window fills, until it is full.
    assert seen[1] < seen[2] < seen[3] == seen[4] == seen[5]
