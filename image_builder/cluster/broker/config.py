"""The broker's configuration, in one YAML file. What it doesn't allow is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from image_builder import strict_yaml as settings_file
from image_builder.node.join import binding

_GUID = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
# Kubernetes' own rule (bootstrap token secrets, auth-extra-groups).
_GROUP = r"^system:bootstrappers:[a-z0-9:-]{0,255}[a-z0-9]$"
# Requests of these bootstrap tokens are approved by the controller manager, for any node.
_KUBEADM = "system:bootstrappers:kubeadm:"
# The issuers that Entra ID writes, by the version of the token; a managed identity's is usually the first.
_ISSUERS = ("https://sts.windows.net/{}/", "https://login.microsoftonline.com/{}/v2.0")


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return text


def _unbound(text: str) -> str:
    if text.startswith(binding.PREFIX):
        raise ValueError("is reserved for binding tokens to machines")
    if text.startswith(_KUBEADM):
        raise ValueError("is kubeadm's: the controller manager approves the request of any node with it")
    return text


def _absolute(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("must be an absolute path")
    return text


def _source(text: str) -> str:
    if not text.startswith(("https://", "/")):
        raise ValueError("must be an https address or an absolute path")
    return text


Guid = Annotated[str, Field(pattern=_GUID)]
File = Annotated[str, AfterValidator(_absolute)]
ResourceId = Annotated[
    str, Field(pattern=r"^/subscriptions/[^/]+/resource[gG]roups/[^/]+/providers/[^/]+/[^/]+/[^/]+$")
]


class Strict(BaseModel):
    """Frozen data that accepts neither other types nor unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Listen(Strict):
    """The address, and the certificate that nodes check; both files may be replaced while the broker runs."""

    address: str = "0.0.0.0"  # noqa: S104  # a pod's port, behind a service
    port: int = Field(default=8443, ge=0, le=65535)
    certificate: File
    key: File
    connections: int = Field(default=64, ge=1, le=1024, description="Connections served at once; more wait.")
    share: int = Field(default=16, ge=1, le=1024, description="The most of those from one source address.")
    seconds: float = Field(default=30.0, gt=0, le=300, description="Time limit of a connection.")


class Identity(Strict):
    """The identity provider whose tokens are accepted."""

    tenant: Guid
    audience: str = Field(min_length=1, description="`credentials.resource` of the node configuration.")
    keys: Annotated[str, AfterValidator(_source)] | None = Field(
        default=None, description="JWKS, as address or file; by default Entra ID's of the tenant."
    )
    authority: File | None = Field(
        default=None, description="CA of that address; by default the system's CAs."
    )
    issuers: tuple[str, ...] = Field(default=(), description="Empty: Entra ID's two of the tenant.")
    refresh_seconds: float = Field(default=21600.0, ge=60, description="Maximum age of the keys.")
    leeway_seconds: float = Field(default=60.0, ge=0, le=300, description="Tolerated difference of clocks.")

    @property
    def jwks(self) -> str:
        """Return the address or file of the keys."""
        return self.keys or f"https://login.microsoftonline.com/{self.tenant}/discovery/v2.0/keys"

    @property
    def believed(self) -> tuple[str, ...]:
        """Return the issuers whose tokens are accepted."""
        return self.issuers or tuple(issuer.format(self.tenant) for issuer in _ISSUERS)


class Attestation(Strict):
    """The attested documents that prove machines."""

    authorities: File = Field(
        description="PEM: the CAs of the documents' certificates, intermediate ones too. Read at the start."
    )
    subscriptions: tuple[Guid, ...] = Field(
        min_length=1, description="Subscriptions whose machines may join."
    )
    names: tuple[str, ...] = Field(
        default=("metadata.azure.com",),
        min_length=1,
        description="Names in the documents' certificates; each region has one below it.",
    )


class Pool(Strict):
    """The identities that get tokens of a pool, and its nodes. An identity is in one of the two lists, or in both."""

    name: str = Field(min_length=1, max_length=63)
    nodes: Annotated[str, Field(min_length=1), AfterValidator(_pattern)] = Field(
        description="Names of the pool's nodes: a regular expression for the whole name."
    )
    resources: tuple[ResourceId, ...] = Field(
        default=(), description="`xms_mirid`: scale sets, or user-assigned identities, by resource id."
    )
    objects: tuple[Guid, ...] = Field(default=(), description="`oid`: identities by their object ids.")
    groups: tuple[Annotated[str, Field(pattern=_GROUP), AfterValidator(_unbound)], ...] = Field(
        default=(), description="Further groups of the tokens, beside system:bootstrappers."
    )

    @model_validator(mode="after")
    def _has_somebody(self) -> Self:
        if not self.resources and not self.objects:
            raise ValueError("set `resources` or `objects`: otherwise no node could get a token")
        return self


class Rate(Strict):
    """``burst`` requests at once, then ``per_second``."""

    burst: int = Field(ge=1)
    per_second: float = Field(gt=0)


class Limits(Strict):
    node: Rate = Field(default=Rate(burst=5, per_second=0.1), description="For one machine.")
    pool: Rate = Field(default=Rate(burst=200, per_second=20.0), description="For all nodes of a pool.")


class Tokens(Strict):
    """``seconds``: the lifetime of a token; an hour is the most that the admission policy allows."""

    seconds: int = Field(default=1800, ge=120, le=3600)
    namespace: Literal["kube-system"] = "kube-system"  # other namespaces can't have bootstrap tokens


class Config(Strict):
    listen: Listen
    identity: Identity
    attestation: Attestation
    pools: tuple[Pool, ...]
    limits: Limits = Limits()
    tokens: Tokens = Tokens()

    @model_validator(mode="after")
    def _has_pools(self) -> Self:
        if not self.pools:
            raise ValueError("pools: the list is empty, so no node could get a token")
        names = [pool.name for pool in self.pools]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"pools: {', '.join(repeated)}: repeated")
        return self


def load(path: Path) -> Config:
    """Return the configuration in a file. Raises DefinitionError with every problem."""
    return settings_file.load(path, Config, "broker")
