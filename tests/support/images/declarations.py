"""Declarations that the lab's images lack: mirrors, a kubelet from a repository, cri-dockerd, Azure's agent.

The roles apply them on top of a worker. Kubernetes' and Mirantis' programs are stand-ins that print their version; the
configuration is real, and so is containerd, which reads it.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile

from tests.support.images.variants import Declaration, StandIn


def _archive(**programs: str) -> bytes:
    """Return a tar archive of programs, with the same bytes each time; ``__`` is a slash, ``_`` a dash."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, text in programs.items():
            info = tarfile.TarInfo(name.replace("__", "/").replace("_", "-"))
            info.size, info.mode = len(text), 0o755
            tar.addfile(info, io.BytesIO(text.encode()))
    return stream.getvalue()


def _program(told: str) -> str:
    return f"#!/bin/sh\necho {told}\n"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


CRICTL = _archive(crictl=_program("crictl version 1.31.0"))
PROVIDER = _program("a stand-in").encode()
CRI_DOCKERD = _archive(cri_dockerd__cri_dockerd=_program("cri-dockerd 0.3.15"))

# Has what the kubelet's package in Kubernetes' repository has.
_KUBELET = StandIn(
    "kubelet", "1.33.9-1.1", "kubernetes", {"usr/bin/kubelet": (0o755, _program("Kubernetes v1.33.9"))}
)
_AGENT_UNIT = "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"
_AGENT = StandIn(
    "waagent",
    "2.13-1",
    "debian",
    {
        "etc/waagent.conf": (0o644, "ResourceDisk.Format=y\n"),
        "usr/lib/systemd/system/walinuxagent.service": (0o644, _AGENT_UNIT),
    },
)
_HELPER = StandIn(
    "docker-credential-helpers",
    "0.9",
    "debian",
    {"usr/bin/docker-credential-pass": (0o755, _program("a stand-in"))},
)

# An authority that signs nothing; its key no longer exists.
CA = """-----BEGIN CERTIFICATE-----
MIIBTDCB8qADAgECAgEBMAoGCCqGSM49BAMCMCQxIjAgBgNVBAMMGUEgY29tcGFu
eSdzIENBLCBmb3IgdGVzdHMwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAw
MDBaMCQxIjAgBgNVBAMMGUEgY29tcGFueSdzIENBLCBmb3IgdGVzdHMwWTATBgcq
hkjOPQIBBggqhkjOPQMBBwNCAAQ95knXqcDV1ZqT8VZQmW4tUv8ykvnVgpAQezgp
kI7SOr6rigMmSYoQbSCTq/tJE+KfYagAgBY0lH6lS3UePVZPoxMwETAPBgNVHRMB
Af8EBTADAQH/MAoGCCqGSM49BAMCA0kAMEYCIQCE9sYxn4rHIU0w8FBnQvQ306de
J57ZERPEaFshGbgAFgIhAJoXFuJ2H1D+gAJWCc8ICObZHrWLcsGiPKFIZcZQTUcL
-----END CERTIFICATE-----
"""

CONTAINERD = Declaration(
    image="worker",
    variables=f"""
container_runtime_engine: containerd
container_runtime_registry_mirrors: {{docker.io: [{{url: "https://mirror.test"}}]}}
kubelet_mode: cluster
kubelet_version: "1.33"
kubelet_source: {{type: repository}}
kubelet_repository: {{uris: ["https://packages.test/kubernetes"], suites: ["/"], signed_by: /usr/share/keyrings/k.gpg}}
kubelet_register_with_taints: [{{key: node.test/new, value: "", effect: NoSchedule}}]
kubelet_crictl: {{url: "https://packages.test/crictl.tar.gz", sha256: {_sha256(CRICTL)}}}
kubelet_image_credential_providers:
  - name: test-provider
    match_images: ["*.registry.test"]
    url: https://packages.test/provider
    sha256: {_sha256(PROVIDER)}
kubelet_feature_gates: {{KubeletEnsureSecretPulledImages: true}}
kubelet_image_credentials_policy: NeverVerifyAllowlistedImages
kubelet_image_credentials_allowlist: [registry.test/team/*]
""",
    layers=("container_runtime", "kubernetes"),
    packages=(_KUBELET,),
    archives=(CRICTL, PROVIDER),
)
DOCKER = Declaration(
    image="worker",
    variables=f"""
azure_guest_agent: true
container_runtime_engine: docker
container_runtime_ca_certificates: {{company: {json.dumps(CA)}}}
container_runtime_proxy: {{https: "http://proxy.test:3128", no_proxy: [.test, 10.0.0.0/8]}}
container_runtime_credential_helpers: {{registry.test: pass}}
container_runtime_credential_helper_packages: [docker-credential-helpers]
container_runtime_cri_dockerd:
  {{version: "0.3.15", url: "https://packages.test/cri-dockerd.tgz", sha256: {_sha256(CRI_DOCKERD)}}}
kubelet_mode: cluster
kubelet_version: "1.31"
kubelet_source: {{type: repository}}
kubelet_repository: {{uris: ["https://packages.test/kubernetes"], suites: ["/"], signed_by: /usr/share/keyrings/k.gpg}}
""",
    layers=("system", "container_runtime"),
    packages=(_AGENT, _HELPER),
    archives=(CRI_DOCKERD,),
    above="node",
)
# With the kubelet that has Docker's runtime built in, the worker's own.
DOCKERSHIM = Declaration(
    image="worker",
    variables="""
kubelet_packages: []
kubelet_source: {type: repository}
kubelet_repository: {uris: ["https://packages.test/kubernetes"], suites: ["/"], signed_by: /usr/share/keyrings/k.gpg}
""",
    layers=("kubernetes",),
    packages=(
        StandIn(
            "kubelet",
            "1.20.15-00",
            "kubernetes",
            {"usr/bin/kubelet": (0o755, _program("Kubernetes v1.20.15"))},
        ),
    ),
    above="node",
)
# The checks that don't apply to any other image whose mutants are run.
SELECTED = {
    "containerd": (
        "test_containerd.py",
        "test_kubelet.py::test_kubelet_is_held",
        "test_kubelet.py::test_kubelet_registers_with_taints",
        "test_kubelet.py::test_crictl_runs",
        "test_kubelet.py::test_credential_providers",
        "test_kubelet.py::test_preloaded_images_need_the_declared_credentials",
    ),
    "docker": (
        "test_container_runtime.py",
        "test_cloud.py::test_agent_leaves_the_local_disk_alone",
    ),
    "dockershim": (
        "test_containerd.py::test_containerd_serves_docker_alone",
        "test_kubelet.py::test_kubelet_spares_the_pause_image",
        "test_kubelet.py::test_kubelet_waits_for_slow_pulls",
    ),
}
DECLARATIONS = {"containerd": CONTAINERD, "docker": DOCKER, "dockershim": DOCKERSHIM}
