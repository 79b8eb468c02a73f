"""Leaves of a row of a list of clips, which is written as jsonl, json and, if it can be, csv."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.video.data.clips import read_list
from tests.intake.judge import Heard


def bases() -> Iterator[tuple[str, Any]]:
    yield "usual names", {"path": "clips/cat.mp4", "text": "A cat.", "fps": 24.0, "motion": 3.5}
    yield (
        "other names",
        {"path": "dog.mp4", "caption": "A dog.", "motion_score": 2.0, "height": 480},
    )
    yield "names of DiffSynth", {"video": "v.mp4", "prompt": "A bird.", "fps": 16.0}
    yield "names of Hugging Face", {"file_name": "f.mp4", "text": "A fish.", "path": ""}
    yield "two captions", {"path": "x.mp4", "text": "One.", "caption": "Another."}


def hear(content: Any, folder: Path) -> Heard:
    notes: list[str] = []
    lists = [folder / "list.jsonl"]
    lists[0].write_text(json.dumps(content) + "\n", encoding="utf-8")
    lists.append(folder / "list.json")
    lists[1].write_text(json.dumps([content]), encoding="utf-8")
    if not any(isinstance(value, dict | list) for value in content.values()):
        lists.append(folder / "list.csv")
        with lists[-1].open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, content)
            writer.writeheader()
            writer.writerow(content)
    clips = [clip for path in lists for clip in read_list(path, notes.append)]
    trained = [(Path(c.path).relative_to(folder), c.caption, c.fps, c.motion) for c in clips]
    return Heard(trained, "\n".join(notes))
