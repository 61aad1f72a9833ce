"""Sends pages to an upload's disk: several requests at once, each with its MD5, and none for what is already there.

The import host of managed disks accepts Put Page, Get Page Ranges and Get Properties, but not Put Blob, so the SDK's
own upload can't be used. A page that was refused, lost or cut off is sent again; a host that answers 503 is given time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from image_builder.errors import PublishError
from image_builder.gallery import pages
from image_builder.gallery.azure import readable
from image_builder.gallery.pages import Range

# An upload's disk is as slow as a Standard HDD, 60 MiB/s: more streams would gain nothing.
STREAMS = 4
_API = "2025-11-05"
_TRIES = 8
_CONNECT_SECONDS, _READ_SECONDS = 20, 60
_LONGEST_PAUSE = 30.0
_FORBIDDEN, _DAMAGED, _THROTTLED = 403, 400, 429

Progress = Callable[[int, int], None]


@dataclass
class Upload:
    """The disk that pages go to. ``grant`` returns its signed URL, a new one each time: a secret that expires.

    ``sent`` counts the bytes of all requests, including repeated ones.
    """

    grant: Callable[[], str]
    sent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _client: Any = field(default=None, repr=False)
    _not_before: float = 0.0

    def present(self) -> list[Range]:
        """Return the ranges that the disk already has."""
        found = self._persistently(
            lambda client: [
                (part.start, part.end + 1)
                for part in client.list_page_ranges(retry_total=0)
                if not part.cleared
            ],
            "Get Page Ranges",
        )
        return pages.merged(found)

    def write(self, disk: Path, ranges: Sequence[Range], progress: Progress) -> None:
        """Send ranges of a file, several at once. Raises PublishError once the requests in flight have ended."""
        total, done = sum(end - start for start, end in ranges), 0
        stop = threading.Event()

        def send(fd: int, part: Range) -> None:
            nonlocal done
            if stop.is_set():
                return
            length = part[1] - part[0]
            data = os.pread(fd, length, part[0])
            if len(data) != length:
                raise PublishError(f"{disk} became shorter while it was read")
            self._persistently(
                lambda client: client.upload_page(
                    data, part[0], length, validate_content=True, retry_total=0
                ),
                f"Put Page at {part[0]}",
                size=length,
            )
            with self._lock:
                done += length
                progress(done, total)

        fd = os.open(disk, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with ThreadPoolExecutor(STREAMS) as pool:
                requests = [pool.submit(send, fd, part) for part in ranges]
                try:
                    wait(requests, return_when=FIRST_EXCEPTION)
                finally:
                    stop.set()
            for request in requests:
                request.result()
        finally:
            os.close(fd)

    def clear(self, ranges: Sequence[Range]) -> None:
        """Clear ranges that the disk has and the image doesn't, left by another attempt."""
        for part in ranges:
            self._persistently(partial(_clear, part), f"Clear Page at {part[0]}")

    def _persistently(self, request: Callable[[Any], Any], name: str, size: int = 0) -> Any:
        """Return the response to a request, retrying as long as that may help. Raises PublishError."""
        from azure.core.exceptions import AzureError, HttpResponseError

        problem = ""
        for attempt in range(_TRIES):
            time.sleep(max(0.0, self._not_before - time.monotonic()))
            client = self._connected()
            self._count(size)
            try:
                return request(client)
            except HttpResponseError as error:
                problem, status = readable(error), error.status_code or 0
                if status == _FORBIDDEN and attempt < _TRIES // 2:
                    self._renew(client)
                    continue
                if status not in (_DAMAGED, _THROTTLED) and status < 500:
                    raise PublishError(f"{name}: {problem}") from error
                self._slow_down(error.response, attempt)
            except AzureError as error:
                problem = readable(error)
                self._slow_down(None, attempt)
        raise PublishError(f"{name}: {problem}, {_TRIES} times", hint="rerun the same command to resume")

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                from azure.storage.blob import BlobClient

                self._client = BlobClient.from_blob_url(
                    self.grant(),
                    api_version=_API,
                    connection_timeout=_CONNECT_SECONDS,
                    read_timeout=_READ_SECONDS,
                )
            return self._client

    def _renew(self, client: Any) -> None:
        """Make the next request get another URL, unless another thread has already done so."""
        with self._lock:
            if self._client is client:
                self._client = None

    def _slow_down(self, response: Any, attempt: int) -> None:
        """Make all streams wait: what is refused to one would be refused to the others."""
        named = response.headers.get("Retry-After", "") if response is not None else ""
        pause = float(named) if named.isdigit() else 0.2 * 2**attempt
        self._not_before = max(self._not_before, time.monotonic() + min(pause, _LONGEST_PAUSE))

    def _count(self, size: int) -> None:
        with self._lock:
            self.sent += size


def _clear(part: Range, client: Any) -> Any:
    return client.clear_page(part[0], part[1] - part[0], retry_total=0)
