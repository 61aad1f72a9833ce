"""The broker's configuration: what may be omitted, and that no mistake in it is overlooked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builder.cluster.broker.config import Config, load
from image_builder.errors import DefinitionError
from tests.support.azure.attested import SUBSCRIPTION
from tests.support.azure.identities import AUDIENCE, OBJECT, SCALE_SET, TENANT
from tests.support.images.builds import REPO

LEAST: dict[str, Any] = {
    "listen": {"certificate": "/tls/tls.crt", "key": "/tls/tls.key"},
    "identity": {"tenant": TENANT, "audience": AUDIENCE},
    "attestation": {"authorities": "/azure.pem", "subscriptions": [SUBSCRIPTION]},
    "pools": [{"name": "h100", "nodes": "vmss-h100-a[0-9a-z]{6}", "resources": [SCALE_SET]}],
}


def read(tmp_path: Path, value: Any) -> Config:
    path = tmp_path / "broker.yml"
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value))
    return load(path)


def test_what_may_be_left_out(tmp_path: Path) -> None:
    settings = read(tmp_path, LEAST)
    assert settings.identity.jwks == f"https://login.microsoftonline.com/{TENANT}/discovery/v2.0/keys"
    assert settings.identity.believed == (
        f"https://sts.windows.net/{TENANT}/",
        f"https://login.microsoftonline.com/{TENANT}/v2.0",
    )
    assert settings.attestation.names == ("metadata.azure.com",)
    assert (settings.listen.port, settings.tokens.seconds, settings.tokens.namespace) == (
        8443,
        1800,
        "kube-system",
    )


def pool(**parts: Any) -> dict[str, Any]:
    return {**LEAST, "pools": [{**LEAST["pools"][0], **parts}]}


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": ("", "listen"),
    "no YAML": ("a: [", "broker"),
    "a date that is none": ("tokens: 2024-99-99", "broker"),
    "a date as a key": ("2024-01-01: 1", "broker"),
    "an alias of what it is in": ("pools: &a [*a]", "broker"),
    "a limit twice": ("tokens: {seconds: 60, namespace: a, seconds: 3600}", "broker"),
    "no pool": ({**LEAST, "pools": []}, "broker"),
    "a tenant by its name": (
        {**LEAST, "identity": {"tenant": "example.com", "audience": "x"}},
        "identity.tenant",
    ),
    "keys without TLS": (
        {**LEAST, "identity": {**LEAST["identity"], "keys": "http://keys.test/"}},
        "identity.keys",
    ),
    "a relative certificate": ({**LEAST, "listen": {"certificate": "a", "key": "/b"}}, "listen.certificate"),
    "a pattern that is none": (pool(nodes="("), "pools.0.nodes"),
    "a pool of nobody": (pool(resources=[]), "pools.0"),
    "a machine by its name": (pool(resources=["vmss-h100-a"]), "pools.0.resources.0"),
    "an identity in capitals": (pool(objects=[OBJECT.upper()]), "pools.0.objects.0"),
    "a group whose requests are approved unseen": (
        pool(groups=["system:bootstrappers:kubeadm:default-node-token"]),
        "pools.0.groups.0",
    ),
    "a group that Kubernetes refuses": (pool(groups=["system:masters"]), "pools.0.groups.0"),
    "a group that binds a token": (
        pool(groups=["system:bootstrappers:image-builder:node:0"]),
        "pools.0.groups.0",
    ),
    "no proof of machines": ({**LEAST, "attestation": None}, "attestation"),
    "machines of nobody": (
        {**LEAST, "attestation": {**LEAST["attestation"], "subscriptions": []}},
        "attestation.subscriptions",
    ),
    "signers of nobody": (
        {**LEAST, "attestation": {**LEAST["attestation"], "names": []}},
        "attestation.names",
    ),
    "a pool twice": ({**LEAST, "pools": LEAST["pools"] * 2}, "broker"),
    "another namespace": ({**LEAST, "tokens": {"namespace": "default"}}, "tokens.namespace"),
    "a token for a day": ({**LEAST, "tokens": {"seconds": 3601}}, "tokens.seconds"),
    "a rate of nothing": ({**LEAST, "limits": {"pool": {"burst": 0, "per_second": 1}}}, "limits.pool.burst"),
}


@pytest.mark.parametrize(("value", "where"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_told(tmp_path: Path, value: Any, where: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        read(tmp_path, value)
    assert where in [problem.path for problem in caught.value.problems]


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError) as caught:
        read(tmp_path, {**pool(nodes="("), "tokens": {"seconds": 1}})
    assert len(caught.value.problems) == 2


def test_the_documentations_example_is_taken(tmp_path: Path) -> None:
    text = (REPO / "docs/how-to/run-the-token-broker.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (example,) = [block for block in blocks if "audience:" in block and "kind:" not in block]
    assert [pool.name for pool in read(tmp_path, example).pools] == ["h100", "flexible"]
