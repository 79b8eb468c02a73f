"""Refusals of flow matching before any rank starts, and their sentences."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import pretrain_gpt
import pretrain_video
from megatron_ext.text import task as text_task
from megatron_ext.train.exit_codes import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from megatron_ext.video.networks import mmdit
from megatron_ext.video.task import VIDEO
from tests.training_runs import TINY, errors_of, mock_data
from tests.video.clips import FLAGS, IMAGE, LONG, SHORT, TEXT, write_clips
from tests.video.wan_run import FLAGS as WAN_FLAGS
from tests.video.wan_run import KINDS

UMT5 = {"text_encoder": "umt5", "length": TEXT}
IGNORED = "has no effect on a video model: "
SHAPE = "its shape follows from its named size and the flags beside it; leave it out."
Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Return a function that gives the errors of a command line; a run ends with ``STARTED``."""
    monkeypatch.setattr("megatron_ext.train.main.launch", lambda *_, **__: STARTED)

    def call(data: Path | None, words: str, code: int = 2, usual: Sequence[str] = FLAGS) -> str:
        flags = [*usual, *words.split()]
        if data is not None:
            flags += ["--video-data-path", str(data)]
        assert main(VIDEO, flags) == code
        return capfd.readouterr().err

    return call


STARTED = 99


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("dit") / "clips", {IMAGE: 4, SHORT: 4, LONG: 4})


def test_runs_that_are_whole_start(refused: Refused, clips: Path, valid: Path, mixed: Path) -> None:
    assert refused(clips, f"--video-valid-path {valid}", STARTED) == ""
    for words in KINDS.values():
        assert refused(mixed, words, STARTED, WAN_FLAGS) == ""
    assert refused(clips, "--v2v-head-weight 1", STARTED) == ""


def test_a_shape_to_price_stands_alone(refused: Refused, clips: Path) -> None:
    shape = "--dry-run --dry-run-shape 60x64x18"
    assert refused(None, shape) == (
        "error: `--dry-run-shape` (60x64x18) must have a height and a width that 16 divides, and "
        "4k + 1 frames, for this codec and network; choose 64x64x17.\n"
    )
    for size, choice in (
        ("64x60x17", "64x64x17"),
        ("4x100x17", "16x96x17"),
        ("64x64x16", "64x64x13"),
    ):
        said = refused(None, f"--dry-run --dry-run-shape {size}")
        assert f"({size}) must have" in said and said.endswith(f"choose {choice}.\n")
    # The network looks at clips of a shape as at those of data.
    blocks = "--video-model causal-video-dit --frame-block 2 --window-frames 8"
    said = refused(None, f"--dry-run --dry-run-shape 64x64x17 {blocks}", usual=WAN_FLAGS)
    assert said.startswith(
        "error: Clips of `--dry-run-shape` (64x64x17) have 5 latent frames, which must be divisible"
    )
    assert "(64x64) must be height, width and number of" in refused(None, "--dry-run-shape 64x64")
    assert "needs `--dry-run`; give both" in refused(None, "--dry-run-shape 64x64x17")
    assert "`--video-data-path` has no effect beside" in refused(clips, shape)
    assert "`--temporal-crop` has no effect" in refused(None, f"{shape} --temporal-crop start")


def test_references_of_samples_are_looked_at_before_ranks_start(
    refused: Refused, clips: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.png").write_bytes(b"")
    sampling = f"--sample-interval 1 --sample-texts cat --sample-dir {tmp_path}/samples"
    for name in ("nowhere.png", "empty.png"):
        said = refused(clips, f"{sampling} --sample-image {tmp_path / name}")
        assert f"{tmp_path / name}" in said and len(said.splitlines()) == 1, said


def test_data_must_be_given_and_whole(refused: Refused, tmp_path: Path) -> None:
    assert refused(None, "").startswith("error: `--video-data-path` is missing; give the folder th")
    length = "`--train-iters` is missing; give it, or `--train-epochs` for data that is passed"
    assert length in refused(None, "", usual=[])
    blend = "`--video-data-path` (0.3 a b) mixes weights and paths; give only paths, or a weight b"
    assert blend in refused(None, "--video-data-path 0.3 a b")
    missing = f"error: {tmp_path}/nowhere/manifest.json does not exist, so the data is not whole; m"
    assert refused(tmp_path / "nowhere", "").startswith(missing)
    caption = write_clips(tmp_path / "clips", {SHORT: 8}) / "null_text.bin"
    caption.unlink()
    assert f"error: {caption} is missing, but its index asks for" in refused(caption.parent, "")


ONLINE = '--online-encoding --video-buckets {"64px":{"9":[1.0,2]}}'
MISSING = {
    "--video-data-path FOLDER/a --video-valid-path FOLDER/b": (
        "/a/manifest.json does not exist",
        "/b/manifest.json does not exist",
    ),
    f"--lr abc --video-data-path FOLDER/a --video-valid-path FOLDER/b {ONLINE} --codec FOLDER/vae "
    "--text-encoder t5-clip --t5-path FOLDER/t5 --clip-path FOLDER/clip": (
        "`--lr` (abc)",
        "`--video-data-path` (FOLDER/a) is neither a file nor a folder",
        "`--video-valid-path` (FOLDER/b) is neither a file nor a folder",
        "`--t5-path` (FOLDER/t5) must be a local folder",
        "`--clip-path` (FOLDER/clip) must be a local folder",
        "`--codec` (FOLDER/vae) must be",
    ),
    "--task streaming --lr abc --prompts-path FOLDER/p --second-prompts-path FOLDER/q "
    "--teacher-checkpoint FOLDER/t --critic-checkpoint FOLDER/c --load FOLDER/l": (
        "`--lr` (abc)",
        "`--load` (FOLDER/l) holds no checkpoint",
        "`--critic-checkpoint` (FOLDER/c) holds no checkpoint",
        "`--teacher-checkpoint` (FOLDER/t) holds no checkpoint",
        "`--prompts-path` (FOLDER/p) cannot be read",
        "`--second-prompts-path` (FOLDER/q) cannot be read",
    ),
}


@pytest.mark.parametrize("words", MISSING)
def test_all_inputs_that_are_missing_are_told_together(
    refused: Refused, words: str, tmp_path: Path
) -> None:
    usual = "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1".split()
    said = refused(None, words.replace("FOLDER", str(tmp_path)), usual=usual).splitlines()
    assert len(said) == len(MISSING[words]), said
    for part, line in zip(MISSING[words], said, strict=True):
        assert part.replace("FOLDER", str(tmp_path)) in line


MISFITS = {
    "--v2v-head-weight 1 --v2v-frames 3": "`--v2v-head-weight` (1.0) needs `head3` of "
    "clips, but the training set has head1, tail1; preprocess it with `--reference-lengths 3`, ",
    "--global-batch-size 64": "The training set (`--video-data-path` DATA) has too few clips for "
    "one step (64px 1x64x64: 9, 64px 9x64x64: 19, 64px 17x64x64: 17): a step takes micro-batch "
    "size × 1 ranks × 32 micro-batches; ",
    "--global-batch-size 32 --no-mixed-buckets": "The training set (`--video-data-path` DATA) has "
    "too few clips for one step (",
    "--patch-size 3": "Latents of 8 x 8 must be divisible by the patch size (3); encode videos ",
    "--pipeline-model-parallel-size 8 --nproc-per-node 8": "the pipeline has 8 stages, but the "
    "model only 4 blocks (2 double, 2 single); use ",
    "--cp-comm-type a2a --context-parallel-size 8 --nproc-per-node 8": "`--cp-comm-type a2a` "
    "trades heads (4), which must be divisible by tensor x context parallel size (8); ",
    '--video-buckets {"64px":{"9":[1.0,2]}}': "The training set (`--video-data-path` DATA) holds "
    "clips of 64px 1x64x64, but the bucket plan has no 64px of 1 frames (",
}


@pytest.mark.parametrize("words", MISFITS)
def test_references_sequences_and_steps_must_fit(refused: Refused, clips: Path, words: str) -> None:
    (said,) = refused(clips, words).splitlines()
    assert said.startswith(f"error: {MISFITS[words]}".replace("DATA", str(clips)))


def test_validation_must_be_encoded_alike(refused: Refused, clips: Path, tmp_path: Path) -> None:
    counts = {SHORT: 8, LONG: 8}
    codec = write_clips(tmp_path / "codec", counts, codec={"codec": "/vae"})
    said = refused(clips, f"--video-valid-path {codec}")
    assert f"({codec}) was encoded by another codec than `--video-data-path` ({clips}); pre" in said
    text = write_clips(tmp_path / "text", counts, text_encoder=UMT5)
    assert "by another text encoder than" in refused(clips, f"--video-valid-path {text}")


def test_what_samples_clips_is_known_before_the_run(refused: Refused, tmp_path: Path) -> None:
    samples = f"--sample-interval 1 --sample-texts left --sample-dir {tmp_path / 'samples'}"
    of_words = write_clips(tmp_path / "words", {SHORT: 8})
    assert refused(of_words, samples, STARTED) == ""
    of_umt5 = write_clips(tmp_path / "umt5", {SHORT: 8}, text_encoder=UMT5)
    said = refused(of_umt5, samples)
    assert "`--t5-path` is missing, which `--text-encoder umt5` needs" in said
    path = write_clips(tmp_path / "old", {SHORT: 8}) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["fps"], manifest["text_encoder"]["width"]
    path.write_text(json.dumps(manifest))
    said = refused(path.parent, samples)
    assert said.startswith(f"error: {path} lacks `fps`, `text_encoder.width`; make it with tools/")


OUT = "leave it out."
IGNORED_FLAGS = {
    **{f"--{flag}": SHAPE for flag in ("num-layers 3", "seq-length 64", "swiglu")},
    "--label-smoothing 0.1": f"its loss is that of its task; {OUT}",
    "--full-validation": f"evaluation always goes through the whole validation data; {OUT}",
    "--decoupled-lr 1e-3": f"there is no vocabulary whose embedding could have it; {OUT}",
    "--log-validation-ppl-to-tensorboard": f"its loss has no perplexity; {OUT}",
}
"""Flags that a video model ignores, and why."""
WRONG = {
    **{words: f"`{words.split()[0]}` {IGNORED}{reason}" for words, reason in IGNORED_FLAGS.items()},
    "--sample-steps 9": "`--sample-steps` has an effect only with `--sample-interval`; give ",
    "--codec-spatial 4": f"`--codec-spatial` has an effect only with `--online-encoding`; {OUT}",
    "--eval-iters 5": "`--eval-iters` needs `--video-valid-path`; give it, or 0.",
    "--eval-interval 5": "`--eval-interval` needs `--video-valid-path`; give it too.",
    "--pipeline-schedule core-1f1b": "`--pipeline-schedule core-1f1b` takes sequences of one len",
    "--pipeline-schedule core-no-pipelining": "`--pipeline-schedule core-no-pipelining` takes sequ",
    "--guidance 2": "`--guidance` needs `--guidance-embed`; give both.",
    "--v2v-frames 3": "`--v2v-frames` needs a weight of v2v_head or v2v_tail; give one.",
    "--flow-shift 3 --shift-max 4": "`--shift-max` has no effect beside `--flow-shift`; leave one",
    "--double-block-cost 0": "`--double-block-cost` (0.0) must be above 0; 1.0 is the default.",
    "--recompute-double-blocks -1": "`--recompute-double-blocks` (-1) must be at least 0; use 0.",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_an_mmdit_would_ignore_is_refused(refused: Refused, clips: Path, words: str) -> None:
    (said,) = refused(clips, words).splitlines()
    assert said.startswith(f"error: {WRONG[words]}")


def test_adapters_are_refused_by_a_network_that_takes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No network here is such a one, but one of a user's own may be."""
    bare = dataclasses.replace(mmdit.NETWORK, takes_adapters=False)
    monkeypatch.setattr(mmdit, "NETWORK", bare)
    (said,) = errors_of([*FLAGS, "--video-data-path", "x", "--lora-rank", "4"], VIDEO)
    assert said.startswith(f"`--lora-rank` {IGNORED}only `--video-model ")
    assert said.endswith(f" takes adapters; {OUT}")


def test_no_other_shift_stands_beside_one_for_all_clips() -> None:
    words = "--shift-base 2 --shift-base-tokens 3 --shift-max-tokens 5000 --no-shift-by-length"
    flags = [*FLAGS, "--video-data-path", "x", "--flow-shift", "3", *words.split()]
    beside = " has no effect beside `--flow-shift`; "
    said = [line.partition(beside) for line in errors_of(flags, VIDEO)]
    assert [remedy for _, _, remedy in said] == ["leave one of them out."] * 4
    names = [word for word in words.split() if word.startswith("--")]
    assert sorted(name.strip("`") for name, _, _ in said) == sorted(names)


def test_text_runs_refuse_the_flags_of_video(capfd: pytest.CaptureFixture[str]) -> None:
    words = "--train-iters 1 --video-data-path x --mmdit-size small --flow-shift 2 --no-adaln-zero"
    flags = [*TINY, *mock_data(), *words.split()]
    video_flags = pretrain_gpt.video_flags
    assert main(text_task.TEXT, flags, elsewhere=video_flags) == EXIT_CODE_USER_ERROR
    told = "error: `{}` is a flag of pretrain_video.py, not of this program; leave it out.".format
    names = ("--video-data-path", "--mmdit-size", "--flow-shift", "--no-adaln-zero")
    assert capfd.readouterr().err.splitlines() == [told(name) for name in names]


def test_video_runs_refuse_the_flags_of_text(
    clips: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = f"--video-data-path {clips} --num-experts 4 --moe-permute-fusion"
    flags = [*FLAGS, *words.split()]
    assert main(VIDEO, flags, elsewhere=pretrain_video.text_flags) == EXIT_CODE_USER_ERROR
    told = "error: `{}` is a flag of pretrain_gpt.py, not of this program; leave it out.".format
    names = ("--num-experts", "--moe-permute-fusion")
    assert capfd.readouterr().err.splitlines() == [told(name) for name in names]


TWIN, CAUSAL = "--video-model video-dit", "--video-model causal-video-dit"
NO_REFERENCES = "video DiT is given no reference frames"
ONLY = "has an effect only with"
IGNORED_BY_WAN = {
    f"{TWIN} --apply-wd-to-qk-layernorm": "the norms of its queries and keys never decay",
}
"""Flags that a video DiT ignores, and why."""
WRONG_FOR_WAN = {
    **{
        words: "`{2}` has no effect with `{0} {1}`: ".format(*words.split()) + f"{reason}; {OUT}"
        for words, reason in IGNORED_BY_WAN.items()
    },
    f"{TWIN} --mmdit-size small": f"`--mmdit-size` {ONLY} `--video-model mmdit`; {OUT}",
    f"{TWIN} --frame-block 1": f"`--frame-block` {ONLY} `--task streaming` or `{CAUSAL}`; {OUT}",
    f"{TWIN} --independent-first-frame": f"`--independent-first-frame` {ONLY} `--task stream",
    f"{CAUSAL} --guidance-scale 2": f"`--guidance-scale` {ONLY} `--task streaming`; {OUT}",
    f"{TWIN} --num-layers 3": f"`--num-layers` {IGNORED}{SHAPE}",
    f"{TWIN} --pooled-dropout 0.2": "`--pooled-dropout` (0.2) has no effect with `--video-model ",
    f"{TWIN} --independent-block-timesteps": "`--independent-block-timesteps` has an effect only ",
    CAUSAL: "Clips of 64px 1x64x64 have 1 latent frames, which must be divisible by `--frame-bl",
    f"{CAUSAL} --independent-first-frame": "Clips of 64px 9x64x64 have 3 latent frames, which must "
    "be 1 + a multiple of `--frame-block` (3); use another length or block.",
    f"{CAUSAL} --independent-first-frame --frame-block 1": "`--independent-first-frame` has no "
    "effect with `--frame-block 1`, whose blocks are single frames; leave one of them out.",
    f"{CAUSAL} --frame-block 1 --window-frames 2": "`--window-frames` (2) must be at least "
    "`--sink-frames` + `--frame-block` (3 + 1 = 4), or ",
    f"{TWIN} --recompute-blocks -1": "`--recompute-blocks` (-1) must be at least 0; 0 is the def",
    f"{TWIN} --context-parallel-size 3 --nproc-per-node 3": "Clips of 64px 1x64x64 have 4 x 4 = 16 "
    "tokens in a latent frame, which 3 ranks ",
    f"{TWIN} --context-parallel-size 8 --nproc-per-node 8 --cp-comm-type a2a": "`--video-dit-size "
    "tiny` has 4 attention heads, which 8 ranks cannot share equally; use ",
    f"{TWIN} --pipeline-model-parallel-size 4 --nproc-per-node 4": "the pipeline has 4 stages, but "
    "the model only 2 blocks; use ",
    f"{TWIN} --pretrained-average": "`--pretrained-average` needs a checkpoint that gives weights",
    "--video-dit-size small": "`--video-dit-size` has an effect only with `--video-model video-dit",
    "--task streaming --video-model video-dit": "`--video-model` has no effect with `--task strea",
}
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
SAMPLED = "--sample-interval 1 --sample-texts a --sample-dir x --sample-frames 9 --sample-fps 8"
WRONG_IN_PART = {
    f"{TWIN} --i2v-head-weight 5": f"`: a {NO_REFERENCES}; leave it out, or give `--dit-cond",
    f"{CAUSAL} --reference-loss all": f"`: a causal {NO_REFERENCES}; leave it out, or give `--dit-",
    f"{TWIN} --hidden-size 128": "`--video-dit-size` decides; leave it out, or give `--dit-hidden-",
    f"{CAUSAL} --num-attention-heads 2": "decides; leave it out, or give `--dit-num-heads`.",
    f"{CAUSAL} --dit-condition i2v": "`--dit-condition` (i2v) does not go with `--video-model "
    "causal-video-dit`, which is given no frames; use `--video-model video-dit`, or leave it out.",
    f"{TWIN} --dit-condition ti2v --reference-loss all": "`--reference-loss` (all) does not go "
    "with `--dit-condition ti2v`, whose given frames have no noise; use masked.",
    f"{TWIN} --dit-num-heads 5": "`hidden_size` (64) must be divisible by `num_heads` (5).",
    f"{TWIN} --timestep-range 0.9 0.1": "`--timestep-range` (0.9 0.1) must be the lowest, then a "
    "higher time; turn them round.",
    f"{TWIN} {SAMPLED} --timestep-range 0 0.9": "`--sample-interval` (1) does not go with "
    "`--timestep-range`: clips are sampled over all times, of which this network learns a part; ",
    f"{KINDS['causal']} {SAMPLED} --frame-block 5 --window-frames 6": "error: Sampled clips have 3 "
    "latent frames, which must be divisible by",
    f"{FP8} --first-last-layers-bf16": "does not go with `--first-last-layers-bf16`",
    f"--task streaming {FP8}": "`--fp8-format` (hybrid) does not go with `--task str",
}


@pytest.mark.parametrize("words", [*WRONG_FOR_WAN, *WRONG_IN_PART])
def test_what_a_video_dit_cannot_do_is_refused(refused: Refused, mixed: Path, words: str) -> None:
    part = WRONG_IN_PART.get(words) or f"error: {WRONG_FOR_WAN[words]}"
    assert part in refused(mixed, words, usual=WAN_FLAGS)
