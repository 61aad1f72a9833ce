"""A minimal API-server client that uses only the standard library.

A node sends one request per transition (``Client.patch_condition``) and queries nothing. ``retry`` handles refusals.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Self

from image_builder.node.errors import NodeError
from image_builder.node.net import fetch, kubeconfig
from image_builder.node.net.kubeconfig import Access, Pem

# Seconds for connecting, for each read or write, and for a whole request. A list of all nodes may take longer; a watch
# has its own limit.
TIMEOUT, LONGEST_LIST = 15.0, 300.0
MESSAGE_BYTES = 1024
NOT_FOUND, CONFLICT = 404, 409
# Statuses that a retry won't change: the request itself is wrong.
_HOPELESS = frozenset({400, 405, 406, 413, 415, 422})
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_JSON = "application/json"
STRATEGIC_MERGE = "application/strategic-merge-patch+json"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"


class KubeError(NodeError):
    """A request to the API server failed. ``status`` is the HTTP status, 0 if there was no answer at all.

    ``retry_after`` is what the server asked for, in seconds; ``causes`` has the messages in its details by their
    reasons, such as ``DisruptionBudget``.
    """

    def __init__(
        self,
        message: str,
        status: int = 0,
        retry_after: float | None = None,
        causes: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("kube.refused" if status else "kube.unreachable", message)
        self.status = status
        self.retry_after = retry_after
        self.causes: Mapping[str, str] = causes or {}

    @property
    def is_hopeless(self) -> bool:
        """Return whether the same request can't succeed later either."""
        return self.status in _HOPELESS


def as_kubelet(path: Path, node_name: str = "", timeout: float = TIMEOUT) -> tuple[Client, str]:
    """Return a client with a kubelet's kubeconfig, and the node's name there. Raises NodeError (``kube.config``)."""
    client = Client.from_kubeconfig(path, timeout=timeout)
    return client, node_name or client.access.node or os.uname().nodename.lower()


def stamp(now: datetime) -> str:
    """Return a time as the API expects it."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(
    kind: str, status: str, reason: str, message: str, now: datetime | None = None, since: str = ""
) -> dict[str, str]:
    """Return a node condition as the API expects it. The message is cut to 1 KB, between two characters.

    ``since`` is the time of its last transition, by default ``now``.
    """
    heartbeat = stamp(now or datetime.now(UTC))
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message.encode()[:MESSAGE_BYTES].decode(errors="ignore"),
        "lastHeartbeatTime": heartbeat,
        "lastTransitionTime": since or heartbeat,
    }


def each_item(text: str, take: Callable[[dict[str, Any]], None]) -> str:
    """Call ``take`` for each item of a list's JSON; return its resourceVersion. Raises KeyError, ValueError."""
    return str(_each_item(text, take)["resourceVersion"])


def _each_item(text: str, take: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Call ``take`` for each item of a list's JSON; return its metadata. Raises ValueError.

    A list that isn't written as the API server does it, such as by a proxy, is parsed as a whole.
    """
    items, taken = _items(text), 0
    while True:
        try:
            item = next(items)
        except StopIteration as end:
            metadata: dict[str, Any] = end.value
            return metadata
        except (KeyError, ValueError):
            break
        take(item)
        taken += 1
    document = json.loads(text)
    if not isinstance(document, dict) or not isinstance(document.get("items", ""), list | None):
        raise ValueError("not a list")
    for item in (document["items"] or ())[taken:]:
        take(item)
    return dict(document.get("metadata") or {})


def _items(text: str) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Yield the items of a list's JSON one by one, and return its metadata. Raises KeyError, ValueError.

    The API server writes ``items`` last, and no spaces.
    """
    head, mark, _ = text.partition('"items":')
    at = len(head) + len(mark)
    if not mark or not text.startswith(("[", "null"), at):
        raise ValueError("not a list")
    metadata: dict[str, Any] = json.loads(f"{head}{mark}[]}}")["metadata"]
    decoder = json.JSONDecoder()
    at += 1
    while text.startswith("{", at) or text.startswith(",", at):
        item, at = decoder.raw_decode(text, at + text.startswith(",", at))
        yield item
    if not text.startswith(("]", "ull"), at):
        raise ValueError("it has no end")
    return metadata


class Client:
    """A client with one connection to an API server, opened on demand. Not for use by several threads at once."""

    def __init__(self, access: Access, *, agent: str = "node-agent", timeout: float = TIMEOUT) -> None:
        self.access = access
        self._agent, self._timeout = agent, timeout
        self._connection: http.client.HTTPSConnection | None = None
        self._sock: socket.socket | None = None
        # The server's clock at its last answer, in seconds since the epoch; None before the first one.
        self.served_at: float | None = None
        self._until = math.inf  # when the request in progress must have ended, on the monotonic clock

    @classmethod
    def from_kubeconfig(cls, path: Path, *, agent: str = "node-agent", timeout: float = TIMEOUT) -> Self:
        """Return a client for a kubeconfig's current context. Raises NodeError (``kube.config``)."""
        return cls(kubeconfig.load(path), agent=agent, timeout=timeout)

    @classmethod
    def in_cluster(cls, *, agent: str, directory: Path = _SERVICE_ACCOUNT, timeout: float = TIMEOUT) -> Self:
        """Return a client with a pod's service account. Raises NodeError (``kube.config``) outside of a pod."""
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
        if not host or not port:
            raise NodeError("kube.config", "not in a pod: KUBERNETES_SERVICE_HOST is not set")
        host = f"[{host}]" if ":" in host else host
        authority, token = Pem(path=directory / "ca.crt"), Pem(path=directory / "token")
        return cls(Access(f"https://{host}:{port}", authority, token=token), agent=agent, timeout=timeout)

    def patch_condition(
        self,
        node: str,
        type: str,
        status: str,
        reason: str,
        message: str,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str | None] | None = None,
        since: str = "",
    ) -> None:
        """Set one condition, labels and annotations (None removes one) of a node, in one request.

        ``since`` as in ``condition``. Raises KubeError; retrying is up to the caller.
        """
        changed = condition(type, status, reason, message, since=since)
        body: dict[str, Any] = {"status": {"conditions": [changed]}}
        metadata = {"labels": labels, "annotations": annotations}
        if changes := {name: dict(values) for name, values in metadata.items() if values}:
            body["metadata"] = changes
        self.request("PATCH", f"{path_of_node(node)}/status", body, STRATEGIC_MERGE)

    def node(self, name: str) -> dict[str, Any]:
        """Return a Node object. Raises KubeError."""
        return self.request("GET", path_of_node(name))

    def request(self, method: str, path: str, body: Any = None, content_type: str = _JSON) -> dict[str, Any]:
        """Send one request and return the server's answer. Raises KubeError."""
        try:
            with (
                self._ended_after(self._timeout),
                self._answered(method, path, body, content_type, self._timeout) as answer,
            ):
                document: dict[str, Any] = json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise KubeError(f"{method} {path}: the answer broke off: {error}") from error
        return document

    def find(self, path: str) -> dict[str, Any] | None:
        """Return an object, None if it doesn't exist. Raises KubeError."""
        try:
            return self.request("GET", path)
        except KubeError as error:
            if error.status != NOT_FOUND:
                raise
            return None

    def text(self, path: str, accept: str = _JSON) -> str:
        """Return the server's answer to a GET, as text. Raises KubeError."""
        try:
            with (
                self._ended_after(LONGEST_LIST),
                self._answered("GET", path, None, "", self._timeout, accept) as answer,
            ):
                return answer.read().decode()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise KubeError(f"GET {path}: the answer broke off: {error}") from error

    def each(self, path: str, take: Callable[[dict[str, Any]], None]) -> str:
        """Call ``take`` for each item of a list; return the list's version. Raises KubeError.

        One item at a time: as Python objects, thousands of nodes take four times as much memory as their text.
        """
        try:
            return each_item(self.text(path), take)
        except (KeyError, ValueError) as error:
            raise KubeError(f"GET {path}: the answer is not understood: {error}") from error

    def each_page(
        self, path: str, query: Mapping[str, str], take: Callable[[dict[str, Any]], None], limit: int = 500
    ) -> None:
        """Call ``take`` for each item of a list that is fetched in pages, all of one version. Raises KubeError.

        ``query`` has selectors (``fieldSelector``, ``labelSelector``).
        """
        more = {"limit": str(limit)}
        while True:
            url = f"{path}?{urllib.parse.urlencode({**query, **more})}"
            try:
                metadata = _each_item(self.text(url), take)
            except (KeyError, ValueError) as error:
                raise KubeError(f"GET {path}: the answer is not understood: {error}") from error
            if not (token := metadata.get("continue")):
                return
            more["continue"] = str(token)

    def serves_evictions(self) -> bool:
        """Return whether the server has the eviction API, policy/v1, by discovery as in kubectl. Raises KubeError."""
        resources = self.request("GET", "/api/v1").get("resources") or ()
        return any(
            (r.get("name"), r.get("group"), r.get("version")) == ("pods/eviction", "policy", "v1")
            for r in resources
        )

    def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        """Request the eviction of exactly this pod. Raises KubeError.

        409: another pod has its name; 429: a disruption budget; 500: two budgets. A dry run gets the same answers.
        """
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": namespace, "name": name},
            "deleteOptions": {
                "preconditions": {"uid": uid},
                **({"dryRun": ["All"]} if dry_run else {}),
            },
        }
        query = "?dryRun=All" if dry_run else ""
        self.request("POST", f"{path_of_pod(namespace, name)}/eviction{query}", body)

    def watch(self, path: str, *, idle: float) -> Iterator[dict[str, Any]]:
        """Yield the events of a watch until the server ends it. ``idle`` is how long it may be silent, in seconds.

        Raises KubeError for a refusal and for a broken connection, which includes a silence that is too long.
        """
        try:
            with self._answered("GET", path, None, "", idle) as answer:
                while line := answer.readline():
                    event: dict[str, Any] = json.loads(line)
                    yield event
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise KubeError(f"the watch broke off: {error}") from error
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = self._sock = None

    def interrupt(self) -> None:
        """End what another thread is waiting for on this connection; that thread closes it."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                # Not the TLS socket's own method, which takes the session away from the thread that uses it.
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    @contextmanager
    def _ended_after(self, seconds: float) -> Iterator[None]:
        """End what is being done on this connection after that time: a socket's own timeout restarts with each byte."""
        self._until = time.monotonic() + seconds
        timer = threading.Timer(seconds, self.interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._until = math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answered(
        self, method: str, path: str, body: Any, content_type: str, timeout: float, accept: str = _JSON
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Accept": accept, "User-Agent": self._agent}
        if data is not None:
            headers["Content-Type"] = content_type
        if self.access.token:
            headers["Authorization"] = f"Bearer {self.access.token.read().strip()}"
        try:
            answer = self._send(method, path, data, headers, timeout)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise KubeError(f"{method} {self.access.server}{path}: {error}") from error
        with contextlib.suppress(TypeError, ValueError):  # a proxy may have left it out
            self.served_at = parsedate_to_datetime(answer.headers.get("Date") or "").timestamp()
        if answer.status >= 300:
            (message, causes), later = _said(answer), fetch.retry_after(answer.headers, time.time())
            self.close()
            raise KubeError(f"{method} {path}: {answer.status} {message}", answer.status, later, causes)
        return answer

    def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout: float
    ) -> http.client.HTTPResponse:
        """Send on the open connection, and retry once on a new one if the server has closed it meanwhile."""
        reused = self._connection is not None
        while True:
            connection = self._connection or self._connect()
            self._connection = connection
            if connection.sock is not None:
                connection.sock.settimeout(timeout)
            connection.timeout = timeout
            try:
                connection.request(method, path, body, dict(headers))
                # Kept here: the connection drops its socket as soon as an answer says that it is the last.
                self._sock = connection.sock
                if time.monotonic() >= self._until:
                    raise TimeoutError("no answer in time")  # the timer found no socket to interrupt
                return connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # That the server closed an idle connection shows only now, in many ways; a timeout isn't one of them.
                # Our requests state the desired result, so sending one twice is as good as once.
                if not reused or isinstance(error, TimeoutError) or time.monotonic() >= self._until:
                    raise
                reused = False

    def _connect(self) -> http.client.HTTPSConnection:
        parts = urllib.parse.urlsplit(self.access.server)
        if not parts.hostname:
            raise NodeError("kube.config", f"{self.access.server!r} names no host")
        context = tls(self.access)
        if self.access.server_name:
            return _Renamed(parts.hostname, parts.port or 443, context, self.access.server_name)
        return http.client.HTTPSConnection(parts.hostname, parts.port or 443, context=context)


class _Renamed(http.client.HTTPSConnection):
    """A connection to a server under one name that proves another (``tls-server-name``)."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext, name: str) -> None:
        super().__init__(host, port, context=context)
        self._context_, self._name = context, name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._context_.wrap_socket(self.sock, server_hostname=self._name)


def tls(access: Access) -> ssl.SSLContext:
    """Return a context that trusts the cluster's authority (or else the system's), with our current certificate."""
    context = fetch.proven_by(access.authority.read())
    if access.certificate and access.key:
        # OpenSSL requires a file; this one is never on a disk.
        fd = os.memfd_create("client-certificate")
        try:
            os.write(fd, f"{access.certificate.read()}\n{access.key.read()}".encode())
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        except (OSError, ssl.SSLError) as error:
            raise NodeError("kube.config", f"the client certificate can't be used: {error}") from error
        finally:
            os.close(fd)
    return context


def path_of_node(name: str) -> str:
    """Return the path of a node in the API."""
    return f"/api/v1/nodes/{urllib.parse.quote(name, safe='')}"


def path_of_pod(namespace: str, name: str) -> str:
    """Return the path of a pod in the API."""
    return f"/api/v1/namespaces/{urllib.parse.quote(namespace, safe='')}/pods/{urllib.parse.quote(name, safe='')}"


def _said(answer: http.client.HTTPResponse) -> tuple[str, dict[str, str]]:
    """Return the message of the server's Status object and its causes, or the status line."""
    try:
        status = json.loads(answer.read(65536))
        causes = (status.get("details") or {}).get("causes") or ()
        messages = {str(cause.get("reason", "")): str(cause.get("message", ""))[:500] for cause in causes}
        return str(status["message"])[:500], messages
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError):
        return answer.reason, {}
