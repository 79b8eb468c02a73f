"""Every example runs as written, at a tiny size on this machine, and learns its invented data."""

import json
import math
import re
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES, smoke, succeed
from tests.examples.scripts import rows as rows_of

PNG = b"\x89PNG\r\n\x1a\n"

TRAINING = [
    "gpt/pretrain_gpt_1node.sh", "gpt/pretrain_llama3_8b.sh", "gpt/pretrain_llama3_8b_fp8.sh",
    "gpt/pretrain_deepseek_v3.sh", "gpt/pretrain_qwen3_next_80b.sh",
    "gpt/pretrain_nemotron_h_56b.sh", "slurm/pretrain_gpt.sbatch", "custom_model/train.sh",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("script", TRAINING)
def test_example_trains_saves_and_plots(script: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    smoke(script, out)
    rows = rows_of(out)
    losses = [row["lm loss"] for row in rows if row["kind"] == "train"]
    assert len(losses) == 4
    # The vocabulary is padded to 256 for two tensor-parallel ranks: at first a token costs ln 256.
    assert losses[0] == pytest.approx(math.log(256), rel=0.03)
    assert losses[-1] < losses[0]
    assert [row["split"] for row in rows if row["kind"] == "evaluation"].count("validation") >= 2
    assert (out / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    assert (out / "loss.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_custom_loss_is_what_is_trained_and_evaluated(tmp_path: Path) -> None:
    out = tmp_path / "run"
    smoke("custom_loss/train.sh", out)
    rows = rows_of(out)
    losses = [row["focal loss"] for row in rows if row["kind"] == "train"]
    # Hardly anything is sure at first, so that a token costs nearly its cross-entropy.
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert losses[-1] < losses[0]
    evaluated = [row for row in rows if row["kind"] == "evaluation"]
    assert evaluated and all("focal loss" in row for row in evaluated)


@pytest.mark.slow
def test_custom_video_model_trains_on_clips_that_it_renders(tmp_path: Path) -> None:
    out = tmp_path / "run"
    smoke("custom_model/dit.sh", out)
    losses = [row["loss"] for row in rows_of(out, "train")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert (out / "latest_checkpointed_iteration.txt").read_text().strip() == "4"


@pytest.mark.slow
def test_quickstart_resumes_in_another_layout(tmp_path: Path) -> None:
    out = tmp_path / "quickstart"
    shown = smoke("quickstart.sh", out)
    rows = rows_of(out / "checkpoints")
    steps = [row["iteration"] for row in rows if row["kind"] == "train"]
    assert steps[-1] == 8
    assert steps == sorted(set(steps))
    assert [row["iteration"] for row in rows if row["kind"] == "resumed"] == [4]
    assert (out / "checkpoints" / "iter_0000004").is_dir()
    assert (out / "checkpoints" / "loss.png").read_bytes().startswith(PNG)
    written = shown.partition("what the model writes")[2]
    assert "[1] There was" in written and "[2] In the evening" in written
    assert len(written.rstrip().rpartition("[2] In the evening")[2]) > 10


@pytest.mark.slow
def test_fine_tuning_quickstart_ends_with_an_accuracy(tmp_path: Path) -> None:
    """At this size it learns nothing; docs/sft.md says what the whole run reaches."""
    out = tmp_path / "sft"
    shown = smoke("sft/quickstart.sh", out)
    assert re.search(r"held-out exact match: [0-9.]+% \([0-9]+ of [0-9]+\)", shown)
    rows = rows_of(out / "checkpoints")
    assert [row["iteration"] for row in rows if row["kind"] == "resumed"] == [4]
    assert "<html" in (out / "preview.html").read_text(encoding="utf-8")
    assert (out / "hf" / "model.safetensors").exists()


@pytest.mark.slow
def test_fine_tuning_starts_from_public_weights(tmp_path: Path) -> None:
    out = tmp_path / "qwen"
    smoke("sft/sft_qwen_8gpu.sh", out, LORA="4")
    rows = rows_of(out / "checkpoints", "train")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert (out / "checkpoints" / "best_checkpointed_iteration.txt").exists()


@pytest.mark.slow
def test_video_quickstart_ends_with_a_measurement(tmp_path: Path) -> None:
    """At this size it learns nothing; docs/video.md says what the whole run is."""
    out = tmp_path / "video"
    shown = smoke("video/quickstart.sh", out)
    assert shown.rstrip().endswith("loss.png")
    rows = rows_of(out / "checkpoints")
    assert [row["iteration"] for row in rows if row["kind"] == "resumed"] == [4]
    assert (out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "8"
    assert len(list((out / "samples").glob("sample_*.mp4"))) == 16
    assert (out / "samples" / "contact_sheet.png").read_bytes().startswith(PNG)


def test_the_corpus_is_the_same_everywhere(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.jsonl"
        succeed(EXAMPLES / "make_corpus.py", "--documents=50", "--output", path)
        made.append(path.read_text(encoding="utf-8"))
    assert made[0] == made[1]
    assert len(made[0].splitlines()) == 50
    assert len({json.loads(line)["text"] for line in made[0].splitlines()}) == 50
