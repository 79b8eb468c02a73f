"""tools/sample_video.py answers wrong folders and flags of published weights in one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.video.sampling.tool import sample_video
from megatron_ext.video.task import VIDEO
from tests.video.sampling import pipelines

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three pipelines, a picture and a file that is none."""
    root = tmp_path_factory.mktemp("pipelines")
    pipelines.wan(root / "wan")
    pipelines.wan(root / "two", experts=True)
    pipelines.wan_of_images(root / "images", "2.1")
    pipelines.picture(root / "x.png", 0)
    (root / "no.png").write_text("no picture")
    return root


def edited(file: str, **values: Any) -> Change:
    def change(root: Path) -> None:
        path = root / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def scheduler(**values: Any) -> Change:
    return edited("scheduler/scheduler_config.json", **values)


INDEX = "model_index.json"
FOLDERS: dict[str, tuple[Change, str]] = {
    "no network": (
        edited(INDEX, transformer=[None, None]),
        "holds a pipeline of the class WanPipeline without a folder `transformer`; give one",
    ),
    "no folder": (
        lambda root: shutil.rmtree(root / "vae"),
        "names the part `vae`, but {root}/vae is not there; copy the whole folder again.",
    ),
    "no JSON": (lambda root: (root / INDEX).write_text("{"), "model_index.json cannot be used (it"),
    "one network": (
        edited(INDEX, boundary_ratio=0.9),
        "has `boundary_ratio` 0.9 and `transformer_2` [None, None], but two networks need",
    ),
    "another text model": (
        edited("text_encoder/config.json", model_type="bert"),
        "holds a text model of type bert, which cannot encode captions here; use one of umt5,",
    ),
    "another scheduler": (
        scheduler(_class_name="DDIMScheduler"),
        "names the scheduler DDIMScheduler, but clips are sampled with one of FlowMatchEuler",
    ),
    "another prediction": (
        scheduler(prediction_type="epsilon"),
        "has `prediction_type` 'epsilon', but a scheduler of flow matching has 'flow_prediction';",
    ),
    "random steps": (
        scheduler(_class_name="FlowMatchEulerDiscreteScheduler", stochastic_sampling=True),
        "has `stochastic_sampling` True, which draws noise in each step, but ranks must step alike",
    ),
    "no number": (scheduler(flow_shift="three"), "has `flow_shift` 'three', which must be"),
    "settings that clash": (
        scheduler(solver_type="other"), "UniPCMultistepScheduler refuses its settings (",
    ),
}  # fmt: skip


def refused(words: str, root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the program says of flags, in which braces stand for folders."""
    usual = "--sample-size 32 32 --sample-frames 5 --sample-steps 2 --sample-dir {root}/clips"
    flags = f"{usual} {words}".replace("{root}", str(root)).split()
    texts = [] if "--sample-prompts" in words else ["--sample-texts", "a"]
    assert sample_video(VIDEO, [*flags, *texts]) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_wrong_is_told(
    name: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "wan"
    shutil.copytree(made / "wan", root)
    change, said = FOLDERS[name]
    change(root)
    assert said.replace("{root}", str(root)) in refused(f"--load-weights {root}", tmp_path, capsys)


WAN, IMAGES = "--load-weights {root}/wan", "--load-weights {root}/images"
FLAGS = [
    (
        "",
        "`--load` is missing; give the --save folder of a run of pretrain_video.py, or published",
    ),
    (
        WAN + " --load x",
        "`--load` (x) and `--load-weights` ({root}/wan) both give a model; leave one",
    ),
    (
        WAN + " --sample-boundary 0.5",
        "`--sample-boundary` (0.5) has an effect only with two networks",
    ),
    (
        WAN + " --sample-low-noise-text-scale 2",
        "(2) has an effect only with two networks; give the",
    ),
    (
        WAN + " --sample-low-noise-expert x",
        "(x) needs `--sample-boundary`, the time at which it takes",
    ),
    (
        WAN + " --sample-low-noise-expert {root}/two --sample-boundary 0.5",
        "{root}/two holds a whole pipeline with two experts, each for some noise "
        "levels; give {root}/two/transformer or ",
    ),
    (
        WAN + " --sample-low-noise-expert {root}/images/transformer --sample-boundary 0.5",
        "holds a network with condition_channels 8, not 0 and vision_width 8, not 0 as "
        "that for high noise;",
    ),
    (
        WAN + " --sample-guidance-range 0.9 0.1",
        "(0.9 0.1) must be two times, the lower first;",
    ),
    (
        WAN + " --sample-text-scale 1 --sample-negative-prompt b",
        "The prompt 'a' has a negative prompt ('b'), which has no effect without "
        "guidance, that is with `--sample-text-scale 1`;",
    ),
    (
        WAN + " --sample-image {root}/x.png",
        "`--video-model video-dit` is given no reference frames;",
    ),
    (
        WAN + " --image-encoder {root}/images/image_encoder",
        "has no effect: the model is given no embeddings of images; leave it out.",
    ),
    (
        WAN + " --sample-size 40 32",
        "Latents of 5 x 4 must be divisible by the patch size (2);",
    ),
    (
        WAN + "/transformer",
        "`--t5-path` is missing, which `--text-encoder umt5` needs",
    ),
    (
        WAN + "/transformer --t5-path {root}/wan/text_encoder",
        "`--codec` is missing, without which clips are decoded from 768 channels "
        "instead of the model's 4; give the folder of the model's",
    ),
    (
        WAN + "/vae",
        "says `_class_name` 'AutoencoderKLWan', which is a VAE; give the folder of the",
    ),
    (
        IMAGES,
        "The prompt 'a' has no reference, but the model makes videos of images; give",
    ),
    (
        IMAGES + " --sample-image {root}/no.png",
        "The clip {root}/no.png cannot be read (cannot",
    ),
    (
        IMAGES + " --sample-image {root}/x.png --sample-image-scale 2",
        "`--sample-image-scale` (2) has no effect on a model that is given frames as "
        "input channels; use 1.",
    ),
    (
        IMAGES + "/transformer --sample-image {root}/x.png --codec {root}/images/vae --t5-path "
        "{root}/images/text_encoder",
        "`--image-encoder` is missing, since the model is given an embedding",
    ),
]


@pytest.mark.parametrize(("words", "said"), FLAGS)
def test_flags_that_cannot_be_followed_are_told(
    words: str, said: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said.replace("{root}", str(made)) in refused(words, made, capsys)
