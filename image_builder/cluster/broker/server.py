"""The broker's one endpoint: ``POST /token``, over TLS. Each such request logs one line, which contains no secret."""

from __future__ import annotations

import collections
import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from image_builder.cluster.broker import attestation, identity, policy, tokens
from image_builder.cluster.broker.config import Config, Pool
from image_builder.cluster.broker.keys import Keys
from image_builder.cluster.broker.policy import Request
from image_builder.cluster.broker.refusal import RefusedError, forbidden, unproven
from image_builder.cluster.limits import Limiter, whole_seconds
from image_builder.errors import HostError
from image_builder.node.errors import NodeError
from image_builder.node.net import serving
from image_builder.node.net.kube import Client, KubeError
from image_builder.text import stamp

Tell = Callable[[dict[str, Any]], None]
"""Takes one line of the audit log, as an object."""
# Seconds until a node retries if the API server doesn't answer.
_CLUSTER_PAUSE = 5.0
# Seconds, too: the metadata service may answer with the document of an earlier request.
_NONCE_PAUSE = 2.0


class Clients:
    """Connections to the API server, each used by one thread at a time and then by the next."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self._idle: collections.deque[Client] = collections.deque()

    @contextmanager
    def one(self) -> Iterator[Client]:
        """Lend a connection. Raises NodeError."""
        try:
            client = self._idle.pop()
        except IndexError:
            client = self._connect()
        try:
            yield client
        finally:
            self._idle.append(client)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class Certificate:
    """The broker's certificate. Changed files are loaded; if that fails, the previous certificate stays in use."""

    def __init__(self, certificate: Path, key: Path, tell: Callable[[str], None]) -> None:
        self._paths, self._tell = (certificate, key), tell
        self._stamps = self._read_stamps()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection. Only for the accepting thread."""
        if (stamp := self._read_stamps()) != self._stamps:
            self._stamps = stamp
            try:
                self._context = self._load()
            except HostError as error:
                self._tell(error.message)
        return self._context

    def _read_stamps(self) -> list[tuple[int, int] | None]:
        stamps: list[tuple[int, int] | None] = []
        for path in self._paths:
            try:
                now = path.stat()
                stamps.append((now.st_ino, now.st_mtime_ns))
            except OSError:
                stamps.append(None)
        return stamps

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(*self._paths)
        except (OSError, ValueError) as error:
            raise HostError(f"{self._paths[0]} with {self._paths[1]} can't be served by: {error}") from error
        return context


class Broker:
    """Decides about requests. Thread-safe."""

    def __init__(self, config: Config, keys: Keys, clients: Clients) -> None:
        self.keys = keys
        self._config, self._clients = config, clients
        self._documents = attestation.Rules(
            attestation.load_authorities(Path(config.attestation.authorities)),
            config.attestation.names,
            config.attestation.subscriptions,
            config.identity.leeway_seconds,
        )
        # All replicas serve with the same key, and nobody else has it.
        self._nonces = attestation.Nonces(Path(config.listen.key).read_bytes)
        self._machines = Limiter(config.limits.node.burst, config.limits.node.per_second)
        self._pools = Limiter(config.limits.pool.burst, config.limits.pool.per_second)

    def answer(self, authorization: str, body: bytes, entry: dict[str, Any]) -> dict[str, str]:
        """Return the answer to a request: a nonce, or a token for a document with that nonce. Raises RefusedError.

        Nothing in a request is believed or logged before its token is verified; ``entry`` gets what becomes known.
        """
        kind, _, proof = authorization.partition(" ")
        if kind.lower() != "bearer" or not proof:
            raise unproven("token.none", "no bearer token")
        caller = identity.verify(proof.strip(), self.keys.find, self._config.identity, time.time())
        entry.update(oid=caller.object_id, mirid=caller.resource)
        request = policy.parse(body)
        entry.update(node=request.node, vm_id=request.vm_id, boot_id=request.boot_id)
        pool = policy.decide(self._config.pools, caller, request)
        entry.update(pool=pool.name)
        now = time.time()
        try:
            if request.document is None:
                return {"nonce": self._nonces.current(request.vm_id, request.node, now)}
            nonce = self._proven_nonce(request, request.document, now)
        except OSError as error:
            raise RefusedError(503, "nonce", "no key for nonces", _CLUSTER_PAUSE) from error
        self._slow_down(request.vm_id, pool.name)
        issued = self._issue(request, nonce, pool)
        entry.update(token_id=issued.id)
        return {"token": issued.text, "expires": stamp(issued.expires)}

    def _proven_nonce(self, request: Request, document: str, now: float) -> str:
        """Return the nonce with which a document proves that this machine is asking now, for this node.

        Raises RefusedError (401, 403, 409).
        """
        machine = attestation.verify(document, self._documents, now)
        if machine.vm_id != request.vm_id:
            raise forbidden("document.machine", "the attested document is of another machine")
        if not self._nonces.is_valid(machine.nonce, request.vm_id, request.node, now):
            raise RefusedError(
                409, "document.nonce", "the attested document is of another nonce", _NONCE_PAUSE
            )
        return machine.nonce

    def _slow_down(self, vm_id: str, pool: str) -> None:
        # Limited by the proven machine, so that none can use up another's share.
        now = time.monotonic()
        for scope, limiter, key in (("node", self._machines, vm_id), ("pool", self._pools, pool)):
            if wait := limiter.take(key, now):
                raise RefusedError(429, f"limit.{scope}", f"too many requests for the {scope} {key}", wait)

    def _issue(self, request: Request, nonce: str, pool: Pool) -> tokens.Issued:
        ends = self._config.tokens
        grant = tokens.Grant(
            request.node, request.vm_id, nonce, pool.name, pool.groups, ends.seconds, ends.namespace
        )
        try:
            with self._clients.one() as client:
                return tokens.issue(client, grant, time.time())
        except KubeError as error:
            # Also for 403: it is the broker that lacks the right, and its operator can change that while nodes wait.
            status = f" ({error.status})" if error.status else ""
            message = f"the API server refused it{status}"
            raise RefusedError(503, "cluster", message, error.retry_after or _CLUSTER_PAUSE) from error
        except NodeError as error:
            raise RefusedError(503, "cluster", "the API server can't be reached", _CLUSTER_PAUSE) from error


def handler(broker: Broker, tell: Tell) -> type[serving.Handler]:
    """Return the class that answers requests."""

    class Door(serving.Handler):
        server_version = "image-builder-broker"

        def respond(self) -> None:
            path = self.path.partition("?")[0]
            if (self.command, path) == ("GET", "/healthz"):
                is_ready = broker.keys.is_ready()
                self.answer(200 if is_ready else 503, {"ready": is_ready})
                return
            began = time.monotonic()
            entry: dict[str, Any] = {"client": str(self.client_address[0])}
            try:
                _check_door(self.command, path)
                value = broker.answer(self.headers.get("Authorization", ""), self._body(), entry)
            except RefusedError as error:
                cause = error.__cause__
                why = {"cause": str(cause)[:300]} if isinstance(cause, NodeError) else {}
                _note(tell, error.status, error.code, {**entry, **why}, began)
                self._refuse(error)
                return
            _note(tell, 200, "", entry, began)
            self.answer(200, value)

        def _body(self) -> bytes:
            length = self.headers.get("Content-Length", "")
            if not (length.isascii() and length.isdigit()) or self.headers.get("Transfer-Encoding"):
                raise RefusedError(411, "body", "no Content-Length")
            # Python doesn't parse numbers with thousands of digits.
            if len(length) > 9 or int(length) > policy.MOST_BYTES:
                raise RefusedError(413, "body", f"more than {policy.MOST_BYTES} bytes")
            return self.body(int(length))

        def _refuse(self, error: RefusedError) -> None:
            headers = {}
            if error.retry_after:
                headers["Retry-After"] = str(whole_seconds(error.retry_after))
            if error.status == 401:
                headers["WWW-Authenticate"] = "Bearer"
            self.answer(error.status, {"error": error.code, "message": error.message}, headers)

    return Door


def _check_door(method: str, path: str) -> None:
    if path != "/token":
        raise RefusedError(404, "path", "only /token exists")
    if method != "POST":
        raise RefusedError(405, "method", "only POST is allowed")


def _note(tell: Tell, status: int, code: str, entry: dict[str, Any], began: float) -> None:
    tell(
        {"at": _now(), "status": status, "code": code, **entry, "seconds": round(time.monotonic() - began, 4)}
    )


def say(tell: Tell, text: str) -> None:
    """Add a sentence for people to the audit log."""
    tell({"at": _now(), "said": text})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def open_server(config: Config, broker: Broker, tell: Tell) -> serving.Server:
    """Return a server that has already bound its port. Raises HostError."""
    listen = config.listen
    certificate = Certificate(Path(listen.certificate), Path(listen.key), partial(say, tell))
    try:
        return serving.Server(
            (listen.address, listen.port),
            handler(broker, tell),
            most=listen.connections,
            seconds=listen.seconds,
            per_address=listen.share,
            tls=certificate.context,
        )
    except OSError as error:
        raise HostError(f"{listen.address}:{listen.port} can't be served: {error.strerror}") from error


def line(value: dict[str, Any]) -> str:
    """Return one line of the audit log."""
    return json.dumps(value, separators=(",", ":")) + "\n"
