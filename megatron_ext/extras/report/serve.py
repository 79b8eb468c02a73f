"""Serves the page of runs over HTTP while they go on; each browser asks for changes by itself.

Only the page and, of a save folder, the files to which it links are served: texts, pictures and
clips. No file outside of the save folders is, whatever links they hold.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from megatron_ext.disk.events import EVENTS_FILE
from megatron_ext.disk.reading import UnreadableFile, open_regular
from megatron_ext.errors import ConfigError
from megatron_ext.extras.report.comparison import render_comparison
from megatron_ext.extras.report.goodput import account
from megatron_ext.extras.report.page import render
from megatron_ext.extras.report.run_folder import read_run_folder
from megatron_ext.extras.report.samples import FOLDER as SAMPLES
from megatron_ext.extras.report.summary import state_of
from megatron_ext.train.reporting.files import CONFIGURATION_FILE, METRICS_FILE

FILES = "/files/"
"""Prefix of the addresses of files, before the number of the run and the path in its folder."""
TYPES = {
    ".txt": "text/plain; charset=utf-8",
    ".png": "image/png",
    ".mp4": "video/mp4",
}
"""The types of files that are served; a browser runs nothing that is in them."""
_PAUSE = 10.0
"""The page is made again only after this many times the seconds that making it took."""
_UNCHANGED = 30.0
"""Seconds after which the page is made again even if no file has changed."""


@dataclass(frozen=True)
class Rendered:
    """A page, and a tag that changes when its content does."""

    tag: str
    content: bytes


class LivePage:
    """Makes the page of one or more runs again when their files have changed."""

    def __init__(self, folders: Sequence[Path], clock: Callable[[], float] = time.time) -> None:
        self.folders = [folder.resolve() for folder in folders]
        self._clock = clock
        self._lock = threading.Lock()
        self._rendered: Rendered | None = None
        self._signature: tuple[object, ...] = ()
        self._made_at = 0.0
        self._took = 0.0

    def current(self) -> Rendered:
        """Return the page; of requests at the same time, one makes it for all."""
        with self._lock:
            now = self._clock()
            signature = tuple(map(_signature, self.folders))
            age = now - self._made_at
            changed = signature != self._signature and age >= _PAUSE * self._took
            if self._rendered is None or changed or age >= max(_UNCHANGED, _PAUSE * self._took):
                first = self._rendered is None
                self._rendered = self._made(now, signature)
                self._made_at = now
                # The first page also waits for imports.
                self._took = 0.0 if first else self._clock() - now
                self._signature = signature
            return self._rendered

    def _made(self, now: float, signature: object) -> Rendered:
        runs = [read_run_folder(folder) for folder in self.folders]
        if len(runs) == 1:
            goodput = account(runs[0].rows, runs[0].events)
            text = render(runs[0], goodput, now=now, root=f".{FILES}0", live=True)
        else:
            text = render_comparison(runs, now=now, live=True)
        states = [state_of(run, now).word for run in runs]
        tag = hashlib.blake2b(repr((signature, states)).encode(), digest_size=12).hexdigest()
        return Rendered(f'"{tag}"', text.encode(errors="replace"))


def _signature(folder: Path) -> tuple[object, ...]:
    """Return what changes whenever the page on a folder would: sizes and times of its files."""
    found = list[object]()
    for name in (METRICS_FILE, EVENTS_FILE, CONFIGURATION_FILE, SAMPLES, "."):
        try:
            status = os.stat(folder / name)
        except OSError:
            found.append(None)
        else:
            # The time of the folder itself changes with its checkpoints and post-mortems.
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the page and for files of the runs; everything else is refused."""

    timeout = 30
    server_version = "megatron-ext"
    sys_version = ""

    def __init__(self, page: LivePage, hosts: frozenset[str] | None, *rest: object) -> None:
        self._page = page
        self._hosts = hosts
        super().__init__(*rest)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        try:
            self._respond()
        except (ConnectionError, TimeoutError):  # The browser has gone.
            self.close_connection = True

    def _respond(self) -> None:
        # A page of a stranger can make its own name mean this machine, but not change this header.
        if self._hosts is not None and _host_of(self.headers.get("Host", "")) not in self._hosts:
            self.send_error(HTTPStatus.FORBIDDEN, "this name is not served")
            return
        path = unquote(urlsplit(self.path).path)
        if path == "/":
            self._send_page()
        elif path.startswith(FILES):
            self._send_file(path.removeprefix(FILES))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send_page(self) -> None:
        rendered = self._page.current()
        if self.headers.get("If-None-Match") == rendered.tag:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.send_header("ETag", rendered.tag)
            self.end_headers()
            return
        self._send_head("text/html; charset=utf-8", len(rendered.content), rendered.tag)
        if self.command == "GET":
            self.wfile.write(rendered.content)

    def _send_head(self, kind: str, length: int, tag: str | None = None) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        if tag is not None:
            self.send_header("ETag", tag)
        self.end_headers()

    def _send_file(self, rest: str) -> None:
        path = file_of(self._page.folders, rest)
        try:
            file = None if path is None else open_regular(path)
        except UnreadableFile:
            file = None
        if path is None or file is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            self._send_head(TYPES[path.suffix], size)
            left = size if self.command == "GET" else 0
            # A file that grows meanwhile must not get longer than its header says.
            while left > 0 and (block := file.read(min(1 << 20, left))):
                self.wfile.write(block)
                left -= len(block)


def file_of(folders: Sequence[Path], rest: str) -> Path | None:
    """Return the file that an address names; None if it may not be served.

    Args:
        folders: the save folders, without links in their paths.
        rest: the number of a folder and the path of a file in it, such as "0/samples/a.png".
    """
    number, _, name = rest.partition("/")
    if not number.isascii() or not number.isdigit() or int(number[:4]) >= len(folders):
        return None
    folder = folders[int(number[:4])]
    try:
        path = (folder / name).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        return None
    if not path.is_relative_to(folder) or path.suffix not in TYPES:
        return None
    return path


def _host_of(header: str) -> str:
    """Return the name or address in a Host header, without the port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Server6(ThreadingHTTPServer):
    """A server at an IPv6 address."""

    address_family = socket.AF_INET6


def open_server(folders: Sequence[Path], host: str, port: int) -> ThreadingHTTPServer:
    """Open a server of the page on ``folders``; port 0 takes a free one.

    A server that only this machine reaches answers only to names of this machine.

    Raises:
        ConfigError: the port is in use, or the address is not one of this machine.
    """
    hosts = frozenset({"localhost", "127.0.0.1", "::1", host}) if _is_loopback(host) else None
    kind = _Server6 if ":" in host else ThreadingHTTPServer
    try:
        server = kind((host, port), partial(Handler, LivePage(folders), hosts))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"`--port` ({port}) of `--host` ({host}) cannot be served ({why}); give another port, "
            "or 0 for a free one."
        ) from None
    server.daemon_threads = True
    return server


def _from_elsewhere(name: str, port: int) -> str:
    """Return how a browser on the user's own machine reaches the page, if that is another one."""
    # ssh tells the addresses of both machines: client, port, server, port.
    parts = os.environ.get("SSH_CONNECTION", "").split()
    if len(parts) != 4 or not _is_loopback(name.strip("[]")):
        return ""
    return f"; on your own machine first run: ssh -N -L {port}:{name}:{port} {parts[2]}"


def serve(folders: Sequence[Path], host: str, port: int) -> None:
    """Serve the page on ``folders`` until Ctrl-C; the errors are those of `open_server`."""
    with open_server(folders, host, port) as server:
        name = f"[{host}]" if ":" in host else host
        port = server.server_address[1]
        address = f"http://{name}:{port}/"
        print(
            f"serving {', '.join(map(str, folders))} at {address} until Ctrl-C"
            f"{_from_elsewhere(name, port)}",
            flush=True,
        )
        if not _is_loopback(host):
            print("warning: whoever reaches this address can read the page.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(flush=True)
