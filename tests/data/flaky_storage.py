"""Object storage whose requests fail, hang, or are cut short, over files of this machine."""

import asyncio
import random
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

from megatron_ext.data import requests


class FlakyStorage(AsyncFileSystem):  # type: ignore[misc]
    """Storage at ``flaky:///path``; a share of its requests for ranges goes wrong.

    Attributes:
        failing: share that raises.
        hanging: share that is never answered.
        short: share that is answered by half.
        asked: each range of a process, as path, first byte and end.
    """

    protocol = ("flaky",)
    cachable = False
    failing = hanging = short = 0.0
    chance = random.Random(0)
    asked: ClassVar[list[tuple[str, int, int]]] = []
    etag = True

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("flaky://")

    async def _info(self, path: str, **options: Any) -> dict[str, Any]:
        facts = Path(path).stat()
        entry = {"name": path, "size": facts.st_size, "type": "file"}
        return {**entry, "ETag": f"{facts.st_mtime_ns}"} if self.etag else entry

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        assert start is not None and end is not None
        self.asked.append((path, start, end))
        fate = self.chance.random()
        if fate < self.failing:
            raise OSError("the storage is busy")
        if fate < self.failing + self.hanging:
            await asyncio.sleep(3600)
        with open(path, "rb") as file:
            file.seek(start)
            content = file.read(end - start)
        cut = fate < self.failing + self.hanging + self.short
        return content[: len(content) // 2] if cut else content


def install(monkeypatch: pytest.MonkeyPatch, shortest: float) -> None:
    """Register the storage, without faults so far; requests are repeated after short pauses.

    ``shortest`` is the limit of a first attempt in seconds.
    """
    fsspec.register_implementation("flaky", FlakyStorage, clobber=True)
    for name in ("failing", "hanging", "short"):
        monkeypatch.setattr(FlakyStorage, name, 0.0)
    monkeypatch.setattr(FlakyStorage, "asked", [])
    monkeypatch.setattr(FlakyStorage, "chance", random.Random(0))
    monkeypatch.setattr(requests, "PAUSES", (0.01,) * 6)
    monkeypatch.setattr(requests, "SHORTEST", shortest)
