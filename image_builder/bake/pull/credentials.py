"""Credentials for registries: from the environment, or as the Docker client finds them.

They are handed to a runtime over its socket or in files on a tmpfs; they never reach an argument list, a log,
the store or an image.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from image_builder.errors import CommandError, PullError
from image_builder.system import process

# {"registry.example": {"username": "…", "password": "…"}}
VARIABLE = "IMAGE_BUILDER_REGISTRY_AUTH"
# What the Docker client calls Docker Hub when it asks a helper.
_HUB = "https://index.docker.io/v1/"
# A helper may ask a cloud; one that waits for a person at a terminal would wait forever.
_HELPER_SECONDS = 30.0
_NOT_FOUND = "credentials not found in native keychain"
_ACCOUNT = ("username", "password", "IdentityToken")
_TOKEN_USER = "<token>"  # noqa: S105  # the protocol's word for an identity token


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
    # Imported where they are used: a build in which nothing has changed doesn't need them.
    import docker.auth
    from docker.errors import DockerException

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
    except (DockerException, OSError, ValueError) as error:
        raise PullError(f"the Docker client's configuration can't be read: {type(error).__name__}") from None
    server = _HUB if registry == "docker.io" else registry
    if (name := config.get_credential_store(server)) and (entry := _ask_helper(name, server)):
        if entry["Username"] == _TOKEN_USER:
            return Credentials("", "", entry["Secret"])
        return Credentials(entry["Username"], entry["Secret"])
    for known, account in config.auths.items():
        if account and docker.auth.resolve_index_name(known) == registry:
            return Credentials(*(str(account.get(key) or "") for key in _ACCOUNT))
    return None


def _ask_helper(name: str, server: str) -> dict[str, str] | None:
    """Return a credential helper's answer, or None if it knows nothing about a server. Raises PullError.

    Its output is never reported, since it may be the secret. It runs in the caller's environment, which helpers read.
    """
    program = f"docker-credential-{name}"
    reason = "its answer is not the protocol's JSON"
    try:
        done = process.run(
            [program, "get"], input=server, env=os.environ, timeout=_HELPER_SECONDS, ok=range(-64, 256)
        )
        if done.returncode == 0:
            answer = json.loads(done.stdout)
            if isinstance(answer, Mapping) and {"Username", "Secret"} <= answer.keys():
                found = {key: str(answer[key]) for key in ("Username", "Secret")}
                return found if any(found.values()) else None
        elif _NOT_FOUND in done.stdout:
            return None
        else:
            reason = f"exit status {done.returncode}"
    except ValueError:
        pass
    except CommandError as error:
        reason = error.message.partition(": docker-credential")[0]
    raise PullError(
        f"the credential helper for {server} failed: {reason}",
        hint=f"see what it says: echo {server} | {program} get",
    ) from None


def docker_header(credentials: Credentials | None) -> dict[str, str]:
    """Return the header in which Docker's API expects credentials."""
    if credentials is None:
        return {}
    auth = {"username": credentials.username, "password": credentials.password}
    if credentials.token:
        auth = {"identitytoken": credentials.token}
    import docker.auth

    encoded: bytes = docker.auth.encode_header(auth)
    return {"X-Registry-Auth": encoded.decode("ascii")}
