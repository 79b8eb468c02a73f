"""tools/sample_video.py chooses what samples by its flags."""

from collections.abc import Sequence
from typing import Any

import pytest

from megatron_ext.programs import sample_video
from megatron_ext.video.task import VIDEO


def test_streaming_is_the_tools_own_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[tuple[Any, ...]] = []

    def whole(task: Any, words: Sequence[str]) -> int:
        called.append((task, *words))
        return 3

    def streaming(words: Sequence[str]) -> int:
        called.append(("streaming", *words))
        return 4

    monkeypatch.setattr(sample_video, "sample_video", whole)
    monkeypatch.setattr(sample_video, "sample_streaming", streaming)
    assert sample_video.main(["--load", "run", "--sample-steps", "2"]) == 3
    assert sample_video.main(["--load", "run", "--streaming", "--sample-steps", "2"]) == 4
    assert capsys.readouterr().out == ""
    assert called == [
        (VIDEO, "--load", "run", "--sample-steps", "2"),
        ("streaming", "--load", "run", "--sample-steps", "2"),
    ]
    for flag in ("-h", "--help"):
        assert sample_video.main([flag]) == 3
        assert "python tools/sample_video.py --streaming --load RUN" in capsys.readouterr().out
