"""The resolution of tags by their registries: the only place that turns tags into digests, only for the lock.

A small client of the OCI distribution API. Later pulls are done by a container runtime, by digest; a runtime that can't
renew a token pulls through this client (``gateway.py``).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any, Self

import urllib3

from image_builder.bake.lock.model import LockedImage, LockedLayer
from image_builder.bake.pull.credentials import Credentials, credentials_for
from image_builder.bake.pull.network import Endpoints, Mirror, Mirrors
from image_builder.bake.pull.reference import Reference, parse
from image_builder.errors import PullError
from image_builder.system.web import NOTHING_DECLARED, Outbound, pool

_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_CONFIGS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)
_TIMEOUT = urllib3.Timeout(connect=20, read=30)
# A layer of which nothing arrives for this long is requested again from where it broke off.
STREAM = urllib3.Timeout(connect=20, read=60)
_SAME = (("linux/amd64", "linux/amd64/v1"), ("linux/arm64", "linux/arm64/v8"), ("linux/arm", "linux/arm/v7"))
# The longest Retry-After that makes sense before anything has started.
_LONGEST_PAUSE = 120.0
_NO_LIMIT = 10**9
_LARGEST_DOCUMENT = 8 << 20
_DOCUMENT_SECONDS = 120.0
_READS = 3
# A parameter, or else the scheme that the following ones belong to.
_CHALLENGE = re.compile(
    r'(?P<name>[\w-]+)\s*=\s*(?:"(?P<quoted>[^"]*)"|(?P<plain>[^\s,"]+))|(?P<scheme>[\w-]+)'
)


class Patience(urllib3.Retry):
    """Retries that wait for as long as a registry asks, report it, and give up if that is too long."""

    on_wait: Callable[[float], None] | None = None

    def new(self, **kw: Any) -> Self:
        """Return these retries with other counts."""
        retries = super().new(**kw)
        retries.on_wait = self.on_wait
        return retries

    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: urllib3.BaseHTTPResponse | None = None,
        *rest: Any,
        **kw: Any,
    ) -> Self:
        """Return the remaining retries. Raises MaxRetryError, which hands ``response`` to the caller."""
        if response and response.status >= 400 and asked_pause(response) > _LONGEST_PAUSE:
            raise urllib3.exceptions.MaxRetryError(kw["_pool"], url or "")
        return super().increment(method, url, response, *rest, **kw)

    def get_retry_after(self, response: urllib3.BaseHTTPResponse) -> float | None:
        """Return the seconds that a server asks to wait, or None if it doesn't ask or its header is invalid."""
        with suppress(urllib3.exceptions.InvalidHeader):
            return super().get_retry_after(response)
        return None

    def sleep_for_retry(self, response: urllib3.BaseHTTPResponse) -> bool:
        """Wait for as long as a server asks; return whether it asks for a wait."""
        if self.on_wait and (seconds := self.get_retry_after(response)):
            self.on_wait(seconds)
        return super().sleep_for_retry(response)


_RETRIES = Patience(
    total=5,
    other=0,  # a certificate that is refused once is refused again
    backoff_factor=0.5,
    backoff_jitter=0.5,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=("GET", "HEAD"),
    raise_on_status=False,
    retry_after_max=_NO_LIMIT,
)


def locate(
    ref: str,
    platform: str,
    endpoints: Endpoints,
    mirrors: Mirrors | None = None,
    outbound: Outbound = NOTHING_DECLARED,
    on_wait: Callable[[float], None] | None = None,
) -> LockedImage:
    """Return what ``ref`` resolves to now for one platform: at the first mirror that has it, or at its registry.

    ``on_wait`` is called with the seconds of each pause that the registry asks for. Raises PullError if there is no
    such image or none for the platform, access is denied, the registry can't be reached, or the bytes are wrong.
    """
    image = parse(ref)
    failures = []
    for mirror in (mirrors or {}).get(image.registry, ()):
        try:
            with RegistryClient(image, endpoints, mirror, outbound=outbound, retries=False) as client:
                return _locate(ref, platform, client)
        except PullError as error:  # as with a runtime, a mirror that lacks it or doesn't answer is skipped
            failures.append(f"\n  mirror {mirror.url}: {error.message.removeprefix(f'{ref}: ')}")
    try:
        with RegistryClient(image, endpoints, outbound=outbound) as client:
            client.retries = retries = _RETRIES.new()
            retries.on_wait = on_wait
            return _locate(ref, platform, client)
    except PullError as error:
        raise PullError(f"{error.message}{''.join(failures)}", hint=error.hint) from error


def _locate(ref: str, platform: str, client: RegistryClient) -> LockedImage:
    image = client.image
    try:
        top, digest = client.manifest(image.tag)
        manifest, of_platform = top, digest
        if _is_index(top):
            of_platform, manifest = _choose(ref, client, top, platform)
        if "layers" not in manifest or "config" not in manifest:
            raise PullError(f"{ref}: {manifest.get('mediaType', 'its manifest')} has an obsolete format")
        config_digest = str(manifest["config"]["digest"])
        config = client.blob(config_digest)
        own_platform = f"{config.get('os')}/{config.get('architecture')}"
        if platform.split("/")[:2] != own_platform.split("/"):
            raise PullError(
                f"{ref}: is for {own_platform}, not for {platform}", hint="choose a tag for this platform"
            )
        layers = _layers(ref, manifest, config)
        return LockedImage(
            ref=ref,
            platform=platform,
            digest=digest,
            manifest=of_platform,
            config=config_digest,
            layers=layers,
        )
    except urllib3.exceptions.HTTPError as error:
        raise PullError(f"{ref}: {client.unreachable(error)}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PullError(f"{ref}: its manifest is malformed: {error!r}") from error


def _layers(ref: str, manifest: Mapping[str, Any], config: Mapping[str, Any]) -> list[LockedLayer]:
    """Return the layers of a manifest. Raises PullError if engines can't unpack them or don't fetch them alike."""
    layers = manifest["layers"]
    if not layers:
        raise PullError(f"{ref}: has no layers, so there is nothing to preload")
    for layer in layers:
        if urls := layer.get("urls"):
            raise PullError(
                f"{ref}: layer {str(layer['digest'])[7:19]} is foreign: it is kept outside of the registry,"
                f" at {urls[0]}",
                hint="Docker and containerd treat such layers differently; build the image from a base without them",
            )
    diff_ids = config.get("rootfs", {}).get("diff_ids", [])
    if len(diff_ids) != len(layers):
        raise PullError(f"{ref}: its configuration names {len(diff_ids)} layers, its manifest {len(layers)}")
    return [
        LockedLayer(digest=str(layer["digest"]), size=int(layer["size"]), diff_id=str(diff_id))
        for layer, diff_id in zip(layers, diff_ids, strict=True)
    ]


def asked_pause(answer: urllib3.BaseHTTPResponse) -> float:
    """Return the seconds that an answer asks to wait before the next request; 0 for none."""
    return float(_RETRIES.get_retry_after(answer) or 0.0)


def _wish(answer: urllib3.BaseHTTPResponse) -> str:
    """Return, in words, for how long a server that refuses asks to pause."""
    seconds = asked_pause(answer)
    return f"; it asks for a pause of {seconds:.0f} s" if seconds else ""


def _is_index(document: Mapping[str, Any]) -> bool:
    return document.get("mediaType") in _INDEXES or "manifests" in document


def _choose(
    ref: str, client: RegistryClient, index: Mapping[str, Any], platform: str
) -> tuple[str, dict[str, Any]]:
    """Return the manifest for ``platform``, with its digest: the one that the runtimes take, whatever the order.

    An entry's platform is optional. The runtimes take those that name it first; of the others, an image's configuration
    says what it is for. Raises PullError if there is none.
    """
    # A processor's plain name and that of its oldest variant mean the same (containerd's platforms.Normalize).
    wanted = (platform, *(same for pair in _SAME for same in pair if platform in pair))
    offered: dict[str, str] = {}
    unnamed = []
    for entry in index.get("manifests") or ():
        if name := _platform_name(entry.get("platform") or {}):
            offered.setdefault(name, str(entry["digest"]))
        else:
            unnamed.append(str(entry["digest"]))
    for digest in (offered[name] for name in wanted if name in offered):
        manifest, _ = client.manifest(digest)
        return _choose(ref, client, manifest, platform) if _is_index(manifest) else (digest, manifest)
    for digest in unnamed:
        manifest, _ = client.manifest(digest)
        if _is_index(manifest):
            with suppress(PullError):
                return _choose(ref, client, manifest, platform)
        elif _platform_of(client, manifest) in wanted:
            return digest, manifest
    names = sorted(name for name in offered if "unknown" not in name)
    if unnamed:
        names.append(f"{len(unnamed)} without a platform, none of them for {platform}")
    raise PullError(f"{ref}: none for {platform}; the registry has {', '.join(names) or 'none'}")


def _platform_name(platform: Mapping[str, Any]) -> str:
    return "/".join(str(platform[key]) for key in ("os", "architecture", "variant") if platform.get(key))


def _platform_of(client: RegistryClient, manifest: Mapping[str, Any]) -> str:
    """Return the platform in an image's configuration; empty for what isn't an image."""
    config = manifest.get("config") or {}
    if "layers" not in manifest or config.get("mediaType") not in _CONFIGS:
        return ""
    return _platform_name(client.blob(str(config["digest"])))


def _reason(error: urllib3.exceptions.HTTPError) -> str:
    return str(getattr(error, "reason", None) or error)


class RegistryClient:
    """A client for one repository, at its registry or a mirror, with its own connections. Threads may share it."""

    def __init__(
        self,
        image: Reference,
        endpoints: Endpoints,
        mirror: Mirror | None = None,
        *,
        outbound: Outbound = NOTHING_DECLARED,
        retries: bool = True,
        timeout: urllib3.Timeout | None = None,
    ) -> None:
        self.image, self.endpoints, self.outbound = image, endpoints, outbound
        self.server = mirror.server if mirror else f"https://{image.api_host}"
        self.api = mirror.api if mirror else "/v2"
        self.registry = mirror.host if mirror else image.registry
        self.credentials = credentials_for(self.registry)
        self.retries: urllib3.Retry | bool = _RETRIES if retries else False
        self.timeout = timeout or _TIMEOUT
        self._unchecked = bool(mirror and mirror.skip_verify)
        self._authorization: str | None = None
        self._challenge = ""
        self._lock = threading.Lock()
        self._pools: dict[str, tuple[urllib3.PoolManager, str, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for connections, _, _ in self._pools.values():
            connections.clear()

    def path(self, resource: str) -> str:
        """Return the path of a manifest or a blob."""
        return f"{self.api}/{self.image.name}/{resource}"

    def unreachable(self, error: urllib3.exceptions.HTTPError) -> str:
        """Return a connection error in words."""
        return f"{self.registry} can't be reached: {_reason(error)}"

    def local(self, location: str) -> str:
        """Return the target of a redirect: a path if it is within this registry, otherwise the whole address."""
        parts = urllib.parse.urlsplit(location)
        if parts.netloc == urllib.parse.urlsplit(self.server).netloc:
            return urllib.parse.urlunsplit(parts._replace(scheme="", netloc=""))
        return location

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], **options: Any
    ) -> urllib3.BaseHTTPResponse:
        """Send a request to any server: at its known address if it isn't in DNS, otherwise through the proxy."""
        parts = urllib.parse.urlsplit(url)
        site = f"{parts.scheme}://{parts.netloc}"
        if site not in self._pools:
            self._pools[site] = self._pool(site, parts.netloc)
        connections, base, host = self._pools[site]
        options = {"retries": self.retries, "timeout": self.timeout, **options}
        sent = {**headers, "Host": host} if base != site else headers
        return connections.request(method, f"{base}{url.removeprefix(site)}", headers=sent, **options)

    def _pool(self, site: str, host: str) -> tuple[urllib3.PoolManager, str, str]:
        """Return the connections to a server, its address, and the host name that it goes by."""
        endpoint = self.endpoints.get(host)
        if endpoint is None:
            options = {"cert_reqs": "CERT_NONE"} if self._unchecked else {}
            return pool(site, self.outbound, **options), site, host
        connections = urllib3.PoolManager(
            ca_certs=str(endpoint.ca), server_hostname=endpoint.host, assert_hostname=endpoint.host
        )
        return connections, f"https://{endpoint.address}:{endpoint.port}", host

    def manifest(self, reference: str) -> tuple[dict[str, Any], str]:
        """Return a manifest by tag or digest, and its digest; raises PullError."""
        data = self._get(f"manifests/{reference}")
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if reference.startswith("sha256:") and digest != reference:
            raise PullError(f"{self.image}: the registry gave {digest} for {reference}")
        return self._json(data), digest

    def blob(self, digest: str) -> dict[str, Any]:
        """Return a small blob that is JSON; raises PullError."""
        data = self._get(f"blobs/{digest}")
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise PullError(f"{self.image}: the registry gave other bytes than those of {digest}")
        return self._json(data)

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            document = json.loads(data)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise PullError(f"{self.image}: {self.image.registry} did not answer with JSON")
        return document

    def _get(self, resource: str) -> bytes:
        headers = {"Accept": ", ".join((*_INDEXES, *_MANIFESTS))}
        tries = _READS if self.retries else 1
        while True:
            tries -= 1
            with closing(self.stream("GET", self.path(resource), headers, redirect=True)) as answer:
                try:
                    data = self._read(answer, resource)
                except urllib3.exceptions.HTTPError:  # it broke off, which isn't retried automatically
                    if not tries:
                        raise
                    time.sleep(1)
                    continue
                if answer.status != 200:
                    reason = self.refusal(answer, data)
                    raise PullError(f"{self.image}: {reason}", hint=_HINTS.get(answer.status))
                return data

    def _read(self, answer: urllib3.BaseHTTPResponse, resource: str) -> bytes:
        """Return a document, which is small: a server that takes minutes to send it is no better than a silent one."""
        data, deadline = b"", time.monotonic() + _DOCUMENT_SECONDS
        while block := answer.read1(_LARGEST_DOCUMENT + 1):
            data += block
            if len(data) > _LARGEST_DOCUMENT:
                raise PullError(f"{self.image}: {resource} is too large to be what it should be")
            if time.monotonic() > deadline:
                raise PullError(f"{self.image}: {resource} did not come within {_DOCUMENT_SECONDS:g} s")
        return data

    def stream(
        self, method: str, path: str, headers: Mapping[str, str], *, redirect: bool = False
    ) -> urllib3.BaseHTTPResponse:
        """Send a request and return the unread answer, which the caller closes. An expired token is renewed.

        Raises PullError when the registry's own credentials are refused, and urllib3's HTTPError.
        """

        def ask() -> urllib3.BaseHTTPResponse:
            sent = {**headers, "Authorization": used} if used else headers
            url = f"{self.server}{path}"
            return self._send(method, url, sent, redirect=redirect, preload_content=False)

        used = self._authorization
        answer = ask()
        if answer.status in (401, 403):
            try:
                renewed = self._renew(answer.headers.get("WWW-Authenticate", ""), used)
            except BaseException:
                answer.close()
                raise
            if renewed:
                answer.drain_conn()
                used = self._authorization
                answer = ask()
        return answer

    def _renew(self, challenge: str, used: str | None) -> bool:
        """Log in, unless another thread just did; return whether there is a new authorization to try."""
        with self._lock:
            if self._authorization == used:
                self._challenge = challenge or self._challenge
                self._log_in(self._challenge)
            return self._authorization != used

    def refusal(self, answer: urllib3.BaseHTTPResponse, body: bytes) -> str:
        """Return an unexpected answer in words."""
        try:
            error = json.loads(body)["errors"][0]
            message = str(error.get("message") or error.get("code"))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            message = answer.reason or ""
        return f"{self.registry} answered {answer.status} {message}".rstrip() + _wish(answer)

    def _log_in(self, challenge: str) -> None:
        """Get the authorization that the registry wants, a token or the password. Raises PullError if it is refused."""
        challenges = _challenges(challenge)
        bearer = challenges.get("bearer", {})
        if bearer.get("realm", "").startswith("https://"):
            self._authorization = self._token(bearer)
        elif "basic" in challenges and self.credentials:
            self._authorization = _basic(self.credentials)

    def _token(self, challenge: Mapping[str, str]) -> str:
        realm = challenge["realm"]
        answer = self._ask_for_token(challenge)
        if answer.status in (400, 401, 403):
            raise PullError(f"{self.image}: {realm} answered {answer.status}: login refused")
        if answer.status != 200:
            reason = f"{realm} answered {answer.status} {answer.reason or ''}".rstrip()
            raise PullError(f"{self.image}: {reason}{_wish(answer)}")
        document = self._json(answer.data)
        token = document.get("token") or document.get("access_token")
        if not isinstance(token, str):
            raise PullError(f"{self.image}: {realm} answered without a token")
        return f"Bearer {token}"

    def _ask_for_token(self, challenge: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        """Request a token for pulling, with our credentials if there are any.

        The scope is that of the challenge: only a mirror knows what it calls the repository. An identity token is what
        `az acr login` and credential helpers leave instead of a password; it is exchanged by OAuth 2.0 (distribution's
        "Docker Registry v2 authentication using OAuth2").
        """
        realm = challenge["realm"]
        scope = challenge.get("scope") or f"repository:{self.image.name}:pull"
        fields = {"service": challenge.get("service", ""), "scope": scope}
        if self.credentials and self.credentials.token:
            fields |= {"grant_type": "refresh_token", "client_id": "image-builder"}
            fields["refresh_token"] = self.credentials.token
            return self._send("POST", realm, {}, fields=fields, encode_multipart=False, redirect=False)
        headers = {"Authorization": _basic(self.credentials)} if self.credentials else {}
        query = urllib.parse.urlencode(fields)
        return self._send("GET", f"{realm}{'&' if '?' in realm else '?'}{query}", headers)


def _challenges(header: str) -> dict[str, dict[str, str]]:
    """Return the challenges of a WWW-Authenticate header by scheme, in lower case (RFC 9110 11.6.1)."""
    challenges: dict[str, dict[str, str]] = {}
    parameters: dict[str, str] = {}
    for match in _CHALLENGE.finditer(header):
        if match["scheme"]:
            parameters = challenges.setdefault(match["scheme"].lower(), {})
        else:
            parameters[match["name"].lower()] = (
                match["quoted"] if match["quoted"] is not None else match["plain"]
            )
    return challenges


_HINTS = {
    401: "credentials come from IMAGE_BUILDER_REGISTRY_AUTH or the Docker client's configuration",
    403: "credentials come from IMAGE_BUILDER_REGISTRY_AUTH or the Docker client's configuration",
    404: "is the tag right, and is it public, or are there credentials for it?",
}


def _basic(credentials: Credentials) -> str:
    pair = f"{credentials.username}:{credentials.password}".encode()
    return f"Basic {base64.b64encode(pair).decode('ascii')}"
