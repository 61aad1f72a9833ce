"""Kernel settings: what the boot will set, and what the running kernel has."""

from __future__ import annotations

from typing import Any

from questions import boot_sysctls, live_sysctls
from suite import booted, differences, needs, nothing, offline, output, read
from testinfra.host import Host

V = dict[str, Any]
CONNECTIONS = "net.netfilter.nf_conntrack_max"
# By default kube-proxy sets so many connections per core, but at least the fewest; recent releases cap it at the most.
PER_CORE, FEWEST, MOST = 32768, 131072, 1 << 20


def _expected(settings: dict[str, Any]) -> dict[str, str]:
    return {name: " ".join(str(value).split()) for name, value in settings.items()}


@offline
@booted
@needs("system")
def test_sysctls_are_configured(host: Host, v: V) -> None:
    """Every declared kernel setting is applied at boot, and no later file overrides it."""
    assert v["__system_sysctl"], "no kernel settings are declared"
    nothing(differences(_expected(v["__system_sysctl"]), boot_sysctls(host)))


@offline
@booted
@needs("kubernetes", kubelet_protect_kernel_defaults=True)
def test_kubelets_sysctls_are_configured(host: Host, v: V) -> None:
    """The kernel settings that this kubelet refuses to start without are applied at boot."""
    nothing(differences(_expected(v["__kubelet_sysctls"]), boot_sysctls(host)))


@booted
@needs("system")
def test_sysctls_are_live(host: Host, v: V) -> None:
    """The running kernel has every declared setting; it may track more connections, or as many as kube-proxy sets."""
    expected, live = _expected(v["__system_sysctl"]), live_sysctls(host, v)
    declared, actual = (int(values.get(CONNECTIONS, 0)) for values in (expected, live))
    if actual > declared or (actual < declared and _is_kube_proxys(host, actual)):
        expected.pop(CONNECTIONS, None)
    nothing(differences(expected, live))


def _is_kube_proxys(host: Host, connections: int) -> bool:
    """Return whether kube-proxy runs here and this is the limit that it sets by default, even if that is lower."""
    if host.run("pgrep --exact kube-proxy").rc != 0:
        return False
    scaled = max(FEWEST, PER_CORE * int(output(host, "getconf _NPROCESSORS_ONLN")))
    return connections in (scaled, min(scaled, MOST))


@booted
@needs("kubernetes", kubelet_protect_kernel_defaults=True)
def test_kubelets_sysctls_are_live(host: Host, v: V) -> None:
    """The running kernel has the settings that the kubelet checks."""
    expected = _expected(v["__kubelet_sysctls"])
    actual = {name: read(host, f"/proc/sys/{name.replace('.', '/')}").strip() for name in expected}
    nothing(differences(expected, actual))
