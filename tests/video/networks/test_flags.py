"""How flags become options of each network, and which layouts and clips a network refuses."""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config.run import RunConfig
from megatron_ext.config.sections import described
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.joint import guidance_errors
from megatron_ext.video.config.rules import VIDEO_DEFAULTS
from megatron_ext.video.config.run import MODES, ConditionConfig, VideoConfig
from megatron_ext.video.config.stored import stored_video_model
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.given_frames import reference_latents
from megatron_ext.video.data.randomness import draw_normals
from megatron_ext.video.networks.lookup import (
    all_networks,
    chosen,
    conversions,
    network_named,
    network_of,
    with_widths,
)
from megatron_ext.video.networks.wan import rules as wan_rules
from megatron_ext.video.networks.wan.flow import WanBatchBuilder
from megatron_ext.video.step import num_stages, sharing_ranks
from megatron_ext.video.task import VIDEO
from tests.training_runs import config_of
from tests.video.clips import FLAGS

PATH = ["--video-data-path", "x"]
TP2, CP2 = "--tensor-model-parallel-size 2", "--context-parallel-size 2"


def mmdit(words: str = "", ranks: int = 1) -> RunConfig:
    return config_of([*FLAGS, *PATH, *words.split()], VIDEO, ranks=ranks)


def wan(words: str = "", ranks: int = 1, *, causal: bool = False) -> RunConfig:
    usual = [x for x in FLAGS[2:] if "adaln" not in x]
    name = "causal-video-dit" if causal else "video-dit"
    return config_of([*usual, *PATH, "--video-model", name, *words.split()], VIDEO, ranks=ranks)


@pytest.mark.parametrize(
    ("words", "double", "single"),
    [
        ("", 2, 2),
        ("--recompute-double-blocks 0", 0, 2),
        ("--recompute-single-blocks 0", 2, 0),
        ("--recompute-double-blocks 1 --num-single-blocks 3", 1, 3),
        ("--recompute-single-blocks 1 --num-double-blocks 1", 1, 1),
    ],
)
def test_an_mmdit_recomputes_all_blocks_that_no_flag_counts(
    words: str, double: int, single: int
) -> None:
    options = network_of(mmdit(words)).options
    assert (options.recompute_double_blocks, options.recompute_single_blocks) == (double, single)


def test_options_of_networks_follow_their_flags() -> None:
    usual = network_of(mmdit("--adaln-zero")).options
    assert (usual.adaln_zero, usual.double_block_cost) == (True, 1.0)
    own = network_of(mmdit(f"--double-block-cost 2.4 --cp-comm-type a2a {CP2}", 2)).options
    assert (own.adaln_zero, own.double_block_cost, own.cp_comm_type) == (False, 2.4, "a2a")
    words = f"--no-zero-head --recompute-blocks 1 --cp-comm-type a2a {CP2}"
    given = network_of(wan(words, 2)).options
    found = (given.zero_head, given.recompute_blocks, given.cp_comm_type, given.window)
    assert found == (False, 1, "a2a", None)
    usual = network_of(wan("--frame-block 2 --window-frames 8", causal=True)).options
    assert usual.zero_head and usual.recompute_blocks == 0 and usual.window.block == 2
    # One condition mode suffices to take references, unless it is that without any.
    none = "--i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0"
    for words, takes in ((none, False), (f"{none} --i2v-tail-weight 2 --t2v-weight 0", True)):
        checked = network_of(network_of(mmdit(words)).checked())
        assert checked.sizes.cond_embed is takes
    sizes = network_of(mmdit("--mlp-ratio 2 --patch-size 4 --axes-dim 4 4 8")).sizes
    assert (sizes.mlp_size, sizes.patch_size, sizes.axes_dim) == (128, 4, (4, 4, 8))
    # The plan compares runs that recompute all blocks with runs that recompute none.
    for config in (mmdit("--recompute-double-blocks 1"), wan("--recompute-blocks 1")):
        network = network_of(config)
        for mode, share in (("full", 1), ("none", 0)):
            options = network_of(network.recomputing(mode)).options
            counts = [n for name, n in vars(options).items() if name.startswith("recompute")]
            assert counts == [2 * share] * len(counts)


def refused(config: RunConfig) -> str:
    try:
        network_of(config).checked()
    except ConfigError as error:
        return str(error)
    return ""


def test_heads_and_stages_are_shared_as_the_layout_says() -> None:
    """Split four heads and four (MMDiT) or two (Wan) blocks."""
    tp4 = "--tensor-model-parallel-size 4"
    assert refused(mmdit(f"{tp4} {CP2}", 8)) == refused(wan(f"{tp4} {CP2}", 8)) == ""
    a2a = "--cp-comm-type a2a"
    assert refused(mmdit(f"{TP2} {CP2} {a2a}", 4)) == refused(wan(f"{TP2} {CP2} {a2a}", 4)) == ""
    assert "must be divisible by tensor x context parallel size (8)" in refused(
        mmdit(f"{tp4} {CP2} {a2a}", 8)
    )
    assert "which 8 ranks cannot share equally" in refused(wan(f"{tp4} {CP2} {a2a}", 8))
    pp2 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    assert refused(mmdit(pp2, 2)) == ""
    assert num_stages(mmdit(pp2, 2).parallel) == 4
    assert "the pipeline has 4 stages, but the model only 3" in refused(
        mmdit(f"{pp2} --num-single-blocks 1", 2)
    )
    assert "the pipeline has 4 stages, but the model only 2 blocks" in refused(wan(pp2, 2))
    for words, ranks in ((TP2, 1), (f"{TP2} --sequence-parallel", 2), (f"{TP2} {CP2}", 2)):
        config = mmdit(words, 4)
        assert sharing_ranks(config.parallel) == network_of(config).sequence_multiple == ranks


def test_text_is_padded_until_the_ranks_share_all_tokens() -> None:
    network = network_of(mmdit(f"{TP2} {CP2} --sequence-parallel", 4))
    assert [network.padded_text(9, image) for image in (15, 16, 18, 19)] == [9, 12, 10, 9]
    assert network_of(wan(CP2, 2)).padded_text(9, 16) == 9


def clips_refused(config: RunConfig, *shape: int) -> str:
    try:
        network_of(config).check_clips(shape, "Clips")  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)
    return ""


def test_clips_are_those_that_ranks_and_blocks_can_share() -> None:
    """Take frames of 2 x 3 tokens."""
    sp = f"{TP2} {CP2} --sequence-parallel"
    assert clips_refused(wan(f"{TP2} {CP2}", 4), 5, 4, 6) == ""
    assert "2 x 3 = 6 tokens in a latent frame, which 4 ranks" in clips_refused(wan(sp, 4), 5, 4, 6)
    assert clips_refused(wan(sp, 4), 5, 4, 8) == ""
    blocks = "--frame-block 2 --window-frames 8"
    assert clips_refused(wan(blocks, causal=True), 4, 4, 6) == ""
    assert "(2); use another" in clips_refused(wan(blocks, causal=True), 5, 4, 6)
    alone = f"{blocks} --independent-first-frame"
    assert clips_refused(wan(alone, causal=True), 5, 4, 6) == ""
    assert "1 + a multiple" in clips_refused(wan(alone, causal=True), 4, 4, 6)


@pytest.mark.parametrize(("alone", "sizes"), [(False, [2, 2, 2]), (True, [1, 2, 2])])
def test_frames_of_a_block_share_a_timestep(alone: bool, sizes: Sequence[int]) -> None:
    words = "--frame-block 2 --window-frames 8 --independent-block-timesteps"
    config = wan(f"{words} {'--independent-first-frame' if alone else ''}", causal=True)
    builder = WanBatchBuilder(config, None, None, seed=3, patch=2)  # type: ignore[arg-type]
    drawn = SimpleNamespace(normals=torch.zeros(2))
    found = builder._normals(drawn, [4, 9], sum(sizes))  # type: ignore[arg-type]
    blocks = draw_normals(3, [4, 9], "timestep", 3)
    assert torch.equal(found, blocks.repeat_interleave(torch.tensor(sizes), dim=1))
    usual = WanBatchBuilder(wan(causal=True), None, None, seed=3, patch=2)  # type: ignore[arg-type]
    assert usual._normals(drawn, [4, 9], 5) is drawn.normals  # type: ignore[arg-type]


def test_each_clip_gets_its_own_reference_at_its_own_end() -> None:
    """Give each clip numbers of its own, and each end of it."""
    b, t = 3, 5
    head, tail = (torch.randn(b, 4, 1, 2, 2) for _ in range(2))
    batch = VideoBatch(
        torch.randn(b, 4, t, 2, 2), torch.zeros(b), torch.zeros(b), {"head1": head, "tail1": tail}
    )
    modes = [MODES.index(mode) for mode in ("i2v_tail", "t2v", "i2v_loop")]
    found = reference_latents(batch, torch.tensor(modes), ConditionConfig())
    wanted = torch.zeros_like(batch.latents)
    wanted[0, :, -1:] = tail[0]
    wanted[2, :, :1], wanted[2, :, -1:] = head[2], tail[2]
    assert torch.equal(found, wanted)


def test_a_guidance_that_the_model_is_not_told_is_refused() -> None:
    for strength in (3.0, 5.0):
        config = mmdit()
        section = next(x for x in config.sections if type(x).__name__ == "JointConfig")
        changed = config.with_section(dataclasses.replace(section, guidance=strength))
        (error,) = guidance_errors(changed, changed)
        assert str(error).startswith("`--guidance` needs `--guidance-embed`")
        told = dataclasses.replace(section, guidance=strength, guidance_embed=True)
        assert guidance_errors(config.with_section(told), config) == []
    assert section.guidance == 4.0 and guidance_errors(config, config) == []


def test_flags_without_effect_on_wan_are_refused() -> None:
    for causal in (False, True):
        config = wan(causal=causal)
        decayed = dataclasses.replace(config.optimizer, apply_wd_to_qk_layernorm=True)
        # The sizes that are filled in count as given here.
        usual = len(wan_rules.rules(config, config))
        *_, error = wan_rules.rules(dataclasses.replace(config, optimizer=decayed), config)
        assert "--apply-wd-to-qk-layernorm" in str(error)
        section = next(x for x in config.sections if type(x).__name__ == "VideoDiTConfig")
        own = dataclasses.replace(section, independent_block_timesteps=True)
        errors = wan_rules.rules(config.with_section(own), config)
        assert len(errors) == usual + (not causal)


WINDOW = {"frame_block": 2, "window_frames": 8, "sink_frames": 1, "independent_first_frame": True}


@pytest.mark.parametrize("kind", ["streaming", "video-dit", "causal-video-dit"])
@pytest.mark.parametrize("builds", ["streaming", "video-dit", "causal-video-dit"])
def test_networks_of_wan_describe_themselves_to_each_other(kind: str, builds: str) -> None:
    stored = {
        "streaming": {"generator_size": "mini", "latent_channels": 6, **WINDOW},
        "video_dit": {"video_dit_size": "small", "dit_channels": 9, "dit_text_width": 24},
        "lora": {"lora_rank": 4},
    }
    size, channels = ("mini", 6) if kind == "streaming" else ("small", 9)
    window = WINDOW if "video-dit" not in (kind, builds) else {}
    found = wan_rules.restated(stored, kind, builds)
    if builds == "streaming":
        own: Any = {"generator_size": size, "generator_sizes": None}
        wanted: Any = {**own, "latent_channels": channels, **window}
        assert found == {"streaming": wanted}
    else:
        assert found == {"video_dit": {"video_dit_size": size}, "streaming": window}
    if kind == builds != "streaming":
        own = wan_rules.stored_model(stored, kind)
        wanted = {name: stored[name] for name in ("video_dit", "lora")}
        assert own == {**wanted, "streaming": window}


def test_networks_that_are_given_frames_start_no_causal_ones() -> None:
    """Sizes without a name go with a network, from flow matching to streaming and back."""
    own = {"dit_hidden_size": 96, "dit_num_heads": 3}
    dit = {"video_dit_size": "small", "dit_channels": 9, "dit_ffn_size": None, **own}
    stored = {"streaming": {"generator_size": "mini", "latent_channels": 6, **WINDOW}}
    found = wan_rules.restated({**stored, "video_dit": dit}, "video-dit", "causal-video-dit")
    assert found == {"video_dit": {"video_dit_size": "small", **own}, "streaming": {}}
    found = wan_rules.restated({**stored, "video_dit": dit}, "streaming", "video-dit")
    assert found == {"video_dit": {"video_dit_size": "mini"}, "streaming": {}}
    sizes = {"hidden_size": 96, "num_heads": 3}
    found = wan_rules.restated({**stored, "video_dit": dit}, "video-dit", "streaming")
    described = {"generator_size": "small", "generator_sizes": sizes, "latent_channels": 9}
    assert found == {"streaming": described}
    streaming = {**described, **WINDOW}
    stored |= {"streaming": streaming, "video_dit": {"video_dit_size": "tiny"}}
    back = wan_rules.restated(stored, "streaming", "video-dit")
    assert back == {"video_dit": {"video_dit_size": "small", **own}, "streaming": {}}
    dit = {"video_dit_size": "small", "dit_condition": "i2v"}
    for builds in ("streaming", "causal-video-dit"):
        with pytest.raises(ConfigError, match="`--dit-condition i2v`, but this run builds one"):
            wan_rules.restated({**stored, "video_dit": dit}, "video-dit", builds)


def test_checkpoints_older_than_tasks_and_names_of_networks_are_those_of_an_mmdit() -> None:
    model = {"hidden_size": 64, "num_attention_heads": 4}
    mmdit_flags = {"mmdit_size": "tiny"}
    stored: dict[str, Any] = {
        "video": {"video": True}, "model": {**model, "num_layers": 4}, "mmdit": mmdit_flags
    }  # fmt: skip
    none: dict[str, Any] = {"lora": {}, "weights": {"weights_origin": None}}
    found = stored_video_model(stored, mmdit())
    assert found == {"model": model, "mmdit": mmdit_flags, "joint": {}, **none}
    # Flags of double and single blocks were in one section with the size's name.
    own = {"num_double_blocks": 3, "guidance_embed": True}
    old = described({**stored, "mmdit": {**mmdit_flags, **own}}, VIDEO.sections)
    found = stored_video_model(old, mmdit())
    assert found == {"model": model, "mmdit": mmdit_flags, "joint": own, **none}
    with pytest.raises(ConfigError, match=r"is of an MMDiT, but this run builds a video DiT; give"):
        stored_video_model(stored, wan())
    for video in ({}, {"video": True, "video_model": "of a later version"}):
        with pytest.raises(ConfigError, match="is of a model that this program does not train"):
            stored_video_model({**stored, "video": video}, mmdit())


def test_networks_are_found_by_all_their_names_and_listed_once() -> None:
    names = [next(iter(network.titles)) for network in all_networks()]
    assert names[:2] == ["mmdit", "video-dit"]
    assert len(conversions()) == len(names)
    assert network_named("causal-video-dit") is network_named("video-dit")
    # Only a network that takes references has condition modes by default.
    for config, given, dropout in ((mmdit(), True, None), (wan(), False, 0.1)):
        network = chosen(config)
        defaults = network.flow_defaults(config)
        assert network.is_given_references(config) == given
        assert defaults.get("text_dropout") == dropout
        heads = {f"{mode}_weight": 0.0 for mode in MODES if mode != "t2v"}
        assert {k: v for k, v in defaults.items() if k in heads} == ({} if given else heads)
        assert {**VIDEO_DEFAULTS, **defaults}.items() <= VIDEO.choose(config).defaults.items()


@pytest.mark.parametrize(
    ("kind", "modes", "loss"),
    [
        ("ti2v", ("t2v", "i2v_head"), "masked"),
        ("i2v", ("i2v_head",), "all"),
        ("i2v-clip", ("i2v_head",), "all"),
        ("flf2v-clip", ("i2v_loop",), "all"),
    ],
)
def test_given_frames_of_wan_decide_defaults(kind: str, modes: tuple[str, ...], loss: str) -> None:
    conditions = wan(f"--dit-condition {kind}").section(ConditionConfig)
    assert (conditions.modes, conditions.reference_loss) == (modes, loss)


def test_all_folders_without_pooled_captions_are_named() -> None:
    manifest = {"latent_channels": 6, "text_width": 24, "pooled_width": None}
    config = mmdit()
    video = dataclasses.replace(config.section(VideoConfig), video_data_path=["a", "b"])
    with pytest.raises(ConfigError, match=r"`--video-data-path` \(a b\) holds captions without"):
        with_widths(config.with_section(video), manifest)
    sizes = network_of(with_widths(wan(), manifest)).sizes
    assert (sizes.channels, sizes.text_width) == (6, 24)
    sizes = network_of(with_widths(mmdit(), {**manifest, "pooled_width": 10})).sizes
    assert (sizes.channels, sizes.text_width, sizes.pooled_width) == (6, 24, 10)
