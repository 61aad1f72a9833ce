"""The documented deployments in a cluster: none has more rights on its machine than it needs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.support.images.builds import REPO


def deployments() -> dict[str, dict[str, Any]]:
    """Return the Deployments of all pages and files, by name."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((REPO / "deploy").glob("*.yml"))]
    for page in sorted((REPO / "docs").rglob("*.md")):
        texts += re.findall(
            r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
    found = [one for text in texts for one in yaml.safe_load_all(text) if isinstance(one, dict)]
    return {one["metadata"]["name"]: one for one in found if one.get("kind") == "Deployment"}


def test_each_deployment_is_found() -> None:
    assert set(deployments()) == {"image-builder-broker", "image-builder-gate"}


@pytest.mark.parametrize("name", deployments())
def test_pods_have_no_rights_on_their_machine(name: str) -> None:
    pod = deployments()[name]["spec"]["template"]["spec"]
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True and context["runAsUser"] > 0 and context["runAsGroup"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["containers"] and not pod.get("initContainers")
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert not [volume for volume in pod.get("volumes", []) if "hostPath" in volume]
