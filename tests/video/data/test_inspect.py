"""tools/inspect_dataset.py counts and judges folders of encoded clips."""

from pathlib import Path

import numpy as np
import pytest

from tests.video import clips as tiny
from tools.inspect_dataset import main


def test_figures_of_a_set_and_what_is_wrong_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts, sizes = {tiny.IMAGE: 3, tiny.SHORT: 8}, {tiny.SHORT: 2}
    # Of eleven clips the last two are the first two again, but they are of another bucket.
    folder = tiny.write_clips(tmp_path / "a", counts, sizes, distinct=9, dropped={"is bad": 2})
    batches = ["--micro-batch-size=1", "--global-batch-size=4"]
    assert main([str(folder), *batches]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith(f"{folder}: 11 samples in 1 shards, ")
    assert "dropped    2 is bad (each in " in said.out
    assert any("64px 1x64x64" in x and "3 clips (27.3%), latents 1x8x8, 3 mic" in x for x in lines)
    assert any("64px 9x64x64" in x and "8 clips (72.7%), latents 3x8x8, 4 mic" in x for x in lines)
    assert "rates      frames per second (samples): 24 (8), pictures (3)" in lines
    assert "words      of a caption: 2 to 2, half have 2 or more" in lines
    assert "repeated   0 samples have the latents of another one" in lines
    assert said.err.splitlines() == [
        "warning: 64px 1x64x64 has 3 clips, but a step of its own takes 4; give it more clips, mix "
        "buckets (`--mixed-buckets`), or use a smaller --global-batch-size."
    ]
    folder = tiny.write_clips(tmp_path / "b", {tiny.SHORT: 4}, distinct=3)
    latents = folder / "shard_00000_latents.bin"
    values = np.fromfile(latents, np.float32)
    values[values.size // 4] = np.nan
    values.tofile(latents)
    assert main([str(folder)]) == 0
    said = capsys.readouterr()
    assert "repeated   1 samples have the latents of another one" in said.out
    assert "warning: 1 samples have the latents of another one. First: 3: 'clip 0'" in said.err
    assert (
        "1 samples have numbers that are not finite, so that a run would end. First: 1: 'cli"
        in (said.err)
    )
    assert main([str(folder), "--no-scan"]) == 0
    assert "repeated" not in capsys.readouterr().out
    latents.unlink()
    assert main([str(folder)]) == 1
    assert "error: " in capsys.readouterr().err
