"""Refusals of flow matching with a video DiT before any rank starts, and their sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.train.launch import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from megatron_ext.video.task import VIDEO
from tests.video.clips import IMAGE, LONG, SHORT, write_clips
from tests.video.wan_run import FLAGS, KINDS

TWIN, CAUSAL = "--video-model video-dit", "--video-model causal-video-dit"


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is not refused ends with a code of its own."""
    monkeypatch.setattr("megatron_ext.train.main.launch", lambda *_, **__: 99)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of one, three and five latent frames."""
    return write_clips(tmp_path_factory.mktemp("dit") / "clips", {IMAGE: 4, SHORT: 4, LONG: 4})


def run(data: Path, words: str) -> int:
    flags = [*FLAGS, "--video-data-path", str(data), *words.split()]
    return main(VIDEO, flags)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_whole_starts(
    mixed: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(mixed, KINDS[kind]) == 99
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            f"{TWIN} --i2v-head-weight 5",
            "`--i2v-head-weight` has no effect with `--video-model video-dit`: a video DiT is "
            "given no reference frames; leave it out.",
        ),
        (
            f"{CAUSAL} --reference-loss all",
            "`--reference-loss` has no effect with `--video-model causal-video-dit`: a video DiT "
            "is given no reference frames; leave it out.",
        ),
        (
            f"{TWIN} --mmdit-size small",
            "`--mmdit-size` has no effect with `--video-model video-dit`: it is one of the MMDiT; "
            "leave it out.",
        ),
        (
            f"{TWIN} --hidden-size 128",
            "`--hidden-size` has no effect with `--video-model video-dit`: `--video-dit-size` "
            "decides; leave it out.",
        ),
        (
            f"{TWIN} --apply-wd-to-qk-layernorm",
            "`--apply-wd-to-qk-layernorm` has no effect with `--video-model video-dit`: the norms "
            "of its queries and keys never decay; leave it out.",
        ),
        (
            f"{TWIN} --num-layers 3",
            "`--num-layers` has no effect on a video model: its shape follows from its named size "
            "and the flags beside it; leave it out.",
        ),
        (
            f"{TWIN} --pooled-dropout 0.2",
            "`--pooled-dropout` (0.2) has no effect with `--video-model video-dit`, which is given "
            "no pooled embedding; leave it out.",
        ),
        (
            f"{TWIN} --frame-block 1",
            "`--frame-block` has no effect with `--video-model video-dit`: it decides nothing but "
            "what `--task streaming` does; leave it out.",
        ),
        (
            f"{CAUSAL} --guidance-scale 2",
            "`--guidance-scale` has no effect with `--video-model causal-video-dit`: it decides "
            "nothing but what `--task streaming` does; leave it out.",
        ),
        (
            f"{TWIN} --independent-block-timesteps",
            "`--independent-block-timesteps` has an effect only with `--video-model "
            "causal-video-dit`, which has frame blocks; leave it out.",
        ),
        (
            CAUSAL,
            "Clips of 64px 1x64x64 have 1 latent frames, which must be divisible by "
            "`--frame-block` (3); use another length or block.",
        ),
        (
            f"{CAUSAL} --frame-block 1 --window-frames 2",
            "`--window-frames` (2) must be at least `--sink-frames` + `--frame-block` (3 + 1 = "
            "4), or a block would not see all of itself.",
        ),
        (
            f"{TWIN} --recompute-blocks -1",
            "`--recompute-blocks` (-1) must be at least 0; 0 is the default.",
        ),
        (
            f"{TWIN} --context-parallel-size 3 --nproc-per-node 3",
            "Clips of 64px 1x64x64 have 4 x 4 = 16 tokens in a latent frame, which 3 ranks "
            "(context parallel, times tensor parallel with sequence parallelism) cannot share "
            "equally; use fewer ranks or another resolution.",
        ),
        (
            f"{TWIN} --context-parallel-size 8 --nproc-per-node 8 --cp-comm-type a2a",
            "`--video-dit-size tiny` has 4 attention heads, which 8 ranks cannot share equally; "
            "use fewer tensor-parallel ranks, or all_gather instead of a2a.",
        ),
        (
            f"{TWIN} --pipeline-model-parallel-size 4 --nproc-per-node 4",
            "the pipeline has 4 stages, but the model only 2 blocks; use a smaller "
            "`--pipeline-model-parallel-size`.",
        ),
        (
            f"{TWIN} --pretrained-average",
            "`--pretrained-average` needs a checkpoint that gives weights to start from; give "
            "`--pretrained-checkpoint`, or `--load` with `--finetune`.",
        ),
        (
            "--video-dit-size small",
            "`--video-dit-size` has an effect only with `--video-model video-dit` or "
            "causal-video-dit; leave it out.",
        ),
        (
            "--task streaming --video-model video-dit",
            "`--video-model` has no effect with `--task streaming`, whose data is prompts; leave "
            "it out.",
        ),
    ],
)
def test_what_it_would_ignore_or_cannot_do_is_refused(
    mixed: Path, words: str, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(mixed, words) == EXIT_CODE_USER_ERROR
    assert f"error: {sentence}\n" in capfd.readouterr().err


def test_samples_of_a_causal_model_are_whole_blocks(
    mixed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = f"{KINDS['causal']} --sample-interval 1 --sample-texts a --sample-dir x"
    window = "--frame-block 5 --window-frames 6"
    assert run(mixed, f"{words} {window} --sample-frames 9 --sample-fps 8") == EXIT_CODE_USER_ERROR
    assert "error: Sampled clips have 3 latent frames, which must be divisible by" in (
        capfd.readouterr().err
    )
