"""Access to outside servers: through the environment's proxy, with the authorities that this host trusts.

A bake's own downloads and the pulls of the engines in its sandbox go the same way.
"""

from __future__ import annotations

import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3

from image_builder.system.environment import PROXIES, environment

# Where Debian keeps all authorities that its administrator trusts, including a company's own.
_HOST_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True)
class Outbound:
    """The way out that a definition declares: ``proxies`` by variable (``https_proxy``), ``authorities`` (PEM).

    A variable of this host's environment takes precedence over one of ``proxies``; all authorities count.
    """

    proxies: Mapping[str, str] = field(default_factory=dict)
    authorities: bytes = b""

    def variables(self) -> dict[str, str]:
        """Return the proxy variables that apply."""
        here = environment()
        return {**self.proxies, **{name: here[name] for name in PROXIES if name in here}}


NOTHING_DECLARED = Outbound()


def pool(url: str, outbound: Outbound = NOTHING_DECLARED, **options: Any) -> urllib3.PoolManager:
    """Return a pool for requests to the server of ``url``; ``options`` are urllib3's."""
    for variable, option in (("SSL_CERT_FILE", "ca_certs"), ("SSL_CERT_DIR", "ca_cert_dir")):
        if path := environment().get(variable):
            options.setdefault(option, path)
    if outbound.authorities:
        options["ca_cert_data"] = (trusted_authorities() + outbound.authorities).decode()
    parts = urllib.parse.urlsplit(url)
    proxies = {name.removesuffix("_proxy"): value for name, value in outbound.variables().items()}
    proxy = proxies.get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass_environment(parts.hostname or "", proxies):  # type: ignore[attr-defined]
        return urllib3.PoolManager(**options)
    # Other programs accept an address without a scheme, and with a password in it.
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    url, credentials = split_credentials(proxy)
    if credentials:
        options["proxy_headers"] = urllib3.make_headers(proxy_basic_auth=":".join(credentials))
    return urllib3.ProxyManager(url, **options)


def split_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """Return an address without its user and password, and these two, or None if there are none."""
    parts = urllib.parse.urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    name, _, password = user.partition(":")
    bare = urllib.parse.urlunsplit(parts._replace(netloc=host))
    return bare, (urllib.parse.unquote(name), urllib.parse.unquote(password))


def trusted_authorities() -> bytes:
    """Return the certificates (PEM) that this host trusts: those of SSL_CERT_FILE and SSL_CERT_DIR, or its own."""
    variables = environment()
    files = [Path(variables["SSL_CERT_FILE"])] if "SSL_CERT_FILE" in variables else []
    for folder in filter(None, variables.get("SSL_CERT_DIR", "").split(":")):
        files += sorted(path for path in Path(folder).glob("*") if path.is_file())
    certificates = [path.read_bytes().rstrip() + b"\n" for path in files or [_HOST_BUNDLE] if path.exists()]
    # A directory has each certificate twice: under its name, and under its hash.
    return b"".join(dict.fromkeys(certificates))
