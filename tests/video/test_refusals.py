"""Refusals of video runs before any rank starts, and their sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.text import task as text_task
from megatron_ext.train.launch import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from megatron_ext.video.config.rules import SECTIONS
from megatron_ext.video.task import FLOW
from tests.training_runs import TINY, mock_data
from tests.video.clips import FLAGS, LONG, SHORT, TEXT, write_clips

UMT5 = {"text_encoder": "umt5", "length": TEXT}
IGNORED = "has no effect on a video model: "
SHAPE = "its shape follows from its named size and the flags beside it; leave it out."


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is not refused ends with a code of its own."""
    monkeypatch.setattr("megatron_ext.train.main.launch", lambda *_, **__: 99)


class Printed:
    """Errors of a command line, one a line."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self.capfd = capfd

    def __call__(self, data: Path | None, words: str, code: int = EXIT_CODE_USER_ERROR) -> str:
        flags = [*FLAGS, *words.split()]
        if data is not None:
            flags += ["--video-data-path", str(data)]
        assert main(FLOW, flags) == code
        return self.capfd.readouterr().err


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Printed:
    return Printed(capfd)


def test_a_run_that_is_whole_starts(refused: Printed, clips: Path, valid: Path) -> None:
    assert refused(clips, f"--video-valid-path {valid}", code=99) == ""


def test_data_must_be_given_and_whole(refused: Printed, tmp_path: Path) -> None:
    assert refused(None, "") == (
        "error: `--video-data-path` is missing; give the folder that tools/preprocess_video.py "
        "wrote.\n"
    )
    assert refused(tmp_path / "nowhere", "") == (
        f"error: {tmp_path}/nowhere/manifest.json does not exist, so the data is not whole; make "
        "it with tools/preprocess_video.py.\n"
    )
    caption = write_clips(tmp_path / "clips", {SHORT: 8}) / "null_text.bin"
    caption.unlink()
    assert f"error: {caption} is missing, but its index asks for" in refused(caption.parent, "")


def test_references_of_all_modes_must_be_there(refused: Printed, clips: Path) -> None:
    assert refused(clips, "--v2v-head-weight 1 --v2v-frames 3") == (
        "error: `--v2v-head-weight` (1.0) needs references of 3 latent frame(s), but the data has "
        "head1, tail1; preprocess it with `--reference-lengths 3`, or set the weight to 0.\n"
    )
    # No clip is long enough for nine frames of references, so none is ever asked for.
    assert refused(clips, "--v2v-head-weight 1", code=99) == ""


def test_sequences_and_steps_must_fit(refused: Printed, clips: Path) -> None:
    assert refused(clips, "--global-batch-size 32") == (
        "error: No bucket holds the clips of one step (64px 1x64x64: 9, 64px 9x64x64: 19, "
        "64px 17x64x64: 17): a step takes micro-batch size × 1 ranks × 16 micro-batches; give "
        "more clips, fewer buckets or smaller batches.\n"
    )
    assert refused(clips, "--patch-size 3") == (
        "error: Latents of 8 x 8 must be divisible by the patch size (3); encode videos whose "
        "height and width are multiples of patch size x VAE stride.\n"
    )
    assert refused(clips, "--pipeline-model-parallel-size 8 --nproc-per-node 8") == (
        "error: the pipeline has 8 stages, but the model only 4 blocks (2 double, 2 single); use a "
        "smaller `--pipeline-model-parallel-size`.\n"
    )
    heads = "--cp-comm-type a2a --context-parallel-size 8 --nproc-per-node 8"
    assert refused(clips, heads) == (
        "error: `--cp-comm-type a2a` trades heads (4), which must be divisible by tensor x context "
        "parallel size (8); use all_gather.\n"
    )
    assert refused(clips, '--video-buckets {"64px":{"9":[1.0,2]}}') == (
        "error: The data holds clips of 64px 1x64x64, but the bucket plan has no 64px of 1 frames "
        '({"64px": {"9": [1.0, 2]}}); add it.\n'
    )


def test_mixed_buckets_need_a_pipeline_of_one_stage(refused: Printed, clips: Path) -> None:
    words = "--mixed-buckets --pipeline-model-parallel-size 2 --nproc-per-node 2"
    assert refused(clips, words) == (
        "error: Mixed buckets need `--pipeline-model-parallel-size` 1, but it is 2: stages "
        "exchange tensors of one shape; keep one bucket for each step.\n"
    )


def test_validation_clips_must_be_encoded_alike(
    refused: Printed, clips: Path, tmp_path: Path
) -> None:
    counts = {SHORT: 8, LONG: 8}
    codec = write_clips(tmp_path / "codec", counts, codec={"codec": "/vae"})
    assert refused(clips, f"--video-valid-path {codec}") == (
        f"error: `--video-valid-path` ({codec}) was encoded by another codec than "
        f"`--video-data-path` ({clips}); preprocess both alike.\n"
    )
    text = write_clips(tmp_path / "text", counts, text_encoder=UMT5)
    assert "by another text encoder than" in refused(clips, f"--video-valid-path {text}")


def test_what_clips_are_sampled_with_is_known_before_the_run(
    refused: Printed, tmp_path: Path
) -> None:
    samples = f"--sample-interval 1 --sample-texts left --sample-dir {tmp_path / 'samples'}"
    of_words = write_clips(tmp_path / "words", {SHORT: 8})
    assert refused(of_words, samples, code=99) == ""
    of_umt5 = write_clips(tmp_path / "umt5", {SHORT: 8}, text_encoder=UMT5)
    assert "`t5_path` (None) must be a local folder when `text_encoder` is umt5" in refused(
        of_umt5, samples
    )
    path = write_clips(tmp_path / "old", {SHORT: 8}) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["fps"], manifest["text_encoder"]["width"]
    path.write_text(json.dumps(manifest))
    assert refused(path.parent, samples) == (
        f"error: {path} lacks `fps`, `text_encoder.width`; make it with "
        "tools/preprocess_video.py again.\n"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--num-layers 3", f"`--num-layers` {IGNORED}{SHAPE}"),
        ("--seq-length 64", f"`--seq-length` {IGNORED}{SHAPE}"),
        ("--swiglu", f"`--swiglu` {IGNORED}{SHAPE}"),
        ("--num-experts 4", f"`--num-experts` {IGNORED}its blocks have no experts; leave it out."),
        (
            "--sample-steps 9",
            "`--sample-steps` has an effect only with `--sample-interval`; give it too, or leave "
            "this out.",
        ),
        (
            "--codec-spatial 4",
            "`--codec-spatial` has an effect only with `--online-encoding`; leave it out.",
        ),
        ("--eval-iters 5", "`--eval-iters` needs `--video-valid-path`; give it, or 0."),
        ("--eval-interval 5", "`--eval-interval` needs `--video-valid-path`; give it too."),
        ("--lora-rank 4", f"`--lora-rank` {IGNORED}its layers take no adapters; leave it out."),
        (
            "--label-smoothing 0.1",
            f"`--label-smoothing` {IGNORED}its loss is that of its task; leave it out.",
        ),
        (
            "--full-validation",
            f"`--full-validation` {IGNORED}evaluation always goes through the whole validation "
            "data; leave it out.",
        ),
        (
            "--decoupled-lr 1e-3",
            f"`--decoupled-lr` {IGNORED}there is no vocabulary whose embedding could have it; "
            "leave it out.",
        ),
        (
            "--log-validation-ppl-to-tensorboard",
            f"`--log-validation-ppl-to-tensorboard` {IGNORED}its loss has no perplexity; leave it "
            "out.",
        ),
        (
            "--pipeline-schedule core-1f1b",
            "`--pipeline-schedule core-1f1b` takes sequences of one length only; use 1f1b.",
        ),
        ("--guidance 2", "`--guidance` needs `--guidance-embed`; give both."),
        ("--v2v-frames 3", "`--v2v-frames` needs a weight of v2v_head or v2v_tail; give one."),
        (
            "--flow-shift 3 --shift-max 4",
            "`--shift-max` has no effect beside `--flow-shift`; leave one of them out.",
        ),
        (
            "--double-block-cost 0",
            "`--double-block-cost` (0.0) must be above 0; 1.0 is the default.",
        ),
        (
            "--recompute-double-blocks -1",
            "`--recompute-double-blocks` (-1) must be at least 0; use 0.",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(refused: Printed, words: str, sentence: str) -> None:
    """No flag is swallowed, by no part of the program."""
    assert refused(Path("unread"), words) == f"error: {sentence}\n"


def test_text_runs_refuse_the_flags_of_video(capfd: pytest.CaptureFixture[str]) -> None:
    words = "--train-iters 1 --video-data-path x --mmdit-size small --flow-shift 2 --no-adaln-zero"
    code = main(
        text_task.TEXT,
        [*TINY, *mock_data(), *words.split()],
        elsewhere={"pretrain_video.py": SECTIONS},
    )
    assert code == EXIT_CODE_USER_ERROR
    assert capfd.readouterr().err.splitlines() == [
        f"error: `{flag}` is a flag of pretrain_video.py, not of this program; leave it out."
        for flag in ("--video-data-path", "--mmdit-size", "--flow-shift", "--no-adaln-zero")
    ]
