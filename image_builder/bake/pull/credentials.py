"""Credentials for registries: from the environment, or as the Docker client finds them.

They are handed to a runtime over its socket or in files on a tmpfs; they never reach an argument list, a log,
the store or an image.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field

import docker.auth
from docker.errors import DockerException

from image_builder.errors import PullError

# {"registry.example": {"username": "…", "password": "…"}}
VARIABLE = "IMAGE_BUILDER_REGISTRY_AUTH"


@dataclass(frozen=True)
class Credentials:
    """A user and a password for one registry; ``token`` is an identity token of a credential helper."""

    username: str
    password: str = field(repr=False)
    token: str = field(default="", repr=False)


def credentials_for(registry: str) -> Credentials | None:
    """Return the credentials for ``registry``, None for anonymous access.

    First IMAGE_BUILDER_REGISTRY_AUTH, then the Docker client's configuration (DOCKER_CONFIG, ~/.docker) with
    its ``credHelpers`` and ``credsStore``. Raises PullError, without any secret in it.
    """
    if inline := os.environ.get(VARIABLE):
        try:
            account = json.loads(inline).get(registry)
            if account:
                return Credentials(str(account["username"]), str(account["password"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise PullError(
                f"{VARIABLE} is not JSON of the form {{registry: {{username, password}}}}"
            ) from None
    try:
        config = docker.auth.load_config()
        entry = config.resolve_authconfig(
            "https://index.docker.io/v1/" if registry == "docker.io" else registry
        )
    except (DockerException, OSError) as error:
        # The library puts what the helper printed into its words, and that may be the secret.
        raise PullError(
            f"the credential helper for {registry} failed: {type(error).__name__}",
            hint=f"see what it says: echo {registry} | docker-credential-NAME get",
        ) from None
    if not entry:
        return None
    return Credentials(
        str(entry.get("username") or entry.get("Username") or ""),
        str(entry.get("password") or entry.get("Password") or ""),
        str(entry.get("identitytoken") or entry.get("IdentityToken") or ""),
    )


def docker_header(credentials: Credentials | None) -> dict[str, str]:
    """Return the header in which Docker's API takes credentials."""
    if credentials is None:
        return {}
    auth = {"username": credentials.username, "password": credentials.password}
    if credentials.token:
        auth = {"identitytoken": credentials.token}
    encoded: bytes = docker.auth.encode_header(auth)
    return {"X-Registry-Auth": encoded.decode("ascii")}
