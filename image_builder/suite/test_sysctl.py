"""Kernel settings: what the boot will set, and what the running kernel has."""

from __future__ import annotations

from typing import Any

from questions import boot_sysctls, live_sysctls
from suite import booted, differences, needs, nothing, offline, read
from testinfra.host import Host

V = dict[str, Any]


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
    """The running kernel has every declared setting."""
    nothing(differences(_expected(v["__system_sysctl"]), live_sysctls(host, v)))


@booted
@needs("kubernetes", kubelet_protect_kernel_defaults=True)
def test_kubelets_sysctls_are_live(host: Host, v: V) -> None:
    """The running kernel has the settings that the kubelet checks."""
    expected = _expected(v["__kubelet_sysctls"])
    actual = {name: read(host, f"/proc/sys/{name.replace('.', '/')}").strip() for name in expected}
    nothing(differences(expected, actual))
