"""Downloads of locked files: from the store's cache, otherwise from the mirror, hashed as they arrive.

A file appears under its SHA-256 only once it is complete and correct; until then it has a name that nothing reads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import urllib3

from image_builder.bake.lock import apt_auth
from image_builder.errors import FetchError, SpaceError
from image_builder.system import trees
from image_builder.system.web import pool, split_credentials

_PARALLEL = 6
# urllib3 retries until a response begins; a body that breaks off is downloaded at most this many times.
_ATTEMPTS = 3
_CHUNK = 1 << 18
# Connecting and each read have a timeout; a download as a whole has none as long as bytes arrive.
_TIMEOUT = urllib3.Timeout(connect=20, read=30)
# Give up on a mirror that only trickles: fewer bytes per second than this, over so many seconds, as for container
# images.
_LEAST_RATE, _RATE_SECONDS = 16_384, 300.0

# Names the directory for relative ``file:`` addresses, of programs that no mirror has.
PROGRAMS = "IMAGE_BUILDER_PROGRAMS"

Progress = Callable[[int, int], None]


class _Retries(urllib3.Retry):
    """Retries whose waits, and which themselves, end with the fetch: when ``stop`` is set."""

    def __init__(self, stop: threading.Event, **options: Any) -> None:
        super().__init__(**options)
        self._stop = stop

    def new(self, **options: Any) -> Self:
        return super().new(stop=self._stop, **options)

    def sleep(self, response: urllib3.BaseHTTPResponse | None = None) -> None:
        """Wait before the next attempt. Raises FetchError if the fetch ends."""
        asked = self.get_retry_after(response) if response else None
        if self._stop.wait(asked or self.get_backoff_time()):
            raise FetchError("cancelled")


def _retries(stop: threading.Event) -> _Retries:
    return _Retries(
        stop,
        total=4,
        backoff_factor=0.5,
        backoff_jitter=0.5,
        status_forcelist=(429, 500, 502, 503, 504),
        # A Retry-After is obeyed up to two minutes each time: nothing shows that a fetch only waits.
        retry_after_max=120,
    )


@dataclass(frozen=True)
class Download:
    """A file to download: its address (``https:``, ``http:``, ``file:`` or ``copy:``), SHA-256, and size if known.

    A relative ``file:`` address refers to a file below the directory of programs (``located``).
    """

    name: str
    url: str
    sha256: str
    size: int | None = None


def fetch(
    downloads: Iterable[Download], cache: Path, scratch: Path, progress: Progress | None = None
) -> dict[str, Path]:
    """Ensure that every file is in ``cache``, and return {sha256: path}.

    A cached file is hashed before it is trusted, and fetched again if it doesn't match. Downloads run in parallel, to
    ``scratch`` (on the filesystem of ``cache``) until they are complete; ``progress`` gets (bytes done, total bytes).
    Raises FetchError naming the files that failed, ten at most, and SpaceError. An interrupted wait cancels all
    downloads.
    """
    files = {w.sha256: w for w in downloads}
    missing = [w for w in files.values() if not is_cached(cache, w.sha256)]
    total, done = sum(w.size or 0 for w in missing), 0
    failures: list[str] = []
    stop = threading.Event()
    retries = _retries(stop)
    pools = {_site(w.url): pool(w.url, retries=retries, timeout=_TIMEOUT, maxsize=_PARALLEL) for w in missing}
    with ThreadPoolExecutor(_PARALLEL) as workers:
        running = [workers.submit(_download, pools[_site(w.url)], w, cache, scratch, stop) for w in missing]
        try:
            for future in as_completed(running):
                try:
                    done += future.result()
                except FetchError as error:
                    failures.append(error.message)
                if progress:
                    progress(done, total)
        except BaseException:  # Ctrl-C: don't start any other download
            stop.set()
            workers.shutdown(wait=False, cancel_futures=True)
            raise
    if failures:
        shown = "\n  ".join(sorted(failures)[:10])
        more = f"\n  and {len(failures) - 10} more" if len(failures) > 10 else ""
        raise FetchError(
            f"{len(failures)} of {len(missing)} files could not be fetched:\n  {shown}{more}",
            hint="is the mirror up, and does it still hold the locked versions? image-builder lock makes a new lock",
        )
    return {sha256: cache / sha256 for sha256 in files}


def located(url: str) -> str:
    """Return an address; if it is a relative ``file:`` one, with the directory of programs in it.

    So neither a lock nor a stage's id depends on where that directory is. Raises FetchError if the directory is needed
    but unknown.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "file" or parts.netloc or parts.path.startswith("/"):
        return url
    if not (directory := os.environ.get(PROGRAMS)):
        raise FetchError(
            f"{url} is relative to the directory of programs, and {PROGRAMS} doesn't say where that is",
            hint=f"set {PROGRAMS} to the directory that has {parts.path}",
        )
    return f"file:{urllib.request.pathname2url(os.path.abspath(directory))}/{parts.path}"


def is_cached(cache: Path, sha256: str) -> bool:
    """Return whether a file is in ``cache``, undamaged."""
    try:
        return trees.sha256(cache / sha256) == sha256
    except FileNotFoundError:
        return False


def _site(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _download(
    connections: urllib3.PoolManager, item: Download, cache: Path, scratch: Path, stop: threading.Event
) -> int:
    """Fetch one file; return its size in bytes. A connection that breaks in mid-body is retried."""
    try:
        url = located(item.url)
    except FetchError as error:
        raise FetchError(f"{item.name}: {error.message}", hint=error.hint) from error
    address, _ = split_credentials(url)
    partial = scratch / f"{item.sha256}.{uuid.uuid4().hex[:8]}"
    try:
        size, sha256 = _copy_with_retries(connections, url, partial, stop)
        if sha256 != item.sha256:
            raise FetchError(
                f"{item.name}: {address} gave {size} bytes with SHA-256 {sha256}, "
                f"locked is {item.sha256}" + (f" ({item.size} bytes)" if item.size else "")
            )
        partial.rename(cache / item.sha256)
    except urllib3.exceptions.HTTPError as error:
        raise FetchError(f"{item.name}: {address}: {_reason(error)}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(
                f"no space left for {item.name} in {cache}",
                hint="free some: image-builder store gc --keep 1; or another disk: --store DIR",
            ) from error
        raise FetchError(f"{item.name}: {address}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return size


def _copy_with_retries(
    connections: urllib3.PoolManager, url: str, target: Path, stop: threading.Event
) -> tuple[int, str]:
    for attempt in range(1, _ATTEMPTS):
        try:
            return _copy(connections, url, target, stop)
        except (urllib3.exceptions.ProtocolError, urllib3.exceptions.ReadTimeoutError):
            if stop.wait(0.5 * 2**attempt):
                raise
    return _copy(connections, url, target, stop)


def _copy(connections: urllib3.PoolManager, url: str, target: Path, stop: threading.Event) -> tuple[int, str]:
    """Download ``url`` to ``target``; return its size in bytes and its SHA-256."""
    sha256, size = hashlib.sha256(), 0
    since, before = time.monotonic(), 0
    address, _ = split_credentials(url)
    with target.open("wb") as sink:
        for chunk in _chunks(connections, url):
            if stop.is_set():
                raise FetchError(f"{address}: cancelled after {size} bytes")
            sink.write(chunk)
            sha256.update(chunk)
            size += len(chunk)
            if (seconds := time.monotonic() - since) >= _RATE_SECONDS:
                if size - before < _LEAST_RATE * seconds:
                    raise FetchError(f"{address}: too slow, {size - before} bytes in {seconds:.0f} s")
                since, before = time.monotonic(), size
    return size, sha256.hexdigest()


def _chunks(connections: urllib3.PoolManager, url: str) -> Iterable[bytes]:
    if url.startswith(("file:", "copy:")):  # they differ only for apt, which copies or uses a file in place
        with open(urllib.request.url2pathname(urllib.parse.urlsplit(url).path), "rb") as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
        return
    url, credentials = split_credentials(url)
    basic = urllib3.make_headers(basic_auth=":".join(credentials)) if credentials else apt_auth.header(url)
    # The body as it was sent: a .gz file must not be unpacked because of its Content-Encoding.
    headers = {"Accept-Encoding": "identity", **basic}
    response = connections.request("GET", url, preload_content=False, headers=headers)
    # A body read to its end has already returned its connection; closing drops only one that hasn't.
    with contextlib.closing(response):
        if response.status != 200:
            hint = f"; {apt_auth.HINT}" if response.status in (401, 403) else ""
            raise urllib3.exceptions.HTTPError(f"HTTP status {response.status}{hint}")
        # Read what is available: waiting for a full chunk could take forever if each of its bytes arrives just in time.
        while chunk := response.read1(_CHUNK, decode_content=False):
            yield chunk


def _reason(error: urllib3.exceptions.HTTPError) -> str:
    inner = getattr(error, "reason", None)
    return os.fspath(str(inner or error))
