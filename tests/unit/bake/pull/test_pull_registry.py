"""The resolution of a tag: which entry of an index is taken, what is refused, whose failures are reported."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
import urllib3

from image_builder.bake.pull.network import Mirror
from image_builder.bake.pull.reference import parse
from image_builder.bake.pull.registry import (
    _RETRIES,
    RegistryClient,
    _challenges,
    _choose,
    locate,
)
from image_builder.bake.pull.retry import classify
from image_builder.errors import PullError

REF, PLATFORM = "registry.example/app:1", "linux/amd64"


def _index(names: tuple[str, ...]) -> dict[str, list[dict[str, object]]]:
    found: list[dict[str, object]] = []
    for name in names:
        os, architecture, *variant = name.split("/")
        platform = {"os": os, "architecture": architecture, **({"variant": variant[0]} if variant else {})}
        found.append({"digest": f"digest of {name}", "platform": platform})
    return {"manifests": found}


@pytest.mark.parametrize(
    ("wanted", "names", "taken"),
    [
        ("linux/amd64", ("linux/amd64/v3", "linux/amd64", "linux/arm64/v8"), "linux/amd64"),
        ("linux/amd64", ("linux/amd64/v3", "linux/amd64/v1"), "linux/amd64/v1"),
        ("linux/arm64", ("linux/arm64/v9", "linux/arm64/v8"), "linux/arm64/v8"),
        ("linux/arm64/v8", ("linux/amd64", "linux/arm64"), "linux/arm64"),
        ("linux/amd64/v3", ("linux/amd64", "linux/amd64/v3"), "linux/amd64/v3"),
    ],
)
def test_the_platform_that_runtimes_take_is_taken_in_any_order(
    wanted: str, names: tuple[str, ...], taken: str
) -> None:
    for order in itertools.permutations(names):
        assert _choose("x", _index(order), wanted) == f"digest of {taken}"


def test_what_no_runtime_would_take_is_not_taken() -> None:
    with pytest.raises(PullError, match="none for linux/amd64; the registry has linux/amd64/v3"):
        _choose("x", _index(("linux/amd64/v3",)), "linux/amd64")


@pytest.mark.parametrize(
    ("header", "challenges"),
    [
        ("", {}),
        ('Basic realm="Registry"', {"basic": {"realm": "Registry"}}),
        (
            'Bearer realm="https://a.example/token",service="a.example",scope="repository:x/y:pull"',
            {
                "bearer": {
                    "realm": "https://a.example/token",
                    "service": "a.example",
                    "scope": "repository:x/y:pull",
                }
            },
        ),
        # Several challenges, as from a registry behind its own proxy, and values without quotes.
        (
            'Negotiate, Basic realm="a, b", bearer Realm = https://a.example/t , service=x',
            {
                "negotiate": {},
                "basic": {"realm": "a, b"},
                "bearer": {"realm": "https://a.example/t", "service": "x"},
            },
        ),
    ],
)
def test_challenges(header: str, challenges: dict[str, dict[str, str]]) -> None:
    assert _challenges(header) == challenges


class Body(io.BytesIO):
    """The body of a server's response, of which ``taken`` bytes were read."""

    taken = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data

    read1 = read


class Servers:
    """The answers of registries, by host and the end of the path: a document, or a connection error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[tuple[str, str], bytes | urllib3.exceptions.HTTPError] = {}

        def stream(
            client: RegistryClient, method: str, path: str, headers: Mapping[str, str], **_: object
        ) -> urllib3.BaseHTTPResponse:
            what = path.split("/app/", 1)[1]
            answer = self.answers.get((client.registry, what), b"")
            if isinstance(answer, urllib3.exceptions.HTTPError):
                raise answer
            self.body = Body(answer)
            return urllib3.HTTPResponse(
                self.body, status=200 if answer else 404, reason="", preload_content=False
            )

        monkeypatch.setattr(RegistryClient, "stream", stream)

    def has(self, host: str, layers: int) -> None:
        """Give a registry the image with this many layers."""
        diff_ids = [f"sha256:{n:064}" for n in range(layers)]
        config = json.dumps(
            {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": diff_ids}}
        ).encode()
        digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
        manifest: dict[str, Any] = {
            "config": {"digest": digest},
            "layers": [{"digest": diff_id, "size": 1} for diff_id in diff_ids],
        }
        self.answers[host, "manifests/1"] = json.dumps(manifest).encode()
        self.answers[host, f"blobs/{digest}"] = config


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    return Servers(monkeypatch)


def test_an_image_without_layers_is_refused(servers: Servers) -> None:
    servers.has("registry.example", 1)
    assert len(locate(REF, PLATFORM, {}).layers) == 1
    servers.has("registry.example", 0)
    with pytest.raises(PullError, match="registry.example/app:1: has no layers, so there is nothing to pre"):
        locate(REF, PLATFORM, {})


def test_a_foreign_layer_is_refused_and_named(servers: Servers) -> None:
    servers.has("registry.example", 1)
    manifest = json.loads(servers.answers["registry.example", "manifests/1"])  # type: ignore[arg-type]
    manifest["layers"][0]["urls"] = ["https://elsewhere.example/layer"]
    servers.answers["registry.example", "manifests/1"] = json.dumps(manifest).encode()
    with pytest.raises(PullError, match=r"layer 0{12} is foreign: .* at https://elsewhere\.example/layer"):
        locate(REF, PLATFORM, {})


def test_a_document_that_is_too_large_is_read_no_further(servers: Servers) -> None:
    servers.answers["registry.example", "manifests/1"] = b" " * (9 << 20) + b"{}"
    with pytest.raises(PullError, match="manifests/1 is too large to be what it should be"):
        locate(REF, PLATFORM, {})
    assert servers.body.taken == (8 << 20) + 1


def test_mirrors_that_failed_are_named_with_their_reasons_where_the_registry_fails_too(
    servers: Servers,
) -> None:
    unproven = urllib3.exceptions.SSLError("certificate verify failed")
    servers.answers["one.example", "manifests/1"] = unproven
    servers.answers["registry.example", "manifests/1"] = urllib3.exceptions.HTTPError("no route to host")
    mirrors = {"registry.example": [Mirror("https://one.example"), Mirror("https://two.example")]}
    with pytest.raises(PullError) as error:
        locate(REF, PLATFORM, {}, mirrors)
    assert error.value.message.splitlines() == [
        f"{REF}: registry.example can't be reached: no route to host",
        "  mirror https://one.example: one.example can't be reached: certificate verify failed",
        "  mirror https://two.example: two.example answered 404",
    ]
    servers.has("two.example", 1)
    assert locate(REF, PLATFORM, {}, mirrors).ref == REF


def response(status: int, **headers: str) -> urllib3.BaseHTTPResponse:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return urllib3.HTTPResponse(io.BytesIO(), named, status, reason="Too Many", preload_content=False)


def test_a_pause_is_waited_for_and_told_unless_it_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    told: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    retries = _RETRIES.new()
    retries.on_wait = told.append
    patient = response(429, Retry_After="120")
    left = retries.increment("GET", "/v2/", patient, _pool=None)
    left.sleep(patient)
    assert (left.total, slept, told) == (4, [120], [120])
    with pytest.raises(urllib3.exceptions.MaxRetryError):
        left.increment("GET", "/v2/", response(429, Retry_After="121"), _pool=None)
    unclear = response(503, Retry_After="soon")
    left.increment("GET", "/v2/", unclear, _pool=None).sleep(unclear)
    assert slept[1] < 2 and told == [120], "as long as without that header"


def test_a_refusal_names_the_pause() -> None:
    client = RegistryClient(parse(REF), {})
    answer = response(429, Retry_After="100000")
    refusal = "registry.example answered 429 Too Many; it asks for a pause of 100000 s"
    assert client.refusal(answer, b"") == refusal and classify(refusal) == "limited"
    assert client.refusal(response(429), b"") == "registry.example answered 429 Too Many"
