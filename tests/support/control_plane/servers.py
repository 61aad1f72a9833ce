"""A control plane for the lab: Debian's etcd, and the API server and scheduler of some Kubernetes version.

Everything that decides about nodes is as in a real cluster: Node and RBAC authorization, NodeRestriction, client
certificates. Without controllers, everything that needs them is left out: service accounts, the taint that a node
controller removes, bootstrap tokens and the certificates that they are for. With controllers, all of it is there, as
kubeadm sets it up. Everything listens on one address, by default a loopback address of its own, and dies with the
thread that started it; etcd's data is in memory.
"""

from __future__ import annotations

import os
import secrets
import shlex
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Self

from cryptography.hazmat.primitives.asymmetric import ec

from image_builder.errors import CommandError
from image_builder.system import process
from image_builder.system.sandbox import Root, open_root
from tests.support.control_plane.pki import Authority, private_pem
from tests.support.control_plane.programs import ControlPlane as Parts
from tests.support.images.programs import VERSION_FILE

API_PORT, ETCD_PORT, PEER_PORT = 6443, 2379, 2380
ADMINISTRATORS = "system:masters"
NODES = "system:nodes"
_START_SECONDS = 120.0
_HOME, _PROGRAMS = "/run/control-plane", "/run/programs"
# By default, a client of the API server limits itself to 20 or 50 requests a second.
_BRISK = ("--kube-api-qps=1000", "--kube-api-burst=1000")
# Each request is logged once, when it was answered, and a watch also when it began. Health checks don't count as load.
_AUDIT = """\
{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [
 {"level": "None", "nonResourceURLs": ["/healthz*", "/readyz*", "/livez*", "/version"]},
 {"level": "Metadata"}]}
"""


class ControlPlane:
    """A control plane, serving from ``__enter__`` on. Needs a private mount namespace (``namespace.run_isolated``).

    ``parts`` come from ``tests.support.control_plane.programs.obtain``; ``work`` receives logs, ``audit.log`` and
    kubeconfigs. With ``controllers``, kube-controller-manager runs too, and ``work`` also receives the authority's key.
    ``address`` is one of this host's. A node that says nothing for ``grace_seconds`` is lost; without it,
    Kubernetes decides. Raises CommandError with the end of the logs if the API server doesn't come up.
    """

    def __init__(
        self,
        parts: Parts,
        work: Path,
        *,
        controllers: bool = False,
        address: str = "",
        grace_seconds: int | None = None,
    ) -> None:
        self.work = work
        self.address = address or (
            f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"
        )
        self.server = f"https://{self.address}:{API_PORT}"
        self.authority = Authority()
        self.audit = work / "audit.log"
        self._parts, self._controllers, self._grace_seconds = parts, controllers, grace_seconds
        version = (parts.programs[0] / VERSION_FILE).read_text(encoding="utf-8")
        self.minor = int(version.split(".")[1])
        self._stack, self._api = ExitStack(), ExitStack()
        self._root: Root | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._root = stack.enter_context(
                open_root(
                    [self._parts.tree],
                    self.work / "sandbox",
                    binds=self._binds(),
                    writable_binds={_HOME: self.work},
                    network=True,
                )
            )
            self._write_files()
            stack.enter_context(self._running("etcd", self._etcd()))
            stack.callback(self.stop_api)
            self.start_api()
            for name, argv in self._clients():
                stack.enter_context(self._running(name, argv))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start_api(self) -> None:
        """Start the API server and wait until it is ready."""
        argv = self._api_server()
        self._await(self._api.enter_context(self._running("kube-apiserver", argv)), argv)

    def _running(self, name: str, argv: Sequence[str]) -> AbstractContextManager[Popen[bytes]]:
        """Run a program; when asked to end, it doesn't wait for long for those that watch it."""
        log = self.work / f"{name}.log"
        return process.background(self._argv(argv), log=log, stop_seconds=1.0)

    def stop_api(self) -> None:
        """Stop the API server, as an upgrade does; etcd keeps its data."""
        self._api.close()

    def kubeconfig(self, name: str, *groups: str) -> Path:
        """Write a user's kubeconfig; return its path."""
        path = self.work / f"{name.replace(':', '-')}.conf"
        path.write_text(self.authority.kubeconfig(self.server, name, groups=groups), encoding="utf-8")
        path.chmod(0o600)
        return path

    def _binds(self) -> dict[str, Path]:
        return {f"{_PROGRAMS}/{number}": path for number, path in enumerate(self._parts.programs)}

    def _program(self, name: str) -> str:
        """Return a program's path in the root."""
        numbers = [n for n, path in enumerate(self._parts.programs) if (path / name).exists()]
        return f"{_PROGRAMS}/{numbers[0]}/{name}"

    def _clients(self) -> list[tuple[str, list[str]]]:
        """Return the API server's clients on this side, each with its name and its command."""
        programs = [("kube-scheduler", self._scheduler())]
        if self._controllers:
            programs.append(("kube-controller-manager", self._controller_manager()))
        return programs

    def _argv(self, argv: Sequence[str]) -> list[str]:
        assert self._root is not None
        return self._root.argv(argv)

    def _write_files(self) -> None:
        (self.work / "ca.pem").write_bytes(self.authority.certificate)
        (self.work / "audit.json").write_text(_AUDIT, encoding="utf-8")
        self.authority.issue("server", addresses=[self.address]).write(self.work, "server")
        self.authority.issue("kube-apiserver").write(self.work, "etcd-client")
        # The client that requests logs from kubelets, set up as by kubeadm.
        kubelets_client = self.authority.issue("kube-apiserver-kubelet-client", groups=[ADMINISTRATORS])
        kubelets_client.write(self.work, "kubelet-client")
        (self.work / "service-account.key").write_bytes(private_pem(ec.generate_private_key(ec.SECP256R1())))
        self.kubeconfig("system:kube-scheduler")
        if self._controllers:
            self.authority.signed.write(self.work, "ca")
            self.kubeconfig("system:kube-controller-manager")

    def _etcd(self) -> list[str]:
        client, peer = f"https://{self.address}:{ETCD_PORT}", f"http://{self.address}:{PEER_PORT}"
        return [
            "/usr/bin/etcd",
            "--name=lab",
            # On the root's own tmpfs: a test's cluster needn't wait for a disk.
            "--data-dir=/tmp/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=lab={peer}",
            f"--cert-file={_HOME}/server.pem",
            f"--key-file={_HOME}/server-key.pem",
            f"--trusted-ca-file={_HOME}/ca.pem",
            "--client-cert-auth",
        ]

    def _api_server(self) -> list[str]:
        return [
            self._program("kube-apiserver"),
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            f"--secure-port={API_PORT}",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.96.0.0/24",
            f"--etcd-servers=https://{self.address}:{ETCD_PORT}",
            f"--etcd-cafile={_HOME}/ca.pem",
            f"--etcd-certfile={_HOME}/etcd-client.pem",
            f"--etcd-keyfile={_HOME}/etcd-client-key.pem",
            f"--tls-cert-file={_HOME}/server.pem",
            f"--tls-private-key-file={_HOME}/server-key.pem",
            f"--client-ca-file={_HOME}/ca.pem",
            f"--kubelet-client-certificate={_HOME}/kubelet-client.pem",
            f"--kubelet-client-key={_HOME}/kubelet-client-key.pem",
            "--kubelet-preferred-address-types=InternalIP,ExternalIP,Hostname",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--enable-bootstrap-token-auth",
            *self._admission(),
            "--service-account-issuer=https://lab.internal",
            f"--service-account-key-file={_HOME}/service-account.key",
            f"--service-account-signing-key-file={_HOME}/service-account.key",
            f"--audit-policy-file={_HOME}/audit.json",
            f"--audit-log-path={_HOME}/audit.log",
            "--audit-log-maxsize=2000",
            "--profiling=false",
        ]

    def _admission(self) -> list[str]:
        if self._controllers:
            return []
        return ["--disable-admission-plugins=ServiceAccount,TaintNodesByCondition"]

    def _controller_manager(self) -> list[str]:
        return [
            self._program("kube-controller-manager"),
            f"--kubeconfig={_HOME}/system-kube-controller-manager.conf",
            "--leader-elect=false",
            *self._unsecured(),
            "--secure-port=0",
            # Includes those that are off by default; kubeadm turns them on.
            "--controllers=*,bootstrapsigner,tokencleaner",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={_HOME}/service-account.key",
            f"--root-ca-file={_HOME}/ca.pem",
            f"--cluster-signing-cert-file={_HOME}/ca.pem",
            f"--cluster-signing-key-file={_HOME}/ca-key.pem",
            *_BRISK,
            *([f"--node-monitor-grace-period={self._grace_seconds}s"] if self._grace_seconds else []),
        ]

    def _scheduler(self) -> list[str]:
        return [
            self._program("kube-scheduler"),
            f"--kubeconfig={_HOME}/system-kube-scheduler.conf",
            "--leader-elect=false",
            *self._unsecured(),
            "--secure-port=0",
            *_BRISK,
        ]

    def _unsecured(self) -> list[str]:
        """Return the flag that closes the port without TLS; Kubernetes 1.24 removed it."""
        return ["--port=0"] if self.minor < 24 else []

    def _await(self, child: Popen[bytes], argv: Sequence[str]) -> None:
        context = ssl.create_default_context(cafile=os.fspath(self.work / "ca.pem"))
        deadline = time.monotonic() + _START_SECONDS
        reason = ""
        while time.monotonic() < deadline:
            if (ended := child.poll()) is not None:
                raise self._failure(argv, f"ended with status {ended}")
            try:
                with urllib.request.urlopen(f"{self.server}/readyz", context=context, timeout=5):
                    return
            except (urllib.error.URLError, OSError) as error:
                reason = str(error)
            time.sleep(0.1)
        raise self._failure(argv, f"is not ready after {_START_SECONDS:g} s: {reason}")

    def _failure(self, argv: Sequence[str], reason: str) -> CommandError:
        logs = "\n".join(f"{n}:\n{process.tail(self.work / f'{n}.log')}" for n in ("etcd", "kube-apiserver"))
        return CommandError(f"the API server {reason}: {shlex.join(argv)}", argv=argv, tail=logs)
