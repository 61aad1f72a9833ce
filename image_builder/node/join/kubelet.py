"""The kubelet's files, which its path unit waits for, and the kubelet's progress: certificate, answer, Ready.

The token is in one file, which only root can read and which is removed as soon as the kubelet has its own certificate.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from image_builder.node import child, files, status
from image_builder.node import settings as settings_files
from image_builder.node.errors import NodeError, ProgramError
from image_builder.node.join.codes import JoinError
from image_builder.node.join.config import NodeConfig
from image_builder.node.join.identity import Identity
from image_builder.node.join.record import Done, digest
from image_builder.node.net import fetch, kube, kubeconfig
from image_builder.node.net.kubeconfig import Access
from image_builder.node.net.retry import Deadline

# The agent's own --register-with-taints (``kubelet.env``) may override the one in ``node.env``: it repeats the taints
# in this file.
TAINTS = "join-taints.json"
# Exists while the files are written and until a running kubelet has been restarted: a run that fails or is killed in
# between leaves it, and the next one, which may find the files as they should be, restarts the kubelet.
_UNFINISHED = "kubelet-unfinished"
# The file that image credential providers read (``cloud_config``).
_CLOUD_CONFIG = "azure.json"
_CLOUD_KEYS = (
    "cloud",
    "tenantId",
    "subscriptionId",
    "resourceGroup",
    "location",
    "useManagedIdentityExtension",
    "userAssignedIdentityID",
)
_POLL = 0.5
# The API server is polled rarely, and not by all nodes of a wave at the same moment.
_ASK_SECONDS = 3.0
RESTART = ("systemctl", "--no-block", "try-restart", "kubelet.service")


@dataclass(frozen=True)
class Places(status.Places):
    """Also where the kubelet looks for its files."""

    kubernetes: Path = Path("/etc/kubernetes")
    restart: Sequence[str] = RESTART

    @property
    def config(self) -> Path:
        return self.kubernetes / "kubelet.conf"

    @property
    def bootstrap(self) -> Path:
        return self.kubernetes / "bootstrap-kubelet.conf"


def membership(path: Path, refused: str = "") -> Access | None:
    """Return how the kubelet accesses the API server; None if it has no certificate, or only the refused one.

    A kubelet writes its kubeconfig before it has the certificate that the kubeconfig names.
    """
    try:
        access = kubeconfig.load(path)
        if not access.node or (access.certificate and access.certificate.read() == refused):
            return None
        return access
    except NodeError:
        return None


def environment(identity: Identity, build: str, taints: Sequence[str]) -> str:
    """Return the contents of ``node.env``: the values that differ between nodes.

    ``taints`` are those that the kubelet is already configured with.
    """
    config = identity.config
    arguments = [
        f"--hostname-override={config.name}" if config.name else "",
        f"--cluster-dns={','.join(config.dns)}" if config.dns else "",
        f"--max-pods={config.max_pods}" if config.max_pods else "",
    ]
    if config.taints:
        every = dict.fromkeys([*taints, *map(str, config.taints)])
        arguments.append(f"--register-with-taints={','.join(every)}")
    lines = {
        "KUBELET_NODE_LABELS": ",".join(f"{key}={value}" for key, value in identity.labels(build).items()),
        "KUBELET_NODE_IP": identity.ip,
        "KUBELET_PROVIDER_ID": identity.provider_id,
        "KUBELET_EXTRA_ARGS": " ".join(argument for argument in arguments if argument),
    }
    return "".join(f"{name}={value}\n" for name, value in lines.items() if value)


def cloud_config(identity: Identity) -> str:
    """Return ``azure.json``, which image credential providers use; empty if the configuration names no tenant.

    The keys are those of the cloud provider's configuration (kubernetes-sigs/cloud-provider-azure, ``pkg/azclient`` and
    ``pkg/credentialprovider``). It contains no secret: the metadata service proves the machine's identity.
    """
    azure, machine = identity.config.azure, identity.machine
    if azure is None:
        return ""
    values = (
        machine.cloud,
        azure.tenant_id,
        machine.subscription,
        machine.resource_group,
        machine.region,
        True,
        azure.client_id,
    )
    return json.dumps(dict(zip(_CLOUD_KEYS, values, strict=True)), indent=1) + "\n"


def bootstrap_config(config: NodeConfig, authority: Path, token: str) -> str:
    """Return the kubeconfig with which a kubelet requests its certificate, as JSON, which is valid YAML."""
    value = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bootstrap",
        "clusters": [
            {
                "name": "cluster",
                "cluster": {"server": config.server, "certificate-authority": os.fspath(authority)},
            }
        ],
        "users": [{"name": "bootstrap", "user": {"token": token}}],
        "contexts": [{"name": "bootstrap", "context": {"cluster": "cluster", "user": "bootstrap"}}],
    }
    return json.dumps(value, indent=1) + "\n"


def write(identity: Identity, token: str, build: str, places: Places) -> Done:
    """Write the files that differ; ``token`` is empty for a member. Raises JoinError (81, 82)."""
    # Without either file no kubelet is running, and the path unit will start it.
    may_run = places.config.exists() or places.bootstrap.exists()
    mark = places.run / _UNFINISHED
    is_unfinished = mark.exists()
    try:
        mark.touch()
        changed = _write_all(identity, token, build, places, is_unfinished)
    except OSError as error:
        raise JoinError(81, str(error)) from error
    if (changed or is_unfinished) and may_run:
        try:
            child.run(places.restart)
        except ProgramError as error:
            raise JoinError(82, error.message) from error
    mark.unlink(missing_ok=True)
    key = digest(
        environment(identity, build, settings_files.kubelet_taints(places.etc)),
        identity.config.ca,
        cloud_config(identity),
    )
    return Done(key, f"changed: {', '.join(changed)}" if changed else "nothing changed")


def _write_all(identity: Identity, token: str, build: str, places: Places, is_unfinished: bool) -> list[str]:
    authority = places.kubernetes / "pki/ca.crt"
    own = json.dumps({"taints": list(map(str, identity.config.taints))}, indent=1) + "\n"
    changed = [TAINTS] if files.write_changed(places.etc / TAINTS, own.encode()) else []
    contents: Mapping[Path, str] = {
        authority: identity.config.ca,
        places.kubernetes / "node.env": environment(
            identity, build, settings_files.kubelet_taints(places.etc)
        ),
        places.kubernetes / _CLOUD_CONFIG: cloud_config(identity),
    }
    changed += [
        path.name for path, text in contents.items() if text and files.write_changed(path, text.encode())
    ]
    if identity.config.azure is None and _remove_cloud_config(places.kubernetes / _CLOUD_CONFIG):
        changed.append(_CLOUD_CONFIG)
    if TAINTS in changed or is_unfinished or "join" not in status.read(places.run):
        # This also rewrites the environment that the agent provides to the kubelet.
        section = {
            "state": status.OK,
            "code": "",
            "reason": f"configured to join, generation {identity.config.generation}",
        }
        status.update("join", section, places)
    # This must be last: the kubelet starts when it appears.
    bootstrap = bootstrap_config(identity.config, authority, token).encode()
    if token and files.write_changed(places.bootstrap, bootstrap, 0o600):
        changed.append(places.bootstrap.name)
    return changed


def _remove_cloud_config(path: Path) -> bool:
    """Remove the file that an earlier configuration had written; return whether it was there.

    The cloud's other programs use a file with the same name, but with more keys: that one isn't this program's.
    """
    if set(files.read_json(path)) != set(_CLOUD_KEYS):
        return False
    path.unlink()
    return True


def wait_until_ready(
    places: Places,
    healthz: str,
    boot_id: str,
    deadline: Deadline,
    *,
    refused: str = "",
    pod_network: str = "",
) -> Done:
    """Wait for the certificate, the kubelet and Ready; remove the token. Raises JoinError (81, 91 to 93, 95).

    ``refused`` is a certificate that the API server doesn't accept: the token stays until there is another one.
    ``pod_network`` is where the cluster's network add-on writes its configuration; empty if none is expected.
    """
    while (access := membership(places.config, refused)) is None:
        if not deadline.poll(_POLL):
            raise JoinError(91, _no_certificate(places.config, refused))
    try:
        places.bootstrap.unlink(missing_ok=True)
    except OSError as error:
        raise JoinError(81, f"the bootstrap token can't be removed: {error}") from error
    if not fetch.wait_until_up(healthz, deadline):
        raise JoinError(92, f"{healthz} does not answer 200")
    reason = ""
    while reason := _not_ready(access, deadline):
        if not deadline.poll(_ASK_SECONDS * (0.5 + random.random())):  # noqa: S311 (no secret)
            if pod_network and not _has_network(Path(pod_network)):
                raise JoinError(95, f"no network add-on has written to {pod_network}; {reason}")
            raise JoinError(93, reason)
        access = membership(places.config) or access
    return Done(digest(access.node, boot_id), f"{access.node} is Ready")


def _no_certificate(path: Path, refused: str) -> str:
    # The kubelet requests another certificate only if its own has expired (isClientConfigStillValid).
    if refused and not kubeconfig.has_expired(refused, datetime.now(UTC)):
        return "the API server rejects the kubelet's unexpired certificate: reimage"
    return f"{path} has no certificate: the signing request was not approved or not made"


def _has_network(directory: Path) -> bool:
    """Return whether there is a network configuration that a runtime would load (libcni, ``ConfFiles``)."""
    return directory.is_dir() and any(
        path.suffix in (".conf", ".conflist", ".json") for path in directory.iterdir()
    )


def _not_ready(access: Access, deadline: Deadline) -> str:
    """Return why the API server doesn't report the node as Ready; empty if it does."""
    try:
        with kube.Client(access, timeout=deadline.attempt(kube.TIMEOUT)) as client:
            node = client.node(access.node)
    except NodeError as error:
        return error.message
    conditions = node.get("status", {}).get("conditions", [])
    ready: dict[str, str] = next(
        (condition for condition in conditions if condition.get("type") == "Ready"), {}
    )
    if ready.get("status") == "True":
        return ""
    return f"{access.node} is not Ready: {ready.get('reason', '')}: {ready.get('message', '')}"
