"""Ask a registry what a tag means: the one place that turns tags into digests, for the lock alone.

A small client of the OCI distribution API. What is pulled later is pulled by a container runtime, by digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3

from image_builder.errors import PullError
from image_builder.lock import LockedImage, LockedLayer
from image_builder.process import environment
from image_builder.pull.credentials import Credentials, credentials_for
from image_builder.pull.reference import Reference, parse

_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_TIMEOUT = urllib3.Timeout(connect=20, read=30)
# Retry-After is honoured, up to the longest wait that makes sense before anything was started.
_RETRIES = urllib3.Retry(
    total=5,
    other=0,  # a certificate that is refused once is refused again
    backoff_factor=0.5,
    backoff_jitter=0.5,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=("GET", "HEAD"),
    raise_on_status=False,
    retry_after_max=120,
)
_NO_LIMIT = 10**9
_LARGEST_DOCUMENT = 8 << 20
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Endpoint:
    """Where the registry called ``host`` is really reached: the lab's has no name in any DNS."""

    host: str
    address: str
    port: int
    ca: Path


Endpoints = Mapping[str, Endpoint]


def locate(ref: str, platform: str, endpoints: Endpoints) -> LockedImage:
    """Return what ``ref`` means now, for one platform.

    Raises PullError: no such image, not let in, none for the platform, not reachable, wrong bytes.
    """
    image = parse(ref)
    client = _Client(image, endpoints.get(image.registry), credentials_for(image.registry))
    try:
        top, digest = client.manifest(image.tag)
        manifest, of_platform = top, digest
        if top.get("mediaType") in _INDEXES or "manifests" in top:
            of_platform = _choose(ref, top, platform)
            manifest, _ = client.manifest(of_platform)
        if "layers" not in manifest or "config" not in manifest:
            raise PullError(
                f"{ref}: {manifest.get('mediaType', 'its manifest')} is of a kind no longer in use"
            )
        config_digest = str(manifest["config"]["digest"])
        config = client.blob(config_digest)
    except urllib3.exceptions.HTTPError as error:
        raise PullError(f"{ref}: {image.registry} can't be reached: {_reason(error)}") from error
    found = f"{config.get('os')}/{config.get('architecture')}"
    if platform.split("/")[:2] != found.split("/"):
        raise PullError(f"{ref}: is for {found}, not for {platform}", hint="choose a tag for this platform")
    diff_ids = config.get("rootfs", {}).get("diff_ids", [])
    if len(diff_ids) != len(manifest["layers"]):
        raise PullError(
            f"{ref}: its configuration names {len(diff_ids)} layers, its manifest {len(manifest['layers'])}"
        )
    layers = [
        LockedLayer(digest=str(layer["digest"]), size=int(layer["size"]), diff_id=str(diff_id))
        for layer, diff_id in zip(manifest["layers"], diff_ids, strict=True)
    ]
    return LockedImage(
        ref=ref, platform=platform, digest=digest, manifest=of_platform, config=config_digest, layers=layers
    )


def retry_after(ref: str, digest: str, endpoints: Endpoints) -> float:
    """Ask the registry how long it wants to be left alone: seconds, 0 when it answers.

    Runtimes hand on that it said 429, but not for how long.
    """
    image = parse(ref)
    try:
        client = _Client(image, endpoints.get(image.registry), credentials_for(image.registry))
        answer = client.ask("HEAD", f"manifests/{digest}", retries=False)
    except (urllib3.exceptions.HTTPError, PullError):
        return 0.0
    if answer.status != 429:
        return 0.0
    seconds: float | None = urllib3.Retry(retry_after_max=_NO_LIMIT).get_retry_after(answer)
    return float(seconds or 0.0)


def _choose(ref: str, index: Mapping[str, Any], platform: str) -> str:
    """Return the digest of the manifest for ``platform``."""
    offered = []
    for entry in index.get("manifests", []):
        of = entry.get("platform", {})
        name = "/".join(p for p in (of.get("os"), of.get("architecture"), of.get("variant")) if p)
        if name == platform or (name.startswith(f"{platform}/") and platform.count("/") == 1):
            return str(entry["digest"])
        if "unknown" not in name:
            offered.append(name)
    raise PullError(f"{ref}: none for {platform}; the registry has {', '.join(sorted(offered)) or 'none'}")


def _reason(error: urllib3.exceptions.HTTPError) -> str:
    return str(getattr(error, "reason", None) or error)


class _Client:
    """The API of one repository."""

    def __init__(self, image: Reference, endpoint: Endpoint | None, credentials: Credentials | None) -> None:
        self.image = image
        self.credentials = credentials
        self.headers = {"Accept": ", ".join((*_INDEXES, *_MANIFESTS))}
        if endpoint:
            self.pool: urllib3.PoolManager = urllib3.PoolManager(
                ca_certs=str(endpoint.ca),
                server_hostname=endpoint.host,
                assert_hostname=endpoint.host,
                timeout=_TIMEOUT,
            )
            self.base = f"https://{endpoint.address}:{endpoint.port}"
            self.headers["Host"] = endpoint.host
        else:
            self.base = f"https://{image.api_host}"
            self.pool = _pool(self.base)

    def manifest(self, what: str) -> tuple[dict[str, Any], str]:
        """Return a manifest by tag or digest, and its digest; raises PullError."""
        data = self._get(f"manifests/{what}")
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if what.startswith("sha256:") and digest != what:
            raise PullError(f"{self.image}: the registry gave {digest} for {what}")
        return self._json(data), digest

    def blob(self, digest: str) -> dict[str, Any]:
        """Return a small blob that is JSON; raises PullError."""
        data = self._get(f"blobs/{digest}")
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise PullError(f"{self.image}: the registry gave other bytes than those of {digest}")
        return self._json(data)

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise PullError(f"{self.image}: {self.image.registry} did not answer with JSON")
        return found

    def _get(self, path: str) -> bytes:
        answer = self.ask("GET", path)
        if answer.status == 401:
            self._log_in(answer.headers.get("WWW-Authenticate", ""))
            answer = self.ask("GET", path)
        if answer.status != 200:
            raise PullError(f"{self.image}: {self._refusal(answer)}", hint=_HINTS.get(answer.status))
        return answer.data

    def ask(self, method: str, path: str, *, retries: bool = True) -> urllib3.BaseHTTPResponse:
        answer = self.pool.request(
            method,
            f"{self.base}/v2/{self.image.api_name}/{path}",
            headers=self.headers,
            retries=_RETRIES if retries else False,
        )
        if len(answer.data) > _LARGEST_DOCUMENT:
            raise PullError(f"{self.image}: {path} is too large to be what it should be")
        return answer

    def _refusal(self, answer: urllib3.BaseHTTPResponse) -> str:
        try:
            told = json.loads(answer.data)["errors"][0]
            words = str(told.get("message") or told.get("code"))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            words = answer.reason or ""
        return f"{self.image.registry} says {answer.status} {words}".rstrip()

    def _log_in(self, challenge: str, *, retries: bool = True) -> None:
        """Get what the registry asks for: the password itself, or a token for it."""
        kind = challenge.partition(" ")[0].lower()
        asked = dict(_CHALLENGE.findall(challenge))
        if kind == "basic" and self.credentials:
            self.headers["Authorization"] = _basic(self.credentials)
            return
        if kind != "bearer" or not asked.get("realm", "").startswith("https://"):
            return
        service = asked.get("service", "")
        answer = self._ask_for_token(asked["realm"], service, _RETRIES if retries else False)
        if answer.status != 200:
            raise PullError(f"{self.image}: {asked['realm']} says {answer.status}: not let in")
        told = self._json(answer.data)
        self.headers["Authorization"] = f"Bearer {told.get('token') or told.get('access_token')}"

    def _ask_for_token(
        self, realm: str, service: str, retries: urllib3.Retry | bool
    ) -> urllib3.BaseHTTPResponse:
        """Ask for a token to pull with, as whoever we are.

        An identity token is what `az acr login` and credential helpers leave instead of a password; it is exchanged as
        OAuth 2.0 has it (distribution's "Docker Registry v2 authentication using OAuth2").
        """
        fields = {"service": service, "scope": f"repository:{self.image.api_name}:pull"}
        pool = _pool(realm)
        if self.credentials and self.credentials.token:
            fields |= {"grant_type": "refresh_token", "client_id": "image-builder"}
            fields["refresh_token"] = self.credentials.token
            return pool.request(
                "POST", realm, fields=fields, encode_multipart=False, retries=retries, redirect=False
            )
        headers = {"Authorization": _basic(self.credentials)} if self.credentials else {}
        url = f"{realm}?{urllib.parse.urlencode(fields)}"
        return pool.request("GET", url, headers=headers, retries=retries)


_HINTS = {
    401: "credentials come from IMAGE_BUILDER_REGISTRY_AUTH or the Docker client's configuration",
    403: "credentials come from IMAGE_BUILDER_REGISTRY_AUTH or the Docker client's configuration",
    404: "is the tag right, and is it public, or are there credentials for it?",
}


def authorization(ref: str, endpoints: Endpoints) -> str | None:
    """Return the value of the header ``Authorization`` that lets a pull of ``ref`` in; None for anonymous.

    Asks once: the pull that follows sees any other refusal itself. Raises PullError.
    """
    image = parse(ref)
    client = _Client(image, endpoints.get(image.registry), credentials_for(image.registry))
    try:
        answer = client.ask("HEAD", f"manifests/{image.tag}", retries=False)
        if answer.status == 401:
            client._log_in(answer.headers.get("WWW-Authenticate", ""), retries=False)
    except urllib3.exceptions.HTTPError as error:
        raise PullError(f"{image.registry} can't be reached: {_reason(error)}") from error
    return client.headers.get("Authorization")


def _basic(credentials: Credentials) -> str:
    pair = f"{credentials.username}:{credentials.password}".encode()
    return f"Basic {base64.b64encode(pair).decode('ascii')}"


def _pool(url: str) -> urllib3.PoolManager:
    options: dict[str, Any] = {"timeout": _TIMEOUT}
    if ca := environment().get("SSL_CERT_FILE"):
        options["ca_certs"] = ca
    proxies = urllib.request.getproxies_environment()
    host = urllib.parse.urlsplit(url).hostname or ""
    if "https" in proxies and not urllib.request.proxy_bypass(host):
        return urllib3.ProxyManager(proxies["https"], **options)
    return urllib3.PoolManager(**options)
