"""Requests to object storage through fsspec, with a time limit each; failed requests are repeated.

A request that hangs is given up after a few times the usual duration of this process's requests. So
a bad connection costs a moment, not the minute of a library's own time-out. The limit grows with
each attempt, since the storage may have become slow. Answers of a wrong length are repeated, too.

Why fsspec and not obstore: credentials and endpoints are then the same as for ``--save s3://``, and
fsspec starts anew in a forked process, such as a loader's worker. A client of obstore 0.12.1 hangs
in a forked process if the parent process has used it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import get_loop
from fsspec.registry import known_implementations

from megatron_ext.errors import DataError, MegatronExtError

logger = logging.getLogger(__name__)
T = TypeVar("T")

PAUSES = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Mean seconds before each retry; the actual pause is 0.5 to 1.5 times as long."""
SHORTEST, LONGEST = 2.0, 60.0
"""Least time limit of a request's first attempt, and largest of any attempt, in seconds."""
_PATIENCE = 8
"""Time limit of a first attempt in multiples of the running mean duration of this process's
requests.
"""
_CONCURRENT = 16
"""Most simultaneous requests for ranges in one process."""
_REFUSALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")


@dataclass(frozen=True)
class StoredObject:
    """An object in the storage, as it was at the start of the run.

    Attributes:
        size: length in bytes.
        version: text that changes whenever the object changes.
        is_versioned: whether the storage provides such a text. If not, ``version`` is made up and
            unique, so that no other run reuses cached parts of the object.
    """

    address: str
    size: int
    version: str
    is_versioned: bool = True

    def is_still(self, other: StoredObject) -> bool:
        """Return whether the object has the same content as at another time, when it was ``other``.

        Compare the sizes and, if the storage provides versions, the versions.
        """
        return self.size == other.size and (not self.is_versioned or self.version == other.version)


def file_system(
    address: str, named: str, kind: type[MegatronExtError], **options: Any
) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the path of the address in that file system.

    Args:
        named: the address as error messages name it, for example "`--save` (s3://bucket/run)".
        kind: the class of error to raise if the scheme's package is missing.
        options: arguments of the file system, besides those in fsspec's configuration.
    """
    try:
        place: tuple[Any, str] = fsspec.core.url_to_fs(address, **options)
    except ImportError as error:
        scheme = address.partition("://")[0]
        package = known_implementations.get(scheme, {"class": scheme})["class"].split(".")[0]
        package = "aiohttp" if scheme in ("http", "https") else package
        raise kind(
            f"{named} needs the package {package}, which is not installed; run `pip install "
            f"{package}`."
        ) from error
    except ValueError as error:
        raise kind(
            f"{named} has a scheme that fsspec does not know; use a folder, or a scheme such as "
            "s3, gs or az."
        ) from error
    return place


class Requests:
    """Reads ranges of stored objects, several at a time; not to be shared by processes.

    Args:
        count: function that adds its keyword arguments to counters of these names
            (`BlockCache.count`).
    """

    def __init__(self, count: Callable[..., None]) -> None:
        self._count = count
        self._usual = 0.0
        self._places: dict[str, tuple[Any, str]] = {}
        self._random = random.Random()
        self._turns = asyncio.Semaphore(_CONCURRENT)
        self.loop: asyncio.AbstractEventLoop = get_loop()

    def wait(self, work: Awaitable[T]) -> T:
        """Run an awaitable on the thread of fsspec's event loop; wait for its result, return it."""

        async def done() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(done(), self.loop).result()

    async def describe(self, address: str) -> StoredObject:
        """Request an object's size and version.

        Raises:
            DataError: the object does not exist or cannot be read, or its size is not known.
        """

        async def ask() -> dict[str, Any]:
            fs, path = await self._place(address)
            if fs.async_impl:
                fs.invalidate_cache()
                return dict(await fs._info(path))
            return dict(await self.loop.run_in_executor(None, fs.info, path))

        info = await self._tried(address, ask)
        if info.get("size") is None or info.get("type") == "directory":
            raise DataError(
                f"{address} has no size that its server tells, so that its length cannot be "
                "checked; copy it to a disk or to an object storage."
            )
        # Storages name the version ETag, generation, mtime, LastModified or Last-Modified.
        names = ("etag", "generation", "mtime", "lastmodified", "last-modified", "content-md5")
        marks = {key.lower(): str(value) for key, value in info.items() if value is not None}
        validators = [f"{name}={marks[name]}" for name in names if name in marks]
        unknown = f"described={time.time_ns()} by={os.getpid()}"
        version = " ".join([f"size={info['size']}", *(validators or [unknown])])
        return StoredObject(address, int(info["size"]), version, bool(validators))

    async def check_ranges(self, address: str) -> None:
        """Raise a DataError if the server of an ``http`` address can only send whole files."""
        fs, path = await self._place(address)
        if address.partition("://")[0] not in ("http", "https"):
            return

        def probe() -> bool:
            try:
                with fs.open(path, cache_type="none") as file:
                    file.seek(1)
                    file.read(1)
            except ValueError:
                return False
            return True

        async def ask() -> bool:
            return bool(await asyncio.to_thread(probe))

        if not await self._tried(address, ask):
            raise DataError(
                f"The server of {address} does not answer requests for parts of a file; copy the "
                "pair to a disk, or use a server that knows ranges."
            )

    async def read(self, source: StoredObject, begin: int, end: int) -> bytes:
        """Return the bytes of an object from ``begin`` to ``end`` - 1.

        Raises:
            DataError: all attempts failed or returned too few bytes.
        """

        async def ask() -> bytes:
            fs, path = await self._place(source.address)
            if fs.async_impl:
                return bytes(await fs._cat_file(path, start=begin, end=end))
            call = lambda: bytes(fs.cat_file(path, start=begin, end=end))  # noqa: E731
            return await self.loop.run_in_executor(None, call)

        async with self._turns:
            content: bytes = await self._tried(source.address, ask, end - begin)
            return content

    async def _place(self, address: str) -> tuple[Any, str]:
        """Return fsspec's file system for an address, and the path of the address in it."""
        if address not in self._places:
            # Some packages fetch credentials here, which would block the event loop.
            self._places[address] = await asyncio.to_thread(_place, address)
        return self._places[address]

    async def _tried(
        self, address: str, ask: Callable[[], Awaitable[Any]], length: int | None = None
    ) -> Any:
        """Call ``ask`` until it succeeds, and return its answer.

        An answer that does not have ``length`` bytes counts as a failure; None accepts any answer.
        Raise a DataError if the last attempt fails, or at once after an error that another attempt
        cannot change (see `_refuse`).
        """
        for attempt, pause in enumerate((*PAUSES, None)):
            limit = max(SHORTEST, _PATIENCE * self._usual) * 2.0**attempt
            started = time.monotonic()
            try:
                answer = await asyncio.wait_for(ask(), min(LONGEST, limit))
            except MegatronExtError:
                raise
            except asyncio.TimeoutError:
                kind = "given_up"
                why = f"no answer in {time.monotonic() - started:.1f} s"
            except Exception as error:
                why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")
                _refuse(address, error, why)
                kind = "failed"
            else:
                if length is None or len(answer) == length:
                    self._learn(time.monotonic() - started)
                    self._count(requests=1, bytes=length or 0)
                    return answer
                kind = "short"
                why = f"{len(answer)} bytes have arrived instead of {length}"
            self._count(requests=1, **{kind: 1})
            if pause is None:
                raise DataError(
                    f"{address} cannot be read ({why}, after {len(PAUSES) + 1} attempts); check "
                    "the network and the storage."
                )
            if attempt == 3:
                logger.warning("%s is not answered (%s); it is asked again", address, why)
            await asyncio.sleep(pause * (0.5 + self._random.random()))
        raise AssertionError

    def _learn(self, seconds: float) -> None:
        self._usual += (seconds - self._usual) * (0.1 if self._usual else 1.0)


def _place(address: str) -> tuple[Any, str]:
    if address.partition("://")[0] not in ("s3", "s3a"):
        return file_system(address, address, DataError)
    # Retries inside botocore and s3fs would be neither counted nor limited in time.
    given = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    settings = {"retries": {"max_attempts": 0}, "max_pool_connections": _CONCURRENT, **given}
    fs, path = file_system(address, address, DataError, config_kwargs=settings)
    fs.retries = 1
    return fs, path


def _refuse(address: str, error: Exception, why: str) -> None:
    """Raise a DataError if a file is missing or access is denied, which no retry can change.

    Do nothing after other errors. ``why`` is the text of ``error`` for the message.
    """
    if isinstance(error, FileNotFoundError):
        raise DataError(
            f"{address} does not exist; give the address without .bin/.idx, and copy both files."
        ) from error
    if isinstance(error, PermissionError) or type(error).__name__ in _REFUSALS:
        raise DataError(
            f"{address} may not be read ({why}); give the storage's credentials, as its package "
            "for fsspec takes them."
        ) from error
