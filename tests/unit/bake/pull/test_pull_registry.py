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
    locate,
)
from image_builder.bake.pull.retry import classify
from image_builder.errors import PullError

REF, PLATFORM = "registry.example/app:1", "linux/amd64"
HOST = "registry.example"
CONFIG = "application/vnd.oci.image.config.v1+json"


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

    def has(self, host: str, layers: int, platform: str = PLATFORM, tag: str = "1") -> str:
        """Give a registry the image with this many layers; return its digest."""
        diff_ids = [f"sha256:{n:064}" for n in range(layers)]
        named = dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False))
        config = json.dumps({**named, "rootfs": {"diff_ids": diff_ids}}).encode()
        digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
        self.answers[host, f"blobs/{digest}"] = config
        return self.puts(
            host,
            {
                "config": {"digest": digest, "mediaType": CONFIG},
                "layers": [{"digest": diff_id, "size": 1} for diff_id in diff_ids],
            },
            tag,
        )

    def puts(self, host: str, document: Mapping[str, Any], tag: str = "1") -> str:
        """Give a registry a manifest or an index; return its digest."""
        data = json.dumps(document).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.answers[host, f"manifests/{tag}"] = self.answers[host, f"manifests/{digest}"] = data
        return digest


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


# -- indexes -----------------------------------------------------------------------------------------------------


def _entries(servers: Servers, *platforms: str, unnamed: bool = False) -> list[dict[str, Any]]:
    """Return an index's entries of images for these platforms; ``unnamed`` ones don't name theirs."""
    entries = []
    for platform in platforms:
        named = dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False))
        entry = {"digest": servers.has(HOST, 1, platform, "other")}
        entries.append(entry if unnamed else {**entry, "platform": named})
    return entries


def _located(servers: Servers, entries: list[Any], platform: str = PLATFORM) -> str:
    servers.puts(HOST, {"manifests": entries})
    return locate(REF, platform, {}).manifest


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
    servers: Servers, wanted: str, names: tuple[str, ...], taken: str
) -> None:
    entries = dict(zip(names, _entries(servers, *names), strict=True))
    for order in itertools.permutations(entries.values()):
        assert _located(servers, list(order), wanted) == entries[taken]["digest"]


def test_what_no_runtime_would_take_is_not_taken(servers: Servers) -> None:
    with pytest.raises(PullError, match="none for linux/amd64; the registry has linux/amd64/v3"):
        _located(servers, _entries(servers, "linux/amd64/v3"))


# What stands in an index beside an image that doesn't name its platform: an attestation, an image for another one, and
# what isn't an image, such as a signature with an empty configuration.
BESIDE: dict[str, list[dict[str, Any]]] = {
    "nothing": [],
    "an attestation": [{"platform": {"os": "unknown", "architecture": "unknown"}, "digest": "sha256:0"}],
    "a null platform": [{"platform": {"os": "linux", "architecture": "arm64"}, "digest": "sha256:0"}],
}


@pytest.mark.parametrize("platform", [{}, {"platform": None}, {"platform": {}}])
@pytest.mark.parametrize("beside", BESIDE)
def test_an_entry_without_a_platform_is_what_its_configuration_says(
    servers: Servers, beside: str, platform: dict[str, Any]
) -> None:
    (entry,) = _entries(servers, PLATFORM, unnamed=True)
    others = _entries(servers, "linux/arm64", "windows/amd64", unnamed=True)
    signature = {
        "config": {"digest": "sha256:1", "mediaType": "application/vnd.oci.empty.v1+json"},
        "layers": [],
    }
    nested = {"manifests": _entries(servers, "linux/s390x", unnamed=True)}
    strange = [{"digest": servers.puts(HOST, document)} for document in (signature, nested)]
    for order in itertools.permutations([{**entry, **platform}, *others, *strange, *BESIDE[beside]]):
        assert _located(servers, list(order)) == entry["digest"]
        assert _located(servers, [*order, *_entries(servers, PLATFORM)])


def test_an_entry_that_names_the_platform_goes_before_one_that_does_not(servers: Servers) -> None:
    (named,) = _entries(servers, "linux/amd64/v1")
    assert _located(servers, [*_entries(servers, PLATFORM, unnamed=True), named]) == named["digest"]


def test_an_index_in_an_index_is_looked_into(servers: Servers) -> None:
    (entry,) = _entries(servers, PLATFORM)
    inner = servers.puts(HOST, {"manifests": [entry]})
    assert _located(servers, [{"digest": inner}]) == entry["digest"]
    named = {"digest": inner, "platform": {"os": "linux", "architecture": "amd64"}}
    assert _located(servers, [named]) == entry["digest"]


def test_those_without_a_platform_are_counted(servers: Servers) -> None:
    unnamed = _entries(servers, "linux/arm64", "linux/s390x", unnamed=True)
    with pytest.raises(PullError, match="the registry has linux/arm/v7, 2 without a platform"):
        _located(servers, [*unnamed, *_entries(servers, "linux/arm/v7")])


@pytest.mark.parametrize(
    "document",
    [
        {"manifests": [None]},
        {"manifests": [{}]},
        {"manifests": [{"platform": "linux/amd64", "digest": "sha256:0"}]},
        {"manifests": 7},
        {"config": None, "layers": [1]},
        {"config": {"digest": 5}, "layers": None},
    ],
)
def test_a_malformed_document_is_an_error_of_the_image(servers: Servers, document: dict[str, Any]) -> None:
    servers.puts(HOST, document)
    with pytest.raises(PullError, match=f"^{REF}: |answered 404"):
        locate(REF, PLATFORM, {})
