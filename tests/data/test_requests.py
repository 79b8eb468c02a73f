"""Requests to object storage: what is asked again, how long it is waited for, and what never."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from megatron_ext.data import requests
from megatron_ext.data.requests import Requests, StoredObject, file_system
from megatron_ext.errors import ConfigError, DataError


class Clock:
    """A clock that only waits move; each wait for an answer is noted with its limit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.limits: list[float] = []
        monkeypatch.setattr(requests.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(requests.asyncio, "wait_for", self.wait_for)
        monkeypatch.setattr(requests.asyncio, "sleep", self.sleep)

    async def wait_for(self, answer: Any, limit: float) -> Any:
        self.limits.append(limit)
        seconds, value = await answer
        self.now += min(seconds, limit)
        if seconds > limit:
            raise asyncio.TimeoutError
        if isinstance(value, Exception):
            raise value
        return value

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def _asked(answers: list[tuple[float, Any]], made: Requests, length: int | None = None) -> Any:
    given = iter(answers)

    async def ask() -> tuple[float, Any]:
        return next(given)

    return asyncio.run(made._tried("s3://b/a.bin", ask, length))


def test_an_answer_is_waited_for_as_long_as_is_usual_and_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, counts = Clock(monkeypatch), Counter[str]()
    made = Requests(lambda **more: counts.update(more))
    assert _asked([(9, b""), (9, b"abc"), (5, b"abcd")], made, 4) == b"abcd"
    assert clock.limits == [2, 4, 8]
    assert counts == {"requests": 3, "given_up": 2, "bytes": 4}
    # Eight times the five seconds that the first answer took, then twice as long.
    assert _asked([(41, b""), (1, b"abc"), (1, b"abcd")], made, 4) == b"abcd"
    assert clock.limits[3:] == pytest.approx([40, 60, 60])
    assert counts == {"requests": 6, "given_up": 3, "bytes": 8, "short": 1}
    # One quick answer does not end the patience with slow ones.
    _asked([(1, b"abcd")], made, 4)
    assert clock.limits[6:] == [pytest.approx(8 * (5 + 0.1 * (1 - 5)))]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError("x"), "s3://b/a.bin does not exist; give the address without .bin"),
        (PermissionError("no"), r"s3://b/a.bin may not be read \(no\); give the storage's cre"),
        *(
            (type(name, (Exception,), {})("none found"), r"may not be read \(none found\); give")
            for name in ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
        ),
    ],
)
def test_what_another_attempt_cannot_change_is_told_at_once(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(DataError, match=told):
        _asked([(1, error)], Requests(lambda **more: None))
    assert len(clock.limits) == 1


def test_an_object_is_the_same_by_its_size_and_by_its_version_if_it_has_one() -> None:
    one = StoredObject("a", 5, "etag=1")
    assert one.is_still(StoredObject("a", 5, "etag=1"))
    assert not one.is_still(StoredObject("a", 5, "etag=2"))
    nameless = StoredObject("a", 5, "described=1", is_versioned=False)
    assert nameless.is_still(StoredObject("a", 5, "described=2", is_versioned=False))
    for each in (one, nameless):
        assert not each.is_still(StoredObject("a", 6, each.version, each.is_versioned))


@pytest.mark.parametrize("info", [{"size": 0, "type": "directory"}, {"type": "file"}])
def test_a_folder_is_no_object(info: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = Requests(lambda **more: None)

    class Storage:
        async_impl = False

        def info(self, path: str) -> dict[str, Any]:
            return {**info, "name": path}

    made._places["s3://b/a.bin"] = Storage(), "b/a.bin"
    with pytest.raises(DataError, match="s3://b/a.bin has no size that its server tells"):
        made.wait(made.describe("s3://b/a.bin"))


def test_settings_of_s3_come_before_ours_which_turn_hidden_retries_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}

    class Storage:
        retries = 5

    def made(address: str, **options: Any) -> Any:
        asked[address] = options
        return Storage(), "b/a"

    monkeypatch.setattr(requests.fsspec.core, "url_to_fs", made)
    own = {"s3": {"config_kwargs": {"max_pool_connections": 3}}}
    monkeypatch.setattr(requests.fsspec.config, "conf", own)
    fs, _ = requests._place("s3://b/a")
    settings = {"retries": {"max_attempts": 0}, "max_pool_connections": 3}
    assert asked == {"s3://b/a": {"config_kwargs": settings}} and fs.retries == 1
    fs, _ = requests._place("gs://b/a")
    assert asked["gs://b/a"] == {} and fs.retries == 5


def test_the_package_of_a_scheme_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(address: str, **options: Any) -> Any:
        raise ImportError(address)

    monkeypatch.setattr(requests.fsspec.core, "url_to_fs", missing)
    for scheme, package in (("https", "aiohttp"), ("http", "aiohttp"), ("s3", "s3fs"), ("x", "x")):
        with pytest.raises(ConfigError, match=f"^`--save` needs the package {package}, which is"):
            file_system(f"{scheme}://b/a", "`--save`", ConfigError)


@pytest.mark.parametrize(
    ("marks", "is_versioned"),
    [
        ({"ETag": "1"}, True), ({"generation": 1}, True), ({"mtime": 1.5}, True),
        ({"LastModified": "1"}, True), ({"Last-Modified": "1"}, True), ({"content-md5": "1"}, True),
        ({"ETag": None}, False), ({"owner": "1"}, False),
    ],
)  # fmt: skip
def test_the_version_of_an_object_is_any_mark_that_its_storage_gives(
    marks: dict[str, Any], is_versioned: bool
) -> None:
    made = Requests(lambda **more: None)

    def described(**more: Any) -> StoredObject:
        class Storage:
            async_impl = False

            def info(self, path: str) -> dict[str, Any]:
                return {"name": path, "size": 5, "type": "file", **marks, **more}

        made._places["s3://b/a.bin"] = Storage(), "b/a.bin"
        return made.wait(made.describe("s3://b/a.bin"))

    first = described()
    assert (first.size, first.is_versioned) == (5, is_versioned)
    assert (described().version == first.version) == is_versioned
    changed = described(**{name: "2" for name in marks if is_versioned})
    assert changed.version != first.version
    assert described(size=6).version != first.version
