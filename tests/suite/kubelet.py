"""Mutations for test_kubelet.py."""

from __future__ import annotations

from typing import Any

from tests.suite.booted import await_port, record_booted
from tests.suite.offline import Mutation, append, change, chmod, chown, given, mkdir, record, remove, write

CONFIG = "/etc/kubernetes/kubelet.yaml"
UNIT = "/etc/systemd/system/kubelet.service"


def field(name: str, value: str) -> Mutation:
    """Replace the value of a field of the kubelet's configuration, on one line."""
    return change(CONFIG, rf"^{name}:.*(\n[ -].*)*", f"{name}: {value}")


def without(name: str) -> Mutation:
    return change(CONFIG, rf"^{name}:.*\n([ -].*\n)*", "")


def flag(name: str, value: str) -> Mutation:
    return change(UNIT, rf"--{name}=\S+", f"--{name}={value}")


def drop_in(text: str) -> Mutation:
    """Change the unit with a drop-in file."""
    return write("/etc/systemd/system/kubelet.service.d/99-mutation.conf", text)


def program(text: str) -> Mutation:
    """Replace the kubelet with a script."""
    return given(lambda v: write(v["__kubelet_binary"].strip(), text, 0o755))


def _other_engine(variables: dict[str, Any]) -> Mutation:
    """Point the kubelet at an engine that isn't there."""
    if variables["__kubelet_dockershim"]:
        return change(UNIT, "--container-runtime=docker", "--container-runtime=remote")
    if variables["__kubelet_facts"]["runtime_flags"]:
        return flag("container-runtime-endpoint", "unix:///run/other.sock")
    return field("containerRuntimeEndpoint", "unix:///run/other.sock")


OPEN_FLAGS = "--anonymous-auth=true --authorization-mode=AlwaysAllow --read-only-port=10255 --address=0.0.0.0"
# Flags override the file's fields, whatever their position.
OPEN_KUBELET = change(UNIT, r"(--config=\S+)", rf"\1 {OPEN_FLAGS}")
OTHER_COMMAND = "[Service]\nExecStart=\nExecStart=/usr/local/bin/kubelet --v=2\n"

record(
    "test_kubelet_is_the_declared_version", program("#!/bin/sh\necho Kubernetes v1.2.3\n"), program("\x7fELF")
)
record(
    "test_kubelet_is_held",
    change("/var/lib/dpkg/status", r"(^Package: kubelet\n)Status: hold", r"\1Status: install"),
)
record("test_kubelet_pulls_in_parallel", field("serializeImagePulls", "true"), without("serializeImagePulls"))
record("test_kubelet_registry_limits", field("registryPullQPS", "1"), without("registryBurst"))
record(
    "test_kubelet_waits_for_slow_pulls",
    flag("image-pull-progress-deadline", "1m"),
    change(UNIT, r"^.*--image-pull-progress-deadline.*\n", ""),
    drop_in(OTHER_COMMAND),
)
record("test_kubelet_spares_the_pause_image", flag("pod-infra-container-image", "registry.invalid/pause:1"))
record("test_kubelet_asks_the_engine_in_use", given(_other_engine))
record("test_kubelet_leaves_cgroups_to_systemd", field("cgroupDriver", "cgroupfs"))
record(
    "test_kubelet_collects_images_as_declared",
    field("imageGCHighThresholdPercent", "99"),
    field("imageMinimumGCAge", "1s"),
)
record("test_kubelet_reserves_for_the_system", without("kubeReserved"), field("systemReserved", "{cpu: 1m}"))
record("test_kubelet_bounds_pods", field("maxPods", "11"), without("podPidsLimit"))
record("test_kubelet_request_rates", field("eventRecordQPS", "0"), without("kubeAPIQPS"))
record("test_kubelet_reports_its_status_seldom", append(CONFIG, "nodeStatusUpdateFrequency: 10s\n"))
record(
    "test_kubelet_heeds_the_node_agent",
    change(UNIT, r" \\\n +\$NODE_AGENT_KUBELET_ARGS", ""),
    change(UNIT, r"^EnvironmentFile=-/run/node/kubelet.env\n", ""),
    write("/etc/node-agent/kubelet.json", '{"taints": ["a=b:NoExecute"]}\n'),
    OPEN_KUBELET,
)
record(
    "test_kubelet_registers_with_taints",
    given(
        lambda v: (
            flag("register-with-taints", "a=b:NoExecute")
            if v["__kubelet_facts"]["taints_flag"]
            else without("registerWithTaints")
        )
    ),
)
record(
    "test_kubelet_lets_no_stranger_in",
    field("authentication", "{anonymous: {enabled: true}}"),
    field("readOnlyPort", "10255"),
    without("readOnlyPort"),
    OPEN_KUBELET,
)
record("test_kubelet_speaks_modern_tls", field("tlsMinVersion", "VersionTLS10"), without("tlsCipherSuites"))
record(
    "test_kubelet_checks_the_kernel",
    given(lambda v: field("protectKernelDefaults", str(not v["kubelet_protect_kernel_defaults"]).lower())),
    field("makeIPTablesUtilChains", "false"),
)
record(
    "test_kubelet_has_no_other_settings",
    append(CONFIG, "enableServer: false\n"),
    write(CONFIG, "["),
    remove(CONFIG),
    OPEN_KUBELET,
    flag("config", "/etc/kubernetes/other.yaml"),
)
record(
    "test_kubelet_starts_at_boot",
    remove("/etc/systemd/system/multi-user.target.wants/kubelet.service"),
    change(UNIT, "^After=.*", "After=network.target"),
)
record(
    "test_kubelet_files_are_roots_alone",
    chmod(CONFIG, 0o644),
    chown("/var/lib/kubelet", 1, 0),
    given(lambda v: chmod(v["__kubelet_binary"].strip(), 0o777)),
)
record("test_kubelet_has_its_helpers", remove("/usr/sbin/conntrack"), chmod("/usr/bin/socat", 0o644))
record("test_cni_plugins", remove("/usr/lib/cni/loopback"), remove("/opt/cni/bin"))
record("test_crictl_runs", chmod("/usr/local/bin/crictl", 0o644))
record(
    "test_credential_providers",
    change("/etc/kubernetes/credential-providers.yaml", "matchImages", "matchImage"),
    given(lambda v: remove(f"{v['kubelet_image_credential_provider_bin_dir']}/*")),
)
record(
    "test_preloaded_images_need_the_declared_credentials",
    field("imagePullCredentialsVerificationPolicy", "NeverVerify"),
    without("imagePullCredentialsVerificationPolicy"),
    field("preloadedImagesVerificationAllowlist", '["registry.test/*"]'),
    without("preloadedImagesVerificationAllowlist"),
)
record(
    "test_no_pod_is_baked_in",
    given(lambda v: write(f"{v['kubelet_static_pod_path']}/pod.yaml", "kind: Pod\n")),
)
record(
    "test_no_node_is_baked_in",
    write("/etc/kubernetes/node.env", "KUBELET_NODE_IP=192.0.2.1\n"),
    mkdir("/var/lib/kubelet/pods"),
)
record(
    "test_node_tells_which_image_it_runs",
    change("/etc/image-release", "^IMAGE_NAME=.*", 'IMAGE_NAME="other"'),
    change(UNIT, r"--node-labels=\S+", "--node-labels=a=b"),
)

record_booted(
    "test_kubelet_runs",
    "systemctl stop kubelet.service",
    mend=f"systemctl start kubelet.service; {await_port(10250)}",
)
record_booted(
    "test_kubelet_answers_no_stranger",
    f"echo 'KUBELET_EXTRA_ARGS={OPEN_FLAGS}' >> /etc/kubernetes/node.env; systemctl restart kubelet.service; "
    + await_port(10255),
    mend=f"sed -i '$d' /etc/kubernetes/node.env; systemctl restart kubelet.service; {await_port(10250)}",
)
record_booted(
    "test_static_pods_run",
    "systemctl stop kubelet.service; if command -v docker >/dev/null; "
    "then docker ps --quiet --filter label=io.kubernetes.pod.name | xargs docker kill; "
    "else ctr -n k8s.io tasks list --quiet | xargs -n1 ctr -n k8s.io tasks kill --signal KILL; fi",
    mend="systemctl start kubelet.service",
)
