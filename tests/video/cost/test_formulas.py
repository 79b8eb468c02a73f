"""Formulas of the cost of video networks against numbers that are written out.

Runs are measured elsewhere; here layouts and number formats that no quick run has are counted by
hand, with sizes of which no two are equal.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import GPUS
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.planning.network import Flops
from megatron_ext.planning.stages import LayerBytes, Ranks, Stage
from megatron_ext.video import flow
from megatron_ext.video.config.joint import JointConfig
from megatron_ext.video.cost.clip import BlockBytes, Clip
from megatron_ext.video.cost.joint import flops_of_clip
from megatron_ext.video.networks.lookup import network_of
from megatron_ext.video.networks.mmdit.config import SIZES
from megatron_ext.video.networks.wan.config import VideoDiTConfig
from megatron_ext.video.streaming import cost
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.task import VIDEO
from tests.ranks import ranks
from tests.training_runs import config_of
from tests.video.clips import FLAGS
from tests.video.networks.harness import one
from tests.video.networks.mmdit.problem import Problem
from tests.video.streaming.runs import flags_of

CLIP = Clip("a", 5, 4, 6, num_text=24, micro_batch_size=3)
RANKS = Ranks(
    b=3, tp=2, cp=4, pp=1, dp=5, ep=1, etp=1, expert_dp=1, sequence_parallel=True, width=2, gpu=True
)
H, ROWS = 96, 120 // 4 * 3
TP2, CP2, PP2 = (
    f"--{kind}-parallel-size 2" for kind in ("tensor-model", "context", "pipeline-model")
)
CAUSAL = "--video-model causal-video-dit --frame-block 1 --window-frames 3 --sink-frames 1"


def planned(words: str, ranks: int = 1, clip: Clip = CLIP) -> Any:
    usual = FLAGS if "video-dit" not in words else [x for x in FLAGS[2:] if "adaln" not in x]
    flags = [*usual, "--video-data-path", "x", *words.split()]
    return network_of(config_of(flags, VIDEO, ranks=ranks)).planned(clip)


def test_tensors_of_a_block_in_bytes() -> None:
    width, whole = (
        BlockBytes(RANKS, H, ROWS),
        BlockBytes(replace(RANKS, sequence_parallel=False), H, ROWS),
    )
    assert (width.stream, whole.stream) == (ROWS * H, ROWS * H * 2)
    assert width.whole == whole.whole == ROWS * H * 2
    # Mean and deviation of each token in fp32.
    assert (width.statistics, whole.statistics) == (ROWS // 2 * 8, ROWS * 8)
    assert width.cut(40) == ROWS * 40 and width.matrix(40, 30) == 1200
    # Narrow features: the weight's gradient and the input's; wide ones: two gradients of features.
    assert width.gradients(8) == 8 * H + ROWS * H * 2 > 2 * ROWS * 8
    assert width.gradients(4000) == 2 * ROWS * 4000 > 4000 * H + ROWS * H * 2
    # Keys and values of the three other ranks, or the traded heads.
    assert width.exchanged(False) == 2 * 3 * ROWS * H and width.exchanged(True) == ROWS * H
    assert BlockBytes(replace(RANKS, cp=1), H, ROWS).exchanged(False) == 0


def test_messages_of_context_parallelism() -> None:
    """Gather keys and values of the other ranks, or trade queries, keys, values and outputs."""
    cut = 144 // 4 * 3 * 64 * 4
    four = "--context-parallel-size 4"
    assert planned(four, 4).context_bytes() == 2 * 3 * cut
    assert planned(f"{four} --cp-comm-type a2a", 4).context_bytes() == 4 * 3 / 4 * cut
    assert planned("").context_bytes() == 0


def test_linear_layers_in_8_bits_change_what_they_say() -> None:
    block, kept = Flops(8.0, scores=3.0, weights=5.0), LayerBytes(1000, 7)
    half = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
    with_weights, without = planned(f"{half} --fp8-wgrad"), planned(f"{half} --no-fp8-wgrad")
    assert with_weights.in_8_bits(block) == Flops(fp8=8.0, scores=3.0, fp8_weights=5.0)
    assert without.in_8_bits(block) == Flops(fp8=8.0, scores=3.0, weights=5.0)
    assert planned("").in_8_bits(block) == block
    # Half of what a layer keeps alone is saved; of what others keep too, 8 bits more are kept.
    shared = {"alone": 60, "shared": 20}
    assert with_weights.kept_in_8_bits(kept, **shared) == LayerBytes(1000 - 30 + 10, 7)
    assert (
        without.kept_in_8_bits(kept, **shared) == planned("").kept_in_8_bits(kept, **shared) == kept
    )
    # A CPU makes both factors and the product of an emulated product in fp32.
    plain = planned("--bf16").mlp(256)
    assert with_weights.mlp(256) == LayerBytes(plain.kept, plain.transient + 3 * 432 * 256 * 4)


def test_the_loss_keeps_the_error_and_in_16_bits_a_copy() -> None:
    """Take velocities of 16 numbers a token: an error in fp32, and three more of its size."""
    error = 50 * 16 * 4
    assert planned("").velocity_loss(50) == LayerBytes(error, 3 * error)
    assert planned("--bf16").velocity_loss(50) == LayerBytes(error + error // 2, 3 * error)


def test_a_step_counts_the_clips_of_all_replicas() -> None:
    """Take 24 clips on two replicas of tensor pairs, three at a time."""
    found = planned(f"{TP2} --micro-batch-size 3 --global-batch-size 24", 4)
    assert found.step_flops() == 24 * found.sample_flops() > 0


@ranks()
def test_operations_of_an_mmdit_are_those_that_torch_counts(context: ParallelContext) -> None:
    for switches in ({}, {"cond_embed": True}, {"guidance_embed": True}):
        sizes = replace(SIZES["tiny"], num_double_blocks=1, num_single_blocks=2, **switches)
        problem = Problem(sizes=sizes, batch=1, num_text=9)
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            one(problem, context)(**problem.inputs())
        # The last layer runs on the text too, whose velocity nobody needs.
        in_vain = 2 * 9 * 64 * sizes.token_width
        assert flops_of_clip(sizes, 9, 48) == 3 * (counter.get_total_flops() - in_vain)


def stages_of(network: Any) -> list[Stage]:
    found: list[Stage] = network.stages()
    return found


@pytest.mark.parametrize(
    "words",
    [
        "--num-double-blocks 3 --num-single-blocks 1 --recompute-single-blocks 0 "
        "--recompute-double-blocks {}",
        "--num-double-blocks 1 --num-single-blocks 3 --recompute-double-blocks 0 "
        "--recompute-single-blocks {}",
        "--video-model video-dit --recompute-blocks {}",
    ],
)
def test_recomputation_takes_operations_memory_and_messages(words: str) -> None:
    """Recompute the first block of its kind, on the first of two stages."""
    layout = f"{TP2} {PP2} {CP2} --sequence-parallel"
    kept, again = (planned(f"{words.format(n)} {layout}", 8) for n in (0, 1))
    (first, last), (plain, _) = stages_of(again), stages_of(kept)
    assert again.flops(last) == kept.flops(last) and again.traffic(last) == kept.traffic(last)
    assert again.activations(last) == kept.activations(last)
    count = len(first.layers)
    one_block = kept._block_flops()
    assert again.flops(first).again == one_block.linear
    assert again.flops(first).scores_again == one_block.scores
    assert again.activations(first).kept < kept.activations(plain).kept
    more, less = again.traffic(first), kept.traffic(plain)
    assert more.context == less.context * (2 + 1 / count) / 2
    assert more.tensor > less.tensor and more.pipeline == less.pipeline == 2 / 2 * again.boundary


def test_traffic_of_tensor_parallelism() -> None:
    """Count gathers and reduce-scatters: two in a single block, four in a double one, six in Wan's.

    Each is half of the tokens of all ranks, in the forward and in the backward pass.
    """
    rows = 144 * 3 * 64 * 4
    none = "--recompute-double-blocks 0 --recompute-single-blocks 0"
    found = planned(f"{TP2} --sequence-parallel {none} --num-double-blocks 1", 2)
    (stage,) = stages_of(found)
    assert found.traffic(stage).tensor == (4 + 2 * 2) * rows / 2 * 2
    rows = 120 * 3 * 64 * 4
    wan = "--video-model video-dit"
    (stage,) = stages_of(planned(wan))
    assert planned(f"{wan} {TP2}", 2).traffic(stage).tensor == 2 * 6 * rows / 2 * 2
    # Sequence parallelism gathers three inputs once more.
    found = planned(f"{wan} {TP2} --sequence-parallel", 2)
    assert found.traffic(stage).tensor == 2 * (6 + 9) * rows / 2


def test_messages_between_stages() -> None:
    """Send all tokens and one vector of the MMDiT; of Wan seven rows a timestep and the text."""
    assert planned("").boundary == (144 + 1) * 3 * 64 * 4
    assert planned(f"{TP2} --sequence-parallel", 2).boundary == (144 // 2 + 1) * 3 * 64 * 4
    assert planned("--video-model video-dit").boundary == (120 + 7 + 24) * 3 * 64 * 4
    independent = planned(f"{CAUSAL} --independent-block-timesteps")
    assert independent.boundary == (120 + 7 * 5 + 24) * 3 * 64 * 4


def test_operations_of_one_stage() -> None:
    """Count a block's products of two operations with 4 h² + 2 h m weights, and 12 or 3 vectors."""
    found = planned("--num-double-blocks 1 --num-single-blocks 2 --recompute-double-blocks 0 "
                    "--recompute-single-blocks 0")  # fmt: skip
    (stage,) = stages_of(found)
    tokens, h, m = 144 * 3, 64, 256
    linear = 2 * (3 * tokens * (4 * h * h + 2 * h * m) + 3 * (12 + 2 * 3) * h * h)
    assert found.flops(stage) == Flops(linear, scores=2 * 3 * tokens * 2 * 144 * h, weights=linear)
    wan = planned("--video-model video-dit")
    (stage,) = stages_of(wan)
    tokens, m = 120 * 3, 128
    linear = 2 * 2 * (tokens * (6 * h * h + 2 * h * m) + 3 * 2 * 24 * h * h)
    scores = 2 * 2 * 2 * h * (3 * 120 * 120 + tokens * 24)
    assert wan.flops(stage) == Flops(linear, scores=scores, weights=linear)


def test_the_block_that_is_more_frequent_stands_for_all() -> None:
    for double, single in ((1, 3), (3, 1)):
        found = planned(f"--num-double-blocks {double} --num-single-blocks {single}")
        wanted = found._single_block() if single > double else found._double()
        assert found.layer() == wanted and found._single_block() != found._double()


def test_conditions_and_16_bits_take_memory_at_the_entrance() -> None:
    """Keep copies of inputs in 16 bits: latents, their conditions, and text."""
    config = planned("").config
    h, vector = 64, 3 * 64

    def entering(config: RunConfig) -> LayerBytes:
        found: LayerBytes = network_of(config).planned(CLIP)._entering()
        return found

    assert entering(config).kept == 6 * vector * 4
    half = planned("--bf16").config
    sizes = network_of(half).sizes
    plain = 120 * sizes.token_width + 24 * sizes.text_width
    assert entering(half).kept == 3 * plain * 2 + 6 * vector * 2
    given = half.with_section(replace(half.section(JointConfig), cond_embed=True))
    more = 120 * sizes.cond_width
    assert entering(given).kept == 3 * (plain + more) * 2 + 6 * vector * 2
    for words, copies in (("", 0), ("--bf16", 3 * 24 * 32 * 2)):
        wan = planned(f"--video-model video-dit {words}")
        assert isinstance(wan.config.section(VideoDiTConfig), VideoDiTConfig)
        width = 2 if words else 4
        latents, text = 3 * 120 * 16 * width, 3 * 24 * 3 * h * width
        assert wan._entering().kept == latents + text + copies + 10 * vector * width


def test_buckets_are_priced_with_their_share_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    clips = [replace(CLIP, name="long", share=0.25), replace(CLIP, frames=1, share=0.75)]
    monkeypatch.setattr(flow, "planned_clips", lambda _: clips)
    found = flow.cases(planned("").config)
    assert [(case.name, case.share) for case in found] == [("long", 0.25), ("a", 0.75)]
    assert [case.network.clip for case in found] == clips  # type: ignore[attr-defined]
    columns = [case.columns["text + image tokens"] for case in found]
    assert columns == ["24 + 120", "24 + 24"] and found[0].columns["clips at a time"] == "3"


def streaming(words: str = "", ranks: int = 1) -> RunConfig:
    flags = f"--train-iters 1 --prompts-path x {words}"
    config = config_of(flags_of(Path(), flags, micro=2, batch=2), VIDEO, ranks=ranks)
    own = replace(config.section(StreamingConfig), text_features=32)
    return config.with_section(own)


@pytest.mark.parametrize(
    ("words", "tp", "cp"),
    [("", 1, 1), (TP2, 2, 1), (f"{CP2} --cp-comm-type all_gather", 1, 2), (f"{CP2} --bf16", 1, 2)],
)
def test_the_cache_holds_frames_and_text_on_each_rank(words: str, tp: int, cp: int) -> None:
    """Hold twelve frames of four tokens, and all of the text, in two blocks of two samples."""
    rows = 12 * 4 // cp + 8
    width = 2 if "bf16" in words else 4
    wanted = 2 * 2 * rows * 2 * 64 // tp * width + 8 * 2 * 32 * 4
    assert cost.streaming_memory(streaming(words, tp * cp)).cache == wanted


def test_passes_of_a_step_follow_its_flags() -> None:
    usual = cost.streaming_memory(streaming()).passes
    plain = cost.streaming_memory(streaming("--guidance-scale 1")).passes
    teacher = "teacher, forward on a clip"
    # Guidance gives the teacher two prompts at once.
    assert usual[teacher] == 2 * plain[teacher] > 0
    assert {k: v for k, v in usual.items() if k != teacher} == {
        k: v for k, v in plain.items() if k != teacher
    }
    one, all_blocks = (
        next(name for name in cost.streaming_memory(streaming(words)).passes if "block(s)" in name)
        for words in ("", "--no-two-phase")
    )
    assert "on 1 frame block(s)" in one and "on 3 frame block(s)" in all_blocks
    # Score identity distillation keeps what both networks need; their backward passes take turns.
    config = streaming("--distribution-loss sid --critic-size mini --guidance-scale 1")
    formulas = cost._Formulas(config)
    learned, judged = (
        formulas._on_clip(config, role).activations(formulas._whole(role))
        for role in ("critic", "teacher")
    )  # type: ignore[arg-type]
    peak = learned.kept + judged.kept + max(learned.transient, judged.transient)
    assert max(formulas.passes().values()) == peak and len(formulas.passes()) == 5


@pytest.mark.parametrize("words", ["", "--lora-rank 4"])
def test_gradients_of_what_is_trained_wait_for_all_blocks(words: str) -> None:
    """Without two phases three blocks are kept, and the sums of the gradients of weights."""
    config = streaming(f"--no-two-phase {words}")
    formulas = cost._Formulas(config)
    block = formulas._on_block()
    stage = formulas._whole("generator")
    activations = block.activations(stage)
    trained = sum(weight.numel for weight in block.weights(stage) if not weight.frozen)
    assert (trained < 100_000) == bool(words)
    found = formulas.passes()["generator, forward and backward on 3 frame block(s)"]
    assert found == 3 * activations.kept + activations.transient + 4 * trained


def test_networks_of_streaming_keep_what_they_are_for() -> None:
    words = "--teacher-size mini --teacher-pipeline-model-parallel-size 3 --nproc-per-node 3"
    flags = f"{words} --global-batch-size 6"
    generator, critic, teacher = cost.streaming_memory(streaming(flags, 3)).networks
    assert generator.state.average > 0 == critic.state.average == teacher.state.average
    assert generator.state.optimizer == critic.state.optimizer > 0 == teacher.state.optimizer
    # The fullest of three stages of four blocks has two.
    blocks = {weight.name.split(".")[1] for weight in teacher.weights if "blocks." in weight.name}
    assert len(blocks) == 2 and teacher.parameters > 2 * teacher.state.count / 1.5
    notes = " ".join(cost.not_estimated(streaming(flags, 3)))
    assert "The teacher has a layout of its own" in notes and "The codec (patch)" in notes
    # Tensor ranks of the run share the teacher too.
    whole, half = (
        cost.streaming_memory(streaming(x, n)).networks[2] for x, n in (("", 1), (TP2, 2))
    )
    assert whole.parameters == half.parameters and half.state.count < whole.state.count
    bare = streaming("--no-encode-first-frame")
    assert "codec" not in " ".join(cost.not_estimated(bare))
    begun = replace(bare.section(StreamingConfig), given_frames=3)
    assert "The codec (patch)" in " ".join(cost.not_estimated(bare.with_section(begun)))


def test_a_run_fits_with_the_reserve_of_its_gpu_to_the_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = streaming()
    memory = cost.streaming_memory(config)
    assert memory.largest[1] == max(memory.passes.values())
    assert memory.total == memory.state.total + memory.cache + max(memory.passes.values())
    monkeypatch.setattr(cost, "reserve_on", lambda *_: {"a": 1000, "b": 500})
    for spare, fits in ((1500, True), (1499, False)):
        gpu = replace(GPUS["H100"], memory=memory.total + spare)
        found = cost.report(config, gpu)
        assert found.fits is fits
        (line,) = [line for line in found.lines if " on H100" in line]
        assert line.startswith("fits on" if fits else "DOES NOT FIT on")
    assert cost.report(config, None).fits is True
