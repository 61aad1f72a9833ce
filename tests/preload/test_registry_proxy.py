"""The proxy that goes wrong on purpose, in front of a server of known bytes, as seen by real clients."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import urllib3

from tests.support.registries.origin import (
    BLOB,
    BLOB_PATH,
    MANIFEST,
    MANIFEST_PATH,
    origin,
    write_certificate,
)
from tests.support.registries.plan import Fault, Kind, Upstream
from tests.support.registries.proxy import RegistryProxy

pytestmark = [pytest.mark.root, pytest.mark.process]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("certificate") / "server.pem"
    write_certificate(path)
    return path


@pytest.fixture(scope="module")
def server_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture(scope="module")
def client_tls(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate)


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with origin() as port:
        yield Upstream("127.0.0.1", port, "registry.test:5000")


Start = Callable[..., RegistryProxy]


@pytest.fixture
def start(upstream: Upstream, server_tls: ssl.SSLContext) -> Iterator[Start]:
    """Start a proxy with the given faults; none of its threads may be left in the end."""
    before = threading.active_count()
    with contextlib.ExitStack() as stack:

        def made(*faults: Fault, rate: float | None = None) -> RegistryProxy:
            proxy = RegistryProxy(("127.0.0.1", 0), server_tls, upstream, faults=faults, rate=rate)
            return stack.enter_context(proxy)

        yield made
    # The upstream's threads exit on their own once the proxy's connections are closed.
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


Connect = Callable[[RegistryProxy], http.client.HTTPSConnection]


@pytest.fixture
def connect(client_tls: ssl.SSLContext) -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def made(proxy: RegistryProxy) -> http.client.HTTPSConnection:
            connection = http.client.HTTPSConnection(*proxy.address, context=client_tls, timeout=10)
            return stack.enter_context(contextlib.closing(connection))

        yield made


def _get(
    connection: http.client.HTTPConnection, path: str = BLOB_PATH, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection.request("GET", path, headers=headers)
    with connection.getresponse() as response:
        return response, response.read()


def _raw(proxy: RegistryProxy, *, timeout: float = 10) -> tuple[bytes, OSError | None]:
    """Request the blob; return the body received and what ended it, None for an orderly end (in TLS too)."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    got, ended = b"", None
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(socket.create_connection(proxy.address, timeout=timeout))
        if proxy.tls:
            client = stack.enter_context(context.wrap_socket(client, suppress_ragged_eofs=False))
        client.sendall(f"GET {BLOB_PATH} HTTP/1.1\r\nHost: registry.test\r\n\r\n".encode())
        try:
            while block := client.recv(65536):
                got += block
        except OSError as error:
            ended = error
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nContent-Length: 3000000" in head
    return body, ended


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_answers_come_through_unchanged_on_one_connection(start: Start, connect: Connect) -> None:
    proxy = start()
    client = connect(proxy)
    assert _get(client)[1] == BLOB
    response, part = _get(client, Range="bytes=2999000-")
    assert (response.status, part) == (206, BLOB[2_999_000:])
    assert response.headers["Content-Range"] == "bytes 2999000-2999999/3000000"
    client.request("HEAD", BLOB_PATH)
    with client.getresponse() as head:
        assert (head.headers["Content-Length"], head.read()) == ("3000000", b"")
    assert _get(client, "/v2/chunked")[1] == b"abcdefg"
    assert _get(client, MANIFEST_PATH)[1] == MANIFEST
    seen = [(r.method, r.path, r.range, r.status, r.sent) for r in proxy.requests]
    assert seen == [
        ("GET", BLOB_PATH, None, 200, 3_000_000),
        ("GET", BLOB_PATH, "bytes=2999000-", 206, 1000),
        ("HEAD", BLOB_PATH, None, 200, 0),
        ("GET", "/v2/chunked", None, 200, 7),
        ("GET", MANIFEST_PATH, None, 200, len(MANIFEST)),
    ]
    assert proxy.bytes_sent() == 3_001_000
    assert proxy.bytes_sent("/manifests/") == len(MANIFEST)
    times = [time for r in proxy.requests for time in (r.started, r.ended)]
    assert None not in times and times == sorted(times, key=float)  # type: ignore[arg-type]
    assert proxy.peak == 1


@pytest.mark.parametrize("method", ["PUT", "POST", "PATCH"])
def test_uploads_come_through_unchanged(start: Start, connect: Connect, method: str) -> None:
    client = connect(start())
    body = BLOB[:200_000]
    for sent in (body, iter([body[:70_000], body[70_000:]])):  # the second is sent in chunks
        client.request(method, "/v2/app/blobs/uploads/1?a=b", body=sent)
        with client.getresponse() as response:
            assert response.status == 201
            assert response.headers["Location"] == "http://registry.test:5000/next?x=1"
            assert response.read() == f"{method} /v2/app/blobs/uploads/1?a=b ".encode() + body


def test_upstream_with_tls_is_verified_by_its_name(
    server_tls: ssl.SSLContext, client_tls: ssl.SSLContext
) -> None:
    with origin(server_tls) as port:
        for host, status in (("registry.test:5000", 200), ("other.test", 502)):
            upstream = Upstream("127.0.0.1", port, host, client_tls)
            with (
                RegistryProxy(("127.0.0.1", 0), None, upstream) as proxy,
                contextlib.closing(http.client.HTTPConnection(*proxy.address, timeout=10)) as client,
            ):
                assert _get(client)[0].status == status


def test_upstream_that_refuses_gives_502(server_tls: ssl.SSLContext, connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with RegistryProxy(("127.0.0.1", 0), server_tls, Upstream("127.0.0.1", port, "registry.test")) as proxy:
        response, body = _get(connect(proxy))
        assert response.status == 502
        assert "no answer from the registry" in json.loads(body)["errors"][0]["message"]


@pytest.mark.parametrize("after", [0, 1, 1_000_000])
def test_reset_comes_after_the_given_bytes(start: Start, after: int) -> None:
    proxy = start(Fault("reset", after=after))
    body, error = _raw(proxy)
    # Python's TLS doesn't distinguish a reset from the end of a connection; neither is an orderly end of TLS.
    assert isinstance(error, ConnectionResetError | ssl.SSLEOFError)
    assert body == BLOB[:after]
    assert proxy.bytes_sent() == after
    assert proxy.requests[0].ended is not None


def test_reset_is_one_for_tcp(upstream: Upstream) -> None:
    with RegistryProxy(("127.0.0.1", 0), None, upstream, faults=[Fault("reset", after=500_000)]) as proxy:
        body, error = _raw(proxy)
    assert isinstance(error, ConnectionResetError)
    assert body == BLOB[:500_000]


@pytest.mark.parametrize("after", [0, 1_000_000])
def test_short_body_ends_in_an_orderly_way(start: Start, after: int) -> None:
    proxy = start(Fault("short", after=after))
    assert _raw(proxy) == (BLOB[:after], None)
    assert proxy.bytes_sent() == after


def test_short_body_is_an_incomplete_read(start: Start, connect: Connect) -> None:
    client = connect(start(Fault("short", after=10)))
    with pytest.raises(http.client.IncompleteRead):
        _get(client)


def test_stall_sends_the_given_bytes_and_then_nothing(start: Start) -> None:
    proxy = start(Fault("stall", after=100_000))
    body, error = _raw(proxy, timeout=0.5)
    assert isinstance(error, TimeoutError)
    assert body == BLOB[:100_000]
    _until(lambda: proxy.requests[0].ended)
    assert proxy.bytes_sent() == 100_000
    stalled = proxy.requests[0]
    assert stalled.ended and stalled.ended - stalled.started > 0.4


def test_wrong_bytes_have_the_right_length(start: Start, connect: Connect) -> None:
    client = connect(start(Fault("wrong", after=70_000)))
    _, body = _get(client)
    assert len(body) == len(BLOB)
    assert body[:70_000] == BLOB[:70_000]
    assert all(a != b for a, b in zip(body[70_000:], BLOB[70_000:], strict=True))


def test_status_comes_as_the_registry_says_it(start: Start, connect: Connect) -> None:
    proxy = start(
        Fault("status", status=429, headers=(("Retry-After", "2"),), times=1),
        Fault("status", path="/manifests/", method="HEAD"),
        Fault("status", path="/uploads/", method="POST"),
    )
    client = connect(proxy)
    response, body = _get(client)
    assert (response.status, response.headers["Retry-After"]) == (429, "2")
    assert json.loads(body)["errors"][0]["code"] == "TOOMANYREQUESTS"
    client.request("HEAD", MANIFEST_PATH)
    with client.getresponse() as head:
        assert (head.status, head.read()) == (503, b"")
    client.request("POST", "/v2/app/blobs/uploads/", body=BLOB)
    with client.getresponse() as refused:
        assert refused.status == 503
        assert json.loads(refused.read())["errors"][0]["code"] == "UNAVAILABLE"
    assert _get(client)[1] == BLOB
    assert [r.fault for r in proxy.requests] == ["status", "status", "status", None]


def test_redirect_leads_to_itself(start: Start, client_tls: ssl.SSLContext) -> None:
    proxy = start(Fault("redirect_loop"))
    url = f"https://127.0.0.1:{proxy.address[1]}{BLOB_PATH}"
    with urllib3.PoolManager(ssl_context=client_tls) as pool:
        assert pool.request("GET", url, redirect=False).headers["Location"] == url
        with pytest.raises(urllib3.exceptions.MaxRetryError, match="too many redirects"):
            pool.request("GET", url, retries=urllib3.Retry(redirect=3))
    assert [r.status for r in proxy.requests] == [307] * 5


def test_drip_is_slow(start: Start, connect: Connect) -> None:
    proxy = start(Fault("drip", after=2_900_000, rate=200_000), Fault("drip", rate=100, path="/manifests/"))
    client = connect(proxy)
    begun = time.monotonic()
    assert _get(client)[1] == BLOB
    assert time.monotonic() - begun > 0.4  # 100 kB take half a second
    client.request("GET", MANIFEST_PATH)
    with client.getresponse() as response:
        blocks = list(iter(lambda: response.read1(1000), b""))
    assert b"".join(blocks) == MANIFEST and len(blocks) > 1


def test_dropped_connection_gives_no_answer(start: Start, connect: Connect) -> None:
    proxy = start(Fault("drop", times=1))
    client = connect(proxy)
    with pytest.raises(http.client.RemoteDisconnected):
        _get(client)
    assert _get(client)[1] == BLOB
    assert [(r.status, r.sent) for r in proxy.requests] == [(0, 0), (200, len(BLOB))]


def test_plan_counts_and_can_be_changed(start: Start, connect: Connect) -> None:
    proxy = start(Fault("status", skip=1, times=2), Fault("status", status=500, times=1))
    client = connect(proxy)

    def statuses(count: int) -> list[int]:
        return [_get(client, BLOB_PATH, Range="bytes=2999990-")[0].status for _ in range(count)]

    # The second fault applies to the request that the first one lets through.
    assert statuses(5) == [500, 503, 503, 206, 206]
    proxy.faults = (Fault("status", status=502, times=1),)
    assert statuses(2) == [502, 206]
    proxy.faults = [Fault("status", path="/manifests/")]
    assert statuses(1) == [206]
    assert _get(client, MANIFEST_PATH)[0].status == 503


def test_body_not_longer_than_after_comes_whole(start: Start, connect: Connect) -> None:
    client = connect(start(Fault("reset", path="/manifests/", after=len(MANIFEST))))
    assert [_get(client, MANIFEST_PATH)[1] for _ in range(2)] == [MANIFEST] * 2


@pytest.mark.parametrize(
    ("kind", "method"), [("drip", "GET"), ("stall", "HEAD"), ("wrong", "HEAD"), ("drip", "HEAD")]
)
def test_fault_that_cannot_be_is_refused(kind: Kind, method: str) -> None:
    with pytest.raises(ValueError, match="needs a rate|has no body"):
        Fault(kind, method=method)


def test_rate_holds_for_each_connection_alone(start: Start, connect: Connect) -> None:
    proxy = start(rate=6_000_000)

    def seconds(clients: Sequence[http.client.HTTPSConnection]) -> float:
        begun = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            assert all(body == BLOB for _, body in pool.map(_get, clients))
        return time.monotonic() - begun

    one, other = connect(proxy), connect(proxy)
    parallel = min(seconds([one, other]) for _ in range(4))
    assert proxy.peak == 2
    begun = time.monotonic()
    for _ in range(2):
        assert _get(one)[1] == BLOB
    serial = time.monotonic() - begun
    assert serial > 0.8  # 6 MB at 6 MB/s
    assert parallel < 0.75 * serial
    assert proxy.peak == 2


def test_parallel_clients_of_a_limit_are_never_counted_double(start: Start, connect: Connect) -> None:
    proxy = start()
    clients = [connect(proxy) for _ in range(3)]
    turns = itertools.cycle(clients)
    for _ in range(60):  # one after another, each on a different connection
        assert len(_get(next(turns), BLOB_PATH, Range="bytes=2800000-")[1]) == 200_000
    assert proxy.peak == 1


@pytest.mark.parametrize("fault", [Fault("stall", after=10), Fault("drip", rate=1), None])
def test_closing_ends_what_is_under_way(
    upstream: Upstream, server_tls: ssl.SSLContext, connect: Connect, fault: Fault | None
) -> None:
    before = threading.active_count()
    proxy = RegistryProxy(("127.0.0.1", 0), server_tls, upstream, faults=[fault] if fault else [])
    with proxy:
        address = proxy.address
        asked = [connect(proxy) for _ in range(3)]
        for client in asked:
            client.request("GET", BLOB_PATH)  # and read nothing: without a fault, the proxy blocks sending
        connect(proxy).connect()  # idle
        silent = socket.create_connection(address)  # never starts TLS
        _until(lambda: len(proxy.requests) == 3 and (not fault or all(r.status for r in proxy.requests)))
    silent.close()
    assert all(r.ended for r in proxy.requests)
    _until(lambda: threading.active_count() <= before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_clients_that_hang_up_are_no_error(
    start: Start, client_tls: ssl.SSLContext, capfd: pytest.CaptureFixture[str]
) -> None:
    proxy = start(rate=50_000_000)
    get = f"GET {BLOB_PATH} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
    chunked = b"PUT /v2/app/blobs/uploads/1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    length = b"PUT /v2/app/blobs/uploads/1 HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"
    beginnings = [b"", b"GET", get, chunked, chunked + b"1", chunked + b"5\r\nab", length + b"abc"]
    for begin, reset, kind in itertools.product(beginnings, (False, True), (None, "stall", "drip")):
        proxy.faults = [Fault(kind, after=1000, rate=1e6)] if kind else []  # type: ignore[arg-type]
        with (
            socket.create_connection(proxy.address, timeout=10) as raw,
            client_tls.wrap_socket(raw, server_hostname="registry.test") as client,
        ):
            client.sendall(begin)
            if begin == get:
                client.recv(100)
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    for beginning in (b"", b"\x16\x03\x01", get):  # during or instead of the handshake
        with socket.create_connection(proxy.address) as raw:
            raw.sendall(beginning)
    # A file being sent to a client that doesn't read it, and an idle connection, both end with the client.
    _until(lambda: proxy.requests and all(r.ended for r in proxy.requests))
    assert capfd.readouterr() == ("", "")
